"""The loop's own faults, planted one at a time around the stages of a port: the first seam that differs is named."""

import dataclasses
import math
import types

import pytest
import torch

from torchport.compile import preflight
from torchport.compile.in_force import in_force
from torchport.load import tiny
from torchport.stages import file_of
from torchport.task import Request, accept
from torchport.verify import seams
from torchport.verify.report import Verdict

SMALL = ("height=64", "width=96", "frames=9", "steps=3", "save_every=100")
CONFIGS = {
    "hunyuan": "configs/demo.yaml",
    "wan": "configs/wan_demo.yaml",
    "ltx": "configs/ltx_demo.yaml",
    "cogvideox": "configs/cogvideox_demo.yaml",
}


def request_of(root, model, **fields):
    sizes = ("height=32", "width=48", *SMALL[2:]) if model == "wan" else SMALL
    known = {"prompt": 'A cat under a "sign"', "negative_prompt": "blurry", "seed": 3, "paths": (str(root),)}
    return Request(model, CONFIGS[model], **known | {"overrides": sizes, "checkpoint": "tiny"} | fields)


def world(root, pack, model, **fields):
    """The tasks of both sides, the checkpoint, and the original's record."""
    request = request_of(root, model, **fields)
    port, original = accept(request), accept(dataclasses.replace(request, backend="original"))
    folder = tiny.write(port.card, file_of(pack, port.card, ""))
    with in_force(port, port.stages):
        calls = {str(stage.network): preflight.rehearse(port, stage).calls[0] for stage in port.denoising}
        templates = {
            name: call.output if torch.is_tensor(call.output) else call.output[0] for name, call in calls.items()
        }
    return types.SimpleNamespace(
        port=port, folder=folder, templates=templates, reference=seams.record(original, folder, {0, 1, 2}, templates)
    )


@pytest.fixture(scope="module")
def hunyuan(root, pack):
    return world(root, pack, "hunyuan")


@pytest.fixture(scope="module")
def wan(root, pack):
    return world(root, pack, "wan")


def port_with(world, **faults):
    """The port with stages that are wrapped in faults, `fault(run, parts, call, settings, steps, inputs)`."""

    def planted(stage):
        if stage.name not in faults:
            return stage
        fault = faults[stage.name]

        def run(parts, call, settings, steps, **inputs):
            return fault(stage.run, parts, call, settings, steps, inputs)

        return dataclasses.replace(stage, run=run)

    names = {**vars(world.port.family), "STAGES": tuple(map(planted, world.port.family.STAGES))}
    return dataclasses.replace(world.port, family=types.SimpleNamespace(**names))


def bad(world, **faults):
    """The seams that differ where stages are wrapped in faults."""
    port = port_with(world, **faults)
    known = None if "encode" in faults else world.reference.encoded  # encoders take most of the time
    own = seams.record(port, world.folder, {0, 1, 2}, world.templates, world.reference, known)
    rows = seams.differences(world.reference, own)
    return [(row.name, row.stage, row.step) for row in rows if row.verdict is not Verdict.SAME]


def scheduled(change):
    """A fault that changes what a scheduler's `set_timesteps` leaves."""

    def fault(run, parts, call, settings, steps, inputs):
        scheduler = parts["scheduler"]
        real = scheduler.set_timesteps

        def set_timesteps(*args, **kwargs):
            real(*args, **kwargs)
            change(scheduler)

        scheduler.set_timesteps = set_timesteps
        return run(parts, call, settings, steps, **inputs)

    return fault


def with_settings(**changes):
    return lambda run, parts, call, settings, steps, inputs: run(
        parts, call, dataclasses.replace(settings, **changes), steps, **inputs
    )


def with_inputs(**changes):
    def fault(run, parts, call, settings, steps, inputs):
        return run(parts, call, settings, steps, **{**inputs, **{name: f(inputs[name]) for name, f in changes.items()}})

    return fault


def with_outputs(**changes):
    def fault(run, parts, call, settings, steps, inputs):
        outputs = run(parts, call, settings, steps, **inputs)
        return {**outputs, **{name: f(outputs[name]) for name, f in changes.items()}}

    return fault


