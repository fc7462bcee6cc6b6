"""What a machine must carry, and what a network's rules and attention are refused for, before anything is loaded."""

import contextlib
import dataclasses
import shutil

import pytest
import torch

from torchport import patch
from torchport import shard as sharding
from torchport.commands import shard
from torchport.compile import in_force, network, preflight
from torchport.compile.preflight import check
from torchport.compile.rules import Rules, of_task
from torchport.config import machine
from torchport.config.strategy import ActivationRule, Rule, WeightRule
from torchport.errors import (
    AttentionError,
    BadValueError,
    CheckpointForeignError,
    DeadRuleError,
    MachineError,
    MeshError,
    TorchportError,
    UnmatchedError,
)
from torchport.load import Layout
from torchport.task import Request, accept, devices

GIB = 2**30


def require(task):
    """Checks a task against this machine, before any rehearsal."""
    preflight._require(task, preflight._memory(task), {})


@pytest.fixture(scope="module", autouse=True)
def patched():
    """The card's patches, applied once: that takes longer than all else here."""
    task = accept(Request("hunyuan", "configs/demo.yaml", prompt="A cat"))
    with patch.applied(task.patches(task.stages)), in_force.hushed(True):
        yield


def refusal(kind, call):
    """Returns the text of the error, which must be of this kind."""
    with pytest.raises(TorchportError) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.fixture
def asked(request_for):
    """Accepts a request for the demo with changes; `sets` are added to its overrides."""

    def ask(sets=(), **changes):
        request = request_for(**changes)
        return accept(dataclasses.replace(request, overrides=(*request.overrides, *sets)))

    return ask


def absent(*args, local_files_only=False, **kwargs):
    """Stands for a hub whose cache is empty; asking its network fails the test."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    assert local_files_only, "a download was asked for"
    raise LocalEntryNotFoundError("not here")


@pytest.fixture
def need(monkeypatch):
    """Records what a task says that it takes, on a machine that has everything."""
    kept = []
    monkeypatch.setattr(devices, "prepare", lambda named: None)
    monkeypatch.setattr(devices, "require", lambda named, need, instead: kept.append((named, need, instead)))

    def ask(found):
        require(found)
        return kept.pop()

    return ask


def test_the_real_job_takes_what_its_shapes_and_rules_say(asked, need, card, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    real = dataclasses.replace(asked().request, config="configs/720p.yaml", overrides=(), backend="torchax")
    named, found, instead = need(accept(real))
    parameters = {name: component.parameters for name, component in card.components.items()}
    assert named.name == "v6e:2x4" and found.devices == 8 and found.checkpoint == card.checkpoint
    assert set(found.device_bytes) == {"transformer", "vae"}
    whole = 2 * parameters["transformer"]
    assert found.device_bytes["transformer"] == whole and found.device_bytes["vae"] < 4 * parameters["vae"]
    assert found.host_bytes == 2 * parameters["text_encoder"] + 4 * parameters["text_encoder_2"]
    assert instead == 'torchport run --model hunyuan --config configs/demo.yaml --prompt "..."'


def test_the_original_takes_the_hosts_memory_for_its_networks_too(asked, need, monkeypatch, card):
    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    named, found, _ = need(asked(stage="denoise", prompt=None, checkpoint="a/b@c"))
    assert named is machine.HOST and found.devices == 0 and found.device_bytes == {}
    assert found.host_bytes == 4 * card.components["transformer"].parameters


def test_a_checkpoint_that_is_here_is_measured_and_not_assumed(asked, need, tiny_folder):
    _, found, _ = need(asked(checkpoint=str(tiny_folder)))
    sizes = {
        name: Layout().parameters(tiny_folder / name) for name in ("text_encoder", "text_encoder_2", "transformer")
    }
    assert found.host_bytes == 4 * max(sizes["text_encoder"] + sizes["text_encoder_2"], sizes["transformer"])
    _, port, _ = need(asked(checkpoint=str(tiny_folder), backend="torchax"))
    _, tiny, _ = need(asked(backend="torchax"))
    assert port.device_bytes == tiny.device_bytes and port.device_bytes["transformer"] > 0


def test_a_checkpoint_whose_configuration_is_no_network_is_refused(asked, tiny_folder, tmp_path):
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    (copy / "transformer" / "config.json").write_text('{"num_layers": "two"}')
    text = refusal(CheckpointForeignError, lambda: require(asked(checkpoint=str(copy), backend="torchax")))
    assert text.startswith(f"{copy}/transformer/config.json: HunyuanVideo15Transformer3DModel cannot be built from it")


def test_a_machine_that_is_too_small_is_refused_before_anything_is_loaded(asked, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    monkeypatch.setattr(devices, "host_memory", lambda: GIB)
    text = refusal(MachineError, lambda: require(asked(checkpoint="a/b@c")))
    assert "the checkpoint a/b@c" in text and "this machine has 1.0 GiB of free host memory" in text


@pytest.fixture
def port(asked):
    """Accepts a request for the demo through torchax."""

    def ask(*sets, **changes):
        return asked(sets, backend="torchax", **changes)

    return ask


def shown(task, monkeypatch):
    """Shows the task's rules as `torchport shard show` does; the patches are in force already."""
    monkeypatch.setattr("torchport.task.accept", lambda request, dry: task)
    monkeypatch.setattr("torchport.patch.applied", lambda entries, stage=None: contextlib.nullcontext())
    return shard.rule_rows(task.request)


