"""Programs that are kept: loaded without tracing, with their trace's ledger, and refused when anything differs."""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import textwrap

import jax
import numpy
import pytest
import torch
from fakes.patch_world import World
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from torchport import compile, patch, shard
from torchport.compile import kept as programs
from torchport.compile.kept import entry, key, store
from torchport.compile.kept.jax_cache import jax_cache
from torchport.config.card import Rule
from torchport.errors import BadValueError, NotCalledError
from torchport.files import cache
from torchport.patch import Ledger
from torchport.run import run
from torchport.stages import family
from torchport.task import accept

STAGE = family.Stage("denoise", run=dict, uses=(), network="net")
NETWORK = """
    import torch

    def activation(x):
        return torch.relu(x)

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(8, 16)

        def forward(self, x, scale=1.0):
            return (activation(self.up(x)) * scale,)
"""
PATCH = """
    import torch

    def new(x):
        return torch.nn.functional.silu(x)
"""
WEIGHTS = [Rule(match=r"up\.(weight|bias)", spec=["tp"])]
INPUTS = [Rule(match="x", spec=["dp"])]
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Kept:
    """An upstream, a patch of it that must be called, and a folder of programs."""

    def __init__(self, world, pack, mesh, root):
        self.world, self.mesh, self.root = world, mesh, root
        self.torchax = patch.read(pack.patches, ["torchax"])
        self.common, self.parts = {"versions": {"jax": "1"}}, {"attention": None}
        self.from_jax = False
        world.write("up/net.py", NETWORK)
        world.python(PATCH)
        self.entries = world.one("replace: p.py:new", "up.net:activation", "must_be_called: [denoise]")

    @contextlib.contextmanager
    def stage(self):
        """Gives a network to call, and the ledger, in a process that has traced nothing yet as far as they know."""
        with patch.applied(self.torchax), patch.applied(self.entries, stage="denoise") as ledger:
            import up.net

            torch.manual_seed(0)
            module = up.net.Network().eval().requires_grad_(False)
            tensors = dict(module.named_parameters())
            rules = shard.match(WEIGHTS, shard.named_shapes(tensors), dict(self.mesh.shape), "card.yaml:1")
            weights = shard.place(tensors.items(), rules, self.mesh)
            parts = {**self.parts, "patches": dict(ledger.trace().digests)}
            self.made = []
            source = store.StagePrograms(
                self.root, STAGE, lambda: self.common, parts, self.mesh, ledger, self.made, self.from_jax
            )
            network = compile.Network(module.to("meta"), INPUTS, "net", "card.yaml:9", "highest")
            yield compile.Compiled(network, weights, self.mesh, trace=ledger.trace(), source=source), ledger

    def run(self, **static):
        """Returns what the network computes, and whether its program was compiled, traced or cached."""
        with self.stage() as (network, ledger):
            output = network(x=X, **static)
            ledger.check_called()
        return output, self.made[-1]["program"]

    def entries_on_disk(self):
        return sorted(path.name for path in self.root.iterdir())

    def file(self, name):
        (found,) = self.root.glob(f"net-*/{name}")
        return found


@pytest.fixture
def kept(tmp_path, monkeypatch, pack, mesh8):
    before = os.umask(0o022)
    world = World(tmp_path, monkeypatch)
    yield Kept(world, pack, mesh8, cache.make(tmp_path / "programs"))
    world.close()
    os.umask(before)


@pytest.fixture
def said(caplog):
    """What was logged, line by line."""
    caplog.set_level(logging.INFO, "torchport")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_program_is_loaded_without_tracing_and_computes_the_same_bits(kept, said, monkeypatch):
    first, how = kept.run()
    assert how == "compiled" and torch.allclose(first[0], torch.nn.functional.silu(first[0]), atol=1)
    monkeypatch.setattr(compile.Compiled, "lowered", lambda *args: pytest.fail("traced"))
    again, how = kept.run()
    assert how == "cached" and torch.equal(first, again)
    (row,) = kept.made
    assert row == {"program": "cached", "traced": row["traced"], "jax_cache": False, "key": kept.entries_on_disk()[0]}
    assert f"denoise: program from the cache (traced {row['traced']})" in said()


