"""A scan from the first step to the last, and which shipped patches take care of which findings.

Patches are read from their YAML, and applied to nothing. A patch takes care of a finding if it replaces the function or
the statements that it stands in; if it replaces what the code there uses; or if it closes every way from the entry to
it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
import operator
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torchport import patch
from torchport.errors import BadValueError, UnknownNameError, nearest
from torchport.files import folder
from torchport.patch import rewriting
from torchport.porting.scan import BY_KIND, GUARDS, Absent, Only, Reach, ScanFinding, ScanReport
from torchport.porting.scan.codebase import Class, Codebase, CodeUnit, Module, Unread, find_sources, recursion
from torchport.porting.scan.detect import AUTOCAST, MAKES_GROUP, FunctionContext, Site, is_kernel, sites, text_of
from torchport.porting.scan.facts import Called
from torchport.porting.scan.reach import Closed, Reached, gathered, roots
from torchport.porting.scan.syntax import MODULE, Act, Body, chain_of
from torchport.progress import note, track, waiting
from torchport.source.bindings import Function
from torchport.source.parsing import is_there, tree_of

_TRAINS = {
    "train", "trainer", "training", "finetune", "finetuner", "finetuning", "tuner", "optim", "optimizer",
    "optimizers", "loss", "losses", "backward", "pretrain",
}  # fmt: skip
_NOTED = 250
"""Files after which a log says how far the scan is."""
_PLACE = operator.attrgetter("file", "line", "rule")
_DEEPEST = 50_000
"""Calls inside each other: the parser nests 3000 levels, and the deepest walk takes some calls for each."""


def scan(path: Path, entries: Sequence[str] = (), folders: Sequence[Path] = ()) -> ScanReport:
    """Returns what in a codebase will not port, or raises; `entries` (`pkg.mod:name`) are where a run of it begins."""
    if not folder.has_file(path) and not folder.has_folder(path):
        raise BadValueError(f"torchport scan {path}", "There is no such folder or file", "Name the codebase's folder")
    sources, unread = find_sources(path)
    if not sources and not unread:
        raise BadValueError(f"torchport scan {path}", "There is no Python file in it", "Name the codebase's folder")
    codebase = Codebase(sources, _package_of(path))
    codebase.unread += unread
    # A sum of a thousand terms is a thousand levels.
    with _without_collection(), recursion(max(sys.getrecursionlimit(), _DEEPEST)):
        found = _read(codebase)
        with waiting("scan: what runs"):
            report = _scan(path, codebase, entries, folders, found)
    left = [ScanFinding(file.rule, _named(path, file.path), file.line, "", file.why) for file in codebase.unread]
    return dataclasses.replace(report, findings=tuple(sorted([*report.findings, *left], key=_PLACE)))


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Turns Python's garbage collector off: to walk all syntax trees again and again takes a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _scan(
    path: Path, codebase: Codebase, entries: Sequence[str], folders: Sequence[Path], found: list[Site]
) -> ScanReport:
    """Returns the report of a codebase that was read: what runs of it, and which patches cover the findings there."""
    for entry in entries:
        _check_read(path, entry, codebase.unread)
    chosen = [_entry(codebase, entry) for entry in entries]
    patches = _read_patches(codebase, folders)
    unpatched, patched = Reached(codebase), Reached(codebase, patches.closed())
    without = {only: Reached(codebase, without=only) for only in GUARDS}
    for reached in (unpatched, patched, *without.values()):
        for item in chosen:
            reached.start(*item)
        if not chosen:  # whatever is not training may run
            reached.admit(unit for unit in codebase.units if not _trains(unit))
    training = Reached(codebase, trains=True)
    (training.start if chosen else training.admit)(unit for unit in codebase.units if _trains(unit))
    known = [(site, _reach(site, unpatched, training, bool(chosen))) for site in _all_sites(codebase, found)]
    known = [(site, reach) for site, reach in known if not site.if_none or reach != "off"]
    cover = _Coverage(patches, unpatched, patched, [site for site, _ in known])
    asking = _callers_without_group((site for site, _ in known), without["process-group"]) if chosen else None
    findings = [
        _finding(path, site, reach, ids, _runs_under(site, reach, without, asking))
        for (site, reach), ids in zip(known, _covered(known, cover), strict=True)
    ]
    absent = tuple(_absent(path, codebase, patches, unpatched))
    return ScanReport(tuple(findings), codebase.files, codebase.lines, tuple(entries), absent)


def _read(codebase: Codebase) -> list[Site]:
    """Reads all files, notes the facts of each function, and returns what is found in each function alone."""
    found: dict[CodeUnit, list[Site]] = {}
    for number, module in enumerate(track(codebase.read(), "scan", "file", len(codebase.sources)), 1):
        for unit in module.units.values():
            body = codebase.written(unit)
            context = FunctionContext(codebase, unit, body)
            found[unit] = list(sites(context, body))
            unit.facts = gathered(codebase, unit, body, context.terms)
        module.drop_syntax()
        if number % _NOTED == 0:
            note(f"scan: {number} of {len(codebase.sources)} files, {sum(map(len, found.values()))} findings so far")
    return [site for unit in codebase.units for site in found[unit]]


def _absent(path: Path, codebase: Codebase, patches: Patches, reached: Reached) -> Iterator[Absent]:
    """Yields each package that code on the path imports without condition, and that is not installed here."""
    beside = path.parent if folder.has_file(path) else path
    known = {name.partition(".")[0] for name in codebase.modules}
    for unit in codebase.units:
        for step in unit.facts.imports:
            if not step.always or not reached.leads_to(unit, step.conditions, step.line):
                continue
            for package in step.packages:
                here = is_kernel(package) or folder.has_file(beside / f"{package}.py") or is_there(package)
                stubbed = any(unit.module.name in importers for _, importers in patches.stubs.get(package, ()))
                if package not in known and not here and not stubbed and not folder.has_folder(beside / package):
                    known.add(package)
                    yield Absent(package, _named(path, unit.module.source.path), step.line)


def _runs_under(site: Site, reach: Reach, without: dict[Only, Reached], asking: set[str] | None) -> Only:
    """Returns what a finding needs to run, `process-group` or `cuda`; empty if it runs without them. `asking` are the
    functions that call torch.distributed even without a group; None without an entry.
    """
    if reach not in ("path", "unknown"):
        return ""
    if site.kind == "parallel-state" and asking is not None and site.uses not in asking:
        return "process-group"
    return next((only for only, reached in without.items() if not reached.shows(site)), "")


def _callers_without_group(sites: Iterable[Site], alone: Reached) -> set[str]:
    """Returns the full names of functions that lead to a call of torch.distributed without a process group."""
    pending = [site.unit for site in sites if site.kind == "process-group" and alone.shows(site)]
    seen = set(pending)
    while pending:
        more = {caller for caller, _ in alone.callers.get(pending.pop(), ())} - seen
        seen |= more
        pending += more
    return {f"{unit.module.name}.{unit.name}" for unit in seen}


def _finding(path: Path, site: Site, reach: Reach, ids: tuple[str, ...], only: Only) -> ScanFinding:
    file, rule = _named(path, site.unit.module.source.path), BY_KIND[site.kind]
    return ScanFinding(rule, file, site.line, site.unit.target, site.text, site.uses, reach, ids, site.sure, only)


def _all_sites(codebase: Codebase, found: list[Site]) -> list[Site]:
    """Returns the findings of each function alone, and those that follow from other functions: helpers and aliases. A
    helper over process groups is a function of a module, or a method of an autograd function, that calls
    torch.distributed; or one of the same module that leads there: by a call, by making an object whose constructor
    does, or by a global that such a function sets.
    """
    direct = {site.unit for site in found if site.kind == "process-group"}
    known: set[CodeUnit] = set()
    for module in {unit.module for unit in direct}:
        known |= _group_helpers(codebase, module, direct)
    there = {(site.unit, site.kind) for site in found}
    calls = _calls_of_helpers(codebase, known)
    found += [site for site in calls if (site.unit, site.kind) not in there or site.kind == "parallel-state"]
    units = [unit for unit in (*known, *(site.unit for site in found)) if unit.owner is None and unit.name != MODULE]
    wanted = {f"{unit.module.name}.{unit.name}": unit for unit in units}
    return found + list(_aliases(codebase, wanted))


def _group_helpers(codebase: Codebase, module: Module, direct: set[CodeUnit]) -> set[CodeUnit]:
    """Returns a module's functions that lead to a call of torch.distributed; those in `direct` have such a call."""
    candidates = [unit for unit in module.units.values() if _can_be_helper(codebase, unit)]
    known = {unit for unit in candidates if unit in direct}
    makers = {kind for kind in module.classes.values() if _constructor_leads_to(codebase, kind, direct)}
    names = {unit: _names_in(codebase.written(unit)) for unit in candidates}
    while True:
        reached = {unit.name.partition(".")[0] for unit in known} | {maker.name for maker in makers}
        nodes = (node for unit in known for node in ast.walk(codebase.written(unit).node))
        reached |= {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        more = {unit for unit in candidates if unit not in known and names[unit] & reached}
        if not more:
            return known
        known |= more


def _can_be_helper(codebase: Codebase, unit: CodeUnit) -> bool:
    if unit.name == MODULE or unit.is_class:
        return False
    return unit.owner is None or any("autograd" in base for base in codebase.bases(unit.owner))


def _constructor_leads_to(codebase: Codebase, kind: Class, direct: set[CodeUnit]) -> bool:
    """Returns whether a class's constructor leads to a function in `direct` through its methods; never for autograd."""
    pending = [unit for name in ("__init__", "__post_init__") if (unit := codebase.method(kind, name))]
    if any("autograd" in base for base in codebase.bases(kind)):
        return False
    seen = set(pending)
    while pending:
        unit = pending.pop()
        if unit in direct:
            return True
        chains = [call.chain for call in unit.facts.calls if len(call.chain) == 2 and call.chain[0] == unit.first]
        more = {method for _, name in chains if (method := codebase.method(kind, name)) is not None} - seen
        seen |= more
        pending += more
    return False


def _names_in(body: Body) -> set[str]:
    """Returns the first names of all that a function reads or calls."""
    nodes = [event.node for event in body.events if event.act in (Act.CALL, Act.CHAIN)]
    return {name for node in nodes for name in chain_of(node.func if isinstance(node, ast.Call) else node)[:1]}


def _calls_of_helpers(codebase: Codebase, known: set[CodeUnit]) -> Iterator[Site]:
    """Yields the calls of helpers in other functions, one for each function and line."""
    named = {f"{unit.module.name}.{unit.name}" for unit in known}
    for unit in codebase.units:
        if unit in known:
            continue
        lines: set[int] = set()
        for call in unit.facts.calls:
            if call.name in named and call.line not in lines and not _is_script(call):
                lines.add(call.line)
                kind = "cuda-import" if unit.name == MODULE else "parallel-state"
                yield Site(unit, kind, call.line, _text_of_call(codebase, unit, call), call.conditions, call.name)


def _text_of_call(codebase: Codebase, unit: CodeUnit, call: Called) -> str:
    nodes = [event.node for event in codebase.written(unit).events if event.act is Act.CALL]
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.lineno == call.line]
    return next(text_of(node) for node in calls if chain_of(node.func) == call.chain)


