"""A model of plain modules in files of its own: its tiny weights go down the whole path, and every refusal is read."""

import dataclasses
import json

import pytest
import torch
from fakes.plain_pack import PlainPack
from safetensors.torch import load_file, save_file

from torchport import patch, save
from torchport.compile import network, preflight
from torchport.errors import TorchportError
from torchport.load import checkpoint, tiny
from torchport.run.path import run
from torchport.task import Request, accept

FAMILY = "patches/up/stages.py"


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """The pack, the current folder beside it."""
    pack = PlainPack(tmp_path, monkeypatch)
    monkeypatch.chdir(pack.root)
    yield pack
    pack.close()


def asked(plain, **changes):
    request = Request("plain", "configs/small.yaml", prompt="A cat", out=plain.root / "out", paths=(str(plain.root),))
    return dataclasses.replace(request, **changes)


def written(plain, folder="checkpoint"):
    """Writes the tiny checkpoint as one that somebody published, without a configuration."""
    task = accept(asked(plain))
    with patch.applied([]):
        source = network.write_tiny(task)
    target = plain.root / folder
    target.mkdir()
    for name in ("net.pth", "decoder.safetensors"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def check(plain, folder):
    """Checks a checkpoint as a run does before its first stage."""
    task = accept(asked(plain, checkpoint=str(folder)))
    with patch.applied([]):
        preflight.check(task)
        found = checkpoint.locate(str(folder), task.card)
        preflight.check_checkpoint(task, folder)
    return found


def refusal(call):
    with pytest.raises(TorchportError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text.replace(caught.value.id, "")


def test_both_backends_and_a_checkpoint_of_the_same_weights_make_the_same_video(plain):
    folder = written(plain)
    run(asked(plain, out=plain.root / "a"))
    run(asked(plain, out=plain.root / "b", backend="original", checkpoint=str(folder)))
    for stage in ("encode", "denoise", "decode"):
        ours, reference = (load_file(plain.root / out / f"{stage}.safetensors") for out in "ab")
        for name, tensor in reference.items():
            assert 0.1 < tensor.abs().max() < 20
            assert (ours[name] - tensor).abs().max() <= 1e-6 * tensor.abs().max()
    manifest = json.loads((plain.root / "b" / "manifest.json").read_text())["stages"]["denoise"]
    assert manifest["checkpoint"] == "folder:checkpoint"
    assert set(manifest["components"]) == {"plain/text", "plain/net", "plain/decoder"}


def test_a_finished_stage_is_run_again_after_an_edit_of_what_it_ran(plain):
    plain.change(
        "    with torch.no_grad():\n        pixels",
        "    pixels = parts[0]\n    with torch.no_grad():\n        pixels",
        FAMILY,
    )
    for _ in range(2):
        with pytest.raises(TorchportError, match="decode raises"):
            run(asked(plain, backend="original"))
    created = save.read_manifest(plain.root / "out" / "encode.safetensors")
    plain.change("    pixels = parts[0]\n", "", FAMILY)
    plain.change('return {"context": parts["text"](tokens)}', 'return {"context": 2 * parts["text"](tokens)}', FAMILY)
    run(asked(plain, backend="original"))
    again = save.read_manifest(plain.root / "out" / "encode.safetensors")
    assert (again.code != created.code) and (again.sha256 != created.sha256)


def test_tiny_weights_are_written_as_the_published_ones_are(plain):
    folder = written(plain)
    content = torch.load(folder / "net.pth", weights_only=True)
    assert {name: set(part) for name, part in content["parts"].items()} == {
        "text": {"embedding.weight"},
        "ema": {f"module.{name}.{kind}" for name in ("into", "out") for kind in ("weight", "bias")}
        | {f"module.layer{n}_{name}.{kind}" for n in (0, 1) for name in ("up", "down") for kind in ("weight", "bias")},
    }
    assert set(load_file(folder / "decoder.safetensors")) == {"to_pixels.weight", "to_pixels.bias"}
    first = (folder / "net.pth").read_bytes()
    plain.change("    text: {dim: 16}", "    text: {dim: 16, vocabulary: 256}")  # another folder of the same weights
    assert (written(plain, "again") / "net.pth").read_bytes() == first


def test_a_plain_modules_arguments_are_its_configuration_with_the_defaults(plain):
    task = accept(asked(plain))
    with patch.applied([]):
        config = network.outline(task, "net").config
        assert config == {"dim": 16, "depth": 2, "channels": 4, "heads": 2, "drop": 0.1}
        assert network.outline(task, "decoder").config == {"channels": 4}
        assert all(t.is_meta for t in (*network.outline(task, "net").state_dict().values(),))
        assert network.outline(task, "net").scale.is_meta


def test_the_memory_of_a_checkpoint_that_is_here_is_that_of_its_files(plain):
    folder = written(plain)
    task = accept(asked(plain, checkpoint=str(folder), backend="original"))
    with patch.applied([]):
        expected = {name: sum(t.numel() for t in network.outline(task, name).parameters()) for name in ("net", "text")}
        for name, count in expected.items():
            assert preflight._host_bytes(task, name) == 4 * count


def test_an_edit_of_a_builder_is_another_tiny_checkpoint(plain):
    task = accept(asked(plain))
    family = plain.root / "patches" / "up" / "stages.py"
    before = tiny.folder_of(task.card, family)
    assert tiny.folder_of(task.card, family) == before
    plain.change("channels=4", "channels=8", "patches/up/build.py")
    assert tiny.folder_of(task.card, family) != before


def test_a_checkpoint_of_several_components_in_one_folder_is_accepted(plain):
    folder = written(plain)
    found = check(plain, folder)
    assert found.digests["plain/net"] != found.digests["plain/decoder"]
    (folder / "README.md").write_text("other files in the root are no component's")
    (folder / "vae").mkdir()
    (folder / "vae" / "net.pth").write_bytes(b"")
    assert check(plain, folder).digests == found.digests
    file = folder / "decoder.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    changed = check(plain, folder).digests
    assert {name for name in changed if changed[name] != found.digests[name]} == {"plain/decoder"}


ARGUMENTS = "published: {dim: 16, depth: 2}"
LAST_RULE = r"      - {match: 'module\.(.*)', to: '\1'}"
CARDS = {
    "no such file of a builder": (
        "class: up.model:Net", "class: up.model:Net\n    build: buld.py:net", "build: buld.py:net",
        "There is no file 'buld.py' beside the family 'up/stages'. Did you mean 'build.py'? "
        "Known: build.py, stages.py.",
    ),
    "no such builder": (
        "build.py:decoder", "build.py:decode", "build.py:decode",
        "'build.py' has no function 'decode'. Did you mean 'decoder'? Known: decoder.",
    ),
    "a builder of another class": (
        "class: up.model:Decoder", "class: up.model:Text", "  decoder:",
        "build.py:decoder returns a 'Decoder'. It must return a Text, the component's 'class'.",
    ),
    "an argument that is misspelt": (
        ARGUMENTS, "published: {dimm: 16, depth: 2}", "published: {dimm",
        "Net has no argument 'dimm'. Did you mean 'dim'? Known: channels, depth, dim, drop, heads.",
    ),
    "an argument that is missing": (
        ARGUMENTS, "published: {depth: 2}", "published: {depth", "Net needs the argument 'dim'. Add 'dim'.",
    ),
    "an argument that is no number": (
        ARGUMENTS, "published: {dim: 16, depth: two}", "depth: two",
        "Net cannot be built from it: 'str' object cannot be interpreted as an integer. Mend the arguments.",
    ),
    "a name for a group that is not there": (
        "to: 'blocks.", r"to: '\4", "layer(",
        r"'components.net.rename.0' is {'match': 'module\\.layer(\\d+)_(up|down)\\.(.*)', 'to': '\\4\\1.\\2.\\3'}. "
        r"'to' has \4; the groups of 'match' are \1, \2, \3.",
    ),
    "a rule that matches nothing": (
        LAST_RULE, r"      - {match: 'modul\.(.*)', to: '\1'}", r"'modul\.",
        r"Rule 2, 'modul\.(.*)', matches none of 12 tensors of FILE. Remove it or mend it. "
        "The nearest are 'module.out.bias', 'module.into.bias', 'module.out.weight'.",
    ),
    "a rule behind one that takes all": (
        LAST_RULE, LAST_RULE + "\n      - {match: 'module.out.*', to: out}", "module.out.*",
        "Rule 3, 'module.out.*', matches only tensors of FILE that an earlier rule has taken. Remove it or mend it. "
        "The nearest are 'module.out.bias', 'module.out.weight', 'module.into.bias'.",
    ),
    "two names that become one": (
        r"'module\.(.*)', to: '\1'}", r"'module\.(into|out)\.(.*)', to: 'out.\2'}", "(into|out)",
        "'module.into.weight' and 'module.out.weight' of FILE both become 'out.weight'. Mend the rules, or add the one "
        "that is not used to 'unread'.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CARDS)
def test_a_card_that_does_not_fit_the_module_or_the_file_is_refused_by_its_line(plain, case):
    old, new, where, text = CARDS[case]
    folder = written(plain)
    plain.change(old, new)
    said = refusal(lambda: check(plain, folder))
    assert said == f"{plain.line(where)}: {text}".replace("FILE", str(folder / "net.pth"))


def loaded(folder):
    return torch.load(folder / "net.pth", weights_only=True)


def test_names_that_the_rules_do_not_bring_together_are_refused_with_the_nearest(plain):
    folder, content = written(plain), None
    content = loaded(folder)
    ema = content["parts"]["ema"]
    ema["module.output.weight"] = ema.pop("module.out.weight")
    torch.save(content, folder / "net.pth")
    assert refusal(lambda: check(plain, folder)) == (
        f"{folder}/net.pth: It lacks 1 of the model's tensors (first 'out.weight') and holds 1 that the model has not "
        "(first 'output.weight'). The nearest are 'output.weight': mend the rules under 'rename', or name a checkpoint "
        "of this model."
    )
    del ema["module.output.weight"]
    torch.save(content, folder / "net.pth")
    assert refusal(lambda: check(plain, folder)) == (
        f"{folder}/net.pth: It lacks 1 of the model's tensors (first 'out.weight'). Mend 'unread' and the rules under "
        "'rename', or name a checkpoint of this model."
    )
    ema |= {"module.out.weight": torch.zeros(4, 16), "extra": torch.zeros(1)}
    torch.save(content, folder / "net.pth")
    assert refusal(lambda: check(plain, folder)) == (
        f"{folder}/net.pth: It holds 1 that the model has not (first 'extra'). Name what the model does not use under "
        "'unread', or name a checkpoint of this model."
    )
    plain.change("unread: [step]", "unread: [step, extra]")
    ema["step"] = 3  # what is not read need be no tensor
    torch.save(content, folder / "net.pth")
    check(plain, folder)
    ema["module.out.weight"] = torch.zeros(16, 4)
    torch.save(content, folder / "net.pth")
    assert refusal(lambda: check(plain, folder)) == (
        f"{folder}/net.pth: 'module.out.weight' has shape [16, 4]. The model's has [4, 16]: name a checkpoint of this "
        "model."
    )


def test_a_file_that_is_not_where_the_card_says_is_refused(plain):
    folder = written(plain)
    (folder / "net.pth").rename(folder / "net2.pth")
    assert refusal(lambda: check(plain, folder)) == (
        f"{folder}/net.pth: The file is missing. Mend the card's 'file', or name a checkpoint that has it. "
        "Did you mean 'net2.pth'? Known: decoder.safetensors, net2.pth."
    )
    plain.change("    folder: .\n    file: decoder.safetensors", "    file: decoder.safetensors")
    (folder / "net2.pth").rename(folder / "net.pth")
    assert refusal(lambda: check(plain, folder)) == (
        f"{folder}/decoder/decoder.safetensors: The file is missing. It lies in {folder}: if that is the checkpoint's "
        "root, write 'folder: \".\"' in the card."
    )


def test_tiny_weights_whose_names_the_rules_leave_open_are_refused(plain):
    plain.change(LAST_RULE, r"      - {match: '(?:module|other)\.(.*)', to: '\1'}")
    assert refusal(lambda: written(plain)) == (
        f"{plain.line('(?:module')}: Rule 2, '(?:module|other)\\.(.*)', names no tensor of the tiny module. "
        "Tiny weights need it turned round: put all that varies in 'match' into groups without groups inside, and use "
        "each of them in 'to'."
    )


def test_files_and_builders_beside_a_pipeline_are_refused_together(plain):
    plain.change("checkpoint: somebody/plain", "checkpoint: somebody/plain\npipeline: diffusers:DiffusionPipeline")
    with pytest.raises(TorchportError) as caught:
        accept(asked(plain))
    first = plain.line("file: net.pth")
    second = f"{first.rpartition(':')[0]}:{int(first.rpartition(':')[2]) + 7}"  # the same words again
    lines = [first, second, plain.line("build: build.py"), plain.line("file: decoder")]
    facts = ("'file' is 'net.pth'",) * 2 + ("'build' is 'build.py:decoder'", "'file' is 'decoder.safetensors'")
    assert str(caught.value).splitlines() == [
        f"{line}: {fact}, and 'pipeline' reads a layout that has no such thing. Remove 'pipeline', or this."
        for line, fact in zip(lines, facts, strict=True)
    ]


def test_an_upstream_that_a_builder_imports_when_its_file_is_loaded_is_refused(plain):
    plain.write("patches/up/build.py", "import up\n\ndef decoder():\n    return None\n")
    assert refusal(lambda: accept(asked(plain))) == (
        f"{plain.line('build: build.py')}: 'patches/up/build.py' imports 'up' when it is loaded, before its patches "
        "are applied. Import it inside the functions."
    )