def test_a_loaded_program_brings_the_calls_of_its_trace(kept, monkeypatch):
    def row():
        with kept.stage() as (network, ledger):
            network(x=X)
            (found,) = ledger.rows()
            ledger.check_called()
            return kept.made[-1]["program"], found["calls"], found["state"]

    assert row() == ("compiled", 1, "used")
    assert row() == ("cached", 1, "used")
    monkeypatch.setattr(Ledger, "credit", lambda self, trace: None)
    with pytest.raises(NotCalledError, match=r"'up\.one' was not called in denoise"):
        row()


def test_a_program_brings_the_calls_of_its_own_trace_only(kept):
    """Two programs of one stage: what the second one keeps does not count the first one's calls again."""
    for _ in range(2):
        with kept.stage() as (network, ledger):
            network(x=X)
            network(x=X, scale=2.0)
            assert [row["calls"] for row in ledger.rows()] == [2]
    assert [row["program"] for row in kept.made] == ["cached", "cached"]


@pytest.mark.parametrize(
    ("change", "told", "program"),
    [
        ({"versions": {"jax": "2"}}, "versions.jax is 2, was 1", "compiled"),
        ({"attention": "xla"}, "attention is xla, was absent", "traced"),
        ({"versions": {"jax": "1", "einops": "3"}}, "versions.einops is 3, was absent", "traced"),
    ],
)
def test_a_program_whose_key_differs_is_not_loaded_and_it_is_told_what_differs(kept, said, change, told, program):
    kept.run()
    traced = kept.made[0]["traced"]
    kept.common |= {part: value for part, value in change.items() if part == "versions"}
    kept.parts |= {part: value for part, value in change.items() if part != "versions"}
    assert kept.run()[1] == program
    assert f"denoise: the program traced {traced} is another: {told}" in said()
    assert len(kept.entries_on_disk()) == 2 and kept.run()[1] == "cached"


def test_the_most_similar_program_is_the_one_that_is_told_of(kept, said):
    kept.parts |= {"a": 1, "b": 1, "c": 1, "d": 1}
    kept.run()
    kept.parts |= {"a": 2, "b": 2, "c": 2, "d": 2}
    kept.run()
    assert any(line.endswith("a is 2, was 1; b is 2, was 1; c is 2, was 1; and 1 more") for line in said())
    kept.parts |= {"d": 3}
    kept.run()
    assert any(line.endswith("is another: d is 3, was 2") for line in said())


def test_programs_of_another_model_in_the_same_folder_are_not_told_of(kept, said):
    kept.parts |= {"model": "one"}
    kept.run()
    kept.parts |= {"model": "two"}
    kept.run()
    assert not any("is another" in line for line in said())


def test_a_patch_whose_function_has_changed_is_traced(kept, said):
    first, _ = kept.run()
    kept.world.python(PATCH.replace("silu", "gelu"))
    other, how = kept.run()
    assert how == "compiled" and not torch.equal(first, other)
    assert any("is another: patches.up.one is" in line for line in said())


