"""`torchport new patch|model`: writes drafts into the folder of a pack, and says what is left to fill in."""

from __future__ import annotations

import shlex
from pathlib import Path

from torchport.config.checkout import existing, on_path
from torchport.new import folder, model, patch
from torchport.new.draft import Wish


def new_patch(wish: Wish, out: Path, upstream_path: Path | None) -> list[str]:
    """Writes a patch that is to be filled in; returns the lines to print.

    Args:
        wish: What is wanted.
        out: The folder of the pack.
        upstream_path: The checkout of upstream, if it is not installed.

    Raises:
        OutputError: The folder is an upstream's.
        TorchportError: The target cannot be patched, or the patch is there already.
    """
    checkout = None if upstream_path is None else existing(upstream_path)
    with on_path(checkout):
        home = folder.home(out, patch.upstreams(wish, checkout))
        one = patch.write(wish, home)
    listed = f"List {wish.names} under 'patches' of the card, for the stages that need it"
    left = [f"fill in     {each}." for each in (*one.left, listed)]
    return [*one.lines, *left, f"then        {check(out, upstream_path, wish.package)}"]


def new_model(wish: model.Wish, out: Path, upstream_path: Path | None) -> list[str]:
    """Writes a model card, its job and its family, which are to be filled in; returns the lines to print.

    Args:
        wish: What is wanted.
        out: The folder of the pack.
        upstream_path: The checkout of upstream, if it is not installed.

    Raises:
        OutputError: The folder is an upstream's.
        TorchportError: There is no such class, or a file is there already.
    """
    checkout = None if upstream_path is None else existing(upstream_path)
    with on_path(checkout):
        home = folder.home(out, model.upstreams(wish, checkout))
        lines = model.write(wish, home, checkout)
    return [*lines, f"then        {check(out, upstream_path)}"]


def check(out: Path, upstream_path: Path | None, *names: str) -> str:
    """Returns the command that checks what was written."""
    flags = ["--upstream-path", str(upstream_path)] if upstream_path is not None else []
    return shlex.join(["torchport", "check", "--static", *names, "--path", str(out), *flags])
