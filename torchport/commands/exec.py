"""`torchport exec`: somebody else's script under a model's patches."""

from __future__ import annotations

from typing import Any

import click

from torchport.commands import options, terminal


@terminal.command("exec")
@options.model
@options.upstream_path
@click.option("--patches", multiple=True, metavar="NAME", help="More patches: folder or folder/file. Repeatable.")
@options.strategy
@click.option("--mesh", metavar="A=N", help="The devices along each axis of its mesh, as dp=2,tp=4 [one device].")
@options.machine
@click.option("--attention", metavar="NAME", help="The implementation of attention [the platform's own].")
@options.strict
@options.backend
@options.paths
@click.argument("words", nargs=-1, metavar="-- SCRIPT ARGS")
def command(**given: Any) -> None:
    """Runs somebody else's script under a model's patches, unchanged: -- script.py ARGS, or -- -m pkg.module ARGS.

    Arguments, exit code, traceback and signals are the script's own. Its children call torchport.arm.
    """
    from torchport.own_code.script_process import Flags, run

    run(Flags(**given))
