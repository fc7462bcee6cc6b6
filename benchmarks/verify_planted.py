"""What `torchport verify` says of ports with a planted fault: whether it notices it, and names it in its first line.

    python benchmarks/verify_planted.py [--models hunyuan,wan] [--only REGEX] [--rows FILE]

Each fault of `tests/fakes/faults.py` is a pack; each run is one command on the card's demo with its tiny weights. The
table has a line for each fault: the verdict, whether module and patch stand in the first line, and processor seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.fakes import faults  # noqa: E402

SIZES = ("height=32", "width=48", "frames=9")
PROMPTS = {"hunyuan": 'A cat says "red"'}
"""The second encoder of HunyuanVideo-1.5 reads what is quoted."""
KINDS = {
    "fault": [*faults.HUNYUAN_FAULTS, *faults.COGVIDEOX_FAULTS, *faults.WAN_FAULTS],
    "decoder": [faults.DECODER_FAULT, *faults.WAN_DECODER_FAULTS],
    "harmless": [*faults.UNSEEN, *faults.HARMLESS],
}


def main() -> None:
    """Runs the faults that were asked for, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", type=lambda text: text.split(","))
    parser.add_argument("--only", type=re.compile, help="names of faults that match this")
    parser.add_argument("--rows", type=Path, help="a file that gets a line of JSON for each run")
    arguments = parser.parse_args()
    rows = []
    for kind, planted in KINDS.items():
        for fault in planted:
            if arguments.models and fault.model not in arguments.models:
                continue
            if arguments.only is None or arguments.only.search(fault.name):
                rows.append(row_of(kind, fault))
                print(line_of(rows[-1]), flush=True)
                if arguments.rows:
                    with arguments.rows.open("a") as file:
                        file.write(f"{json.dumps(rows[-1])}\n")
    print(summary(rows))


def row_of(kind: str, fault: Any) -> dict[str, Any]:
    """Returns what a verification says of a port with a fault."""
    config = "configs/demo.yaml" if fault.model == "hunyuan" else f"configs/{fault.model}_demo.yaml"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        pack = fault.pack(ROOT, Path(folder, "pack"))
        words = ["--model", fault.model, "--config", config, "--json", "--path", str(pack)]
        words += [word for size in SIZES for word in ("--set", size)] + ["--decode"] * (kind == "decoder")
        words += ["--prompt", PROMPTS[fault.model]] if fault.model in PROMPTS else []
        command = [sys.executable, "-m", "torchport", "verify", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode not in (0, 1):
        raise SystemExit(f"{fault.model}, {fault.name}:\n{done.stderr}")
    found = json.loads(done.stdout)
    line = found["first_line"]
    is_named = bool(re.search(fault.names, line)) and fault.patch in [cause["patch"] for cause in found["causes"]]
    fields = {"kind": kind, "model": fault.model, "fault": fault.name, "noticed": done.returncode == 1}
    return {**fields, "named": is_named, "seconds": round(seconds), "first_line": line}


def line_of(row: dict[str, Any]) -> str:
    """Returns a line of the table, and the first line of what was not as it should be."""
    is_right = not row["noticed"] if row["kind"] == "harmless" else row["named"]
    noticed = "noticed" if row["noticed"] else "not noticed"
    named = "named" if row["named"] else "not named"
    cells = f"| {row['kind']} | {row['model']} | {row['fault']} | {noticed} | {named} | {row['seconds']} s |"
    return cells if is_right else f"{cells}\n    {row['first_line']}"


def summary(rows: list[dict[str, Any]]) -> str:
    """Returns the counts."""
    real = [row for row in rows if row["kind"] != "harmless"]
    alarms = sum(row["noticed"] for row in rows) - sum(row["noticed"] for row in real)
    counts = f"{sum(row['noticed'] for row in real)} of {len(real)} noticed, {sum(row['named'] for row in real)} named"
    return f"{counts}; {alarms} false alarms in {len(rows) - len(real)}; {sum(row['seconds'] for row in rows)} s"


if __name__ == "__main__":
    main()
