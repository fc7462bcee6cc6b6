"""A capture is a recording of a bounded size in plain safetensors, and refuses what it was not made for."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from torchport.errors import ArtefactBrokenError, ArtefactForeignError, ArtefactMissingError, BadValueError
from torchport.task import Request, accept
from torchport.verify import reference
from torchport.verify.borders import Border
from torchport.verify.recording import RecordedCall, Recording
from torchport.verify.reference import TensorTable, restored
from torchport.verify.seams import ConditionCall, LoopRecord, SchedulerStep, SideRecord
from torchport.verify.yardstick import LARGE, distance, sampled

BLOCKS = [f"blocks.{n}" for n in range(5)]


@pytest.fixture
def task(root):
    return accept(Request("hunyuan", "configs/demo.yaml", prompt="A cat", paths=(str(root),), backend="original"))


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def call(step=0, width=8):
    values, outer = {}, {}
    for n, path in enumerate(BLOCKS):
        for number, side in enumerate(("in", "out")):
            value = random(1, 16, width) + 10 * n + number
            values[Border(path, 0, side)] = {"x": value, "mask": None} if side == "in" else (value, value + 1)
            wide = (value.double(), value.double() + 1)
            outer[Border(path, 0, side)] = {"x": wide[0], "mask": None} if side == "in" else wide
    inside = Border("blocks.1.norm", 0, "out")
    values[inside], inner = random(1, 16, width) - 1, dict(outer)
    inner[inside] = values[inside].double()
    inputs = {"hidden_states": random(1, 4, width), "return_dict": False, "mask_type": "t2v"}
    output = random(1, 4, width)
    return RecordedCall("denoise", "transformer", step, 0, inputs, output, output.double(), values, outer, inner)


def recording(width=8):
    trace = LoopRecord({0, 1})
    called = ConditionCall("transformer", "negative_", 0, {"x": random(3)}, {"return_dict": False})
    trace.steps.append(SchedulerStep({"sigmas": random(4), "step_index": None}, {"timestep": 3.0}, random(2), [called]))
    encoded = {"encode": {"prompt_embeds": random(1, 6, 8, dtype=torch.bfloat16)}}
    return Recording(
        encoded=encoded,
        calls=[call(0, width), call(1, width)],
        latents={1: random(1, 2)},
        states={1: {"latents": random(1, 2)}},
        ends={"denoise": {"latents": random(1, 3)}},
        seams=SideRecord(encoded, {}, trace),
        templates={"transformer": random(2, 4)},
    )


def test_what_is_written_is_read_again(tmp_path, task):
    words = reference.write(tmp_path, recording(), task)
    assert words.startswith("2 call(s) of step 0, 1: ")
    assert "left out" not in words
    again, first = reference.read(tmp_path), recording()
    assert torch.equal(again.encoded["encode"]["prompt_embeds"], first.encoded["encode"]["prompt_embeds"])
    assert again.calls[1].inputs["mask_type"] == "t2v"
    assert again.calls[0].values.keys() == first.calls[0].values.keys()
    border = Border("blocks.3", 0, "out")
    assert torch.equal(again.calls[0].outer[border][1], first.calls[0].outer[border][1])
    assert isinstance(again.calls[0].values[border], tuple)
    assert list(again.latents) == [1]
    [step] = again.seams.loop.steps
    assert step.arguments == {"timestep": 3.0}
    assert step.calls[0].condition == "negative_"
    assert again.templates["transformer"].shape == (1, 4)
    assert again.steps == (0, 1)


def test_it_is_plain_safetensors(tmp_path, task):
    reference.write(tmp_path, recording(), task)
    assert [file.name for file in tmp_path.iterdir()] == ["capture.safetensors"]
    tensors = load_file(tmp_path / "capture.safetensors")
    assert len(tensors) == len({(str(t.dtype), tuple(t.shape), t.float().sum().item()) for t in tensors.values()})


def test_blocks_that_do_not_fit_are_left_out_evenly_and_named(tmp_path, task):
    full = reference.write(tmp_path / "full", recording(256), task)
    words = reference.write(tmp_path / "small", recording(256), task, limit=260_000)
    assert "left out" not in full
    assert "left out: transformer.blocks." in words
    size = (tmp_path / "small" / "capture.safetensors").stat().st_size
    assert size < 300_000
    kept = {border.path for border in reference.read(tmp_path / "small").calls[0].outer}
    assert {"blocks.0", "blocks.4"} <= kept < set(BLOCKS)


def test_a_limit_below_what_every_port_needs_is_refused(tmp_path, task):
    with pytest.raises(
        BadValueError, match=r"--capture-limit .*: The loop's values and the networks' inputs alone take"
    ):
        reference.write(tmp_path, recording(), task, limit=10)
    assert not list(tmp_path.iterdir())


def test_blocks_are_kept_from_both_ends_to_the_middle():
    assert reference.spread(BLOCKS) == ["blocks.0", "blocks.4", "blocks.2", "blocks.1", "blocks.3"]
    assert sorted(reference.spread([str(n) for n in range(54)]), key=int) == [str(n) for n in range(54)]
    assert reference.spread([]) == []


def test_a_large_tensor_is_compared_in_some_rows():
    whole = random(1, LARGE // 64 + 8, 64)
    rows = sampled(whole)
    assert rows.shape == (4096, 64)
    assert distance(whole + 1e-3, rows) == pytest.approx(1e-3 / rows.abs().max().item(), rel=0.01)
    table = TensorTable()
    again = restored(json.loads(json.dumps(table.add(rows))), table.tensors)
    assert distance(whole, again) == 0
    longer = random(1, LARGE // 64 + 72, 64)
    assert distance(longer, again) is None, "the rows of another shape are other tokens"
    assert distance(sampled(longer), again) is None


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"model": "ltx", "config": "configs/ltx_demo.yaml"}, "It was captured for model 'hunyuan', and this"),
        ({"overrides": ("height=64",)}, "It was captured for height 128, and this verification has 64"),
        ({"prompt": "A dog"}, "It was captured for prompt 'A cat', and this verification has 'A dog'"),
        ({"seed": 7}, "It was captured for seed 42, and this verification has 7"),
        ({"overrides": ("dtypes.transformer=bfloat16",)}, "captured for dtype of transformer 'float32'"),
    ],
)
def test_another_job_is_refused_by_name(tmp_path, root, task, changes, fact):
    reference.write(tmp_path, recording(), task)
    assert reference.check(tmp_path, task) == ([], 0)
    known = {"model": "hunyuan", "config": "configs/demo.yaml", "prompt": "A cat", "paths": (str(root),)}
    with pytest.raises(ArtefactForeignError) as error:
        reference.check(tmp_path, accept(Request(**known | changes)))
    assert fact in str(error.value)
    assert "capture again: torchport verify --capture DIR" in str(error.value)


def test_another_version_of_an_upstream_is_refused(tmp_path, task, monkeypatch):
    reference.write(tmp_path, recording(), task)
    monkeypatch.setattr(reference, "versions", lambda: {"diffusers": "0.1", "transformers": "5", "torch": "9"})
    with pytest.raises(ArtefactForeignError, match=r"captured for diffusers '.*', and this verification has '0\.1'"):
        reference.check(tmp_path, task)


def test_another_version_of_torch_is_noted(tmp_path, task, monkeypatch):
    reference.write(tmp_path, recording(), task)
    known = reference.versions()
    monkeypatch.setattr(reference, "versions", lambda: {**known, "torch": "9.9"})
    [note], left_out = reference.check(tmp_path, task)
    assert note == f"the capture is of torch {known['torch']}, and this machine has 9.9" and left_out == 0


def test_another_checkpoint_is_refused(tmp_path, task, monkeypatch):
    reference.write(tmp_path, recording(), task)
    monkeypatch.setattr(reference, "_digests", lambda task: {"tiny": "another"})
    with pytest.raises(ArtefactForeignError, match="captured for checkpoint tiny"):
        reference.check(tmp_path, task)


def test_a_truncated_file_is_refused(tmp_path, task):
    reference.write(tmp_path, recording(), task)
    file = tmp_path / "capture.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ArtefactBrokenError, match="It is not safetensors"):
        reference.read(tmp_path)
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ArtefactBrokenError, match="its header cannot be read"):
        reference.read(tmp_path)


def test_changed_values_are_refused(tmp_path, task):
    reference.write(tmp_path, recording(), task)
    file = tmp_path / "capture.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(ArtefactBrokenError, match="Its tensors are not those that were written"):
        reference.read(tmp_path)


def test_a_folder_without_a_capture_is_refused(tmp_path):
    with pytest.raises(
        ArtefactMissingError, match=r"There is no such file\. Make it with: torchport verify --capture DIR"
    ):
        reference.read(tmp_path)


def test_what_is_no_tensor_and_no_text_is_left_out():
    table = TensorTable()
    tree = {"a": (1, [torch.ones(2), None]), 3: object(), "b": torch.ones(2)}
    again = restored(json.loads(json.dumps(table.add(tree))), table.tensors)
    assert again["a"][0] == 1
    assert torch.equal(again["a"][1][0], torch.ones(2))
    assert again[3] is None
    assert len(table.tensors) == 1


def test_a_tensor_without_strides_is_kept():
    table = TensorTable()
    data = table.add(torch.ones(1).expand(1, 1).expand(1, 1, 1))
    assert table.add(torch.tensor(3.0).expand(2)) != data
    assert [list(tensor.shape) for tensor in table.tensors.values()] == [[1, 1, 1], [2]]


def test_another_schema_is_refused(tmp_path, task, monkeypatch):
    monkeypatch.setattr(reference, "SCHEMA", 99)
    reference.write(tmp_path, recording(), task)
    monkeypatch.undo()
    with pytest.raises(ArtefactForeignError, match=r"Its schema version is 99\. This torchport reads 2"):
        reference.read(tmp_path)


def test_a_recording_without_some_calls_has_fewer(tmp_path, task):
    reference.write(tmp_path, dataclasses.replace(recording(), calls=[call()]), task)
    assert reference.read(tmp_path).steps == (0,)
