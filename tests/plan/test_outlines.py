"""A network that is data alone, compiled for a TPU that is not there."""

import subprocess
from types import SimpleNamespace

import pytest

from torchport.config.machine import TPU_CHIPS
from torchport.errors import BadValueError, TopologyError, UnknownKeyError, UnknownNameError
from torchport.plan import collectives, outlines
from torchport.tpu import absent

needs_libtpu = pytest.mark.skipif(
    not absent.installed(),
    reason="libtpu is not installed; pip install 'torchport[plan]' and run `pytest tests/plan/test_outlines.py`",
)
OUTLINE = """\
title: small
class: diffusers:CogVideoXTransformer3DModel
source: nowhere
config:
  num_attention_heads: 8
  attention_head_dim: 64
  num_layers: 2
  patch_size_t: 2
  patch_bias: false
  text_embed_dim: 32
  time_embed_dim: 32
  use_rotary_positional_embeddings: true
dtype: bfloat16
float32: [norm_final]
height: 64
width: 64
frames: 9
batch: 2
inputs:
  hidden_states: {shape: [2, 4, 16, 32, 32], dtype: bfloat16}
  encoder_hidden_states: {shape: [2, 128, 32], dtype: bfloat16}
  timestep: {shape: [2], dtype: int32}
  image_rotary_emb.0: {shape: [512, 64], dtype: float32}
  image_rotary_emb.1: {shape: [512, 64], dtype: float32}
static: {return_dict: false}
patches: [torch/attention]
stacks:
  transformer_blocks: {carries: [hidden_states, encoder_hidden_states]}
strategies:
  tp:
    weights:
      - {match: 'transformer_blocks\\.\\d+\\.attn1\\.to_[qkv]\\.(weight|bias)', spec: [tp]}
      - {match: '.*', spec: replicate}
    inputs:
      - {match: 'image_rotary_emb\\..*', spec: replicate}
      - {match: '.*', spec: [dp]}
    attention_output: [dp, null, tp]
""".replace("\\\\", "\\")


@pytest.fixture
def file(tmp_path):
    """The small outline."""
    (tmp_path / "small.yaml").write_text(OUTLINE)
    return tmp_path / "small.yaml"


def job(file, **given):
    fields = {"machine": "v6e:2x4", "mesh": {"dp": 2, "tp": 4}, "strategy": "tp", "attention": "splash", **given}
    return outlines.OutlineJob(str(file), **fields)


def refusal(call, kind):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@needs_libtpu
def test_an_outline_is_modelled_by_its_parts(file):
    found = outlines.step_parts(job(file))
    flops = 2 * 4 * 2 * 8 * 640**2 * 64 / 8
    assert found.parts.attention_s == pytest.approx(flops / (918e12 * found.peak_percent / 100))
    assert 0 < found.parts.other_s < 1e-2
    # What attention returns is exchanged, heads for tokens, as the strategy says.
    assert 0 < found.parts.communication_s < 1e-3


@needs_libtpu
def test_an_outlines_collectives_are_on_the_links_that_its_groups_have(file, monkeypatch):
    kept = []

    def listed(program, of, where):
        kept.extend(collectives.collectives(program, of, where))
        return kept

    monkeypatch.setattr(outlines, "collectives", listed)
    found = outlines.step_parts(job(file, machine="v6e:4x4", mesh={"dp": 2, "tp": 8}))
    moved = {(one.kind, one.ports, one.links) for one in kept if one.group == 8}
    assert moved == {("all-to-all", 1.0, "2x4 rectangle"), ("all-gather", 2.0, "2x4 rectangle")}
    v6e = TPU_CHIPS["v6e"]
    assert found.parts.communication_s == pytest.approx(collectives.seconds(kept, v6e)) and kept


def test_a_network_is_called_with_tuples_of_its_numbered_inputs():
    class Network:
        def __call__(self, **inputs):
            return inputs

    found = outlines._gathered(Network(), **{"b.1": 3, "a": 1, "b.0": 2, "b.10": 4})
    assert found == {"a": 1, "b": (2, 3, 4)}


def test_weights_have_the_dtypes_that_they_would_be_loaded_in(file):
    network = outlines._network(outlines.read(file))
    kinds = {name: str(tensor.dtype) for name, tensor in network.named_parameters()}
    assert kinds["norm_final.weight"] == "torch.float32"
    assert kinds["transformer_blocks.0.attn1.norm_k.weight"] == "torch.bfloat16"
    assert {tensor.device.type for tensor in network.parameters()} == {"meta"}


def test_an_outline_is_read_strictly(file):
    file.write_text(OUTLINE + "speed: 3\n")
    assert refusal(lambda: outlines.read(file, "small.yaml"), UnknownKeyError).startswith(
        f"small.yaml:{len(OUTLINE.splitlines()) + 1}: Unknown key 'speed'."
    )


def test_a_compiler_that_stops_without_an_outcome_is_reported_by_its_exception(file, monkeypatch):
    stderr = "jax.errors.JaxRuntimeError: INTERNAL: no\n----\nFor simplicity, JAX has removed its internal frames.\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr=stderr))
    text = refusal(lambda: outlines.step_parts(job(file)), TopologyError)
    assert text == (
        f"outline {file}: The compiler ended with exit code 1 and said: jax.errors.JaxRuntimeError: INTERNAL: no. "
        "Mend that, or plan another size."
    )


def test_a_machine_that_is_no_tpu_and_a_strategy_that_is_not_there_are_refused(file):
    text = refusal(lambda: outlines.step_parts(job(file, machine="cpu:8")), BadValueError)
    assert text == f"{file}: The machine cpu:8 is no TPU. Name a slice such as v6e:2x4."
    text = refusal(lambda: outlines.compiled(job(file, strategy="pt")), UnknownNameError)
    assert text == f"{file}: It has no strategy 'pt'. Known: tp."
