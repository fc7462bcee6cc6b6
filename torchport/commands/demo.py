"""A card's demo, run by `torchport check --model`: which patches its stages had to call, and did not."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchport import patch, progress
from torchport.commands.findings import Finding, Report, of_error
from torchport.config.card import STAGES, Card
from torchport.config.pack import Pack
from torchport.errors import NotCalledError, PatchError, TorchportError
from torchport.processes import child


def not_called_by(pack: Pack, model: str, upstream_path: str | None) -> Report:
    """Runs a card's tiny weights down the path in a fresh process; returns the patches that were not called.

    Args:
        pack: Where the card lies.
        model: The card's name.
        upstream_path: Where the upstream stands, if it is not installed.
    """
    from PIL import Image

    from torchport.stages.family import ALWAYS
    from torchport.task import Request
    from torchport.task.family import family

    card, document = pack.card(model)
    paths = tuple(str(layer.root) for layer in pack.layers() if layer.chosen)
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "out")
        options: dict[str, Any] = {"prompt": card.tiny.prompt, "cache": False}
        if family(pack, card, document).TAKES_IMAGE == ALWAYS:
            options["image"] = Path(name, "image.png")
            Image.linear_gradient("L").save(options["image"])
        request = Request(model, pack.demo(card), out=out, paths=paths, upstream_path=upstream_path, **options)
        try:
            with progress.waiting(f"run {model}'s demo"):
                child.call("torchport.run.path:run", request, ended=lambda end: _demo_ended(card, end))
        except TorchportError as error:
            return Report([of_error(error, "called")])
        report = Report()
        for stage in STAGES:
            names = card.patch_names(stage, {})
            if not names:
                continue
            rows = json.loads((out / f"{stage}.json").read_text(encoding="utf-8"))["patches"]
            report.extend(not_called(rows, patch.read(pack.folders, names, pack.home(model).patches), stage))
        return report


def _demo_ended(card: Card, end: child.Ended) -> PatchError:
    remedy = f'Run it: torchport run --model {card.model} --config {card.demo} --prompt "..."'
    return PatchError(f"--model {card.model}", f"The process of its demo {end}", remedy)


def not_called(rows: Iterable[Mapping[str, Any]], entries: Iterable[patch.Entry], stage: str) -> Report:
    """Returns a finding for each patch that must be called in a stage and, by a manifest's rows, was not."""
    calls = {row["id"]: row for row in rows}
    report = Report()
    for entry in entries:
        row = calls.get(entry.id)
        if stage not in entry.must_be_called or (row is not None and row["state"] == "not needed"):
            continue
        report.try_entry(entry, "called")
        if not (row and row["calls"]):
            state = row["state"] if row else "not in the ledger"
            text = f"'{entry.id}' was not called in {stage} (it is {state}). Find what is called instead"
            text = f"{text} of {entry.target}."
            report.findings.append(Finding(NotCalledError.id, entry.place, text, entry.id, "called"))
    return report
