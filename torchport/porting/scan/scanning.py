"""A scan from the first step to the last, and which shipped patches take care of which findings.

Patches are read from their YAML, and applied to nothing. A patch takes care of a finding if it replaces the function or
the statements that it stands in; if it replaces what the code there uses; or if it closes every way from the entry to
it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import gc
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torchport import patch
from torchport.errors import BadValueError, UnknownNameError, nearest
from torchport.files import folder
from torchport.patch.rewriting import pattern
from torchport.porting.scan.codebase import Class, Codebase, CodeUnit, Module, Source, Unread, read_sources
from torchport.porting.scan.detect import AUTOCAST, MAKES_GROUP, Site, is_kernel, sites
from torchport.porting.scan.finding import BY_KIND, Absent, Reach, ScanFinding, ScanReport
from torchport.porting.scan.reach import Closed, Reached, roots
from torchport.porting.scan.syntax import MODULE, Act, Event, chain_of
from torchport.source.modules import is_there
from torchport.source.parsing import tree_of

_TRAINS = {
    "train", "trainer", "training", "finetune", "finetuner", "finetuning", "tuner", "optim", "optimizer",
    "optimizers", "loss", "losses", "backward", "pretrain",
}  # fmt: skip
_LONGEST = 90
_DEEPEST = 50_000
"""Calls inside each other: the parser nests 3000 levels, and the deepest walk takes some calls for each."""


def scan(path: Path, entries: Sequence[str] = (), folders: Sequence[Path] = ()) -> ScanReport:
    """Returns what in a codebase will not port.

    Args:
        path: Its folder, or one file.
        entries: What is run of it, as `pkg.mod:Class` or `pkg.mod:function`.
        folders: The folders of patches, from the top.
    """
    if not folder.has_file(path) and not folder.has_folder(path):
        raise BadValueError(f"torchport scan {path}", "There is no such folder or file", "Name the codebase's folder")
    with _without_collection():
        sources, unread = read_sources(path)
        if not sources and not unread:
            raise BadValueError(f"torchport scan {path}", "There is no Python file in it", "Name the codebase's folder")
        for entry in entries:
            _check_read(path, entry, unread)
        with _deep():
            report = _scan(path, sources, entries, folders)
    findings = sorted([*report.findings, *(_of_unread(path, file) for file in unread)], key=_place)
    return dataclasses.replace(report, findings=tuple(findings))


def _place(finding: ScanFinding) -> tuple[str, int, str]:
    return finding.file, finding.line, finding.rule


@contextlib.contextmanager
def _deep() -> Iterator[None]:
    """Lets Python call itself as deep as its parser nests: a sum of a thousand terms is a thousand levels."""
    was = sys.getrecursionlimit()
    sys.setrecursionlimit(max(was, _DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(was)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Holds Python's garbage collector: it would walk all syntax trees again and again, a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _scan(path: Path, sources: list[Source], entries: Sequence[str], folders: Sequence[Path]) -> ScanReport:
    codebase = Codebase(sources, _package_of(path))
    chosen = [_entry(codebase, entry) for entry in entries]
    patches = _read_patches(codebase, folders)
    before, after = Reached(codebase), Reached(codebase, patches.closed())
    for reached in (before, after):
        for item in chosen:
            reached.start(*item)
        if not chosen:  # whatever is not training may run
            reached.admit(unit for unit in codebase.units if not _trains(unit))
    training = Reached(codebase, trains=True)
    (training.start if chosen else training.admit)(unit for unit in codebase.units if _trains(unit))
    known = [(site, _reach(site, before, training, bool(chosen))) for site in _all_sites(codebase)]
    known = [(site, reach) for site, reach in known if not site.if_none or reach != "off"]
    cover = Coverage(patches, before, after, [site for site, _ in known])
    findings = [
        _finding(path, site, reach, ids) for (site, reach), ids in zip(known, _covered(known, cover), strict=True)
    ]
    lines = sum(source.lines for source in sources)
    return ScanReport(
        tuple(findings), len(sources), lines, tuple(entries), tuple(_absent(path, codebase, patches, before))
    )


def _absent(path: Path, codebase: Codebase, patches: Patches, reached: Reached) -> Iterator[Absent]:
    """Yields the packages that code on the path imports without condition, and that nobody has here, each once."""
    beside = path.parent if folder.has_file(path) else path
    known = {name.partition(".")[0] for name in codebase.modules}
    for unit in codebase.units:
        for event in unit.body.events:
            node = event.node
            if not isinstance(node, ast.Import | ast.ImportFrom) or event.guards:
                continue
            if not reached.leads_to(unit, event.guards, node.lineno):
                continue
            for package in dict.fromkeys(_imported(node)):
                here = is_kernel(package) or folder.has_file(beside / f"{package}.py") or is_there(package)
                stubbed = any(unit.module.name in importers for _, importers in patches.stubs.get(package, ()))
                if package not in known and not here and not stubbed and not folder.has_folder(beside / package):
                    known.add(package)
                    yield Absent(package, _named(path, unit.module.source.path), node.lineno)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yields the packages that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif not node.level and node.module:
        yield node.module.partition(".")[0]


def _finding(path: Path, site: Site, reach: Reach, ids: tuple[str, ...]) -> ScanFinding:
    file = _named(path, site.unit.module.source.path)
    text = _text(site.node)
    return ScanFinding(BY_KIND[site.kind], file, site.line, site.unit.target, text, site.uses, reach, ids, site.sure)


def _all_sites(codebase: Codebase) -> list[Site]:
    found = [site for unit in codebase.units for site in sites(codebase, unit, _tensor_attributes(codebase, unit))]
    known = _helpers(codebase, found)
    there = {(site.unit, site.kind) for site in found}
    found += [
        site
        for site in _calls_of_helpers(codebase, known)
        if (site.unit, site.kind) not in there or site.kind == "parallel-state"
    ]
    wanted = {
        f"{unit.module.name}.{unit.name}": unit
        for unit in (*known, *(site.unit for site in found))
        if unit.owner is None and unit.name != MODULE
    }
    return found + list(_aliases(codebase, wanted))


def _helpers(codebase: Codebase, sites: Iterable[Site]) -> set[CodeUnit]:
    """Returns the helpers of a codebase over its process groups.

    A helper is a function of a module, or a method of an autograd function, that calls torch.distributed; or one of the
    same module that leads there: by a call, by making an object whose constructor does, or by a global that such a
    function sets.
    """
    direct = {site.unit for site in sites if site.kind == "process-group"}
    result: set[CodeUnit] = set()
    for module in {unit.module for unit in direct}:
        result |= _helpers_of(codebase, module, direct)
    return result


def _helpers_of(codebase: Codebase, module: Module, direct: set[CodeUnit]) -> set[CodeUnit]:
    candidates = [unit for unit in module.units.values() if _may_help(codebase, unit)]
    known = {unit for unit in candidates if unit in direct}
    makers = {kind for kind in module.classes.values() if _constructs(codebase, kind, direct)}
    names = {unit: _names_in(unit) for unit in candidates}
    while True:
        reached = {unit.name.partition(".")[0] for unit in known} | {maker.name for maker in makers}
        reached |= {name for unit in known for name in _globals_set(unit)}
        more = {unit for unit in candidates if unit not in known and names[unit] & reached}
        if not more:
            return known
        known |= more


def _may_help(codebase: Codebase, unit: CodeUnit) -> bool:
    if unit.name == MODULE or isinstance(unit.body.node, ast.ClassDef):
        return False
    return unit.owner is None or any("autograd" in base for base in unit.owner.bases)


def _constructs(codebase: Codebase, kind: Class, direct: set[CodeUnit]) -> bool:
    """Returns whether making an object of a class leads to torch.distributed."""
    pending = [unit for name in ("__init__", "__post_init__") if (unit := codebase.method(kind, name))]
    if any("autograd" in base for base in kind.bases):
        return False
    seen = set(pending)
    while pending:
        unit = pending.pop()
        if unit in direct:
            return True
        for event in unit.body.events:
            chain = chain_of(event.node.func) if event.act is Act.CALL and isinstance(event.node, ast.Call) else ()
            called = codebase.method(kind, chain[1]) if len(chain) == 2 and chain[0] == unit.first else None
            if called is not None and called not in seen:
                seen.add(called)
                pending.append(called)
    return False


def _names_in(unit: CodeUnit) -> set[str]:
    """Returns the first names of all that a function reads or calls."""
    names = set()
    for event in unit.body.events:
        node = event.node.func if event.act is Act.CALL and isinstance(event.node, ast.Call) else event.node
        if event.act in (Act.CALL, Act.CHAIN):
            names |= set(chain_of(node)[:1])
    return names


def _globals_set(unit: CodeUnit) -> Iterator[str]:
    """Yields the globals that a function declares as its own to set."""
    for node in ast.walk(unit.body.node):
        if isinstance(node, ast.Global):
            yield from node.names


def _calls_of_helpers(codebase: Codebase, known: set[CodeUnit]) -> Iterator[Site]:
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


def _aliases(codebase: Codebase, wanted: dict[str, CodeUnit]) -> Iterator[Site]:
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


def _tensor_attributes(codebase: Codebase, unit: CodeUnit) -> frozenset[str]:
    """Returns the parameters and buffers that a network's class registers."""
    if unit.owner is None or not unit.module.uses_torch:
        return frozenset()
    known: frozenset[str] | None = unit.owner.__dict__.get("_tensors")
    if known is None:
        init = codebase.method(unit.owner, "__init__")
        known = unit.owner.__dict__["_tensors"] = frozenset(_registered(init) if init is not None else ())
    return known


