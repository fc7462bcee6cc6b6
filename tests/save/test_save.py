"""Artefacts: whole or not at all, verified on reading, refused from another run; hand-written ports' stage files."""

import errno
import hashlib
import json
import os
import stat

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from torchport import save
from torchport.errors import (
    ArtefactBrokenError,
    ArtefactForeignError,
    ArtefactMissingError,
    NotFiniteError,
    OutputError,
    SaveError,
)
from torchport.files import atomic

IDENTITY = {"model": "m", "height": 64, "width": 64, "frames": 5}
COMPONENTS = {"transformer": "aaaa", "vae": "bbbb"}
FACTS = {
    "stage": "denoise",
    "run": "0123456789abcdef",
    "created": "2026-11-20T00:00:00+00:00",
    "identity": IDENTITY,
    "checkpoint": "a/b@c",
    "components": COMPONENTS,
    "inputs": {},
    "settings": {"seed": 1},
    "config": {},
    "backend": "original",
    "patches": [],
    "versions": {},
    "seconds": {},
}
TENSORS = {
    "latents": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).transpose(0, 1),
    "half": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "count": torch.tensor(3),
}


@pytest.fixture
def written(tmp_path):
    """A folder with the artefact `denoise` in it."""
    save.write_copy(tmp_path, "denoise", save.write(tmp_path, "denoise", TENSORS, FACTS))
    return tmp_path


MADE_BY = "Copy the file again, or make it with: torchport run --stage denoise."


def read(folder, name="denoise", identity=None, components=None):
    """Reads an artefact as the next stage of the same run would."""
    return save.read(folder, name, identity or IDENTITY, components or COMPONENTS, "torchport run --stage denoise")


def refusal(kind, call):
    """Returns the text of the error, which must be of this kind."""
    with pytest.raises(SaveError) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def test_what_is_written_is_read_back_bit_for_bit(written):
    tensors, manifest = read(written)
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
    assert manifest.tensors["half"].model_dump() == {"dtype": "bfloat16", "shape": [2]}
    assert {key: getattr(manifest, key) for key in FACTS} == FACTS


def test_an_artefact_is_one_file_and_a_copy_of_its_manifest(written):
    assert sorted(file.name for file in written.iterdir()) == ["denoise.json", "denoise.safetensors"]


def test_files_have_the_permissions_that_the_umask_gives(written):
    umask = os.umask(0)
    os.umask(umask)
    assert {stat.S_IMODE(file.stat().st_mode) for file in written.iterdir()} == {0o666 & ~umask}


def test_a_missing_artefact_is_refused_with_the_command_that_makes_it(tmp_path):
    assert refusal(ArtefactMissingError, lambda: read(tmp_path)) == (
        f"{tmp_path}/denoise.safetensors: The artefact of 'denoise' is not there. "
        "Make it with: torchport run --stage denoise."
    )


def test_an_artefact_is_complete_without_the_copy_of_its_manifest(written):
    (written / "denoise.json").unlink()
    read(written)


def test_a_manifest_without_its_artefact_is_none(written):
    (written / "denoise.safetensors").unlink()
    assert "The artefact of 'denoise' is not there" in refusal(ArtefactMissingError, lambda: read(written))


def test_a_changed_copy_of_the_manifest_is_refused(written):
    """Whoever changed it expects an effect."""
    file = written / "denoise.json"
    file.write_text(file.read_text().replace('"height": 64', '"height": 65'))
    assert refusal(ArtefactBrokenError, lambda: read(written)) == (
        f"{file}: It is not the manifest that denoise.safetensors holds, which alone counts. "
        "Remove it: the artefact is complete without it."
    )


@pytest.mark.parametrize("damage", ["truncated", "longer", "none"])
def test_bytes_that_are_not_safetensors_are_refused(written, damage):
    file = written / "denoise.safetensors"
    data = file.read_bytes()
    file.write_bytes({"truncated": data[:-1], "longer": data + b"\0", "none": b""}[damage])
    text = refusal(ArtefactBrokenError, lambda: read(written))
    assert text.startswith(f"{file}: It is not safetensors: ") and text.endswith(MADE_BY)