def _is_script(call: Called) -> bool:
    """Returns whether a call stands under `if __name__ == "__main__"`, which no import runs."""
    return any(term is not None and ("name", "__name__") in term for term, _ in call.conditions)


def _aliases(codebase: Codebase, wanted: dict[str, CodeUnit]) -> Iterator[Site]:
    """Yields the imports `from m import f` of functions with a finding: a patch of `m.f` does not change that name."""
    for module in codebase.modules.values():
        top = module.units[MODULE]
        for step in top.facts.imports:
            for name, bound, line in step.aliases:
                unit = wanted.get(codebase.canonical(bound))
                if unit is not None and unit.module is not module:
                    yield Site(top, "alias", line, name, step.conditions, f"{unit.module.name}.{unit.name}")


def _package_of(path: Path) -> str:
    """Returns the dotted name of the package that a folder is, or that a file lies in; empty outside of packages."""
    names: list[str] = []
    current = path.resolve()
    current = current.parent if current.is_file() else current
    while folder.has_file(current / "__init__.py"):
        names.insert(0, current.name)
        current = current.parent
    return ".".join(names)


def _entry(codebase: Codebase, entry: str) -> tuple[list[CodeUnit], list[Class]]:
    """Returns the functions and the classes that an entry `pkg.mod:name` starts from; refuses an unknown entry."""
    place = f"--entry {entry}"
    module_name, colon, name = entry.partition(":")
    if not colon or not name:
        raise BadValueError(place, "It is no name of a class or function", "Write it as package.module:Class")
    module = codebase.modules.get(module_name)
    if module is None:
        fact = f"The codebase has no module '{module_name}'"
        raise UnknownNameError(place, fact, _similar_modules(module_name, codebase.modules), name=module_name)
    known = codebase.definition(codebase.canonical(f"{module_name}.{name}"))
    if isinstance(known, Class):
        return roots(codebase, known)
    if isinstance(known, CodeUnit):
        return [known], []
    remedy = nearest(name, module.classes or module.units)
    raise UnknownNameError(place, f"'{module_name}' has no '{name}'", remedy, name=name)


