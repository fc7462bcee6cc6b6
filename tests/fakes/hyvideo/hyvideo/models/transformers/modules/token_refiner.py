"""Refines the tokens of the language model."""

from torch import nn

from .activation_layers import get_activation_layer
from .attention import attention
from .embed_layers import TextProjection, TimestepEmbedder
from .mlp_layers import MLP
from .modulate_layers import apply_gate
from .norm_layers import get_norm_layer


class IndividualTokenRefinerBlock(nn.Module):
    """Self-attention and an MLP, both gated; the gates are zero at first."""

    def __init__(
        self, hidden_size, heads_num, mlp_width_ratio=4.0, mlp_drop_rate=0.0, act_type="silu", qk_norm=False,
        qk_norm_type="layer", qkv_bias=True, dtype=None, device=None,
    ):  # fmt: skip
        super().__init__()
        self.heads_num, width = heads_num, hidden_size // heads_num
        act, norm = get_activation_layer(act_type), get_norm_layer(qk_norm_type)
        self.norm1 = nn.LayerNorm(hidden_size, eps=1e-6)
        self.self_attn_qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=qkv_bias)
        self.self_attn_q_norm = norm(width, eps=1e-6) if qk_norm else nn.Identity()
        self.self_attn_k_norm = norm(width, eps=1e-6) if qk_norm else nn.Identity()
        self.self_attn_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.norm2 = nn.LayerNorm(hidden_size, eps=1e-6)
        self.mlp = MLP(hidden_size, int(hidden_size * mlp_width_ratio), act_layer=act, drop=mlp_drop_rate)
        self.adaLN_modulation = nn.Sequential(act(), nn.Linear(hidden_size, 2 * hidden_size))
        nn.init.zeros_(self.adaLN_modulation[1].weight)
        nn.init.zeros_(self.adaLN_modulation[1].bias)

    def forward(self, x, c, attn_mask=None):
        gates = self.adaLN_modulation(c).chunk(2, dim=-1)
        q, k, v = self.self_attn_qkv(self.norm1(x)).unflatten(-1, (3, self.heads_num, -1)).unbind(2)
        mixed = attention(self.self_attn_q_norm(q).to(v), self.self_attn_k_norm(k).to(v), v, attn_mask=attn_mask)
        x = x + apply_gate(self.self_attn_proj(mixed), gates[0])
        return x + apply_gate(self.mlp(self.norm2(x)), gates[1])


class IndividualTokenRefiner(nn.Module):
    """Blocks under one mask, whose first token is always valid."""

    def __init__(self, hidden_size, heads_num, depth, **kwargs):
        super().__init__()
        self.blocks = nn.ModuleList(IndividualTokenRefinerBlock(hidden_size, heads_num, **kwargs) for _ in range(depth))

    def forward(self, x, c, mask=None):
        if mask is not None:
            mask = mask.clone().bool()
            mask[:, 0] = True
        for block in self.blocks:
            x = block(x, c, mask)
        return x


class SingleTokenRefiner(nn.Module):
    """Tokens, refined under the timestep and the mean of the valid ones."""

    def __init__(self, in_channels, hidden_size, heads_num, depth, act_type="silu", **kwargs):
        super().__init__()
        act = get_activation_layer(act_type)
        self.input_embedder = nn.Linear(in_channels, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size, act)
        self.c_embedder = TextProjection(in_channels, hidden_size, act)
        self.individual_token_refiner = IndividualTokenRefiner(
            hidden_size, heads_num, depth, act_type=act_type, **kwargs
        )

    def forward(self, x, t, mask=None):
        if mask is None:
            mean = x.mean(dim=1)
        else:
            weights = mask.float()[..., None]
            mean = (x * weights).sum(dim=1) / weights.sum(dim=1)
        return self.individual_token_refiner(self.input_embedder(x), self.t_embedder(t) + self.c_embedder(mean), mask)
