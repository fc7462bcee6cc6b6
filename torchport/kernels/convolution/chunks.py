"""A decoder on chunks of time, one after the other, as one loop of the program.

What each leaves to the next are values. The same function runs on every chunk, so that it is compiled once. A
convolution in it takes what it left of the chunk before, and leaves what the next one needs. `Tape` brings these, in
the order of the calls.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from torchport import engine


class Tape:
    """What the calls of one chunk leave to the next.

    Args:
        values: What they left before, in the order of the calls; None: this is the first chunk, and nothing is known.
        number: The chunk's, from 0.
    """

    def __init__(self, values: list[Any] | None, number: Any, count: int) -> None:
        self.values = values
        self.number = number
        self.count = count
        self.left: list[Any] = []

    @property
    def first(self) -> Any:
        return self.number == 0

    def take(self) -> Any:
        """Returns what this call left before; None if there is nothing."""
        return None if self.values is None else self.values[len(self.left)]

    def leave(self, value: Any) -> None:
        self.left.append(value)


_TAPE: contextvars.ContextVar[Tape | None] = contextvars.ContextVar("tape", default=None)


def current() -> Tape | None:
    """Returns the tape of the chunk that is being traced; None: the whole video is."""
    return _TAPE.get()


@contextlib.contextmanager
def _using(tape: Tape) -> Iterator[None]:
    token = _TAPE.set(tape)
    try:
        yield
    finally:
        _TAPE.reset(token)


def scanned(step: Callable[[Any], Any], size: int, x_BCTHW: jax.Array) -> jax.Array:
    """Returns what a function makes of chunks of so many frames, put together.

    Args:
        step: Takes a tensor of the engine, [B, C, size, H, W], and returns one.
        x_BCTHW: T a multiple of it.
    """
    batch, channels, frames, height, width = x_BCTHW.shape
    count = frames // size

    def run(values: list[Any] | None, number: jax.Array, x: jax.Array) -> tuple[Any, list[Any]]:
        def chunk(values: list[Any] | None, number: Any, x: Any) -> tuple[Any, list[Any]]:
            tape = Tape(values, number, count)
            with _using(tape):
                out = step(x)
            return out, tape.left

        made: tuple[Any, list[Any]] = engine.call_torch(chunk, values, number, x)
        return made

    chunks = jnp.moveaxis(x_BCTHW.reshape(batch, channels, count, size, height, width), 2, 0)
    left = jax.eval_shape(functools.partial(run, None), jnp.int32(0), chunks[0])[1]
    start = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in left]

    def body(values: list[Any], item: tuple[jax.Array, jax.Array]) -> tuple[list[Any], jax.Array]:
        out, values = run(values, item[0], item[1])
        return values, out

    _, outs = jax.lax.scan(body, start, (jnp.arange(count, dtype=jnp.int32), chunks))
    joined = jnp.moveaxis(outs, 0, 2)
    return joined.reshape(*joined.shape[:2], -1, *joined.shape[4:])
