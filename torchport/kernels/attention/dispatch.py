"""The only door to attention: checks a call, chooses an implementation, and runs it on every device's shard.

If the caller names an implementation, that one runs, or it is an error. Otherwise the platform and the call choose:

| platform | request | implementation |
|---|---|---|
| tpu | head size up to 128, key padding at most | `splash_transposed` |
| tpu | head size up to 128, causal or a window | `splash` |
| gpu | 16-bit, head size up to 128, no window to the right | `cudnn` |
| any | a mask; or anything else | `plain` |

`splash_int8` is only ever named. Calls that it does not compute faster, or whose scores have no bound
(`Problem.int8`), are then `splash_transposed`'s.

Shapes: B batch, H heads, S queries, T keys, D features of a head.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import PartitionSpec

from torchport.config.card import Implementation
from torchport.config.machine import TPU_CHIPS
from torchport.config.strategy import Axis
from torchport.errors import AttentionError, nearest
from torchport.kernels.attention import bound as bounds
from torchport.kernels.attention import plain, splash, stock, tiles, transposed
from torchport.kernels.attention.int8 import EXPONENT, GROWTH
from torchport.kernels.attention.plain import Window
from torchport.shard import ways


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call of attention after its checks: everything that is known before tracing."""

    platform: str  #: `tpu`, `gpu` or `cpu`, where the program will run.
    chip: str | None  #: The kind of TPU chip, `v6e`; None on other platforms.
    dtype: Any  #: Of q, k and v.
    head_size: int  #: D.
    scale: float
    causal: bool
    window: Window | None  #: (left, right) around the query's own index, or None.
    masked: bool
    bound: float | None  #: Upper bound of |scale * q . k|, or None.
    tile: tiles.Tile | None
    interpret: bool

    @property
    def windowed(self) -> bool:
        """Whether some keys are hidden from some queries by their distance."""
        return self.causal or self.window not in (None, (None, None))

    @property
    def bounded(self) -> bool:
        """Whether softmax needs no maximum."""
        return bounds.holds(self.bound)

    def shifted(self, queries: int, keys: int) -> bool:
        """Returns whether a call tries shifts of the scores (`bound.shifts`), and keeps a maximum only if they fail."""
        return not self.bounded and current().shifts and min(queries, keys) >= LEAST_SHIFTED

    @property
    def int8(self) -> bool:
        """Whether `splash_int8` may multiply in eight bits: a head takes most of the lanes, and scores have a bound."""
        is_wide = tiles.LANES // 2 < self.head_size <= tiles.LANES
        return is_wide and self.dtype == jnp.bfloat16 and self.bound is not None and bounds.holds(GROWTH * self.bound)


