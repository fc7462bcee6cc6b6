"""The examples that `torchport explain` shows are true: a wrong one raises its id, and the right one does not."""

import ast
import contextlib
import copy
import math
import shlex
import textwrap
from pathlib import Path

import click
import jax
import pytest
import torch
import yaml
from fakes.patch_world import World
from fakes.small_port import SmallPort
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.torch import save_file

from tests.save.test_save import FACTS
from torchport import load, patch, save, shard
from torchport.__main__ import cli
from torchport.commands.explain import LANGUAGES, examples
from torchport.config import machine, parse_document, read_document, validated
from torchport.config.card import Card, Job, check_job
from torchport.config.pack import find_pack
from torchport.config.strategy import Rule
from torchport.errors import KINDS, TorchportError
from torchport.kernels.attention.tiles import Tile, check_vmem
from torchport.run.path import run
from torchport.task import Request

EXAMPLES = examples()
NOT_PROVED = {
    "TP200": "a process that ends",
    "TP207": "a lock file",
    "TP217": "another Python's source",
    "TP302": "weights", "TP303": "weights",
    "TP405": "a network", "TP801": "a network",
    "TP501": "a TPU", "TP502": "no TPU compiler",
    "TP504": "several hosts",
    "TP601": "a run", "TP602": "a run", "TP603": "a run", "TP604": "a run", "TP701": "a run",
}  # fmt: skip
"""What an example needs that is not proved here; its own tests provoke each of these errors."""
PROVED = sorted(EXAMPLES.keys() - NOT_PROVED.keys())


def test_every_error_that_is_no_group_has_an_example():
    groups = {id for id, kind in KINDS.items() if kind.__subclasses__()}
    assert KINDS.keys() - groups <= EXAMPLES.keys() <= KINDS.keys()
    assert list(EXAMPLES) == sorted(EXAMPLES) and NOT_PROVED.keys() <= EXAMPLES.keys()


@pytest.mark.parametrize("key", EXAMPLES)
def test_an_example_can_be_read(key):
    example = EXAMPLES[key]
    assert example.wrong != example.right and example.cure.endswith((".", ")."))
    for kind, text in example.sides:
        language = LANGUAGES.get(kind, "python")
        if language == "python":
            ast.parse(text)
        elif language == "sh":
            assert commands(text) or key in ("TP504", "TP701"), "a line of torchport's"
        elif key not in ("TP101", "TP102"):  # YAML that cannot be read; the tests below read the right one
            assert parse_document(text, "example.yaml").data
    ast.parse(example.upstream)


def commands(text):
    """torchport's command lines among the lines of a shell, each accepted by its own parser."""
    lines = [shlex.split(line, comments=True)[1:] for line in text.splitlines() if line.startswith("torchport ")]
    for arguments in lines:
        command, rest = cli, arguments
        while isinstance(command, click.Group):
            _, command, rest = command.resolve_command(click.Context(command), rest)
        context = click.Context(command)
        command.make_parser(context).parse_args(list(rest))
    return lines


def with_fields(document, text):
    """A shipped file whose fields are those of an example, where it has them."""
    fields = parse_document(text, "example.yaml").data
    return parse_document(yaml.safe_dump({**document.data, **fields}), "example.yaml")


def try_job(text, root):
    document = with_fields(read_document(root / "configs" / "demo.yaml"), text)
    job = validated(Job, document)
    check_job(job, validated(Card, read_document(root / "configs" / "models" / "hunyuan.yaml")), document)
    devices = machine.parse_machine(job.machine, "machine").devices
    shard.check_mesh(job.mesh, devices, job.machine, document.place(["mesh"]))


def try_pack(text, root, folder):
    """Reads a config of a pack, which has the name of a shipped one."""
    (folder / "configs").mkdir()
    data = with_fields(read_document(root / "configs" / "demo.yaml"), text).data
    (folder / "configs" / "demo.yaml").write_text(yaml.safe_dump(data))
    find_pack([str(folder)]).job("demo")


def try_rules(text):
    rules = [Rule.model_validate(rule) for rule in parse_document(text, "rules.yaml").data]
    shapes = {
        f"blocks.{n}.{name}": (32, 8)[:dims] for n in range(2) for name, dims in (("up.weight", 2), ("up.bias", 1))
    }
    shard.match(rules, shapes, {"tp": 4}, "rules.yaml:1")


ENTRY = {
    "why": "A test.",
    "reported": "none: a test",
    "until": "never",
    "fits": {"torch": "*"},
    "equivalence": "bitwise",
}
UPSTREAM = "def f(x):\n    y = x * 2\n    return y\n"
FUNCTIONS = """
def new(x): return x + x
def new_of_two(x, y): return x + y
def doubled(x): return x * 2
def apply_new(x): return [x + x]
"""


def entries_of(world, items):
    """The entries of an example, with the fields that every entry must have, from a file."""
    entries = [{"id": f"up.e{n}", **copy.deepcopy(ENTRY), **item} for n, item in enumerate(items)]
    world.python(FUNCTIONS)
    (world.patches / "up" / "p.yaml").write_text(yaml.safe_dump(entries, sort_keys=False))
    return patch.read(world.patches, ["up/p"])


def try_patch(text, upstream, world):
    world.write("up/m.py", upstream)
    with patch.applied(entries_of(world, parse_document(text, "example.yaml").data), stage="denoise") as ledger:
        import up.m

        with contextlib.suppress(AttributeError):  # the upstream of some examples has no f
            up.m.f(1)
        ledger.check_called()