@pytest.fixture
def counted(kept, monkeypatch):
    """How often a program was traced and compiled, and how often the cache's messages were logged."""
    counts = {"traced": 0, "compiled": 0}
    lowered, compiled = compile.Compiled.lowered, store.StagePrograms._compiled

    def count(name, function):
        def call(*args):
            counts[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(compile.Compiled, "lowered", count("traced", lowered))
    monkeypatch.setattr(store.StagePrograms, "_compiled", count("compiled", compiled))
    return counts


@pytest.mark.parametrize("links", [True, False])
def test_after_an_edit_that_changes_no_program_it_is_traced_once_and_kept_again(
    kept, counted, said, caplog, monkeypatch, tmp_path, links
):
    if not links:
        monkeypatch.setattr(os, "link", lambda *args: (_ for _ in ()).throw(OSError(errno.EPERM, "no links here")))
    with jax_cache(tmp_path / "cache"):
        first, _ = kept.run()
        assert counted == {"traced": 1, "compiled": 1}
        traced = kept.made[0]["traced"]
        kept.world.python("# A comment.\n" + textwrap.dedent(PATCH))
        again, how = kept.run()
        assert how == "traced" and counted == {"traced": 2, "compiled": 1}
        assert f"denoise: the program traced {traced} is the same: it is not compiled again" in said()
        caplog.clear()
        last, how = kept.run()
    assert how == "cached" and counted == {"traced": 2, "compiled": 1}
    assert torch.equal(first, again) and torch.equal(first, last)
    assert [line for line in said() if line.startswith("denoise")] == [
        f"denoise: program from the cache (traced {kept.made[0]['traced']})"
    ]
    files = [path / "executable" for path in kept.root.iterdir()]
    assert len(files) == 2 and len({file.stat().st_ino for file in files}) == (1 if links else 2)


def test_a_damaged_executable_is_not_taken_after_an_edit(kept, counted, said):
    first, _ = kept.run()
    file = kept.file("executable")
    file.write_bytes(b"?" + file.read_bytes()[1:])
    kept.world.python(PATCH + "\n    # A comment.\n")
    again, how = kept.run()
    assert how == "compiled" and torch.equal(first, again) and counted == {"traced": 2, "compiled": 2}
    assert any("is damaged: the sha256" in line for line in said()) and kept.run()[1] == "cached"


def test_edits_do_not_crowd_out_other_programs_and_their_entries_are_bounded(kept, monkeypatch):
    monkeypatch.setattr(entry, "KEPT", 2)
    monkeypatch.setattr(entry, "ENTRIES", 4)
    kept.run(scale=2.0)
    for number in range(3):
        kept.parts["edit"] = number
        kept.run()
    kept.parts.pop("edit")
    assert len(kept.entries_on_disk()) == 4 and kept.run(scale=2.0)[1] == "cached"
    kept.parts["edit"] = 3
    kept.run()
    assert len(kept.entries_on_disk()) == 4
    kept.parts.pop("edit")
    assert kept.run(scale=2.0)[1] == "cached"


def test_after_an_edit_that_exchanges_two_inputs_the_program_is_another(kept, mesh8):
    """What is lowered is the same text: JAX leaves out the input that is not used."""
    x = {"x": torch.ones(4, 8), "y": torch.zeros(4, 8)}
    for name, how in (("x", "compiled"), ("y", "compiled"), ("x", "cached")):
        kept.parts["how"] = name
        with kept.stage() as (network, _):
            network.network = dataclasses.replace(network.network, inputs=[Rule(match="x|y", spec=["dp"])])
            network.bound.how = lambda module, name=name, **inputs: inputs[name] * 2
            assert torch.equal(network(**x), 2 * x[name]) and kept.made[-1]["program"] == how


def test_after_an_edit_of_one_number_of_a_large_constant_the_program_is_another(kept):
    table = torch.arange(4096.0)
    for value, how in ((1.0, "compiled"), (2.0, "compiled"), (1.0, "cached")):
        kept.parts["table"] = value
        table[2000] = value
        with kept.stage() as (network, _):
            network.bound.how = lambda module, x: x[:1, :1] * table
            assert torch.equal(network(x=torch.ones(4, 8))[0], table) and kept.made[-1]["program"] == how


def test_a_program_with_caches_and_several_outputs_is_kept_whole(kept):
    """Its outputs are the tree that they were, and the memory of its cache still serves the next one."""

    def how(module, x, cache=None):
        total = x if cache is None else x + cache["sum"][0]
        return {"out": module(x)[0], "sum": [total, None], "both": (total, total + 1)}

    def run():
        with kept.stage() as (network, _):
            rules = [*INPUTS, Rule(match=r"cache\.sum\.0", spec=["dp", "tp"])]
            names = ("out", "cache", "both")
            network.network = dataclasses.replace(network.network, inputs=rules, outputs=names, keeps=("cache",))
            network.bound.how = lambda module, **inputs: (lambda out: (out["out"], {"sum": out["sum"]}, out["both"]))(
                how(module, **inputs)
            )
            out, cache, _ = network(x=X)
            again, more, both = network(x=X, cache=cache)
            assert cache["sum"][0].is_deleted() and more["sum"][1] is None and isinstance(both, tuple)
            assert torch.equal(out, again) and torch.equal(both[0], 2 * X) and torch.equal(both[1], 2 * X + 1)
            return out, [row["program"] for row in kept.made]

    first, made = run()
    assert made == ["compiled", "compiled"]
    second, made = run()
    assert made == ["cached", "cached"] and torch.equal(first, second)


def test_a_patch_whose_yaml_has_changed_is_traced(kept):
    kept.run()
    more = "must_be_called: [denoise, decode]"
    kept.entries = kept.world.one("replace: p.py:new", "up.net:activation", more)
    assert kept.run()[1] == "traced"


def test_other_shapes_placements_and_static_arguments_are_other_programs(kept):
    kept.run()
    assert kept.run(scale=2.0)[1] == "compiled" and kept.run(scale=2.0)[1] == "cached"
    with kept.stage() as (network, _):
        network(x=torch.zeros(2, 8))
        assert kept.made[-1]["program"] == "compiled"
        network(x=jax.device_put(numpy.zeros((4, 8), numpy.float32), NamedSharding(kept.mesh, PartitionSpec())))
        assert kept.made[-1]["program"] == "compiled"


def test_without_a_folder_programs_are_compiled_and_noted(kept):
    kept.root, root = None, kept.root
    assert kept.run()[1] == "compiled" and kept.made[0]["key"] is None
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-1] + b"?"), "the sha256 of its executable is not the one in its"),
        (lambda f: f.write_bytes(f.read_bytes()[:100]), "its executable has 100 bytes, and was written with"),
        (lambda f: f.unlink(), "its file 'executable' cannot be opened: No such file"),
        (lambda f: (f.parent / "manifest.json").write_text("{"), "its manifest cannot be read"),
        (lambda f: (f.parent / "manifest.json").write_text('{"key": 1}'), "its manifest cannot be read"),
        (lambda f: (f.parent / "manifest.json").unlink(), "its file 'manifest.json' cannot be opened"),
        (lambda f: (f.unlink(), f.symlink_to(os.devnull)), "its file 'executable' cannot be opened: Too many levels"),
    ],
)
def test_a_damaged_program_is_not_loaded_and_is_made_anew(kept, said, damage, told):
    first, _ = kept.run()
    damage(kept.file("executable"))
    again, how = kept.run()
    assert how == "compiled" and torch.equal(first, again)
    (line,) = [line for line in said() if "is damaged" in line]
    assert told in line and line.endswith("; it is removed, and compiled anew")
    assert kept.run()[1] == "cached"


