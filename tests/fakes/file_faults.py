"""Runs a small job once for each of its file events, with that event failing, and then the same job undisturbed.

A program of its own, started with `file_events.so` preloaded: `python file_faults.py LIBRARY FOLDER SOURCES ERROR...`.
An error is a name of `errno`, or KILL; `EIO:7` tries every seventh event. It prints one JSON object: counts by outcome,
and everything that was wrong.

One process imports everything; each case runs in a fork of it, so that a case takes a second and not twenty.
"""

import collections
import ctypes
import dataclasses
import errno
import functools
import gc
import json
import os
import shutil
import sys
import traceback
from pathlib import Path

import torch

from torchport import save
from torchport.errors import TorchportError
from torchport.files import atomic
from torchport.run import resume
from torchport.run.path import run
from torchport.task import Request

STEPS = 3
SMALL = ("height=64", "width=64", "frames=5", f"steps={STEPS}", "save_every=1")


@dataclasses.dataclass
class Outcome:
    """What became of one run.

    Attributes:
        end: finished, refused, traceback or killed.
        text: Of the refusal, or the traceback.
        saved: Steps whose latents were on the disk when it ended.
        steps: Steps that it took.
        events: Its file events.
    """

    end: str = "killed"
    text: str = ""
    saved: int = 0
    steps: int = 0
    events: int = 0


def job(folder, root):
    """The demo at its smallest size."""
    return Request(
        "hunyuan", "configs/demo.yaml", "A cat", out=folder, backend="original", overrides=SMALL, paths=(str(root),)
    )


def forked(library, request, report, number=-1, error=0):
    """Runs a request in a fork whose file event of this number fails, or kills it; returns the outcome."""
    report.unlink(missing_ok=True)
    progress = report.with_suffix(".saved")
    progress.write_text("0")
    child = os.fork()
    if child == 0:
        _run(library, request, report, progress, number, error)
        os._exit(0)
    os.waitpid(child, 0)
    outcome = Outcome(**json.loads(report.read_text())) if report.exists() else Outcome()
    return dataclasses.replace(outcome, saved=int(progress.read_text()))


def _run(library, request, report, progress, number, error):
    save_latents = resume.Unfinished.save

    def noted(self, number, state, facts):
        save_latents(self, number, state, facts)
        progress.write_text(str(number))

    resume.Unfinished.save = noted
    outcome = Outcome()
    library.file_events_arm(os.fsencode(str(request.out.parent)), number, error)
    try:
        outcome.end, outcome.steps = "finished", run(request).steps
    except TorchportError as refusal:
        outcome.end, outcome.text = "refused", f"[{refusal.id}] {refusal}"
    except BaseException:  # noqa: BLE001 - whatever comes out here is what this looks for
        outcome.end, outcome.text = "traceback", traceback.format_exc()
    outcome.events = library.file_events_count()
    library.file_events_arm(b"", -1, 0)
    report.write_text(json.dumps(dataclasses.asdict(outcome)))


def bits(folder):
    """Checksums of everything that a run leaves, all of it read back."""
    tensors = {}
    for stage in ("encode", "denoise", "decode"):
        manifest = save.read_manifest(save.file_of(folder, stage))
        save.read(folder, stage, {}, {}, "")
        tensors[stage] = manifest.sha256
    pictures = {name: (folder / name).read_bytes().hex()[:64] for name in (save.VIDEO, save.CONTACT_SHEET)}
    return {**tensors, **pictures, "files": sorted(file.name for file in folder.iterdir())}


def wrong(first, again, folder, expected):
    """Returns what is wrong with a disturbed run and the undisturbed one after it, as text; empty if nothing is."""
    if first.end == "traceback":
        return f"a traceback: {first.text[-600:]}"
    if first.text.startswith("[TP604]") and first.saved and "then goes on after" not in first.text:
        return f"the refusal says nothing of a rerun: {first.text}"
    if again.end != "finished":
        return f"the rerun {again.end}: {again.text[-600:]}"
    if first.end != "finished" and again.steps > STEPS - first.saved:
        return f"{first.saved} steps were saved, and the rerun took {again.steps} of {STEPS}"
    found = bits(folder)
    return "" if found == expected else f"other bits: {found} and not {expected}"


def main(library, folder, root, errors):
    """Tries every event with every error."""
    torch.set_num_threads(1)  # a fork has no other threads
    library, folder = ctypes.CDLL(library), Path(folder)
    report, out = folder / "report.json", folder / "runs" / "out"
    make = functools.partial(job, out, root)
    run(dataclasses.replace(make(), out=folder / "first"))
    out.parent.mkdir()
    gc.freeze()  # a collection in a fork would copy all of this process's memory
    whole = forked(library, make(), report)
    assert whole.end == "finished", whole.text
    expected = bits(out)
    counts, complaints = collections.Counter(events=whole.events), []
    for name in errors:
        name, _, stride = name.partition(":")
        for number in range(1, whole.events + 1, int(stride or 1)):
            shutil.rmtree(out, ignore_errors=True)
            first = forked(library, make(), report, number, 0 if name == "KILL" else getattr(errno, name))
            again = forked(library, make(), report)
            counts[f"{name} {first.end}"] += 1
            complaint = wrong(first, again, out, expected)
            sys.stderr.write(f"{name} {number}/{whole.events} {first.end} {complaint}\n")
            if complaint:
                complaints.append(f"{name} at event {number}: {complaint}")
            elif any(out.glob(f"{atomic.TEMPORARY}*")):
                complaints.append(f"{name} at event {number}: a half-written file is left")
    sys.stdout.write(json.dumps({"counts": counts, "complaints": complaints}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
