"""A reference for another machine: a recording of the original, of a bounded size, as plain safetensors.

The inputs that a port is called with are kept whole; of values that are only compared, some rows. If that is more than
the limit, blocks are left out, evenly over the depth, and the file lists them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchport import save
from torchport.errors import ArtefactBrokenError, ArtefactForeignError, ArtefactMissingError, BadValueError
from torchport.load import checkpoint
from torchport.progress import log, size_text
from torchport.save import tree
from torchport.save.manifest import versions
from torchport.stages.outputs import map_tensors
from torchport.task import Request, Task, accept
from torchport.verify import recording
from torchport.verify.borders import Border, Values
from torchport.verify.encoders import Yardstick
from torchport.verify.recording import RecordedCall, Recording
from torchport.verify.seams import ConditionCall, LoopRecord, SchedulerStep, SideRecord
from torchport.verify.yardstick import ROWS, SHAPE, sampled, shape_of

SCHEMA = 2
"""Version of a capture's schema; a reader refuses any other."""
LIMIT = 2 * 2**30
"""Bytes of a capture, unless `--capture-limit` says otherwise."""
NAME = "capture.safetensors"
MADE_BY = "torchport verify --capture DIR"
PARTS = ("encoded", "latents", "states", "ends", "decoded")
"""The fields of a recording that are trees of tensors."""
FACTS = ("stage", "network", "step", "number")
"""The fields of a call that are plain JSON."""
TREES = ("inputs", "output", "wide_output")
"""The fields of a call that are trees of tensors."""
BORDERS = ("values", "outer", "inner")
"""The fields of a call that are values at borders."""
SETTINGS = (
    *("prompt", "negative_prompt", "seed", "height", "width", "frames", "steps", "guidance_scale"),
    *("vae_tiling", "variant", "call", "guider", "scheduler"),
)
"""Settings in which a capture and a verification must agree."""
PACKAGES = ("diffusers", "transformers")
"""Packages whose code is the original's: another version is another original."""


@dataclasses.dataclass(eq=False)
class TensorTable:
    """The tensors of a capture by name. Tensors with the same values are stored once."""

    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    size: int = 0  #: In bytes.
    _names: dict[str, str] = dataclasses.field(default_factory=dict)  #: By the hash of the values.

    def add(self, value: Any) -> Any:
        """Stores the tensors of a tree, and returns the tree as data of JSON that names them; see `restored`."""
        return tree.as_data(value, self._entry)

    def cost(self, value: Any) -> int:
        """Returns the bytes that the table would grow by if a tree of tensors were added."""
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        new = {_digest(leaf): leaf.numel() * leaf.dtype.itemsize for leaf in leaves}
        return sum(size for digest, size in new.items() if digest not in self._names)

    def _entry(self, path: str, tensor: torch.Tensor) -> dict[str, Any]:
        """Returns what stands for a tensor in JSON: `{"tensor": "t7"}`, and for a sampled one also its row numbers."""
        rows = getattr(tensor, ROWS, None)
        sample = {} if rows is None else {"rows": self._name(rows), "shape": list(shape_of(tensor))}
        return {"tensor": self._name(tensor)} | sample

    def _name(self, tensor: torch.Tensor) -> str:
        """Stores a tensor, unless its values are stored already, and returns its name in the table."""
        digest = _digest(tensor)
        if digest not in self._names:
            name = self._names[digest] = f"t{len(self._names)}"
            self.tensors[name] = _contiguous(tensor)
            self.size += tensor.numel() * tensor.dtype.itemsize
        return self._names[digest]