def platform() -> tuple[str, str | None]:
    """Returns platform and TPU chip (None elsewhere) of the current mesh, or of JAX's first device without a mesh."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.devices()[0]
    chip = next((name for name, chip in TPU_CHIPS.items() if device.device_kind in chip.kinds), None)
    return ("gpu" if device.platform in ("cuda", "gpu") else device.platform), chip


def _int32_lengths(name: str, lengths: Any, batch: int, tokens: int) -> jax.Array:
    """Returns lengths as int32 [B]; numbers outside 0 to `tokens` raise, or are clipped while they are traced."""
    traced = isinstance(lengths, jax.core.Tracer)
    values = lengths if traced else numpy.asarray(lengths)
    if values.shape != (batch,) or not jnp.issubdtype(values.dtype, jnp.integer):
        fact = f"{name} has the shape {list(values.shape)} and dtype {values.dtype}"
        raise AttentionError("attention", fact, f"It must be [{batch}] integers, one for each sample")
    if not traced and not all(0 <= length <= tokens for length in values.tolist()):
        fact = f"{name} is {values.tolist()}"
        raise AttentionError("attention", fact, f"Each must be 0 to {tokens}, the number of tokens")
    return jnp.clip(jnp.asarray(values).astype(jnp.int32), 0, tokens)


def check_call(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, window: Any) -> None:
    """Refuses tensors whose shapes or dtypes do not fit together, and a window that is not (left, right)."""
    is_pair = isinstance(window, tuple) and len(window) == 2
    # By `type`, as `isinstance` takes a bool for an int.
    is_window = is_pair and all(side is None or (type(side) is int and side >= 0) for side in window)
    if window is not None and not is_window:
        remedy = "It must be (left, right), each a whole number of keys or None"
        raise AttentionError("attention", f"window is {window!r}", remedy)
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


NAMES: tuple[str, ...] = get_args(Implementation)
KERNELS = ("splash", "splash_transposed", "splash_int8")
MASKED = ("plain",)
WINDOWED = ("plain", "splash", "cudnn", "xla")
BATCH_AXES: tuple[Axis, ...] = ("dp",)
HEAD_AXES: tuple[Axis, ...] = ("sp", "tp")
QUERY_AXES: tuple[Axis, ...] = ("sp",)
LEAST_SHIFTED = 16384
"""The least number of queries, and of keys, for which shifts of the scores (`bound.shifts`) are tried: finding them
reads queries and keys again, and saves time for each pair."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """One call of attention in a program: its implementation, its sizes over all devices, and its arrays of keys."""

    implementation: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_size: int
    bounded: bool
    shifted: bool = False
    arrays: int = 1
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Pass:
    """A call on one device of a kernel other than attention: how to compile it alone, and the bytes that it moves."""

    kernel: str
    build: str  #: `module:function` that returns the kernel and its operands' shapes.
    arguments: Mapping[str, Any]  #: The function's arguments.
    #: The iterations of each of the kernel's loops when it is entered, the loop over the grid first.
    loops: tuple[int, ...]
    bytes: int  #: Read from HBM and written there.


@dataclasses.dataclass(frozen=True)
class Context:
    """Settings of all attention calls in a program, which hold while it is traced."""

    #: The implementation of every call without a mask of pairs; None: chosen call by call.
    implementation: Implementation | None = None
    #: Upper bounds of |q . k| by name, which calls refer to.
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    #: Called with every call of attention, or of a kernel beside it, while it is traced; for plans.
    note: Callable[[Traced | Pass], None] | None = None
    interpret: bool = False
    #: Check that a kernel takes a call, and return the queries instead.
    rehearse: bool = False
    #: Whether long calls whose scores have no bound try shifts of the scores in place of a maximum.
    shifts: bool = True


NONE = Context()
_CONTEXT: contextvars.ContextVar[Context] = contextvars.ContextVar("attention", default=NONE)


@contextlib.contextmanager
def context(value: Context) -> Iterator[None]:
    """Sets the settings for all calls of attention while the context lasts."""
    token = _CONTEXT.set(value)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


current = _CONTEXT.get
"""Returns the settings for the attention calls of the program that is being traced."""


def attention(
    q_BHSD: jax.Array,
    k_BHTD: jax.Array,
    v_BHTD: jax.Array,
    *,
    lengths: jax.Array | None = None,
    query_lengths: jax.Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    mask: jax.Array | None = None,
    bound: float | str | None = None,
    implementation: Implementation | None = None,
    tile: tiles.Tile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns softmax(scale * q k^T) v, with padding left out exactly.

    Under a mesh (`jax.set_mesh`, Auto axes) it runs on shards: batch over `dp`, heads over `sp` and `tp`, or queries
    over `sp` (`_query_axes`). Inside a `jax.shard_map` of the caller (check_vma=False) it takes its inputs as they are.

    Args:
        q_BHSD: Queries, of the dtype of keys and values.
        lengths: Integers [B], 0 to T: keys and values from there on are ignored, and may be NaN.
        query_lengths: Integers [B], 0 to S: outputs from there on are 0. By default `lengths` where S equals T, which
            is self-attention; pass the number of queries where that is a coincidence.
        scale: What scores are multiplied by; 1 / sqrt(D) by default.
        causal: Whether query s sees keys up to s only.
        window: (left, right): query s sees keys s - left to s + right; None on a side: no limit there.
        mask: bool (true takes part) or float (added to scaled scores), [B or 1, H or 1, S, T]; held in memory whole.
        bound: Upper bound of |q . k|, by the caller's word, or the name of one in `Context.bounds` (an unknown name
            is no bound). Small enough once scaled, it spares the running maximum (`bound.holds`).
        implementation: One of `NAMES`: that one, or an error.
        tile: The kernel's tile, instead of the table's.
        interpret: Run a TPU kernel as plain JAX, on any platform: for tests.

    Returns:
        [B, H, S, D] of q's dtype; 0 for a query that sees no key. It has no reverse mode.
    """
    check_call(q_BHSD, k_BHTD, v_BHTD, mask, window)
    (batch, _, keys, size), queries = k_BHTD.shape, q_BHSD.shape[2]
    lengths_B = None if lengths is None else _int32_lengths("lengths", lengths, batch, keys)
    if query_lengths is None and queries == keys:
        query_lengths = lengths_B
    factor = size**-0.5 if scale is None else float(scale)
    limit = score_bound(bound, factor)
    kind = (*platform(), q_BHSD.dtype, size, factor, causal, window)  # the first fields of `Problem`
    interpret = interpret or current().interpret
    problem = Problem(*kind, masked=mask is not None, bound=limit, tile=tile, interpret=interpret)
    run = _implementation(implementation, problem, q_BHSD.shape[:3], keys)
    run = run if mask is None else functools.partial(run, mask=mask)  # only `plain` takes a mask
    output = run(q_BHSD, k_BHTD, v_BHTD, lengths_B=lengths_B)
    if query_lengths is None:
        return output
    valid_BS = jnp.arange(queries) < _int32_lengths("query_lengths", query_lengths, batch, queries)[:, None]
    return jnp.where(valid_BS[:, None, :, None], output, jnp.zeros_like(output))


