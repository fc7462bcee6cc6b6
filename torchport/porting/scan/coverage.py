"""Which shipped patches take care of which findings: read from their YAML, and applied to nothing.

A patch takes care of a finding if it replaces the function or the statements that it stands in; if it replaces what
the code there uses; or if it closes every way from the entry to it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torchport import patch
from torchport.patch.rewriting import pattern
from torchport.porting.scan.codebase import Codebase, CodeUnit
from torchport.porting.scan.context import Site
from torchport.porting.scan.detect import AUTOCAST, MAKES_GROUP
from torchport.porting.scan.reach import Closed, Reached
from torchport.porting.scan.syntax import Act
from torchport.source.parsing import tree_of

_GENERIC = ("torch", "torchax")
_GROUPS = ("process-group", "parallel-state", "cuda-import")


@dataclasses.dataclass
class Patches:
    """The patches that may concern a codebase."""

    #: Those that put another function in a function's place.
    by_unit: dict[CodeUnit, list[str]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    #: Those that rewrite lines of a function: first line, last line, and the id.
    by_lines: dict[CodeUnit, list[tuple[int, int, str]]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    #: Those of names outside of the codebase, such as `torch.cuda.set_device`.
    by_name: dict[str, list[str]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    #: The absent packages that are stubbed, with the modules that may import the stub.
    stubs: dict[str, list[tuple[str, frozenset[str]]]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    #: What the families beside them pass to networks, by name, each with the file that does.

    given: dict[str, str] = dataclasses.field(default_factory=dict)

    def closed(self) -> Closed:
        """Returns what they close."""
        lines = {unit: tuple((first, last) for first, last, _ in some) for unit, some in self.by_lines.items()}
        return Closed(frozenset(self.by_unit), lines, frozenset(self.given))

    def at(self, unit: CodeUnit, line: int) -> list[str]:
        """Returns the patches that take the place of a line of a function."""
        return self.by_unit.get(unit, []) + [
            id for first, last, id in self.by_lines.get(unit, ()) if first <= line <= last
        ]


def read(codebase: Codebase, folders: Sequence[Path]) -> Patches:
    """Returns the patches of a codebase's packages, and those of torch."""
    result = Patches()
    there = [Path(folder) for folder in folders if Path(folder).is_dir()]
    tops = {name.partition(".")[0] for name in codebase.modules}
    for upstream in patch.upstreams(there):
        if upstream not in (*_GENERIC, *tops):
            continue
        entries = patch.read(there, [upstream])
        for entry in entries:
            _add(result, codebase, entry)
        if upstream not in _GENERIC:
            for folder in there:
                _add_given(result, folder / upstream)
    return result


def _add(result: Patches, codebase: Codebase, entry: patch.Entry) -> None:
    if entry.stub is not None:
        result.stubs[entry.stub.package].append((entry.id, frozenset(entry.stub.importers)))
        return
    place = f"{entry.module}.{'.'.join(entry.path)}"
    known = codebase.definition(codebase.canonical(place))
    if entry.rewrite is not None and isinstance(known, CodeUnit):
        for first, last in _lines(known, entry.rewrite.match):
            result.by_lines[known].append((first, last, entry.id))
    elif entry.kind == "replace" and known is not None:
        units = (
            [known]
            if isinstance(known, CodeUnit)
            else [unit for unit in known.module.units.values() if unit.owner is known]
        )
        for unit in units:
            result.by_unit[unit].append(entry.id)
    elif known is None and entry.rewrite is None:
        result.by_name[place].append(entry.id)


def _lines(unit: CodeUnit, match: str) -> Iterator[tuple[int, int]]:
    node = unit.body.node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for run in pattern.runs(node, pattern.statements(match)):
            last = run.statements[-1]
            yield run.statements[0].lineno, last.end_lineno or last.lineno


def _add_given(result: Patches, folder: Path) -> None:
    """Notes what the families beside patches pass on by name: the keys of dictionaries, and keywords."""
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(tree_of(file)):
            keys = node.keys if isinstance(node, ast.Dict) else []
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            for name in names:
                result.given.setdefault(name, f"{folder.name}/{file.stem}")


