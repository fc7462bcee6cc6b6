"""The one builder: what `plan` lowers is what `run` lowers, text for text."""

import collections
import dataclasses
import os
import shutil

import jax
import jax.numpy as jnp
import pytest
from safetensors.torch import load_file, save_file

from torchport import load, patch, shard
from torchport.compile import network, preflight
from torchport.compile.program import Compiled
from torchport.config.strategy import WeightRule
from torchport.errors import BadValueError, CheckpointForeignError, DeadRuleError
from torchport.plan import aot
from torchport.run.path import run
from torchport.task import Request, accept
from torchport.task.devices import devices

HYVIDEO = os.environ.get("TORCHPORT_HYVIDEO")
SIZE = ("height=64", "width=64", "frames=5", "steps=1")
NETWORKS = ("denoise", "decode")
"""The stages that have a network."""


class Zeros:
    """A lowered program that nobody compiles: what it would return is 0."""

    def __init__(self, lowered):
        self.lowered = lowered

    def compile(self, compiler_options):
        return lambda *arguments: jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), self.lowered.out_info)


@pytest.fixture
def texts(monkeypatch):
    """Collects the text of every program that a run lowers, by the network's name and the shapes of its inputs.

    No program is compiled, as that would take longer than all else.
    """
    collected = {}
    honest = Compiled.lowered

    def lowered(self, arrays, static):
        program = honest(self, arrays, static)
        collected[key(self, arrays, static)] = program.as_text()
        return Zeros(program)

    monkeypatch.setattr(Compiled, "lowered", lowered)
    return collected


def key(program, arrays, static):
    return program.network.name, tuple(sorted((name, a.shape, str(a.dtype)) for name, a in arrays.items())), static


def stacked(name, changes):
    return name == "denoise" and "stacked=false" not in changes


@pytest.mark.parametrize(
    "model",
    [
        "hunyuan",
        pytest.param(
            "hyvideo",
            marks=[
                pytest.mark.upstream,
                pytest.mark.skipif(not HYVIDEO, reason="needs a checkout: TORCHPORT_HYVIDEO=DIR pytest -m upstream"),
            ],
        ),
    ],
)
@pytest.mark.parametrize(
    ("changes", "first"), [((), 0), (("dtypes={transformer: bfloat16, vae: float32}", "stacked=false"), 0), ((), 1)]
)
def test_run_and_plan_lower_the_same_programs(model, changes, first, texts, root, tmp_path, monkeypatch):
    def accepted(request):
        """Returns the task, the first blocks of its stacks left apart."""
        task = accept(request)
        stacks = {
            component: {name: entry.model_copy(update={"first": first}) for name, entry in entries.items()}
            for component, entries in task.card.stacks.items()
        }
        return dataclasses.replace(task, card=task.card.model_copy(update={"stacks": stacks}))

    monkeypatch.setattr("torchport.run.path.accept", accepted)
    config, path = ("configs/hyvideo_demo.yaml", HYVIDEO) if model == "hyvideo" else ("configs/demo.yaml", None)
    request = Request(
        model, str(root / config), prompt="A cat", out=tmp_path, overrides=(*SIZE, *changes), upstream_path=path
    )
    run(request)
    ran = dict(texts)
    assert {name for name, *_ in ran} == {"transformer", "vae"}
    texts.clear()
    for name in NETWORKS:
        task = accepted(dataclasses.replace(request, stage=name, prompt=None))
        [stage] = task.stages
        with aot.outlined(task, stage, jax.devices()) as outline:
            blocks = "double_blocks" if model == "hyvideo" else "transformer_blocks"
            assert outline.program.blocks == ((f"{blocks}.{first}.block.",) if stacked(name, changes) else ())
            for called in outline.called:
                outline.program.lowered(outline.program.shapes(called.inputs), called.static)
    assert texts.keys() == ran.keys()
    assert [name for name, text in texts.items() if text != ran[name]] == []


