"""Attention of two streams, pictures and text, over the keys of both: norms, positions, exchanges and kernel in one.

This form is fast on a TPU. Each device projects its own tokens of the pictures; one pass normalises and turns q and k
and parts their heads; an all-to-all gives every device all tokens of its own heads (Ulysses, over `sp`); the kernel
reads tokens and heads as they arrive, values transposed as their projection makes them, and the text's keys from arrays
of their own. Nothing is joined, padded or turned on the way. Without `sp` the same holds with one group of heads.

Shapes: B batch, S tokens of the pictures, T of the text, D features of a head, F = H * D; K ways of `tp`, N of `sp`.

Source: Ulysses is DeepSpeed's (arXiv 2309.14509).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from torchport.attention import rotary, transposed
from torchport.attention.dispatch import Traced, current, score_bound, transposed_options
from torchport.attention.problem import Problem, platform
from torchport.attention.tiles import LANES, TAIL
from torchport.errors import AttentionError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """A stream's projections, before norms and positions.

    Attributes:
        q: Queries [B, S, F].
        k: Keys, likewise.
        v: Values, likewise.
        norm_q: Gains of the queries' RMSNorm [D]; None where a text's are normalised already.
        norm_k: Gains of the keys'.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    norm_q: jax.Array | None
    norm_k: jax.Array | None


def sizes() -> tuple[int, int]:
    """Returns the ways of `tp` and of `sp` of the mesh that is traced for; 1 and 1 without one."""
    shape = jax.sharding.get_abstract_mesh().shape
    return shape.get("tp", 1), shape.get("sp", 1)


def uses_kernel() -> bool:
    """Returns whether calls go to the kernel here: on a TPU, and no other implementation is named."""
    settings = current()
    may_use_kernel = settings.implementation in (None, "splash_transposed")
    return may_use_kernel and (settings.interpret or platform()[0] == "tpu")


def fits(batch: int, heads: int, head_size: int) -> bool:
    """Returns whether `joint` computes this here: by the kernel, on a mesh that divides samples and heads."""
    mesh = jax.sharding.get_abstract_mesh()
    divided = heads % math.prod(sizes()) == 0 and batch % mesh.shape.get("dp", 1) == 0
    return uses_kernel() and head_size == LANES and divided and not mesh.manual_axes


def multiple() -> int:
    """Returns the number of which the pictures' tokens should be a multiple: `sp`, times 256 for the kernel."""
    return sizes()[1] * (TAIL if uses_kernel() else 1)


