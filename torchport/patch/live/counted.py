"""Substitutes for upstream's functions: they count their calls, and call the original once they are retired.

A substitute looks like the original. Both have one `__dict__`, so that an attribute that is set on either is on both.
The substitute also has the original's name, by which it is pickled. The counter is plain Python, so that tracing counts
as well as running. A substitute for a plain function is a plain function: its type is right, and a call is faster than
through a proxy (`benchmarks/patching.py`). A proxy takes the place of any other callable: a coroutine or generator
function, an `lru_cache`, a `functools.partial`, a function in C.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from torchport.patch.live import registry
from torchport.patch.source.checks import live_signature
from torchport.source.bindings import POSITIONAL


@dataclasses.dataclass(slots=True)
class Calls:
    count: int = 0


Retire = Callable[[Any, Any], None]
"""A function that makes a substitute, its first argument, call the original, its second."""

CALLS = "_torchport_calls"
FUNCTION = "_torchport_function"
"""The free variables of a substitute's code: its counter, and the function that it calls. They mark its frames."""

_ANY_CALL = [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]
_COROUTINES = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE
_SPECIAL_KINDS = _COROUTINES | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_SIGNATURES = {"__wrapped__", "__signature__"}
_ABSENT = object()


class Wrapped(functools.partial[Any]):
    """A wrapper with its original, which it gets as its first argument."""


def parts_of_substitutes() -> set[int]:
    """Returns the ids of all objects that substitutes are made of, such as the cells of their closures."""
    ids: set[int] = set()
    for substitute in list(registry.substitutes.values()):
        ids.add(id(substitute))
        call = call_of(substitute) if issubclass(type(substitute), _Proxy) else substitute
        for cell in call.__closure__ or ():
            ids.add(id(cell))
            if isinstance(cell.cell_contents, Wrapped):
                ids.update((id(cell.cell_contents), id(cell.cell_contents.args)))
        ids.add(id(call.__kwdefaults__))
    return ids


def _is_plain(function: Any) -> bool:
    """Returns whether a function is a plain one, no generator and no coroutine: then its substitute can be plain."""
    return type(function) is types.FunctionType and not function.__code__.co_flags & _SPECIAL_KINDS


def counting(
    function: Callable[..., Any], calls: Calls, original: Any = None, name: str | None = None
) -> tuple[Any, Retire]:
    """Returns a substitute that counts its calls and passes them to `function`, and a function that retires it. The
    substitute looks like `original` (by default `function`). Once retired it calls the original, as others may still
    hold it.
    """
    original = function if original is None else original
    cells = types.CellType(calls), types.CellType(function)  # `retire` exchanges their contents
    is_plain = _is_plain(original)
    parameters = _shared_parameters(original, function) if is_plain else None
    # A call is passed on as it was made, since a wrapper may ask which arguments were given by name. The code has the
    # original's parameters only if `function` binds arguments as the original does.
    code = _code(tuple((p.name, p.kind) for p in (_ANY_CALL if parameters is None else parameters)))
    if is_plain:
        substitute = _plain_substitute(original, function, code, cells)
        substitute.__defaults__, substitute.__kwdefaults__ = _defaults(parameters, original)
        _disguise(substitute, original, name)
    else:
        substitute = proxy(original, types.FunctionType(code, globals(), closure=cells), name)
    # For code that takes any call `inspect` needs the signature, unless an attribute leads there already.
    needs_signature = is_plain and parameters is None and vars(original).keys().isdisjoint(_SIGNATURES)
    # The original gets it, too: both functions have one `__dict__`.
    if needs_signature:
        substitute.__signature__ = inspect.signature(original)

    def retire(retired: Any, target: Any) -> None:
        cells[0].cell_contents, cells[1].cell_contents = Calls(), target
        # The code passes its defaults on to the target.
        if is_plain:
            retired.__defaults__, retired.__kwdefaults__ = target.__defaults__, target.__kwdefaults__
        if needs_signature:
            vars(target).pop("__signature__", None)

    registry.substitutes[id(substitute)] = substitute
    return substitute, retire


def _plain_substitute(original: types.FunctionType, function: Any, code: types.CodeType, cells: Any) -> Any:
    """Returns a function with this code, which tracebacks and `inspect` show as the code of `function`, a replacement,
    or in place of a wrapper as that of the original.
    """
    shown = function.__code__ if isinstance(function, types.FunctionType) else original.__code__
    code = code.replace(
        co_filename=shown.co_filename,
        co_firstlineno=shown.co_firstlineno,
        co_name=original.__code__.co_name,
        co_qualname=original.__code__.co_qualname,
    )
    return types.FunctionType(code, original.__globals__, closure=cells)


