"""What the light commands cost beside `torchport --help`: processor seconds of a whole process, and their ratios.

    python benchmarks/startup.py [--repeat N]

The aim: `explain`, `models` and `patches list` take at most three times as long as `--help`, which imports click alone.
The commands take turns, so that a machine that grows busy slows all of them alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

COMMANDS = ("--help", "explain TP107", "models", "patches list")


def processor_seconds(words: list[str], environment: dict[str, str]) -> float:
    """Returns the user's and the system's seconds of one `torchport` process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torchport", *words], env=environment, stdout=subprocess.DEVNULL, text=True
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"torchport {' '.join(words)} ended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def medians(repeat: int) -> dict[str, float]:
    """Returns each command's median, all of them with their bytecode written."""
    seconds: dict[str, list[float]] = {command: [] for command in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for turn in range(repeat + 1):
            for command in COMMANDS:
                once = processor_seconds(command.split(), environment)
                if turn:  # the first one writes the bytecode
                    seconds[command].append(once)
    return {command: statistics.median(times) for command, times in seconds.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15, metavar="N", help="processes for each median [15]")
    table = medians(parser.parse_args().repeat)
    print(f"{'torchport':16} {'processor s':>11} {'of --help':>10}")
    for command, seconds in table.items():
        print(f"{command:16} {seconds:11.3f} {seconds / table['--help']:10.2f}")


if __name__ == "__main__":
    main()