def _check_read(path: Path, entry: str, unread: Sequence[Unread]) -> None:
    names = "/".join(entry.partition(":")[0].split("."))
    for file in unread:
        if f"/{file.path}".endswith((f"/{names}.py", f"/{names}/__init__.py")):
            fact = f"Its file {_named(path, file.path)}:{file.line} could not be read. {file.why}"
            raise BadValueError(f"--entry {entry}", fact, f"Mend the file: torchport explain {file.rule}")


def _similar_modules(name: str, names: Iterable[str]) -> str:
    """Returns a remedy that names the modules with the same last name; a codebase has too many to list."""
    close = [other for other in names if other.rpartition(".")[2] == name.rpartition(".")[2]]
    return nearest(name, close) if close else "Name a module of the folder that is scanned, as package.module:Class"


def _trains(unit: CodeUnit) -> bool:
    """Returns whether a function is there for training, by the words of its name and file."""
    text = f"{unit.module.source.path} {unit.name}"
    return any(word.lower() in _TRAINS for word in re.findall(r"[A-Z]?[a-z]+", text))


def _reach(site: Site, unpatched: Reached, training: Reached, chosen: bool) -> Reach:
    if unpatched.shows(site):
        return "path" if chosen else "unknown"
    return "training" if training.shows(site) else "off"


