"""A job's plan without a TPU: what the compiler says, what is a model, and what does not fit."""

import dataclasses
import json
import pickle
import types

import jax
import pytest
import torch
from fakes.plain_pack import PlainPack
from jax.sharding import PartitionSpec

from torchport import engine, shard
from torchport.compile import network
from torchport.config import xla_flags
from torchport.config.machine import parse_machine
from torchport.errors import BadValueError, MeshError, OutputError, TopologyError, VmemError
from torchport.kernels.attention import dispatch, tiles
from torchport.plan import aot, plan_report, planning, step_time
from torchport.plan.figures import Collective, KnownTime, Overflow, StageLeftOut, StepTime
from torchport.plan.tpu import absent, hlo
from torchport.processes import child
from torchport.shard.grid import Spot
from torchport.stages import recorder
from torchport.task import Execution, Request, accept

needs_libtpu = pytest.mark.skipif(
    not absent.installed(),
    reason="libtpu is not installed; pip install 'torchport[plan]' and run `pytest tests/plan/test_planning.py`",
)
SMALL = ("height=64", "width=96", "frames=9", "dtypes={transformer: bfloat16}")
V6E = parse_machine("v6e:2x4", "a.yaml:1")
ULYSSES = (*SMALL, "strategy=ulysses", "mesh={dp: 2, sp: 4}")


def request(*overrides, config="configs/demo.yaml"):
    return Request("hunyuan", config, overrides=overrides)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    keep = tmp_path_factory.mktemp("plan")
    return planning.plan(request(*ULYSSES), "v6e:2x4", keep, stages=("denoise",)), keep


@needs_libtpu
def test_a_plan_says_what_the_compiler_says(planned):
    found, keep = planned
    stage = found.stage("denoise")
    assert found.fits and stage.fits and stage.status == "ok"
    encode, decode = found.stages["encode"], found.stages["decode"]
    assert encode.status == "not_ported" and "on the host" in encode.why
    assert decode == StageLeftOut(status="not_asked", why="Add --stage decode, or --stage all")
    device = stage.per_device
    assert 0 < device.arguments_bytes < device.peak_bytes < device.hbm_bytes == 32 * 2**30
    program = hlo.read(keep / "denoise")
    loop = max((loop for loop in program.loop_bodies() if program.kernels(loop.body)), key=lambda loop: loop.cycles)
    assert stage.per_block.count == loop.trips == 2
    passes = sum(kernel.count * kernel.ms for kernel in stage.per_block.kernels)
    assert passes > 0, "norms and positions are a kernel's, which the compiler's estimate leaves out"
    assert stage.per_block.other_ms == pytest.approx(1e3 * loop.cycles / 1.755e9 + passes)
    assert json.loads((keep / "plan.json").read_text()) == found.model_dump(mode="json")
    [one] = stage.programs
    assert one.times == stage.steps == 8 and (keep / one.dump).is_file()
    assert stage.per_device == one.per_device and stage.step == one.step


@needs_libtpu
def test_ulysses_moves_tokens_and_heads_and_tp_sums_what_was_split(planned):
    kinds = {one.kind for one in planned[0].stage("denoise").per_block.collectives}
    assert "all-to-all" in kinds
    collectives = planned[0].stage("denoise").per_block.collectives
    shapes = {(one.group, one.links, one.ports) for one in collectives}
    assert shapes == {(4, "2x2 square", 2.0)}
    found = planning.plan(request(*SMALL), "v6e:2x4", stages=("denoise",))
    kinds = [one.kind for one in found.stage("denoise").per_block.collectives]
    assert set(kinds) == {"all-reduce"}


@needs_libtpu
def test_a_step_has_the_collectives_of_all_blocks_and_what_is_around_them(planned):
    stage = planned[0].stage("denoise")
    block, step = stage.per_block, stage.per_step
    for one in block.collectives:
        alike = [other for other in step.collectives if other.kind == one.kind]
        assert sum(other.count for other in alike) >= one.count * block.count
    assert step.communication_ms == pytest.approx(1e3 * stage.step.communication_s)
    assert step.communication_ms > block.count * block.communication_ms


