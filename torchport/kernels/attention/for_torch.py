"""Attention for patches: functions of torch tensors, traced into JAX under torchax and computed eagerly without it.

Shapes: B batch, H heads, S queries, T keys, D features of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from torchport import engine
from torchport.errors import AttentionError


def attention(
    q_BHSD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    bound: str | None = None,
) -> torch.Tensor:
    """Returns attention over the first `lengths` keys of each sample; if S equals T, later queries' outputs are 0.

    Args:
        lengths: Integers [B]; None: all tokens.
        scale: The factor of q . k; 1 / sqrt(D) by default.
        causal: Whether query s sees keys up to s only.
        bound: The model card's name for the bound of these scores, if their q and k are normalised.

    Returns:
        [B, H, S, D] of q's dtype.
    """
    if engine.is_traced(q_BHSD):
        from torchport.kernels.attention import dispatch

        inputs = {"lengths": lengths, "scale": scale, "causal": causal, "bound": bound}
        traced: torch.Tensor = engine.call_kernel(dispatch.attention, q_BHSD, k_BHTD, v_BHTD, **inputs)
        return traced
    valid_BT = None if lengths is None else torch.arange(k_BHTD.shape[2], device=lengths.device) < lengths[:, None]
    mask = None if valid_BT is None else valid_BT[:, None, None, :]
    if mask is not None and causal:
        mask = mask & torch.ones(q_BHSD.shape[2], k_BHTD.shape[2], dtype=torch.bool, device=mask.device).tril()
    output = functional.scaled_dot_product_attention(
        q_BHSD, k_BHTD, v_BHTD, attn_mask=mask, is_causal=causal and mask is None, scale=scale
    )
    if valid_BT is not None and q_BHSD.shape[2] == k_BHTD.shape[2]:
        output = torch.where(valid_BT[:, None, :, None], output, torch.zeros_like(output))
    return output


@dataclasses.dataclass(frozen=True)
class Stream:
    """Projections of tokens, before norms and positions."""

    q: torch.Tensor  #: Queries [B, S, H * D].
    k: torch.Tensor  #: Keys, likewise.
    v: torch.Tensor  #: Values, likewise.
    #: The queries' norm, a LayerNorm or an RMSNorm over D, or over H * D; None if they are normalised already, or are
    #: not normalised at all.
    norm_q: Any = None
    norm_k: Any = None  #: The keys'.


def token_multiple(tokens: torch.Tensor) -> int:
    """Returns the divisor that the count of tokens should have for `self_attention`; 1 in eager PyTorch."""
    import jax

    # A rehearsal's tokens are on meta, and an abstract mesh is set for it.
    is_rehearsal = tokens.is_meta and not jax.sharding.get_abstract_mesh().empty
    if not engine.is_traced(tokens) and not is_rehearsal:
        return 1
    from torchport.kernels.attention import self_attention

    return self_attention.multiple()


def self_attention(
    tokens: Stream,
    further: Stream | None = None,
    *,
    rotary: tuple[torch.Tensor, torch.Tensor],
    rotate: Callable[[torch.Tensor], torch.Tensor],
    project: torch.nn.Linear,
    lengths: torch.Tensor | None = None,
    bound: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns attention of tokens and further tokens over both, by a kernel if it fits; the tokens' part is projected.

    Args:
        tokens: Tokens with positions, such as a picture's; then padding that takes no part.
        further: Tokens without positions, such as a text's, valid tokens first; or None.
        rotary: Cosines and sines [S, D] of the tokens' positions, float32, for features 2i and 2i + 1 as a pair.
        rotate: Upstream's rotation of [B, S, H, D] by `rotary`, which is called if no kernel fits.
        project: The linear layer after attention, for the tokens alone.
        lengths: Integers [B]: valid further tokens; None: all.
        bound: The model card's name for the bound of these scores.

    Returns:
        The tokens' [B, S, O], and the further tokens' [B, T, H * D] or None, of q's dtype. Further tokens are 0 beyond
        their lengths. Padding of the tokens holds arbitrary values.
    """
    size = rotary[0].shape[1]
    heads = tokens.q.shape[2] // size
    if engine.is_traced(tokens.q):
        from torchport.kernels.attention import self_attention as in_jax

        if in_jax.fits(tokens.q.shape[0], heads, size):
            return _by_kernel(tokens, further, rotary, lengths, project, heads=heads, bound=bound)
    valid, missing = rotary[0].shape[0], tokens.q.shape[1] - rotary[0].shape[0]
    q, k, v = (x[:, :valid] for x in _by_head(tokens, heads))
    streams = [(rotate(q), rotate(k), v)]
    if further is not None:
        # With all tokens valid any order is right: like models without a mask, further tokens come first. With lengths,
        # invalid tokens must be last.
        streams.insert(0 if lengths is None else 1, _by_head(further, heads))
    q, k, v = (torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*streams, strict=True))
    all_lengths = None if lengths is None else lengths + valid
    output = attention(q, k, v, lengths=all_lengths, bound=bound).transpose(1, 2).flatten(2).to(tokens.q.dtype)
    first = output.shape[1] - valid if lengths is None else 0
    out, rest = output[:, first : first + valid], output[:, :first] if lengths is None else output[:, valid:]
    if missing:
        out = functional.pad(out, (0, 0, 0, missing))
    return project(out), None if further is None else rest


