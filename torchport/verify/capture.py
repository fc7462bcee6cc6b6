"""A reference for another machine: a recording of the original, of a bounded size, as plain safetensors.

What a port needs to be called with is kept whole. What is only compared is kept in some rows. Where that is too much,
blocks are left out, evenly over the depth, and the file says which.
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
from torchport.save.manifest import versions
from torchport.task import Request, Task, accept
from torchport.verify import handover
from torchport.verify.borders import Border, Values
from torchport.verify.plain import Shelf, restored
from torchport.verify.recording import Call, Recording, recorded
from torchport.verify.seams import Recorded
from torchport.verify.trace import Called, Stepped, Trace
from torchport.verify.yardstick import sampled

SCHEMA = 2
"""Version of a capture's schema; a reader refuses any other."""
LIMIT = 2 * 2**30
"""Bytes of a capture, unless another limit is asked for."""
NAME = "capture.safetensors"
MADE_BY = "torchport verify --capture DIR"
BORDERS = ("values", "outer", "inner")
"""The fields of a call that are values at borders."""
SETTINGS = ("prompt", "negative_prompt", "seed", "height", "width", "frames", "steps", "guidance_scale")
OPTIONAL = ("vae_tiling", "variant", "call", "guider")
"""Settings in which a capture and a verification must agree."""
PACKAGES = ("diffusers", "transformers")
"""Packages whose code is the original's: another version is another original."""


def record(request: Request, steps: tuple[int, ...] | None, decodes: bool, folder: Path, limit: int) -> str:
    """Writes what the original does, and returns in words what that is; runs in a process of its own.

    Args:
        request: Of the original.
        steps: From 0; None: the first of each network.
        decodes: Whether the decoder's frames are recorded, too.
        folder: Where it is written.
        limit: In bytes.
    """
    task = accept(request)
    return write(folder, recorded(task, steps, decodes), task, limit)


def unpack(folder: Path, file: Path) -> None:
    """Makes a capture the recording of a verification; runs in a process of its own.

    Args:
        folder: The capture's.
        file: The recording's.
    """
    handover.write(read(folder), file)


def write(folder: Path, recording: Recording, task: Task, limit: int = LIMIT) -> str:
    """Writes a recording, and returns in words what it holds and what was left out.

    Args:
        folder: It is made, where it is not there.
        recording: The original's.
        task: The original's.
        limit: In bytes.

    Raises:
        OutputError: The folder cannot be written.
    """
    shelf = Shelf()
    data = _recording(recording, shelf)
    calls, left_out = _calls(recording.calls, shelf, limit)
    words = f"{len(recording.calls)} call(s) of step {', '.join(map(str, recording.steps))}: {size_text(shelf.size)}"
    words += f"; left out: {_summed(left_out)}" if left_out else ""
    facts = {"schema_version": SCHEMA, **_identity(task), "holds": words, "left_out": left_out}
    text = {**facts, "recording": {**data, "calls": calls}, "sha256": save.sha256_of(shelf.tensors)}
    folder.mkdir(parents=True, exist_ok=True)
    save.write_file(folder / NAME, shelf.tensors, json.dumps(text))
    log.info("captured in %s: %s", folder, words)
    return words


def _summed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _identity(task: Task) -> dict[str, Any]:
    """Returns the fields in which a capture and a verification must agree."""
    image = task.settings.image
    settings = {name: getattr(task.settings, name) for name in (*SETTINGS, *OPTIONAL)}
    settings["image"] = None if image is None else hashlib.sha256(image.read_bytes()).hexdigest()[:16]
    known = versions()
    return {
        "model": task.card.model,
        "settings": {**json.loads(json.dumps(settings)), "lora": task.loras},
        "dtypes": {name: task.dtype(name) for name in task.settings.dtypes},
        "checkpoint": _digests(task),
        "versions": {name: known[name] for name in (*PACKAGES, "torch") if name in known},
    }


def _digests(task: Task) -> dict[str, str]:
    """Returns the digests of a checkpoint's components; of tiny weights, which every machine writes, what they are."""
    if task.is_tiny:
        return {task.checkpoint: hashlib.sha256(task.card.tiny.model_dump_json().encode()).hexdigest()[:16]}
    return checkpoint.locate(task.checkpoint, task.card, task.settings.variant).digests