def with_rules(task, component="transformer", **kinds):
    """Returns a task whose strategy has other rules of these kinds for a component."""
    strategy = task.card.strategies[task.job.strategy]
    changed = {kind: {**getattr(strategy, kind), component: rules} for kind, rules in kinds.items()}
    strategies = {task.job.strategy: strategy.model_copy(update=changed)}
    return dataclasses.replace(task, card=task.card.model_copy(update={"strategies": strategies}))


def refusals(task, monkeypatch, kind):
    """Returns the text with which both `run`, before it loads anything, and `shard show` refuse a task."""
    texts = {refusal(kind, lambda: check(task)), refusal(kind, lambda: shown(task, monkeypatch))}
    assert len(texts) == 1
    return texts.pop()


def test_the_shipped_rules_pass(port):
    check(port())
    check(port("strategy=ulysses", "mesh={dp: 2, sp: 4}"))


def test_an_input_rule_that_matches_nothing_is_refused_with_its_line(port, monkeypatch):
    task = port()
    rules = [Rule(match="hiden_states", spec=["dp"]), *task.card.strategies["tp"].inputs["transformer"]]
    lines, places = ["card.yaml:7", "card.yaml:8"], Rules.places
    monkeypatch.setattr(Rules, "places", lambda self, kind: lines if kind == "inputs" else places(self, kind))
    assert refusals(with_rules(task, inputs=rules), monkeypatch, DeadRuleError) == (
        "card.yaml:7: Rule 1, 'hiden_states', matches none of 7 tensors. "
        "Remove it or mend it. Did you mean 'hidden_states'? Known: encoder_attention_mask, encoder_attention_mask_2, "
        "encoder_hidden_states, encoder_hidden_states_2, hidden_states, image_embeds, timestep."
    )


def test_the_place_of_a_rule_is_its_own_line(port, root):
    task = port()
    for kind in ("weights", "inputs"):
        places = of_task(task, "transformer").places(kind)
        lines = (root / "configs" / "models" / "hunyuan.yaml").read_text().splitlines()
        rules = getattr(task.card.strategies["tp"], kind)["transformer"]
        for place, rule in zip(places, rules, strict=True):
            assert rule.is_shared or rule.match in lines[int(place.rpartition(":")[2]) - 1]
    assert not all(rule.is_shared for rule in task.card.strategies["tp"].weights["transformer"])


def test_a_batch_that_falls_to_a_rule_for_everything_is_refused(port, monkeypatch):
    rules = [Rule(match="hiden_states|timestep", spec=["dp"]), Rule(match=".*", spec="replicate")]
    text = refusals(with_rules(port(), inputs=rules), monkeypatch, MeshError)
    assert text.startswith("configs/models/hunyuan.yaml:")
    assert text.endswith(
        ": '.*' gives every device the whole batch of 'encoder_attention_mask' [2, 1024], an input of transformer, and "
        "the mesh has dp=2. Split it with the spec [dp]."
    )
    check(with_rules(port("mesh={tp: 8}", "guidance_scale=1.0", "strategy=tp", stage="decode", prompt=None)))


def test_an_input_without_a_rule_is_refused_before_a_batch_that_no_rule_splits(port, monkeypatch):
    rules = [Rule(match="encoder_attention_mask", spec="replicate")]
    text = refusals(with_rules(port(), inputs=rules), monkeypatch, UnmatchedError)
    assert "No rule matches the input 'encoder_attention_mask_2'" in text


def test_an_input_without_a_rule_is_refused(port, monkeypatch):
    rules = [Rule(match="hidden_states|encoder_.*|timestep", spec=["dp"])]
    text = refusals(with_rules(port(), inputs=rules), monkeypatch, UnmatchedError)
    assert "No rule matches the input 'image_embeds' [2, 0, 40] of transformer" in text


