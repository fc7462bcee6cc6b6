"""All that the patch engine remembers of this process: one object, which every module of it asks.

Two things stand elsewhere, because Python looks for them there: one finder, without a state of its own, in
`sys.meta_path`, and the modules of patch files in `sys.modules`.
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
    """What is in force in this process, and what the engine has put into it.

    Attributes:
        lock: Is held while a set of patches is entered or left.
        owner: The thread that has patches in force, or None.
        before: Callbacks for a module that is about to be executed, by its name.
        after: Callbacks for a module that has been executed, by its name.
        windows: Contexts that stay open while a package's modules execute, by the package.
        servers: The `__import__` of each module that imports stubs, by the module's name. Its functions keep it for
            good.
        stand_ins: The functions that the engine has made, by their ids. None of them is an alias.
        kept: Stand-ins that somebody refers to weakly, and that have to outlive their set for that.
    """

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    owner: int | None = None
    sets: list[Any] = dataclasses.field(default_factory=list)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    before: dict[str, list[Callback]] = dataclasses.field(default_factory=dict)
    after: dict[str, list[Callback]] = dataclasses.field(default_factory=dict)
    windows: dict[str, list[Window]] = dataclasses.field(default_factory=dict)
    servers: dict[str, Any] = dataclasses.field(default_factory=dict)
    stand_ins: weakref.WeakValueDictionary[int, Any] = dataclasses.field(default_factory=weakref.WeakValueDictionary)
    kept: list[Any] = dataclasses.field(default_factory=list)

    def is_idle(self) -> bool:
        """Returns whether no import is waited for."""
        return not (self.before or self.after or self.windows)


registry = Registry()