def _covered(known: Sequence[tuple[Site, Reach]], cover: _Coverage) -> Iterator[tuple[str, ...]]:
    """Yields the patches that cover each finding; of an alias those of its function, if they cover all there."""
    covered = [cover.ids(site) for site, _ in known]
    by_name: dict[str, list[tuple[str, ...]]] = {}
    for (site, _), ids in zip(known, covered, strict=True):
        if site.kind != "alias":
            by_name.setdefault(f"{site.unit.module.name}.{site.unit.name}", []).append(ids)
    for (site, _), ids in zip(known, covered, strict=True):
        some = by_name.get(site.uses, [cover.group_patches]) if site.kind == "alias" else [ids]
        yield tuple(dict.fromkeys(item for part in some for item in part)) if all(some) else ()


def _named(root: Path, below: str) -> str:
    return folder.as_named(root if folder.has_file(root) else root / below)


_GENERIC = ("torch", "torchax")
_GROUPS = ("process-group", "parallel-state", "cuda-import")


@dataclasses.dataclass
class Patches:
    """What the patches for a codebase change."""

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
        lines = {unit: tuple((first, last) for first, last, _ in some) for unit, some in self.by_lines.items()}
        return Closed(frozenset(self.by_unit), lines, frozenset(self.given))

    def at(self, unit: CodeUnit, line: int) -> list[str]:
        rewrites = [id for first, last, id in self.by_lines.get(unit, ()) if first <= line <= last]
        return self.by_unit.get(unit, []) + rewrites


def _read_patches(codebase: Codebase, folders: Sequence[Path]) -> Patches:
    """Returns the patches in some folders that are for this codebase or for torch."""
    result = Patches()
    there = [Path(folder) for folder in folders if Path(folder).is_dir()]
    tops = {name.partition(".")[0] for name in codebase.modules}
    for upstream in patch.upstreams(there):
        if upstream not in (*_GENERIC, *tops):
            continue
        entries = patch.read(there, [upstream])
        for entry in entries:
            _record(result, codebase, entry)
        if upstream not in _GENERIC:
            for folder in there:
                _add_given(result, folder / upstream)
    return result


def _record(result: Patches, codebase: Codebase, entry: patch.Entry) -> None:
    """Notes what a patch changes: a stub, lines of a function, a function or class, or a name of another package."""
    if entry.stub is not None:
        result.stubs[entry.stub.package].append((entry.id, frozenset(entry.stub.importers)))
        return
    place = f"{entry.module}.{'.'.join(entry.path)}"
    known = codebase.definition(codebase.canonical(place))
    if entry.rewrite is not None and isinstance(known, CodeUnit):
        node = codebase.written(known).node
        pattern = rewriting.statements(entry.rewrite.match)
        for run in rewriting.runs(node, pattern) if isinstance(node, Function) else ():
            last = run.statements[-1]
            result.by_lines[known].append((run.statements[0].lineno, last.end_lineno or last.lineno, entry.id))
    elif entry.kind == "replace" and known is not None:
        for unit in known.module.units.values():
            if known in (unit, unit.owner):
                result.by_unit[unit].append(entry.id)
    elif known is None and entry.rewrite is None:
        result.by_name[place].append(entry.id)