def test_a_program_under_another_ones_name_is_not_loaded(kept, said):
    kept.run()
    file = kept.file("manifest.json")
    manifest = json.loads(file.read_text())
    manifest["key"]["versions"]["jax"] = "2"
    file.write_text(json.dumps(manifest))
    assert kept.run()[1] == "compiled"
    assert any("its manifest has another key than its name" in line for line in said())


def test_a_program_that_the_devices_do_not_take_is_made_anew(kept, said, monkeypatch):
    def refuse(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: another libtpu")

    kept.run()
    with monkeypatch.context() as patched:
        patched.setattr(store.serialize_executable, "deserialize_and_load", refuse)
        assert kept.run()[1] == "compiled"
    assert any("the devices do not take it (INVALID_ARGUMENT: another libtpu)" in line for line in said())


@pytest.mark.parametrize("name", ["", "executable", "manifest.json"])
def test_a_program_that_others_can_write_is_refused(kept, name):
    kept.run()
    path = kept.file("executable").parent / name
    path.chmod(0o775)
    with pytest.raises(BadValueError) as caught:
        kept.run()
    assert str(caught.value) == (
        f"{path}: Others can write to it (mode 0775), and what is loaded from the cache is run. "
        f"Run chmod go-w {path}, name another folder with TORCHPORT_CACHE, or run with --no-cache."
    )


def test_a_folder_of_programs_that_others_can_write_is_refused(kept, monkeypatch):
    monkeypatch.setattr(cache, "_is_private", lambda group: False)
    kept.run()
    kept.root.chmod(0o777)
    with pytest.raises(BadValueError, match=f"{kept.root}: Others can write to it"):
        kept.run()


def test_a_full_disk_costs_the_entry_and_not_the_run(kept, said, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        assert kept.run()[1] == "compiled"
    assert any("the program is not kept" in line and "No space left on device" in line for line in said())
    assert kept.entries_on_disk() == [] and kept.run()[1] == "compiled"


def test_a_run_that_is_killed_while_writing_leaves_no_entry(kept, monkeypatch):
    def killed(handle):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            kept.run()
    assert kept.entries_on_disk() == []


def test_an_entry_half_written_is_no_entry_and_is_removed_after_a_day(kept):
    half = kept.root / ".half"
    half.mkdir()
    kept.run()
    assert half.is_dir()
    os.utime(half, (0, 0))
    kept.run(scale=2.0)
    assert not half.exists() and len(kept.entries_on_disk()) == 2


def test_the_programs_that_were_used_least_lately_make_room(kept, monkeypatch):
    monkeypatch.setattr(entry, "KEPT", 2)
    kept.run()
    kept.run(scale=2.0)
    os.utime(kept.root / kept.made[-1]["key"], (1, 1))
    kept.run()  # loaded: now it is the one that was used last
    kept.run(scale=3.0)
    assert len(kept.entries_on_disk()) == 2
    assert kept.run()[1] == "cached" and kept.run(scale=2.0)[1] == "compiled"


def test_a_program_that_is_kept_is_compiled_without_jaxs_cache(kept, tmp_path):
    """On a CPU, what JAX's cache delivers lacks its functions once it is serialised again, and fails when called."""
    with jax_cache(tmp_path / "cache"):
        first, _ = kept.run()
        inside = tmp_path / "cache" / "jax" / cache.host()
        assert not any("program" in file.name for file in inside.iterdir())
        entry.remove(kept.file("executable").parent)
        again, how = kept.run()
        assert how == "compiled" and not kept.made[0]["jax_cache"] and kept.run()[1] == "cached"
        assert jax.config.jax_enable_compilation_cache
    assert torch.equal(first, again)


def test_a_folder_that_the_user_has_named_to_jax_delivers_programs_and_they_are_not_kept(kept, tmp_path, said):
    kept.from_jax = True
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        with jax_cache(tmp_path / "cache") as from_jax:
            assert from_jax
            first, _ = kept.run()
            assert kept.run()[1] == "cached"
            entry.remove(kept.file("executable").parent)
            again, how = kept.run()
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
        compilation_cache.reset_cache()
    assert how == "compiled" and kept.made[0]["jax_cache"] and torch.equal(first, again)
    assert kept.entries_on_disk() == [] and not any("kept" in line for line in said())


def test_a_tree_of_outputs_is_read_as_it_was_written():
    tree = (0, [0, None, {"a": (), "b": {}}], None)
    assert entry.from_json(json.loads(json.dumps(entry.as_json(tree)))) == (
        "array",
        ["array", None, {"a": (), "b": {}}],
        None,
    )
    for damaged in (3, {"set": []}, {"tuple": {}}, {"dict": []}, [{"tuple": [1]}]):
        with pytest.raises(entry.DamagedError, match="its manifest has no tree of outputs"):
            entry.from_json(damaged)


def test_a_program_that_cannot_be_serialised_serves_its_run(kept, said, monkeypatch):
    def refuse(program):
        raise ValueError("Compilation does not support serialization")

    monkeypatch.setattr(store.serialize_executable, "serialize", refuse)
    assert kept.run()[1] == "compiled" and kept.entries_on_disk() == []
    assert "denoise: the program is not kept: it cannot be serialised: Compilation does not support" in said()[-2]


# What determines a program.


@pytest.fixture
def task(request_for, root):
    """The demo as a task."""

    def accepted(*overrides, **changes):
        request = request_for(backend="torchax")
        return accept(dataclasses.replace(request, overrides=(*request.overrides, *overrides), **changes))

    return accepted


@pytest.fixture
def of_stage(task, tiny_folder):
    """The parts of the demo's denoising stage that its request decides."""

    def parts(*overrides, card=None, bounds=(), **changes):
        found = task(*overrides, **changes)
        found = dataclasses.replace(found, card=card or found.card)
        stage = next(stage for stage in found.family.STAGES if stage.name == "denoise")
        return key.of_stage(found, stage, tiny_folder, dict(bounds))

    return parts


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("attention=xla", "attention"),
        ("stacked=false", "stacked"),
        ("strategy=ulysses", "strategy"),
        ("dtypes.transformer=bfloat16", "settings.dtypes"),
        ("frames=9", "settings.frames"),
        ("guidance_scale=1.5", "settings.guidance_scale"),
        ("text_bucket=32", "settings.text_bucket"),
        ("vae_tiling=true", "settings.vae_tiling"),
    ],
)
def test_a_request_for_another_program_has_another_key(of_stage, override, part):
    mesh = ["mesh={dp: 2, sp: 4}"] if "ulysses" in override else []
    assert part in key.differences(of_stage(), of_stage(override, *mesh))


