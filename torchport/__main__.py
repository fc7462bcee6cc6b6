"""The command line. A command's module, and all that it imports, is imported when the command is chosen."""

import sys

from torchport.processes import path as importable

# `python -m torchport` puts the current folder first: before anything else is imported, it goes.
if (entries := importable.trusted(sys.path, started=__name__ == "__main__")) != sys.path:
    sys.path[:] = entries

import functools
import inspect
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchport import __version__, errors
from torchport.commands import terminal

if TYPE_CHECKING:
    from torchport.run import Summary

path_option = click.option(
    "--path", metavar="DIR", help="A folder with patches/ and configs/; by default torchport's own."
)


@click.group(cls=terminal.Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def cli() -> None:
    """Carries PyTorch models written for GPUs onto TPU, through torchax, without editing them."""


@cli.command()
@click.option("--model", required=True, metavar="NAME", help="A model card; `torchport models` lists them.")
@click.option("--config", required=True, metavar="FILE", help="What to make and on which machine: configs/demo.yaml.")
@click.option("--prompt", metavar="TEXT", help="What to show. Needed by the stage that encodes it.")
@click.option("--negative-prompt", metavar="TEXT", help="What to avoid.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Of the noise [42].")
@click.option("--checkpoint", metavar="DIR|REPO@REV", help="Weights in the diffusers format, or `tiny`.")
@click.option("--image", type=click.Path(path_type=Path), metavar="FILE", help="The first frame, for image-to-video.")
@click.option("--upstream-path", metavar="DIR", help="The checkout of an upstream that is no installed package.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Output folder [outputs/<run>].")
@click.option(
    "--inputs", type=click.Path(path_type=Path), metavar="DIR", help="Where earlier stages' artefacts are [--out]."
)
@click.option("--stage", default="all", show_default=True, metavar="encode|denoise|decode|all", help="What to run.")
@click.option(
    "--backend",
    type=click.Choice(["torchax", "original"]),
    default="torchax",
    show_default=True,
    help="torchax, or the original: upstream, eager, in PyTorch.",
)
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Overrides a field of the config. Repeatable.")
@click.option(
    "--cache/--no-cache", default=True, help="Keep compiled programs, and load them instead of tracing [yes]."
)
@path_option
@click.option("--distributed", is_flag=True, help="On several hosts that JAX finds: a TPU slice, Slurm, Kubernetes.")
@click.option("--coordinator", metavar="HOST:PORT", help="On several hosts: where all of them reach process 0.")
@click.option("--processes", type=click.IntRange(1), metavar="N", help="On several hosts: how many run this command.")
@click.option("--process", type=click.IntRange(0), metavar="I", help="On several hosts: which of them this is, from 0.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors and the video's path.")
@click.option("-v", "--verbose", is_flag=True, help="Print what upstream logs, too.")
def run(
    distributed: bool,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Makes a video, or runs one stage of it."""
    terminal.log_to_stderr(quiet, verbose)
    from torchport.processes import hosts
    from torchport.run import run as carry
    from torchport.task import Request

    summary = carry(Request(**options), hosts.asked(distributed, coordinator, processes, process))
    if hosts.first():
        _print_summary(summary, quiet)


@cli.command()
@path_option
def models(path: str | None) -> None:
    """Lists the model cards."""
    from torchport.config.pack import find_pack

    pack = find_pack(path)
    for name in pack.models():
        card, _ = pack.card(name)
        terminal.say(f"{name:12} {card.title}")
        terminal.say(f"{'':12} checkpoint {card.checkpoint}; strategies {', '.join(card.strategies)}")


@cli.command()
@path_option
def doctor(path: str | None) -> None:
    """Looks at this machine: devices, versions, disk, checkpoints, known-bad combinations."""
    from torchport.commands.doctor import advice, examine

    findings = examine(path)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        terminal.say(f"{finding.state:4}  {finding.what:{width}}  {finding.fact}")
    terminal.say(advice(findings, path))
    if any(finding.state == "bad" for finding in findings):
        sys.exit(1)


@cli.command()
@click.argument("id", required=False)
@click.option("--all", "everything", is_flag=True, help="Print every error, as the page docs/errors.md.")
def explain(id: str | None, everything: bool) -> None:
    """Explains an error by its id, such as TP107."""
    from torchport.commands.explain import page

    known = {kind.id: kind for kind in errors.kinds()}
    if everything:
        terminal.say(page().rstrip())
    elif id is None:
        raise errors.UnknownNameError("torchport explain", "No id is named", "Name one, such as TP107, or add --all")
    elif id.upper() not in known:
        remedy = errors.nearest(id.upper(), known)
        raise errors.UnknownNameError(f"torchport explain {id}", f"There is no error {id}", remedy, name=id)
    else:
        kind = known[id.upper()]
        terminal.say(f"{kind.id} {kind.__name__}\n\n{inspect.getdoc(kind)}")


@cli.command()
@click.option("--model", metavar="NAME", help="The model card.")
@click.option("--config", metavar="FILE", help="The job.")
@click.option("--topology", metavar="SLICE", help="A TPU slice, such as v6e:2x4, in place of the config's machine.")
@click.option("--strategy", metavar="NAME", help="The sharding rules, in place of the config's.")
@click.option("--sweep", is_flag=True, help="Compare all strategies on all meshes of the slice in one table.")
@click.option("--calibrate", is_flag=True, help="Model published step times, and fit the factor between.")
@click.option(
    "--write", type=click.Path(path_type=Path), metavar="FILE", help="Write that factor, as calibration.yaml."
)
@click.option(
    "--jobs", type=click.IntRange(1), metavar="N", help="Compilations at once [as many as there is room for]."
)
@click.option("--upstream-path", type=click.Path(path_type=Path), metavar="DIR", help="The upstream's checkout.")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Any other field of the config.")
@click.option("--scores", type=click.Choice(["bounded", "any"]), help="Whether the norms bound the scores [bounded].")
@click.option("--stage", metavar="denoise|decode|all", help="What to compile [denoise]; decoding takes many minutes.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep the compiler's dump here.")
@click.option("--report", type=click.Path(path_type=Path), metavar="FILE", help="Write the plan as a page, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@path_option
def plan(report: Path | None, as_json: bool, **options: Any) -> None:
    """Tells, without a TPU, whether a job fits on a slice and how fast it should be; the exit code is 1 if not."""
    import json

    from torchport.commands.plan import Flags, planned
    from torchport.files import folder
    from torchport.plan import report as form

    terminal.log_to_stderr()
    if report is not None:
        folder.check_writable("--report", report)
    found, lines = planned(Flags(report=report, **options))
    if report is not None:
        form.write(report, found, shlex.join(["torchport", *sys.argv[1:]]))
    terminal.say(json.dumps(found, indent=2) if as_json else "\n".join(lines))
    sys.exit(0 if found.get("fits", True) else 1)


@cli.group()
def shard() -> None:
    """Shows sharding rules and what they match."""


@shard.command("show")
@click.option("--model", required=True, metavar="NAME", help="The model card.")
@click.option("--config", metavar="FILE", help="A job; by default the published network on the strategy's own mesh.")
@click.option("--strategy", metavar="NAME", help="The sharding rules, in place of the config's.")
@click.option("--upstream-path", type=click.Path(path_type=Path), metavar="DIR", help="The upstream's checkout.")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Any other field of the config.")
@path_option
def show_rules(
    model: str,
    config: str | None,
    strategy: str | None,
    upstream_path: Path | None,
    overrides: tuple[str, ...],
    path: str | None,
) -> None:
    """Prints every rule: where it puts what, how much it matches, and bytes on each device."""
    from torchport.commands.shard import lines, request_of, shown

    place = None if upstream_path is None else str(upstream_path)
    request = request_of(model, config, strategy, path, upstream_path=place, overrides=overrides)
    terminal.say("\n".join(lines(shown(request))))


@cli.group()
def patches() -> None:
    """Lists, shows and locks patches."""


@patches.command("list")
@click.argument("names", nargs=-1)
@path_option
def list_patches(names: tuple[str, ...], path: str | None) -> None:
    """Lists the patches of some upstreams or files; all of them if none is named."""
    from torchport.commands.patches import listed
    from torchport.config.pack import find_pack

    for row in listed(find_pack(path).patches, names):
        promise = row["equivalence"] if isinstance(row["equivalence"], str) else next(iter(row["equivalence"]))
        notes = ["plumbing"] * row["plumbing"] + ["not locked"] * (not row["locked"] and row["kind"] != "op")
        noted = f"  ({', '.join(notes)})" if notes else ""
        terminal.say(f"{row['id']:36} {row['kind']:8} {promise:10} {row['target']}{noted}")


@patches.command("show")
@click.argument("id")
@path_option
def show_patch(id: str, path: str | None) -> None:
    """Shows everything about one patch, as YAML."""
    import yaml

    from torchport.commands.patches import shown
    from torchport.config.pack import find_pack

    text = yaml.safe_dump(shown(find_pack(path).patches, id), sort_keys=False)
    click.echo(text, nl=False)  # YAML escapes control characters itself


@patches.command("lock")
@click.argument("names", nargs=-1)
@click.option("--check", "only_check", is_flag=True, help="Only tell what would change, and exit 3 if anything would.")
@click.option("--upstream-path", metavar="DIR", help="The checkout of an upstream that is no installed package.")
@path_option
def lock_patches(names: tuple[str, ...], only_check: bool, upstream_path: str | None, path: str | None) -> None:
    """Records the sources under the targets as reviewed; of all upstreams if none is named."""
    from torchport.commands.check import require_applied
    from torchport.commands.patches import locked
    from torchport.config.checkout import existing
    from torchport.config.pack import find_pack

    checkout = None if upstream_path is None else existing(upstream_path)
    if checkout is not None:
        sys.path.insert(0, str(checkout))
    folder = find_pack(path).patches
    tried = functools.partial(require_applied, folder, upstream_path=checkout)
    lines = locked(folder, names, only_check, tried)
    for line in lines:
        terminal.say(line)
    terminal.say(f"{len(lines)} target(s) {'would change' if only_check else 'changed'}.")
    if only_check and lines:
        sys.exit(errors.DRIFT_EXIT_CODE)


@patches.command("schema")
def patch_schema() -> None:
    """Prints the JSON Schema of a patch file, for editors."""
    import json

    from torchport.commands.patches import schema

    terminal.say(json.dumps(schema(), indent=2))


@cli.command()
@click.argument("names", nargs=-1)
@click.option("--model", metavar="NAME", help="Check a card's patches, and run its tiny weights to see them called.")
@click.option("--upstream-path", type=click.Path(path_type=Path), metavar="DIR", help="The upstream's checkout.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "sarif", "github"]),
    default="text",
    show_default=True,
    help="Of the findings.",
)
@path_option
def check(names: tuple[str, ...], model: str | None, upstream_path: Path | None, form: str, path: str | None) -> None:
    """Tries every patch against the upstreams that are installed.

    The exit code is 0 if all is clean, else the lowest of 3 drift, 4 late or aliased, 5 not called, and 1 for any other
    finding.
    """
    from torchport.commands import check as command
    from torchport.config.checkout import existing
    from torchport.config.pack import find_pack

    if sys.stderr.isatty():  # bars; where nobody waits, the findings are all that is written
        terminal.log_to_stderr()
    pack, called = find_pack(path), None
    if model is not None:
        card, _ = pack.card(model)
        names = (*names, *dict.fromkeys(["torchax", *(name for stage in card.patches.values() for name in stage)]))

        def called() -> list[command.Finding]:
            return command.demo_called(pack, model, upstream_path)

    folder = None if upstream_path is None else existing(upstream_path)
    findings = command.check(pack.patches, names, folder, called)
    terminal.say(command.FORMATS[form](findings))
    sys.exit(command.exit_code(findings))


@cli.command()
@click.option("--model", metavar="NAME", help="A model card; with --config it says head size, heads and tokens.")
@click.option("--config", metavar="FILE", help="What to make; --topology takes the place of its machine.")
@click.option("--topology", required=True, metavar="NAME", help="The TPU slice, such as v6e:2x4. It need not be there.")
@click.option(
    "--implementation",
    type=click.Choice(["splash_transposed", "splash"]),
    default="splash_transposed",
    show_default=True,
    help="The kernel: torchport's own, or JAX's.",
)
@click.option(
    "--scores",
    type=click.Choice(["bounded", "any", "both"]),
    default="both",
    show_default=True,
    help="Whether a bound of the scores is known; JAX's kernel has no use for one.",
)
@click.option("--tokens", type=click.IntRange(1), metavar="N", help="Queries, and as many keys.")
@click.option("--heads", type=click.IntRange(1), metavar="N", help="Heads of one device, without a model.")
@click.option("--head-size", type=click.IntRange(1), metavar="N", help="Features of a head, without a model.")
@click.option("--upstream-path", metavar="DIR", help="The checkout of an upstream that is no installed package.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Overrides a field of the config. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--write", "file", type=click.Path(path_type=Path), metavar="FILE", help="Put the best into this table.")
@path_option
def tune(implementation: str, scores: str, as_json: bool, file: Path | None, **options: Any) -> None:
    """Tries tiles of an attention kernel: by time where the chip is, else by the compiler's schedule."""
    terminal.log_to_stderr()
    import json

    from torchport.tune import tune as command
    from torchport.tune.workload import asked

    job = asked(**options)
    if file is not None:
        command.check_writable(file)
    results = command.tune_all(job, implementation, scores)
    if as_json:
        terminal.say(json.dumps([row for result in results for row in command.rows(result)], indent=2))
    else:
        terminal.say("\n\n".join("\n".join(command.lines(result)) for result in results))
    if file is not None:
        command.write(file, results)


def _print_summary(summary: "Summary", quiet: bool) -> None:
    made = summary.video or summary.folder
    if quiet:
        terminal.say(str(made))
        return
    terminal.say("")
    stages = dict.fromkeys(key.split()[0] for key in summary.seconds)
    for stage in stages:
        parts = {key.split()[1]: seconds for key, seconds in summary.seconds.items() if key.startswith(stage + " ")}
        shown = ", ".join(f"{verb} {seconds:.1f}" for verb, seconds in parts.items() if seconds >= 0.05)
        terminal.say(f"{stage:8} {sum(parts.values()):7.1f} s   ({shown})")
    if summary.steps:
        terminal.say(f"{'':8} {summary.seconds['denoise run'] / summary.steps:7.2f} s/step")
    terminal.say(f"\n{made}")


def main() -> None:
    """Runs the command line; every refusal is one line and an exit code, never a traceback."""
    sys.exit(terminal.run(cli))


if __name__ == "__main__":
    main()