def halved(x):
    """In bfloat16, and back."""
    return x.to(torch.bfloat16).to(x.dtype)


def in_bfloat16(scheduler):
    scheduler.sigmas = halved(scheduler.sigmas)


def warmed_up(run, parts, call, settings, steps, inputs):
    """One step before the loop, with the loop's scheduler."""
    parts["scheduler"].set_timesteps(sigmas=[1.0, 0.5])
    parts["scheduler"].step(torch.zeros(1), parts["scheduler"].timesteps[0], torch.zeros(1))
    return run(parts, call, settings, steps, **inputs)


def begun_later(scheduler):
    scheduler.set_begin_index(0)
    scheduler.timesteps = scheduler.timesteps * 0.99


def overrun(scheduler):
    """The last step finds no sigma after it."""
    scheduler._begin_index = 1


def stopped(run, parts, call, settings, steps, inputs):
    raise IndexError("index 3 is out of bounds")


@pytest.mark.parametrize("model", CONFIGS)
def test_a_clean_port_has_no_seam_that_differs(root, pack, model, hunyuan, wan):
    known = {"hunyuan": hunyuan, "wan": wan}
    one = known[model] if model in known else world(root, pack, model)
    rows, _ = seams.compare(one.port, one.folder, one.reference, one.templates)
    assert [row for row in rows if row.distance] == []


def test_in_bfloat16_a_clean_port_has_no_seam_that_differs(root, pack):
    assert bad(world(root, pack, "hunyuan", overrides=(*SMALL, "dtypes.transformer=bfloat16"))) == []


@pytest.mark.parametrize(
    ("faults", "first"),
    [
        ({"denoise": scheduled(in_bfloat16)}, ("sigmas", "denoise", None)),
        ({"denoise": scheduled(begun_later)}, ("timesteps", "denoise", None)),
        ({"denoise": warmed_up}, ("number of scheduler steps", "denoise", None)),
        ({"denoise": scheduled(overrun)}, ("begin_index", "denoise", None)),
        ({"denoise": with_settings(seed=4)}, ("noise", "denoise", None)),
        ({"denoise": with_settings(guidance_scale=7.0)}, ("guidance", "denoise", 0)),
        ({"encode": with_outputs(prompt_embeds_2=halved)}, ("prompt_embeds_2", "encode", None)),
        ({"encode": with_outputs(prompt_embeds_2=torch.Tensor.half)}, ("dtype of prompt_embeds_2", "encode", None)),
        ({"encode": with_outputs(prompt_embeds_mask=torch.ones_like)}, ("prompt_embeds_mask", "encode", None)),
        ({"denoise": with_inputs(prompt_embeds=lambda x: x.flip(1))}, ("encoder_hidden_states", "denoise", 0)),
        ({"denoise": with_inputs(prompt_embeds_mask=torch.ones_like)}, ("encoder_attention_mask", "denoise", 0)),
    ],
    ids=[
        *("schedule", "begin", "warm-up", "overrun", "seed", "scale", "ByT5", "dtype", "mask", "order"),
        "mask of the loop",
    ],
)  # fmt: skip
def test_the_first_seam_that_differs_is_named(hunyuan, faults, first):
    assert bad(hunyuan, **faults)[0] == first


def test_a_loop_that_stops_is_noted_where_a_seam_before_differs(hunyuan):
    _, notes = seams.compare(
        port_with(hunyuan, denoise=scheduled(overrun)), hunyuan.folder, hunyuan.reference, hunyuan.templates
    )
    assert any(line.startswith("the loop after step 2: the port's stops with index ") for line in notes)


def test_a_loop_that_stops_is_an_error_where_nothing_before_differs(hunyuan):
    port = port_with(hunyuan, denoise=stopped)
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        seams.compare(port, hunyuan.folder, hunyuan.reference, hunyuan.templates)


class Guided:
    """A network's call that changes what it is called with."""

    batches = drops = True

    def __init__(self, call, change):
        self.call, self.change = call, change
        self.place = call.place

    def __call__(self, **inputs):
        return self.call(**self.change(inputs))