@needs_libtpu
def test_the_model_of_a_step_is_its_attention_and_the_other_parts_over_the_factor_and_above_the_floor(planned):
    stage = planned[0].stage("denoise")
    step = stage.step
    assert step.uncalibrated_s == pytest.approx(step.attention_s + step.other_s + step.communication_s)
    kept = step.attention_s + step.products_s
    divided = (step.uncalibrated_s - kept) / step_time.shipped_calibration().factor
    assert 0 < step.products_s < step.other_s and step.model_s == pytest.approx(kept + divided)
    assert step.attention_s + step.products_s > 0.95 * step.floor_s, "no program takes less than its arithmetic"
    assert step.model_s > step.attention_s > 0 and step.model_s > step.floor_s > 0
    call = stage.attention
    assert call.implementation == "splash_transposed" and call.bounded
    assert (call.queries - 3 * 4 * 6) % 256 == 0, "the text is whole pieces"
    assert call.flops_per_device == 4 * 2 * 4 * call.queries**2 * 32 // 8
    assert call.head_size == 32 and call.peak_percent < 64 / 2, "zeros for half of its features or more"
    assert any("attention's own share of peak: 1,352 keys in bfloat16" in said for said in stage.not_modelled)


@needs_libtpu
def test_a_plan_reads_as_text(planned):
    text = "\n".join(plan_report.lines(planned[0]))
    assert text.startswith("hunyuan on v6e:2x4, ulysses, dp=2 x sp=4: fits")
    assert "\nencode: not ported. It runs on the host, in PyTorch" in text
    assert "\ndenoise: 1 program(s), called 8 x [2, 33, 3, 4, 6]" in text
    assert "(compiler)" in text and "by the model" in text and "assumed: calibrated with " in text
    assert "diffusers/models/" in text and " among 4 (2x2 square)  " in text


@needs_libtpu
def test_unrolled_blocks_have_no_figure_per_block():
    found = planning.plan(request(*ULYSSES, "stacked=false"), "v6e:2x4", stages=("denoise",))
    assert found.stage("denoise").per_block is None
    assert found.stage("denoise").step.model_s > 0


def unfit(what, asked, limit):
    """What the compiler's process says of a program that does not fit."""
    overflow = Overflow(
        what=what, kernel=None, tile=None, asked_bytes=asked, limit_bytes=limit, fact="Too large for HBM"
    )
    return compiled_program(overflow, steps=8)


def compiled_program(memory, **fields):
    """What the compiler's process says of a program."""
    known = {"inputs": {"x": [2, 3]}, "times": 8, "steps": 1, "flops": 10**15, "borders": 10**9, "dump": None}
    known |= {
        "operators": "2 operators: 2 same",
        "trace_s": 1.0,
        "compile_s": 2.0,
        "calls": [],
        "passes": [],
        "spots": [],
    }
    return aot.CompiledProgram(memory, **{**known, **fields})


def test_what_does_not_fit_is_a_finding(monkeypatch, torchport, capsys, root):
    monkeypatch.setattr(aot, "compiled_in_child", lambda *_: [unfit("hbm", 20 * 2**30, 16 * 2**30)])
    found = planning.plan(request(*ULYSSES), "v5e:2x4")
    stage = found.stage("denoise")
    assert not found.fits and stage.per_device.peak_bytes == 20 * 2**30
    assert stage.step.floor_s == pytest.approx(1e15 / (197e12 * 8)) and stage.step.model_s is None
    assert (stage.dtypes, stage.precision) == ({"transformer": "bfloat16"}, {"transformer": "default"})
    text = plan_report.lines(found)
    assert text[0].endswith("DOES NOT FIT") and text[3] == "  bytes per device  20.0 GiB of 16.0 GiB"
    assert text[4] == "  DOES NOT FIT: HBM: 21,474,836,480 bytes, limit 17,179,869,184. Too large for HBM"
    arguments = ("--model", "hunyuan", "--config", "configs/demo.yaml", "--topology", "v5e:2x4", "--path", root)
    sets = [part for override in ULYSSES for part in ("--set", override)]
    code, out, _ = torchport("plan", *arguments, *sets, capsys=capsys)
    assert code == 1 and out[0].endswith("DOES NOT FIT"), "the exit code says so, too"