@pytest.mark.parametrize("stage", NETWORKS)
def test_the_checks_before_a_run_build_each_network_once_as_shapes(stage, request_for, monkeypatch, tmp_path):
    task = accept(request_for(backend="torchax", stage=stage, prompt=None, inputs=tmp_path))
    built = collections.Counter()
    honest = load.published

    def counted(class_path, *rest):
        built[class_path] += 1
        return honest(class_path, *rest)

    monkeypatch.setattr(load, "published", counted)
    with patch.applied(task.patches(task.stages)):
        preflight.check(task)
    assert built == {task.card.components[name].class_: 1 for name in ("transformer", "vae")[stage == "decode" :]}


def test_the_network_of_shapes_belongs_to_who_took_it(request_for):
    task = accept(request_for(backend="torchax", stage="decode", prompt=None))
    with patch.applied(task.patches(task.stages)):
        first, second = (network.as_shapes(task, task.stages[0])["vae"] for _ in range(2))
    assert first is not second


def test_a_stage_says_what_its_network_returns(request_for, tiny_folder):
    """In PyTorch as in a program: the decoder's outputs, by their names."""
    task = accept(request_for(backend="torchax", stage="decode", prompt=None))
    stage = dataclasses.replace(
        task.stages[0],
        outputs=("pictures", "not_finite"),
        run=lambda parts, call, settings, steps, latents: call(hidden_states=latents)[0],
    )
    with aot.outlined(task, stage, jax.devices()) as outline:
        [called] = outline.called
        lowered = outline.program.lowered(outline.program.shapes(called.inputs), called.static)
        assert isinstance(called.output, tuple) and lowered.out_tree.num_leaves == len(called.output) == 2
    with patch.applied(task.patches([stage])):
        eager = network.eager(task, stage, network.loaded(task, stage, tiny_folder), tiny_folder)
    assert eager.outputs == ("pictures", "not_finite") and eager.name == "vae"


def test_what_is_beside_a_compiled_submodule_has_its_weights_on_the_host(request_for, tiny_folder):
    task = accept(request_for(backend="torchax", stage="decode", prompt=None))
    [stage] = task.stages
    mesh = shard.make_mesh(task.job.mesh, devices(task.machine))
    with patch.applied(task.patches([stage])):
        parts, whole = (network.loaded(task, stage, tiny_folder) for _ in range(2))
        network.placed(task, stage, parts, mesh, tiny_folder)
        network.eager(task, stage, whole, tiny_folder)
    encoder = dict(parts["vae"].encoder.named_parameters())
    assert encoder and all(value.equal(encoder[name]) for name, value in whole["vae"].encoder.named_parameters())
    assert all(value.is_meta for value in parts["vae"].decoder.parameters())


def test_an_input_without_values_is_refused(request_for, tiny_folder):
    """It would be memory that nobody has written to."""
    task = accept(request_for(backend="torchax", stage="denoise", prompt=None))
    with aot.outlined(task, task.stages[0], jax.devices()) as outline:
        with pytest.raises(BadValueError) as caught:
            outline.program.place(**outline.called[0].inputs)
    assert str(caught.value) == (
        "transformer: 'encoder_attention_mask' has no values: it was computed with weights on meta. Add what computes "
        "it to the stage's `parts`."
    )


@pytest.fixture
def decoding(root):
    """The task of a stage that removes its VAE's encoder, and the stage."""

    def made(**changes):
        request = Request(
            "cogvideox", "configs/cogvideox_demo.yaml", stage="decode", overrides=changes.pop("overrides", ())
        )
        task = accept(dataclasses.replace(request, paths=(str(root),), **changes))
        return task, task.stages[0]

    return made