def joint(
    pictures: Tokens,
    text: Tokens,
    cos_SD: jax.Array,
    sin_SD: jax.Array,
    lengths_B: jax.Array,
    *,
    heads: int,
    eps: float,
    bound: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns attention over the tokens of the pictures and the valid ones of the text.

    Args:
        pictures: S a multiple of `multiple`.
        text: Of T tokens, the valid ones first.
        cos_SD: Cosines of the pictures' positions, float32, each twice, one row for each valid token: tokens of the
            pictures beyond them are padding, and no keys.
        sin_SD: Sines, likewise.
        lengths_B: How many tokens of each sample's text are valid, integers.
        heads: H.
        eps: Of the norms.
        bound: Name of the bound of |q . k| in `Settings.bounds`.

    Returns:
        The pictures' outputs [B, K, N, S, F / (K * N)], features parted as heads are over devices, which
        `linear_of_parts` takes; padding among them holds anything finite. The text's outputs [B, T, F], 0 beyond its
        lengths. Both of q's dtype.

    Raises:
        AttentionError: Tokens that are not such a multiple.
        VmemError: A tile that does not fit the chip.
    """
    batch, tokens, features = pictures.q.shape
    valid, longest = cos_SD.shape[0], text.q.shape[1]
    need, size = multiple(), features // heads
    if tokens % need or tokens < valid:
        fact = f"The pictures have {tokens} tokens, {valid} of them valid"
        raise AttentionError("attention joint", fact, f"Pad them to a multiple of {need}", multiple=need)
    limit, interpret = score_bound(bound, size**-0.5), current().interpret
    problem = Problem(*platform(), pictures.q.dtype, size, size**-0.5, False, None, False, limit, None, interpret)
    note = current().note
    if note is not None:
        every = valid + longest
        note(Traced("splash_transposed", batch, heads, every, every, size, problem.bounded, 2, pictures.q.dtype.name))
    run = functools.partial(_local, problem, eps, valid)
    cos, sin = (jnp.pad(table, ((0, tokens - valid), (0, 0))) for table in (cos_SD, sin_SD))
    padding = -longest % TAIL
    text = dataclasses.replace(
        text, **{key: jnp.pad(getattr(text, key), ((0, 0), (0, padding), (0, 0))) for key in "qkv"}
    )
    out, out_text = _on_shards(run, pictures, text, cos, sin, jnp.clip(lengths_B.astype(jnp.int32), 0, longest))
    return out, out_text[:, :longest]


def linear_of_parts(x_BKNSF: jax.Array, weight_OF: jax.Array, bias_O: jax.Array) -> jax.Array:
    """Returns the projection [B, S, O] of features that are parted as `joint` leaves them, of x's dtype."""
    _, ways, groups, _, part = x_BKNSF.shape
    weight = weight_OF.astype(x_BKNSF.dtype).reshape(-1, ways, groups, part)
    # Of x's dtype at once, as torchax's own linear is: devices of `tp` would sum float32, twice the bytes.
    output = lax.dot_general(x_BKNSF, weight, (((1, 2, 4), (1, 2, 3)), ((), ())), preferred_element_type=x_BKNSF.dtype)
    return output + bias_O.astype(x_BKNSF.dtype)


def _on_shards(
    run: Callable[..., tuple[jax.Array, jax.Array]],
    pictures: Tokens,
    text: Tokens,
    cos: jax.Array,
    sin: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs a function of one device's streams on every device's."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run(pictures, text, cos, sin, lengths)
    axes = {axis: axis if axis in mesh.shape else None for axis in ("dp", "sp", "tp")}
    whole = PartitionSpec()
    by_token = PartitionSpec(axes["dp"], axes["sp"], axes["tp"])
    same = PartitionSpec(axes["dp"], None, axes["tp"])
    specs = (
        Tokens(by_token, by_token, by_token, whole, whole),
        Tokens(same, same, same, whole, whole),
        PartitionSpec(axes["sp"]),
        PartitionSpec(axes["sp"]),
        PartitionSpec(axes["dp"]),
    )
    out = (PartitionSpec(axes["dp"], axes["tp"], None, axes["sp"]), same)
    split = jax.shard_map(run, in_specs=specs, out_specs=out, check_vma=False)
    outputs: tuple[jax.Array, jax.Array] = split(pictures, text, cos, sin, lengths)
    return outputs


def _local(
    problem: Problem,
    eps: float,
    valid: int,
    pictures: Tokens,
    text: Tokens,
    cos_SD: jax.Array,
    sin_SD: jax.Array,
    lengths_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B, 1, N, S, F / N] and [B, T, F] of a device's own tokens and heads."""
    _, groups = sizes()
    text_q = text.q if text.norm_q is None else rotary.rms_norm(text.q, text.norm_q, eps)
    text_k = text.k if text.norm_k is None else rotary.rms_norm(text.k, text.norm_k, eps)
    texts = [
        _local_heads(x, groups) for x in (text_q.astype(pictures.q.dtype), text_k.astype(pictures.k.dtype), text.v)
    ]

    def attend(samples: range) -> tuple[jax.Array, jax.Array]:
        """Returns the outputs [B, N, S, F / N] and [B, T, F / N] of some samples."""
        here = slice(samples.start, samples.stop)

        def norm_and_rotate(x_BSF: jax.Array, weight_D: jax.Array | None) -> jax.Array:
            assert weight_D is not None
            x = rotary.rms_norm_rotary(x_BSF, weight_D, cos_SD, sin_SD, eps, groups, problem.interpret, samples)
            return _tokens(_all_to_all(x, groups))

        q, k = norm_and_rotate(pictures.q, pictures.norm_q), norm_and_rotate(pictures.k, pictures.norm_k)
        batch, local, features = pictures.v[here].shape
        v = jnp.swapaxes(pictures.v[here], 1, 2).reshape(batch, groups, features // groups, local)
        text_q, text_k, text_v = (x[here] for x in texts)
        arrays = [
            transposed.Keys(k, _all_to_all(v, groups), jnp.full((batch,), valid, jnp.int32)),
            transposed.Keys(text_k, jnp.swapaxes(text_v, 1, 2)[:, None], lengths_B[here]),
        ]
        options = functools.partial(transposed_options, problem, keys=k.shape[1], heads=1, head_size=LANES)
        attend = functools.partial(transposed.side_by_side, arrays=arrays, heads=1, head_size=LANES)
        out = attend(q, **options(queries=q.shape[1])).reshape(batch, groups, local, features // groups)
        return _all_to_all(out, groups), attend(text_q, **options(queries=text_q.shape[1]))

    # An all-to-all needs its parts as the outermost dim. With several samples at once, XLA would copy in- and outputs.
    batch = pictures.q.shape[0]
    step = batch if groups == 1 else 1
    parts = [attend(range(first, first + step)) for first in range(0, batch, step)]
    out, out_text = (jnp.concatenate(some) if len(some) > 1 else some[0] for some in zip(*parts, strict=True))
    is_valid = jnp.arange(out_text.shape[1]) < lengths_B[:, None]
    out_text = jnp.where(is_valid[..., None], out_text, jnp.zeros_like(out_text))
    if groups > 1:
        out_text = lax.all_gather(out_text, "sp", axis=2, tiled=True)
    return out[:, None], out_text


def _all_to_all(x_BNSF: jax.Array, groups: int) -> jax.Array:
    """Returns part n of every device of `sp` on device n, in the devices' order."""
    return lax.all_to_all(x_BNSF, "sp", 1, 1, tiled=True) if groups > 1 else x_BNSF


def _tokens(x_BNSF: jax.Array) -> jax.Array:
    """Returns the tokens that came from each device as one sequence."""
    batch, groups, local, part = x_BNSF.shape
    return x_BNSF.reshape(batch, groups * local, part)


def _local_heads(x_BTF: jax.Array, groups: int) -> jax.Array:
    """Returns the features of a device's own heads."""
    if groups == 1:
        return x_BTF
    part = x_BTF.shape[2] // groups
    return lax.dynamic_slice_in_dim(x_BTF, lax.axis_index("sp") * part, part, 2)