def _registered(init: CodeUnit) -> Iterator[str]:
    for event in init.body.events:
        node, value = event.node, event.value
        if isinstance(node, ast.Call) and chain_of(node.func)[-1:] in (("register_buffer",), ("register_parameter",)):
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))
        elif isinstance(node, ast.Attribute) and isinstance(value, ast.Call) and event.act is Act.ASSIGN:
            yield from [node.attr] if chain_of(value.func)[-1:] == ("Parameter",) else []


def _package_of(path: Path) -> str:
    """Returns the dotted name of a folder that lies inside a package, or is one; else nothing."""
    names: list[str] = []
    current = path.resolve()
    current = current.parent if current.is_file() else current
    while folder.has_file(current / "__init__.py"):
        names.insert(0, current.name)
        current = current.parent
    return ".".join(names)


def _entry(codebase: Codebase, entry: str) -> tuple[list[CodeUnit], list[Class]]:
    """Returns where a named entry begins."""
    place = f"--entry {entry}"
    module_name, colon, name = entry.partition(":")
    if not colon or not name:
        raise BadValueError(place, "It is no name of a class or function", "Write it as package.module:Class")
    module = codebase.modules.get(module_name)
    if module is None:
        fact = f"The codebase has no module '{module_name}'"
        raise UnknownNameError(place, fact, _some(module_name, codebase.modules), name=module_name)
    known = codebase.definition(codebase.canonical(f"{module_name}.{name}"))
    if isinstance(known, Class):
        return roots(codebase, known)
    if isinstance(known, CodeUnit):
        return [known], []
    raise UnknownNameError(
        place, f"'{module_name}' has no '{name}'", nearest(name, module.classes or module.units), name=name
    )


