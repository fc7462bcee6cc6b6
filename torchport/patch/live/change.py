"""One change of live upstream code. It can say whether it still stands, and be taken back."""

from __future__ import annotations

import dataclasses
import io
import linecache
import types
from collections.abc import Callable
from typing import Any

from torchport.errors import ConflictError, RewriteError, SignatureError, TargetError
from torchport.patch import rewriting
from torchport.patch.declared import Entry
from torchport.patch.live import registry, target
from torchport.patch.live.counted import Calls, Retire, Wrapped, counting, disguise_class, uncounted
from torchport.patch.source.checks import check_signature, live_signature, statement_of


@dataclasses.dataclass(slots=True)
class Placed:
    """A replacement or a wrapped function that was put into a slot."""

    slot: target.Slot
    value: Any
    retire: Retire | None = None  #: Makes a function that was put there call the original.
    stop: Callable[[], None] | None = None  #: Gives a class that was put there its former names and values.
    has_holders: bool = True  #: Whether somebody besides its namespace held the original.

    def stands(self) -> bool:
        """Returns whether the replacement is still in its place."""
        return self.slot.place.current() is self.value

    def undo(self) -> None:
        """Restores the original, unless something else has taken the place since, and ends the counting of calls."""
        if self.stands():
            self.slot.restore()
        if self.retire is not None:
            self.retire(target.function_in(self.value), target.function_in(self.slot.raw))
        if self.stop is not None:
            self.stop()


@dataclasses.dataclass(slots=True)
class Recompiled:
    """Code swapped inside a function, which stays the same object for everybody who holds it."""

    slot: target.Slot
    function: types.FunctionType
    old: types.CodeType
    new: types.CodeType
    name: str  #: The global name by which the new code calls the replacement of the statements.
    call: Callable[..., Any]  #: The function of that name.

    def stands(self) -> bool:
        """Returns whether the function in the slot still makes the call."""
        is_called = self.name in self.function.__code__.co_names  # a later rewrite of the same function keeps the call
        makes_call = is_called and self.function.__globals__.get(self.name) is self.call
        return makes_call and any(function is self.function for function in target.layers(self.slot.place.current()))

    def undo(self) -> None:
        """Restores the function's code, unless other code has changed it since."""
        if self.function.__code__ is self.new:
            self.function.__code__ = self.old
            self.function.__globals__.pop(self.name, None)
            target.forget(self.slot.raw)


Change = Placed | Recompiled


def change(entry: Entry, module: types.ModuleType, loaded: Any, calls: Calls) -> Change:
    """Applies one patch to the live objects of its module, and returns the change; raises if that fails."""
    if entry.rewrite:
        return _recompile(entry, module, loaded, calls)
    slot = target.locate(entry, module)
    has_holders = target.held_elsewhere(slot)
    target.check_scope(entry, slot)
    marks = {"register", "dispatch", "registry"}  # of `functools.singledispatch`
    is_dispatching = isinstance(slot.raw, types.FunctionType) and marks <= vars(slot.raw).keys()
    if entry.kind == "replace" and is_dispatching:  # only the default implementation changes, in the same dispatcher
        default = slot.raw.registry[object]
        slot = target.Slot(slot.raw, slot.name, default, in_holder=True, path=slot.path, is_default=True)
        # Whoever holds the dispatcher keeps it.
        has_holders = False
    placed = _substitution(entry, slot, loaded, calls)
    placed.has_holders = has_holders
    try:
        placed.slot.place.assign(placed.value)
    except TypeError as error:
        fact = f"{entry.target} cannot be set: {error}"
        raise TargetError(entry.place, fact, "Patch the name that its caller looks up", patch=entry.id) from error
    return placed


