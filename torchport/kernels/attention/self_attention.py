"""Self-attention of tokens that have positions and are split over devices: norms, positions, exchanges and kernel.

Each device projects its own tokens; one pass normalises and rotates q and k and splits their heads; an all-to-all gives
every device all tokens of its own heads (Ulysses, over `sp`); the kernel reads tokens and heads as they arrive. Nothing
is joined, padded or transposed on the way. docs/attention.md has the details.

Further tokens have no positions, such as a text's; every device of `sp` has all of them.

Shapes: B batch, S tokens, T further tokens, D features of a head, H heads, F = H * D; K ways of `tp`, N of `sp`.

Source: Ulysses is DeepSpeed's (arXiv 2309.14509).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from torchport.errors import AttentionError
from torchport.kernels.attention import transposed
from torchport.kernels.attention.dispatch import Problem, Traced, current, platform, score_bound, transposed_settings
from torchport.kernels.attention.rotary import Heads, Norm, norm_rotary, normalised
from torchport.kernels.attention.tiles import LANES, TAIL


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Projections of tokens, before norms and positions."""

    q: jax.Array  #: Queries [B, S, F].
    k: jax.Array  #: Keys, likewise.
    v: jax.Array  #: Values, likewise.
    #: The queries' norm; None if queries are normalised already, or are not normalised at all.
    norm_q: Norm | None = None
    norm_k: Norm | None = None  #: The keys'.


def mesh_ways() -> tuple[int, int]:
    """Returns the sizes of the axes `tp` and `sp` of the current mesh; 1 for an axis that the mesh lacks."""
    shape = jax.sharding.get_abstract_mesh().shape
    return shape.get("tp", 1), shape.get("sp", 1)


def uses_kernel() -> bool:
    """Returns whether the program's calls go to the kernel: on a TPU, unless another implementation is named."""
    settings = current()
    may_use_kernel = settings.implementation in (None, "splash_transposed", "splash_int8")
    return may_use_kernel and (settings.interpret or platform()[0] == "tpu")


