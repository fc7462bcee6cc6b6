"""Attention for patches: functions of torch tensors, traced into JAX under torchax and computed eagerly without it.

Shapes: B batch, H heads, S queries, T keys, D features of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
    """Returns attention over the first `lengths` tokens of each sample; 0 for queries beyond them where S equals T.

    Args:
        q_BHSD: Queries [B, H, S, D].
        k_BHTD: Keys [B, H, T, D].
        v_BHTD: Values [B, H, T, D].
        lengths: Integers [B]; None: all tokens.
        scale: 1 / sqrt(D) by default.
        causal: Whether query s sees keys up to s only.
        bound: The model card's name for the bound of these scores, if their q and k are normalised.

    Returns:
        [B, H, S, D] of q's dtype.
    """
    if not engine.is_traced(q_BHSD):
        return _eager(q_BHSD, k_BHTD, v_BHTD, lengths, scale, causal)
    from torchport.attention import dispatch

    inputs = {"lengths": lengths, "scale": scale, "causal": causal, "bound": bound}
    output: torch.Tensor = engine.call_jax(dispatch.attention, q_BHSD, k_BHTD, v_BHTD, **inputs)
    return output


def _eager(
    q_BHSD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: float | None,
    causal: bool,
) -> torch.Tensor:
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
    """A stream's projections, before norms and positions.

    Attributes:
        q: Queries [B, S, H * D].
        k: Keys, likewise.
        v: Values, likewise.
        norm_q: The queries' RMSNorm over D, with gains and `eps`; None where they are normalised already: a text's.
        norm_k: The keys'.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    norm_q: Any = None
    norm_k: Any = None


def token_multiple(tokens: torch.Tensor) -> int:
    """Returns the number of which the pictures' token count should be a multiple, for `joint` on this mesh."""
    import jax

    # A rehearsal's tokens are on meta, and an abstract mesh is set for it.
    if not engine.is_traced(tokens) and (not tokens.is_meta or jax.sharding.get_abstract_mesh().empty):
        return 1
    from torchport.attention import joint

    return joint.multiple()


def joint(
    pictures: Stream,
    text: Stream,
    *,
    rotary: tuple[torch.Tensor, torch.Tensor],
    rotate: Callable[[torch.Tensor], torch.Tensor],
    lengths: torch.Tensor,
    project: torch.nn.Linear,
    bound: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention of pictures and text over both, the pictures' projected, in the form that fits the platform.

    Args:
        pictures: Tokens of the pictures, first those that have positions, then padding that takes no part.
        text: Tokens of the text, the valid ones first.
        rotary: Cosines and sines [S, D] of the pictures' positions, float32, for features 2i and 2i + 1 as a pair.
        rotate: Upstream's own rotation of [B, S, H, D] by them, for wherever there is no kernel.
        lengths: Integers [B]: valid tokens of the text.
        project: What the pictures' outputs go through.
        bound: The model card's name for the bound of these scores.

    Returns:
        [B, S, O] and [B, T, H * D] of q's dtype. The text's are 0 beyond its lengths. Padding of the pictures holds
        arbitrary values.
    """
    size = rotary[0].shape[1]
    heads = pictures.q.shape[2] // size
    if engine.is_traced(pictures.q):
        from torchport.attention import joint as form

        if form.fits(pictures.q.shape[0], heads, size):
            return _jointly(pictures, text, rotary, lengths, project, heads, bound)
    valid, every = rotary[0].shape[0], pictures.q.shape[1]
    q, k, v = (_by_head(x[:, :valid], heads) for x in (pictures.q, pictures.k, pictures.v))
    text_q, text_k, text_v = (_by_head(x, heads) for x in (text.q, text.k, text.v))
    q = torch.cat([rotate(_normal(q, pictures.norm_q)), _normal(text_q, text.norm_q)], dim=1)
    k = torch.cat([rotate(_normal(k, pictures.norm_k)), _normal(text_k, text.norm_k)], dim=1)
    v = torch.cat([v, text_v], dim=1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    output = attention(q, k, v, lengths=lengths + valid, bound=bound).transpose(1, 2).flatten(2).to(pictures.q.dtype)
    out = functional.pad(output[:, :valid], (0, 0, 0, every - valid)) if every > valid else output[:, :valid]
    return project(out), output[:, valid:]


def _jointly(
    pictures: Stream,
    text: Stream,
    rotary: tuple[torch.Tensor, torch.Tensor],
    lengths: torch.Tensor,
    project: torch.nn.Linear,
    heads: int,
    bound: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `joint` by the kernel."""
    from torchport.attention import joint as form

    norms = [norm for stream in (pictures, text) for norm in (stream.norm_q, stream.norm_k)]
    eps = common_eps([norm for norm in norms if norm is not None])

    def run(streams: list[list[Any]], tables: Any, lengths_B: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
        tokens, (cos, sin) = [form.Tokens(*stream) for stream in streams], tables
        out, text = form.joint(tokens[0], tokens[1], cos, sin, lengths_B, heads=heads, eps=eps, bound=bound)
        return form.linear_of_parts(out, weight, bias), text

    gains = [None if norm is None else norm.weight for norm in norms]
    streams = [[s.q, s.k, s.v, *gains[2 * n : 2 * n + 2]] for n, s in enumerate((pictures, text))]
    output: tuple[torch.Tensor, torch.Tensor] = engine.call_jax(
        run, streams, tuple(rotary), lengths, project.weight, project.bias
    )
    return output


def common_eps(norms: Sequence[Any]) -> float:
    """Returns what all norms add to the mean square.

    Raises:
        AttentionError: They differ.
    """
    eps = {float(norm.eps) for norm in norms}
    if len(eps) > 1:
        raise AttentionError("attention joint", f"The norms' eps differ: {sorted(eps)}", "They must be one")
    return eps.pop()


def _normal(x: torch.Tensor, norm: Any) -> Any:
    return x if norm is None else norm(x).to(x.dtype)


def _by_head(x_BSF: torch.Tensor, heads: int) -> torch.Tensor:
    return x_BSF.reshape(*x_BSF.shape[:2], heads, -1)
