"""A scan from the first step to the last, and which shipped patches take care of which findings.

Patches are read from their YAML, and applied to nothing. A patch takes care of a finding if it replaces the function or
the statements that it stands in; if it replaces what the code there uses; or if it closes every way from the entry to
it.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import itertools
import operator
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torchport import patch
from torchport.errors import BadValueError, UnknownNameError, nearest
from torchport.files import folder
from torchport.patch import rewriting
from torchport.porting.scan import BY_KIND, GUARDS, Absent, Guard, Reach, ScanFinding, ScanReport
from torchport.porting.scan.codebase import Class, Codebase, CodeUnit, Module, find_sources, recursion
from torchport.porting.scan.detect import AUTOCAST, MAKES_GROUP, FunctionContext, Site, is_kernel, sites, text_of
from torchport.porting.scan.facts import Imported
from torchport.porting.scan.reach import Patches, Reached, facts_of, roots
from torchport.porting.scan.syntax import MODULE, Act
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
    """Returns the findings in a codebase that will not port; raises if there is no Python file or no such entry.

    Args:
        path: The codebase's folder, or one file.
        entries: Where a run of it begins, as `pkg.mod:name`; without any, whatever is not training counts.
        folders: Where patches lie, each as `patches/`.
    """
    if not folder.has_file(path) and not folder.has_folder(path):
        raise BadValueError(f"torchport scan {path}", "There is no such folder or file", "Name the codebase's folder")
    sources, unread = find_sources(path)
    if not sources and not unread:
        raise BadValueError(f"torchport scan {path}", "There is no Python file in it", "Name the codebase's folder")
    _, package = import_root(path.resolve())
    codebase = Codebase(sources, package)
    codebase.unread += unread
    was_enabled = gc.isenabled()
    gc.disable()  # a collector that walks all syntax trees again and again takes a third of the time
    try:
        # A sum of a thousand terms is a syntax tree of a thousand levels.
        with recursion(max(sys.getrecursionlimit(), _DEEPEST)):
            found = _read(codebase)
            with waiting("scan: what runs"):
                report = _report(path, codebase, entries, folders, found)
        codebase.forget()
    finally:
        if was_enabled:
            gc.enable()
    unreadable = [dataclasses.replace(finding, file=_named(path, finding.file)) for finding in codebase.unread]
    findings = sorted([*report.findings, *unreadable], key=_PLACE)
    return dataclasses.replace(report, findings=tuple(findings))


def import_root(path: Path) -> tuple[Path, str]:
    """Returns the folder that a folder or file is imported from, and its package: `src` and `pkg.models` for
    `src/pkg/models/`, if both have an `__init__.py`. The package is empty outside of packages.
    """
    names: list[str] = []
    current = path if folder.has_folder(path) else path.parent
    while folder.has_file(current / "__init__.py"):
        names.insert(0, current.name)
        current = current.parent
    return current, ".".join(names)


def _named(root: Path, below: str) -> str:
    """Returns a file's path as it can be opened from the current folder, from its path below the codebase's `root`."""
    return folder.as_named(root if folder.has_file(root) else root / below)


def _read(codebase: Codebase) -> list[Site]:
    """Reads all files, sets the `facts` of each function, and returns the findings that a function shows by itself."""
    found: dict[CodeUnit, list[Site]] = {}
    for number, module in enumerate(track(codebase.read(), "scan", "file", len(codebase.sources)), 1):
        for unit in module.units.values():
            body = codebase.body(unit)
            context = FunctionContext(codebase, unit, body)
            found[unit] = list(sites(context, body))
            unit.facts = facts_of(codebase, unit, body, context.terms)
            unit.body = None  # the facts are what is kept of the syntax tree
        module.in_tables.clear()
        if number % _NOTED == 0:
            note(f"scan: {number} of {len(codebase.sources)} files, {sum(map(len, found.values()))} findings so far")
    # Most calls and reads lead to nothing in the codebase: none of their names is defined there.
    defined = {name for module in codebase.modules.values() for name in (*module.classes, *module.units)}
    defined = {name.rpartition(".")[2] for name in defined}.union(*(m.tables for m in codebase.modules.values()))
    for unit in codebase.units:
        unit.facts.references = tuple(
            reference
            for reference in unit.facts.references
            if isinstance(reference, Imported)
            or reference.chain == (unit.first,)
            or not defined.isdisjoint((*reference.chain, *reference.name.split("."), reference.attribute))
        )
    return [site for unit in codebase.units for site in found[unit]]


def _report(
    path: Path, codebase: Codebase, entries: Sequence[str], folders: Sequence[Path], found: list[Site]
) -> ScanReport:
    """Returns the report of a codebase that was read; refuses an entry in a file that could not be read."""
    for entry, unread in itertools.product(entries, codebase.unread):
        names = entry.partition(":")[0].replace(".", "/")
        if f"/{unread.file}".endswith((f"/{names}.py", f"/{names}/__init__.py")):
            fact = f"Its file {_named(path, unread.file)}:{unread.line} could not be read. {unread.text}"
            raise BadValueError(f"--entry {entry}", fact, f"Mend the file: torchport explain {unread.rule}")
    starts = [_start(codebase, entry) for entry in entries]
    patches = _read_patches(codebase, folders)
    unpatched = Reached(codebase)
    patched = Reached(codebase, patches)
    without = {guard: Reached(codebase, without=guard) for guard in GUARDS}
    trainers = dict.fromkeys(filter(_trains, codebase.units))
    others = [unit for unit in codebase.units if unit not in trainers]
    for reached in (unpatched, patched, *without.values()):
        for units, classes in starts:
            reached.start(units, classes)
        if not starts:  # whatever is not training may run
            reached.admit(others)
    training = Reached(codebase, trains=True)
    if starts:
        training.start(trainers)
    else:
        training.admit(trainers)
    known: list[tuple[Site, Reach]] = []
    for site in _all_sites(codebase, found):
        if unpatched.may_run(site):
            known.append((site, "path" if starts else "unknown"))
        elif training.may_run(site):
            known.append((site, "training"))
        elif not site.if_none:  # else calls pass the argument, and there is no finding
            known.append((site, "off"))
    all_sites = [site for site, _ in known]
    covering = _Coverage(patches, unpatched, patched).of_all(all_sites)
    helpers = _callers_without_group(all_sites, without["process-group"]) if starts else None
    findings = [
        ScanFinding(
            BY_KIND[site.kind], _named(path, site.unit.module.source.path), site.line, site.unit.target, site.text,
            site.uses, reach, ids, site.sure, _guard(site, reach, without, helpers),
        )
        for (site, reach), ids in zip(known, covering, strict=True)
    ]  # fmt: skip
    absent = tuple(_absent(path, codebase, patches, unpatched))
    return ScanReport(tuple(findings), codebase.files, codebase.lines, tuple(entries), absent)


def _start(codebase: Codebase, entry: str) -> tuple[list[CodeUnit], list[Class]]:
    """Returns the functions and classes from which everything is followed for an entry `pkg.mod:name`, or raises."""
    place = f"--entry {entry}"
    module_name, colon, name = entry.partition(":")
    if not colon or not name:
        raise BadValueError(place, "It is no name of a class or function", "Write it as package.module:Class")
    module = codebase.modules.get(module_name)
    if module is None:
        # A codebase has too many modules to list them all.
        last = module_name.rpartition(".")[2]
        similar = [other for other in codebase.modules if other.rpartition(".")[2] == last]
        remedy = "Name a module of the folder that is scanned, as package.module:Class"
        remedy = nearest(module_name, similar) if similar else remedy
        raise UnknownNameError(place, f"The codebase has no module '{module_name}'", remedy, name=module_name)
    known = codebase.definition(codebase.canonical(f"{module_name}.{name}"))
    if isinstance(known, Class):
        return roots(codebase, known)
    if isinstance(known, CodeUnit):
        return [known], []
    remedy = nearest(name, module.classes or module.units)
    raise UnknownNameError(place, f"'{module_name}' has no '{name}'", remedy, name=name)


def _trains(unit: CodeUnit) -> bool:
    """Returns whether a function is there for training, by the words of its name and path: `Trainer.run` is."""
    text = f"{unit.module.source.path} {unit.name}"
    return any(word.lower() in _TRAINS for word in re.findall(r"[A-Z]?[a-z]+", text))


def _guard(site: Site, reach: Reach, without: dict[Guard, Reached], helpers: set[str] | None) -> Guard:
    """Returns what must be there so that a finding runs, `process-group` or `cuda`; empty if it also runs `without`.
    `helpers` are the functions that call torch.distributed even without a group; None without an entry.
    """
    if reach not in ("path", "unknown"):
        return ""
    if site.kind == "parallel-state" and helpers is not None and site.uses not in helpers:
        return "process-group"
    return next((guard for guard, reached in without.items() if not reached.may_run(site)), "")


def _callers_without_group(sites: Iterable[Site], without_group: Reached) -> set[str]:
    """Returns the full names of the functions that lead to a call of torch.distributed without a process group, too."""
    pending = [site.unit for site in sites if site.kind == "process-group" and without_group.may_run(site)]
    seen = set(pending)
    while pending:
        callers = {caller for caller, _ in without_group.callers.get(pending.pop(), ())} - seen
        seen |= callers
        pending += callers
    return {unit.dotted for unit in seen}


def _absent(path: Path, codebase: Codebase, patches: Patches, reached: Reached) -> Iterator[Absent]:
    """Yields each package that code on the path imports without condition, and that is not installed."""
    beside = path.parent if folder.has_file(path) else path  # a script also imports what lies beside it
    known = {name.partition(".")[0] for name in codebase.modules}
    for unit in codebase.units:
        for statement in unit.facts.imports:
            line = statement.line
            if not statement.always or not reached.leads_to(unit, statement.conditions, line):
                continue
            for package in statement.packages:
                if package in known or is_kernel(package):  # a kernel is a finding
                    continue
                if any(unit.module.name in importers for _, importers in patches.stubs.get(package, ())):
                    continue
                known.add(package)
                is_beside = folder.has_file(beside / f"{package}.py") or folder.has_folder(beside / package)
                if not is_beside and not is_there(package):
                    yield Absent(package, _named(path, unit.module.source.path), line)


def _all_sites(codebase: Codebase, found: list[Site]) -> list[Site]:
    """Returns `found`, the findings of each function alone, with the findings that follow from other functions: calls
    of helpers, and aliases. A helper is a function of a module, or a method of an autograd function, that calls
    torch.distributed. A function of the same module that leads to it is a helper, too: by a call, by making an object
    whose constructor does, or by a global that a helper sets.
    """
    direct = {site.unit for site in found if site.kind == "process-group"}
    helpers: set[CodeUnit] = set()
    for module in {unit.module for unit in direct}:
        helpers |= _group_helpers(codebase, module, direct)
    known = {(site.unit, site.kind) for site in found}
    calls = _calls_of_helpers(codebase, helpers)
    found += [site for site in calls if (site.unit, site.kind) not in known or site.kind == "parallel-state"]
    named = [unit for unit in (*helpers, *(site.unit for site in found)) if unit.owner is None]
    units = {unit.dotted: unit for unit in named if unit.name != MODULE}
    return found + list(_aliases(codebase, units))


def _group_helpers(codebase: Codebase, module: Module, direct: set[CodeUnit]) -> set[CodeUnit]:
    """Returns a module's functions that lead to a call of torch.distributed; those in `direct` have such a call."""
    classes = module.classes
    # The subclasses of `torch.autograd.Function`, by the names of their bases.
    autograd = {name for name in classes if any("autograd" in base for base in codebase.bases(classes[name]))}
    functions = [unit for unit in module.units.values() if unit.name != MODULE and not unit.is_class]
    candidates = [unit for unit in functions if unit.owner is None or unit.class_name in autograd]
    helpers = direct.intersection(candidates)
    # Classes that call torch.distributed when an object of them is made.
    makers = {name for name in classes if _constructor_leads_to(codebase, classes[name], direct)} - autograd
    heads: dict[CodeUnit, set[str]] = {}  # the first names of all that a function reads or calls
    for unit in candidates:
        heads[unit] = {event.chain[0] for event in codebase.body(unit).events if event.chain}
    while True:
        # A function that names a helper, a class of `makers`, or a global that a helper sets is a helper, too.
        names = {unit.name.partition(".")[0] for unit in helpers} | makers
        nodes = (node for unit in helpers for node in ast.walk(codebase.body(unit).node))
        names |= {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        more = {unit for unit in candidates if unit not in helpers and heads[unit] & names}
        if not more:
            return helpers
        helpers |= more


def _constructor_leads_to(codebase: Codebase, cls: Class, direct: set[CodeUnit]) -> bool:
    """Returns whether a class's constructor leads to a function in `direct` through its methods."""
    methods = codebase.methods(cls)
    pending = [methods[name] for name in ("__init__", "__post_init__") if name in methods]
    seen = set(pending)
    while pending:
        unit = pending.pop()
        chains = [call.chain for call in unit.facts.calls if len(call.chain) == 2 and call.chain[0] == unit.first]
        called = {methods[name] for _, name in chains if name in methods} - seen
        seen |= called
        pending += called
    return not seen.isdisjoint(direct)


def _calls_of_helpers(codebase: Codebase, helpers: set[CodeUnit]) -> Iterator[Site]:
    """Yields a finding for the first call of a helper on each line of other functions."""
    names = {unit.dotted for unit in helpers}
    for unit in codebase.units:
        if unit in helpers:
            continue
        lines: set[int] = set()
        for call in unit.facts.calls:
            # Code under `if __name__ == "__main__"` does not run at an import.
            in_script = any(term is not None and ("name", "__name__") in term for term, _ in call.conditions)
            if call.name not in names or call.line in lines or in_script:
                continue
            lines.add(call.line)
            nodes = [event.node for event in codebase.body(unit).by_act[Act.CALL] if event.chain == call.chain]
            text = next(text_of(node) for node in nodes if isinstance(node, ast.Call) and node.lineno == call.line)
            kind = "cuda-import" if unit.name == MODULE else "parallel-state"
            yield Site(unit, kind, call.line, text, call.conditions, call.name)


def _aliases(codebase: Codebase, with_finding: dict[str, CodeUnit]) -> Iterator[Site]:
    """Yields the imports `from m import f` of functions `with_finding`: a patch of `m.f` does not change that name."""
    for module in codebase.modules.values():
        top = module.units[MODULE]
        for statement in top.facts.imports:
            for name, bound, line in statement.aliases:
                unit = with_finding.get(codebase.canonical(bound))
                if unit is not None and unit.module is not module:
                    yield Site(top, "alias", line, name, statement.conditions, unit.dotted)


_GENERIC = ("torch", "torchax")
_GROUPS = ("process-group", "parallel-state", "cuda-import")


def _read_patches(codebase: Codebase, folders: Sequence[Path]) -> Patches:
    """Returns the patches in some folders that are for this codebase or for torch."""
    result = Patches()
    there = [folder for folder in map(Path, folders) if folder.is_dir()]
    tops = {name.partition(".")[0] for name in codebase.modules}
    for upstream in [name for name in patch.upstreams(there) if name in (*_GENERIC, *tops)]:
        for entry in patch.read(there, [upstream]):
            _record(result, codebase, entry)
        if upstream in _GENERIC:
            continue
        for file in [file for root in there for file in sorted((root / upstream).glob("*.py"))]:
            for name in _keys_of_dictionaries(file):
                result.given.setdefault(name, f"{upstream}/{file.stem}")
    return result


def _record(patches: Patches, codebase: Codebase, entry: patch.Entry) -> None:
    """Adds to `patches` what an entry changes: a package, lines of a function, a function, a class, a foreign name."""
    if entry.stub is not None:
        patches.stubs[entry.stub.package].append((entry.id, frozenset(entry.stub.importers)))
        return
    place = f"{entry.module}.{'.'.join(entry.path)}"
    known = codebase.definition(codebase.canonical(place))
    if entry.rewrite is not None and isinstance(known, CodeUnit):
        node = codebase.body(known).node
        pattern = rewriting.statements(entry.rewrite.match)
        for run in rewriting.runs(node, pattern) if isinstance(node, Function) else ():
            last = run.statements[-1]
            patches.by_lines[known].append((run.statements[0].lineno, last.end_lineno or last.lineno, entry.id))
    elif entry.kind == "replace" and known is not None:
        for unit in known.module.units.values():
            if known in (unit, unit.owner):
                patches.by_unit[unit].append(entry.id)
    elif known is None and entry.rewrite is None:
        patches.by_name[place].append(entry.id)


def _keys_of_dictionaries(file: Path) -> Iterator[str]:
    """Yields the string keys of all dictionaries in a family's file: the arguments that it gives networks by name."""
    for node in ast.walk(tree_of(file)):
        keys = node.keys if isinstance(node, ast.Dict) else []
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


@dataclasses.dataclass(frozen=True)
class _Coverage:
    """Tells which patches take care of a finding."""

    patches: Patches
    unpatched: Reached
    patched: Reached

    def of_all(self, sites: Sequence[Site]) -> Iterator[tuple[str, ...]]:
        """Yields the ids of the patches that cover each finding, in order. An alias is covered if all findings of its
        function are, by the patches of these.
        """
        makers = [site for site in sites if site.uses.rpartition(".")[2] in MAKES_GROUP]
        closing = [self._of_place(site) for site in makers if self.unpatched.may_run(site)]
        # The patches that together keep every process group from being made; none if one is still made.
        group_patches = tuple(dict.fromkeys(itertools.chain(*closing))) if all(closing) else ()
        covering = []
        by_function: dict[str, list[tuple[str, ...]]] = {}
        for site in sites:
            ids = self._of_place(site) or self._of_name(site)
            ids = ids or (group_patches if site.kind in _GROUPS else ())
            covering.append(ids)
            if site.kind != "alias":
                by_function.setdefault(site.unit.dotted, []).append(ids)
        for site, ids in zip(sites, covering, strict=True):
            needed = by_function.get(site.uses, [group_patches]) if site.kind == "alias" else [ids]
            yield tuple(dict.fromkeys(itertools.chain(*needed))) if all(needed) else ()

    def _of_place(self, site: Site) -> tuple[str, ...]:
        """Returns the ids of the patches that replace the place of a finding, or keep it from being reached."""
        direct = self.patches.at(site.unit, site.line)
        if direct:
            return tuple(dict.fromkeys(direct))
        if not self.unpatched.may_run(site):
            return ()
        if not self.patched.may_run(site):
            return tuple(dict.fromkeys(self._closing(site.unit)))
        if site.kind != "cuda-device":
            return ()
        # A text "cuda" is covered if all functions that its line calls are replaced, as in `self.mesh("cuda")`.
        called = [unit for unit, places in self.unpatched.callers.items() if (site.unit, site.line) in places]
        covering = [self.patches.by_unit.get(unit, []) for unit in called]
        return tuple(dict.fromkeys(itertools.chain(*covering))) if all(covering) else ()

    def _closing(self, unit: CodeUnit) -> Iterator[str]:
        """Yields the ids of the patches that keep a function from being reached: on each path of calls from the entry
        the nearest patch. If no path has a patch, what decides a condition on the way: patches, or a family's file.
        """
        seen = {unit}
        pending = [unit]
        is_closed = False
        while pending:
            callers = self.unpatched.callers.get(pending.pop(), ())
            for caller, line in sorted(callers, key=lambda call: (call[0].target, call[1])):
                ids = self.patches.at(caller, line)
                is_closed = is_closed or bool(ids)
                yield from ids
                if not ids and caller not in seen:
                    seen.add(caller)
                    pending.append(caller)
        if is_closed:
            return
        # A condition closes all ways: families always pass its argument, or patches replace what sets its flag.
        asked = {name for caller in seen for name in caller.facts.asked}
        forwards = [caller for caller in seen if caller.name.endswith(".forward")]
        given = {name for forward in forwards for name in forward.facts.asked if name in forward.defaults}
        yield from sorted({file for name, file in self.patches.given.items() if name in given})
        for setter, ids in self.patches.by_unit.items():
            flags = {name for name, term in setter.facts.attributes if term is not None}
            yield from ids if asked & flags else ()

    def _of_name(self, site: Site) -> tuple[str, ...]:
        """Returns the ids of the patches of the name that a finding uses, such as `torch.cuda.set_device`; of a package
        of kernels the stubs that the finding's module may import.
        """
        if not site.uses:
            return ()
        if site.kind == "kernel":
            stubs = self.patches.stubs.get(site.uses.partition(".")[0], [])
            return tuple(id for id, importers in stubs if site.unit.module.name in importers)
        names = [name for name in self.patches.by_name if name == site.uses]
        if site.uses == AUTOCAST:
            names += [name for name in self.patches.by_name if name.startswith(f"{AUTOCAST}.")]
        return tuple(id for name in names for id in self.patches.by_name[name])
