"""Audits who still holds an original after a change: each is rebound, or refused by name.

A function's reference count says in a microsecond whether anybody else holds it. Only then are holders looked for.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import gc
import itertools
import re
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchport.errors import AliasError, PatchError, TooLateError, UnreadableError
from torchport.patch.declared import Entry
from torchport.patch.ledger import Op, Record
from torchport.patch.live import registry
from torchport.patch.live.change import Placed
from torchport.patch.live.counted import parts_of_substitutes
from torchport.patch.live.holders import Holder, Place, Referrers, names_of, namespace, referrers_of, weak_references
from torchport.patch.live.target import Slot, function_in
from torchport.patch.source.checks import statement_of
from torchport.source.parsing import SourceFile, read_source, shown


@dataclasses.dataclass(slots=True)
class Rebinding:
    """One place where an original was exchanged for its replacement."""

    place: Place
    old: Any
    new: Any


@dataclasses.dataclass(slots=True)
class _Audit:
    """The holders of an old object, and the new object that takes its place in all of them."""

    record: Record | None  #: The patch; None where a replacement is taken back.
    old: Any
    new: Any
    holders: list[Holder] = dataclasses.field(default_factory=list)
    unknown: int = 0  #: How many references to the old object the holders do not explain.


def repair(records: Sequence[Record]) -> list[Rebinding]:
    """Exchanges originals in all their holders, and returns the exchanges; or raises AliasError or TooLateError."""
    audits = [audit for record in records for audit in _audits_of(record)]
    _find_holders(audits)
    # A holder without a container is a name of a module, and stays. Any other holder may be garbage that nobody has
    # collected yet, as a closure of an earlier call.
    has_other = any(h.place is None or h.container is not None for audit in audits for h in audit.holders)
    if has_other or any(audit.unknown for audit in audits):
        for audit in audits:
            audit.holders.clear()
        gc.collect()
        _find_holders(audits)
    for audit in audits:
        record, keepers = audit.record, [holder for holder in audit.holders if holder.place is None]
        assert record is not None
        if keepers:
            raise _refusal(record, _in_words(keepers[0], record.entry))
        if audit.unknown > 0:
            variable = _local_variable(audit.old)
            raise _refusal(record, variable or f"{audit.unknown} unknown (a local variable, or C)")
    return [rebinding for audit in audits for rebinding in _rebind(audit)]


def _rebind(audit: _Audit) -> list[Rebinding]:
    """Puts the new object in place of the old one in every holder of an audit, and notes the holders in the record."""
    if audit.record is not None:
        notes = [f"rebound {holder.where}" for holder in audit.holders]
        audit.record.detail = "; ".join(filter(None, [audit.record.detail, *notes]))
    places = [holder.place for holder in audit.holders if holder.place is not None]
    for place in places:
        place.exchange(audit.old, audit.new)
    return [Rebinding(place, audit.old, audit.new) for place in places]


def give_back(changes: Sequence[Placed]) -> None:
    """Puts originals back in place of replacements that other code took while these were in force. A local variable, a
    closure or a weak reference keeps the replacement, which from then on calls the original.
    """
    audits: list[_Audit] = []
    for change in changes:
        audits += _audits_with_inner(record=None, old=change.value, new=change.slot.raw)
    # Three references are always there: of the change (or the descriptor), of the audit, and of the argument.
    shared = [audit for audit in audits if sys.getrefcount(audit.old) > 3]
    _find_holders(shared)
    for audit in shared:
        _rebind(audit)
    registry.kept += [audit.old for audit in audits if weak_references(audit.old)]


def _audits_with_inner(record: Record | None, old: Any, new: Any) -> list[_Audit]:
    """Returns the audit of an exchange; of a descriptor (`staticmethod`) also the audit of the function in it."""
    inner = function_in(old)
    audits = [_Audit(record, old, new)]
    return audits if inner is old else [*audits, _Audit(record, inner, function_in(new))]


def _audits_of(record: Record) -> list[_Audit]:
    """Returns the audits of a patch: the objects to exchange in all their holders. Empty if the patch changes one name
    alone, or nothing else holds the original.
    """
    change = record.change
    if not isinstance(change, Placed) or not change.has_holders or not change.slot.in_holder:
        return []
    original = function_in(change.slot.raw)
    entry = record.entry
    home = getattr(original, "__module__", None)
    statement = statement_of(entry)
    # Of a name that its module imports, that name alone is changed.
    is_name_only = isinstance(statement, (ast.Import, ast.ImportFrom))
    if statement is None:  # without source an object of another module counts as imported
        is_name_only = len(entry.path) == 1 and home not in (None, entry.module)
    if isinstance(original, types.BuiltinFunctionType) and home is not None:
        # After `size = len` in a class, all of Python holds `len`.
        is_name_only = is_name_only or home.partition(".")[0] != entry.package
    return [] if is_name_only else _audits_with_inner(record, change.slot.raw, change.value)


def _find_holders(audits: list[_Audit]) -> None:
    """Finds the holders of each audit's old object, and counts the references that they do not explain. A fresh lambda
    shows how many references this search itself adds.
    """
    if not audits:
        return
    control = _Audit(record=None, old=lambda: None, new=None)
    objects = [audit.old for audit in (*audits, control)]
    counts = [sys.getrefcount(thing) for thing in objects]
    parts = parts_of_substitutes()

    def is_own(referrer: Any) -> bool:
        """Returns whether a referrer is an object of the patch engine, whose references are no holders."""
        return id(referrer) in parts or isinstance(referrer, (_Audit, Slot, Placed, Record, Op, Rebinding))

    names = names_of(objects)
    referrers = Referrers(objects, is_own)
    del objects[:]
    _, seen = referrers.holders(control.old)
    overhead = counts[-1] - seen
    for audit, count in zip(audits, counts, strict=False):  # the last count is the control's
        holders, seen = referrers.holders(audit.old)
        audit.unknown = 0 if isinstance(audit.old, type) else count - seen - overhead
        audit.holders = [*names[id(audit.old)], *holders, *weak_references(audit.old)]


def _in_words(holder: Holder, entry: Entry) -> str:
    """Returns a holder of an entry's original in words, with the line of its module where that is known."""
    line = line_of(holder.module, holder.name, entry.path[-1]) if holder.module else None
    where = holder.where
    name = None if holder.container is None else expression(holder.container)
    if name is not None or isinstance(holder.container, weakref.ref):
        where = f"{name or where}, a {type(holder.container).__name__}"
    return f"{where} ({line})" if line else where


