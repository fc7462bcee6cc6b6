"""How well `torchport scan` finds what two codebases hold that does not port, and how fast it reads.

    git clone https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5 A; git clone https://github.com/genmoai/mochi B
    python benchmarks/scan.py --checkout hyvideo=A --checkout mochi=B [--misses] [--tree DIR]

`scan_labels.yaml` lists by hand, for each function, the kinds of finding in it and what leads there; it was written
before the scanner. Precision is the part of what is found that is listed, recall the part of what is listed that is
found. "On the path" counts only what the entry leads to: found as such, listed as such. The speed is that of the
command in a process of its own, over diffusers as installed, with an entry and without, or over each --tree: seconds
of processor time, the most memory, and the seconds until its first line. The aims: 0.9 each, and 10 s and 300 MB for
600,000 lines.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from torchport.config.pack import find_pack
from torchport.porting.scan import scanning as scan

Labels = dict[tuple[str, str, str], str]
"""The reach of each finding, by file, function and kind."""


def listed(labels: dict[str, Any]) -> Labels:
    """Returns the labels of one codebase."""
    return {
        (file, name, kind): reach
        for file, functions in labels.items()
        for name, kinds in functions.items()
        for kind, reach in kinds.items()
    }


def found(report: scan.ScanReport, root: Path) -> Labels:
    """Returns what a scan finds, as labels: an alias under the name that is held."""
    result: Labels = {}
    for one in report.findings:
        file = Path(one.file).absolute().relative_to(root.absolute()).as_posix()
        name = one.text if one.kind == "alias" else one.name
        key = (file, name, one.kind)
        result[key] = "path" if one.reach == "path" or result.get(key) == "path" else one.reach
    return result


def agreement(wanted: set[Any], got: set[Any]) -> str:
    """Returns precision and recall, in words."""
    both = len(wanted & got)
    return f"precision {both / len(got):.2f}, recall {both / len(wanted):.2f} ({len(got)} found, {len(wanted)} listed)"


def compare(name: str, root: Path, labels: dict[str, Any], misses: bool) -> None:
    """Prints how a scan of one codebase agrees with its labels."""
    start = time.process_time()
    report = scan.scan(root, [labels["entry"]], find_pack(()).folders)
    seconds = time.process_time() - start
    wanted, got = listed(labels["labels"]), found(report, root)
    on_path = [{key for key, reach in some.items() if reach == "path"} for some in (wanted, got)]
    print(f"{name}: {report.lines} lines in {seconds:.1f} s; {report.count()}")
    print(f"  over all:    {agreement(set(wanted), set(got))}")
    print(f"  on the path: {agreement(*on_path)}")
    if misses:
        for title, one, other in (("not found", wanted, got), ("not listed", got, wanted)):
            for key in sorted(set(one) - set(other)):
                print(f"  {title}: {' '.join(key)} ({one[key]})")
        for key in sorted(set(wanted) & set(got)):
            if (wanted[key] == "path") != (got[key] == "path"):
                print(f"  reach: {' '.join(key)}: listed {wanted[key]}, found {got[key]}")


def speed(tree: Path, entry: str = "") -> None:
    """Prints what a scan of a large tree takes."""
    command = [sys.executable, "-m", "torchport", "scan", str(tree), *(["--entry", entry] if entry else [])]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE)
        assert process.stderr is not None
        process.stderr.readline()
        first = time.perf_counter() - start
        process.stderr.read()
        _, _, used = os.wait4(process.pid, 0)
        out.seek(0)
        count = out.read().decode().splitlines()[-1]
    seconds, size = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    said = f"{seconds:.1f} s of processor time, {size:.0f} MB, first line after {first:.1f} s"
    print(f"{tree.name}{f' --entry {entry}' if entry else ''}: {said}; {count}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", action="append", default=[], metavar="NAME=DIR", help="hyvideo=DIR or mochi=DIR")
    parser.add_argument("--misses", action="store_true", help="print each disagreement")
    parser.add_argument(
        "--tree", action="append", default=[], type=Path, metavar="DIR", help="what to measure speed on"
    )
    arguments = parser.parse_args()
    labels = yaml.safe_load(Path(__file__).with_name("scan_labels.yaml").read_text(encoding="utf-8"))
    for checkout in arguments.checkout:
        name, _, folder = checkout.partition("=")
        compare(name, Path(folder), labels[name], arguments.misses)
    for tree in arguments.tree:
        speed(tree)
    spec = importlib.util.find_spec("diffusers")
    if not arguments.tree and spec and spec.origin:
        for entry in ("", "diffusers:WanPipeline"):
            speed(Path(spec.origin).parent, entry)


if __name__ == "__main__":
    main()