def score_bound(bound: float | str | None, factor: float) -> float | None:
    """Returns the bound of |factor * q . k|; None for None and unknown names. `bound` is of |q . k|, or its name."""
    limit = current().bounds.get(bound) if isinstance(bound, str) else bound
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
        raise AttentionError("attention", f"bound is {limit!r}", "It must be a positive number, or the name of one")
    return None if limit is None else limit * abs(factor)


def _implementation(
    requested: str | None, problem: Problem, shape: tuple[int, int, int], keys: int
) -> Callable[..., jax.Array]:
    """Returns the function that computes a call from q, k and v, `lengths_B` and, if the call has one, `mask`.

    Notes the call for a plan. Raises if the requested implementation cannot compute the call.

    Args:
        shape: [B, H, S] of the queries.
        keys: T.
    """
    program = current()
    # The program's implementation is for calls without a mask of pairs, which only `plain` computes.
    name = requested or (None if problem.masked else program.implementation) or _choice_for_platform(problem)
    if name not in NAMES:
        raise AttentionError("attention", f"There is no implementation '{name}'", nearest(name, NAMES), name=name)
    if problem.masked and name not in MASKED:
        remedy = "Pass lengths instead of the mask, or use implementation 'plain'"
        raise _refusal(name, "It is given a mask, and knows key padding only", remedy)
    if problem.windowed and name not in WINDOWED:
        fact = f"It is asked for causal={problem.causal}, window={problem.window}, and computes neither"
        raise _refusal(name, fact, f"Use one of {', '.join(WINDOWED)}")
    if problem.tile is not None and name not in KERNELS:
        raise _refusal(name, "It is given a tile, and has none", f"Tiles are for {KERNELS}")
    if name in KERNELS:
        _check_kernel(name, problem)
    if name == "splash_int8" and not problem.int8:
        name = "splash_transposed"
    if program.note is not None:
        dtype = jnp.dtype(problem.dtype).name
        shifted = name == "splash_transposed" and problem.shifted(shape[2], keys)
        program.note(Traced(name, *shape, keys, problem.head_size, problem.bounded, shifted, dtype=dtype))
    rules: dict[str, Any] = {"scale": problem.scale, "causal": problem.causal, "window": problem.window}
    run: Callable[..., jax.Array]
    if name == "plain":
        run = functools.partial(plain.attention, **rules)
    elif name in ("xla", "cudnn"):
        run = functools.partial(stock.attention, **rules | {"implementation": name})
    elif name == "splash":
        run = functools.partial(_splash, problem)
    else:
        run = functools.partial(_transposed, problem, int8=name == "splash_int8")
    # XLA itself splits its own form, and a call with a mask, whose dims are not those of q, k and v.
    return run if name == "xla" or problem.masked else _sharded(run, problem.windowed)


