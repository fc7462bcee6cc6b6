"""Artefacts, manifests, unfinished latents and stage files that were changed: refused by name, or read as they were."""

import dataclasses
import json
import random
import shutil

import pytest
import torch
from fakes import fuzz_checkpoints as fuzz
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from torchport import save
from torchport.errors import SaveError
from torchport.run import resume
from torchport.task import accept

PARTIAL = "denoise.partial"
SEED = 20261122


def damaged(file, draw):
    """Changes bytes of a file: flips, cuts, repeats or inserts some."""
    data = bytearray(file.read_bytes())
    for _ in range(draw.choice((1, 1, 3))):
        at = draw.randrange(len(data) + 1)
        kind = draw.choice(("flip", "cut", "insert", "repeat", "zero"))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw.randbytes(draw.randrange(1, 9))
        elif kind == "repeat":
            data += data[at:]
        else:
            data[at : at + 8] = bytes(8)
    file.write_bytes(data)


def rewritten(file, draw, forged):
    """Changes fields of the manifest inside a file, its checksum made right again."""
    with safe_open(str(file), framework="pt") as stream:
        manifest = json.loads(stream.metadata()["torchport"])
    changed = fuzz.mutated(manifest, draw)
    forged(file, remove=set(manifest) - set(changed), **changed)


def retensored(file, draw):
    """Changes, drops or adds a tensor and keeps the manifest."""
    with safe_open(str(file), framework="pt") as stream:
        noted = stream.metadata()
    tensors = load_file(file)
    name = draw.choice(sorted(tensors))
    kind = draw.choice(("drop", "rename", "dtype", "shape", "value"))
    tensor = tensors.pop(name)
    if kind == "rename":
        tensors[draw.choice(("x", "", "latents.0", "a" * 300))] = tensor
    elif kind == "dtype":
        tensors[name] = tensor.to(draw.choice((torch.float16, torch.bfloat16, torch.int32, torch.bool)))
    elif kind == "shape":
        tensors[name] = tensor.reshape(-1)
    elif kind == "value":
        tensors[name] = tensor + 1
    save_file(tensors, file, noted)


def mutate(folder, name, draw, forged):
    """Changes one artefact in one way."""
    file, copy = save.file_of(folder, name), folder / f"{name}.json"
    kind = draw.choice(("bytes", "bytes", "manifest", "manifest", "tensors", "copy", "swap"))
    if kind == "bytes":
        damaged(file, draw)
    elif kind == "manifest":
        rewritten(file, draw, forged)
    elif kind == "tensors":
        retensored(file, draw)
    elif kind == "swap":
        shutil.copy(save.file_of(folder, "decode" if name == "encode" else "encode"), file)
    elif copy.is_file():
        damaged(copy, draw)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, root):
    """A finished run, and unfinished latents beside it."""
    from torchport.run.path import run
    from torchport.task import Request

    folder = tmp_path_factory.mktemp("runs")
    small = ("height=64", "width=64", "frames=5", "steps=3")
    request = Request(
        "hunyuan",
        "configs/demo.yaml",
        "A cat",
        out=folder / "a",
        backend="original",
        overrides=small,
        paths=(str(root),),
    )
    run(request)
    task = accept(request)
    tensors, manifest = save.read(folder / "a", "denoise", {}, {}, "")
    facts = manifest.model_dump(exclude={"schema_version", "tensors", "sha256", "done"})
    save.write(folder / "a", PARTIAL, tensors, {**facts, "done": 2})
    return task, folder / "a"


def sums(tensors):
    """What must not change without an error."""
    return {name: (tensor.dtype, tensor.shape, tensor.double().sum().item()) for name, tensor in tensors.items()}


@pytest.mark.slow
def test_1500_changed_artefacts_are_refused_by_name_or_read_as_they_were(runs, tmp_path, forged):
    task, source = runs
    draw, refused, right = random.Random(SEED), 0, 0
    whole = {name: sums(load_file(save.file_of(source, name))) for name in ("encode", "denoise", "decode")}
    for number in range(1500):
        folder = tmp_path / "a"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        name = ("encode", "denoise", "decode")[number % 3]
        mutate(folder, name, draw, forged)
        try:
            tensors, _ = save.read(folder, name, task.identity(name), {}, "a command")
        except SaveError as error:
            refused += 1
            assert str(error).startswith(f"{folder}/"), f"case {number}: {error}"
        else:
            right += 1
            assert sums(tensors) == whole[name], f"case {number}"
    assert refused + right == 1500 and refused > 1000


@pytest.mark.slow
def test_500_changed_unfinished_latents_are_refused_by_name_or_read_as_they_were(runs, tmp_path, forged, monkeypatch):
    task, source = runs
    draw, refused, right = random.Random(SEED + 1), 0, 0
    whole = sums(load_file(save.file_of(source, PARTIAL)))
    inputs = save.read_manifest(save.file_of(source, "denoise")).inputs
    weights = type("Weights", (), {"digests": save.read_manifest(save.file_of(source, "denoise")).components})
    for number in range(500):
        folder = tmp_path / "a"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        mutate(folder, PARTIAL, draw, forged)
        unfinished = resume.Unfinished(dataclasses.replace(task, folder=folder))
        try:
            done, tensors = unfinished.read(weights, inputs)
        except SaveError as error:
            refused += 1
            assert str(error).startswith(f"{folder}/"), f"case {number}: {error}"
        else:
            right += 1
            # A forger who also makes the checksum right can name another step, and no other type or range.
            assert done in (1, 2) and sums(tensors) == whole, f"case {number}"
    assert refused + right == 500 and refused > 250
