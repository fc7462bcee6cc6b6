"""One call of attention: what is known of it before tracing, and what is refused at once.

Shapes: B batch, H heads, S queries, T keys, D features of a head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy

from torchport.config.machine import TPU_CHIPS
from torchport.errors import AttentionError
from torchport.kernels.attention import bound as bounds
from torchport.kernels.attention import tiles
from torchport.kernels.attention.int8 import GROWTH
from torchport.kernels.attention.plain import Window


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call, checked; everything that is known before tracing."""

    platform: str  #: `tpu`, `gpu` or `cpu`, where the program will run.
    chip: str | None  #: The TPU's kind, `v6e`; None elsewhere.
    dtype: Any  #: Of q, k and v.
    head_size: int  #: D.
    scale: float  #: What scores are multiplied by.
    causal: bool  #: Whether query s sees keys up to s only.
    window: Window | None  #: (left, right) around the query's own index, or None.
    masked: bool  #: Whether there is a mask beyond key padding.
    bound: float | None  #: Upper bound of |scale * q . k|, or None.
    tile: tiles.Tile | None  #: The tile that the caller wants, or None.
    interpret: bool  #: Run a TPU kernel as plain JAX.

    @property
    def windowed(self) -> bool:
        """Whether some keys are hidden from some queries by their distance."""
        return self.causal or self.window not in (None, (None, None))

    @property
    def bounded(self) -> bool:
        """Whether softmax needs no maximum."""
        return bounds.holds(self.bound)

    @property
    def int8(self) -> bool:
        """Whether `splash_int8` multiplies queries and keys in eight bits: where that is faster, and scores stay within
        the bound.
        """
        fills = tiles.LANES // 2 < self.head_size <= tiles.LANES
        return fills and self.dtype == jnp.bfloat16 and self.bound is not None and bounds.holds(GROWTH * self.bound)


def platform() -> tuple[str, str | None]:
    """Returns the platform that the program is traced for, and its TPU chip: the mesh's if there is one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        first = jax.devices()[0]
        platform, kind = first.platform, first.device_kind
    else:
        platform, kind = device.platform, device.device_kind
    chips = [name for name, chip in TPU_CHIPS.items() if kind in chip.kinds]
    return ("gpu" if platform in ("cuda", "gpu") else platform), (chips[0] if chips else None)


def int32_lengths(name: str, lengths: Any, batch: int, tokens: int) -> jax.Array:
    """Returns lengths as int32 [B]; numbers that are known here must lie within the tokens, others are cut to them."""
    traced = isinstance(lengths, jax.core.Tracer)
    values = lengths if traced else numpy.asarray(lengths)
    if values.shape != (batch,) or not jnp.issubdtype(values.dtype, jnp.integer):
        fact = f"{name} has the shape {list(values.shape)} and dtype {values.dtype}"
        raise AttentionError("attention", fact, f"It must be [{batch}] integers, one for each sample")
    if not traced and not all(0 <= length <= tokens for length in values.tolist()):
        fact = f"{name} is {values.tolist()}"
        raise AttentionError("attention", fact, f"Each must be 0 to {tokens}, the number of tokens")
    return jnp.clip(jnp.asarray(values).astype(jnp.int32), 0, tokens)


def check_window(window: Any) -> None:
    """Refuses a window that is no pair of distances."""
    sides = window if isinstance(window, tuple) and len(window) == 2 else ("none",)
    if window is not None and not all(side is None or (type(side) is int and side >= 0) for side in sides):
        remedy = "It must be (left, right), each a whole number of keys or None"
        raise AttentionError("attention", f"window is {window!r}", remedy)


def check_bound(bound: Any) -> None:
    """Refuses a bound that bounds nothing."""
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or not bound > 0):
        raise AttentionError("attention", f"bound is {bound!r}", "It must be a positive number, or the name of one")


def check_call(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, window: Any) -> None:
    """Refuses tensors that do not belong together, and a window that is none."""
    check_window(window)
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4 or q.shape[:2] + q.shape[3:] != k.shape[:2] + k.shape[3:]:
        raise AttentionError("attention", shapes, "They must be [B, H, S, D], [B, H, T, D] and [B, H, T, D]")
    if 0 in q.shape or 0 in k.shape:
        raise AttentionError("attention", shapes, "None of them may be empty")
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise AttentionError("attention", f"q is {q.dtype}, k {k.dtype}, v {v.dtype}", "They must have one float dtype")
    if mask is not None:
        full = (*q.shape[:2], q.shape[2], k.shape[2])
        fits = mask.ndim == 4 and mask.shape[2:] == full[2:]
        if not fits or any(have not in (1, want) for have, want in zip(mask.shape[:2], full[:2], strict=True)):
            shape = f"[{full[0]} or 1, {full[1]} or 1, {full[2]}, {full[3]}]"
            raise AttentionError("attention", f"The mask has the shape {list(mask.shape)}", f"It must be {shape}")
