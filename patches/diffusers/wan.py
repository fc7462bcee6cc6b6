"""Forms of statements of diffusers' Wan transformer that are fit for tracing, and for a TPU's kernels.

Shapes: B batch, S tokens, H heads, D features of a head.
"""

import jax
import torch

from torchport import engine
from torchport.errors import BadValueError
from torchport.kernels.attention.for_torch import Stream, self_attention, token_multiple


def padded_tokens(hidden_states, timestep):
    """Returns tokens [B, S, F] padded with zeros to what the mesh and the kernel want, their timesteps flat, and S.

    Args:
        hidden_states: Tokens of the latents.
        timestep: [B], which is returned with None for S; or [B, S], where each token has its own.
    """
    missing = -hidden_states.shape[1] % token_multiple(hidden_states)
    padded = torch.nn.functional.pad(hidden_states, (0, 0, 0, missing)) if missing else hidden_states.contiguous()
    if timestep.ndim == 1:
        return padded, timestep, None
    return padded, torch.nn.functional.pad(timestep, (0, missing)).flatten(), padded.shape[1]


def projected_tokens(self, hidden_states, rotary_emb):
    """Returns the prediction [B, S, F] of every token that stands for latents, the others being padding.

    Args:
        self: The transformer.
        hidden_states: Tokens after the last block.
        rotary_emb: Positions of those that are no padding.
    """
    return self.proj_out(hidden_states)[:, : rotary_emb[0].shape[1]]


def attended(original, self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
    """Returns what upstream returns: self-attention by torchport's form, cross-attention by upstream's.

    Args:
        original: Upstream's method.
        self: The processor.
        attn: The module with the projections and norms.
        hidden_states: Tokens [B, S, H * D].
        encoder_hidden_states: The text, in cross-attention; None: self-attention.
        attention_mask: None: the transformer has none.
        rotary_emb: Cosines and sines, each [1, S, 1, D], a row for each token; what lies beyond is padding.

    Raises:
        BadValueError: A mask.
    """
    from diffusers.models.transformers.transformer_wan import _get_qkv_projections

    if encoder_hidden_states is not None:
        return original(self, attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
    if attention_mask is not None:
        remedy = "Pass None: every token takes part, as in upstream's transformer"
        raise BadValueError("Wan's attention_mask", f"It has the shape {list(attention_mask.shape)}", remedy)
    if engine.is_traced(hidden_states):
        # XLA would normalise anew inside each product that reads the tokens.
        hidden_states = engine.call_jax(jax.lax.optimization_barrier, hidden_states)
    output, _ = self_attention(
        Stream(*_get_qkv_projections(attn, hidden_states, None), attn.norm_q, attn.norm_k),
        rotary=tuple(table[0, :, 0] for table in rotary_emb),
        rotate=lambda x: rotated(x, rotary_emb),
        project=attn.to_out[0],
    )
    return attn.to_out[1](output)


def rotated(x, rotary_emb):
    """Returns queries or keys with rotary embeddings on pairs of neighbouring features, in one pass.

    Upstream writes into every second feature twice, which would be two scatters over all of them.

    Args:
        x: [B, S, H, D].
        rotary_emb: Cosines and sines, each [1, S, 1, D], where a pair has its value twice.
    """
    cos, sin = rotary_emb[0][..., 0::2], rotary_emb[1][..., 1::2]
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).type_as(x)