def _recording(recording: Recording, shelf: Shelf) -> dict[str, Any]:
    """Returns a recording without its calls as plain data, its tensors on a shelf."""
    trace: Trace = recording.seams.trace
    fields = ("encoded", "latents", "states", "ends", "decoded")
    return {
        **{name: shelf.put(getattr(recording, name)) for name in fields},
        "likes": shelf.put({name: like[:1].clone() for name, like in recording.likes.items()}),
        "seams": {
            "moments": shelf.put(recording.seams.moments),
            "chosen": sorted(trace.chosen),
            "steps": [shelf.put(_fields(stepped)) for stepped in trace.steps],
        },
    }


def _fields(stepped: Stepped) -> dict[str, Any]:
    rows = {field.name: getattr(stepped, field.name) for field in dataclasses.fields(stepped)}
    return {**rows, "calls": [dict(vars(called)) for called in stepped.calls]}


def _calls(calls: list[Call], shelf: Shelf, limit: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the calls as plain data, and the names of the blocks that were left out.

    Raises:
        BadValueError: What no port can be called without is more than the limit.
    """
    rows: list[dict[str, Any]] = []
    for call in calls:
        whole = {name: shelf.put(getattr(call, name)) for name in ("inputs", "output", "wide_output")}
        head = {name: getattr(call, name) for name in ("stage", "network", "step", "number", "is_whole")}
        rows.append({**head, **whole, "values": [], "outer": [], "inner": []})
    if shelf.size > limit:
        fact = f"The loop's values and the networks' inputs alone take {size_text(shelf.size)}"
        remedy = f"Give at least {shelf.size / 2**30:.3g}"
        raise BadValueError(f"--capture-limit {limit / 2**30:.3g}", fact, remedy)
    borders = [(call.values, call.outer, call.inner) for call in calls]
    if shelf.size + shelf.cost([list(values.values()) for each in borders for values in each]) <= limit:
        for row, each in zip(rows, borders, strict=True):
            _keep(row, dict(zip(BORDERS, each, strict=True)), shelf)
        return rows, []
    return rows, _bounded(list(zip(calls, rows, strict=True)), shelf, limit)


def _bounded(calls: list[tuple[Call, dict[str, Any]]], shelf: Shelf, limit: int) -> list[str]:
    """Keeps as many blocks of calls as there is room for, and returns the names of those that were left out."""
    blocks = [(n, call, row, path) for call, row in calls for n, path in enumerate(spread(_blocks(call)))]
    left_out = []
    for part, what in ((_outer_of, ""), (_inner_of, " inside")):
        for _, call, row, path in sorted(blocks, key=lambda block: block[0]):
            borders = part(call, path)
            if shelf.size + shelf.cost([list(values.values()) for values in borders.values()]) > limit:
                left_out.append(f"{call.network}.{path}{what} of step {call.step}, call {call.number}")
            else:
                _keep(row, borders, shelf)
    return left_out


def _keep(row: dict[str, Any], borders: Mapping[str, Values], shelf: Shelf) -> None:
    for name, values in borders.items():
        row[name] += [[list(border), shelf.put(value)] for border, value in values.items()]


def _blocks(call: Call) -> list[str]:
    """Returns the paths of a call's blocks in the order of the call."""
    return list(dict.fromkeys(border.path for border in call.outer if border.path))


def spread(paths: list[str]) -> list[str]:
    """Returns paths so that those that come first lie evenly: the first, the last, the middle, the quarters."""
    last, order = len(paths) - 1, dict.fromkeys([0])
    for power in range(len(paths).bit_length() + 1):
        order |= dict.fromkeys(round(n * last / 2**power) for n in range(2**power + 1))
    return [paths[n] for n in order] if paths else []


def _outer_of(call: Call, block: str) -> dict[str, Values]:
    """Returns what is kept of a block: what it was called with, whole; what it returned, in rows."""
    values = {border: value for border, value in call.values.items() if border.path == block}
    wide = {border: value for border, value in call.outer.items() if border.path == block and border.side == "out"}
    return {"values": _rows(values), "outer": _rows(wide)}


def _inner_of(call: Call, block: str) -> dict[str, Values]:
    """Returns what is kept of the modules in a block: all that they were called with, and what they returned."""
    inside = [border for border in call.inner if border.path == block or border.path.startswith(f"{block}.")]
    values = {b: call.values[b] for b in inside if b in call.values and b.path != block}
    return {"values": values, "inner": {border: call.inner[border] for border in inside}}


def _rows(values: Values) -> Values:
    """Returns values that are only compared in rows: those that leave a module."""
    return {
        border: pytree.tree_map_only(torch.Tensor, sampled, value) if border.side == "out" else value
        for border, value in values.items()
    }


def read(folder: Path) -> Recording:
    """Returns a recording from a folder.

    Raises:
        ArtefactMissingError: There is none.
        ArtefactBrokenError: It is damaged, or cut off.
        ArtefactForeignError: It has another schema.
    """
    text, tensors = _read(folder)
    data = text["recording"]
    seams = data["seams"]
    parts: dict[str, Any] = {
        name: restored(data[name], tensors) for name in ("encoded", "latents", "states", "ends", "decoded", "likes")
    }
    trace = Trace(seams["chosen"])
    trace.steps = [_stepped(restored(row, tensors)) for row in seams["steps"]]
    moments = restored(seams["moments"], tensors)
    compared = {name: values for name, values in parts["encoded"].items() if not values.keys() & moments.keys()}
    return Recording(
        **parts, calls=[_call(row, tensors) for row in data["calls"]], seams=Recorded(compared, moments, trace)
    )


def _stepped(fields: dict[str, Any]) -> Stepped:
    return Stepped(**{**fields, "calls": [Called(**called) for called in fields["calls"]]})


def _call(row: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Call:
    fields: dict[str, Any] = {}
    for name in BORDERS:
        fields[name] = {Border(*border): restored(value, tensors) for border, value in row[name]}
    fields |= {name: restored(row[name], tensors) for name in ("inputs", "output", "wide_output")}
    fields |= {name: row[name] for name in ("stage", "network", "step", "number", "is_whole")}
    return Call(**fields)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    file = folder / NAME
    if not file.is_file():
        raise ArtefactMissingError(str(file), "There is no such file", f"Make it with: {MADE_BY}")
    written, tensors = save.read_file(file, MADE_BY)
    text: dict[str, Any] = json.loads(written)
    if text.get("schema_version") != SCHEMA:
        fact = f"Its schema version is {text.get('schema_version')!r}"
        raise ArtefactForeignError(str(file), fact, f"This torchport reads {SCHEMA}: make it again with: {MADE_BY}")
    if save.sha256_of(tensors) != text["sha256"]:
        fact = "Its tensors are not those that were written"
        raise ArtefactBrokenError(str(file), fact, f"Copy the file again, or make it with: {MADE_BY}")
    return text, tensors


def check(folder: Path, task: Task) -> tuple[list[str], int]:
    """Refuses a capture of something else than a task.

    Returns:
        Notes, what it lacks and other versions of PyTorch; and how many blocks it lacks.

    Raises:
        ArtefactForeignError: It was made for another model, setting, dtype, checkpoint, or version of an upstream.
    """
    text, _ = _read(folder)
    own = _identity(task)
    for name, theirs, ours in _differences(text, own):
        fact = f"It was captured for {name} {theirs!r}, and this verification has {ours!r}"
        remedy = f"Verify with what it was captured for, or capture again: {MADE_BY}"
        raise ArtefactForeignError(str(folder / NAME), fact, remedy, name=name)
    notes = [f"the capture lacks {_summed(text['left_out'])}"] if text["left_out"] else []
    theirs, ours = (each["versions"].get("torch") for each in (text, own))
    notes += [] if theirs == ours else [f"the capture is of torch {theirs}, and this machine has {ours}"]
    return notes, len(text["left_out"])


def _differences(text: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the fields in which a capture and a verification differ: their names, the capture's value, the other's."""
    if text["model"] != own["model"]:
        yield "model", text["model"], own["model"]
    for kind, prefix in (("settings", ""), ("dtypes", "dtype of "), ("checkpoint", "checkpoint "), ("versions", "")):
        theirs, ours = text[kind], own[kind]
        for name in [*theirs, *(name for name in ours if name not in theirs)]:
            if theirs.get(name) != ours.get(name) and name != "torch":
                yield f"{prefix}{name}", theirs.get(name), ours.get(name)