def uncounted(
    function: Callable[..., Any], _: Calls, original: Any, name: str | None = None
) -> tuple[Callable[..., Any], Retire]:
    """Returns a substitute that adds no frame to a replacement's calls, and a function that retires it. The substitute
    is a copy of the replacement; for a closure or another callable it is a counting one, whose count nobody reads. The
    parameters are those of `counting`.
    """
    if not (_is_plain(function) and _is_plain(original)) or function.__closure__:
        return counting(function, Calls(), original, name)
    copy = types.FunctionType(function.__code__, function.__globals__, original.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    _disguise(copy, original, name)
    registry.substitutes[id(copy)] = copy
    return copy, _fall_through


def _fall_through(function: types.FunctionType, original: Any) -> None:
    """Gives a function new code, which calls the original. The original is the default of a keyword parameter, as the
    code of a function without a closure can have no free variable.
    """

    def call(*args: Any, _torchport_original: Any, **kwargs: Any) -> Any:
        return _torchport_original(*args, **kwargs)

    function.__code__, function.__defaults__ = call.__code__, None
    function.__kwdefaults__ = {"_torchport_original": original}


def _shared_parameters(original: types.FunctionType, function: Callable[..., Any]) -> list[Parameter] | None:
    """Returns the original's parameters; None if `function` takes arguments differently, unless they are `*args,
    **kwargs`, which pass any call on. Defaults are those of `function`: the substitute passes them on to it.
    """
    # How the code itself binds arguments: without the original's `__dict__`, as `inspect` would follow `__wrapped__`.
    bare = types.FunctionType(original.__code__, {}, "", original.__defaults__, original.__closure__)
    bare.__kwdefaults__ = original.__kwdefaults__
    parameters = list(inspect.signature(bare).parameters.values())
    if [p.kind for p in parameters] == [p.kind for p in _ANY_CALL]:
        return parameters
    signature = live_signature(function)  # it may have no code, as a `functools.partial`
    if signature is None:
        return None
    others = list(signature.parameters.values())
    if [_binding(p) for p in parameters] != [_binding(p) for p in others]:
        return None
    return [p.replace(default=other.default) for p, other in zip(parameters, others, strict=True)]


def _binding(parameter: Parameter) -> tuple[Any, ...]:
    """Returns a key that is the same for two parameters if a call puts the same arguments into them."""
    kind = "positional" if parameter.kind in POSITIONAL else parameter.kind
    name = parameter.name if parameter.kind is Parameter.KEYWORD_ONLY else ""
    return kind, name, parameter.default is Parameter.empty


@functools.cache
def _code(parameters: tuple[tuple[str, Any], ...]) -> types.CodeType:
    """Returns the code of a function with these parameters, which counts a call and passes its arguments on: for `x`
    and `*, y` that of `def call(x, *, y): CALLS.count += 1; return FUNCTION(x, y=y)`.
    """
    marks = {Parameter.VAR_POSITIONAL: "*{0}", Parameter.VAR_KEYWORD: "**{0}", Parameter.KEYWORD_ONLY: "{0}={0}"}
    passed = ", ".join(marks.get(kind, "{0}").format(name) for name, kind in parameters)
    shown = Signature([Parameter(name, kind) for name, kind in parameters])
    text = f"def make({CALLS}, {FUNCTION}):\n def call{shown}: {CALLS}.count += 1; return {FUNCTION}({passed})\n"
    code = compile(text, __file__, "exec")
    for _ in ("make", "call"):  # each in the constants of the code around it
        code = next(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return code


def _defaults(parameters: list[Parameter] | None, original: types.FunctionType) -> tuple[Any, Any]:
    """Returns `__defaults__` and `__kwdefaults__` of a substitute with these parameters, or else the original's."""
    given = [p for p in parameters or () if p.default is not Parameter.empty]
    by_name = {p.name: p.default for p in given if p.kind is Parameter.KEYWORD_ONLY}
    positional = tuple(p.default for p in given if p.kind in POSITIONAL)
    # Code that takes any call uses no defaults. They only show the original's.
    return positional or original.__defaults__, by_name or original.__kwdefaults__


def _disguise(substitute: Any, original: types.FunctionType, name: str | None) -> None:
    """Gives a substitute the original's `__dict__` and names, by which it is pickled. If these names lead to the
    original itself, which pickle would refuse, the substitute is named by `name`, the target's `module:path`.
    """
    substitute.__dict__ = original.__dict__
    for attribute in (*functools.WRAPPER_ASSIGNMENTS, "__type_params__"):
        if hasattr(original, attribute):
            setattr(substitute, attribute, getattr(original, attribute))
    if name is not None and name != f"{original.__module__}:{original.__qualname__}":
        thing: Any = sys.modules.get(original.__module__)
        for step in original.__qualname__.split("."):
            thing = inspect.getattr_static(thing, step, None)
        if getattr(thing, "__func__", thing) is original:
            substitute.__module__, _, substitute.__qualname__ = name.partition(":")


def disguise_class(replacement: type, original: type, calls: Calls | None) -> Callable[[], None]:
    """Gives a replacement class the original's names, and counts its instances. Returns a function that undoes both.

    No substitute is made: `isinstance` and subclasses see the class itself. Its instances are pickled by the original's
    names. It also gets those values of the original that it lacks. Without `calls` nothing is counted.
    """
    values = {name: getattr(original, name) for name in ("__module__", "__name__", "__qualname__", "__doc__")}
    for name, value in vars(original).items():
        is_special = name.startswith(("__", "_abc_"))
        if not (is_special or callable(value) or hasattr(value, "__get__") or hasattr(replacement, name)):
            values[name] = value
    if calls is not None:
        values["__init__"], _ = counting(type.__getattribute__(replacement, "__init__"), calls)
    before = {name: vars(replacement).get(name, _ABSENT) for name in values}
    before.update(__name__=replacement.__name__, __qualname__=replacement.__qualname__)  # `vars` of a class lacks them
    for name, value in values.items():
        type.__setattr__(replacement, name, value)

    def stop() -> None:
        for name, value in before.items():
            if value is _ABSENT:
                type.__delattr__(replacement, name)
            else:
                type.__setattr__(replacement, name, value)

    return stop


class _Proxy:
    """A callable with the attributes and class of the original, whose calls go to `_call`.

    The call gets the instance as its first argument, as a plain function does, and the proxy binds where the original
    does. It is equal to nothing but itself: whoever caches by function must not find what was cached for the original.
    """

    __slots__ = ("__weakref__", "_call", "_name", "_original")

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name in _OF_PROXY else getattr(_original(self), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_of(self)(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = _name(self)
        return (pkgutil.resolve_name, (name,)) if name else _original(self).__reduce_ex__(protocol)

    def __copy__(self, _: Any = None) -> _Proxy:
        return self

    __deepcopy__ = __copy__


_OF_PROXY = {"__call__", "__get__", "__reduce_ex__", "__copy__", "__deepcopy__"}
# These read a slot of a proxy: its `__getattribute__` would ask the original.
_original, _name, call_of = (vars(_Proxy)[name].__get__ for name in ("_original", "_name", "_call"))


def proxy(original: Any, call: Callable[..., Any], name: str | None) -> _Proxy:
    """Returns a proxy of the original that passes calls to `call`. It is pickled by `name`, a `module:path`, if any."""
    kind: Any = type(original)
    result = object.__new__(_class_of(kind))
    for slot, value in {"_original": original, "_call": call, "_name": name}.items():
        object.__setattr__(result, slot, value)
    return result


@functools.cache
def _class_of(kind: type) -> type[_Proxy]:
    """Returns a class for proxies of a type: Python looks in the class for special methods, as `__len__`, `__get__`."""
    excluded = {*dir(_Proxy), "__class_getitem__"} - {"__setattr__", "__delattr__", "__dir__", "__repr__"}
    special = {name: getattr(kind, name, None) for name in dir(kind) if name.startswith("__") and name.endswith("__")}
    methods = {n: _forwarded(method) for n, method in special.items() if callable(method) and n not in excluded}
    method = inspect.getattr_static(kind, "__call__", None)
    if isinstance(method, types.FunctionType):

        def call(self: _Proxy, *args: Any, **kwargs: Any) -> Any:
            return call_of(self)(*args, **kwargs)

        call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]  # `inspect` asks the class for it
        methods["__call__"] = call
    if hasattr(kind, "__get__"):
        methods["__get__"] = lambda self, instance, owner=None: (
            self if instance is None else types.MethodType(self, instance)
        )
    return type("_Proxy", (_Proxy,), {**methods, "__slots__": ()})


def _forwarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a special method for proxies, such as `__len__`, which calls the original's method."""
    return lambda self, *args, **kwargs: method(_original(self), *args, **kwargs)
