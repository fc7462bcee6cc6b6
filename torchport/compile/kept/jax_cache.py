"""JAX's own cache of executables, in torchport's cache folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from torchport.files import cache


@contextlib.contextmanager
def jax_cache(root: Path) -> Iterator[bool]:
    """Points JAX's persistent compilation cache into the cache folder, for every program however small.

    Where the user has named a folder to JAX (`JAX_COMPILATION_CACHE_DIR`), theirs stays, with their thresholds. It
    gives whether that is so.

    Args:
        root: The cache folder; `jax/<kind of CPU>` in it is used.

    Raises:
        OutputError: The folder cannot be made.
        BadValueError: Others can write to it.
    """
    if jax.config.jax_compilation_cache_dir:
        yield True
        return
    inside = cache.make(root / "jax" / cache.host())
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
        yield False
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def bypassed() -> Iterator[None]:
    """Compiles without JAX's cache, which neither delivers nor stores what is compiled meanwhile."""
    before = jax.config.jax_enable_compilation_cache
    try:
        compilation_cache.reset_cache()  # whether it is in use is looked up once
        jax.config.update("jax_enable_compilation_cache", False)
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
