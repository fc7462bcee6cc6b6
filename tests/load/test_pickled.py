"""Files of `torch.save`: tensors by name, wherever the card says that they are, and never code."""

import argparse
import collections
import os
import time
import zipfile

import pytest
import torch

from torchport.errors import CheckpointBrokenError, CheckpointForeignError, CheckpointMissingError, LoadError
from torchport.load import pickled

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "x.pth"


def refusal(kind, call):
    with pytest.raises(LoadError) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (TENSORS, None),
        ({"state_dict": TENSORS, "step": 3}, None),
        ({"state_dict": TENSORS, "step": 3}, "state_dict"),
        ({"ema": TENSORS, "model": {"a": torch.zeros(1)}}, "ema"),
        ({"parts": {"net": TENSORS}, "config": {"dim": 3}}, "parts.net"),
    ],
)
def test_tensors_are_where_the_key_says(file, content, key):
    torch.save(content, file)
    assert pickled.header(file, key) == {
        "a": {"dtype": "F32", "shape": [2, 3]},
        "b": {"dtype": "BF16", "shape": [2]},
    }
    tensors = pickled.tensors(file, key, device="cpu")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    assert all(tensor.is_meta for tensor in pickled.tensors(file, key).values())


def test_parameters_are_read_as_tensors(file):
    torch.save(torch.nn.Linear(2, 2), file.with_name("module.pth"))
    torch.save(dict(torch.nn.Linear(2, 2).named_parameters()), file)
    assert not any(tensor.requires_grad for tensor in pickled.tensors(file, device="cpu").values())
    assert "it needs code" in refusal(CheckpointBrokenError, lambda: pickled.header(file.with_name("module.pth")))


def test_a_key_that_is_not_there_is_refused_with_the_nearest(file):
    torch.save({"model": TENSORS, "ema": TENSORS}, file)
    assert refusal(CheckpointForeignError, lambda: pickled.header(file, "modl")) == (
        f"{file}: It has no 'modl', the card's 'key'. Did you mean 'model'? Known: ema, model."
    )
    assert refusal(CheckpointForeignError, lambda: pickled.header(file, "model.a.b")) == (
        f"{file}: It has no 'model.a.b', the card's 'key'. None are known."
    )
    assert refusal(CheckpointBrokenError, lambda: pickled.header(file, "model.a")) == (
        f"{file}: Not tensors by name: a 'Tensor'. Download the file again."
    )


def test_a_file_that_holds_more_than_tensors_says_what_to_write_in_the_card(file):
    torch.save({"model": TENSORS, "ema": TENSORS, "step": 3}, file)
    assert refusal(CheckpointBrokenError, lambda: pickled.header(file)) == (
        f"{file}: Not tensors by name: 'model' is of the type 'dict'. Name what holds the tensors as the component's "
        "'key': 'ema' or 'model'."
    )
    torch.save({**TENSORS, "step": 3}, file)
    assert refusal(CheckpointBrokenError, lambda: pickled.header(file)) == (
        f"{file}: Not tensors by name: 'step' is of the type 'int'. Add what the module does not use to the "
        "component's 'unread'."
    )
    assert set(pickled.header(file, unread=["st.*"])) == {"a", "b"}
    torch.save({0: torch.zeros(1)}, file)
    assert "'0' is of the type 'Tensor'" in refusal(CheckpointBrokenError, lambda: pickled.header(file))


class Evil:
    """Runs a command when it is unpickled, wherever that is allowed."""

    def __reduce__(self):
        return os.system, ("touch RAN",)


