"""Exchanges in a component that is loaded: submodules, or one method of them, by their names in it.

A network's weights are loaded by name after its exchanges are made. So what takes a submodule's place must have the
submodule's tensors, under the same names.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchport.errors import AliasError, ConflictError, PatchError, ReplacementError, TargetError, nearest
from torchport.patch.declared.entry import Entry, Instance
from torchport.patch.declared.replacement import Explained, said
from torchport.patch.live.counted import Calls
from torchport.patch.live.target import Slot, locate
from torchport.patch.source import signature

PATCH = "torchport_patch"
"""The attribute of a method that was put in place, with the id of its entry."""


@dataclasses.dataclass(slots=True)
class Method:
    """A method in an object's own namespace, where it comes before that of the class.

    Attributes:
        holder: The object.
        name: The method's name.
        value: What stands there.
        retire: Makes it do what the original does.
    """

    holder: Any
    name: str
    value: Any
    retire: Callable[[], None]

    def stands(self) -> bool:
        return vars(self.holder).get(self.name) is self.value

    def undo(self) -> None:
        if self.stands():
            del vars(self.holder)[self.name]
        self.retire()


@dataclasses.dataclass(slots=True)
class Submodule:
    """A module in another one's place.

    Attributes:
        parents: Each parent, and the name that the module has in it.
        old: The original.
        new: What takes its place.
        forward: The counter of its calls.
    """

    parents: list[tuple[Any, str]]
    old: Any
    new: Any
    forward: Method

    def stands(self) -> bool:
        return all(parent._modules.get(key) is self.new for parent, key in self.parents)

    def undo(self) -> None:
        """Puts the original back, with the weights that its replacement has by now."""
        self.forward.undo()
        tensors = {slot.name: slot.tensor for slot in _slots(self.new)}
        for slot in _slots(self.old):
            if slot.name in tensors:
                slot.holder[slot.key] = tensors[slot.name]
        for parent, key in self.parents:
            if parent._modules.get(key) is self.new:
                parent._modules[key] = self.old


@dataclasses.dataclass(slots=True)
class Exchanged:
    """What one entry has exchanged in a component, in that order."""

    parts: list[Method | Submodule]

    def stands(self) -> bool:
        return all(part.stands() for part in self.parts)

    def undo(self) -> None:
        for part in reversed(self.parts):
            part.undo()


class Claim:
    """An `instance` entry that is to be applied to a component.

    Args:
        entry: The entry.
        put: The function that it names.
        calls: Counts the calls of all that it puts in place.
        component: What is loaded.

    Attributes:
        slot: The target, live.
        method: The name of the method to exchange; None where submodules are.
        modules: What matches, by its name in the component.

    Raises:
        TargetError: The target is neither a class nor a method, nothing matches, not as often as `times` says, or
            something that is no instance of the target.
    """

    def __init__(self, entry: Entry, put: Callable[[Any], Any], calls: Calls, component: Any) -> None:
        assert entry.instance is not None
        self.entry = entry
        self.instance: Instance = entry.instance
        self.put = put
        self.calls = calls
        self.slot = locate(entry, importlib.import_module(entry.module))
        self.method = _method(entry, self.slot)
        self.modules = self._matches(named(component))
        for name, module in self.modules.items():
            self._check_kind(name, module)

    def where(self, name: str) -> str:
        """Returns a submodule's name in words."""
        return f"'{name}' of {self.instance.component}" if name else self.instance.component

    def target_error(self, fact: str, remedy: str) -> TargetError:
        """Returns a refusal of this entry's target."""
        return TargetError(self.entry.place, fact, remedy, patch=self.entry.id, target=self.entry.target)

    def unusable(self, name: str, fact: str, remedy: str) -> ReplacementError:
        """Returns a refusal of what the entry's function returned."""
        fact = f"What '{self.instance.put}' returns for {self.where(name)} {fact}"
        return ReplacementError(self.entry.place, fact, remedy, patch=self.entry.id)

    def _matches(self, modules: Mapping[str, Any]) -> dict[str, Any]:
        path, component, times = self.instance.path, self.instance.component, self.instance.times
        if path is None:
            matches = {"": modules[""]}
        else:
            matches = {name: module for name, module in modules.items() if name and re.fullmatch(path, name)}
        if not matches:
            plain = str(path).replace("\\", "")
            names = difflib.get_close_matches(plain, filter(None, modules), n=5, cutoff=0.0)
            raise self.target_error(f"'{self.entry.id}' finds no module '{path}' in {component}", nearest(plain, names))
        if times not in ("any", len(matches)):
            some = ", ".join([*list(matches)[:3], *(["..."] if len(matches) > 3 else [])]) or "itself"
            fact = f"'{self.entry.id}' matches {len(matches)} modules of {component} ({some}), and 'times' is {times}"
            raise self.target_error(fact, f"Write 'times: {len(matches)}', or another path")
        return matches

    def _check_kind(self, name: str, module: Any) -> None:
        """Refuses what is no instance of the target's class, or has another method than the target."""
        kind, where = type(module), self.where(name)
        if self.method is None:
            if kind is not self.slot.raw:
                fact = f"{where} is a {_full_name(kind)}, not a {self.entry.target}"
                raise self.target_error(fact, "Name its class as the target, or write another path")
            if not name:
                raise self.target_error(f"{where} itself cannot be exchanged", "Add 'instance.path', or name a method")
            return
        if inspect.getattr_static(kind, self.method, None) is not self.slot.raw:
            owner = next((base for base in kind.__mro__ if self.method in vars(base)), None)
            fact = f"{where} is a {_full_name(kind)}, whose '{self.method}' is not {self.entry.target}"
            raise self.target_error(fact, f"Write {_full_name(owner)}.{self.method}" if owner else "Write another path")
        if self.method in vars(module):
            fact = f"{where} has a '{self.method}' of its own, beside that of its class"
            raise ConflictError(self.entry.place, fact, "Find who has set it", patches=[self.entry.id])


