"""Who holds a constant: found by the import statement that took it, as two equal literals may be one object."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchport.errors import AliasError
from torchport.patch.capture import imported_from, line_of, source_of_module
from torchport.patch.change import Placed
from torchport.patch.ledger import Record


def repair(records: Sequence[Record]) -> list[Callable[[], None]]:
    """Gives the new value to every module that has imported a constant by name.

    Returns:
        What puts the originals back.

    Raises:
        AliasError: The entry says `aliases: fail`, and there is such a module.
    """
    undos: list[Callable[[], None]] = []
    for record in records:
        change = record.change
        if isinstance(change, Placed) and change.literal and isinstance(change.slot.holder, types.ModuleType):
            home = change.slot.holder.__name__
            undos += _repaired(record, change, list(_holders(home, change.slot.name, change.slot.raw, record.late)))
    return undos


def _repaired(record: Record, change: Placed, held: list[tuple[dict[str, Any], str, str]]) -> list[Callable[[], None]]:
    entry = record.entry
    if held and entry.aliases == "fail":
        _, name, where = held[0]
        line = line_of(where.rpartition(".")[0], name, entry.path[-1])
        fact = f"{entry.target} is still held by {where} ({line})"
        remedy = "Patch that holder instead, or write 'aliases: report'"
        raise AliasError(entry.place, fact, remedy, patch=entry.id, target=entry.target)
    word = "still held by" if entry.aliases == "report" else "rebound"
    record.detail = "; ".join(f"{word} {where}" for _, _, where in held)
    return [] if entry.aliases == "report" else [_put(names, name, change.value) for names, name, _ in held]


def _put(names: dict[str, Any], name: str, value: Any) -> Callable[[], None]:
    old = names[name]
    names[name] = value

    def undo() -> None:
        if names.get(name) is value:
            names[name] = old

    return undo


def give_back(changes: Sequence[Placed]) -> None:
    """Gives the original back to every module that imported the new value while it was in force."""
    for change in changes:
        if change.literal and isinstance(change.slot.holder, types.ModuleType):
            for names, name, _ in list(_holders(change.slot.holder.__name__, change.slot.name, change.value, True)):
                names[name] = change.slot.raw


def _holders(home: str, leaf: str, value: Any, far: bool) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yields the namespaces that have a constant by an import, the name there, and `module.name`.

    Modules of other packages are looked at only if `far`: at import nobody else can have it yet.
    """
    package = home.partition(".")[0]
    for module_name, module in list(sys.modules.items()):
        near = module_name.partition(".")[0] == package
        if module_name == home or not isinstance(module, types.ModuleType) or not (near or far):
            continue
        names = vars(module)
        if not any(item is value for item in list(names.values())):
            continue
        source = source_of_module(module_name, rf"\b{re.escape(leaf)}\b")
        nodes = ast.walk(source.tree) if source else ()
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and imported_from(node, module_name, source) == home:
                for alias in node.names:
                    local = alias.asname or alias.name
                    if alias.name == leaf and names.get(local) is value:
                        yield names, local, f"{module_name}.{local}"
