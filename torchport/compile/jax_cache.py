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
    """Returns a context that puts JAX's cache into torchport's cache folder, or does nothing where caching is off."""
    off = task.original or cache.is_off() or not task.request.cache
    return contextlib.nullcontext() if off else enabled()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Puts JAX's compilation cache into torchport's cache folder while the context lasts, for programs of any size.
    Where the user has set a folder for JAX (`JAX_COMPILATION_CACHE_DIR`), that folder and its thresholds stay.
    """
    if jax.config.jax_compilation_cache_dir:
        yield
        return
    folder = cache.make(cache.jax_folder())
    cache.check_trusted(folder)
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        compilation_cache.reset_cache()  # JAX opens a cache folder only once: this closes the open one
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def deliveries() -> Iterator[list[str]]:
    """Yields a list that gets an item for each executable that JAX's cache delivers while the context lasts."""
    events: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == DELIVERED:
            events.append(event)

    monitoring.register_event_listener(listen)
    try:
        yield events
    finally:
        monitoring.unregister_event_listener(listen)
