"""`torchport tune`: which tile of an attention kernel is the best for a chip, as a table or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchport.commands import options, terminal

SIZES = "--tokens, --heads and --head-size"
"""What says as much as a model and a config."""


@terminal.command("tune")
@options.model(SIZES)
@options.config(SIZES)
@options.topology()
@click.option(
    "--implementation",
    type=click.Choice(["splash_transposed", "splash_int8", "splash"]),
    default="splash_transposed",
    show_default=True,
    help="The kernel: torchport's own, the same in eight bits, or JAX's Splash Attention.",
)
@click.option(
    "--scores",
    type=click.Choice(["bounded", "any", "both"]),
    default="both",
    show_default=True,
    help="Scores with a known bound, any scores, or both; for splash_transposed alone.",
)
@click.option("--tokens", type=click.IntRange(1), metavar="N", help="The number of queries, and of keys.")
@click.option("--heads", type=click.IntRange(1), metavar="N", help="Heads on one device, if there is no --model.")
@click.option("--head-size", type=click.IntRange(1), metavar="N", help="Features of a head, if there is no --model.")
@options.upstream_path
@options.overrides
@options.as_json
@click.option("--write", "file", type=options.FILE, metavar="FILE", help="Put the best tile into it.")
@options.paths
def command(implementation: Any, scores: str, as_json: bool, file: Path | None, **given: Any) -> None:
    """Compares tiles of an attention kernel, by time or by the compiler's static schedule.

    Head size, heads and tokens are those of --model and --config; --topology replaces the config's machine.
    """
    terminal.log_to_stderr()
    from torchport.plan import tuning
    from torchport.plan.tuning import workload_of_flags

    job = workload_of_flags(**given)
    if file is not None:
        tuning.check_writable(file)
    results = tuning.tune_all(job, implementation, scores)
    if as_json:
        terminal.say_json([row for result in results for row in tuning.rows(result)])
    else:
        terminal.say("\n\n".join("\n".join(tuning.lines(result)) for result in results))
    if file is not None:
        tuning.write(file, results)
