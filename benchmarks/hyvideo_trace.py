"""Time to trace and lower HunyuanVideo-1.5's transformer from Tencent's repository, and what its program holds.

    TORCHPORT_HYVIDEO=DIR python benchmarks/hyvideo_trace.py [--json] [--blocks 54]

DIR is a checkout of the repository. The transformer has the published configuration, on torch's meta device: there are
no weights, and nothing is compiled or run. Constants are what a program carries that should be an argument; rotary
tables that upstream computes in its forward become two for each block. The last row lets it, with two blocks.
"""

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import torch

from torchport import compile, patch, shard
from torchport.config.strategy import Rule

CONFIG = {
    "patch_size": [1, 1, 1],
    "in_channels": 32,
    "out_channels": 32,
    "hidden_size": 2048,
    "heads_num": 16,
    "mm_single_blocks_depth": 0,
    "text_states_dim": 3584,
    "text_states_dim_2": None,
    "glyph_byT5_v2": True,
    "vision_projection": "linear",
    "vision_states_dim": 1152,
    "use_cond_type_embedding": True,
}
SIZES = {"480p, 121 frames": (31, 30, 53), "720p, 121 frames": (31, 45, 80)}
MESH = {"dp": 2, "tp": 4}
BLOCK = r"model\.double_blocks\.\d+\.(img|txt)_"
WEIGHTS = [
    Rule(match=BLOCK + r"(attn_[qkv]|mlp\.fc1)\.(weight|bias)", spec=["tp"]),
    Rule(match=BLOCK + r"(attn_proj|mlp\.fc2)\.weight", spec=[None, "tp"]),
    Rule(match=".*", spec="replicate"),
]


class Flat(torch.nn.Module):
    """The transformer, called with tensors by name alone."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, byt5_text_states: Any, byt5_text_mask: Any, **inputs: Any) -> torch.Tensor:
        """Returns the velocity."""
        letters = {"byt5_text_states": byt5_text_states, "byt5_text_mask": byt5_text_mask}
        return self.model(text_states_2=None, extra_kwargs=letters, **inputs)[0]


def constants(lowered: Any) -> list[int]:
    """Returns the bytes of every constant of a lowered program that is not one value repeated, largest first."""
    from jax.extend.mlir import ir

    found = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.constant":
            value, kind = operation.attributes["value"], ir.RankedTensorType(operation.results[0].type)
            if not (isinstance(value, ir.DenseElementsAttr) and value.is_splat):
                width = kind.element_type.width
                found.append(max(1, torch.Size(kind.shape).numel() * width // 8))
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return sorted(found, reverse=True)


def inputs(sizes: tuple[int, int, int], tables: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the transformer's inputs, for both conditions of guidance."""
    tokens, half, whole = torch.Size(sizes).numel(), jax.numpy.bfloat16, jax.numpy.int32
    shapes: dict[str, Any] = {
        "hidden_states": ((2, 65, *sizes), half),
        "timestep": ((2,), jax.numpy.float32),
        "text_states": ((2, 1000, 3584), half),
        "encoder_attention_mask": ((2, 1000), whole),
        "vision_states": ((2, 729, 1152), half),
        "byt5_text_states": ((2, 256, 1472), half),
        "byt5_text_mask": ((2, 256), whole),
    }
    if tables:
        shapes |= dict.fromkeys(("freqs_cos", "freqs_sin"), ((tokens, 128), jax.numpy.float32))
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def measure(sizes: tuple[int, int, int], blocks: int, tables: bool = True) -> dict[str, Any]:
    """Returns seconds to build, and to trace and lower; and the constants of the program."""
    name = "hyvideo.models.transformers.hunyuanvideo_1_5_transformer"
    clock = [time.perf_counter()]
    with torch.device("meta"):
        made = importlib.import_module(name).HunyuanVideo_1_5_DiffusionTransformer
        module = Flat(made(mm_double_blocks_depth=blocks, **CONFIG)).to(torch.bfloat16)
    clock.append(time.perf_counter())
    mesh = shard.make_mesh(MESH, jax.devices())
    shapes = shard.named_shapes(dict(module.named_parameters()))
    rules = shard.match(WEIGHTS, shapes, MESH, __file__)
    weights = {
        key: jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16, sharding=shard.sharding(rules[key], mesh))
        for key, shape in shapes.items()
    }
    program = compile.Compiled(compile.Network(module, [], "transformer", __file__, "default"), weights, mesh)
    lowered = program.lowered(inputs(sizes, tables), (("mask_type", "t2v"),))
    clock.append(time.perf_counter())
    found = constants(lowered)
    return {
        "blocks": blocks,
        "build_seconds": clock[1] - clock[0],
        "trace_and_lower_seconds": clock[2] - clock[1],
        "constants": len(found),
        "constant_bytes": sum(found),
        "largest_constant_bytes": found[0] if found else 0,
    }


def measured(blocks: int) -> dict[str, dict[str, Any]]:
    """Returns the rows of the table."""
    folder = Path(__file__).resolve().parent.parent / "patches"
    entries = patch.read(folder, ["torchax", "hyvideo/parallel", "hyvideo/transformer"])
    with patch.applied(entries):
        rows = {size: measure(sizes, blocks) for size, sizes in SIZES.items()}
        rows["480p, tables computed inside"] = measure(SIZES["480p, 121 frames"], 2, tables=False)
    return rows


def main() -> None:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=54, help="the published model has 54")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if not os.environ.get("TORCHPORT_HYVIDEO"):
        parser.error("TORCHPORT_HYVIDEO is not set. Set it to a checkout of Tencent's HunyuanVideo-1.5")
    sys.path.insert(0, os.environ["TORCHPORT_HYVIDEO"])
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    rows = measured(arguments.blocks)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'':30}{'blocks':>8}{'trace + lower s':>17}{'constants':>11}{'bytes':>13}{'largest':>12}")
    for name, row in rows.items():
        sizes = f"{row['constants']:11}{row['constant_bytes']:13,}{row['largest_constant_bytes']:12,}"
        print(f"{name:30}{row['blocks']:8}{row['trace_and_lower_seconds']:17.1f}{sizes}")


if __name__ == "__main__":
    main()
