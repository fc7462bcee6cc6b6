"""Faults that a port may have, each as a pack: a patch of torchport's that is wrong, or a patch too many."""

import dataclasses
import re
from pathlib import Path

import yaml

FITS = {"diffusers": "*"}
MODELS = "diffusers.models.transformers"
ATTENTION = """
import torch
from torch.nn import functional

def apply(tokens, tables):
    from diffusers.models.embeddings import apply_rotary_emb

    return apply_rotary_emb(tokens, tables, sequence_dim=1)

def heads_of(x, heads):
    return x.unflatten(2, (heads, -1))

def scores(q, k, v, valid):
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    s = s if valid is None else s.masked_fill(~valid[:, None, None, :], float("-inf"))
    out = (s.softmax(-1) @ v).transpose(1, 2)
    return out if valid is None else out * valid[:, :, None, None]
"""
HUNYUAN = f"""{ATTENTION}
def joint_attention(attn, query, key, value, encoder_hidden_states, attention_mask, image_rotary_emb):
    h, text, dtype = attn.heads, encoder_hidden_states, query.dtype
    q, k, v = attn.norm_q(heads_of(query, h)), attn.norm_k(heads_of(key, h)), heads_of(value, h)
    tq = attn.norm_added_q(heads_of(attn.add_q_proj(text), h))
    tk, tv = attn.norm_added_k(heads_of(attn.add_k_proj(text), h)), heads_of(attn.add_v_proj(text), h)
    q, k = apply(q, image_rotary_emb), apply(k, image_rotary_emb)
    mask = attention_mask.bool()
    valid = torch.cat([torch.ones_like(mask[:, :1]).expand(-1, q.shape[1]), mask], dim=1)
    #FAULT
    q, k, v = torch.cat([q, tq], 1), torch.cat([k, tk], 1), torch.cat([v, tv], 1)
    out = scores(q, k, v, valid).to(dtype)
    #AFTER
    out = out.flatten(2)
    n = query.shape[1]
    return attn.to_out[1](attn.to_out[0](out[:, :n])), attn.to_add_out(out[:, n:])
"""
COGVIDEOX = f"""{ATTENTION}
def attended(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb):
    h, t, dtype = attn.heads, encoder_hidden_states.shape[1], hidden_states.dtype
    norm_q, norm_k = attn.norm_q, attn.norm_k
    #NORMS
    x = torch.cat([encoder_hidden_states, hidden_states], 1)
    q, k, v = norm_q(heads_of(attn.to_q(x), h)), norm_k(heads_of(attn.to_k(x), h)), heads_of(attn.to_v(x), h)
    q = torch.cat([q[:, :t], apply(q[:, t:], image_rotary_emb)], 1)
    k = torch.cat([k[:, :t], apply(k[:, t:], image_rotary_emb)], 1)
    valid = None
    #FAULT
    out = scores(q, k, v, valid).to(dtype)
    #AFTER
    out = attn.to_out[1](attn.to_out[0](out.flatten(2)))
    return out[:, t:], out[:, :t]
"""
IN_BFLOAT16 = """
import torch

def narrow(value):
    return value.bfloat16().to(value.dtype) if torch.is_tensor(value) and value.is_floating_point() else value

def planted(original, self, *args, **kwargs):
    args, kwargs = [narrow(x) for x in args], {k: narrow(x) for k, x in kwargs.items()}
    return narrow(original(self, *args, **kwargs))
"""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: What it is.
        model: The card.
        code: The Python file of its function.
        names: What the first line names: a regular expression.
        overrides: The id of torchport's patch that it takes the place of; empty for a patch of its own.
        entry: The keys of its own patch.
        stage: The stage that its own patch is for.
    """

    name: str
    model: str
    code: str
    names: str
    overrides: str = ""
    entry: dict = dataclasses.field(default_factory=dict)
    stage: str = "denoise"

    @property
    def patch(self):
        """The id of the patch at fault."""
        return self.overrides or "planted.fault"

    def pack(self, root, folder):
        """Writes the pack to a folder, and returns that."""
        home = folder / "patches" / "diffusers"
        home.mkdir(parents=True)
        (home / "faults.py").write_text(self.code)
        entry = self._overriding(root) if self.overrides else self._own()
        (home / "faults.yaml").write_text(yaml.safe_dump([entry], sort_keys=False))
        if not self.overrides:
            card = (root / "configs" / "models" / f"{self.model}.yaml").read_text()
            card = self._listed(card) + "overrides: true\n"
            (folder / "configs" / "models").mkdir(parents=True)
            (folder / "configs" / "models" / f"{self.model}.yaml").write_text(card)
        return folder

    def _listed(self, card):
        """Returns a card that lists the patch for its stage."""
        if f"\n  {self.stage}: [" in card:
            return re.sub(rf"(\n  {self.stage}: \[)", r"\1diffusers/faults, ", card, count=1)
        return card.replace("\npatches:\n", f"\npatches:\n  {self.stage}: [diffusers/faults]\n", 1)

    def _overriding(self, root):
        for file in sorted((root / "patches").glob("*/*.yaml")):
            entries = yaml.safe_load(file.read_text()) if file.name != "lock.yaml" else []
            for entry in entries:
                if entry["id"] == self.overrides:
                    kind = next(kind for kind in ("replace", "wrap", "rewrite", "op") if kind in entry)
                    reference = entry[kind]["put"] if kind == "rewrite" else entry[kind]
                    planted = f"faults.py:{reference.partition(':')[2]}"
                    if kind == "rewrite":
                        entry["rewrite"]["put"] = planted
                    else:
                        entry[kind] = planted
                    return {**entry, "overrides": True, "relies_on": []}
        raise LookupError(self.overrides)

    def _own(self):
        texts = dict.fromkeys(("why", "reported", "until"), "A test plants it.")
        return {"id": "planted.fault", "fits": FITS, "equivalence": "bitwise", **texts, **self.entry}


def wrap(target):
    """Returns the keys of a patch that wraps a target in `planted`."""
    return {"target": target, "wrap": "faults.py:planted"}


def rewrite(target, match, gives=None):
    """Returns the keys of a patch that puts a call of `planted` in place of statements."""
    put = {"match": match, "put": "faults.py:planted", "times": 1}
    return {"target": target, "rewrite": put | ({"gives": gives} if gives else {})}


def _in(template, fault="", after="", norms=""):
    """Returns the code of an attention that is right but for some lines."""
    lines = {"#FAULT": fault, "#AFTER": after, "#NORMS": norms}
    for mark, line in lines.items():
        template = template.replace(mark, line or "pass")
    return template


H = f"{MODELS}.transformer_hunyuan_video15"
C = f"{MODELS}.cogvideox_transformer_3d"
H_ATTENTION = "diffusers.hunyuan15.attention"
C_ATTENTION = "diffusers.cogvideox.attention"
H_SCHEDULER = "diffusers.schedulers.scheduling_flow_match_euler_discrete:FlowMatchEulerDiscreteScheduler.set_timesteps"
C_PIPELINE = "diffusers.pipelines.cogvideo.pipeline_cogvideox:CogVideoXPipeline"
IN_ATTENTION = r"transformer_blocks\.0\.attn"
TRANSPOSED = "q = q.transpose(2, 3).reshape(q.shape)"
TWICE = "q = torch.cat([q[:, :t], apply(q[:, t:], image_rotary_emb)], 1)"
SCHEDULE = """
import torch