def _choice_for_platform(problem: Problem) -> str:
    """Returns the implementation for a call without a requested one, by platform, dtype, head size, mask and window."""
    if problem.masked:
        return "plain"
    if problem.platform == "tpu" and problem.dtype in (jnp.bfloat16, jnp.float32) and problem.head_size <= 128:
        return "splash" if problem.windowed else "splash_transposed"
    right = None if problem.window is None else problem.window[1]
    to_right = not problem.causal and right not in (None, 0)  # the window ends after the query
    if problem.platform == "gpu" and problem.dtype in (jnp.bfloat16, jnp.float16) and problem.head_size <= 128:
        return "plain" if to_right or problem.head_size % 8 else "cudnn"
    return "plain"


def _refusal(name: str, fact: str, remedy: str) -> AttentionError:
    return AttentionError(f"attention {name}", fact, remedy, name=name)


def _check_kernel(name: str, problem: Problem) -> None:
    """Refuses a call of a TPU kernel on another platform, or with a chip, tile or dtype that the kernel cannot take."""
    if problem.platform == "tpu" and problem.chip is None:
        raise _refusal(name, "It knows no tile for this TPU", f"Known: {', '.join(TPU_CHIPS)}; or use 'plain'")
    if name == "splash_int8":
        _check_int8(problem.chip)
    if problem.tile is not None and not isinstance(problem.tile, tiles.Tile):
        raise _refusal(name, f"The tile is {problem.tile!r}", "It must be a tiles.Tile")
    if problem.platform != "tpu" and not problem.interpret:
        fact = f"It is a TPU kernel, and this program is for {problem.platform}"
        remedy = "Use implementation 'plain', or run it on a TPU (or for one: under jax.set_mesh of its topology)"
        raise _refusal(name, fact, remedy)
    if problem.dtype not in (jnp.bfloat16, jnp.float32):
        fact = f"q, k and v are {jnp.dtype(problem.dtype).name}"
        raise _refusal(name, fact, "Pass bfloat16 or float32, or use implementation 'plain'")


def _check_int8(chip: str | None) -> None:
    if chip is not None and chip not in EXPONENT:
        fact = f"{chip} multiplies int8 no faster than bfloat16"
        raise _refusal("splash_int8", fact, "Use implementation 'splash_transposed'")


def _splash(problem: Problem, q: Any, k: Any, v: Any, *, lengths_B: Any) -> jax.Array:
    """Computes attention by JAX's Splash Attention, with the problem's tile or the chip's best tile."""
    # An added feature hides padding for free where the matrix unit is deeper than the head size.
    deep = problem.chip not in ("v5e", "v5p") or problem.head_size % tiles.LANES
    options: dict[str, Any] = {"padding": "feature" if deep else "segments", "interpret": problem.interpret}
    if problem.tile is not None:
        block_q = problem.tile.block_q
        block_kv = problem.tile.block_kv
        options["tile"] = tiles.SplashTile(block_q, block_kv, min(block_kv, 1024))
    elif problem.chip is not None:
        options["tile"] = tiles.best(problem.chip, "splash", problem.head_size, bounded=False)
    if current().rehearse:
        return q
    options |= {"scale": problem.scale, "causal": problem.causal, "window": problem.window}
    return splash.attention(q, k, v, lengths_B=lengths_B, **options)


def _transposed(problem: Problem, q: Any, k: Any, v: Any, *, lengths_B: Any, int8: bool) -> jax.Array:
    """Computes attention by `splash_transposed`, or by `splash_int8`; in a rehearsal returns the queries."""
    heads, head_size = transposed.grouping(q.shape[1], problem.head_size)
    settings = transposed_settings(problem, q.shape[2], k.shape[2], heads, head_size, int8=int8)
    if current().rehearse:
        return q
    return transposed.attention(q, k, v, lengths_B=lengths_B, settings=settings)