def test_a_request_for_another_picture_has_the_same_key(of_stage):
    """What the program gets when it is called is not in its key, and is blank where the program could see it."""
    assert of_stage() == of_stage("steps=7", "fps=9", "save_every=2", prompt="A dog", negative_prompt="red", seed=7)


def test_settings_that_are_not_in_the_key_are_blank_for_what_is_traced(task, tmp_path):
    settings = task("steps=7", prompt="A dog", negative_prompt="red", seed=7).settings.traced()
    assert [getattr(settings, name) for name in key.FREE] == ["", "", 0, 0, None]
    image = dataclasses.replace(settings, image=tmp_path / "cat.png")
    assert str(image.traced().image) == "image"


def test_another_card_or_bound_of_scores_has_another_key(of_stage, card):
    network = card.components["transformer"].model_copy(update={"precision": "high"})
    other = card.model_copy(update={"components": {**card.components, "transformer": network}})
    assert key.differences(of_stage(), of_stage(card=other)).keys() == {"card", "precision"}
    assert key.differences(of_stage(), of_stage(bounds={"joint": 52.0})).keys() == {"score bounds.joint"}


def test_another_configuration_of_the_network_has_another_key(of_stage, tiny_folder, tmp_path, task):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(tiny_folder, copy)
    stage = next(stage for stage in task().family.STAGES if stage.name == "denoise")
    before = key.of_stage(task(), stage, copy, {})
    with (copy / "transformer" / "config.json").open("a") as file:
        file.write("\n")
    after = key.of_stage(task(), stage, copy, {})
    assert key.differences(before, after).keys() == {"configurations.transformer"}