def planted(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    self.{name} = self.{name}.to(torch.bfloat16).to(self.{name}.dtype).clamp(max=self.{name}.max())
"""
WARM_UP = """
import torch

def planted(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    {moved}
"""
EPS = """
def planted(original, self, *args, **kwargs):
    eps, self.norm.eps = self.norm.eps, 1e-2
    try:
        return original(self, *args, **kwargs)
    finally:
        self.norm.eps = eps
"""
ONE_LESS = """
def native_layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    from torchport import engine

    return engine.call_jax(normalised, input, normalized_shape, weight, bias, eps)

def normalised(x, shape, weight, bias, eps):
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    mean, variance = x.mean(dims, keepdims=True), x.var(dims, ddof=1, keepdims=True)
    out = (x - mean) * (variance + eps) ** -0.5
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, (variance + eps) ** -0.5
"""
NORM = "torch.layer-norm"
CONDITIONS = """
import torch

def valid_tokens_first(
    encoder_hidden_states, encoder_attention_mask, encoder_hidden_states_2, encoder_attention_mask_2,
    encoder_hidden_states_3, encoder_attention_mask_3,
):
    tokens = [encoder_hidden_states_3, encoder_hidden_states_2, encoder_hidden_states]
    masks = [encoder_attention_mask_3, encoder_attention_mask_2, encoder_attention_mask]
    #ORDER
    tokens, valid = torch.cat(tokens, dim=1), torch.cat([mask.bool() for mask in masks], dim=1)
    order = torch.argsort((~valid).int(), dim=1, stable=True)
    return torch.gather(tokens, 1, order[..., None].expand_as(tokens)), torch.gather(valid, 1, order)
"""
BIAS = """
def planted(original, self, *args, **kwargs):
    return original(self, *args, **kwargs) - self.net[2].bias
"""

HUNYUAN_FAULTS = [
    Fault("mask ignored", "hunyuan", _in(HUNYUAN, "valid = None"), IN_ATTENTION, H_ATTENTION),
    Fault(
        "keys zeroed, not masked",
        "hunyuan",
        _in(HUNYUAN, "tk, tv, valid = tk * mask[:, :, None, None], tv * mask[:, :, None, None], None"),
        IN_ATTENTION,
        H_ATTENTION,
    ),
    Fault(
        "ByT5 in bfloat16",
        "hunyuan",
        IN_BFLOAT16,
        r"context_embedder_2",
        entry=wrap(f"{H}:HunyuanVideo15ByT5TextProjection.forward"),
    ),
    Fault(
        "vision states",
        "hunyuan",
        """
import torch

def image_condition(image_embeds, encoder_hidden_states_3, encoder_attention_mask):
    return encoder_hidden_states_3, torch.ones_like(encoder_hidden_states_3[..., 0]).to(encoder_attention_mask.dtype)
""",
        r"transformer\.forward before (transformer_blocks\.0|cond_type_embed)",
        "diffusers.hunyuan15.image-condition",
    ),
    Fault(
        "token order dropped",
        "hunyuan",
        """
import torch

def valid_tokens_first(
    encoder_hidden_states, encoder_attention_mask, encoder_hidden_states_2, encoder_attention_mask_2,
    encoder_hidden_states_3, encoder_attention_mask_3,
):
    tokens = [encoder_hidden_states_3, encoder_hidden_states_2, encoder_hidden_states]
    masks = [encoder_attention_mask_3, encoder_attention_mask_2, encoder_attention_mask]
    return torch.cat(tokens, dim=1), torch.cat([mask.bool() for mask in masks], dim=1)
""",
        r"transformer\.forward before transformer_blocks\.0",
        "diffusers.hunyuan15.token-order",
    ),
    Fault(
        "schedule in bfloat16",
        "hunyuan",
        SCHEDULE.format(name="sigmas"),
        r"sigmas",
        entry=wrap(
            "diffusers.schedulers.scheduling_flow_match_euler_discrete:FlowMatchEulerDiscreteScheduler.set_timesteps"
        ),
    ),
    Fault(
        "stale rotary tables",
        "hunyuan",
        """
def rotary_tables(original, self, hidden_states):
    tables = original(self, hidden_states)
    return tables if hidden_states.device.type == "cpu" else tuple(table.flip(0) for table in tables)
""",
        r"transformer\.rope",
        "diffusers.hunyuan15.rotary-tables",
    ),
    Fault(
        "a warm-up that moves the scheduler",
        "hunyuan",
        # One sigma more, as the last step would stop without it: the check before a run refuses such a loop.
        WARM_UP.format(moved="self._begin_index, self.sigmas = 1, torch.cat([self.sigmas, self.sigmas[-1:]])"),
        r"begin_index|step_index|sigmas|latents",
        entry=wrap(
            "diffusers.schedulers.scheduling_flow_match_euler_discrete:FlowMatchEulerDiscreteScheduler.set_timesteps"
        ),
    ),
    Fault(
        "a sign",
        "hunyuan",
        """
def planted(hidden_states, attn_output, gate_msa):
    return hidden_states - attn_output * gate_msa.unsqueeze(1)
""",
        r"transformer_blocks\.0\.forward before norm2",
        entry=rewrite(
            f"{H}:HunyuanVideo15TransformerBlock.forward",
            "hidden_states = hidden_states + attn_output * gate_msa.unsqueeze(1)",
        ),
    ),
    Fault(
        "a wrong eps",
        "hunyuan",
        EPS,
        r"transformer_blocks\.0\.norm1",
        entry=wrap("diffusers.models.normalization:AdaLayerNormZero.forward"),
    ),
    Fault("transposed heads", "hunyuan", _in(HUNYUAN, TRANSPOSED), IN_ATTENTION, H_ATTENTION),
    # Right for each condition of guidance alone: only the program gets both at once.
    Fault(
        "a mask of all prompts together",
        "hunyuan",
        _in(HUNYUAN, "valid = valid.any(0, keepdim=True).expand_as(valid)"),
        r"transformer adds",
        H_ATTENTION,
    ),
    Fault(
        "a swapped norm",
        "hunyuan",
        HUNYUAN.replace("attn.norm_q(heads_of(query, h))", "attn.norm_k(heads_of(query, h))"),
        IN_ATTENTION,
        H_ATTENTION,
    ),
    Fault("rotary applied twice", "hunyuan", _in(HUNYUAN, "q = apply(q, image_rotary_emb)"), IN_ATTENTION, H_ATTENTION),
    Fault("a dropped bias", "hunyuan", BIAS, r"\bff\b", entry=wrap("diffusers.models.attention:FeedForward.forward")),
    Fault(
        "guidance off by one",
        "hunyuan",
        """
def planted(original, self, *args, **kwargs):
    self.guidance_scale += 1
    try:
        return original(self, *args, **kwargs)
    finally:
        self.guidance_scale -= 1
""",
        r"guidance",
        entry=wrap("diffusers.guiders.classifier_free_guidance:ClassifierFreeGuidance.forward"),
    ),
    Fault(
        "a float32 module in bfloat16",
        "hunyuan",
        IN_BFLOAT16,
        r"transformer\.time_embed",
        entry=wrap(f"{H}:HunyuanVideo15TimeEmbedding.forward"),
    ),
    Fault("a variance over one less", "hunyuan", ONE_LESS, r"token_refiner\.refiner_blocks\.0\.norm1", NORM),
    Fault(
        "rotary tables of the frame before",
        "hunyuan",
        # On the host, where they are computed: the program gets them as weights.
        """
def rotary_tables(original, self, hidden_states):
    if hidden_states.device.type != "cpu":
        return self.cos, self.sin
    tables = original(self, hidden_states)
    return tuple(table.roll(table.shape[0] // hidden_states.shape[2], 0) for table in tables)
""",
        r"transformer\.rope",
        "diffusers.hunyuan15.rotary-tables",
    ),
    Fault(
        "the two streams' gates exchanged",
        "hunyuan",
        """
def planted(hidden_states, attn_output, gate_msa, encoder_hidden_states, context_attn_output, c_gate_msa):
    pictures = hidden_states + attn_output * c_gate_msa.unsqueeze(1)
    return pictures, encoder_hidden_states + context_attn_output * gate_msa.unsqueeze(1)
""",
        r"transformer_blocks\.0\.forward before norm2",
        entry=rewrite(
            f"{H}:HunyuanVideo15TransformerBlock.forward",
            "hidden_states = hidden_states + attn_output * gate_msa.unsqueeze(1)\n"
            "encoder_hidden_states = encoder_hidden_states + context_attn_output * c_gate_msa.unsqueeze(1)\n",
            ["hidden_states", "encoder_hidden_states"],
        ),
    ),
    Fault(
        "a residual of the normalised tokens",
        "hunyuan",
        """
def planted(norm_hidden_states, attn_output, gate_msa):
    return norm_hidden_states + attn_output * gate_msa.unsqueeze(1)
""",
        r"transformer_blocks\.0\.forward before norm2",
        entry=rewrite(
            f"{H}:HunyuanVideo15TransformerBlock.forward",
            "hidden_states = hidden_states + attn_output * gate_msa.unsqueeze(1)",
        ),
    ),
]
"""What a port of HunyuanVideo-1.5 may get wrong."""

C_SCHEDULER = "diffusers.schedulers.scheduling_ddim_cogvideox:CogVideoXDDIMScheduler.set_timesteps"
COGVIDEOX_FAULTS = [
    Fault(
        "keys zeroed",
        "cogvideox",
        _in(COGVIDEOX, "k = torch.cat([k[:, :8] * 0, k[:, 8:]], 1)"),
        r"transformer_blocks\.0\.attn1",
        C_ATTENTION,
    ),
    Fault(
        "text in bfloat16",
        "cogvideox",
        """
def padded_tokens(original, self, text_embeds, image_embeds):
    return original(self, text_embeds.bfloat16().to(text_embeds.dtype), image_embeds)
""",
        r"patch_embed",
        "diffusers.cogvideox.token-padding",
    ),
    Fault(
        "token order dropped",
        "cogvideox",
        """
def padded_tokens(original, self, text_embeds, image_embeds):
    return original(self, text_embeds, image_embeds).roll(1, 1)
""",
        r"patch_embed",
        "diffusers.cogvideox.token-padding",
    ),
    Fault(
        "schedule in bfloat16",
        "cogvideox",
        SCHEDULE.format(name="timesteps"),
        r"timestep",
        entry=wrap(C_SCHEDULER),
    ),
    Fault(
        "stale rotary tables",
        "cogvideox",
        """
def planted(original, self, *args, **kwargs):
    return tuple(table.flip(0) for table in original(self, *args, **kwargs))
""",
        r"image_rotary_emb",
        entry=wrap(
            "diffusers.pipelines.cogvideo.pipeline_cogvideox:CogVideoXPipeline._prepare_rotary_positional_embeddings"
        ),
    ),
    Fault(
        "a warm-up that moves the scheduler",
        "cogvideox",
        WARM_UP.format(moved="self.final_alpha_cumprod = self.final_alpha_cumprod * 0.9"),
        r"final_alpha_cumprod",
        entry=wrap(C_SCHEDULER),
    ),
    Fault(
        "a sign",
        "cogvideox",
        """
def planted(hidden_states, attn_hidden_states, gate_msa):
    return hidden_states - gate_msa * attn_hidden_states
""",
        r"transformer_blocks\.0\.forward before norm2",
        entry=rewrite(f"{C}:CogVideoXBlock.forward", "hidden_states = hidden_states + gate_msa * attn_hidden_states"),
    ),
    Fault(
        "a wrong eps",
        "cogvideox",
        EPS,
        r"transformer\.norm_out",
        entry=wrap("diffusers.models.normalization:AdaLayerNorm.forward"),
    ),
    Fault(
        "transposed heads",
        "cogvideox",
        _in(COGVIDEOX, TRANSPOSED),
        r"transformer_blocks\.0\.attn1",
        C_ATTENTION,
    ),
    Fault(
        "a swapped norm",
        "cogvideox",
        _in(COGVIDEOX, norms="norm_q, norm_k = norm_k, norm_q"),
        r"transformer_blocks\.0\.attn1",
        C_ATTENTION,
    ),
    Fault("rotary applied twice", "cogvideox", _in(COGVIDEOX, TWICE), r"transformer_blocks\.0\.attn1", C_ATTENTION),
    Fault(
        "a dropped bias",
        "cogvideox",
        BIAS,
        r"transformer_blocks\.0\.forward at its end, with ff",
        entry=wrap("diffusers.models.attention:FeedForward.forward"),
    ),
    Fault(
        "guidance off by one",
        "cogvideox",
        """
def planted(noise_pred_uncond, noise_pred_text, self):
    return noise_pred_uncond + (self.guidance_scale + 1) * (noise_pred_text - noise_pred_uncond)
""",
        r"guidance",
        entry=rewrite(
            f"{C_PIPELINE}.__call__",
            "noise_pred = noise_pred_uncond + self.guidance_scale * (noise_pred_text - noise_pred_uncond)",
        ),
    ),
    Fault(
        "a float32 module in bfloat16",
        "cogvideox",
        IN_BFLOAT16,
        r"time_embedding",
        entry=wrap("diffusers.models.embeddings:TimestepEmbedding.forward"),
    ),
    Fault("a variance over one less", "cogvideox", ONE_LESS, r"transformer_blocks\.0\.norm1\.norm", NORM),
    Fault(
        "rotary tables of the frame before",
        "cogvideox",
        """
def planted(original, self, height, width, num_frames, device):
    tables = original(self, height, width, num_frames, device)
    return tuple(table.roll(table.shape[0] // num_frames, 0) for table in tables)
""",
        r"image_rotary_emb",
        entry=wrap(f"{C_PIPELINE}._prepare_rotary_positional_embeddings"),
    ),
    Fault(
        "the two streams' gates exchanged",
        "cogvideox",
        """
def normalised_once(original, self, hidden_states, encoder_hidden_states, temb):
    pictures, text, gate, text_gate = original(self, hidden_states, encoder_hidden_states, temb)
    return pictures, text, text_gate, gate
""",
        r"transformer_blocks\.0\.norm1",
        "diffusers.cogvideox.norm-once",
    ),
    Fault(
        "a residual of the normalised tokens",
        "cogvideox",
        """
def fed_forward(
    self, hidden_states, encoder_hidden_states, norm_hidden_states, norm_encoder_hidden_states, gate_ff, enc_gate_ff
):
    pictures = norm_hidden_states + gate_ff * self.ff(norm_hidden_states)
    return pictures, encoder_hidden_states + enc_gate_ff * self.ff(norm_encoder_hidden_states)
""",
        r"transformer_blocks\.0\.forward at its end, with ff",
        "diffusers.cogvideox.feed-forward",
    ),
]

UNSEEN = [
    Fault(
        "another order of the text",
        "cogvideox",
        """
def padded_tokens(original, self, text_embeds, image_embeds):
    return original(self, text_embeds.flip(1), image_embeds)
""",
        r"patch_embed",
        "diffusers.cogvideox.token-padding",
    ),
    Fault(
        "another order of the encoders",
        "hunyuan",
        CONDITIONS.replace("#ORDER", "tokens.reverse(), masks.reverse()"),
        r"transformer\.forward before transformer_blocks\.0",
        "diffusers.hunyuan15.token-order",
    ),
    Fault(
        "masked tokens that are not zeroed",
        "hunyuan",
        CONDITIONS.replace("#ORDER", "pass"),
        r"transformer\.forward before transformer_blocks\.0",
        "diffusers.hunyuan15.token-order",
    ),
]
"""Changes that no picture shows: no token of the text has a position, and no valid token sees a masked one."""

HARMLESS = [
    Fault("another order of summation", "hunyuan", _in(HUNYUAN), "", H_ATTENTION),
    Fault("another order of summation", "cogvideox", _in(COGVIDEOX), "", C_ATTENTION),
]
"""Attention by other means, and right."""

DECODER_FAULT = Fault(
    "a residual dropped in the decoder",
    "hunyuan",
    """
from torchport.kernels.convolution import for_torch

def attend(self, x):
    normal = self.norm(x)
    query, key, value = (layer(normal) for layer in (self.to_q, self.to_k, self.to_v))
    return self.proj_out(for_torch.frame_attention(query, key, value))
""",
    r"frame \d+ of decode differs by .*, first in vae\.mid_block\.attentions\.0 ",
    "diffusers.hunyuan15.vae-attention",
)
"""What the decoder of a port may get wrong: it is looked for where frames are compared."""

W = f"{MODELS}.transformer_wan"
EMBEDDED = """
import torch

def planted(original, self, timestep, *args, **kwargs):
    temb, steps, text, image = original(self, timestep, *args, **kwargs)
    return temb, torch.where({when}, steps * 1.02, steps), text, image
"""
SHORTER = """
def planted(original, self, caption):
    return original(self, caption)[:, :-1]
"""
UNPADDED = """
def planted(original, self, *args, **kwargs):
    embeds = original(self, *args, **kwargs)
    return embeds[:, : int(embeds.any(-1).sum(-1).max())]
"""
WAN_VAE = (Path(__file__).parents[2] / "patches" / "diffusers" / "wan_vae.py").read_text()


def _changed(code, old, new):
    """Returns code with one place changed, which it must have."""
    if old not in code:
        raise LookupError(old)
    return code.replace(old, new, 1)


WAN_FAULTS = [
    Fault(
        "the last step alone",
        "wan",
        EMBEDDED.format(when="(timestep < 450).any()"),
        r"transformer_2\.condition_embedder.* at step 7",
        entry=wrap(f"{W}:WanTimeTextImageEmbedding.forward"),
    ),
    Fault(
        "the last step of the first network",
        "wan",
        EMBEDDED.format(when="((timestep > 880) & (timestep < 960)).any()"),
        r"transformer\.condition_embedder.* at step 2",
        entry=wrap(f"{W}:WanTimeTextImageEmbedding.forward"),
        stage="denoise_first",
    ),
    Fault(
        "a text shorter by one token",
        "wan",
        SHORTER,
        r"transformer\.condition_embedder returns .*511.*512",
        entry=wrap("diffusers.models.embeddings:PixArtAlphaTextProjection.forward"),
        stage="denoise_first",
    ),
    Fault(
        "rows of zeros left out of the text",
        "wan",
        UNPADDED,
        r"prompt_embeds \(encode\)",
        entry=wrap("diffusers.pipelines.wan.pipeline_wan:WanPipeline._get_t5_prompt_embeds"),
        stage="encode",
    ),
]
WAN_DECODER_FAULTS = [
    Fault(
        "time padded with the frame itself",
        "wan",
        _changed(WAN_VAE, "torch.where(first, torch.zeros_like(x), x)", "x"),
        r"frame \d+ of decode differs by .*, first in vae\.decoder ",
        "diffusers.wan.vae-upsample",
    ),
    Fault(
        "an activation left out",
        "wan",
        _changed(WAN_VAE, "residual_BDTHW=residual)", "residual_BDTHW=None)"),
        r"frame \d+ of decode differs by .*, first in vae\.decoder\.mid_block\.resnets\.0 ",
        "diffusers.wan.vae-resnet",
    ),
]
"""What the decoder of Wan may get wrong: its patches need each other, so they are named together."""


def _planted(name, model, target, body, names, stage="denoise"):
    """Returns a fault that wraps a target; `result` is a function that calls the original as it was called."""
    code = (
        "import torch\n\n"
        "def planted(original, self, *args, **kwargs):\n"
        "    result = lambda: original(self, *args, **kwargs)\n"
        f"    {body}\n"
    )
    return Fault(name, model, code, names, entry=wrap(target), stage=stage)


TIME = "diffusers.models.embeddings:Timesteps.forward"
C_DDIM = "diffusers.schedulers.scheduling_ddim_cogvideox:CogVideoXDDIMScheduler"
UNIPC = "diffusers.schedulers.scheduling_unipc_multistep:UniPCMultistepScheduler"
W_PIPELINE = "diffusers.pipelines.wan.pipeline_wan:WanPipeline"
FEED_FORWARD = r"transformer_blocks\.0\.forward at its end, with ff"

NEW_FAULTS = [
    _planted(
        "sine and cosine exchanged", "cogvideox", TIME, "return result().roll(self.num_channels // 2, -1)", "time_proj"
    ),
    _planted(
        "the last step's timestep",
        "cogvideox",
        TIME,
        "return torch.where((args[0] < 400)[:, None], original(self, args[0] + 1), result())",
        "time_proj.* at step 2",
    ),
    _planted(
        "the exact GELU",
        "cogvideox",
        "diffusers.models.activations:GELU.gelu",
        "return torch.nn.functional.gelu(args[0])",
        FEED_FORWARD,
    ),
    _planted(
        "one channel of a feed-forward",
        "cogvideox",
        "diffusers.models.attention:FeedForward.forward",
        "x = result(); return torch.cat([x[..., :1] * 1.001, x[..., 1:]], -1)",
        FEED_FORWARD,
    ),
    _planted(
        "the last norm a token late",
        "cogvideox",
        "diffusers.models.normalization:AdaLayerNorm.forward",
        "return result().roll(1, 1)",
        r"norm_out|forward before proj_out",
    ),
    _planted(
        "noise in bfloat16",
        "cogvideox",
        f"{C_PIPELINE}.prepare_latents",
        "return result().bfloat16().float()",
        r"noise|latents",
    ),
    _planted(
        "the prediction scaled",
        "cogvideox",
        f"{C_DDIM}.step",
        "return original(self, args[0] * 1.001, *args[1:], **kwargs)",
        r"guidance|latents",
    ),
    _planted(
        "both prompts are the negative one",
        "cogvideox",
        f"{C_PIPELINE}.encode_prompt",
        "x = result(); return x[1], x[1]",
        r"prompt_embeds \(encode\)",
        "encode",
    ),
    _planted(
        "the prompt cut by a token",
        "cogvideox",
        f"{C_PIPELINE}.encode_prompt",
        "x = result(); return tuple(torch.cat([y[:, :1], y[:, 2:], y[:, 1:2] * 0], 1) for y in x)",
        r"prompt_embeds \(encode\)",
        "encode",
    ),
    _planted(
        "rows and columns exchanged",
        "cogvideox",
        f"{C_PIPELINE}._prepare_rotary_positional_embeddings",
        "tables = original(self, args[1], args[0], *args[2:], **kwargs); return tables",
        r"image_rotary_emb",
    ),
    _planted(
        "the shift of the schedule",
        "hunyuan",
        H_SCHEDULER,
        "result(); self.sigmas = self.sigmas ** 1.01",
        r"sigmas",
    ),
    _planted(
        "the embedding of the time",
        "hunyuan",
        f"{H}:HunyuanVideo15TimeEmbedding.forward",
        "return result() * 1.001",
        "time_embed",
    ),
    _planted(
        "the last norm's scale",
        "hunyuan",
        "diffusers.models.normalization:AdaLayerNormContinuous.forward",
        "return result() * 1.001",
        "norm_out",
    ),
    _planted(
        "gates of the refiner",
        "hunyuan",
        f"{H}:HunyuanVideo15AdaNorm.forward",
        "x, y = result(); return y, x",
        r"refiner",
    ),
    _planted(
        "rotary tables transposed",
        "wan",
        f"{W}:WanRotaryPosEmbed.forward",
        "x, y = result(); return y, x",
        r"rope",
        "denoise_first",
    ),
    _planted(
        "the second network's text",
        "wan",
        "diffusers.models.embeddings:PixArtAlphaTextProjection.forward",
        "return result() * 1.001",
        r"transformer_2\.condition_embedder.*text_embedder|transformer_2\.condition_embedder adds",
    ),
    _planted(
        "the networks change places a step late",
        "wan",
        f"{W_PIPELINE}.__init__",
        "result(); self.register_to_config(boundary_ratio=0.8)",
        r"calls of networks",
    ),
    _planted(
        "the solver's order",
        "wan",
        f"{UNIPC}.__init__",
        "result(); self.register_to_config(solver_order=1)",
        r"latents|order",
    ),
    _planted(
        "a schedule that ends before zero",
        "wan",
        f"{UNIPC}.set_timesteps",
        "result(); self.sigmas = self.sigmas.clone(); self.sigmas[-1] = 0.01",
        r"sigmas",
    ),
]
"""Faults that were planted after `verify` was written: none was known to it."""
NEW_DECODER_FAULTS = [
    Fault(
        "the frames of a chunk reversed",
        "wan",
        _changed(
            WAN_VAE,
            "return out.permute(0, 2, 3, 1, 4, 5).reshape",
            "return out.permute(0, 2, 3, 1, 4, 5).flip(3).reshape",
        ),
        r"first in vae\.decoder ",
        "diffusers.wan.vae-upsample",
    ),
]