def test_a_tile_that_overflows_vector_memory_is_a_finding(monkeypatch):
    def lowered(tensors, static):
        notes.append(dispatch.Traced("splash_transposed", 2, 4, 40_000, 40_000, 128, False))
        large = tiles.Tile(20_480, 2048).fitted(40_000, 40_000)
        tiles.check_vmem(large, head_size=128, heads=1, itemsize=2, bounded=False, vmem=128 * 2**20)

    notes = []
    mesh = shard.make_mesh({}, jax.devices()[:1])
    fields = {"lowered": staticmethod(lowered), "shapes": staticmethod(dict), "mesh": mesh}
    network = type("Network", (), {**fields, "network": types.SimpleNamespace(operator_record=engine.Operators)})
    called = recorder.NetworkCall({}, (), 8, 10**15, (1,), None, borders=10**9)
    result, outputs = aot._program(aot.StageNetwork(network, [called], notes), called, V6E, planning.Path("nowhere"))
    assert outputs is None
    overflow = result.memory
    assert (overflow.kernel, overflow.limit_bytes) == ("splash_transposed", 120 * 2**20) and result.dump is None
    monkeypatch.setattr(aot, "compiled_in_child", lambda *_: [compiled_program(overflow)])
    found = planning.plan(request(*ULYSSES), "v6e:2x4")
    [finding] = found.stage("denoise").findings
    assert finding.what == "vmem" and finding.asked_bytes > finding.limit_bytes == 120 * 2**20
    assert finding.kernel == "splash_transposed" and finding.tile == "20096/2048/512"
    text = "\n".join(plan_report.lines(found))
    assert f"DOES NOT FIT: VMEM splash_transposed 20096/2048/512: {finding.asked_bytes:,} bytes, limit" in text
    assert not found.fits and found.stage("denoise").per_device.hbm_bytes == 32 * 2**30


@pytest.mark.parametrize(("borders", "calls"), [(2**30, 5), (2**30 + 1, 3)])
def test_a_verification_takes_the_weights_in_two_dtypes_and_the_blocks_values(borders, calls):
    task = accept(dataclasses.replace(request(*SMALL), stage="denoise"))
    program = types.SimpleNamespace(borders_bytes=borders, times=8)
    planned = {"denoise": types.SimpleNamespace(step=types.SimpleNamespace(flops=1e12), programs=[program], steps=8)}
    cost = planning.verification_cost(task, planned)
    assert cost.values_bytes == borders
    assert cost.host_bytes - borders == 3 * cost.device_bytes > 0  # bfloat16, and float32 beside it
    assert (cost.flops, cost.host_s) == (calls * 1e12, calls)
    assert planning.verification_cost(task, {}) is None


def test_a_module_that_needs_a_stub_to_be_imported_has_its_cost(tmp_path, monkeypatch):
    plain = PlainPack(tmp_path, monkeypatch)
    plain.write_gpu_code()
    task = accept(Request("plain", "configs/small.yaml", stage="denoise", paths=(str(plain.root),)), dry=True)
    program = types.SimpleNamespace(borders_bytes=1, times=1)
    planned = {"denoise": types.SimpleNamespace(programs=[program], steps=1, step=types.SimpleNamespace(flops=1.0))}
    cost = planning.verification_cost(task, planned)
    plain.close()
    assert cost.device_bytes > 0


def test_the_compilers_words_for_too_little_vector_memory_name_the_kernel():
    said = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for "
        "%splash_mha.3 = bf16[4,8]{1,0} custom-call(%a), target. Scoped allocation with size 130.00M and limit "
        "120.00M exceeded scoped vmem limit by 10.00M."
    )
    with pytest.raises(VmemError) as caught:
        aot._memory(Lowered(said).compile, V6E)
    assert (caught.value.asked, caught.value.limit) == (130 * 2**20, 120 * 2**20)
    assert aot._overflow(caught.value, []).kernel == "splash_mha"


class Lowered:
    """A program that the compiler refuses with these words."""

    def __init__(self, said):
        self.said = said

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.said)