def transposed_settings(
    problem: Problem, queries: int, keys: int, heads: int, head_size: int, *, int8: bool
) -> transposed.KernelSettings:
    """Returns the settings of a call of `transposed`, in eight bits with `int8`; refuses a tile too large for VMEM."""
    if int8:
        _check_int8(problem.chip)
    chip = problem.chip or "v6e"  # interpreted: any tile will do
    vmem = TPU_CHIPS[chip].vmem
    name: Literal["splash_int8", "splash_transposed"] = "splash_int8" if int8 else "splash_transposed"

    def fitting(bounded: bool) -> tiles.Tile:
        """Returns the call's tile for scores with or without a bound."""
        tile = problem.tile or tiles.best(chip, name, head_size, bounded)
        assert isinstance(tile, tiles.Tile)  # JAX's own kernel alone has another kind
        fitted, itemsize = tile.fitted(queries, keys), jnp.dtype(problem.dtype).itemsize
        tiles.check_vmem(fitted, head_size=head_size, heads=heads, itemsize=itemsize, bounded=bounded, vmem=vmem)
        return tile

    return transposed.KernelSettings(
        problem.scale,
        problem.bounded,
        fitting(problem.bounded),
        vmem_bytes=vmem - tiles.RESERVED,
        int8=EXPONENT[chip] if int8 else None,
        shifted_tile=fitting(bounded=True) if problem.shifted(queries, keys) else None,
        interpret=problem.interpret,
    )


def _sharded(run: Callable[..., jax.Array], windowed: bool) -> Callable[..., jax.Array]:
    """Returns `run` as a function of whole q, k, v and lengths, which computes on every device's shard under a mesh.

    XLA cannot split a kernel by itself. Axes that do not divide the batch or the heads are left out: the devices along
    them compute the same.

    Args:
        windowed: Whether a query's index matters: then queries are not split.
    """

    def local(q: jax.Array, k: jax.Array, v: jax.Array, lengths_B: jax.Array | None = None) -> jax.Array:
        return run(q, k, v, lengths_B=lengths_B)

    def split(q: jax.Array, k: jax.Array, v: jax.Array, *, lengths_B: jax.Array | None) -> jax.Array:
        """Runs `local` on each device's shard; on whole arrays without a mesh, or if the caller has split them."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.manual_axes or mesh.size == 1:
            return local(q, k, v, lengths_B)
        _check_axes(mesh)
        sizes = dict(mesh.shape)
        batch = _dividing_axes(BATCH_AXES, sizes, q.shape[0])
        tokens = () if windowed else _query_axes(sizes, q.shape[2], k.shape[2])
        heads = _dividing_axes(tuple(axis for axis in HEAD_AXES if axis not in tokens), sizes, q.shape[1])
        queries, keys = PartitionSpec(batch, heads, tokens), PartitionSpec(batch, heads)
        arrays = (q, k, v) if lengths_B is None else (q, k, v, lengths_B)
        specs = (queries, keys, keys, PartitionSpec(batch))[: len(arrays)]
        return jax.shard_map(local, in_specs=specs, out_specs=queries, check_vma=False)(*arrays)

    return split


def _query_axes(sizes: Mapping[str, int], queries: int, keys: int) -> tuple[str, ...]:
    """Returns the axes that split queries, not heads: `QUERY_AXES` in cross-attention to few keys, else ().

    With heads split, devices exchange queries and outputs. With queries split, each device needs all heads of the keys:
    for few keys, such as a text's, every device has them.
    """
    parts = ways(QUERY_AXES, sizes)
    return QUERY_AXES if parts > 1 and keys * parts < queries and queries % parts == 0 else ()


def _check_axes(mesh: Any) -> None:
    """Refuses a mesh with explicit axes, and a mesh without an axis that splits the batch or the heads."""
    # With explicit axes, `shard_map` takes only arrays that are split as its `in_specs` say already.
    if jax.sharding.AxisType.Explicit in mesh.axis_types:
        remedy = "Make it with axis_types=(jax.sharding.AxisType.Auto, ...)"
        raise AttentionError("attention", f"The mesh {dict(mesh.shape)} has explicit axes", remedy)
    axes = (*BATCH_AXES, *HEAD_AXES)
    if all(size == 1 for axis, size in mesh.shape.items() if axis in axes):
        fact = f"No axis of the mesh {dict(mesh.shape)} splits the batch or the heads"
        remedy = f"Name its axes {', '.join(axes)}, or call attention inside a jax.shard_map of your own"
        raise AttentionError("attention", fact, remedy)


def _dividing_axes(axes: tuple[str, ...], sizes: Mapping[str, int], count: int) -> tuple[str, ...]:
    """Returns the axes of a mesh that split `count` items evenly: (sp=2, tp=3) for 4 items gives (sp,)."""
    chosen: tuple[str, ...] = ()
    for axis in axes:
        if axis in sizes and count % ways((*chosen, axis), sizes) == 0:
            chosen += (axis,)
    return chosen