def _refusal(record: Record, holder: str) -> PatchError:
    entry = record.entry
    fact = f"{entry.target} is still held by {holder}"
    if not record.late:
        return AliasError(entry.place, fact, "Patch that holder instead", patch=entry.id, target=entry.target)
    line = importer(entry.module)
    fact = f"{entry.module} was imported before its patch{f' ({line})' if line else ''}, and {fact}"
    remedy = "Import it inside 'with patch.applied(...)'"
    return TooLateError(entry.place, fact, remedy, patch=entry.id, target=entry.target)


# As `vars` of a class, whatever its metaclass defines.
_attributes: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__


def expression(thing: Any) -> str | None:
    """Returns the shortest expression that leads to an object from a module or class, such as `up.model.TABLE['f']`;
    None if no module or class is within five levels of referrers.
    """
    level: list[tuple[Any, str]] = [(thing, "")]
    seen = {id(thing), id(level)}
    for _ in range(5):
        above: list[tuple[Any, str]] = []
        seen.add(id(above))
        referrers = _referrers([item for item, _ in level])
        # A `__dict__` is reached from the object or class that it belongs to.
        owners = _referrers([each for each in itertools.chain(*referrers.values()) if isinstance(each, dict)])
        for item, suffix in level:
            for referrer in referrers[id(item)]:
                for owner, access in _accesses(referrer, item, owners.get(id(referrer), [])):
                    if isinstance(owner, types.ModuleType) and sys.modules.get(owner.__name__) is owner:
                        return f"{owner.__name__}{access}{suffix}"
                    if isinstance(owner, type):
                        return f"{owner.__module__}.{owner.__qualname__}{access}{suffix}"
                    if id(referrer) not in seen:
                        above.append((owner, f"{access}{suffix}"))
                seen.add(id(referrer))
        level = above
        # These refer to the objects of the next level, too.
        del referrers, owners
    return None


def _referrers(things: list[Any]) -> dict[int, list[Any]]:
    """Returns the referrers of some objects, by the object's id, from one walk through all objects of Python."""
    referrers: dict[int, list[Any]] = {id(thing): [] for thing in things}
    for referrer in referrers_of(things) if things else ():
        for number in {id(item) for item in gc.get_referents(referrer)} & referrers.keys():
            referrers[number].append(referrer)
    return referrers


