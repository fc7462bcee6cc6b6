"""One call of a TPU kernel as shapes alone: what `bundles.compile_kernel` compiles for a TPU that is not there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from torchport.kernels.attention import splash, transposed
from torchport.kernels.attention.int8 import EXPONENT
from torchport.kernels.attention.tiles import Tile


def call(
    implementation: str,
    queries: int,
    keys: int,
    heads: int,
    head_size: int,
    bounded: bool,
    tile: dict[str, int],
    vmem_bytes: int,
    padding: Literal["feature", "segments"] = "feature",
    chip: str = "v6e",
) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]:
    """Returns a function of q, k, v and lengths, and their shapes [1, H, S, D], [1, H, T, D], [1, H, T, D], [1].

    Args:
        implementation: `splash_transposed`, `splash_int8` or `splash`.
        chip: Which decides how `splash_int8` takes exponentials.
        queries: S.
        keys: T.
        heads: H, of one device.
        head_size: D.
        bounded: Whether the caller knows a bound of the scores.
        tile: The fields of a `tiles.Tile`, or of a `tiles.SplashTile`.
        vmem_bytes: What the compiler may use of VMEM; JAX's own kernel takes no such limit.
        padding: How JAX's own kernel hides padded keys.
    """
    how: dict[str, Any] = {"scale": head_size**-0.5}
    if implementation == "splash":
        how |= {"causal": False, "window": None, "padding": padding, **tile}
        attention: Callable[..., jax.Array] = splash.attention
    else:
        how |= {"bounded": bounded, "tile": Tile(**tile), "vmem_bytes": vmem_bytes}
        how |= {"int8": EXPONENT[chip] if implementation == "splash_int8" else None}
        attention = transposed.attention

    def run(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        return functools.partial(attention, **how)(q, k, v, lengths_B=lengths)

    shapes = [(1, heads, tokens, head_size) for tokens in (queries, keys, keys)]
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    return run, [*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), lengths]