def test_weight_rules_are_those_of_the_network_as_it_is_run(port, monkeypatch):
    task = port()
    rules = list(task.card.strategies["tp"].weights["transformer"])
    dead = with_rules(task, weights=[*rules, WeightRule(match="rope\\.cosine", spec="replicate")])
    assert f"Rule {len(rules) + 1}, 'rope\\.cosine', matches none of" in refusals(dead, monkeypatch, DeadRuleError)
    bare = with_rules(task, weights=[WeightRule(match=r".*\.(weight|bias)", spec="replicate")])
    assert "No rule matches 'rope.cos'" in refusals(bare, monkeypatch, UnmatchedError)


def test_a_rule_for_all_that_is_left_is_alive_by_its_buffers(port, monkeypatch):
    task = port()
    own = [WeightRule(match=r".*\.(weight|bias)", spec="replicate")]
    rest = WeightRule(match=".*", spec="replicate")
    check(with_rules(task, weights=[*own, rest]))
    late = WeightRule(match="rope\\..*", spec="replicate")
    dead = refusals(with_rules(task, weights=[*own, rest, late]), monkeypatch, DeadRuleError)
    assert "'rope\\..*', matches only tensors that an earlier rule has taken" in dead


@pytest.mark.parametrize(
    ("rule", "kind", "said"),
    [
        (ActivationRule(match="blocks", outputs=[["dp"]]), DeadRuleError, "Rule 1, 'blocks', matches none of"),
        (
            ActivationRule(match="transformer_blocks", outputs=[["dp"]]),
            DeadRuleError,
            "Rule 1, 'transformer_blocks', matches modules that are not called ('transformer_blocks'). ",
        ),
        (ActivationRule(match="proj_out", outputs=[["dp"]] * 2), MeshError, "2 specs, and 'proj_out' returns 1 tensor"),
        (ActivationRule(match="proj_out", outputs=[[None, None, None, "dp"]]), MeshError, "has a spec of 4 dims"),
        (ActivationRule(match="x_embedder", outputs=[[["dp", "tp"]]]), MeshError, "dp=2 x tp=4 does not divide dim 0"),
    ],
)
def test_rules_for_activations_that_do_not_fit_are_refused(port, monkeypatch, rule, kind, said):
    assert said in refusals(with_rules(port(), activations=[rule]), monkeypatch, kind)


def test_heads_that_the_mesh_does_not_divide_are_refused_by_both(port, monkeypatch):
    task = port("mesh={tp: 8}", "guidance_scale=1.0")
    assert "tp=8 does not divide transformer.num_attention_heads" in refusals(task, monkeypatch, MeshError)


def test_tokens_are_padded_as_the_mesh_wants_them_before_a_rule_is_judged(port):
    # 5 x 4 latent positions and no multiple of 4 at all would be refused without `uneven`.
    task = port("strategy=ulysses", "mesh={dp: 2, sp: 4}", "height=48", "width=48", "frames=5")
    rules = [ActivationRule(match="x_embedder", outputs=[["dp", "sp"]])]
    check(with_rules(task, activations=rules))


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["attention=splash"], "attention splash: It is a TPU kernel, and this program is for cpu."),
        (["attention=cudnn"], "attention 'cudnn': queries are float32."),
    ],
)
def test_attention_that_cannot_work_here_is_refused_before_encoding(port, sets, said):
    text = refusal(AttentionError, lambda: check(port(*sets)))
    assert text.startswith(f"--set {sets[0]}: {said}")


def test_attention_is_checked_for_the_machine_that_is_named(port, monkeypatch):
    """Its devices need not be there: 1,024 features of the VAE are too many for the kernels, and it is named."""
    monkeypatch.setattr(devices, "require", lambda *args: None)
    v6e = ("machine=v6e:2x4", "attention=splash_transposed")
    check(port(*v6e, stage="denoise", prompt=None))
    task = port(*v6e, "dtypes={transformer: float16}", stage="denoise", prompt=None)
    assert "q, k and v are float16" in refusal(AttentionError, lambda: check(task))


NO_CALLS = preflight.Rehearsal(torch.nn.Identity(), {}, [], {}, 0, [])


def test_scores_in_eight_bits_need_a_card_with_a_bound(port):
    task = port("machine=v6e:2x4", "attention=splash_int8", stage="denoise", prompt=None)
    assert preflight.check_attention(task, NO_CALLS) is None
    task = dataclasses.replace(task, card=task.card.model_copy(update={"score_bounds": {}}))
    assert refusal(AttentionError, lambda: preflight.check_attention(task, NO_CALLS)).endswith(
        f"'splash_int8' is for scores with a bound, and the card '{task.card.model}' has no score_bounds. "
        "Use 'splash_transposed'."
    )