def fits(batch: int, heads: int, head_size: int) -> bool:
    """Returns whether the kernel takes a call of these sizes: its head size, and its samples and heads on the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    divided = heads % math.prod(mesh_ways()) == 0 and batch % mesh.shape.get("dp", 1) == 0
    return uses_kernel() and head_size <= LANES and head_size % 2 == 0 and divided and not mesh.manual_axes


def multiple() -> int:
    """Returns the divisor that the count of tokens must have: the size of `sp`, times 256 for the kernel."""
    return mesh_ways()[1] * (TAIL if uses_kernel() else 1)


def attention(
    tokens: Tokens,
    further: Tokens | None,
    cos_SD: jax.Array,
    sin_SD: jax.Array,
    lengths_B: jax.Array | None = None,
    *,
    heads: int,
    bound: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns attention of tokens and further tokens over all valid tokens and all valid further tokens.

    Args:
        tokens: S a multiple of `multiple`.
        further: T tokens, valid tokens first; or None.
        cos_SD: Cosines of the tokens' positions, float32, each twice, one row for each valid token. Tokens after these
            are padding, and no keys.
        lengths_B: How many further tokens of each sample are valid, integers; None: all are valid.
        bound: Name of the bound of |q . k| in `Context.bounds`.

    Returns:
        The tokens' outputs [B, K, N, S, F / (K * N)], features parted as heads are over devices, which
        `linear_of_parts` takes; padding among them holds anything finite. The further tokens' outputs [B, T, F], 0
        beyond their lengths; or None. Of q's dtype.
    """
    batch, count, features = tokens.q.shape
    valid, longest = cos_SD.shape[0], 0 if further is None else further.q.shape[1]
    need, size = multiple(), features // heads
    if count % need or count < valid:
        fact = f"There are {count} tokens, {valid} of them valid"
        raise AttentionError("self_attention", fact, f"Pad them to a multiple of {need}", multiple=need)
    limit = score_bound(bound, size**-0.5)
    interpret = current().interpret
    kind = (*platform(), tokens.q.dtype, size, size**-0.5)  # the first fields of `Problem`
    problem = Problem(*kind, causal=False, window=None, masked=False, bound=limit, tile=None, interpret=interpret)
    note = current().note
    if note is not None:
        keys = valid + longest
        arrays = 1 if further is None else 2
        dtype = tokens.q.dtype.name
        name = "splash_int8" if _int8(problem) else "splash_transposed"
        # Queries and keys are the same tokens.
        shifted = problem.shifted(count, count)
        note(Traced(name, batch, heads, keys, keys, size, problem.bounded, shifted, arrays, dtype))
    cos, sin = (jnp.pad(table, ((0, count - valid), (0, 0))) for table in (cos_SD, sin_SD))
    run = functools.partial(_local, problem, heads // math.prod(mesh_ways()), valid)
    if further is None:
        return _on_shards(run, tokens, further=None, cos=cos, sin=sin, lengths=None, head_size=size)
    padding = ((0, 0), (0, -longest % TAIL), (0, 0))
    q, k, v = (jnp.pad(x, padding) for x in (further.q, further.k, further.v))
    further = dataclasses.replace(further, q=q, k=k, v=v)
    lengths_B = jnp.full((batch,), longest) if lengths_B is None else jnp.clip(lengths_B, 0, longest)
    out, out_further = _on_shards(run, tokens, further, cos, sin, lengths_B.astype(jnp.int32), head_size=size)
    assert out_further is not None
    return out, out_further[:, :longest]


def linear_of_parts(x_BKNSF: jax.Array, weight_OF: jax.Array, bias_O: jax.Array | None) -> jax.Array:
    """Returns the projection [B, S, O], in x's dtype, of features [B, K, N, S, F], parted as by `attention`."""
    _, ways, groups, _, part = x_BKNSF.shape
    weight = weight_OF.astype(x_BKNSF.dtype).reshape(-1, ways, groups, part)
    # Of x's dtype at once, as torchax's own linear is: devices of `tp` would sum float32, twice the bytes.
    dims = (((1, 2, 4), (1, 2, 3)), ((), ()))  # summed over K, N and F of both
    output = lax.dot_general(x_BKNSF, weight, dims, preferred_element_type=x_BKNSF.dtype)
    return output if bias_O is None else output + bias_O.astype(x_BKNSF.dtype)


def _on_shards(
    run: Callable[..., tuple[jax.Array, jax.Array | None]],
    tokens: Tokens,
    further: Tokens | None,
    cos: jax.Array,
    sin: jax.Array,
    lengths: jax.Array | None,
    head_size: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Calls `run` on each device's tokens and heads by `shard_map`; without a mesh, on whole arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run(tokens, further, cos, sin, lengths)
    dp, sp, tp = (axis if axis in mesh.shape else None for axis in ("dp", "sp", "tp"))

    def specs(parts: Tokens | None, spec: PartitionSpec) -> Any:
        """Returns `spec` for q, k and v; a gain over all heads is split over `tp`, and a gain of a head is whole."""
        gains = {True: PartitionSpec(None), False: PartitionSpec(tp)}
        return jax.tree.map(lambda x: spec if x.ndim == 3 else gains[x.size == head_size], parts)

    split_tokens = PartitionSpec(dp, sp, tp)
    whole = PartitionSpec(dp, None, tp)
    table = PartitionSpec(sp)
    split = jax.shard_map(
        run,
        in_specs=(specs(tokens, split_tokens), specs(further, whole), table, table, PartitionSpec(dp)),
        out_specs=(PartitionSpec(dp, tp, None, sp), whole),  # [B, K, N, S, F] and [B, T, F]
        check_vma=False,  # a kernel does not say over which axes its outputs vary
    )
    outputs: tuple[jax.Array, jax.Array | None] = split(tokens, further, cos, sin, lengths)
    return outputs


def _local(
    problem: Problem,
    heads: int,
    valid: int,
    tokens: Tokens,
    further: Tokens | None,
    cos_SD: jax.Array,
    sin_SD: jax.Array,
    lengths_B: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes a device's part of `attention`. The device exchanges its tokens of `heads` heads for all tokens of some
    heads, `valid` of which are no padding, attends, and exchanges the outputs back. Returns outputs
    [B, 1, N, S, F / N] of its tokens, and [B, T, F] of the further tokens.
    """
    (ways, groups), size, interpret = mesh_ways(), problem.head_size, problem.interpret
    group, padded = transposed.grouping(heads, size)
    layout = Heads(size, padded, groups)
    if ways > 1:  # a norm over all heads needs sums of other devices, so it cannot wait for `norm_rotary`
        tokens = _normalised(tokens, size, only_over_all=True)
    q, k, v = (layout.spread(x) for x in (tokens.q, tokens.k, tokens.v))
    further_qkv = None if further is None else _heads_of_device(further, layout)

    def attend(samples: range) -> tuple[jax.Array, jax.Array | None]:
        """Computes attention of some samples: outputs [B, N, S, F / N], and [B, T, F / N] of the further tokens."""
        taken = slice(samples.start, samples.stop)

        def with_positions(x_BSF: jax.Array, norm: Norm | None) -> jax.Array:
            """Returns queries or keys of all tokens and this device's heads, normalised and rotated, [B, S, F / N]."""
            x = norm_rotary(x_BSF, norm, cos_SD, sin_SD, layout, interpret=interpret, samples=samples)
            x_BNSF = _all_to_all(x, groups)  # the tokens that came from each device, which become one sequence
            return x_BNSF.reshape(x_BNSF.shape[0], -1, x_BNSF.shape[3])

        queries, keys = with_positions(q, tokens.norm_q), with_positions(k, tokens.norm_k)
        batch, local, features = v[taken].shape
        values = jnp.swapaxes(v[taken], 1, 2).reshape(batch, groups, features // groups, local)
        arrays = [transposed.Keys(keys, _all_to_all(values, groups), jnp.full((batch,), valid, jnp.int32))]
        if further_qkv is not None and lengths_B is not None:
            _, k_BTF, v_BTF = (x[taken] for x in further_qkv)
            arrays.append(transposed.Keys(k_BTF, jnp.swapaxes(v_BTF, 1, 2)[:, None], lengths_B[taken]))

        def over_all_keys(x_BSF: jax.Array) -> jax.Array:
            settings = transposed_settings(problem, x_BSF.shape[1], keys.shape[1], group, padded, int8=_int8(problem))
            return transposed.side_by_side(x_BSF, arrays, heads=group, head_size=padded, settings=settings)

        out = over_all_keys(queries).reshape(batch, groups, local, features // groups)
        out = _all_to_all(layout.gathered(out), groups)
        return out, None if further_qkv is None else layout.gathered(over_all_keys(further_qkv[0][taken]))

    # An all-to-all needs its parts as the outermost dim. With several samples at once, XLA would copy in- and outputs.
    at_once = q.shape[0] if groups == 1 else 1
    parts = [attend(range(first, first + at_once)) for first in range(0, q.shape[0], at_once)]
    out = jnp.concatenate([part for part, _ in parts])[:, None]
    if lengths_B is None:
        return out, None
    out_further = jnp.concatenate([part for _, part in parts if part is not None])
    is_valid = jnp.arange(out_further.shape[1]) < lengths_B[:, None]
    out_further = jnp.where(is_valid[..., None], out_further, jnp.zeros_like(out_further))
    if groups > 1:
        out_further = lax.all_gather(out_further, "sp", axis=2, tiled=True)
    return out, out_further


def _int8(problem: Problem) -> bool:
    """Returns whether the kernel multiplies in eight bits: the program asks for it, and the problem allows it."""
    return current().implementation == "splash_int8" and problem.int8


def _normalised(tokens: Tokens, size: int, *, only_over_all: bool = False) -> Tokens:
    """Returns tokens after their norms; with `only_over_all`, only norms over all heads together are applied."""
    axis = "tp" if mesh_ways()[0] > 1 else None

    def after(x: jax.Array, norm: Norm | None) -> tuple[jax.Array, Norm | None]:
        """Returns x after a norm, with None for the norm; or x and the norm, if the norm is left for later."""
        over_all = norm is not None and norm.is_over_all(size)
        if only_over_all and not over_all:
            return x, norm
        return normalised(x, norm, axis if over_all else None), None

    (q, norm_q), (k, norm_k) = after(tokens.q, tokens.norm_q), after(tokens.k, tokens.norm_k)
    return Tokens(q, k, tokens.v, norm_q, norm_k)


def _all_to_all(x_BNSF: jax.Array, groups: int) -> jax.Array:
    """Exchanges parts along N between the devices of `sp`: device n returns part n of each device, in their order."""
    return lax.all_to_all(x_BNSF, "sp", split_axis=1, concat_axis=1, tiled=True) if groups > 1 else x_BNSF


def _heads_of_device(tokens: Tokens, layout: Heads) -> list[jax.Array]:
    """Returns normalised queries, keys and values [B, T, F / N] of this device's heads; `tokens` have all heads."""
    tokens = _normalised(tokens, layout.size)
    qkv = [layout.spread(x) for x in (tokens.q, tokens.k, tokens.v)]
    if layout.groups == 1:
        return qkv
    part = qkv[0].shape[2] // layout.groups
    return [lax.dynamic_slice_in_dim(x, lax.axis_index("sp") * part, part, axis=2) for x in qkv]
