"""Lets one module, and no other, import a package that is absent: it gets a stub, and every call of the stub raises.

The module is given builtins of its own, with an `__import__` that serves the package. `sys.modules` and
`importlib.util.find_spec` never see it, so that no capability probe finds a package that is not there. What the module
imports through `importlib.import_module` is not served.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from torchport.errors import StubCalledError, TooLateError, TorchportError
from torchport.patch.declared import Entry
from torchport.patch.live import hook, registry
from torchport.patch.live.counted import Calls


class Stub(types.ModuleType):
    """Stands for an absent package, and for everything in it. It can be named and inherited, but not called."""

    def __init__(self, name: str, entry: Entry, keep: Callable[[TorchportError], None]) -> None:
        """Makes the stub of a package or of a name in it; `keep` takes the error of each call."""
        super().__init__(name)
        self.__dict__["_entry"] = entry
        self.__dict__["_keep"] = keep

    def __getattr__(self, name: str) -> Stub:
        """Makes and keeps a stub of a name in this one: `flash.ops` of `flash`. A special name raises."""
        if name.startswith("__"):
            raise AttributeError(name)
        child = Stub(f"{self.__name__}.{name}", self.__dict__["_entry"], self.__dict__["_keep"])
        self.__dict__[name] = child
        return child

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refusal(sys._getframe(1), "called")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Returns a base for a class that inherits from the stub: making an object of the class raises."""

        def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
            raise self._refusal(sys._getframe(1), f"the base of {cls.__qualname__}, of which an object is made")

        return (type(self.__name__.rpartition(".")[2], (), {"__new__": refuse}),)

    def _refusal(self, caller: types.FrameType, how: str) -> StubCalledError:
        entry = self.__dict__["_entry"]
        name = caller.f_code.co_qualname
        if name == "<module>":
            name = f"what is called there, in {caller.f_globals.get('__name__')}"
        error = StubCalledError(
            f"{caller.f_code.co_filename}:{caller.f_lineno}",
            f"{self.__name__} is {how}, and '{entry.id}' ({entry.place}) only stands in for it",
            f"Install {self.__name__.partition('.')[0]}, or write a patch for {name}. The original backend "
            "applies only the patches that the card lists under 'original'",
            patch=entry.id,
        )
        self.__dict__["_keep"](error)
        return error


@dataclasses.dataclass(eq=False)
class _Server:
    """The `__import__` that one importing module gets. The module's functions keep it, also after the patches."""

    #: The stub of each package, and the counter of its imports. Empty while no patches are in force: then Python's own
    #: `__import__` serves all imports.
    stubs: dict[str, tuple[Stub, Calls]] = dataclasses.field(default_factory=dict)

    def __call__(self, name: str, scope: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        """Serves an import of a stubbed package; all others go to Python's own `__import__`."""
        package = name.partition(".")[0]
        # A `level` makes the import relative.
        if level or package not in self.stubs:
            return builtins.__import__(name, scope, local, fromlist, level)
        stub, calls = self.stubs[package]
        calls.count += 1
        # `from a.b import c` needs `a.b`, and `import a.b` binds `a`.
        for part in name.split(".")[1:] if fromlist else ():
            stub = getattr(stub, part)
        return stub


def arm(entry: Entry, calls: Calls, keep: Callable[[TorchportError], None]) -> Callable[[], None]:
    """Gives the entry's importers, at their import, an `__import__` that serves a stub of the absent package. Returns a
    function that undoes this. `keep` takes the error of each call of the stub, which upstream's `try` may swallow.
    """
    assert entry.stub is not None
    undos = contextlib.ExitStack()
    package = entry.stub.package
    for name in entry.stub.importers:
        if name in sys.modules:  # an earlier run may have imported it, with the stub
            stubs = [value for value in vars(sys.modules[name]).values() if isinstance(value, Stub)]
            if not any(value.__name__.partition(".")[0] == package for value in stubs):
                fact = f"'{name}' was imported before its stub of {package}"
                raise TooLateError(entry.place, fact, "Import it inside 'with patch.applied(...)'", patch=entry.id)
            # An import of the stub counts as a call of the patch.
            calls.count += 1
        server = registry.servers.setdefault(name, _Server())
        server.stubs[package] = (Stub(package, entry, keep), calls)
        undos.callback(server.stubs.pop, package, None)
        prepare = functools.partial(_exchange_import, server, undos)
        if name in sys.modules:
            prepare(sys.modules[name])
        undos.callback(hook.arm(name, prepare, when="before"))
    return undos.close


def _exchange_import(server: _Server, undos: contextlib.ExitStack, module: types.ModuleType) -> None:
    """Gives a module its own builtins with `server` as `__import__`, unless an earlier stub has; adds to `undos`."""
    before = module.__dict__.get("__builtins__", builtins.__dict__)
    names = vars(before) if isinstance(before, types.ModuleType) else before
    if names["__import__"] is server:
        return
    module.__dict__["__builtins__"] = {**names, "__import__": server}
    undos.callback(module.__dict__.__setitem__, "__builtins__", before)