def test_scores_without_a_bound_are_planned_with_a_running_maximum(monkeypatch):
    asked = {}

    def call(function, one, dump, bounded, *, ended, environment):
        asked["bounded"] = bounded
        raise ended(child.Ended(1, "stopped here"))

    monkeypatch.setattr(child, "call", call)
    for bounded in (True, False):
        assert refusal(
            TopologyError, lambda bounded=bounded: planning.plan(request(*ULYSSES), "v6e:2x4", None, bounded)
        ) == (
            "plan v6e:2x4: The compiler ended with exit code 1 and said: stopped here. Mend that, or plan another size."
        )
        assert asked["bounded"] is bounded
    task = accept(dataclasses.replace(request(*ULYSSES), stage="denoise"))
    assert planning._assumptions(task, False, False)[0] == "no bound of the scores 'joint'"
    [stage] = task.stages
    for bounded in (True, False):
        with aot.outlined(task, stage, jax.devices(), bounded) as found:
            assert (found.program.attention.bounds == {"joint": 1.0}) is found.program.attention.shifts is bounded


def test_shifted_scores_take_little_longer_than_bounded_ones_and_the_plan_says_what_it_assumes():
    task = types.SimpleNamespace(machine=V6E, job=types.SimpleNamespace(mesh={"dp": 2, "sp": 4}))
    call = dispatch.Traced("splash_transposed", 2, 40, 75_600, 75_600, 128, bounded=False)
    online, shifted, bounded = (
        step_time._attention(task, dataclasses.replace(call, **scores)).ms
        for scores in ({}, {"shifted": True}, {"bounded": True})
    )
    assert bounded < shifted < online and shifted == pytest.approx(1.006 * bounded)
    task = accept(dataclasses.replace(request(*ULYSSES), stage="denoise"))
    assert planning.SHIFTS_ASSUMED in planning._assumptions(task, True, True)
    assert planning.SHIFTS_ASSUMED not in planning._assumptions(task, True, False)


def test_the_compilers_words_for_too_little_memory_become_bytes():
    said = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (17.50G) exceeds available HBM (15.75G)."
    v5e = parse_machine("v5e:2x4", "a.yaml:1")
    overflow, outputs = aot._memory(Lowered(said).compile, v5e)
    assert outputs is None
    assert (overflow.what, overflow.asked_bytes, overflow.limit_bytes) == ("hbm", 17.5 * 2**30, 15.75 * 2**30)
    with pytest.raises(TopologyError) as caught:
        aot._memory(Lowered("INTERNAL: broken").compile, v5e)
    assert str(caught.value) == "plan v5e:2x4: The compiler refuses it: INTERNAL: broken. Plan another size."


