"""`torchport new patch|model`: writes drafts into the folder of a pack, and says what is left to fill in."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from torchport.commands import options, terminal
from torchport.config.checkout import checkout_folder, on_path
from torchport.config.pack import DERIVED
from torchport.errors import BadValueError

out = click.option("--out", required=True, type=options.FILE, metavar="DIR", help="The folder of your pack.")


@terminal.group("new")
def command() -> None:
    """Writes drafts into a pack: a patch to fill in, or the card of a model."""


@command.command("patch")
@click.argument("target", metavar="PACKAGE.MODULE:NAME")
@click.option(
    "--kind",
    required=True,
    type=click.Choice(["replace", "wrap", "rewrite", "op", "stub", "value"]),
    help="What kind of patch: docs/patches.md. A value is refused, with the functions that read it.",
)
@out
@options.upstream_path
@click.option("--file", metavar="NAME", help="Its files in patches/<package>/, without endings [the module's name].")
@click.option("--line", type=click.IntRange(1), metavar="N", help="For rewrite: the statement's line in upstream.")
@click.option("--importer", "importers", multiple=True, metavar="MODULE", help="For stub: who imports it. Repeatable.")
@click.option("--why", metavar="TEXT", help="What fails without it.")
def new_patch(out: Path, upstream_path: str | None, **given: Any) -> None:
    """Writes an entry, a function with the target's parameters, a test that fails until both are filled in, a lock row.

    Upstream's source is read, and nothing of it is imported. Nothing that is there already is written over.
    """
    from torchport.porting import draft
    from torchport.porting.draft import PatchDraftRequest, home

    request = PatchDraftRequest(**_given_flags(given))
    checkout = None if upstream_path is None else checkout_folder(upstream_path)
    with on_path(checkout):
        drafted = draft.write_draft(request, home.home(out, draft.upstreams(request, checkout)))
    listing = f"List {request.names} under 'patches' of the card, for the stages that need it"
    left = [f"fill in     {step}." for step in (*drafted.left, listing)]
    last = f"then        {home.check_command(out, upstream_path, request.package)}"
    terminal.say([*drafted.lines, *left, last])


@command.command("model")
@click.argument("name")
@click.option(
    "--entry",
    "entries",
    multiple=True,
    metavar="[COMPONENT=]PACKAGE.MODULE:CLASS",
    help="A class of the model, the network first. Repeatable.",
)
@click.option(
    "--pipeline", metavar="diffusers:CLASS", help="A pipeline of diffusers, in place of --entry: the card is derived."
)
@out
@options.upstream_path
@click.option("--checkpoint", metavar="DIR|REPO@REV", help="The published weights.")
def new_model(out: Path, upstream_path: str | None, pipeline: str | None, **given: Any) -> None:
    """Writes a model card, its demo's config and its stages; `tiny:` has small values for the arguments of its classes.

    Upstream's source is read, and nothing of it is imported. For --pipeline, though, upstream's code runs, with tiny
    weights. Nothing that is there already is written over.
    """
    from torchport.porting.draft import home, model

    has_entries = bool(given["entries"])
    if has_entries == (pipeline is not None):  # both are given, or neither
        raise BadValueError("torchport new model", "It takes --entry or --pipeline", "Name one of the two")
    if pipeline is not None:
        from torchport.porting import derive

        if not pipeline.startswith(DERIVED):
            fact = f"A pipeline has '{DERIVED}' before its name"
            raise BadValueError(f"--pipeline {pipeline}", fact, f"Write {DERIVED}{pipeline}")
        for flag, value in {"--upstream-path": upstream_path, "--checkpoint": given["checkpoint"]}.items():
            if value is not None:
                raise BadValueError(f"{flag} {value}", "It is for --entry", "Leave it out")
        pieces = derive.pieces(pipeline, given["name"])
        lines = home.home(out, upstreams=[]).write(pieces)  # no checkout; installed packages are refused anyway
        job = f"configs/{given['name']}_demo.yaml"
        words = ["torchport", "run", "--path", str(out), "--model", given["name"], "--config", job]
        terminal.say([*lines, f"then        {shlex.join([*words, '--prompt', 'A cat walks'])}"])
        return
    request = model.ModelDraftRequest(**_given_flags(given))
    checkout = None if upstream_path is None else checkout_folder(upstream_path)
    with on_path(checkout):  # its source is found by the names of its modules
        lines = model.write(request, home.home(out, model.upstreams(request, checkout)), checkout)
    terminal.say([*lines, f"then        {home.check_command(out, upstream_path)}"])


def _given_flags(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the flags that the user gave; the others keep the defaults of a draft request."""
    return {name: value for name, value in given.items() if value is not None}
