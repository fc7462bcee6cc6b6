"""Prints, as JSON, the dtype of every module's output of a tiny hyvideo transformer under the emulated autocast.

    python hyvideo_dtypes.py PATCHES HYVIDEO

Weights are bfloat16, inputs have the dtypes that upstream's pipeline gives them; eager, on the host.
"""

import json
import sys
from pathlib import Path

import torch

from torchport import patch

TINY = {
    "patch_size": [1, 1, 1], "in_channels": 4, "out_channels": 4, "hidden_size": 64, "heads_num": 2,
    "rope_dim_list": [8, 12, 12], "mm_double_blocks_depth": 2, "mm_single_blocks_depth": 0, "text_states_dim": 48,
    "text_states_dim_2": None, "glyph_byT5_v2": True, "vision_projection": "linear", "vision_states_dim": 24,
    "use_cond_type_embedding": True, "attn_mode": "torch", "ideal_resolution": "720p", "ideal_task": "t2v",
}  # fmt: skip


def name(output):
    """Returns the dtypes of a module's output, several joined."""
    tensors = output if isinstance(output, tuple) else (output,)
    return "+".join(str(t.dtype).removeprefix("torch.") for t in tensors if isinstance(t, torch.Tensor))


def main(patches, upstream):
    """Runs the transformer once and prints what its modules returned."""
    sys.path.insert(0, upstream)
    with patch.applied(patch.read(Path(patches), ["hyvideo/parallel", "hyvideo/transformer", "torch/autocast"])):
        from hyvideo.models.transformers.hunyuanvideo_1_5_transformer import (
            HunyuanVideo_1_5_DiffusionTransformer as Transformer,
        )

        model = Transformer(**TINY).to(torch.bfloat16).eval()
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * 0.1
        seen = {}
        for path, module in model.named_modules():
            module.register_forward_hook(lambda m, i, output, path=path: seen.__setitem__(path, name(output)))
        glyphs = {"byt5_text_states": torch.randn(2, 6, 1472), "byt5_text_mask": torch.ones(2, 6, dtype=torch.int64)}
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            model(
                torch.randn(2, 9, 2, 2, 2), torch.tensor([500.0, 500.0]), torch.randn(2, 10, 48, dtype=torch.float16),
                None, torch.ones(2, 10, dtype=torch.int64), vision_states=torch.zeros(2, 5, 24), extra_kwargs=glyphs,
            )  # fmt: skip
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
