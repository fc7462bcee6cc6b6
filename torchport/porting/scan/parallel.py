"""Helpers of a codebase over its process groups, and who calls them.

A helper is a function of a module, or a method of an autograd function, that calls torch.distributed; or one of the
same module that leads there: by a call, by making an object whose constructor does, or by a global that such a
function sets.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from torchport.porting.scan.codebase import Class, Codebase, Module, Unit
from torchport.porting.scan.context import Site
from torchport.porting.scan.syntax import MODULE, Act, Event, chain_of


def helpers(codebase: Codebase, sites: Iterable[Site]) -> set[Unit]:
    """Returns the helpers of a codebase."""
    direct = {site.unit for site in sites if site.kind == "process-group"}
    result: set[Unit] = set()
    for module in {unit.module for unit in direct}:
        result |= _helpers_of(codebase, module, direct)
    return result


def _helpers_of(codebase: Codebase, module: Module, direct: set[Unit]) -> set[Unit]:
    candidates = [unit for unit in module.units.values() if _may_help(codebase, unit)]
    known = {unit for unit in candidates if unit in direct}
    makers = {one for one in module.classes.values() if _constructs(codebase, one, direct)}
    names = {unit: _names_in(unit) for unit in candidates}
    while True:
        reached = {unit.name.partition(".")[0] for unit in known} | {one.name for one in makers}
        reached |= {name for unit in known for name in _globals_set(unit)}
        more = {unit for unit in candidates if unit not in known and names[unit] & reached}
        if not more:
            return known
        known |= more


def _may_help(codebase: Codebase, unit: Unit) -> bool:
    if unit.name == MODULE or isinstance(unit.body.node, ast.ClassDef):
        return False
    return unit.owner is None or any("autograd" in base for base in unit.owner.bases)


def _constructs(codebase: Codebase, one: Class, direct: set[Unit]) -> bool:
    """Returns whether making an object of a class leads to torch.distributed."""
    pending = [unit for name in ("__init__", "__post_init__") if (unit := codebase.method(one, name))]
    if any("autograd" in base for base in one.bases):
        return False
    seen = set(pending)
    while pending:
        unit = pending.pop()
        if unit in direct:
            return True
        for event in unit.body.events:
            chain = chain_of(event.node.func) if event.act is Act.CALL and isinstance(event.node, ast.Call) else ()
            called = codebase.method(one, chain[1]) if len(chain) == 2 and chain[0] == unit.first else None
            if called is not None and called not in seen:
                seen.add(called)
                pending.append(called)
    return False


def _names_in(unit: Unit) -> set[str]:
    """Returns the first names of all that a function reads or calls."""
    names = set()
    for event in unit.body.events:
        node = event.node.func if event.act is Act.CALL and isinstance(event.node, ast.Call) else event.node
        if event.act in (Act.CALL, Act.CHAIN):
            names |= set(chain_of(node)[:1])
    return names


def _globals_set(unit: Unit) -> Iterator[str]:
    """Yields the globals that a function declares as its own to set."""
    for node in ast.walk(unit.body.node):
        if isinstance(node, ast.Global):
            yield from node.names


def calls_of_helpers(codebase: Codebase, known: set[Unit]) -> Iterator[Site]:
    """Yields where another function calls a helper, once for each function and line."""
    named = {f"{unit.module.name}.{unit.name}" for unit in known}
    tops = {unit.name.partition(".")[0] for unit in known}
    for unit in codebase.units:
        if unit in known:
            continue
        lines: set[int] = set()
        for event in unit.body.events:
            if event.act is not Act.CALL or not isinstance(event.node, ast.Call) or _is_script(event):
                continue
            chain = chain_of(event.node.func)
            if not chain or (
                chain[-1] not in tops and chain[0] not in unit.module.bound and chain[0] not in unit.imports
            ):
                continue
            name = codebase.canonical(codebase.full(unit.module, chain, unit.imports))
            if name in named and event.node.lineno not in lines:
                lines.add(event.node.lineno)
                kind = "cuda-import" if unit.name == MODULE else "parallel-state"
                yield Site(unit, kind, event.node, event.guards, name)


def _is_script(event: Event) -> bool:
    """Returns whether an event stands under `if __name__ == "__main__"`, which no import runs."""
    return any(isinstance(test, ast.Compare) and chain_of(test.left) == ("__name__",) for test, _ in event.guards)


def aliases(codebase: Codebase, wanted: dict[str, Unit]) -> Iterator[Site]:
    """Yields the imports by which other modules hold functions by value.

    Args:
        codebase: The codebase.
        wanted: The functions that somebody will want to patch, by their names in full.
    """
    for module in codebase.modules.values():
        top = module.units[MODULE]
        for event in top.body.events:
            if event.act is not Act.IMPORT or not isinstance(event.node, ast.ImportFrom):
                continue
            for alias in event.node.names:
                bound = module.bound.get(alias.asname or alias.name, "")
                unit = wanted.get(codebase.canonical(bound))
                if unit is not None and unit.module is not module:
                    yield Site(top, "alias", alias, event.guards, f"{unit.module.name}.{unit.name}")