def _substitution(entry: Entry, slot: target.Slot, loaded: Any, calls: Calls) -> Placed:
    """Returns the change that puts `loaded`, made to look like the original, into a slot, but does not make it; raises
    if one of the two is a class and the other a function.
    """
    original = target.function_in(slot.raw)
    if not callable(original):
        fact = f"{entry.target} is a {type(slot.raw).__name__}, and '{entry.kind}' takes a function or class"
        raise TargetError(entry.place, fact, "Patch the function that reads it", patch=entry.id)
    if entry.kind == "wrap" and isinstance(original, type):
        fact = f"{entry.target} is a class, and a wrapper takes a function"
        raise SignatureError(entry.place, fact, "Wrap one of its methods, such as __init__", patch=entry.id)
    is_class = isinstance(original, type)
    if entry.kind == "replace" and is_class is not isinstance(loaded, type):
        words = ("class", "function") if is_class else ("function", "class")
        fact = f"{entry.target} is a {words[0]}, and '{entry.reference}' a {words[1]}"
        raise SignatureError(entry.place, fact, f"Write a {words[0]}", patch=entry.id)
    is_method = isinstance(slot.holder, type) and not isinstance(slot.raw, (staticmethod, type))
    check_signature(entry, live_signature(original), loaded, is_method)
    if isinstance(original, type):
        return Placed(slot, loaded, stop=disguise_class(loaded, original, calls if entry.counted else None))
    function = Wrapped(loaded, original) if entry.kind == "wrap" else loaded
    make = counting if entry.counted else uncounted
    call, retire = make(function, calls, original, entry.target)
    return Placed(slot, target.shaped_as(entry, slot.raw, call), retire)


def _recompile(entry: Entry, module: types.ModuleType, loaded: Any, calls: Calls) -> Recompiled:
    """Puts the edited code of a `rewrite` into a function, and returns the change; raises for any other target."""
    slot = target.locate(entry, module)
    function = target.function_of(slot.raw, entry.module, statement_of(entry))
    if function is None or not slot.in_holder:
        kind = f"a {type(slot.raw).__name__}, not a Python function" if slot.in_holder else "inherited"
        fact = f"{entry.target} is {kind}"
        raise RewriteError(entry.place, fact, "Name the function that has the statements", patch=entry.id)
    target.check_scope(entry, slot)
    target.check_function(entry, function)
    old = function.__code__
    lines = linecache.getlines(old.co_filename, function.__globals__)  # of a rewritten function the edited text
    if not lines:
        fact = f"The source of {entry.target} cannot be read ({old.co_filename})"
        raise RewriteError(entry.place, fact, "Install the upstream with its sources", patch=entry.id)
    site = old.co_name, old.co_firstlineno, old.co_filename
    edit = rewriting.edit(entry, "".join(lines), site, rewriting.parameters(entry, loaded))
    _check_globals(entry, function, edit)
    # Tracebacks show the patches, then upstream's file.
    ids, home = entry.id, old.co_filename
    if home.startswith("<torchport: "):
        earlier, _, home = home.removeprefix("<torchport: ").removesuffix(">").partition(" in ")
        ids = f"{earlier}, {entry.id}"
    filename = f"<torchport: {ids} in {home}>"
    new = rewriting.code(entry, edit.part, old, filename)
    # Tracebacks and `inspect.getsource` show the text, though the file is on no disk: None in place of its time keeps
    # the entry. Unchanged lines are the strings of the original file, to save memory: a module may have a thousand such
    # texts.
    pairs = zip(io.StringIO(edit.text).readlines(), lines, strict=False)
    linecache.cache[filename] = (len(edit.text), None, [was if was == line else line for line, was in pairs], filename)
    call, _ = counting(loaded, calls)
    function.__globals__[edit.name] = call
    function.__code__ = new
    target.forget(slot.raw)
    return Recompiled(slot, function, old, new, edit.name, call)


def _check_globals(entry: Entry, function: types.FunctionType, edit: rewriting.Edit) -> None:
    """Refuses a rewrite whose call has a global name that is taken, or passes a name the function cannot see."""
    known = function.__globals__
    earlier = known.get(edit.name)  # of this entry, if the module is imported again into the same namespace
    if edit.name in known and registry.substitutes.get(id(earlier)) is not earlier:
        raise ConflictError(entry.place, f"{entry.module} already has '{edit.name}'", f"Rename '{entry.id}'")
    builtins = known.get("__builtins__", {})
    names = builtins if isinstance(builtins, dict) else vars(builtins)
    for name in sorted(edit.reads):
        if name not in known and name not in names and name not in function.__code__.co_freevars:
            fact = f"'{entry.reference}' takes '{name}', which {entry.target} cannot see"
            raise RewriteError(entry.place, fact, "Take names that are bound before the run", patch=entry.id)