def _full_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _method(entry: Entry, slot: Slot) -> str | None:
    """Returns the name of a target that is a method, None for a class.

    Raises:
        TargetError: It is neither, a method that Python does not look up in the instance, or another module's class.
    """
    if isinstance(slot.raw, type):
        home = _full_name(slot.raw)
        defines = vars(sys.modules.get(slot.raw.__module__, entry)).get(slot.raw.__qualname__) is slot.raw
        if home != entry.target and defines:  # there is its source, whose drift is looked for
            fact = f"{entry.target} is {home}"
            raise TargetError(entry.place, fact, f"Write {home}", patch=entry.id, target=entry.target)
        return None
    is_method = isinstance(slot.holder, type) and callable(slot.raw) and not isinstance(slot.raw, staticmethod)
    if is_method and not (slot.name.startswith("__") and slot.name.endswith("__")):
        return slot.name
    word = "is looked up in the class" if is_method else f"is a {type(slot.raw).__name__}"
    fact, remedy = f"{entry.target} {word}", "Name a class, or a method that is called by its name, such as forward"
    raise TargetError(entry.place, fact, remedy, patch=entry.id, target=entry.target)


def named(component: Any) -> dict[str, Any]:
    """Returns a component's submodules by all their names, itself first as `""`."""
    if not hasattr(component, "named_modules"):
        return {"": component}
    return dict(component.named_modules(remove_duplicate=False))


def check_apart(claims: Sequence[Claim]) -> None:
    """Refuses two exchanges in one place, and one within a submodule that is exchanged.

    Raises:
        ConflictError: The two; both are named.
    """
    taken = {name: claim for claim in claims if claim.method is None for name in claim.modules}
    seen: dict[tuple[str, str | None], Claim] = {}
    for claim in claims:
        for name in claim.modules:
            parts = name.split(".")
            above = [".".join(parts[:count]) for count in range(1, len(parts) + (claim.method is not None))]
            outer = next((one for one in above if one in taken), None)
            other = taken[outer] if outer is not None else seen.get((name, claim.method))
            if other is not None:
                fact = f"'{claim.entry.id}' claims {claim.where(name)}, and '{other.entry.id}' at {other.entry.place} "
                fact += f"claims {other.where(name if outer is None else outer)}"
                ids = [claim.entry.id, other.entry.id]
                raise ConflictError(claim.entry.place, fact, "Keep one of the two", patches=ids)
            seen[name, claim.method] = claim


def exchange(claim: Claim, component: Any) -> Exchanged:
    """Makes the exchanges of one entry, all or none.

    Raises:
        PatchError: One cannot be made.
    """
    exchanged = Exchanged([])
    replacements: dict[int, Any] = {}  # a module may have several names
    try:
        for name, module in claim.modules.items():
            if id(module) not in replacements:
                replacements[id(module)] = module
                make = _exchange_submodule if claim.method is None else _exchange_method
                exchanged.parts.append(make(claim, name, module, component))
    except BaseException:
        exchanged.undo()
        raise
    return exchanged


def _exchange_method(claim: Claim, name: str, module: Any, component: Any) -> Method:
    assert claim.method is not None
    original = getattr(module, claim.method)
    method = _put(claim, name, original)
    if not callable(method):
        raise claim.unusable(name, f"is a {type(method).__name__}", "Return a function")
    if method == original:
        raise claim.unusable(name, "is the original itself", "Return what takes its place")
    signature.check(claim.entry, signature.live_signature(original), method, method=False)
    return _stand_in(claim, module, claim.method, method, original)