def _digest(tensor: torch.Tensor) -> str:
    sha = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    sha.update(_contiguous(tensor).reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy. `.contiguous()` is not enough: it keeps the odd strides of a one-element tensor."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def restored(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns the tree that `TensorTable.add` turned into data, with its tensors."""

    def tensor_of(entry: dict[str, Any]) -> torch.Tensor:
        tensor = tensors[entry["tensor"]].clone()
        if "rows" in entry:
            setattr(tensor, ROWS, tensors[entry["rows"]])
            setattr(tensor, SHAPE, tuple(entry["shape"]))
        return tensor

    return tree.from_data(data, tensor_of)


def record(request: Request, steps: tuple[int, ...] | None, decodes: bool, folder: Path, limit: int) -> str:
    """Runs the original, writes its capture, and returns a summary of it; runs in a process of its own."""
    task = accept(request)
    return write(folder, recording.recording_of(task, steps, decodes), task, limit)


def unpack(folder: Path, file: Path) -> None:
    """Converts a capture to the file of a recording, which a verification reads; runs in a process of its own."""
    recording.write(read(folder), file)


def write(folder: Path, original: Recording, task: Task, limit: int = LIMIT) -> str:
    """Writes a recording as a capture of at most `limit` bytes, and returns a summary: calls, size, blocks left out."""
    table = TensorTable()
    data = _loop_data(original, table)
    calls, left_out = _call_data(original.calls, table, limit)
    words = f"{len(original.calls)} call(s) of step {', '.join(map(str, original.steps))}: {size_text(table.size)}"
    if left_out:
        words += f"; left out: {_list_words(left_out)}"
    facts = {"schema_version": SCHEMA, **_identity(task), "holds": words, "left_out": left_out}
    facts |= {"recording": {**data, "calls": calls}}
    folder.mkdir(parents=True, exist_ok=True)
    save.write_file(folder / NAME, table.tensors, lambda sha256: json.dumps({**facts, "sha256": sha256}))
    log.info("captured in %s: %s", folder, words)
    return words


def _list_words(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _identity(task: Task) -> dict[str, Any]:
    """Returns the facts in which a capture and a verification must agree; only the version of torch may differ."""
    settings = {name: getattr(task.settings, name) for name in SETTINGS}
    settings["image"] = None if task.settings.image is None else task.image_digest
    known = versions()
    return {
        "model": task.card.model,
        "settings": {**json.loads(json.dumps(settings)), "lora": task.loras},  # tuples as lists, as in the file
        "dtypes": {name: task.dtype(name) for name in task.settings.dtypes},
        "checkpoint": _digests(task),
        "versions": {name: known[name] for name in (*PACKAGES, "torch") if name in known},
    }


def _digests(task: Task) -> dict[str, str]:
    """Returns the digests of a checkpoint's components; for tiny weights, made on each machine, that of the recipe."""
    if task.is_tiny:
        return {task.checkpoint: hashlib.sha256(task.card.tiny.model_dump_json().encode()).hexdigest()[:16]}
    return checkpoint.locate(task.checkpoint, task.card, task.settings.variant).digests


def _loop_data(original: Recording, table: TensorTable) -> dict[str, Any]:
    """Returns a recording without its calls as JSON data, and adds the tensors to the table."""
    loop: LoopRecord = original.seams.loop
    # A template gives a shape and a dtype alone, for which one row is enough.
    templates = {name: map_tensors(x, lambda t: t[:1].clone()) for name, x in original.templates.items()}
    return {
        **{name: table.add(getattr(original, name)) for name in PARTS},
        "likes": table.add(templates),
        "seams": {
            "moments": table.add(original.seams.moments),
            "roundings": original.seams.yardstick.roundings if original.seams.yardstick else {},
            "chosen": sorted(loop.chosen),
            "steps": [table.add({**vars(step), "calls": list(map(vars, step.calls))}) for step in loop.steps],
        },
    }


def _call_data(calls: list[RecordedCall], table: TensorTable, limit: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the calls as JSON data, and the blocks left out; raises if `limit` is too low without any block."""
    rows: list[dict[str, Any]] = []
    for call in calls:
        trees = {name: table.add(getattr(call, name)) for name in TREES}
        facts = {name: getattr(call, name) for name in FACTS}
        rows.append({**facts, **trees, "values": [], "outer": [], "inner": []})
    if table.size > limit:
        fact = f"The loop's values and the networks' inputs alone take {size_text(table.size)}"
        remedy = f"Give at least {table.size / 2**30:.3g}"
        raise BadValueError(f"--capture-limit {limit / 2**30:.3g}", fact, remedy)
    borders = [{name: getattr(call, name) for name in BORDERS} for call in calls]
    if table.size + table.cost(borders) <= limit:
        for row, by_name in zip(rows, borders, strict=True):
            _keep(row, by_name, table)
        return rows, []
    return rows, _keep_blocks(list(zip(calls, rows, strict=True)), table, limit)


def _keep_blocks(calls: list[tuple[RecordedCall, dict[str, Any]]], table: TensorTable, limit: int) -> list[str]:
    """Adds as many blocks to the rows as the limit allows, evenly over the depth; returns the names of the others."""
    blocks, left_out = [], []
    for call, row in calls:
        paths = list(dict.fromkeys(border.path for border in call.outer if border.path))  # in the order of the call
        blocks += [(turn, call, row, path) for turn, path in enumerate(spread(paths))]
    for borders_of, place in ((_outer_of, ""), (_inner_of, " inside")):  # modules inside only after all blocks
        for _, call, row, path in sorted(blocks, key=lambda block: block[0]):
            borders = borders_of(call, path)
            if table.size + table.cost(borders) > limit:
                left_out.append(f"{call.network}.{path}{place} of step {call.step}, call {call.number}")
            else:
                _keep(row, borders, table)
    return left_out


def _keep(row: dict[str, Any], borders: Mapping[str, Values], table: TensorTable) -> None:
    """Adds values at borders to the row of a call, by the names of `BORDERS`, and their tensors to the table."""
    for name, values in borders.items():
        row[name] += [[list(border), table.add(value)] for border, value in values.items()]


def spread(paths: list[str]) -> list[str]:
    """Returns paths in an order whose beginning is spread evenly: the first, the last, the middle, the quarters."""
    last, order = len(paths) - 1, dict.fromkeys([0])  # a set that keeps its order
    for power in range(len(paths).bit_length() + 1):
        order |= dict.fromkeys(round(n * last / 2**power) for n in range(2**power + 1))
    return [paths[n] for n in order] if paths else []


def _outer_of(call: RecordedCall, block: str) -> dict[str, Values]:
    """Returns the values of a block that a capture keeps: whole inputs, and some rows of each output. `values` are the
    original's, and `outer` the yardstick's, as in `RecordedCall`.
    """
    values = {
        border: value if border.side == "in" else map_tensors(value, sampled)
        for border, value in call.values.items()
        if border.path == block
    }
    wide = {
        border: map_tensors(value, sampled)
        for border, value in call.outer.items()
        if border.path == block and border.side == "out"
    }
    return {"values": values, "outer": wide}


def _inner_of(call: RecordedCall, block: str) -> dict[str, Values]:
    """Returns the values of the modules in a block that a capture keeps: whole inputs and outputs. `values` are the
    original's, and `inner` the yardstick's, as in `RecordedCall`.
    """
    inside = [border for border in call.inner if border.path == block or border.path.startswith(f"{block}.")]
    values = {b: call.values[b] for b in inside if b in call.values and b.path != block}  # `_outer_of` has the block's
    return {"values": values, "inner": {border: call.inner[border] for border in inside}}


def read(folder: Path) -> Recording:
    """Returns the recording in a folder's capture; the counterpart of `write`."""
    facts, tensors = _read(folder)
    data = facts["recording"]
    seams = data["seams"]
    parts: dict[str, Any] = {name: restored(data[name], tensors) for name in PARTS}
    loop = LoopRecord(seams["chosen"])
    for row in seams["steps"]:
        fields = restored(row, tensors)
        fields["calls"] = [ConditionCall(**call) for call in fields["calls"]]
        loop.steps.append(SchedulerStep(**fields))
    moments = restored(seams["moments"], tensors)
    # The stage that encodes an image is in `moments`, and not in `encoded`.
    encoded = {name: values for name, values in parts["encoded"].items() if not values.keys() & moments.keys()}
    yardstick = Yardstick(host=[], wide=[], roundings=seams.get("roundings", {}))
    side = SideRecord(encoded, moments, loop, yardstick=yardstick)
    calls = []
    for row in data["calls"]:
        fields = {name: row[name] for name in FACTS} | {name: restored(row[name], tensors) for name in TREES}
        for name in BORDERS:
            fields[name] = {Border(*border): restored(value, tensors) for border, value in row[name]}
        calls.append(RecordedCall(**fields))
    return Recording(**parts, calls=calls, seams=side, templates=restored(data["likes"], tensors))


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns a capture's JSON data and tensors; raises if the file is missing, of another version or broken."""
    file = folder / NAME
    if not file.is_file():
        raise ArtefactMissingError(str(file), "There is no such file", f"Make it with: {MADE_BY}")
    written, tensors = save.read_file(file, MADE_BY)
    facts: dict[str, Any] = json.loads(written)
    if facts.get("schema_version") != SCHEMA:
        fact = f"Its schema version is {facts.get('schema_version')!r}"
        raise ArtefactForeignError(str(file), fact, f"This torchport reads {SCHEMA}: make it again with: {MADE_BY}")
    if save.sha256_of(tensors) != facts["sha256"]:
        fact = "Its tensors are not those that were written"
        raise ArtefactBrokenError(str(file), fact, f"Copy the file again, or make it with: {MADE_BY}")
    return facts, tensors


def check(folder: Path, task: Task) -> tuple[list[str], int]:
    """Raises if a capture is of another task; returns notes for the report, and how many blocks the capture lacks."""
    facts, _ = _read(folder)
    identity = _identity(task)
    for name, captured, asked in _differences(facts, identity):  # the first difference is enough
        fact = f"It was captured for {name} {captured!r}, and this verification has {asked!r}"
        remedy = f"Verify with what it was captured for, or capture again: {MADE_BY}"
        raise ArtefactForeignError(str(folder / NAME), fact, remedy, name=name)
    notes = [f"the capture lacks {_list_words(facts['left_out'])}"] if facts["left_out"] else []
    captured, installed = (side["versions"].get("torch") for side in (facts, identity))
    if captured != installed:
        notes.append(f"the capture is of torch {captured}, and this machine has {installed}")
    return notes, len(facts["left_out"])


def _differences(facts: Mapping[str, Any], identity: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields each field in which a capture's `facts` and a verification differ: its name, and both values."""
    if facts["model"] != identity["model"]:
        yield "model", facts["model"], identity["model"]
    for kind, prefix in (("settings", ""), ("dtypes", "dtype of "), ("checkpoint", "checkpoint "), ("versions", "")):
        captured, asked = facts[kind], identity[kind]
        for name in {**captured, **asked}:
            if captured.get(name) != asked.get(name) and name != "torch":
                yield f"{prefix}{name}", captured.get(name), asked.get(name)