def test_a_flipped_bit_of_a_tensor_is_refused(written):
    file = written / "denoise.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    text = refusal(ArtefactBrokenError, lambda: read(written))
    assert text == f"{file}: Its tensors are not those that were written. {MADE_BY}"


def test_a_changed_field_of_the_manifest_is_refused(written):
    file = written / "denoise.safetensors"
    data = file.read_bytes()
    assert data.count(b'\\"height\\": 64') == 1
    file.write_bytes(data.replace(b'\\"height\\": 64', b'\\"height\\": 65'))
    text = refusal(ArtefactBrokenError, lambda: read(written))
    assert text == f"{file}: Its manifest is not the one that was written. {MADE_BY}"


def test_a_renamed_tensor_is_refused(written, tmp_path):
    file = written / "denoise.safetensors"
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"half":', b'"calf":'))
    assert "Its tensors are not those that were written" in refusal(ArtefactBrokenError, lambda: read(written))


def test_safetensors_without_a_manifest_are_refused(tmp_path):
    save_file(dict(TENSORS, latents=torch.ones(1)), tmp_path / "denoise.safetensors")
    assert refusal(ArtefactBrokenError, lambda: read(tmp_path)) == (
        f"{tmp_path}/denoise.safetensors: It holds no manifest. {MADE_BY}"
    )


def test_an_artefact_of_the_schema_with_two_files_is_refused_by_that_name(tmp_path):
    save_file({"latents": torch.ones(1)}, tmp_path / "denoise.safetensors")
    (tmp_path / "denoise.json").write_text('{"schema_version": 1}')
    assert refusal(ArtefactForeignError, lambda: read(tmp_path)) == (
        f"{tmp_path}/denoise.safetensors: Its schema version is 1. "
        "This torchport reads 4: make the artefact again with: torchport run --stage denoise."
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '"schema_version"', "[1, 2]", "[" * 100_000])
def test_what_is_not_a_manifest_is_refused(tmp_path, text):
    noted = {"torchport": text, "torchport.sha256": hashlib.sha256(text.encode()).hexdigest()}
    save_file({"latents": torch.ones(1)}, tmp_path / "denoise.safetensors", noted)
    text = refusal(ArtefactBrokenError, lambda: read(tmp_path))
    assert "It holds no manifest" in text or "Its manifest's field 'schema_version' is missing" in text


@pytest.mark.parametrize("version", [0, 1, 2, 3, "4", None, True, 2.5])
def test_another_schema_is_refused(written, version, forged):
    forged(written / "denoise.safetensors", schema_version=version)
    assert refusal(ArtefactForeignError, lambda: read(written)) == (
        f"{written}/denoise.safetensors: Its schema version is {version!r}. "
        "This torchport reads 4: make the artefact again with: torchport run --stage denoise."
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sha256", 3),
        ("seconds", []),
        ("stranger", 1),
        ("inputs", {"encode": 1}),
        ("inputs", {"elsewhere": "a"}),
        ("patches", [{}]),
        ("config", None),
        ("stage", "dance"),
        ("done", 1.5),
        ("done", 0),
        ("done", True),
    ],
)
def test_a_field_that_is_not_what_it_must_be_is_refused(written, field, value, forged):
    forged(written / "denoise.safetensors", **{field: value})
    text = refusal(ArtefactBrokenError, lambda: read(written))
    assert (
        text.startswith(f"{written}/denoise.safetensors: Its manifest's field '{field}")
        and "is missing or not what it must be" in text
    )


@pytest.mark.parametrize(("key", "value"), [("model", "other"), ("height", 128), ("width", 32), ("frames", 9)])
def test_an_artefact_of_another_model_or_size_is_refused(written, key, value):
    text = refusal(ArtefactForeignError, lambda: read(written, identity={**IDENTITY, key: value}))
    assert text == (
        f"{written}/denoise.safetensors: 'denoise' was made for {key} {IDENTITY[key]!r}, "
        f"and this run is for {value!r}. "
        "Make it again, or run with what it was made for."
    )


