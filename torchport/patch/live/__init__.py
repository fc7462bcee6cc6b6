"""The objects of the running process: a target, its change, its calls, and who else holds it.

The registry is all that the patch engine remembers of this process: one object, which every module of it asks. Two
things stand elsewhere, because Python looks for them there: one finder, without a state of its own, in `sys.meta_path`,
and the modules of patch files in `sys.modules`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

Callback = Callable[[types.ModuleType], None]
Window = Callable[[], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass
class Registry:
    """The patches in force in this process, and the objects that the engine has put into it."""

    #: Is held while a set of patches is entered or left.
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    owner: int | None = None  #: The thread that has patches in force, or None.
    sets: list[Any] = dataclasses.field(default_factory=list)
    #: The hashes of the patches in force, by their ids.
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Callbacks for a module that is about to be executed, by its name.
    before: dict[str, list[Callback]] = dataclasses.field(default_factory=dict)
    #: Callbacks for a module that has been executed, by its name.
    after: dict[str, list[Callback]] = dataclasses.field(default_factory=dict)
    #: Contexts that stay open while a package's modules execute, by the package.
    windows: dict[str, list[Window]] = dataclasses.field(default_factory=dict)
    #: The `__import__` of each module that imports stubs, by the module's name. Its functions keep it for good.
    servers: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: The functions that the engine has made, by their ids. None of them is an alias.
    substitutes: weakref.WeakValueDictionary[int, Any] = dataclasses.field(default_factory=weakref.WeakValueDictionary)
    #: Substitutes that weak references lead to: these must find them after the patches, too.
    kept: list[Any] = dataclasses.field(default_factory=list)

    def is_idle(self) -> bool:
        """Returns whether no callback and no context waits for an import."""
        return not (self.before or self.after or self.windows)


registry = Registry()
