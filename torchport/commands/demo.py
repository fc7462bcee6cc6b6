"""`torchport demo`: a video on this machine, and what to try next."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from torchport.commands import options, terminal
from torchport.commands.run import lines
from torchport.errors import TorchportError, UnknownNameError

CONFIG = "configs/demo.yaml"
"""The job of the demo, which is the first one in README, too."""


@terminal.command("demo")
@click.argument("prompt", default="a red disc moves right")
@click.option("--out", type=options.FILE, metavar="DIR", help="Output folder [outputs/<run>].")
def command(prompt: str, out: Path | None) -> None:
    """Makes a small video without an accelerator, and says what to try next.

    PROMPT names a colour, a shape and a direction, as in "a red disc moves right", the default.
    """
    terminal.log_to_stderr(quiet=False, verbose=False)
    from torchport.config.pack import find_pack
    from torchport.run.path import run
    from torchport.task import Request

    results = [result for _, result in find_pack().cards()]  # a card with its document, or the error of reading it
    cards = [result[0] for result in results if isinstance(result, tuple)]
    card = next((card for card in cards if card.demo == CONFIG), None)
    if card is None:
        unreadable = [result for result in results if isinstance(result, TorchportError)]
        raise unreadable[0] if unreadable else UnknownNameError("torchport demo", f"No card has {CONFIG}", "Add one")
    words = f"--model {card.model} --config {CONFIG} --prompt {shlex.quote(prompt)}"
    for line in (
        f"torchport run {words}",
        f"  {card.title}: its classes, small, with weights that draw moving shapes.",
        "  They are patched, sharded and compiled for 8 virtual devices, as the published model is for TPU chips.",
        "  It takes about a minute.",
    ):
        click.echo(line, err=True)  # an error leaves nothing but itself on stdout
    summary = run(Request(card.model, CONFIG, prompt, out=out))
    following = [
        f"torchport verify {words} --decode",
        "  Is it the picture of the original, in PyTorch?",
        f"torchport plan --model {card.model} --config configs/720p.yaml    (after: pip install 'torchport[plan]')",
        "  Does 720p fit on eight TPU chips, and how fast is it?",
        "torchport scan REPO --entry PACKAGE.MODULE:CLASS",
        "  What in your own model does not run on a TPU?",
    ]
    terminal.say([*lines(summary), "", *following])