def test_an_identity_that_the_artefact_lacks_is_refused(written, forged):
    forged(written / "denoise.safetensors", identity={"model": "m"})
    text = refusal(ArtefactForeignError, lambda: read(written))
    assert "'denoise' was made for height None, and this run is for 64" in text


def test_an_artefact_of_another_checkpoint_is_refused_and_parts_that_are_not_there_do_not_count(written):
    read(written, components={"vae": "bbbb", "scheduler": "cccc"})
    assert refusal(ArtefactForeignError, lambda: read(written, components={"vae": "dddd"})) == (
        f"{written}/denoise.safetensors: 'denoise' was made with another checkpoint: its vae is bbbb. "
        "Use the same --checkpoint for all stages; here vae is dddd."
    )


def test_an_artefact_whose_inputs_were_made_again_is_refused(written):
    encode = save.write(written, "encode", TENSORS, {**FACTS, "stage": "encode"})
    made = save.write(written, "denoise", TENSORS, {**FACTS, "inputs": {"encode": encode.sha256}})
    save.check_lineage(written, "denoise", made)
    save.write(written, "encode", {"other": torch.zeros(1)}, {**FACTS, "stage": "encode"})
    assert refusal(ArtefactForeignError, lambda: save.check_lineage(written, "denoise", made)) == (
        f"{written}/denoise.safetensors: 'denoise' was made from another 'encode' than the one beside it. "
        "Run --stage denoise again."
    )
    save.remove(written, "encode")
    save.check_lineage(written, "denoise", made)  # on another machine there are no earlier artefacts to compare


@given(st.binary(max_size=200), st.sampled_from(["denoise.json", "denoise.safetensors"]))
def test_any_bytes_in_either_file_are_refused(tmp_path_factory, data, half):
    folder = tmp_path_factory.mktemp("any", numbered=True)
    save.write_copy(folder, "denoise", save.write(folder, "denoise", TENSORS, FACTS))
    (folder / half).write_bytes(data)
    refusal(ArtefactBrokenError, lambda: read(folder))