def test_modules_that_a_stage_never_calls_are_removed_and_not_read(decoding, monkeypatch):
    task, stage = decoding()
    assert stage.without == ("encoder", "quant_conv")  # of the two the VAE has no `quant_conv`
    folder, read = network.write_tiny(task), []
    honest = load.Layout.tensors

    def tensors(self, stored):
        read.extend(stored)
        return honest(self, stored)

    monkeypatch.setattr(load.Layout, "tensors", tensors)
    mesh = shard.make_mesh(task.job.mesh, devices(task.machine))
    with patch.applied(task.patches([stage])):
        parts, whole = (network.loaded(task, stage, folder) for _ in range(2))
        weights = network.placed(task, stage, parts, mesh, folder)
        eager = network.eager(task, stage, whole, folder)
    for vae in (parts["vae"], eager.module):
        assert not [*vae.encoder.modules()][1:] and vae.quant_conv is None  # this class has none
    assert weights.keys() == dict(eager.module.named_parameters()).keys()
    assert read and all(name.startswith("decoder.") for name in read)
    assert not any(value.is_meta for value in eager.module.parameters())


def test_a_checkpoint_stays_whole_for_a_stage_that_reads_a_part_of_it(decoding, tmp_path):
    task, stage = decoding()
    folder = tmp_path / "checkpoint"
    shutil.copytree(network.write_tiny(task), folder)
    [file] = (folder / "vae").glob("*.safetensors")
    tensors = {name: value for name, value in load_file(file).items() if name != "encoder.conv_in.conv.weight"}
    save_file(tensors, file)
    with patch.applied(task.patches([stage])), pytest.raises(CheckpointForeignError) as caught:
        preflight.check_checkpoint(task, folder)
    assert "lacks 1 of the model's tensors (first 'encoder.conv_in.conv.weight')" in str(caught.value)


def test_a_copy_that_others_have_keeps_its_modules(decoding):
    task, stage = decoding()
    with patch.applied(task.patches([stage])):
        shared = network.outline(task, "vae")
        parts = network.as_shapes(task, stage)
        again = network.outline(task, "vae")
    assert not [*parts["vae"].encoder.modules()][1:]
    assert shared.encoder is not None and again.encoder is not None


def test_a_rule_for_modules_that_a_stage_removes_is_another_stages(decoding):
    task, stage = decoding()
    strategy = task.card.strategies["tp"]

    def with_rules(*matches):
        rules = [WeightRule(match=match, spec="replicate") for match in matches]
        changed = strategy.model_copy(update={"weights": {**strategy.weights, "vae": rules}})
        card = task.card.model_copy(update={"strategies": {**task.card.strategies, "tp": changed}})
        return dataclasses.replace(task, card=card)

    with patch.applied(task.patches([stage])):
        module = network.module_of(stage, network.as_shapes(task, stage))
        rules = network.weight_rules(with_rules(r"encoder\..*", r"decoder\..*"), stage, module)
        assert {rule.match for rule in rules.values()} == {r"decoder\..*"}
        with pytest.raises(DeadRuleError, match=r"'encodr"):
            network.weight_rules(with_rules(r"encodr\..*", r"decoder\..*"), stage, module)


def test_only_what_is_left_of_a_network_counts_for_the_devices(decoding):
    task, stage = decoding()
    with patch.applied(task.patches([stage])):
        whole = network.outline(task, "vae")
        count = sum(value.numel() for value in whole.decoder.parameters())
        assert preflight._device_bytes(task, stage, "vae") == 4 * count < 4 * sum(v.numel() for v in whole.parameters())


def test_the_host_has_the_buffers_that_a_checkpoint_holds(root):
    """Upstream reads them beside the network: an LTX VAE's mean and deviation of latents."""
    request = Request("ltx", "configs/ltx_demo.yaml", stage="decode", paths=(str(root),))
    task = accept(request)
    [stage] = task.stages
    folder = network.write_tiny(task)
    mesh = shard.make_mesh(task.job.mesh, devices(task.machine))
    with patch.applied(task.patches([stage])):
        parts = network.loaded(task, stage, folder)
        network.placed(task, stage, parts, mesh, folder)
    [file] = (folder / "vae").glob("*.safetensors")
    stored = load_file(file)
    assert all(parts["vae"].get_buffer(name).equal(stored[name]) for name in ("latents_mean", "latents_std"))