def _accesses(referrer: Any, thing: Any, owners: list[Any]) -> Iterator[tuple[Any, str]]:
    """Yields each owner of `thing` with the text that leads from the owner to `thing`: `.name`, `[0]`, or nothing for a
    key or a member of a set. The owner is `referrer`, or an object of `owners` whose `__dict__` it is.
    """
    if isinstance(referrer, dict):
        if any(key is thing for key in list(dict.keys(referrer))):
            yield referrer, ""
        for key in [key for key, value in list(dict.items(referrer)) if value is thing]:
            homes = [o for o in owners if isinstance(o, (types.ModuleType, type)) and _names_in(o).get(key) is thing]
            named = homes or [owner for owner in owners if _names_in(owner) is referrer]
            yield from ((owner, f".{key}") for owner in named)
            if not named:
                yield referrer, f"[{key!r}]"
    elif isinstance(referrer, (set, frozenset)):
        yield referrer, ""  # a member has no name, and neither has a key
    elif isinstance(referrer, (types.FunctionType, functools.partial)) and type(thing) is tuple:
        fields = ("__closure__", "__defaults__", "args")
        yield from ((referrer, f".{field}") for field in fields if getattr(referrer, field, None) is thing)
    elif isinstance(referrer, (list, tuple)):
        yield from ((referrer, f"[{index}]") for index, value in enumerate(referrer) if value is thing)
    else:
        yield from ((referrer, f".{key}") for key, value in list(_names_in(referrer).items()) if value is thing)


def _names_in(owner: Any) -> Mapping[str, Any]:
    """Returns the attributes of a module, a class or an object, as its `__dict__` has them; none of a dict."""
    if isinstance(owner, types.ModuleType):
        return namespace(owner)
    if isinstance(owner, type):
        return _attributes(owner)
    names = getattr(owner, "__dict__", None)
    return names if isinstance(names, dict) and not isinstance(owner, dict) else {}


def line_of(module: str, name: str | None, original: str) -> str | None:
    """Returns `file:line` of the first statement in a module with the name `name` or `original`; None without one."""
    source = _source_of_module(module)
    if source is None:
        return None
    wanted = {name, original} - {None}
    # Imports first, then assignments and uses, then definitions: in this order they best show the holder.
    imports, uses = (ast.Import, ast.ImportFrom), (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
    kinds: tuple[tuple[type[ast.stmt], ...], ...] = (imports, uses, (ast.FunctionDef, ast.ClassDef))
    for node in (node for kind in kinds for node in ast.walk(source.tree) if isinstance(node, kind)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {word for alias in node.names for word in (alias.name, alias.asname)}
        else:
            names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        if wanted & names:
            return f"{source.shown}:{node.lineno}"
    return None


def importer(module: str) -> str | None:
    """Returns `file:line` of a statement that imports a module, the running program's first."""
    parent, _, leaf = module.rpartition(".")
    dotted = re.escape(module)
    package = re.escape(parent)
    absolute = rf"^\s*(?:import {dotted}\b|from {dotted} |from {package} import\b)"
    for name in ("__main__", *reversed(list(sys.modules))):
        # Only modules whose text has a match are parsed. In the same package the import may be relative.
        is_near = name.partition(".")[0] == module.partition(".")[0]
        needle = rf"{absolute}|\b{leaf}\b" if is_near else absolute
        source = None if name == module else _source_of_module(name, needle)
        if source is None:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and module in _imports(node, source):
                return f"{source.shown}:{node.lineno}"
    return None


def _local_variable(thing: Any) -> str | None:
    """Returns in words the variable of a caller outside the patch engine that holds an object; None without one."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if not str(frame.f_globals.get("__name__")).startswith("torchport.patch"):
            for name, value in frame.f_locals.items():
                if value is thing:
                    code = frame.f_code
                    return f"the variable '{name}' of {code.co_name} ({shown(code.co_filename)}:{line})"
    return None


def _source_of_module(module: str, needle: str | None = None) -> SourceFile | None:
    """Returns a loaded module's source; with a `needle`, a regular expression, only if it is found in the text."""
    live = sys.modules.get(module)
    file = vars(live).get("__file__") if isinstance(live, types.ModuleType) else None
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    try:
        # A search would not find `__main__`.
        is_main = module == "__main__"
        text = Path(file).read_text(encoding="utf-8", errors="replace") if needle or is_main else ""
        if needle is not None and not re.search(needle, text, re.MULTILINE):
            return None
        source = SourceFile(module, file, text) if is_main else read_source(module)
        return source if source is not None and source.tree else None  # the tree is made here, which may fail
    except (OSError, ImportError, UnreadableError):
        # An error message then has no line.
        return None


def _imports(node: ast.Import | ast.ImportFrom, source: SourceFile) -> set[str]:
    """Returns the modules that a statement may import: `{"up", "up.nn"}` for `from up import nn`."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    home = source.imported_from(node)
    return {home, *(f"{home}.{alias.name}" for alias in node.names)}
