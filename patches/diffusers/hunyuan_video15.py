"""Exact forms, fit for tracing, of statements of diffusers' HunyuanVideo-1.5 transformer.

Shapes: B batch, S tokens, H heads, D features.
"""

import torch

from torchport.errors import BadValueError
from torchport.kernels.attention.for_torch import Stream, self_attention, token_multiple


def image_condition(image_embeds, encoder_hidden_states_3, encoder_attention_mask):
    """Returns the image tokens and their mask: zeros and masked out if all image embeddings are zero.

    Args:
        image_embeds: [B, S, D], zeros for text-to-video.
        encoder_hidden_states_3: [B, S, D], their projection.
        encoder_attention_mask: Gives the mask's dtype.
    """
    without = torch.all(image_embeds == 0)
    tokens = torch.where(without, torch.zeros_like(encoder_hidden_states_3), encoder_hidden_states_3)
    mask = torch.where(without, 0, 1).to(encoder_attention_mask.dtype)
    return tokens, mask.expand(encoder_hidden_states_3.shape[:2])


def valid_tokens_first(
    encoder_hidden_states,
    encoder_attention_mask,
    encoder_hidden_states_2,
    encoder_attention_mask_2,
    encoder_hidden_states_3,
    encoder_attention_mask_3,
):
    """Returns all condition tokens [B, S, D] in upstream's order, and which are valid [B, S].

    The order is: valid image, byT5 and text tokens, then invalid ones in the same order. Invalid byT5 and text tokens
    become zeros; invalid image tokens stay.
    """
    masks = [encoder_attention_mask_3, encoder_attention_mask_2, encoder_attention_mask]
    valid = torch.cat([mask.bool() for mask in masks], dim=1)
    # where, not a product: an invalid token may hold anything, and 0 * NaN is NaN.
    text = [
        torch.where(mask.bool()[..., None], tokens, torch.zeros_like(tokens))
        for tokens, mask in zip([encoder_hidden_states_2, encoder_hidden_states], masks[1:], strict=True)
    ]
    tokens = torch.cat([encoder_hidden_states_3, *text], dim=1)
    order = torch.argsort((~valid).int(), dim=1, stable=True)
    tokens = torch.gather(tokens, 1, order[..., None].expand_as(tokens))
    return tokens, torch.gather(valid, 1, order)


def padded_tokens(original, self, hidden_states):
    """Returns the pictures' tokens [B, S, H * D], padded with zeros to the multiple that the mesh and the kernel want.

    Args:
        original: Upstream's method.
        self: The module.
        hidden_states: The latents [B, C, T, H, W].
    """
    tokens = original(self, hidden_states)
    missing = -tokens.shape[1] % token_multiple(tokens)
    return torch.nn.functional.pad(tokens, (0, 0, 0, missing)) if missing else tokens


def projected_tokens(self, hidden_states, temb, image_rotary_emb):
    """Returns the prediction [B, S, D] of every token that has a position: the others are padding.

    Args:
        self: The transformer.
        hidden_states: Tokens after the last block.
        temb: The time's embedding.
        image_rotary_emb: Cosines and sines, a row for each token.
    """
    return self.proj_out(self.norm_out(hidden_states, temb))[:, : image_rotary_emb[0].shape[0]]


def joint_attention(attn, query, key, value, encoder_hidden_states, attention_mask, image_rotary_emb):
    """Returns the attention [B, S, D] of the pictures' tokens and [B, T, D] of the text's over the valid ones of both.

    Args:
        attn: The module, with projections and norms of both.
        query: Queries [B, S, D] of the pictures.
        key: Keys.
        value: Values.
        encoder_hidden_states: Tokens [B, T, D] of the text.
        attention_mask: [B, T], true for valid tokens, which come first: `valid_tokens_first` has put them in order.
            Their number is therefore the whole mask.
        image_rotary_emb: Cosines and sines, a row for each of the pictures' tokens; what lies beyond is padding.
    """
    from diffusers.models.embeddings import apply_rotary_emb

    projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    pictures, text = self_attention(
        Stream(query, key, value, attn.norm_q, attn.norm_k),
        Stream(*(layer(encoder_hidden_states) for layer in projections), attn.norm_added_q, attn.norm_added_k),
        rotary=image_rotary_emb,
        rotate=lambda tokens: apply_rotary_emb(tokens, image_rotary_emb, sequence_dim=1),
        lengths=attention_mask.sum(dim=1),
        project=attn.to_out[0],
        bound="joint",
    )
    return attn.to_out[1](pictures), attn.to_add_out(text)


def key_mask(attention_mask):
    """Returns a mask [B, S] over tokens as a mask [B, 1, 1, S] over keys."""
    return attention_mask[:, None, None, :]


def rotary_tables(original, self, hidden_states):
    """Returns the cosine and sine tables [S, D], float32, that were computed on the host for these latents.

    Args:
        original: Upstream's method, which computes them; called for tensors in host memory.
        self: The module, with the tables as its buffers `cos` and `sin`, and the latents' sizes as `grid`.
        hidden_states: The latents [B, C, T, H, W]; only their shape counts.
    """
    if hidden_states.device.type == "cpu" or not hasattr(self, "grid"):  # a pipeline by name prepares nothing
        return original(self, hidden_states)
    grid = tuple(hidden_states.shape[2:])
    if grid != self.grid:
        raise BadValueError(
            "rotary tables",
            f"They are for latents of {' x '.join(map(str, self.grid))}, and these have {' x '.join(map(str, grid))}",
            "Prepare the transformer for the size that it is called with",
        )
    return self.cos, self.sin