def test_a_file_that_needs_code_is_refused_by_what_it_needs_and_runs_none(file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for content, name in ((argparse.Namespace(dim=3), "argparse.Namespace"), (Evil(), f"{os.name}.system")):
        torch.save({"model": TENSORS, "args": content}, file)
        for device in ("meta", "cpu"):
            text = refusal(CheckpointBrokenError, lambda device=device: pickled.tensors(file, "model", (), device))
            assert text == (
                f"{file}: Not tensors by name: it needs code, {name}. torchport reads none of it. If you trust the "
                "file, write its tensors alone to another one, with torch.load(FILE, weights_only=False) and "
                "torch.save."
            )
    assert not (tmp_path / "RAN").exists()


def test_a_file_that_is_missing_or_cut_off_is_refused(file):
    assert refusal(CheckpointMissingError, lambda: pickled.header(file)).startswith(f"{file}: The file is missing. ")
    torch.save(TENSORS, file)
    file.write_bytes(file.read_bytes()[:-100])
    for device in ("meta", "cpu"):
        text = refusal(CheckpointBrokenError, lambda device=device: pickled.tensors(file, device=device))
        assert text.startswith(f"{file}: Not tensors by name: ") and text.endswith(". Download the file again.")


def test_a_file_of_an_old_pytorch_says_how_to_write_it_again(file):
    torch.save(TENSORS, file, _use_new_zipfile_serialization=False)
    assert refusal(CheckpointForeignError, lambda: pickled.check_mapped(file)) == (
        f"{file}: It has the format of PyTorch before 1.6. Write it again: "
        f"python -c \"import torch; f = '{file}'; torch.save(torch.load(f), f)\"."
    )
    torch.save(torch.load(file), file)
    pickled.check_mapped(file)


EVERY = [dtype for dtype in (getattr(torch, name.split(".")[-1], None) for name in pickled.CODES) if dtype is not None]


def rewritten(file, change, compression=zipfile.ZIP_STORED):
    """Writes a file's records again, each with the bytes that a function makes of it."""
    with zipfile.ZipFile(file) as archive:
        records = [(record.filename, archive.read(record)) for record in archive.infolist()]
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records:
            content = change(content) if "/data/" in name else content
            archive.writestr(zipfile.ZipInfo(name), content, compression if "/data/" in name else zipfile.ZIP_STORED)


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_a_record_that_is_shorter_or_longer_than_its_tensor_is_refused(file, dtype):
    for change, found in ((lambda raw: raw[:3], 3), (lambda raw: b"", 0), (lambda raw: raw + b"\0", None)):
        torch.save({"a": torch.zeros(5, dtype=dtype), "b": torch.zeros(2)}, file)
        size = 5 * dtype.itemsize
        assert pickled.header(file)["a"]["shape"] == [5]
        rewritten(file, change)
        found = size + 1 if found is None else found
        said = f"{file}: Its record '0' has {found} bytes, and its tensors have {size}. Download the file again."
        assert refusal(CheckpointBrokenError, lambda: pickled.header(file)) == said


def test_a_record_that_is_compressed_missing_or_there_twice_is_refused(file):
    torch.save({"state_dict": TENSORS}, file)
    rewritten(file, lambda raw: raw, zipfile.ZIP_DEFLATED)
    assert "Its record '0' is compressed" in refusal(CheckpointBrokenError, lambda: pickled.header(file))
    torch.save(TENSORS, file)
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/data/0", b"\0" * 24)
    assert "Two of its records have one name" in refusal(CheckpointBrokenError, lambda: pickled.header(file))


def test_tensors_that_share_a_storage_and_views_of_one_are_read(file):
    whole = torch.arange(12.0)
    content = {"a": whole[:4], "b": whole.view(3, 4).t(), "c": whole.expand(2, 12), "d": torch.zeros(0)}
    torch.save(collections.OrderedDict(content), file)
    assert [entry["shape"] for entry in pickled.header(file).values()] == [[4], [4, 3], [2, 12], [0]]
    assert torch.equal(pickled.tensors(file, device="cpu")["b"], content["b"])


def test_records_are_checked_in_linear_time(file):
    """Seconds of the check alone: torch's own reading takes much more."""
    spent = {}
    for count in (300, 3000):
        torch.save({f"t{number}": torch.zeros(1) for number in range(count)}, file)
        start = time.process_time()
        pickled._check_records(file)
        spent[count] = time.process_time() - start
    assert spent[3000] < 40 * max(spent[300], 0.005)