def try_python(text, world):
    world.write("up/m.py", UPSTREAM)
    entries = entries_of(world, [{"target": "up.m:f", "replace": "p.py:new"}])
    exec(compile(text, "example.py", "exec"), {"patch": patch, "entries": entries})


def try_code(key, text, folder):
    """Runs what is no code of torchport's, and does with its result what torchport would do."""
    weights = torch.nn.Linear(2, 2)
    save_file(weights.state_dict(), folder / "model.safetensors")
    scores, mask = torch.zeros(2, 4), torch.tensor([[True, True, False, False], [False] * 4])
    somewhere = NamedSharding(shard.make_mesh({"tp": 8}, jax.devices()), PartitionSpec())

    def call(**inputs):
        return [shard.to_jax(tensor, somewhere) for tensor in inputs.values()]

    names = {"torch": torch, "math": math, "Tile": Tile, "self": weights, "latents": torch.zeros(1), "call": call}
    names |= {"scores": scores, "mask": mask}
    exec(compile(text, "example.py", "exec"), names)
    if key == "TP304":
        load.fill(weights, folder, "example")
    elif key == "TP503":
        check_vmem(names["tile"], **KERNEL)
    elif key == "TP605":
        save.write(folder, "denoise", {"latents": names["attention"]}, FACTS)


LINES = {
    "family": ("patches/up/stages.py", '    return {"x": torch.ones(8, 4)}\n'),
    "forward": ("up/model.py", "        return y\n"),
    "upstream": ("up/model.py", "class Net("),
}
"""Where the statements of an example stand in a port: the file, and the line before which they are put."""
LOWERING = """
from torchport import engine
def special_airy_ai(x): return engine.call_jax(lambda x: x, x)
"""


def try_port(example, side, folder, monkeypatch):
    """Runs a small port with the statements of an example, and with the patch that mends them."""
    monkeypatch.chdir(folder)
    port = SmallPort(folder, monkeypatch)
    kind, text = side
    statements = text if kind == example.kind else example.wrong
    file, line = LINES[example.kind]
    indent = line[: len(line) - len(line.lstrip())]
    port.change(file, line, textwrap.indent(f"{statements}\n", indent) + line)
    data = parse_document(text, "example.yaml").data if LANGUAGES.get(kind) == "yaml" else []
    if kind == "card":
        port.change("configs/models/small.yaml", "patches:\n  denoise: []", text)
    elif data:
        entries = [{"id": "up.lowering", **copy.deepcopy(ENTRY), **item} for item in data]
        port.write("patches/up/mended.yaml", yaml.safe_dump(entries, sort_keys=False))
        port.write("patches/up/lowerings.py", LOWERING)
        port.change("configs/models/small.yaml", "denoise: []", "denoise: [up/mended]")
    try:
        run(Request("small", "configs/small.yaml", prompt="x", paths=("pack",), out=Path("out"), cache=False))
    finally:
        port.forget()
        jax.clear_caches()


KERNEL = {"head_size": 128, "heads": 1, "itemsize": 2, "bounded": True, "vmem": machine.TPU_CHIPS["v6e"].vmem}


def try_commands(text, torchport, capsys):
    """Runs torchport's lines in a folder of their own; a refusal is raised again by its id."""
    for arguments in commands(text):
        arguments = ["hunyuan" if word == "some" else word for word in arguments]
        code, _, err = torchport(*arguments, capsys=capsys)
        if code:
            raise AssertionError(err[-1])


@pytest.fixture
def attempt(root, tmp_path, monkeypatch):
    """Tries one side of an example; returns the id of the error that it raises, or None."""

    def attempt(key, side):
        example = EXAMPLES[key]
        _, text = side
        world = World(tmp_path, monkeypatch) if example.kind in ("patch", "python") else None
        try:
            if example.kind in LINES:
                try_port(example, side, tmp_path, monkeypatch)
            elif key == "TP110":
                try_pack(text, root, tmp_path)
            elif example.kind == "job":
                try_job(text, root)
            elif example.kind == "rules":
                try_rules(text)
            elif example.kind == "patch":
                try_patch(text, example.upstream or UPSTREAM, world)
            elif example.kind == "python":
                try_python(text, world)
            elif example.kind == "code":
                try_code(key, text, tmp_path)
            else:
                raise AssertionError(f"Nothing tries a '{example.kind}'")
        except TorchportError as error:
            return error.id
        finally:
            if world is not None:
                world.close()
        return None

    return attempt


@pytest.mark.parametrize("key", [key for key in PROVED if EXAMPLES[key].kind != "command"])
def test_a_wrong_example_raises_its_id(attempt, key):
    assert attempt(key, EXAMPLES[key].sides[0]) == key


@pytest.mark.parametrize("key", [key for key in PROVED if EXAMPLES[key].kind != "command"])
def test_a_right_example_raises_nothing(attempt, key):
    assert attempt(key, EXAMPLES[key].sides[1]) is None


@pytest.mark.parametrize("key", [key for key in PROVED if EXAMPLES[key].kind == "command"])
def test_a_wrong_command_is_refused_with_its_id(torchport, capsys, tmp_path, key):
    for folder in ("patches", "configs/models"):
        (tmp_path / "my_pack" / folder).mkdir(parents=True)
    with pytest.raises(AssertionError, match=rf"error\[{key}\]"):
        try_commands(EXAMPLES[key].wrong, torchport, capsys)
    if key == "TP108":
        try_commands(EXAMPLES[key].right, torchport, capsys)