def called_with(change):
    return lambda run, parts, call, settings, steps, inputs: run(parts, Guided(call, change), settings, steps, **inputs)


def test_a_timestep_of_another_dtype_is_named(hunyuan):
    fault = called_with(lambda inputs: inputs | {"timestep": inputs["timestep"].double()})
    assert bad(hunyuan, denoise=fault)[0] == ("dtype of timestep", "denoise", 0)


def test_swapped_conditions_are_named(hunyuan):
    """The combined prediction is wrong, and so is nothing before it."""

    class Swapped(Guided):
        def __call__(self, **inputs):
            return self.call(**inputs).flip(0)

    fault = lambda run, parts, call, settings, steps, inputs: run(  # noqa: E731
        parts, Swapped(call, None), settings, steps, **inputs
    )
    assert bad(hunyuan, denoise=fault)[0] == ("guidance", "denoise", 0)


def test_a_fault_of_the_second_of_two_networks_is_named_at_its_step(wan):
    fault = called_with(lambda inputs: inputs | {"timestep": inputs["timestep"] + 1})
    assert bad(wan, denoise=fault)[0] == ("timestep", "denoise", 1)


def test_the_second_network_has_guidance_of_its_own(wan):
    fault = with_settings(call={"guidance_scale_2": 3.5})
    assert bad(wan, denoise=fault)[0] == ("guidance", "denoise", 1)


def cut(tokens, mask, length, **more):
    """The seams of an encoder whose tokens and mask a port has cut."""
    original = {"prompt_embeds": tokens, "prompt_embeds_mask": mask, **more}
    port = {"prompt_embeds": tokens[:, :length], "prompt_embeds_mask": mask[:, :length], **more}
    original, port = ({k: x for k, x in each.items() if x.numel()} for each in (original, port))
    return [row.name for row in seams.value_seams("encode", original, port) if row.verdict is not Verdict.SAME]


TOKENS, MASK = torch.arange(1, 25.0).reshape(1, 6, 4), torch.tensor([[1, 1, 1, 1, 0, 0]])


def test_only_what_its_own_mask_hides_may_be_left_out():
    assert cut(TOKENS, MASK, 4) == []
    assert cut(TOKENS, MASK, 3) == ["prompt_embeds", "prompt_embeds_mask"]
    shorter = torch.tensor([[1, 0, 0, 0, 0, 0]])
    assert cut(TOKENS, MASK, 3, negative_prompt_embeds_mask=shorter) == ["prompt_embeds", "prompt_embeds_mask"]
    assert cut(TOKENS, MASK, 3, prompt_embeds_mask_2=shorter) == ["prompt_embeds", "prompt_embeds_mask"]


def test_zeros_that_no_mask_hides_are_seen():
    zeros = TOKENS * MASK[..., None]
    assert cut(zeros, MASK[:, :0], 4) == ["prompt_embeds"]
    assert cut(zeros, MASK, 4) == []


def test_words_say_what_both_have(hunyuan):
    rows, _ = seams.compare(hunyuan.port, hunyuan.folder, hunyuan.reference, hunyuan.templates)
    assert next(row for row in rows if row.name == "sigmas").port == "float32 [4] (1, 0.857143, 0.6, 0)"


def test_words_show_where_two_tensors_differ():
    one, other = torch.zeros(2, 8), torch.zeros(2, 8)
    other[1, 3] = 5
    [row] = seams.value_seams("encode", {"embeds": one}, {"embeds": other})
    assert (row.original, row.port) == (
        "float32 [2, 8] (from number 11 on: 0, 0, 0, 0, ...)",
        "float32 [2, 8] (from number 11 on: 5, 0, 0, 0, ...)",
    )


def test_positions_of_an_image_are_no_embeddings_of_a_text():
    assert seams._token_distance(torch.zeros(8, 3), torch.zeros(512, 3)) == math.inf
    assert seams._token_distance(torch.zeros(1, 8, 3), torch.ones(1, 4, 3)) == 1