def full(*args, **kwargs):
    """Stands for a call on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.open", "pathlib.Path.replace", "tempfile.mkstemp"])
def test_a_full_disk_is_refused_and_leaves_nothing(tmp_path, monkeypatch, call):
    with monkeypatch.context() as context:
        context.setattr(call, full)
        text = refusal(OutputError, lambda: save.write(tmp_path, "denoise", TENSORS, FACTS))
    assert text == (
        f"{tmp_path}/denoise.safetensors: The disk is full. Free some space, or choose another folder with --out."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_the_older_file_as_it_was(tmp_path, monkeypatch, unchanged):
    atomic.write_json(tmp_path / "manifest.json", {"a": 1})
    before = unchanged(tmp_path)
    with monkeypatch.context() as context:
        context.setattr("os.fsync", full)
        refusal(OutputError, lambda: atomic.write_json(tmp_path / "manifest.json", {"a": 2}))
    assert unchanged(tmp_path) == before
    atomic.write_json(tmp_path / "manifest.json", {"a": 2})
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"a": 2}


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.open", "pathlib.Path.replace", "tempfile.mkstemp"])
def test_a_disk_that_fills_up_leaves_the_older_artefact_whole(written, monkeypatch, call):
    with monkeypatch.context() as context:
        context.setattr(call, full)
        refusal(OutputError, lambda: save.write(written, "denoise", {"latents": torch.zeros(1)}, FACTS))
    assert torch.equal(read(written)[0]["latents"], TENSORS["latents"])
    assert [file.name for file in written.iterdir()] == ["denoise.safetensors"]


def test_a_disk_that_also_refuses_the_cleaning_up_is_told_of_once(tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr("os.fsync", full)
        context.setattr("pathlib.Path.unlink", full)
        assert "The disk is full" in refusal(OutputError, lambda: atomic.write_json(tmp_path / "a.json", {}))
    assert [file.name[:6] for file in tmp_path.iterdir()] == [atomic.TEMPORARY]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    text = refusal(OutputError, lambda: atomic.make_folder(tmp_path / "file"))
    assert text == f"{tmp_path / 'file'}: It is a file, not a folder. Choose another folder with --out."
    text = refusal(OutputError, lambda: atomic.make_folder(tmp_path / "file" / "below"))
    assert (
        text
        == f"{tmp_path / 'file' / 'below'}: It cannot be written: Not a directory. Choose another folder with --out."
    )


def test_a_folder_that_is_a_link_to_nothing_is_refused_as_one(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match=r"out: It is a link to nothing\. Choose another folder with --out"):
        atomic.make_folder(tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    def readonly(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", readonly)
    assert refusal(OutputError, lambda: atomic.make_folder(tmp_path)) == (
        f"{tmp_path}: It cannot be written: Read-only file system. Choose another folder with --out."
    )


def test_a_file_that_cannot_be_removed_is_refused(tmp_path):
    (tmp_path / "denoise.json").mkdir()
    assert "denoise.json: It cannot be written: Is a directory" in refusal(
        OutputError, lambda: save.remove(tmp_path, "denoise")
    )


def test_an_interrupt_while_writing_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic.writing(tmp_path / "a.bin") as temporary:
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


SEED_NAMES = ("prompt_embeds", "negative_prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds_mask")


@pytest.mark.parametrize("spelling", ["bfloat16", "torch.bfloat16"])
def test_the_hand_written_ports_embeddings_are_read_in_the_dtypes_they_name(tmp_path, spelling):
    """One of those ports wrote bfloat16 as it is, the other as float32 with a note; both mean bfloat16."""
    stored = torch.bfloat16 if spelling.startswith("torch.") else torch.float32
    exact = {name: torch.tensor([[1.5, -2.0]]) for name in (*SEED_NAMES, *(f"{name}_2" for name in SEED_NAMES))}
    noted = {"dtype_info": json.dumps(dict.fromkeys(exact, spelling)), "prompt": "A cat", "model_id": "a/b"}
    save_file({name: t.to(stored) for name, t in exact.items()}, tmp_path / "stage1_embeddings.safetensors", noted)
    tensors, manifest = read(tmp_path, "encode", {"model": "m", "guidance": True})
    assert manifest is None and set(tensors) == set(exact)
    for name, tensor in exact.items():
        assert tensors[name].dtype == torch.bfloat16 and torch.equal(tensors[name].float(), tensor)


SIZES = {"height": "64", "width": "64", "video_length": "5"}


def latents(folder, sizes=SIZES, **config):
    """Writes the hand-written ports' latents, with sizes in their metadata, and a configuration beside them."""
    noted = {"device": "tpu", "seed": "42", **sizes}
    tensor = torch.ones(1, 16, 2, 4, 4, dtype=torch.bfloat16)
    save_file({"latents": tensor}, folder / "stage2_latents.safetensors", noted)
    if config:
        (folder / "generation_config.json").write_text(json.dumps(config))


def test_the_hand_written_ports_latents_are_read(tmp_path, caplog):
    latents(tmp_path, prompt="A cat", height=64, width=64, video_length=5, seed=42)
    tensors, manifest = read(tmp_path)
    assert manifest is None and tensors["latents"].dtype == torch.bfloat16
    assert "stage2_latents.safetensors has no manifest: it is taken as it is, only sizes can be checked" in caplog.text


@pytest.mark.parametrize(("noted", "key"), [("height", "height"), ("width", "width"), ("video_length", "frames")])
def test_a_hand_written_ports_latents_of_another_size_are_refused(tmp_path, noted, key):
    latents(tmp_path, {}, **{"height": 64, "width": 64, "video_length": 5, noted: 97})
    assert refusal(ArtefactForeignError, lambda: read(tmp_path)) == (
        f"{tmp_path}/generation_config.json: '{noted}' is 97, and this run's {key} is {IDENTITY[key]}. "
        f"Run with --set {key}=97."
    )


def test_the_size_in_a_hand_written_ports_own_metadata_counts_where_nothing_lies_beside_it(tmp_path):
    latents(tmp_path)
    read(tmp_path)
    text = refusal(ArtefactForeignError, lambda: read(tmp_path, identity={**IDENTITY, "frames": 9}))
    assert "'video_length' is 5, and this run's frames is 9. Run with --set frames=5." in text


