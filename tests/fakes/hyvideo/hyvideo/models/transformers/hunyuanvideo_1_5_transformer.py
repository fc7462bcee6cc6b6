"""The diffusion transformer: two streams, one attention."""

from typing import Any, Optional, Union

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models import ModelMixin
from torch import nn

from hyvideo.commons import maybe_fallback_attn_mode
from hyvideo.commons.parallel_states import get_parallel_state
from hyvideo.models.text_encoders.byT5 import ByT5Mapper
from hyvideo.utils.communications import all_gather

from .modules.activation_layers import get_activation_layer
from .modules.attention import parallel_attention
from .modules.embed_layers import PatchEmbed, TextProjection, TimestepEmbedder, VisionProjection
from .modules.mlp_layers import MLP, FinalLayer, LinearWarpforSingle
from .modules.modulate_layers import ModulateDiT, apply_gate, modulate
from .modules.norm_layers import get_norm_layer
from .modules.posemb_layers import apply_rotary_emb, get_nd_rotary_pos_embed
from .modules.token_refiner import SingleTokenRefiner


class MMDoubleStreamBlock(nn.Module):
    """Image and text, each with weights of its own, meet in the attention."""

    def __init__(
        self, hidden_size, heads_num, mlp_width_ratio, mlp_act_type="gelu_tanh", attn_mode=None, qk_norm=True,
        qk_norm_type="rms", qkv_bias=False, dtype=None, device=None,
    ):  # fmt: skip
        super().__init__()
        self.heads_num, self.attn_mode = heads_num, attn_mode
        norm, act = get_norm_layer(qk_norm_type), get_activation_layer(mlp_act_type)
        for stream in ("img", "txt"):
            parts = {"mod": ModulateDiT(hidden_size, factor=6, act_layer=get_activation_layer("silu"))}
            for number in "12":
                parts[f"norm{number}"] = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
            for name in ("q", "k", "v", "proj"):
                parts[f"attn_{name}"] = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
            for name in "qk":
                parts[f"attn_{name}_norm"] = norm(hidden_size // heads_num, eps=1e-6) if qk_norm else nn.Identity()
            parts["mlp"] = MLP(hidden_size, int(hidden_size * mlp_width_ratio), act_layer=act)
            for name, part in parts.items():
                self.add_module(f"{stream}_{name}", part)

    def _heads(self, stream, x, shift, scale):
        """Returns the queries, keys and values [B, L, H, D] of a stream."""
        hidden = modulate(getattr(self, f"{stream}_norm1")(x), shift=shift, scale=scale)
        return [getattr(self, f"{stream}_attn_{name}")(hidden).unflatten(-1, (self.heads_num, -1)) for name in "qkv"]

    def _rest(self, stream, x, vectors):
        hidden = modulate(getattr(self, f"{stream}_norm2")(x), shift=vectors[3], scale=vectors[4])
        return x + apply_gate(getattr(self, f"{stream}_mlp")(hidden), gate=vectors[5])

    def forward(
        self, img, txt, vec, freqs_cis=None, text_mask=None, attn_param=None, is_flash=False, block_idx=None
    ):  # fmt: skip
        img_vectors, txt_vectors = self.img_mod(vec).chunk(6, dim=-1), self.txt_mod(vec).chunk(6, dim=-1)
        img_mod1_gate = img_vectors[2]
        img_q, img_k, img_v = self._heads("img", img, *img_vectors[:2])
        img_q = self.img_attn_q_norm(img_q).to(img_v)
        img_k = self.img_attn_k_norm(img_k).to(img_v)
        if freqs_cis is not None:
            img_q, img_k = apply_rotary_emb(img_q, img_k, freqs_cis, head_first=False)
        txt_q, txt_k, txt_v = self._heads("txt", txt, *txt_vectors[:2])
        txt_q, txt_k = self.txt_attn_q_norm(txt_q).to(txt_v), self.txt_attn_k_norm(txt_k).to(txt_v)
        attn_mode = "flash" if is_flash else self.attn_mode
        attn = parallel_attention(
            (img_q, txt_q), (img_k, txt_k), (img_v, txt_v), img_q_len=img.shape[1], img_kv_len=img.shape[1],
            text_mask=text_mask, attn_mode=attn_mode, attn_param=attn_param, block_idx=block_idx,
        )  # fmt: skip
        img_attn, txt_attn = attn[:, : img.shape[1]], attn[:, img.shape[1] :]
        img = img + apply_gate(self.img_attn_proj(img_attn), gate=img_mod1_gate)
        txt = txt + apply_gate(self.txt_attn_proj(txt_attn), gate=txt_vectors[2])
        return self._rest("img", img, img_vectors), self._rest("txt", txt, txt_vectors)


class MMSingleStreamBlock(nn.Module):
    """Image and text as one sequence. The published model has none."""

    def __init__(
        self, hidden_size, heads_num, mlp_width_ratio=4.0, mlp_act_type="gelu_tanh", attn_mode=None, qk_norm=True,
        qk_norm_type="rms", qk_scale=None, dtype=None, device=None,
    ):  # fmt: skip
        super().__init__()
        self.heads_num, self.attn_mode = heads_num, attn_mode
        inner, norm = int(hidden_size * mlp_width_ratio), get_norm_layer(qk_norm_type)
        for name in "qkv":
            self.add_module(f"linear1_{name}", nn.Linear(hidden_size, hidden_size))
        self.linear1_mlp = nn.Linear(hidden_size, inner)
        self.linear2 = LinearWarpforSingle(hidden_size + inner, hidden_size, bias=True)
        self.mlp_act = get_activation_layer(mlp_act_type)()
        self.q_norm = norm(hidden_size // heads_num, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = norm(hidden_size // heads_num, eps=1e-6) if qk_norm else nn.Identity()
        self.pre_norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.modulation = ModulateDiT(hidden_size, factor=3, act_layer=get_activation_layer("silu"))

    def forward(self, x, vec, txt_len, freqs_cis=None, text_mask=None, attn_param=None, is_flash=False):
        shift, scale, gate = self.modulation(vec).chunk(3, dim=-1)
        hidden, image = modulate(self.pre_norm(x), shift=shift, scale=scale), x.shape[1] - txt_len
        q, k, v = (self.get_submodule(f"linear1_{n}")(hidden).unflatten(-1, (self.heads_num, -1)) for n in "qkv")
        q, k = self.q_norm(q).to(v), self.k_norm(k).to(v)
        turned = apply_rotary_emb(q[:, :image], k[:, :image], freqs_cis, head_first=False)
        pairs = (turned[0], q[:, image:]), (turned[1], k[:, image:]), (v[:, :image], v[:, image:])
        mode = "flash" if is_flash else self.attn_mode
        mixed = parallel_attention(
            *pairs, img_q_len=image, img_kv_len=image, text_mask=text_mask, attn_mode=mode, attn_param=attn_param
        )
        return x + apply_gate(self.linear2(mixed, self.mlp_act(self.linear1_mlp(hidden))), gate=gate)


class HunyuanVideo_1_5_DiffusionTransformer(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """Latents, text, letters and vision states in; a velocity out."""

    @register_to_config
    def __init__(
        self,
        patch_size: list = [1, 2, 2],
        in_channels: int = 4,
        concat_condition: bool = True,
        out_channels: int = None,
        hidden_size: int = 3072,
        heads_num: int = 24,
        mlp_width_ratio: float = 4.0,
        mlp_act_type: str = "gelu_tanh",
        mm_double_blocks_depth: int = 20,
        mm_single_blocks_depth: int = 40,
        rope_dim_list: list = [16, 56, 56],
        qkv_bias: bool = True,
        qk_norm: bool = True,
        qk_norm_type: str = "rms",
        guidance_embed: bool = False,
        use_meanflow: bool = False,
        text_projection: str = "single_refiner",
        use_attention_mask: bool = True,
        text_states_dim: int = 4096,
        text_states_dim_2: int = 768,
        text_pool_type: str = None,
        rope_theta: int = 256,
        attn_mode: str = "flash",
        attn_param: dict = None,
        glyph_byT5_v2: bool = False,
        vision_projection: str = "none",
        vision_states_dim: int = 1280,
        is_reshape_temporal_channels: bool = False,
        use_cond_type_embedding: bool = False,
        ideal_resolution: str = None,
        ideal_task: str = None,
    ):
        super().__init__()
        silu = get_activation_layer("silu")
        self.patch_size, self.hidden_size, self.heads_num = patch_size, hidden_size, heads_num
        self.unpatchify_channels = in_channels if out_channels is None else out_channels
        self.rope_dim_list, self.rope_theta = rope_dim_list, rope_theta
        self.use_attention_mask, self.text_projection = use_attention_mask, text_projection
        self.attn_mode, self.glyph_byT5_v2 = attn_mode, glyph_byT5_v2
        self.attn_param = {"win_type": "fixed", "win_ratio": 10} if attn_param is None else attn_param
        self.img_in = PatchEmbed(
            patch_size, in_channels, hidden_size,
            is_reshape_temporal_channels=is_reshape_temporal_channels, concat_condition=concat_condition,
        )  # fmt: skip
        if glyph_byT5_v2:
            self.byt5_in = ByT5Mapper(1472, 2048, 2048, hidden_size, use_residual=False)
        self.vision_in = VisionProjection(vision_states_dim, hidden_size) if vision_projection == "linear" else None
        if text_projection == "linear":
            self.txt_in = TextProjection(text_states_dim, hidden_size, silu)
        else:
            self.txt_in = SingleTokenRefiner(text_states_dim, hidden_size, heads_num, depth=2)
        self.time_in = TimestepEmbedder(hidden_size, silu)
        self.time_r_in = TimestepEmbedder(hidden_size, silu) if use_meanflow else None
        self.guidance_in = TimestepEmbedder(hidden_size, silu) if guidance_embed else None
        blocks = {"attn_mode": attn_mode, "qk_norm": qk_norm, "qk_norm_type": qk_norm_type}
        sizes = (hidden_size, heads_num, mlp_width_ratio, mlp_act_type)
        self.double_blocks = nn.ModuleList(
            MMDoubleStreamBlock(*sizes, qkv_bias=qkv_bias, **blocks) for _ in range(mm_double_blocks_depth)
        )
        self.single_blocks = nn.ModuleList(MMSingleStreamBlock(*sizes, **blocks) for _ in range(mm_single_blocks_depth))
        self.final_layer = FinalLayer(hidden_size, patch_size, self.unpatchify_channels, silu)
        self.cond_type_embedding = nn.Embedding(3, hidden_size) if use_cond_type_embedding else None
        if self.cond_type_embedding is not None:
            self.cond_type_embedding.weight.data.fill_(0)

    def get_rotary_pos_embed(self, rope_sizes):
        return get_nd_rotary_pos_embed(tuple(self.rope_dim_list), rope_sizes, theta=self.rope_theta, use_real=True)

    def reorder_txt_token(self, byt5_txt, txt, byt5_text_mask, text_mask, zero_feat=False, is_reorder=True):
        if not is_reorder:
            return torch.cat([byt5_txt, txt], dim=1), torch.cat([byt5_text_mask, text_mask], dim=1).long()
        rows, masks = [], []
        for tokens_a, tokens_b, mask_a, mask_b in zip(byt5_txt, txt, byt5_text_mask, text_mask, strict=True):
            # How many tokens a boolean index takes is known only when the mask's values are.
            kept = [tokens_a[mask_a.bool()], tokens_b[mask_b.bool()]]
            left = [tokens_a[~mask_a.bool()], tokens_b[~mask_b.bool()]]
            rows.append(torch.cat(kept + [tokens * 0 if zero_feat else tokens for tokens in left]))
            count = sum(len(tokens) for tokens in kept)
            masks.append((torch.arange(len(rows[-1]), device=txt.device) < count).long())
        return torch.stack(rows), torch.stack(masks)

    def _with_type(self, tokens, kind):
        if self.cond_type_embedding is None:
            return tokens
        return tokens + self.cond_type_embedding(torch.full(tokens.shape[:2], kind, device=tokens.device))

    def _vector(self, t, timestep_r, guidance):
        vec = self.time_in(t)
        if self.guidance_in is not None:
            vec = vec + self.guidance_in(guidance)
        return vec if timestep_r is None else vec + self.time_r_in(timestep_r)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.LongTensor,
        text_states: torch.Tensor,
        text_states_2: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        timestep_r=None,
        vision_states: torch.Tensor = None,
        output_features=False,
        output_features_stride=8,
        attention_kwargs: Optional[dict[str, Any]] = None,
        freqs_cos: Optional[torch.Tensor] = None,
        freqs_sin: Optional[torch.Tensor] = None,
        return_dict: bool = False,
        guidance=None,
        mask_type="t2v",
        extra_kwargs=None,
    ) -> Union[torch.Tensor, dict[str, torch.Tensor]]:
        if guidance is None:
            guidance = torch.tensor([6016.0], device=hidden_states.device, dtype=torch.bfloat16)
        text_mask, bs = encoder_attention_mask, hidden_states.shape[0]
        sizes = tuple(full // patch for full, patch in zip(hidden_states.shape[2:], self.patch_size, strict=True))
        self.attn_param["thw"] = list(sizes)
        if freqs_cos is None and freqs_sin is None:
            freqs_cos, freqs_sin = self.get_rotary_pos_embed(sizes)
        img = self.img_in(hidden_states)
        state = get_parallel_state()
        if state.sp_enabled:
            img = torch.chunk(img, state.sp, dim=1)[state.sp_rank]
            freqs_cos, freqs_sin = (torch.chunk(x, state.sp)[state.sp_rank] for x in (freqs_cos, freqs_sin))
        vec = self._vector(timestep, timestep_r, guidance)
        if self.text_projection == "linear":
            txt = self.txt_in(text_states)
        else:
            txt = self.txt_in(text_states, timestep, text_mask if self.use_attention_mask else None)
        txt = self._with_type(txt, 0)
        if self.glyph_byT5_v2:
            letters = self._with_type(self.byt5_in(extra_kwargs["byt5_text_states"]), 1)
            txt, text_mask = self.reorder_txt_token(
                letters, txt, extra_kwargs["byt5_text_mask"], text_mask, zero_feat=True
            )
        if self.vision_in is not None and vision_states is not None:
            extra_encoder_hidden_states = self.vision_in(vision_states)
            shape = (bs, extra_encoder_hidden_states.shape[1])
            # Which branch is taken depends on values.
            if mask_type == "t2v" and torch.all(vision_states == 0):
                extra_attention_mask = torch.zeros(shape, dtype=text_mask.dtype, device=text_mask.device)
                extra_encoder_hidden_states = extra_encoder_hidden_states * 0.0
            else:
                extra_attention_mask = torch.ones(shape, dtype=text_mask.dtype, device=text_mask.device)
            extra_encoder_hidden_states = self._with_type(extra_encoder_hidden_states, 2)
            txt, text_mask = self.reorder_txt_token(extra_encoder_hidden_states, txt, extra_attention_mask, text_mask)
        shared = {
            "vec": vec,
            "freqs_cis": (freqs_cos, freqs_sin),
            "text_mask": text_mask,
            "attn_param": self.attn_param,
        }
        for index, block in enumerate(self.double_blocks):
            img, txt = block(img=img, txt=txt, block_idx=index, **shared)
        image = img.shape[1]
        for block in self.single_blocks:
            img = block(x=torch.cat([img[:, :image], txt], dim=1), txt_len=txt.shape[1], **shared)
            txt = img[:, image:]
        img = img[:, :image]
        img = self.final_layer(img, vec)
        if state.sp_enabled:
            img = all_gather(img, dim=1, group=state.sp_group)
        assert return_dict is False, "return_dict is not supported"
        return self.unpatchify(img, *sizes), None

    def unpatchify(self, x, t, h, w):
        pt, ph, pw = self.patch_size
        patches = x.reshape(x.shape[0], t, h, w, self.unpatchify_channels, pt, ph, pw)
        return patches.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(x.shape[0], -1, t * pt, h * ph, w * pw)

    def set_attn_mode(self, attn_mode: str):
        self.attn_mode = maybe_fallback_attn_mode(attn_mode)
        for block in (*self.double_blocks, *self.single_blocks):
            block.attn_mode = self.attn_mode
