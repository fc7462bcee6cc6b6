"""Exact forms, fit for tracing, of statements of diffusers' CogVideoX transformer.

Shapes: B batch, S tokens of the pictures, T of the text, D features.
"""

import jax
import torch

from torchport import engine
from torchport.errors import BadValueError
from torchport.kernels.attention.for_torch import Stream, self_attention, token_multiple


def padded_tokens(original, self, text_embeds, image_embeds):
    """Returns the tokens [B, T + S, D] of text and pictures, padded with zeros to what the mesh and the kernel want.

    Tokens whose positions are added to them, not turned, are not padded: nothing would say where their padding begins.

    Args:
        original: Upstream's method.
        self: The module.
        text_embeds: The text's embeddings [B, T, E].
        image_embeds: The latents [B, F, C, H, W].
    """
    tokens = original(self, text_embeds, image_embeds)
    if self.use_positional_embeddings or self.use_learned_positional_embeddings:
        return tokens
    missing = -(tokens.shape[1] - text_embeds.shape[1]) % token_multiple(tokens)
    return torch.nn.functional.pad(tokens, (0, 0, 0, missing)) if missing else tokens


def normalised_once(original, self, hidden_states, encoder_hidden_states, temb):
    """Returns what upstream returns, with the pictures' normalised tokens as an array of their own.

    Args:
        original: Upstream's method.
        self: The module.
        hidden_states: Tokens of the pictures.
        encoder_hidden_states: Tokens of the text.
        temb: The time's embedding.
    """
    hidden_states, *others = original(self, hidden_states, encoder_hidden_states, temb)
    if engine.is_traced(hidden_states):
        hidden_states = engine.call_jax(jax.lax.optimization_barrier, hidden_states)
    return hidden_states, *others


def attended(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb):
    """Returns the attention [B, S, D] of the pictures' tokens and [B, T, D] of the text's over both.

    Args:
        attn: The module, whose projections and norms are for both.
        hidden_states: Tokens of the pictures.
        encoder_hidden_states: Tokens of the text.
        attention_mask: None: upstream's pipelines have none.
        image_rotary_emb: Cosines and sines, a row for each of the pictures' tokens; what lies beyond is padding. None
            where positions are added to the tokens.

    Raises:
        BadValueError: A mask.
    """
    from diffusers.models.embeddings import apply_rotary_emb

    if attention_mask is not None:
        remedy = "Pass None: every token of the text takes part, as in upstream's pipelines"
        raise BadValueError("CogVideoX's attention_mask", f"It has the shape {list(attention_mask.shape)}", remedy)

    def stream(tokens):
        return Stream(attn.to_q(tokens), attn.to_k(tokens), attn.to_v(tokens), attn.norm_q, attn.norm_k)

    # Where a network has no positions here, these turn nothing.
    size = (hidden_states.shape[1], attn.to_q.out_features // attn.heads)
    rotary = image_rotary_emb or (hidden_states.new_ones(size).float(), hidden_states.new_zeros(size).float())

    pictures, text = self_attention(
        stream(hidden_states),
        stream(encoder_hidden_states),
        rotary=rotary,
        rotate=lambda x: apply_rotary_emb(x, rotary, sequence_dim=1) if image_rotary_emb else x,
        project=attn.to_out[0],
        bound="joint",
    )
    return attn.to_out[1](pictures), attn.to_out[1](attn.to_out[0](text))


def fed_forward(
    self, hidden_states, encoder_hidden_states, norm_hidden_states, norm_encoder_hidden_states, gate_ff, enc_gate_ff
):
    """Returns the tokens [B, S, D] of the pictures and [B, T, D] of the text after the block's second half.

    Args:
        self: The block.
        hidden_states: Tokens of the pictures.
        encoder_hidden_states: Tokens of the text.
        norm_hidden_states: The pictures', normalised.
        norm_encoder_hidden_states: The text's, normalised.
        gate_ff: What the pictures' are multiplied by.
        enc_gate_ff: What the text's are multiplied by.
    """
    pictures = hidden_states + gate_ff * self.ff(norm_hidden_states)
    return pictures, encoder_hidden_states + enc_gate_ff * self.ff(norm_encoder_hidden_states)


def projected_tokens(self, hidden_states, emb, num_frames, height, width):
    """Returns the prediction [B, S, D] of every token that stands for latents, the others being padding; patch sizes.

    Args:
        self: The transformer.
        hidden_states: Tokens after the last block.
        emb: The time's embedding.
        num_frames: Of the latents.
        height: Of the latents.
        width: Of the latents.
    """
    p, p_t = self.config.patch_size, self.config.patch_size_t
    tokens = (num_frames + (p_t or 1) - 1) // (p_t or 1) * (height // p) * (width // p)
    return self.proj_out(self.norm_out(hidden_states, temb=emb))[:, :tokens], p, p_t
