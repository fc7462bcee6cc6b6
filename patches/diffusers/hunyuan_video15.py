"""Exact forms, fit for tracing, of statements of diffusers' HunyuanVideo-1.5 transformer.

Shapes: B batch, S tokens, H heads, D features.
"""

import torch

from torchport.attention.for_torch import attention
from torchport.errors import BadValueError


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


def masked_attention(query, key, value, attention_mask):
    """Returns the attention [B, S, H, D] of tokens [B, S, H, D] over the valid ones; 0 where a query is not valid.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        attention_mask: [B, S], true for valid tokens, which come first: the image is whole, and `valid_tokens_first`
            has put the text in order. Their number is therefore the whole mask.
    """
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    lengths = attention_mask.sum(dim=1)
    return attention(query, key, value, lengths=lengths, bound="joint").transpose(1, 2)


def key_mask(attention_mask):
    """Returns a mask [B, S] over tokens as a mask [B, 1, 1, S] over keys."""
    return attention_mask[:, None, None, :]


def rotary_tables(original, self, hidden_states):
    """Returns the cosine and sine tables [S, D], float32, that were computed on the host for these latents.

    Args:
        original: Upstream's method, which computes them; called for tensors in host memory.
        self: The module, with the tables as its buffers `cos` and `sin`.
        hidden_states: The latents [B, C, T, H, W]; only their shape counts.
    """
    if hidden_states.device.type == "cpu":
        return original(self, hidden_states)
    tokens = hidden_states.shape[2:].numel() // (self.patch_size_t * self.patch_size**2)
    if self.cos.shape[0] != tokens:
        raise BadValueError(
            "rotary tables",
            f"They are for {self.cos.shape[0]} tokens, and the latents have {tokens}",
            "Prepare the transformer for the size that it is called with",
        )
    return self.cos, self.sin