def test_latents_and_frames_are_counted_in_the_hosts_memory(asked, need):
    _, found, _ = need(asked())
    assert found.host_tensors == 2 * 3 * 5 * 64 * 64 * 4  # as decoded, and as frames, float32
    _, found, _ = need(asked(stage="denoise", prompt=None))
    assert found.host_tensors == 3 * 16 * 2 * 4 * 4 * 4  # latents, prediction, next latents
    _, found, _ = need(asked(stage="encode"))
    assert found.host_tensors == 0


def test_a_video_that_is_too_large_for_the_host_is_refused_at_once(asked, monkeypatch):
    monkeypatch.setattr(devices, "host_memory", lambda: 24 * GIB)
    monkeypatch.setattr(preflight, "rehearse", None)  # nothing is carried out
    for sets, size in ((["height=16384", "width=16384"], "30.0"), (["frames=1048573"], "96.0")):
        text = refusal(MachineError, lambda sets=sets: check(asked(sets, backend="torchax")))
        assert f"at least {size} GiB for latents and frames" in text and "has 24.0 GiB of free host memory" in text
        assert "Make the video smaller with --set height=, width= or frames=; or run it on a larger machine" in text


def test_activations_that_do_not_fit_are_refused_without_their_memory(port, monkeypatch):
    monkeypatch.setattr(devices, "host_memory", lambda: 1000 * GIB)
    monkeypatch.setattr(devices, "visible_devices", lambda platform: (8, "TPU v6 lite", None))
    large = ("height=16384", "width=16384", "frames=241")
    task = port("machine=v6e:2x4", *large, stage="denoise", prompt=None)
    text = refusal(MachineError, lambda: check(task))
    assert "of weights (transformer) and at least " in text and "this machine has 32.0 GiB on each device" in text
    rehearsal = preflight.rehearse(task, task.stages[0])
    tokens = 61 * 1024 * 1024
    assert rehearsal.calls[0].tensors["hidden_states"].shape == (2, 33, 61, 1024, 1024)
    # At the least the inputs of one device, and its share of what a feed-forward layer's 512 features are.
    assert rehearsal.activations >= tokens * 33 * 4 + 2 * tokens * 512 * 4 // 8


def test_each_device_holds_its_part_of_the_inputs_and_of_the_largest_output(port):
    task = port("width=128")
    rehearsal = preflight.rehearse(task, task.stages[2])
    [called] = rehearsal.calls
    assert rehearsal.inputs["hidden_states"].spec == [None, None, None, None, ["dp", "tp"]]
    assert called.tensors["hidden_states"].shape == (1, 16, 2, 4, 8)
    inputs = 16 * 2 * 4 * 8 * 4 // 8
    largest = rehearsal.activations - inputs
    # The decoder returns the video's bytes. What is inside it is as long as a chunk: the compiler says how large.
    assert largest >= 3 * 5 * 64 * 128 // 8


def test_noise_of_another_size_with_as_many_tokens_is_refused_before_anything_is_loaded(port):
    task = port("height=64", "width=96", noise=torch.zeros(1, 16, 2, 6, 4))
    assert refusal(BadValueError, lambda: check(task)) == (
        "noise: It has the shape [1, 16, 2, 6, 4]. For this height, width and frames it must be [1, 16, 2, 4, 6]."
    )


def test_rotary_tables_of_another_size_with_as_many_tokens_are_refused(port):
    task = port("height=64", "width=96")
    rope = network.as_shapes(task, task.stages[1])["transformer"].rope
    assert rope(torch.zeros(1, 1, 2, 4, 6, device="meta"))[0].shape[0] == 2 * 4 * 6
    with pytest.raises(BadValueError) as caught:
        rope(torch.zeros(1, 1, 2, 6, 4, device="meta"))
    assert str(caught.value) == (
        "rotary tables: They are for latents of 2 x 4 x 6, and these have 2 x 6 x 4. "
        "Prepare the transformer for the size that it is called with."
    )


def test_a_rehearsal_counts_no_default_dtype_of_the_callers(port):
    torch.set_default_dtype(torch.bfloat16)
    try:
        task = port()
        rehearsal = preflight.rehearse(task, task.stages[1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert rehearsal.calls[0].tensors["timestep"].dtype == torch.float32


def test_a_mesh_without_devices_says_for_which_platform_and_chip_it_is():
    mesh = sharding.abstract_mesh({"dp": 2, "sp": 4}, machine.parse_machine("tpu7x:2x2x1", "a"))
    assert dict(mesh.shape) == {"dp": 2, "sp": 4, "tp": 1}
    assert (mesh.abstract_device.platform, mesh.abstract_device.device_kind) == ("tpu", "TPU7x")