def test_what_a_network_was_prepared_with_is_in_its_key():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    before = key.of_module(module)
    assert before == key.of_module(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)))
    module[1].p = 0.25
    assert key.of_module(module) != before
    assert key.of_module(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Identity())) != before


def test_devices_in_another_order_have_another_key(mesh8):
    turned = jax.make_mesh((4, 2), ("dp", "tp"), devices=jax.devices()[::-1])
    found = key.differences(key.of_mesh(mesh8), key.of_mesh(turned))
    assert {"mesh.dp", "device.order"} <= found.keys()
    assert key.of_mesh(mesh8)["device"]["host"] == cache.host()


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS", "DIFFUSERS_ATTN_BACKEND"])
def test_flags_of_the_compilers_and_the_upstream_are_in_the_key(monkeypatch, variable):
    monkeypatch.delenv(variable, raising=False)
    before = key.of_process(["diffusers"])
    monkeypatch.setenv(variable, "--xla_one=two")
    assert key.differences(before, key.of_process(["diffusers"])) == {
        f"environment.{variable}": (None, "--xla_one=two")
    }


def test_a_setting_of_jax_and_the_default_dtype_are_in_the_key_and_a_folder_is_not(tmp_path):
    before = key.of_process([])
    with jax.numpy_dtype_promotion("strict"), jax_cache(tmp_path):
        found = key.differences(before, key.of_process([]))
    assert found.keys() == {"jax.jax_numpy_dtype_promotion"}
    torch.set_default_dtype(torch.float64)
    try:
        assert "torch.default dtype" in key.differences(before, key.of_process([]))
    finally:
        torch.set_default_dtype(torch.float32)


def test_every_installed_version_is_in_the_key():
    found = key.versions()
    assert {"torch", "jax", "jaxlib", "torchax", "diffusers", "transformers"} <= found.keys()
    assert found["jax"] == jax.__version__


def test_the_sources_of_the_upstream_are_in_the_key_without_importing_it(kept):
    """A checkout or an editable install keeps its version while it is edited."""
    before = key.sources("up")
    kept.world.write("up/unused.txt", "no source")
    assert key.sources("up") == before
    kept.world.write("up/inner/more.py", "A = 1")
    more = key.sources("up")
    kept.world.write("up/inner/more.py", "A = 2")
    assert len({before, more, key.sources("up")}) == 3
    elsewhere = kept.world.site.parent / "elsewhere"
    elsewhere.mkdir()
    (kept.world.site / "up" / "linked").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(kept.world.site / "up")
    before = key.sources("up")
    (elsewhere / "one.py").write_text("")
    assert key.sources("up") != before
    assert key.sources("no_such_package") == "absent"


