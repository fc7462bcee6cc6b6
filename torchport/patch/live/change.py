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
from torchport.patch.live import registry
from torchport.patch.live.counted import Calls, Retire, Wrapped, counting, disguise_class, uncounted
from torchport.patch.live.target import (
    Slot,
    check_function,
    check_scope,
    forget,
    function_in,
    function_of,
    held_elsewhere,
    layers,
    locate,
    shaped_as,
)
from torchport.patch.source.checks import check_signature, live_signature, statement_of


@dataclasses.dataclass(slots=True)
class Placed:
    """A replacement or a wrapped function that was put into a slot."""

    slot: Slot
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
            self.retire(function_in(self.value), function_in(self.slot.raw))
        if self.stop is not None:
            self.stop()


@dataclasses.dataclass(slots=True)
class Recompiled:
    """Code swapped inside a function, which stays the same object for everybody who holds it."""

    slot: Slot
    function: types.FunctionType
    old: types.CodeType
    new: types.CodeType
    name: str  #: The global name by which the new code calls the replacement of the statements.
    call: Callable[..., Any]  #: The function of that name.

    def stands(self) -> bool:
        """Returns whether the function in the slot still makes the call."""
        is_called = self.name in self.function.__code__.co_names  # a later rewrite of the same function keeps the call
        makes_call = is_called and self.function.__globals__.get(self.name) is self.call
        return makes_call and any(function is self.function for function in layers(self.slot.place.current()))

    def undo(self) -> None:
        """Restores the function's code, unless other code has changed it since."""
        if self.function.__code__ is self.new:
            self.function.__code__ = self.old
            self.function.__globals__.pop(self.name, None)
            forget(self.slot.raw)


Change = Placed | Recompiled


def change(entry: Entry, module: types.ModuleType, loaded: Any, calls: Calls) -> Change:
    """Applies one patch to the live objects of its module, and returns the change; raises if that fails."""
    if entry.rewrite:
        return _recompile(entry, module, loaded, calls)
    slot = locate(entry, module)
    has_holders = held_elsewhere(slot)
    check_scope(entry, slot)
    marks = {"register", "dispatch", "registry"}  # of `functools.singledispatch`
    is_dispatching = isinstance(slot.raw, types.FunctionType) and marks <= vars(slot.raw).keys()
    if entry.kind == "replace" and is_dispatching:  # only the default implementation changes, in the same dispatcher
        default = slot.raw.registry[object]
        slot = Slot(slot.raw, slot.name, default, in_holder=True, path=slot.path, is_default=True)
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


def _substitution(entry: Entry, slot: Slot, loaded: Any, calls: Calls) -> Placed:
    """Returns the change that puts `loaded`, made to look like the original, into a slot, but does not make it; raises
    if one of the two is a class and the other a function.
    """
    original = function_in(slot.raw)
    if not callable(original):
        fact = f"{entry.target} is a {type(slot.raw).__name__}, and '{entry.kind}' takes a function or class"
        raise TargetError(entry.place, fact, "Patch the function that reads it", patch=entry.id)
    if entry.kind == "wrap" and isinstance(original, type):
        fact = f"{entry.target} is a class, and a wrapper takes a function"
        raise SignatureError(entry.place, fact, "Wrap one of its methods, such as __init__", patch=entry.id)
    if entry.kind == "replace" and isinstance(original, type) is not isinstance(loaded, type):
        fact = f"{entry.target} is a {_word(original)}, and '{entry.reference}' a {_word(loaded)}"
        raise SignatureError(entry.place, fact, f"Write a {_word(original)}", patch=entry.id)
    is_method = isinstance(slot.holder, type) and not isinstance(slot.raw, (staticmethod, type))
    check_signature(entry, live_signature(original), loaded, is_method)
    if isinstance(original, type):
        return Placed(slot, loaded, stop=disguise_class(loaded, original, calls if entry.counted else None))
    function = Wrapped(loaded, original) if entry.kind == "wrap" else loaded
    make = counting if entry.counted else uncounted
    call, retire = make(function, calls, original, entry.target)
    return Placed(slot, shaped_as(entry, slot.raw, call), retire)


def _word(thing: Any) -> str:
    return "class" if isinstance(thing, type) else "function"


def _recompile(entry: Entry, module: types.ModuleType, loaded: Any, calls: Calls) -> Recompiled:
    """Puts the edited code of a `rewrite` into a function, and returns the change; raises for any other target."""
    slot = locate(entry, module)
    function = function_of(slot.raw, entry.module, statement_of(entry))
    if function is None or not slot.in_holder:
        kind = f"a {type(slot.raw).__name__}, not a Python function" if slot.in_holder else "inherited"
        fact = f"{entry.target} is {kind}"
        raise RewriteError(entry.place, fact, "Name the function that has the statements", patch=entry.id)
    check_scope(entry, slot)
    check_function(entry, function)
    old = function.__code__
    text = rewriting.source_text(entry, function)
    parameters = rewriting.parameters(entry, loaded)
    edit = rewriting.edit(entry, text, old.co_firstlineno, rewriting.finder(entry, old), parameters)
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
    pairs = zip(io.StringIO(edit.text).readlines(), linecache.getlines(old.co_filename), strict=False)
    linecache.cache[filename] = (len(edit.text), None, [was if was == line else line for line, was in pairs], filename)
    call, _ = counting(loaded, calls)
    function.__globals__[edit.name] = call
    function.__code__ = new
    forget(slot.raw)
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