def _check_read(path: Path, entry: str, unread: Sequence[Unread]) -> None:
    """Refuses an entry whose file could not be read."""
    names = "/".join(entry.partition(":")[0].split("."))
    for file in unread:
        if f"/{file.path}".endswith((f"/{names}.py", f"/{names}/__init__.py")):
            fact = f"Its file {_named(path, file.path)}:{file.line} could not be read. {file.why}"
            raise BadValueError(f"--entry {entry}", fact, f"Mend the file: torchport explain {file.rule}")


def _some(name: str, names: Iterable[str]) -> str:
    """Returns a remedy that names the modules that end alike; a codebase has too many to list."""
    last = name.rpartition(".")[2]
    close = sorted(name for name in names if name.rpartition(".")[2] == last)
    return nearest(name, close) if close else "Name a module of the folder that is scanned, as package.module:Class"


def _trains(unit: CodeUnit) -> bool:
    """Returns whether a function is there for training, by the words of its name and file."""
    text = f"{unit.module.source.path} {unit.name}"
    return any(word.lower() in _TRAINS for word in re.findall(r"[A-Z]?[a-z]+", text))


def _reach(site: Site, before: Reached, training: Reached, chosen: bool) -> Reach:
    if before.leads_to(site.unit, site.guards, site.line, site.if_none):
        return "path" if chosen else "unknown"
    return "training" if training.leads_to(site.unit, site.guards, site.line, site.if_none) else "off"


def _covered(known: Sequence[tuple[Site, Reach]], cover: Coverage) -> Iterator[tuple[str, ...]]:
    """Yields the patches of each finding; of an alias those of the function, if all that is found there has one."""
    covered = [cover.ids(site) for site, _ in known]
    by_name: dict[str, list[tuple[str, ...]]] = {}
    for (site, _), ids in zip(known, covered, strict=True):
        if site.kind != "alias":
            by_name.setdefault(f"{site.unit.module.name}.{site.unit.name}", []).append(ids)
    for (site, _), ids in zip(known, covered, strict=True):
        some = by_name.get(site.uses, [cover.alone]) if site.kind == "alias" else [ids]
        yield tuple(dict.fromkeys(item for part in some for item in part)) if all(some) else ()


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.alias):
        return node.name
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _named(root: Path, below: str) -> str:
    return folder.as_named(root if folder.has_file(root) else root / below)


def _of_unread(root: Path, unread: Unread) -> ScanFinding:
    return ScanFinding(unread.rule, _named(root, unread.path), unread.line, "", unread.why, reach="unknown")


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


def _read_patches(codebase: Codebase, folders: Sequence[Path]) -> Patches:
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
    """What patches do for the findings of one entry."""

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

    def ids(self, site: Site) -> tuple[str, ...]:
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
        return tuple(dict.fromkeys(item for some in ids for item in some)) if called and all(ids) else ()

    def _closing(self, unit: CodeUnit) -> Iterator[str]:
        """Yields the patches on the ways back from a function to the entry, the nearest of each way."""
        seen, pending, found = {unit}, [unit], False
        while pending:
            callee = pending.pop()
            for caller, line in sorted(
                self._before.callers.get(callee, ()), key=lambda call: (call[0].target, call[1])
            ):
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