class Coverage:
    """What patches do for the findings of one entry.

    Args:
        patches: The patches.
        before: What the entry leads to without them.
        after: What it leads to under them.
        sites: All findings.
    """

    def __init__(self, patches: Patches, before: Reached, after: Reached, sites: Iterable[Site]) -> None:
        self._patches = patches
        self._before = before
        self._after = after
        self.alone = self._makes_alone(sites)

    def _makes_alone(self, sites: Iterable[Site]) -> tuple[str, ...]:
        """Returns the patches without which a process group would be made; none if one is made under them, too."""
        ids: dict[str, None] = {}
        for site in sites:
            if site.uses.rpartition(".")[2] not in MAKES_GROUP or not self._before.leads_to(
                site.unit, site.guards, site.line
            ):
                continue
            closing = self.of_place(site)
            if not closing:
                return ()
            ids |= dict.fromkeys(closing)
        return tuple(ids)

    def of(self, site: Site) -> tuple[str, ...]:
        """Returns the ids of the patches that take care of a finding."""
        return self.of_place(site) or self.of_name(site) or (self.alone if site.kind in _GROUPS else ())

    def of_place(self, site: Site) -> tuple[str, ...]:
        """Returns the patches that replace the place of a finding, or close the ways to it."""
        direct = self._patches.at(site.unit, site.line)
        if direct:
            return tuple(dict.fromkeys(direct))
        if not self._before.leads_to(site.unit, site.guards, site.line, site.if_none):
            return ()
        if self._after.leads_to(site.unit, site.guards, site.line, site.if_none):
            return self._of_calls(site)
        return tuple(dict.fromkeys(self._closing(site.unit)))

    def _of_calls(self, site: Site) -> tuple[str, ...]:
        """Returns the patches of the function that a line hands its finding to: `self.build_mesh("cuda")`."""
        if site.kind != "cuda-device":
            return ()
        called = [unit for unit, places in self._before.callers.items() if (site.unit, site.line) in places]
        ids = [self._patches.by_unit.get(unit, []) for unit in called]
        return tuple(dict.fromkeys(one for some in ids for one in some)) if called and all(ids) else ()

    def _closing(self, unit: CodeUnit) -> Iterator[str]:
        """Yields the patches on the ways back from a function to the entry, the nearest of each way."""
        seen, pending, found = {unit}, [unit], False
        while pending:
            callee = pending.pop()
            for caller, line in sorted(self._before.callers.get(callee, ()), key=lambda one: (one[0].target, one[1])):
                ids = self._patches.at(caller, line)
                found = found or bool(ids)
                yield from ids
                if not ids and caller not in seen:
                    seen.add(caller)
                    pending.append(caller)
        if not found:  # a flag that no method sets any more, or an argument that is given
            yield from self._by_condition(seen)

    def _by_condition(self, units: set[CodeUnit]) -> Iterator[str]:
        """Yields what decides a condition on the way: a family by an argument, or a patch of what sets a flag."""
        asked = {name for unit in units for name in _asked(unit)}
        forwards = [unit for unit in units if unit.name.endswith(".forward")]
        given = {name for unit in forwards for name in _asked(unit) if name in unit.defaults}
        yield from sorted({file for name, file in self._patches.given.items() if name in given})
        for unit, ids in self._patches.by_unit.items():
            yield from ids if asked & set(_flags(unit)) else ()

    def of_name(self, site: Site) -> tuple[str, ...]:
        """Returns the patches of what a finding uses."""
        if not site.uses:
            return ()
        if site.kind == "kernel":
            stubs = self._patches.stubs.get(site.uses.partition(".")[0], [])
            return tuple(id for id, importers in stubs if site.unit.module.name in importers)
        used = site.uses
        return tuple(
            id
            for name, ids in self._patches.by_name.items()
            if name == used or (used == AUTOCAST and name.startswith(f"{AUTOCAST}."))
            for id in ids
        )


@functools.cache
def _asked(unit: CodeUnit) -> frozenset[str]:
    """Returns the names and attributes that the conditions of a function ask for."""
    tests = {id(test): test for event in unit.body.events for test, _ in event.guards}
    nodes = [node for test in tests.values() for node in ast.walk(test)]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(names | {node.id for node in nodes if isinstance(node, ast.Name)})


def _flags(unit: CodeUnit) -> Iterator[str]:
    """Yields the attributes that a function sets to a constant."""
    for event in unit.body.events:
        if event.act is Act.ASSIGN and isinstance(event.node, ast.Attribute) and isinstance(event.value, ast.Constant):
            yield event.node.attr
