"""What `torchport verify` says of ports with a planted fault: whether it notices it, and names it in its first line.

    python benchmarks/verify_planted.py [--kinds fault,new] [--models hunyuan,wan] [--only REGEX] [--rows FILE]

Each fault of `tests/fakes/faults.py` is a pack. All verifications are in this process, on the cards' demos with their
tiny weights; the original is recorded once for each card. The table has a line for each fault: the verdict, whether
module and patch stand in the first line, and processor seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.fakes import faults  # noqa: E402
from tests.fakes.verifying import small, verifying  # noqa: E402

KINDS = {
    "fault": [*faults.HUNYUAN_FAULTS, *faults.COGVIDEOX_FAULTS, *faults.WAN_FAULTS],
    "decoder": [faults.DECODER_FAULT, *faults.WAN_DECODER_FAULTS],
    "new": faults.NEW_FAULTS,
    "new decoder": faults.NEW_DECODER_FAULTS,
    "harmless": [*faults.UNSEEN, *faults.HARMLESS],
}


def main() -> None:
    """Runs the faults that were asked for, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", type=lambda text: text.split(","))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--only", type=re.compile, help="names of faults that match this")
    parser.add_argument("--rows", type=Path, help="a file that gets a line of JSON for each run")
    arguments = parser.parse_args()
    chosen = []
    for kind in arguments.kinds:
        for fault in KINDS[kind]:
            if arguments.models and fault.model not in arguments.models:
                continue
            if arguments.only is None or arguments.only.search(fault.name):
                chosen.append((kind, fault))
    rows = []
    with tempfile.TemporaryDirectory() as folder, verifying(Path(folder)) as verify:
        for kind, fault in chosen:
            rows.append(row_of(verify, kind, fault))
            print(line_of(rows[-1]), flush=True)
            if arguments.rows:
                with arguments.rows.open("a") as file:
                    file.write(f"{json.dumps(rows[-1])}\n")
    print(summary(rows))


def row_of(verify: Callable[..., Any], kind: str, fault: Any) -> dict[str, Any]:
    """Returns what a verification says of a port with a fault."""
    before = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        found = verify(small(ROOT, fault.model, fault, Path(folder, "pack")), decodes="decoder" in kind)
    seconds = round(time.process_time() - before)
    line = found.first_line
    is_named = bool(re.search(fault.names, line)) and fault.patch in line
    fields = {"kind": kind, "model": fault.model, "fault": fault.name, "noticed": found.exit_code == 1}
    return {**fields, "named": is_named, "seconds": seconds, "first_line": line}


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