def test_the_size_in_a_hand_written_ports_latents_counts_before_what_lies_beside_them(tmp_path):
    """The configuration beside them may be an earlier stage's: the hand-written ports did not write it again."""
    latents(tmp_path, height=97)
    read(tmp_path)


@pytest.mark.parametrize("damage", ["tensors", "config", "dtypes", "dtype", "list"])
def test_a_hand_written_ports_file_that_cannot_be_read_is_refused(tmp_path, damage):
    latents(tmp_path, height=64)
    file = tmp_path / "stage2_latents.safetensors"
    if damage == "tensors":
        file.write_bytes(file.read_bytes()[:100])
    elif damage == "config":
        (tmp_path / "generation_config.json").write_text("{")
    elif damage == "list":
        (tmp_path / "generation_config.json").write_text("[1]")
    else:
        noted = "{" if damage == "dtypes" else '{"latents": "bfloat17"}'
        save_file({"latents": torch.ones(1)}, file, {"dtype_info": noted})
    text = refusal(ArtefactBrokenError, lambda: read(tmp_path))
    assert text.startswith(f"{file}: It cannot be read: ") and text.endswith(". Copy or make it again.")


@pytest.mark.parametrize(
    ("tensors", "fact"),
    [
        ({"latent": torch.ones(1, 2, 3, 4, 4)}, "It holds 'latent'"),
        ({}, "It lacks 'latents'"),
        ({"latents": torch.ones(3)}, "'latents' has shape [3]"),
        ({"latents": torch.ones(1, 2, 3, 4, 4, dtype=torch.int8)}, "'latents' is int8"),
        ({"latents": torch.ones(1, 2, 3, 4, 4) / 0}, "'latents' has 96 of 96 values that are NaN or infinite"),
    ],
)
def test_a_hand_written_ports_file_that_holds_something_else_is_refused(tmp_path, tensors, fact):
    file = tmp_path / "stage2_latents.safetensors"
    save_file(tensors, file)
    assert refusal(ArtefactForeignError, lambda: read(tmp_path)) == (
        f"{file}: {fact}. It must hold floating-point latents [B, C, T, H, W]: make it again."
    )


def test_a_hand_written_ports_embeddings_without_guidance_are_refused_where_there_is_guidance(tmp_path):
    names = [name for name in (*SEED_NAMES, *(f"{name}_2" for name in SEED_NAMES)) if "negative" not in name]
    save_file({name: torch.ones(1, 2) for name in names}, tmp_path / "stage1_embeddings.safetensors")
    read(tmp_path, "encode", {"model": "m", "guidance": False})
    text = refusal(ArtefactForeignError, lambda: read(tmp_path, "encode", {"model": "m", "guidance": True}))
    assert ": It lacks 'negative_prompt_embeds'. It must hold floating-point tensors prompt_embeds, " in text


@pytest.mark.parametrize(
    "text", ['{"height": Infinity}', '{"height": NaN}', '{"a":' * 200_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_a_hand_written_ports_configuration_that_is_no_numbers_is_refused(tmp_path, text):
    latents(tmp_path, {})
    (tmp_path / "generation_config.json").write_text(text)
    found = refusal(ArtefactBrokenError, lambda: read(tmp_path))
    assert found.startswith(f"{tmp_path}/stage2_latents.safetensors: It cannot be read: ") and len(found) < 500


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_and_nothing_is_written(tmp_path, value):
    text = refusal(
        NotFiniteError, lambda: save.write(tmp_path, "denoise", {"latents": torch.tensor([1.0, value])}, FACTS)
    )
    assert "'latents' has 1 of 2 values that are NaN or infinite. Nothing was written." in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fnuz])