def test_torchports_own_sources_and_its_table_of_tiles_are_in_the_key(monkeypatch, root, tmp_path):
    import shutil

    shutil.copytree(root / "torchport", tmp_path / "torchport", ignore=shutil.ignore_patterns("__pycache__", "_data"))

    def there(name):
        return type("Spec", (), {"submodule_search_locations": [str(tmp_path / "torchport")], "origin": None})

    monkeypatch.setattr("importlib.util.find_spec", there)
    before = key.sources("torchport")
    for file in ("attention/tiles.yaml", "stack.py"):
        with (tmp_path / "torchport" / file).open("a") as stream:
            stream.write("\n")
        assert key.sources("torchport") != before
        before = key.sources("torchport")


def test_an_argument_that_is_no_plain_data_has_no_key(kept, said):
    assert key.of_call(({}, {}, {}), (("scale", 1.0), ("sizes", (1, [2, None])), ("dtype", torch.float32))) is not None
    assert key.of_call(({}, {}, {}), (("generator", object()),)) is None
    with kept.stage() as (network, _):
        network.bound.how = lambda module, scale, **inputs: module(**inputs)
        network(x=X, scale=type("Thing", (), {})())
    assert kept.made == [{"program": "compiled", "traced": kept.made[0]["traced"], "jax_cache": False, "key": None}]
    assert "denoise: an argument of 'net' is no plain data: it is not cached" in said()


# A run.


def test_a_second_run_loads_its_programs_and_makes_the_same_bits(request_for, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHPORT_CACHE", str(tmp_path / "cache"))
    request = request_for(backend="torchax", overrides=("height=64", "width=64", "frames=5", "steps=1"))
    run(dataclasses.replace(request, stage="encode"))
    made = []
    for _ in range(2):
        run(dataclasses.replace(request, stage="denoise", prompt=None))
        manifest = json.loads((tmp_path / "out" / "denoise.json").read_text())
        # Plumbing is called while torchax is imported, which happens once in a process.
        patches = [{**row, "late": None} for row in manifest["patches"] if not row["plumbing"]]
        made.append((manifest["sha256"], patches, [row["program"] for row in manifest["programs"]]))
    assert made[0][:2] == made[1][:2] and [made[0][2], made[1][2]] == [["compiled"], ["cached"]]
    assert not jax.config.jax_compilation_cache_dir
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["jax", "programs", "tiny"]


@pytest.mark.parametrize("how", ["flag", "variable", "original"])
def test_nothing_is_kept_where_that_was_switched_off(task, monkeypatch, tmp_path, how):
    monkeypatch.setenv("TORCHPORT_CACHE", "off" if how == "variable" else str(tmp_path / "cache"))
    changes = {"flag": {"cache": False}, "variable": {}, "original": {"backend": "original"}}[how]
    with programs.Programs.of_task(task(**changes)) as opened:
        assert opened.root is None and not jax.config.jax_compilation_cache_dir
    assert not (tmp_path / "cache").exists()


def test_a_run_is_refused_whose_cache_others_can_write(task, monkeypatch, tmp_path, torchport, capsys):
    monkeypatch.setenv("TORCHPORT_CACHE", str(tmp_path / "cache"))
    cache.make(tmp_path / "cache" / "programs").chmod(0o722)
    words = ["run", "--model", "hunyuan", "--config", "demo", "--prompt", "A cat", "--out", tmp_path / "out"]
    code, _, err = torchport(*words, capsys=capsys)
    assert code == 2 and err[-1].startswith(
        f"error[TP107] {tmp_path}/cache/programs: Others can write to it (mode 0722), and what is loaded"
    )
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_a_module_keeps_beside_its_weights_is_known_by_its_values():
    kept = [key._as_plain(tensor) for tensor in (torch.ones(2), torch.zeros(2), torch.ones(2, dtype=torch.bfloat16))]
    assert len(set(kept)) == 3 and kept[0] == key._as_plain(torch.ones(2))
    assert key._as_plain(torch.tensor(1.0)) != key._as_plain(torch.tensor(2.0))
    assert "meta" not in key._as_plain(torch.ones(2, device="meta"))
