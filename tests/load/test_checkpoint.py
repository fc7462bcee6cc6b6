"""Checkpoints: which are named, what is in them, and every way in which one is not whole or not the model's."""

import fnmatch
import json
import os
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from torchport.config.card import Card, Component, PipelineCall
from torchport.errors import (
    CheckpointBrokenError,
    CheckpointForeignError,
    CheckpointMissingError,
    LoadError,
    OutputError,
)
from torchport.load import Layout, checkpoint


def refusal(kind, call):
    """Returns the text of the error, which must be of this kind."""
    with pytest.raises((LoadError, OutputError)) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def copied(tmp_path, tiny_folder):
    """A copy of the tiny checkpoint, which a test may damage."""
    return shutil.copytree(tiny_folder, tmp_path / "copy")


@pytest.fixture
def no_network(monkeypatch):
    """Fails the test if anything is to be downloaded."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("./a/b", True),
        ("/a/b", True),
        ("~/a", True),
        ("a", True),
        ("a/b/c", True),
        ("owner/repo", False),
        ("owner/repo@main", False),
        ("owner/repo@refs/pr/1", False),
    ],
)
def test_a_folder_is_told_from_a_repository(name, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoint.is_folder(name) is folder


def test_a_folder_that_looks_like_a_repository_is_a_folder_if_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "repo").mkdir(parents=True)
    assert checkpoint.is_folder("owner/repo") and not checkpoint.is_folder("owner/repo@main")


def test_a_folder_is_located_without_a_network(tiny_folder, card, no_network):
    found = checkpoint.locate(str(tiny_folder), card)
    assert (found.folder, found.identity) == (tiny_folder, f"folder:{tiny_folder.name}")
    assert set(found.digests) == {f"{card.model}/{name}" for name in card.components}


def test_a_missing_folder_is_refused(tmp_path, card, no_network):
    name = str(tmp_path / "none")
    assert refusal(CheckpointMissingError, lambda: checkpoint.locate(name, card)) == (
        f"--checkpoint {name}: There is no such folder. Name a folder, or owner/repo@revision."
    )


@pytest.fixture
def large_disk(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**50))


@pytest.mark.parametrize("name", ["nobody/nothing", "nobody/nothing@some-branch"])
def test_a_repository_that_cannot_be_reached_is_refused(name, card, large_disk):
    text = refusal(CheckpointMissingError, lambda: checkpoint.locate(name, card))
    assert text.startswith(f"--checkpoint {name}: It is not in the cache, and cannot be downloaded: ")
    assert text.endswith(". Check the name and the network, or pass --checkpoint DIR with a copy of it.")


@pytest.mark.parametrize("name", ["nobody/no thing", "nobody/no..thing", "nobody/-x@main"])
def test_a_name_that_no_repository_can_have_is_refused(name, card, large_disk):
    assert refusal(CheckpointMissingError, lambda: checkpoint.locate(name, card)).startswith(f"--checkpoint {name}: ")


def test_a_revision_is_passed_on_and_the_commit_is_the_identity(monkeypatch, tmp_path, tiny_folder, card):
    asked = {}
    folder = shutil.copytree(tiny_folder, tmp_path / "0123abcd")

    def download(repo, **kwargs):
        asked.update(kwargs, repo=repo)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = checkpoint.locate("owner/repo@v1", card)
    assert found.identity == "owner/repo@0123abcd"
    assert (asked["repo"], asked["revision"]) == ("owner/repo", "v1")
    wanted = ("model_index.json", "transformer/config.json", "vae/diffusion_pytorch_model.safetensors")
    for name in (*wanted, "README.md", "assets/x.mp4"):
        assert any(fnmatch.fnmatch(name, pattern) for pattern in asked["allow_patterns"]) is (name in wanted), name
    checkpoint.locate("owner/repo", card)
    assert asked["revision"] == "main"


def components_at(*places):
    """A card whose components lie in these folders and files; nothing else of it is read here."""
    entries = ({"class": "fakes.modules:Mixed", "folder": folder, "file": file} for folder, file in places)
    parsed = {f"c{n}": Component.model_validate(entry) for n, entry in enumerate(entries)}
    return Card.model_construct(model="some", pipeline=None, components=parsed)


@pytest.mark.parametrize(
    ("places", "names"),
    [
        ([(".", "net.pth"), (".", "sub/{variant}.pt")], ["net.pth", "sub/v1.pt", "config.json", "x/config.json"]),
        ([(".", "x.safetensors.index.json")], ["x.safetensors.index.json", "x-00001-of-00002.safetensors"]),
        ([("vae", "v.pth"), ("inner/{variant}", None)], ["vae/v.pth", "vae/other.txt", "inner/v1/a.safetensors"]),
        ([(".", None)], ["config.json", "vae/config.json", "README.md", "model.safetensors", "net.pth"]),
        ([(".", None), ("vae", None)], ["README.md", "model.safetensors", "net.pth", "vae/v.pth", "vae/other.txt"]),
    ],
)
def test_a_download_takes_the_files_that_the_card_names(monkeypatch, tmp_path, places, names):
    repository = [
        "config.json", "x/config.json", "README.md", "model.safetensors", "net.pth", "vae/v.pth", "sub/v1.pt",
        "vae/other.txt", "vae/config.json", "inner/v1/a.safetensors", "inner/v2/a.safetensors", "y.safetensors",
        "x.safetensors.index.json", "x-00001-of-00002.safetensors", "assets/x.mp4",
    ]  # fmt: skip
    downloads, revisions = set(), []

    def download(repo, revision, allow_patterns=(), ignore_patterns=(), local_files_only=False):
        if local_files_only:
            raise LocalEntryNotFoundError("none")
        revisions.append(revision)
        wanted = (name for name in repository if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns))
        downloads.update(n for n in wanted if not any(fnmatch.fnmatch(n, pattern) for pattern in ignore_patterns))
        return str(tmp_path / "0123abcd")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "hub").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    checkpoint._download("owner/repo@v1", components_at(*places), "v1")
    assert revisions == ["v1", "0123abcd"][: len(revisions)] and set(names) <= downloads
    json_files = {name for name in repository if name.endswith(".json")}
    loose = {"README.md", "model.safetensors", "net.pth", "y.safetensors", "x-00001-of-00002.safetensors"}
    in_root = loose if (".", None) in places else set()
    assert downloads <= json_files | set(names) | in_root


def test_of_a_derived_card_the_configurations_are_downloaded_and_of_another_nothing(monkeypatch, tmp_path, card):
    index = tmp_path / "model_index.json"
    index.write_text('{"vae": ["diffusers", "AutoencoderKL"]}')
    asked = []

    def download(repo, revision, allow_patterns=(), ignore_patterns=(), local_files_only=False):
        if local_files_only:
            raise LocalEntryNotFoundError("none")
        asked.append((repo, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert checkpoint.described("owner/repo@v1", card) is None and not asked
    component = Component.model_validate({"class": "diffusers:AutoencoderKL"})
    names = {"model": "diffusers:XPipeline", "pipeline": "diffusers:XPipeline", "components": {"vae": component}}
    assert checkpoint.described("owner/repo@v1", Card.model_construct(**names)) == tmp_path
    patterns = ["model_index.json", "modular_model_index.json", "*/config.json", "*/scheduler_config.json"]
    assert asked == [("owner/repo", "v1", patterns)]
    assert checkpoint.described("tiny", Card.model_construct(**names)) is None
    index.write_text('{"vae": ["diffusers", "AutoencoderKLWan"]}')  # another pipeline's checkpoint
    with pytest.raises(CheckpointForeignError, match="'vae' is "):
        checkpoint.described("owner/repo@v1", Card.model_construct(**names))


def test_a_local_checkpoint_is_found_and_an_absent_one_is_none(tiny_folder, tmp_path):
    assert checkpoint.local(str(tiny_folder)) == tiny_folder
    assert "There is no such folder" in refusal(CheckpointMissingError, lambda: checkpoint.local(f"{tmp_path}/none"))
    assert checkpoint.local("nobody/nothing@main") is None and checkpoint.local("nobody/no thing") is None


def edit_index(folder, change):
    """Changes model_index.json."""
    file = folder / "model_index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def test_the_index_of_the_tiny_checkpoint_is_the_cards(tiny_folder, card):
    checkpoint.check_index(tiny_folder, card)


def test_an_index_of_another_model_is_refused(copied, card):
    edit_index(copied, lambda index: index.update(transformer=["diffusers", "WanTransformer3DModel"]))
    assert refusal(CheckpointForeignError, lambda: checkpoint.locate(str(copied), card)) == (
        f"{copied}/model_index.json: 'transformer' is ['diffusers', 'WanTransformer3DModel']. The card 'hunyuan' wants "
        "['diffusers', 'HunyuanVideo15Transformer3DModel']: name a checkpoint of that model."
    )


def test_an_index_that_lacks_a_component_is_refused(copied, card):
    edit_index(copied, lambda index: index.pop("guider"))
    text = refusal(CheckpointForeignError, lambda: checkpoint.locate(str(copied), card))
    assert text.startswith(f"{copied}/model_index.json: It has no component 'guider'. The card 'hunyuan' wants a Class")


@pytest.mark.parametrize("value", [None, 3, "transformer", {}, [None, None]])
def test_an_index_whose_component_is_no_class_is_refused(copied, card, value):
    edit_index(copied, lambda index: index.update(vae=value))
    assert "'vae' is " in refusal(CheckpointForeignError, lambda: checkpoint.locate(str(copied), card))


def test_the_fast_tokenizer_of_an_older_transformers_is_the_same_tokenizer(copied, card):
    edit_index(copied, lambda index: index.update(tokenizer=["transformers", "Qwen2TokenizerFast"]))
    checkpoint.check_index(copied, card)


def test_a_folder_without_an_index_is_refused(tmp_path, card):
    assert refusal(CheckpointMissingError, lambda: checkpoint.locate(str(tmp_path), card)) == (
        f"{tmp_path}/model_index.json: The file is missing. Download the checkpoint again, whole."
    )


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"\xff\xfe"])
def test_an_index_that_is_not_a_json_object_is_refused(copied, card, data):
    (copied / "model_index.json").write_bytes(data)
    text = refusal(CheckpointBrokenError, lambda: checkpoint.locate(str(copied), card))
    assert text.startswith(f"{copied}/model_index.json: Not ") and text.endswith(". Download the file again.")


def test_two_copies_have_one_digest_and_a_changed_weight_another(copied, tiny_folder, card):
    assert checkpoint.digests(copied, card) == checkpoint.digests(tiny_folder, card)
    file = copied / "vae" / "diffusion_pytorch_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    changed = checkpoint.digests(copied, card)
    assert {name for name in changed if changed[name] != checkpoint.digests(tiny_folder, card)[name]} == {"hunyuan/vae"}
    shutil.rmtree(copied / "text_encoder")
    assert "hunyuan/text_encoder" not in checkpoint.digests(copied, card)


A, B = {"a": torch.zeros(2, 3)}, {"b": torch.zeros(5), "c": torch.zeros(())}


def sharded(folder):
    """Writes two shards and their index."""
    save_file(A, folder / "model-00001-of-00002.safetensors")
    save_file(B, folder / "model-00002-of-00002.safetensors")
    names = {
        **dict.fromkeys(A, "model-00001-of-00002.safetensors"),
        **dict.fromkeys(B, "model-00002-of-00002.safetensors"),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_the_file_of_every_tensor_is_found_in_one_file_or_in_shards(tmp_path):
    save_file({**A, **B}, tmp_path / "model.safetensors", {"format": "pt"})
    files = {name: file.name for name, (file, _) in checkpoint.weight_files(tmp_path).items()}
    assert files == dict.fromkeys("abc", "model.safetensors")
    assert Layout().parameters(tmp_path) == 12
    (tmp_path / "model.safetensors").unlink()
    sharded(tmp_path)
    files = [file.name[6:11] for _, (file, _) in sorted(checkpoint.weight_files(tmp_path).items())]
    assert files == ["00001", "00002", "00002"]
    assert Layout().parameters(tmp_path) == 12


def test_a_component_without_safetensors_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"pickle")
    assert refusal(CheckpointMissingError, lambda: checkpoint.weight_files(tmp_path)) == (
        f"{tmp_path}: There is no *.safetensors in it. Download the checkpoint again, whole."
    )


def test_an_index_that_names_a_missing_shard_is_refused(tmp_path):
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    assert refusal(CheckpointMissingError, lambda: checkpoint.weight_files(tmp_path)) == (
        f"{tmp_path}/model-00002-of-00002.safetensors: The file is missing. Download the checkpoint again, whole."
    )


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 3}}, {"weight_map": {"a": ["x"]}}])
def test_an_index_without_a_weight_map_is_refused(tmp_path, index):
    (sharded(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(CheckpointBrokenError, lambda: checkpoint.weight_files(tmp_path)) == (
        f"{tmp_path}/model.safetensors.index.json: It has no 'weight_map'. Download the file again."
    )


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "..", "", "x" * 5000, "a\0", "\ud800"]
)
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path, name):
    save_file(A, tmp_path / "x.safetensors")
    folder = tmp_path / "transformer"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    assert refusal(CheckpointForeignError, lambda: checkpoint.weight_files(folder)) == (
        f"{index}: Its 'weight_map' names {name[:80]!r}, which is no file of this folder. "
        "Name files beside the index, without folders."
    )


@pytest.mark.parametrize("text", ['{"a": ' + "9" * 5000 + "}", '{"a":' * 200_000, "[" * 200_000])
def test_json_that_python_cannot_hold_is_refused(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_text(text)
    found = refusal(CheckpointBrokenError, lambda: checkpoint.read_json(file))
    assert found.startswith(f"{file}: Not JSON: ") and len(found) < 500


def test_one_tensor_in_two_files_is_refused(tmp_path):
    save_file(A, tmp_path / "model.safetensors")
    save_file(A, tmp_path / "model.fp16.safetensors")
    assert refusal(CheckpointForeignError, lambda: checkpoint.weight_files(tmp_path)) == (
        f"{tmp_path}: 'a' is in model.fp16.safetensors and in model.safetensors. "
        "Keep one set of weights in this folder."
    )


def test_two_sets_of_shards_are_refused(tmp_path):
    sharded(tmp_path)
    shutil.copy(tmp_path / "model.safetensors.index.json", tmp_path / "model.fp16.safetensors.index.json")
    assert refusal(CheckpointForeignError, lambda: checkpoint.weight_files(tmp_path)) == (
        f"{tmp_path}: It holds 2 indices of weights. Keep one set of weights in this folder."
    )


def test_a_truncated_file_is_refused_with_both_sizes(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(A, file)
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    assert refusal(CheckpointBrokenError, lambda: checkpoint.header(file)) == (
        f"{file}: It has {len(data) - 1} bytes, and its header promises {len(data)}. "
        "Download the file again: it is truncated."
    )


def entry(**changes):
    """A safetensors file of one tensor, with fields of its header changed."""
    fields = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    head = json.dumps({"a": fields}).encode()
    return len(head).to_bytes(8, "little") + head + b"\0" * 8


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"\xff" * 64,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
        (9).to_bytes(8, "little") + b'{"a": 1} ',
        entry(dtype="F33"),
        entry(shape=[3]),
        entry(data_offsets=[4, 8]),
        entry(data_offsets=["0", 8]),
        entry(data_offsets=[0, None]),
        entry(shape="2"),
    ],
)
def test_what_is_not_safetensors_is_refused(tmp_path, data):
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    text = refusal(CheckpointBrokenError, lambda: checkpoint.header(file))
    assert text.startswith(f"{file}: ") and "Download the file again" in text


SIZES = {code: getattr(torch, name).itemsize for name, code in checkpoint.CODES.items()}


@pytest.mark.parametrize(("dtype", "size"), [*SIZES.items(), ("F8_E8M0", 1), ("F4", 0.5), ("F6_E2M3", 0.75)])
def test_a_tensor_has_as_many_bytes_as_its_dtype_and_shape_say(tmp_path, dtype, size):
    file = tmp_path / "model.safetensors"
    for shape in ([16], [4, 4]):
        whole = int(16 * size)
        for count in (whole, whole - 1, whole + 1, 0, 2 * whole):
            data = entry(dtype=dtype, shape=shape, data_offsets=[0, count]).removesuffix(b"\0" * 8) + b"\0" * count
            file.write_bytes(data)
            if count == whole:
                assert checkpoint.header(file)["a"]["shape"] == shape
            else:
                refusal(CheckpointBrokenError, lambda: checkpoint.header(file))
    file.write_bytes(entry(dtype=dtype, shape=[2**62, 2**62, 16], data_offsets=[0, 8]))
    refusal(CheckpointBrokenError, lambda: checkpoint.header(file))


def test_a_sound_header_is_read(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(entry())
    assert checkpoint.header(file) == {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@given(st.binary(max_size=120), st.booleans())
def test_any_bytes_are_a_header_or_refused(tmp_path_factory, data, with_length):
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(len(data).to_bytes(8, "little") + data if with_length else data)
    try:
        assert all("shape" in entry for entry in checkpoint.header(file).values())
    except CheckpointBrokenError as error:
        assert str(file) in str(error)


def test_a_download_that_the_disk_cannot_hold_is_refused_before_it_begins(card, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **how: _offline(how))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10**9))
    text = refusal(OutputError, lambda: checkpoint.locate("someone/model@main", card))
    assert text == (
        f"{tmp_path / 'hub'}: someone/model@main takes about 37 GB, and 1 GB are free here. "
        "Free some space, set HF_HOME to a larger disk, or pass --checkpoint DIR."
    )


def _offline(how):
    assert how.get("local_files_only"), "nothing is downloaded"
    raise LocalEntryNotFoundError("not there")


def test_a_file_whose_name_is_no_text_has_a_digest(copied, card):
    before = checkpoint.digests(copied, card)["hunyuan/vae"]
    (copied / "vae" / os.fsdecode(b"\xff")).touch()
    assert checkpoint.digests(copied, card)["hunyuan/vae"] != before


def test_a_file_whose_name_is_no_utf8_is_refused_by_it(tmp_path):
    save_file(A, tmp_path / "model.safetensors")
    file = (tmp_path / "model.safetensors").rename(tmp_path / os.fsdecode(b"\xff.safetensors"))
    said = (
        f"{tmp_path}/\\udcff.safetensors: Its name, or that of a folder above it, is no UTF-8, and safetensors reads "
    )
    for read in (lambda: checkpoint.header(file), lambda: checkpoint.weight_files(tmp_path)):
        assert refusal(CheckpointBrokenError, read) == said + "none of those. Rename it."
    folder = tmp_path / os.fsdecode(b"\xfe")
    folder.mkdir()
    save_file(A, tmp_path / "model.safetensors")
    shutil.move(tmp_path / "model.safetensors", folder)
    refusal(CheckpointBrokenError, lambda: checkpoint.weight_files(folder))


def test_a_link_to_what_is_no_file_of_weights_is_refused_and_the_hubs_links_are_followed(tmp_path):
    for target in ("itself", "/dev/zero", "/proc/self/mem", "/etc/passwd", "/"):
        folder = tmp_path / target.replace("/", "_")
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(folder / "model.safetensors" if target == "itself" else target)
        refusal(
            CheckpointBrokenError if target in ("/etc/passwd", "/proc/self/mem") else CheckpointMissingError,
            lambda folder=folder: checkpoint.weight_files(folder),
        )
    hub, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    hub.mkdir()
    blobs.mkdir()
    save_file(A, blobs / "0123")
    (hub / "model.safetensors").symlink_to(blobs / "0123")
    (hub / "more").symlink_to("/")
    assert set(checkpoint.weight_files(hub)) == set(A)
    assert checkpoint._files(tmp_path, hub, None) == [hub / "model.safetensors"], "no folder outside is walked"


def test_headers_are_read_in_linear_time(tmp_path):
    spent = {}
    for count in (300, 3000):
        save_file({f"t{number}": torch.zeros(1) for number in range(count)}, tmp_path / "model.safetensors")
        start = time.process_time()
        assert len(checkpoint.weight_files(tmp_path)) == count
        spent[count] = time.process_time() - start
    assert spent[3000] < 40 * max(spent[300], 0.002)


def test_a_class_of_a_pipeline_is_known_by_the_pipelines_folder(copied, card):
    """diffusers writes `ltx2` for a class of `diffusers.pipelines.ltx2.connectors`."""
    spec = card.components["transformer"].model_copy(
        update={"class_": "diffusers.pipelines.ltx2.connectors:Connectors"}
    )
    other = card.model_copy(update={"components": {**card.components, "transformer": spec}})
    for library in ("ltx2", "diffusers"):
        edit_index(copied, lambda index, library=library: index.update(transformer=[library, "Connectors"]))
        checkpoint.check_index(copied, other)
    edit_index(copied, lambda index: index.update(transformer=["ltx", "Connectors"]))
    assert "'transformer' is ['ltx', 'Connectors']" in refusal(
        CheckpointForeignError, lambda: checkpoint.check_index(copied, other)
    )


CALL = {"network": "transformer", "encoders": ["text_encoder"], "embeddings": {"a": [1]}, "settings": {}}


def of_pipeline(model, **init):
    """Returns a card of a pipeline that is built with other arguments than components."""
    call = PipelineCall(**CALL, init=init)
    parts = {"transformer": Component(class_="diffusers:Net", dtype="bfloat16", precision="high")}
    fields = {"model": model, "pipeline": "diffusers:Pipe", "call": call, "components": parts}
    return Card.model_construct(**fields)


def test_a_pipeline_that_upstream_would_build_with_another_component_is_refused(tmp_path):
    card, file = of_pipeline("small", checker=None), tmp_path / "model_index.json"
    index = {"transformer": ["diffusers", "Net"], "_name": "Pipe", "encoder": [None, None], "checker": ["a", "b"]}
    file.write_text(json.dumps(index))
    checkpoint.check_index(tmp_path, card)
    file.write_text(json.dumps(index | {"transformer_2": ["diffusers", "Net"]}))
    words = refusal(CheckpointForeignError, lambda: checkpoint.check_index(tmp_path, card))
    assert "It has the component 'transformer_2', and the card 'small' builds the pipeline without it" in words


def test_a_derived_card_is_as_the_published_index(tmp_path):
    card = of_pipeline("diffusers:Pipe", boundary=None, checker=None, size=3)
    parts = {"scheduler": "diffusers:Euler", "tokenizer": "transformers:T5Tokenizer", "odd": "diffusers:Odd"}
    without = {name: Component(class_=cls) for name, cls in parts.items()}
    card = card.model_copy(update={"components": card.components | without})
    index = {"boundary": 0.9, "checker": ["a", "b"], "other": 1, "transformer": ["diffusers", "Other"]}
    index |= {
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "tokenizer": ["transformers", "GemmaTokenizerFast"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"odd": ["os", "SystemScheduler"]}))
    published = checkpoint.as_published(card, str(tmp_path))
    assert published.call.init == {"boundary": 0.9, "checker": None, "size": 3}
    classes = {name: component.class_ for name, component in published.components.items()}
    chosen = {"scheduler": "diffusers:UniPCMultistepScheduler", "tokenizer": "transformers:GemmaTokenizer"}
    assert classes == {"transformer": "diffusers:Net", "odd": "diffusers:Odd", **chosen}
    assert checkpoint.as_published(card, "tiny") is card
    # What is no class and no plain value is left to those who refuse it.
    odd = {"scheduler": 5, "tokenizer": ["transformers"], "odd": {"a": 1}, "boundary": {"a": 1}, "size": [3]}
    (tmp_path / "model_index.json").write_text(json.dumps(odd))
    assert checkpoint.as_published(card, str(tmp_path)) == card
    other = of_pipeline("small", boundary=None)
    assert checkpoint.as_published(other, str(tmp_path)) is other
