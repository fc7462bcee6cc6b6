"""`torchport patches list|show|lock`: the patches of a folder, as data."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from torchport import patch
from torchport.commands import options, terminal
from torchport.config.checkout import checkout_folder
from torchport.config.pack import find_pack
from torchport.errors import DRIFT_EXIT_CODE, UnknownNameError, nearest
from torchport.files.folder import as_named
from torchport.patch.declared import versions
from torchport.patch.declared.reading import read_lock, stack_of


@terminal.group("patches")
def command() -> None:
    """Lists, shows and locks patches."""


@command.command("list")
@click.argument("names", nargs=-1)
@options.paths
def list_patches(names: tuple[str, ...], paths: tuple[str, ...]) -> None:
    """Lists the patches of the named upstreams or files, or all patches."""
    folders, lines = find_pack(paths).folders, []
    for entry in patch.read(folders, names or patch.upstreams(folders)):
        promise = entry.equivalence.written()
        word = promise if isinstance(promise, str) else next(iter(promise))
        notes = ["plumbing"] if entry.plumbing else []
        is_locked = entry.target in read_lock(entry.folder)
        if not is_locked and entry.kind != "op":  # most operators have no source in Python to lock
            notes.append("not locked")
        noted = f"  ({', '.join(notes)})" if notes else ""
        lines.append(f"{entry.id:36} {entry.kind:8} {word:10} {entry.target}{noted}  {entry.place}")
    # All of them are made by now: a lock that cannot be read is an error without a listing.
    for line in lines:
        terminal.say(line)


@command.command("show")
@click.argument("id")
@options.paths
def show_patch(id: str, paths: tuple[str, ...]) -> None:
    """Shows everything about one patch, as YAML."""
    import yaml

    text = yaml.safe_dump(details(find_pack(paths).folders, id), sort_keys=False)
    click.echo(text, nl=False)  # YAML escapes control characters itself


@command.command("lock")
@click.argument("names", nargs=-1)
@click.option(
    "--check", "only_check", is_flag=True, help="Only print what would change; exit with 3 if anything would."
)
@options.upstream_path
@options.paths
def lock_patches(names: tuple[str, ...], only_check: bool, upstream_path: str | None, paths: tuple[str, ...]) -> None:
    """Records the reviewed source of every target, of the named upstreams or of all.

    The locks of the packs that --path names are written, or torchport's own if none is named.
    """
    from torchport.commands import check, findings, static_check

    checkout = None if upstream_path is None else checkout_folder(upstream_path)
    if checkout is not None:
        sys.path.insert(0, str(checkout))
    pack = find_pack(paths)
    cards = static_check.read_cards(pack, pack.models(), findings.Report())  # a card that cannot be read is left out
    stages = check.stage_patches(pack, [card for card, _ in cards])
    check_apply = functools.partial(check.require_applied, pack.folders, upstream_path=checkout, stages=stages)
    chosen = [checked_pack.patches for checked_pack in pack.checked]
    lines = lock(pack.folders, names, only_check, check_apply, chosen)
    for line in lines:
        terminal.say(line)
    terminal.say(f"{len(lines)} target(s) {'would change' if only_check else 'changed'}.")
    if only_check and lines:
        sys.exit(DRIFT_EXIT_CODE)


@command.command("schema")
def _print_schema() -> None:
    """Prints the JSON Schema of a patch file, as `torchport schema patch` does."""
    from torchport.commands.schema import schema

    terminal.say_json(schema("patch"))


def details(folders: patch.Folders, key: str) -> dict[str, Any]:
    """Returns all fields of a patch, its packages' versions and its rows in the lock; raises for an unknown id."""
    versions.installed.cache_clear()
    entries = {entry.id: entry for entry in patch.read(folders, patch.upstreams(folders))}
    if key not in entries:
        raise UnknownNameError("torchport patches show", f"No patch '{key}'", nearest(key, entries))
    entry = entries[key]
    fields = entry.model_dump(mode="json", exclude_defaults=True)
    installed = {name: versions.installed(name) for name in entry.fits}
    lock = read_lock(entry.folder).get(entry.target)
    rows = [row.seen_at() for row in lock.rows] if lock else []
    extras = {"equivalence": entry.equivalence.written(), "installed": installed, "locked_at": rows}
    return {**fields, **extras, "place": entry.place}


def lock(
    folders: patch.Folders,
    names: Sequence[str] = (),
    check: bool = False,
    check_apply: Callable[[Sequence[str]], None] | None = None,
    chosen: Sequence[Path] | None = None,
) -> list[str]:
    """Writes the locks of whole upstreams; returns a line for each target that is new, changed or dropped.

    Args:
        names: Upstreams, or files of them: their whole upstreams are locked. All upstreams if empty.
        check: Whether nothing is written.
        check_apply: Called with upstreams before a lock is written; raises if their patches cannot be applied.
        chosen: The folders whose patches are locked; None: all of `folders`.
    """
    from torchport.patch.source import drift  # reads upstreams' source, which listing does not wait for

    versions.installed.cache_clear()  # packages may have changed since this process began
    for name in names:
        patch.read(folders, [name])  # raises if there is no such file
    chosen = stack_of(folders) if chosen is None else chosen
    upstreams = sorted({name.partition("/")[0] for name in names}) or patch.upstreams(chosen)
    if not upstreams:  # the packs have cards alone
        return []
    entries = [entry for entry in patch.read(folders, upstreams) if entry.folder.parent in chosen]
    absent = [name for name in upstreams if not any(entry.upstream == name for entry in entries)]
    if names and absent:
        fact = f"There are no patches for '{absent[0]}' in {', '.join(map(as_named, chosen))}"
        raise UnknownNameError(f"torchport patches lock {absent[0]}", fact, "Name the pack that has them with --path")
    lines = drift.lock(entries, write=False)
    if lines and not check:
        if check_apply is not None:
            check_apply(upstreams)
        drift.lock(entries)
    return lines
