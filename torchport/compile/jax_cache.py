"""JAX's own cache of executables, in torchport's cache folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache

from torchport.files import cache
from torchport.task import Task

DELIVERED = "/jax/compilation_cache/cache_hits"
"""JAX's event for an executable that its cache delivered. Source: jax/_src/compiler.py of JAX 0.10.2."""


def of_task(task: Task) -> contextlib.AbstractContextManager[None]:
    """Returns what points JAX's cache into torchport's cache folder for a run, unless caching is off."""
    off = task.original or cache.is_off() or not task.request.cache
    return contextlib.nullcontext() if off else enabled()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Points JAX's persistent compilation cache into torchport's cache folder, for every program however small.

    Where the user has named a folder to JAX (`JAX_COMPILATION_CACHE_DIR`), theirs stays, with their thresholds.
    """
    if jax.config.jax_compilation_cache_dir:
        yield
        return
    inside = cache.make(cache.jax_folder())
    cache.check_trusted(inside)
    settings = {
        "jax_compilation_cache_dir": str(inside),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        compilation_cache.reset_cache()  # JAX opens its folder once; what it has open by now is another one
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def deliveries() -> Iterator[list[str]]:
    """Gives a list that grows whenever JAX's cache delivers an executable."""
    events: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == DELIVERED:
            events.append(event)

    monitoring.register_event_listener(listen)
    try:
        yield events
    finally:
        monitoring.unregister_event_listener(listen)