def _add_given(result: Patches, folder: Path) -> None:
    """Notes which arguments the families pass to networks by name: the string keys of their dictionaries."""
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(tree_of(file)):
            keys = node.keys if isinstance(node, ast.Dict) else []
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            for name in names:
                result.given.setdefault(name, f"{folder.name}/{file.stem}")


class _Coverage:
    """Which patches take care of a finding."""

    def __init__(self, patches: Patches, unpatched: Reached, patched: Reached, sites: Iterable[Site]) -> None:
        self._patches = patches
        self._unpatched = unpatched
        self._patched = patched
        self.group_patches = self._patches_of_groups(sites)

    def _patches_of_groups(self, sites: Iterable[Site]) -> tuple[str, ...]:
        """Returns the patches that together keep every process group from being made; none if one is still made."""
        ids: dict[str, None] = {}
        for site in sites:
            if site.uses.rpartition(".")[2] not in MAKES_GROUP or not self._unpatched.shows(site):
                continue
            closing = self.of_place(site)
            if not closing:
                return ()
            ids |= dict.fromkeys(closing)
        return tuple(ids)

    def ids(self, site: Site) -> tuple[str, ...]:
        return self.of_place(site) or self.of_name(site) or (self.group_patches if site.kind in _GROUPS else ())

    def of_place(self, site: Site) -> tuple[str, ...]:
        """Returns the patches that replace the place of a finding, or close the ways from the entry to it."""
        direct = self._patches.at(site.unit, site.line)
        if direct:
            return tuple(dict.fromkeys(direct))
        if not self._unpatched.shows(site):
            return ()
        if self._patched.shows(site):
            return self._of_calls(site)
        return tuple(dict.fromkeys(self._closing(site.unit)))

    def _of_calls(self, site: Site) -> tuple[str, ...]:
        """Returns the patches of the functions that a line calls, as in `self.mesh("cuda")`; none if one has none."""
        if site.kind != "cuda-device":
            return ()
        called = [unit for unit, places in self._unpatched.callers.items() if (site.unit, site.line) in places]
        ids = [self._patches.by_unit.get(unit, []) for unit in called]
        return tuple(dict.fromkeys(item for some in ids for item in some)) if called and all(ids) else ()

    def _closing(self, unit: CodeUnit) -> Iterator[str]:
        """Yields the patches on the paths of calls from the entry to a function, the nearest one of each path."""
        seen, pending, found = {unit}, [unit], False
        while pending:
            callee = pending.pop()
            callers = self._unpatched.callers.get(callee, ())
            for caller, line in sorted(callers, key=lambda call: (call[0].target, call[1])):
                ids = self._patches.at(caller, line)
                found = found or bool(ids)
                yield from ids
                if not ids and caller not in seen:
                    seen.add(caller)
                    pending.append(caller)
        if not found:  # a flag that no method sets any more, or an argument that is given
            yield from self._by_condition(seen)

    def _by_condition(self, units: set[CodeUnit]) -> Iterator[str]:
        """Yields what decides a condition: families that always pass its argument, patches of what sets its flag."""
        asked = {name for unit in units for name in unit.facts.asked}
        forwards = [unit for unit in units if unit.name.endswith(".forward")]
        given = {name for unit in forwards for name in unit.facts.asked if name in unit.defaults}
        yield from sorted({file for name, file in self._patches.given.items() if name in given})
        for unit, ids in self._patches.by_unit.items():
            flags = {name for name, term in unit.facts.attributes if term is not None}
            yield from ids if asked & flags else ()

    def of_name(self, site: Site) -> tuple[str, ...]:
        """Returns the patches of the name that a finding uses, such as `torch.cuda.set_device`, or its stubs."""
        if not site.uses:
            return ()
        if site.kind == "kernel":
            stubs = self._patches.stubs.get(site.uses.partition(".")[0], [])
            return tuple(id for id, importers in stubs if site.unit.module.name in importers)
        names = [name for name in self._patches.by_name if name == site.uses]
        if site.uses == AUTOCAST:
            names += [name for name in self._patches.by_name if name.startswith(f"{AUTOCAST}.")]
        return tuple(id for name in names for id in self._patches.by_name[name])