def _exchange_submodule(claim: Claim, name: str, module: Any, component: Any) -> Submodule:
    parents = _parents(claim, name, module, component)
    new = _put(claim, name, module)
    if not hasattr(new, "named_modules"):  # the engine imports no torch
        raise claim.unusable(name, f"is a {type(new).__name__}", "Return a torch.nn.Module")
    if new is module:
        raise claim.unusable(name, "is the original itself", "Return what takes its place")
    _check_tensors(claim, name, module, new)
    signature.check(claim.entry, signature.live_signature(module.forward), new.forward, method=False)
    new.train(module.training)
    forward = _stand_in(claim, new, "forward", new.forward, new.forward)
    for parent, key in parents:
        parent._modules[key] = new
    return Submodule(parents, module, new, forward)


def _put(claim: Claim, name: str, original: Any) -> Any:
    """Returns what takes an original's place."""

    def failed(error: BaseException) -> PatchError:
        fact = f"'{claim.instance.put}' fails for {claim.where(name)}: {said(error)}"
        return ReplacementError(claim.entry.place, fact, "Mend the function", patch=claim.entry.id)

    with Explained(failed):
        return claim.put(original)


def _stand_in(claim: Claim, holder: Any, name: str, method: Callable[..., Any], original: Callable[..., Any]) -> Method:
    """Puts a method in an object's namespace: it counts its calls, and looks like the original."""
    calls, current = claim.calls, method

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        return current(*args, **kwargs)

    def retire() -> None:
        nonlocal calls, current
        calls, current = Calls(), original

    setattr(call, PATCH, claim.entry.id)
    vars(holder)[name] = call
    return Method(holder, name, call, retire)


def _parents(claim: Claim, name: str, module: Any, component: Any) -> list[tuple[Any, str]]:
    """Returns who has a submodule, and under which name.

    Raises:
        AliasError: It has another name that the entry does not match, or stands in a list or an attribute where no
            parent would look for its submodules.
    """
    modules = named(component)
    others = [key for key, one in modules.items() if one is module and key not in claim.modules]
    for key, one in modules.items():
        held = (attribute for attribute, value in vars(one).items() if attribute != "_modules" and _has(value, module))
        others += [f"{key}.{attribute}".removeprefix(".") for attribute in held]
    if others:
        fact = f"{claim.where(name)} is also '{others[0]}'"
        raise AliasError(claim.entry.place, fact, "Match both, or exchange a method of it", patch=claim.entry.id)
    owners = {id(one): one for one in modules.values()}.values()
    return [(owner, key) for owner in owners for key, child in owner._modules.items() if child is module]


def _has(value: Any, module: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return any(one is module for one in values)


@dataclasses.dataclass(frozen=True, slots=True)
class _TensorSlot:
    """Where a tensor of a module stands: under a key, in a dict of whoever has it."""

    name: str
    word: str
    holder: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Any:
        return self.holder[self.key]

    def in_words(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"a {self.word}, {dtype} {list(self.tensor.shape)} on {self.tensor.device.type}"


def _slots(module: Any) -> list[_TensorSlot]:
    """Returns the parameters and buffers of a module, by all their names."""
    result: list[_TensorSlot] = []
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key in owner._parameters:
            result.append(_TensorSlot(f"{prefix}.{key}".removeprefix("."), "parameter", owner._parameters, key))
        for key in owner._buffers:
            word = "buffer that is not saved" if key in owner._non_persistent_buffers_set else "buffer"
            result.append(_TensorSlot(f"{prefix}.{key}".removeprefix("."), word, owner._buffers, key))
    return [slot for slot in result if slot.tensor is not None]


def _check_tensors(claim: Claim, name: str, old: Any, new: Any) -> None:
    """Refuses a replacement that has not exactly the original's tensors: weights are loaded by their names."""
    remedy = "Give it the original's tensors: new.load_state_dict(original.state_dict(), assign=True)"
    before, after = ({slot.name: slot for slot in _slots(module)} for module in (old, new))
    for key in sorted(before.keys() ^ after.keys()):
        word = "has no" if key in before else "has another"
        raise claim.unusable(name, f"{word} tensor '{key}'", remedy)
    for key, slot in before.items():
        if after[key].in_words() != slot.in_words():
            fact = f"has '{key}' as {after[key].in_words()}, and the original as {slot.in_words()}"
            raise claim.unusable(name, fact, remedy)
        ours, theirs = after[key].tensor, slot.tensor
        if not (ours is theirs or theirs.is_meta or ours.data_ptr() == theirs.data_ptr() or ours.equal(theirs)):
            raise claim.unusable(name, f"has other values in '{key}'", remedy)