def refusal(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_a_machine_that_is_no_tpu_and_a_mesh_that_does_not_fit_are_refused():
    assert refusal(BadValueError, lambda: planning.plan(request(), None)) == (
        "machine cpu:8: It is no TPU, and a plan is for one. Name a slice with --topology v6e:2x4."
    )
    text = refusal(MeshError, lambda: planning.plan(request(), "v6e:4x4"))
    assert "dp=2 x tp=4 takes 8 device(s), and v6e:4x4 has 16" in text


@needs_libtpu
@pytest.mark.parametrize(
    ("mesh", "machine", "kind", "text"),
    [
        ("{dp: 1, tp: 8}", "v6e:2x4", MeshError, "tp=8 does not divide transformer.num_attention_heads, which is 4"),
        ("{tp: 15}", "v6e:3x5", TopologyError, "machine v6e:3x5: libtpu does not know this slice"),
    ],
    ids=["a mesh", "a slice"],
)
def test_a_refusal_in_the_compilers_process_is_this_process_refusal(mesh, machine, kind, text):
    assert text in refusal(kind, lambda: planning.plan(request(*SMALL, f"mesh={mesh}"), machine))


def recorded(name, *overrides):
    task = accept(dataclasses.replace(request(*overrides), stage=name))
    with aot.outlined(task, task.stages[0], jax.devices()) as found:
        return found


def test_a_stage_is_outlined_with_the_inputs_its_verb_makes():
    found = recorded("denoise", *ULYSSES)
    [called] = found.called
    inputs = called.tensors
    assert called.times == 8, "once a step"
    assert inputs["hidden_states"].shape == (2, 33, 3, 4, 6) and inputs["image_embeds"].shape == (2, 0, 40)
    tokens = inputs["encoder_hidden_states"].shape[1] + inputs["encoder_hidden_states_2"].shape[1]
    assert tokens % 256 == 0
    assert all(isinstance(weight, jax.ShapeDtypeStruct) for weight in found.program.weights.values())
    assert called.flops == 14_330_040_320


def test_decoding_in_tiles_calls_for_each_shape_of_tile_as_often_as_it_occurs():
    found = recorded("decode", "height=320", "width=448", "frames=9", "vae_tiling=true", *ULYSSES[4:], *ULYSSES[3:4])
    shapes = {tuple(called.tensors["hidden_states"].shape[2:]): called.times for called in found.called}
    # Tiles of 16 x 16 latent positions, 12 apart, in 20 x 28.
    assert shapes == {(3, 16, 16): 2, (3, 16, 4): 1, (3, 8, 16): 2, (3, 8, 4): 1}
    assert found.program.precision == "high"
    spec = found.program.shapes(found.called[0].tensors)["hidden_states"].sharding.spec
    assert spec == PartitionSpec(None, None, None, None, ("dp", "sp")), "columns of the latents are split"
    whole = recorded("decode", "height=320", "width=448", "frames=9", "vae_tiling=false", *ULYSSES[4:])
    assert [(tuple(c.tensors["hidden_states"].shape), c.times) for c in whole.called] == [((1, 16, 3, 20, 28), 1)]


def test_a_verb_that_asks_for_a_value_or_never_calls_is_refused(pack):
    def asks(parts, call, settings, steps):
        return {"x": torch.zeros(int(call(x=torch.zeros(2, 3)).sum().item()))}

    def silent(parts, call, settings, steps):
        return {}

    [stage] = accept(dataclasses.replace(request(), stage="denoise")).stages
    like = {"like": lambda parts, settings: {}}
    network = torch.nn.Linear(3, 3)
    how = lambda module, x: module(x)  # noqa: E731
    text = refusal(
        BadValueError,
        lambda: recorder.network_calls(dataclasses.replace(stage, run=asks, **like), {}, network, how, None),
    )
    assert text.startswith("--stage denoise: Its verb asks for a value that the network computes (aten._local_scalar")
    text = refusal(
        BadValueError,
        lambda: recorder.network_calls(dataclasses.replace(stage, run=silent, **like), {}, network, how, None),
    )
    assert text == "--stage denoise: It never calls its network. Report this: its verb is at fault."


def test_a_stage_whose_inputs_are_not_known_is_refused(pack):
    task = accept(dataclasses.replace(request(*SMALL), stage="decode"))
    stage = dataclasses.replace(task.stages[0], like=None)
    with pytest.raises(BadValueError) as caught, aot.outlined(task, stage, []):
        pass
    assert str(caught.value) == "--stage decode: Its inputs are not known beforehand. Plan the stage 'denoise'."


def test_tiles_that_a_run_refuses_are_refused_by_a_plan_of_the_decoder_before_it_compiles():
    tiled = Request("cogvideox", "configs/cogvideox_720p.yaml", overrides=("vae_tiling=true",))
    for stages in ((), ("decode",), ("all",)):
        assert "the VAE of 'cogvideox' is compiled whole and split over the mesh" in refusal(
            BadValueError, lambda stages=stages: planning.plan(tiled, "v6e:2x4", stages=stages)
        )


def test_a_stage_of_which_nothing_is_compiled_is_refused():
    assert refusal(BadValueError, lambda: planning.plan(request(), "v6e:2x4", stages=("encode",))) == (
        "--stage encode: Nothing of it is compiled: it runs on the host, in PyTorch. "
        "Name one of denoise, decode, or all."
    )


def stages_compiled(monkeypatch, task, *names):
    """The stages that are compiled where these are named, and the plan."""
    compiled = []

    def compiled_in_child(task, stage, *_):
        compiled.append(stage)
        return [compiled_program(unfit("hbm", 3, 2).memory)]

    monkeypatch.setattr(aot, "compiled_in_child", compiled_in_child)
    found = planning.of_task(task, None, True, names)
    return compiled, found


def test_every_stage_with_a_network_is_planned_one_after_the_other_and_named_while_it_is(monkeypatch, caplog):
    caplog.set_level("INFO", "torchport")
    task = accept(planning.on_slice(request(*ULYSSES), "v6e:2x4"))
    compiled, found = stages_compiled(monkeypatch, task)
    assert compiled == ["denoise", "decode"] and found.stages["encode"].status == "not_ported"
    assert caplog.messages == ["compile denoise (1 of 2) ...", "compile decode (2 of 2) ..."]
    caplog.clear()
    compiled, found = stages_compiled(monkeypatch, task, "denoise")
    assert compiled == ["denoise"] and caplog.messages == []
    assert found.stages["decode"] == StageLeftOut(status="not_asked", why="Add --stage decode, or --stage all")
    assert stages_compiled(monkeypatch, task, "all")[0] == ["denoise", "decode"]


def test_a_decoder_whose_inputs_are_not_known_beforehand_is_left_out_unless_it_is_named(monkeypatch):
    task = accept(planning.on_slice(request(*ULYSSES), "v6e:2x4"))
    known = [
        stage if stage.name == "denoise" else dataclasses.replace(stage, like=None) for stage in task.family.STAGES
    ]
    monkeypatch.setattr(task.family, "STAGES", known)
    compiled, found = stages_compiled(monkeypatch, task)
    why = "The shapes of its inputs are not known beforehand"
    assert compiled == ["denoise"] and found.stages["decode"] == StageLeftOut(status="not_asked", why=why)
    assert stages_compiled(monkeypatch, task, "decode")[0] == ["decode"]


LOW = """HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main (p: f32[]) -> f32[] {
  %a = f32[1,4,5] parameter(0)
  %b = f32[2,5,6] parameter(1)
  ROOT %c = f32[1,4,6] convolution(%a, %b), window={size=2 pad=0_1}, dim_labels=0bf_0io->0bf, COST
}
"""


@pytest.mark.parametrize("cycles", [1, -5])
def test_a_product_that_is_estimated_below_its_arithmetic_counts_with_its_arithmetic(tmp_path, cycles):
    high = f'operand_precision={{high,high}}, backend_config={{"estimated_cycles":"{cycles}"}}'
    (tmp_path / "a.txt").write_text(LOW.replace("COST", high).replace("[1,4,", "[1,40000,"))
    memory = aot.DeviceBytes(1, 1, 1, 0, 0)
    one = compiled_program(memory, dump="a.txt", times=1)
    task = accept(planning.on_slice(request(*ULYSSES), "v6e:2x4"))
    found = planning._program_plan(task, one, tmp_path, denoises=False)
    flops = 3 * 2 * 40_000 * 5 * 6
    floor = 1e3 * -(-flops // 524_288) / 1.755e9
    assert found.fits and found.largest[0].ms == pytest.approx(floor)
    assert found.step.other_s == pytest.approx(floor / 1e3)
    assert found.step.products_s == found.step.other_s


def test_a_dump_is_not_mixed_with_an_earlier_one(tmp_path):
    (tmp_path / "denoise").mkdir()
    (tmp_path / "denoise" / "module.after_codegen.txt").write_text("")
    text = refusal(OutputError, lambda: planning.plan(request(*ULYSSES), "v6e:2x4", tmp_path))
    assert text == f"{tmp_path / 'denoise'}: It holds the dump of an earlier plan. Name a new folder with --keep."


@needs_libtpu
def test_a_stage_of_several_programs_is_their_sum_and_the_largest_of_their_bytes(planned, monkeypatch):
    found, keep = planned
    [one] = found.stage("denoise").programs
    sizes = aot.DeviceBytes(argument=100, temp=20, output=0, alias=0, generated_code=0)
    shared = {"flops": 10**9, "dump": "copy.txt", "spots": [Spot(0, (n % 2, n // 2, 0), 0) for n in range(8)]}
    results = [
        compiled_program(sizes, inputs={"z": [1, 32, 3, 16, 16]}, times=18, **shared),
        compiled_program(dataclasses.replace(sizes, temp=10), inputs={"z": [1, 32, 3, 9, 16]}, times=3, **shared),
    ]

    def compiled_in_child(task, stage, folder, *_):
        folder.mkdir()
        (folder / "copy.txt").write_text((keep / one.dump).read_text())
        return results

    monkeypatch.setattr(aot, "compiled_in_child", compiled_in_child)
    whole = planning.plan(request(*ULYSSES), "v6e:2x4", stages=("decode",))
    stage = whole.stage("decode")
    first, second = stage.programs
    assert whole.fits and stage.per_device.peak_bytes == 120 and stage.steps == 1
    for part in ("attention_s", "other_s", "products_s", "communication_s", "model_s", "floor_s", "flops"):
        each = [getattr(one.step, part) for one in (stage, first, second)]
        assert each[0] == pytest.approx(18 * each[1] + 3 * each[2])
    sent = sum(one.count for one in stage.per_step.collectives)
    assert sent == 21 * sum(one.count for one in first.per_step.collectives)
    assert stage.largest[0].ms == pytest.approx(18 * first.largest[0].ms)
    assert stage.per_block is None and stage.compile_s == 4.0
    assert "decode: 2 program(s), called 18 x [1, 32, 3, 16, 16], 3 x [1, 32, 3, 9, 16]" in plan_report.lines(whole)


def test_a_stage_of_which_one_program_does_not_fit_has_no_time(tmp_path):
    task = accept(dataclasses.replace(request(*ULYSSES, "machine=v6e:2x4"), stage="denoise"))
    large = unfit("hbm", 20 * 2**30, 16 * 2**30)
    known = planning._program_plan(task, large, tmp_path, denoises=True)
    seconds = dict.fromkeys(KnownTime.model_fields, 1.0)
    fits = {"fits": True, "times": 3, "step": StepTime(**seconds, floor_s=0.5, flops=7)}
    programs = [known.model_copy(update={"times": 2}), known.model_copy(update=fits)]
    stage = planning.combined(programs, 1, dtypes={}, precision={})
    assert not stage.fits and stage.step.model_s is None and stage.step.flops == 2 * 10**15 + 21


@needs_libtpu
@pytest.mark.slow
def test_a_decoder_compiles_for_a_slice_with_the_cards_precision_and_exchanges_its_edges(tmp_path):
    sizes = ("height=32", "width=64", "frames=1", *ULYSSES[-2:])
    stage = planning.plan(request(*sizes), "v6e:2x4", tmp_path, stages=("decode",)).stage("decode")
    [one] = stage.programs
    assert stage.fits and one.inputs == {"hidden_states": [1, 16, 1, 2, 4]} and one.times == 1
    assert {one.kind for one in stage.per_step.collectives} >= {"collective-permute"}
    assert stage.attention is None and stage.step.attention_s == 0.0, "XLA computes the attention of frames"
    assert stage.step.model_s > stage.step.floor_s > 0 and len(stage.largest) == 10
    assert any("without an estimate of the compiler's" in said for said in stage.not_modelled)


@needs_libtpu
def test_a_second_reading_of_the_dump_agrees_and_sees_a_plan_that_does_not(planned, root, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import plan_dump

    found, keep = planned
    rows = plan_dump.compared(keep)
    assert [row["figure"] for row in rows] == ["other_ms", "bytes", "bytes_of_all"]
    assert all(row["ratio"] == pytest.approx(1.0) and row["here"] > 0 for row in rows)
    block = found.stage("denoise").programs[0].per_block
    wrong = found.model_dump(mode="json")
    wrong["stages"]["denoise"]["programs"][0]["per_block"]["other_ms"] = 2 * block.other_ms
    (tmp_path / "plan.json").write_text(json.dumps(wrong))
    (tmp_path / "denoise").symlink_to(keep / "denoise")
    assert plan_dump.compared(tmp_path)[0]["ratio"] == pytest.approx(0.5)


def test_collectives_take_as_long_as_their_bytes_take_through_two_links():
    v6e = V6E.chip

    def seconds(kind, size, count, group=4, links="2x2 square", ports=2.0):
        fields = {"kind": kind, "bytes": size, "count": count, "group": group, "links": links, "ports": ports}
        return step_time.communication_seconds([Collective(source=None, **fields)], v6e)

    assert seconds("all-to-all", 100_000_000, 2) == pytest.approx(2 * 1e8 * 0.75 / 2e11)
    assert seconds("all-reduce", 100_000_000, 1) == pytest.approx(2 * 1e8 * 0.75 / 2e11)
    assert seconds("reduce-scatter", 25_000_000, 1) == pytest.approx(1e8 * 0.75 / 2e11)
    assert seconds("all-to-all", 100_000_000, 1, links="1x4 line", ports=1.0) == pytest.approx(1e8 * 0.75 / 1e11)


def test_a_task_travels_to_another_process_as_it_is():
    """Nothing of it is read a second time there: the config may have changed on disk."""
    task = accept(dataclasses.replace(request(*ULYSSES), stage="denoise"))
    assert pickle.loads(pickle.dumps(task)) == task


def test_a_plan_says_what_is_lossy_and_with_which_flags_it_was_compiled(monkeypatch):
    monkeypatch.setattr(aot, "compiled_in_child", lambda *_: [unfit("hbm", 20 * 2**30, 16 * 2**30)])
    sets = (*ULYSSES, "attention=splash_int8", "cache={kind: deepcache}")
    asked = dataclasses.replace(request(*sets), execution=Execution(xla_flags="less-memory"))
    job = planning.plan(asked, "v6e:2x4", stages=("denoise",))
    assert job.lossy == [
        "attention splash_int8 multiplies queries and keys in eight bits where scores have a bound",
        "cache deepcache computes 5 of 8 steps: 0-2, 6-7",
    ]
    assert job.assumptions[-1] == "--xla-flags less-memory"
    lines, page = plan_report.lines(job), plan_report.page_of(job, "torchport plan")
    assert all(f"  lossy: {said}" in lines and f"<li>Lossy: {said}</li>" in page for said in job.lossy)
    exact = planning.plan(request(*ULYSSES, "cache={kind: calibrate}"), "v6e:2x4", stages=("denoise",))
    assert exact.lossy == [] and not any("lossy" in line for line in plan_report.lines(exact))


def test_named_flags_reach_the_compiler(monkeypatch, tmp_path):
    seen = {}

    def call(function, *args, ended, environment):
        seen.update(environment)
        return []

    monkeypatch.setattr(child, "call", call)
    asked = dataclasses.replace(request(*ULYSSES), execution=Execution(xla_flags="less-memory"))
    task = accept(planning.on_slice(asked, "v6e:2x4"), dry=True)
    aot.compiled_in_child(task, "denoise", tmp_path / "dump")
    chosen = xla_flags.flag_set("less-memory", task.machine)
    assert all(text in seen[chosen.variable] for text in chosen.texts) and "xla_dump_to" in seen["XLA_FLAGS"]


def test_rules_for_a_mesh_are_checked_for_every_stage_that_is_planned(monkeypatch):
    checked = []
    monkeypatch.setattr(planning.shard, "check_axes", lambda strategy, networks, *_: checked.append(networks))
    monkeypatch.setattr(aot, "compiled_in_child", lambda *_: [unfit("hbm", 20 * 2**30, 16 * 2**30)])
    planning.plan(request(*ULYSSES), "v6e:2x4", stages=("denoise", "decode"))
    assert checked[-1] == ["transformer", "vae"]


@needs_libtpu
@pytest.mark.slow
def test_a_step_cache_is_planned_as_two_programs_and_their_average():
    found = planning.plan(request(*SMALL, "cache={kind: taylorseer, order: 1}"), "v6e:2x4").stage("denoise")
    whole, reused = found.programs
    assert (whole.times, reused.times, found.steps) == (5, 3, 8)
    assert reused.step.flops == 0 < whole.step.flops and "step_cache_kept.0.0" in reused.inputs
    assert found.step.flops == whole.step.flops * 5 / 8
    alone = planning.plan(request(*SMALL), "v6e:2x4").stage("denoise")
    assert found.per_device.peak_bytes > alone.per_device.peak_bytes, "what is kept lies there, too"


def test_encoders_on_the_devices_that_were_not_asked_for_can_be():
    task = types.SimpleNamespace(encodes_on_devices=lambda stage: True)
    left_out = planning._left_out(task, types.SimpleNamespace(name="encode", network=None, like=None))
    assert (left_out.status, left_out.why) == ("not_asked", "Add --stage encode, or --stage all")


def test_tensors_that_are_plain_attributes_have_their_values_in_a_plan(monkeypatch):
    class Tables(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.arange(3.0)

    built = torch.nn.ModuleDict({"inner": Tables()})
    with torch.device("meta"):
        shapes = torch.nn.ModuleDict({"inner": Tables()})
    monkeypatch.setattr(network, "recipe", lambda *_: ("maker", {}, "here"))
    monkeypatch.setattr(network.load, "build", lambda *_: built)
    task = types.SimpleNamespace(checkpoint="tiny", card=None, dtype=lambda name: "float32")
    network.restore_attributes(task, "transformer", shapes)
    assert shapes["inner"].table.tolist() == [0.0, 1.0, 2.0]