def test_a_dtype_that_no_file_can_have_is_refused_with_its_tensor(tmp_path, dtype):
    tensors = {"latents": torch.zeros(2, dtype=dtype)}
    text = refusal(OutputError, lambda: save.write(tmp_path, "denoise", tensors, FACTS))
    fact = f"'latents' is {str(dtype)[6:]}, which a safetensors file cannot have"
    assert text == f"{tmp_path / 'denoise.safetensors'}: {fact}. Return it in another dtype."
    assert list(tmp_path.iterdir()) == []


def test_float8_is_kept_and_its_nan_refused(tmp_path):
    tensor = torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn)
    save.write(tmp_path, "denoise", {"latents": tensor}, FACTS)
    tensors, _ = save.read(tmp_path, "denoise", IDENTITY, COMPONENTS, MADE_BY)
    assert tensors["latents"].dtype == tensor.dtype and torch.equal(tensors["latents"].float(), tensor.float())
    bad = {"latents": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)}
    assert "'latents' has 1 of 2 values" in refusal(NotFiniteError, lambda: save.write(tmp_path, "denoise", bad, FACTS))


def test_an_artefact_under_another_stages_name_is_refused(written):
    (written / "denoise.safetensors").rename(written / "encode.safetensors")
    text = refusal(ArtefactForeignError, lambda: save.read(written, "encode", IDENTITY, COMPONENTS, "CMD"))
    assert text == f"{written / 'encode.safetensors'}: It is an artefact of 'denoise'. Make 'encode' with: CMD."


def test_what_later_stages_made_from_another_artefact_is_removed(written):
    sha = save.read_manifest(written / "denoise.safetensors").sha256
    save.write(written, "decode", {"frames": torch.ones(1)}, {**FACTS, "stage": "decode", "inputs": {"denoise": sha}})
    (written / save.VIDEO).write_bytes(b"video")
    save.discard_stale(written, "denoise", sha, ["decode"])
    assert (written / "decode.safetensors").is_file() and (written / save.VIDEO).is_file()
    save.discard_stale(written, "denoise", "another", ["decode"])
    assert sorted(file.name for file in written.iterdir()) == ["denoise.json", "denoise.safetensors"]


def test_our_own_artefact_is_preferred_to_a_hand_written_ports(written):
    latents(written, height=97)
    assert read(written)[1] is not None


def test_a_run_denoises_what_a_hand_written_port_encoded(request_for, tmp_path):
    """The same embeddings under the hand-written ports' names give the same latents, without a manifest."""
    from torchport.run.path import run

    steps = ("height=64", "width=64", "frames=5", "steps=1")
    run(request_for(stage="encode", overrides=steps))
    seeds = tmp_path / "stage_outputs"
    seeds.mkdir()
    tensors = safetensors.torch.load_file(tmp_path / "out" / "encode.safetensors")
    noted = {"dtype_info": json.dumps(dict.fromkeys(tensors, "torch.float32"))}
    save_file(tensors, seeds / "stage1_embeddings.safetensors", noted)
    (seeds / "generation_config.json").write_text(
        json.dumps({"prompt": "A cat", "negative_prompt": "", "model_id": "x"})
    )
    run(request_for(stage="denoise", prompt=None, overrides=steps))
    run(request_for(stage="denoise", prompt=None, overrides=steps, inputs=seeds, out=tmp_path / "other"))
    made = [save.read_manifest(tmp_path / folder / "denoise.safetensors").sha256 for folder in ("out", "other")]
    assert made[0] == made[1]
    assert json.loads((tmp_path / "other" / "denoise.json").read_text())["inputs"] == {}


def test_latents_of_another_shape_than_the_checkpoint_takes_are_refused_before_anything_runs(request_for, tmp_path):
    from torchport.run.path import run

    seeds = tmp_path / "stage_outputs"
    seeds.mkdir()
    save_file({"latents": torch.ones(1, 32, 2, 4, 4)}, seeds / "stage2_latents.safetensors")
    text = refusal(ArtefactForeignError, lambda: run(request_for(stage="decode", prompt=None, inputs=seeds)))
    assert text == (
        "denoise.safetensors: 'latents' has shape [1, 32, 2, 4, 4], and this run takes [1, 16, 2, 4, 4]. "
        "Run --stage denoise with this model, checkpoint and size."
    )
