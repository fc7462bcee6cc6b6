"""What a TPU's default precision would do to a component's float32 products, emulated on the CPU.

    [TORCHPORT_HYVIDEO=DIR] python benchmarks/precision.py [--json]

A TPU's default rounds the operands of a float32 product to bfloat16 and sums in float32. Here the same is done to every
product that asks for no more, as it is traced. The decoder has the published depth and a quarter of the channels; the
transformers are the cards' tiny ones, in the dtype of their cards. The difference is max|a - b| / max|b| from upstream,
eager, in float32. With a checkout of Tencent's repository, its transformer under autocast is taken, too.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from jax.extend.core import primitives

from torchport import compile, engine, load, patch, shard, task
from torchport.compile import network as builder
from torchport.config import card
from torchport.config import checkout as upstream
from torchport.load import tiny
from torchport.stages import family, recorder

jax.config.update("jax_platforms", "cpu")
PRODUCTS = (primitives.dot_general_p, primitives.conv_general_dilated_p)
DECODER = {"block_out_channels": [32, 64, 128, 256, 256], "layers_per_block": 2}
SMALL = ("height=64", "width=96", "frames=9", "machine=cpu:1", "mesh={}")


@dataclasses.dataclass
class Counts:
    """Products as they are traced: all, those of float32, and of those the ones that a TPU would round."""

    all: int = 0
    float32: int = 0
    rounded: int = 0


@contextlib.contextmanager
def as_on_a_tpu() -> Iterator[Counts]:
    """Has float32 products that are traced inside, and ask for no precision, round their operands to bfloat16."""
    counts, binds = Counts(), {product: product.bind for product in PRODUCTS}

    def rounding(bind: Callable[..., Any]) -> Callable[..., Any]:
        def bound(x: Any, y: Any, **options: Any) -> Any:
            precision = options["precision"]
            asked = {jax.lax.Precision.DEFAULT} if precision is None else set(precision)
            is_float32 = x.dtype == y.dtype == jax.numpy.float32
            is_rounded = is_float32 and asked <= {jax.lax.Precision.DEFAULT, None}
            counts.all, counts.float32 = counts.all + 1, counts.float32 + is_float32
            counts.rounded += is_rounded
            if is_rounded:  # not a cast there and back, which XLA would take out
                x, y = (jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7) for value in (x, y))
            return bind(x, y, **options)

        return bound

    jax.clear_caches()  # what was traced before is not rounded
    for product, bind in binds.items():
        product.bind = rounding(bind)
    try:
        yield counts
    finally:
        for product in PRODUCTS:
            del product.bind
        jax.clear_caches()


def difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns max|a - b| / max|b|, of a reference whose size makes that mean something."""
    largest = reference.abs().max().item()
    assert 0.5 <= largest <= 20, largest
    return (ours.double() - reference.double()).abs().max().item() / largest


def compared(found: task.Task, stage: family.Stage, module: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns how far a network is from upstream's at both precisions, and what its products are."""
    name = str(stage.network)
    strategy, mesh = found.card.strategies["tp"], shard.make_mesh({}, jax.devices()[:1])
    how = builder.how(stage, found)
    dtype = found.settings.dtypes[name]
    rows: dict[str, Any] = {"component": f"{found.card.model}: {name}", "dtype": found.dtype(name)}
    rows["card"] = found.card.components[name].precision
    module = module.to(dtype)
    with patch.applied([entry for entry in found.patches([stage]) if entry.plumbing or dtype != torch.float32]):
        eager = compile.Eager(module, how)(**inputs)
    tensors = {key: tensor.clone() for key, tensor in (*module.named_parameters(), *module.named_buffers())}
    if dtype == torch.float32 and stage.call is None:
        wide = {key: value.double() if torch.is_tensor(value) else value for key, value in inputs.items()}
        exact = compile.Eager(module.double(), how)(**wide)
        rows["eager, from float64"] = difference(eager, exact)
        module.float()
    found_rules = shard.match(strategy.weights[name], shard.named_shapes(tensors), {}, "card")
    with (
        patch.applied(found.patches([stage]), stage=stage.name) as ledger,
        engine.operators({op.target: op.function for op in ledger.ops()}),
    ):
        for precision in ("default", "highest"):
            with as_on_a_tpu() as counts:
                network = compile.Network(module, strategy.inputs[name], name, "card", precision, how=how)
                program = compile.Compiled(network, shard.place(tensors.items(), found_rules, mesh), mesh)
                rows[precision] = difference(program(**inputs), eager)
                rows[f"{precision}, products"] = dataclasses.asdict(counts)
    return rows


def of_stage(model: str, name: card.StageName, checkout: str | None, **config: Any) -> dict[str, Any]:
    """Returns the comparison for the network of a card's stage, tiny but for what `config` changes of it."""
    dtypes = "dtypes={}" if model == "hunyuan" else "dtypes={transformer: bfloat16}"
    demo = "configs/demo.yaml" if model == "hunyuan" else "configs/hyvideo_demo.yaml"
    found = task.accept(task.Request(model, demo, stage=name, overrides=(*SMALL, dtypes), upstream_path=checkout))
    [stage] = found.stages
    component = str(stage.network)
    with upstream.on_path(found.upstream), patch.applied(found.patches([stage])), upstream.hushed(True):
        parts = builder.as_shapes(found, stage)
        settings = found.card.components[component].class_
        values = {**found.card.tiny.components[component], **config}
        module = load.class_of(settings).from_config(values).eval().requires_grad_(False)
        tiny.randomise(module, found.card.tiny.seed, component, found.card.tiny.scale)
        if name == "decode":
            inputs = {"hidden_states": torch.randn(1, 32, 3, 4, 6, generator=torch.Generator().manual_seed(1))}
        else:
            [called] = recorder.network_calls(
                stage, parts, module, builder.how(stage, found), found.settings, count=False
            )
            ones = {key: torch.ones(tensor.shape, dtype=tensor.dtype) for key, tensor in called.tensors.items()}
            inputs = {**ones, **dict(called.static)}
        if stage.prepare is not None:
            stage.prepare({**parts, component: module}, found.settings)
    return compared(found, stage, module.get_submodule(stage.submodule), drawn(inputs))


def drawn(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns inputs with numbers drawn for those that are only shaped like them: states of text, features, latents."""
    generator = torch.Generator().manual_seed(2)
    return {
        key: torch.randn(value.shape, generator=generator).to(value.dtype)
        if torch.is_tensor(value) and value.ndim > 2 and value.is_floating_point()
        else value
        for key, value in inputs.items()
    }


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    as_json, checkout = parser.parse_args().json, os.environ.get("TORCHPORT_HYVIDEO")
    rows = [of_stage("hunyuan", "decode", None, **DECODER), of_stage("hunyuan", "denoise", None)]
    rows += [of_stage("hyvideo", "denoise", checkout)] if checkout else []
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        counts = row["default, products"]
        print(f"{row['component']}, {row['dtype']}: {counts['all']} products, {counts['float32']} of them of float32,")
        print(
            f"  {counts['rounded']} would be rounded; from eager upstream {row['default']:.1e} at default and ", end=""
        )
        print(f"{row['highest']:.1e} at highest; the card says {row['card']}")
        if "eager, from float64" in row:
            print(f"  eager upstream is {row['eager, from float64']:.1e} from float64")
    return 0


if __name__ == "__main__":
    sys.exit(main())