def _by_kernel(
    tokens: Stream,
    further: Stream | None,
    rotary: tuple[torch.Tensor, torch.Tensor],
    lengths: torch.Tensor | None,
    project: torch.nn.Linear,
    heads: int,
    bound: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes `self_attention` by the kernel, in JAX, which gets norms as arrays of gains."""
    import jax

    from torchport.kernels.attention import self_attention as in_jax
    from torchport.kernels.attention.rotary import Norm

    def in_tokens(stream: Stream) -> in_jax.Tokens:
        """Returns a stream in the kernel's form; its arrays are still tensors."""
        norms = [
            None if norm is None else Norm(norm.weight, getattr(norm, "bias", None), **norm_kind(norm))
            for norm in (stream.norm_q, stream.norm_k)
        ]
        return in_jax.Tokens(stream.q, stream.k, stream.v, *norms)

    both = [None if stream is None else in_tokens(stream) for stream in (tokens, further)]
    tensors, tree = jax.tree.flatten((*both, *rotary, lengths, project.weight, project.bias))

    def run(*arrays: Any) -> tuple[Any, Any]:
        """Calls the kernel and the projection on the arrays of these tensors."""
        first, second, cos, sin, lengths_B, weight, bias = tree.unflatten(arrays)
        out, rest = in_jax.attention(first, second, cos, sin, lengths_B, heads=heads, bound=bound)
        return in_jax.linear_of_parts(out, weight, bias), rest

    output: tuple[torch.Tensor, torch.Tensor | None] = engine.call_kernel(run, *tensors)
    return output


def norm_kind(norm: Any) -> dict[str, Any]:
    """Returns a norm's `eps`, whether it is `centred`, and whether it rounds `twice`; raises for other modules.

    A model's own RMSNorm rounds twice: to the gains' dtype before the product with the gains, and after it.
    """
    of_torch = isinstance(norm, (torch.nn.LayerNorm, torch.nn.RMSNorm))
    is_known = of_torch or type(norm).__name__.endswith("RMSNorm")
    if not is_known or norm.weight is None or norm.eps is None:
        remedy = "It must be a LayerNorm or an RMSNorm with gains and eps; normalise before by any other, and pass None"
        raise AttentionError("self_attention", f"A norm of queries or keys is {norm!r}", remedy)
    return {"eps": float(norm.eps), "centred": isinstance(norm, torch.nn.LayerNorm), "twice": not of_torch}


def _by_head(stream: Stream, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns normalised queries, normalised keys, and values, each as [B, S, H, D]."""

    def parted(x: torch.Tensor, norm: Any) -> torch.Tensor:
        """Returns [B, S, H * D] as [B, S, H, D], normalised: before it is split, if the norm is over all heads."""
        is_over_all = norm is not None and norm.weight is not None and norm.weight.shape[0] == x.shape[2]
        x = norm(x).to(x.dtype) if is_over_all else x
        by_head = x.reshape(*x.shape[:2], heads, -1)
        return by_head if norm is None or is_over_all else norm(by_head).to(x.dtype)

    return parted(stream.q, stream.norm_q), parted(stream.k, stream.norm_k), parted(stream.v, norm=None)
