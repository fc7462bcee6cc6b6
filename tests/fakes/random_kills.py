"""Kills a job of 20 steps at random moments, disturbs what the same command finds then, and lets it finish.

A program of its own, with `file_events.so` preloaded: `python random_kills.py LIBRARY FOLDER SOURCES POINTS SEED`. It
prints one JSON object: where the kills fell, what the disturbed runs said, and everything that was wrong.

As in `file_faults`, one process imports everything, and each run is a fork of it.
"""

import collections
import ctypes
import dataclasses
import errno
import functools
import gc
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import file_faults
import torch
from file_faults import bits, forked

from torchport.files import atomic
from torchport.run.journey import Journey
from torchport.run.path import run
from torchport.run.resume import UNFINISHED

STEPS = 20
SETS = ("height=64", "width=64", "frames=5", f"steps={STEPS}", "save_every=2")
DISTURBANCES = ("none", "full disk", "read-only folder", "truncated file")
OVERRIDE = 0b110
"""The capabilities by which root ignores a file's mode: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


def job(folder, root):
    """The demo at its smallest size, with 20 steps."""
    return dataclasses.replace(file_faults.job(folder, root), overrides=SETS)


def announced(request, report, library):
    """Begins a run in a fork; returns the fork and the pipe in which it names each stage as that begins."""
    reading, writing = os.pipe()
    report.unlink(missing_ok=True)
    report.with_suffix(".saved").write_text("0")
    child = os.fork()
    if child == 0:
        os.close(reading)
        read = Journey.read

        def naming(self, stage):
            os.write(writing, f"{stage.name}\n".encode())
            return read(self, stage)

        Journey.read = naming
        file_faults._run(library, request, report, report.with_suffix(".saved"), -1, 0)
        os._exit(0)
    os.close(writing)
    return child, reading


def next_stage(reading):
    """Returns the next stage that a fork begins; nothing at its end."""
    name = b""
    while (byte := os.read(reading, 1)) not in (b"", b"\n"):
        name += byte
    return name.decode()


def spans_of(request, report, library):
    """Returns the seconds of each stage of an undisturbed run; the last has what is written at the end, too."""
    child, reading = announced(request, report, library)
    begun = {}
    while name := next_stage(reading):
        begun[name] = time.monotonic()
    os.waitpid(child, 0)
    os.close(reading)
    moments = [*begun.values(), time.monotonic()]
    return {name: moments[n + 1] - moments[n] for n, name in enumerate(begun)}


def killed(request, report, library, stage, delay):
    """Kills a run some seconds after a stage began; returns the stage in which it died, nothing if it was over."""
    child, reading = announced(request, report, library)
    last = ""
    while last != stage and (name := next_stage(reading)):
        last = name
    end = time.monotonic() + delay
    while (left := end - time.monotonic()) > 0 and select.select([reading], [], [], left)[0]:
        name = next_stage(reading)
        if not name:
            break
        last = name
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reading)
    # A process that ends has finished its run: its manifest is there, and the run is not unfinished any more.
    is_over = (request.out / "manifest.json").is_file() and not (request.out / UNFINISHED).is_file()
    return last if os.WIFSIGNALED(status) and not is_over else ""


def obey_modes(libc):
    """Takes from this process root's right to write where a folder's mode forbids it."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    if libc.capget(header, data) == 0:
        data[0] &= ~OVERRIDE
        libc.capset(header, data)


def in_read_only_folder(request, report, library):
    """Runs a request in a fork that may not write to its folder; returns the outcome."""
    mode = request.out.stat().st_mode
    request.out.chmod(0o555)
    child = os.fork()
    if child == 0:
        obey_modes(ctypes.CDLL(None, use_errno=True))
        os._exit(0 if forked(library, request, report).end == "refused" else 1)
    os.waitpid(child, 0)
    request.out.chmod(mode)
    return file_faults.Outcome(**json.loads(report.read_text())) if report.exists() else file_faults.Outcome()


def after_truncation(request, report, library, draw):
    """Truncates one of the files, runs, and removes the file if the run refuses it, as the error says."""
    files = sorted(file for file in request.out.iterdir() if file.is_file() and file.stat().st_size)
    if not files:
        return file_faults.Outcome("nothing to truncate")
    file = draw.choice(files)
    os.truncate(file, draw.randrange(file.stat().st_size))
    outcome = forked(library, request, report)
    if outcome.end == "refused":
        named = re.search(r"[\w.-]+\.(safetensors|json)", outcome.text.replace(str(request.out), ""))
        (request.out / (named[0] if named else file.name)).unlink(missing_ok=True)
    return dataclasses.replace(outcome, text=f"{file.name}: {outcome.text}")


def disturbed(kind, request, report, library, draw, events):
    """Runs a request that is disturbed in one of the ways; returns the outcome, None where nothing is run."""
    if kind == "full disk":
        return forked(library, request, report, draw.randrange(1, events), errno.ENOSPC)
    if kind == "read-only folder":
        request.out.mkdir(exist_ok=True)
        return in_read_only_folder(request, report, library)
    return after_truncation(request, report, library, draw) if kind == "truncated file" else None


def wrong(kind, saved, middle, again, out, expected):
    """Returns what is wrong after one point, as text; empty if nothing is."""
    if middle is not None and middle.end in ("traceback", "killed"):
        return f"the disturbed run ended in a {middle.end}: {middle.text[-600:]}"
    if kind == "read-only folder" and not middle.text.startswith("[TP604]"):
        return f"a read-only folder was not refused: {middle.end} {middle.text}"
    if again.end != "finished":
        return f"the rerun {again.end}: {again.text[-600:]}"
    if kind in ("none", "read-only folder") and again.steps > STEPS - saved:
        return f"{saved} steps were saved, and the rerun took {again.steps} of {STEPS}"
    if any(out.glob(f"{atomic.TEMPORARY}*")):
        return "a half-written file is left"
    found = bits(out)
    return "" if found == expected else f"other bits: {found} and not {expected}"


def main(library, folder, root, points, seed):
    """Kills at every point."""
    torch.set_num_threads(1)  # a fork has no other threads
    library, folder, draw = ctypes.CDLL(library), Path(folder), random.Random(int(seed))
    report, out = folder / "report.json", folder / "runs" / "out"
    make = functools.partial(job, out, root)
    run(dataclasses.replace(make(), out=folder / "first"))
    out.parent.mkdir()
    gc.freeze()  # a collection in a fork would copy all of this process's memory
    spans = spans_of(make(), report, library)
    events = json.loads(report.read_text())["events"]
    expected, counts, complaints = bits(out), collections.Counter(), []
    for point in range(int(points)):
        stage, kind = list(spans)[point % len(spans)], DISTURBANCES[point // len(spans) % len(DISTURBANCES)]
        delay, died = draw.uniform(0, spans[stage]), ""
        while not died:
            shutil.rmtree(out, ignore_errors=True)
            died, delay = killed(make(), report, library, stage, delay), delay / 2
        saved = int(report.with_suffix(".saved").read_text())
        middle = disturbed(kind, make(), report, library, draw, events)
        again = forked(library, make(), report)
        complaint = wrong(kind, saved, middle, again, out, expected)
        counts[f"killed in {died}"] += 1
        counts[f"{kind}: {'' if middle is None else middle.end}"] += 1
        sys.stderr.write(f"{point}: {died}, {saved} saved; {kind} {middle and middle.text[:200]} {complaint}\n")
        complaints += [f"point {point}, {died}, {kind}: {complaint}"] if complaint else []
    sys.stdout.write(json.dumps({"counts": counts, "complaints": complaints}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:6])
