"""False alarms of `torchport verify`: clean ports of every card, in both dtypes, under every strategy, with many seeds.

    python benchmarks/verify_clean.py [--rows FILE] [--models hunyuan,wan] [--dtypes float32] [--strategies tp]
                                      [--seeds 10] [--first 0] [--most N] [--table]

Each run is a verification of the card's demo with its tiny weights, all in this process, and appends a line of JSON to
the file of rows. Runs that the file has are not made again, so that a stopped benchmark goes on. The table has a row
for each card, dtype and strategy: how many runs, how many of them did not say "the same ...", and the greatest ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from PIL import Image  # noqa: E402

from tests.fakes.verifying import verifying  # noqa: E402
from torchport.config.pack import Pack, find_pack  # noqa: E402
from torchport.task import Request  # noqa: E402

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: a card's demo in a dtype, under a strategy, with a seed."""

    model: str
    dtype: str
    strategy: str
    seed: int

    @property
    def key(self) -> str:
        """Its name in the file of rows."""
        return f"{self.model} {self.dtype} {self.strategy} {self.seed}"

    def request(self, pack: Pack, upstream_path: str | None) -> Request:
        """Returns the request of its port."""
        card, _ = pack.card(self.model)
        networks = [name for name in card.strategies[self.strategy].weights if name != "vae"]
        image = None
        if card.call is not None and card.call.image is not None:
            image = Path(tempfile.gettempdir(), "verify_clean.png")
            Image.linear_gradient("L").save(image)
        return Request(
            self.model,
            str(card.demo),
            prompt=card.tiny.prompt,
            seed=self.seed,
            overrides=(f"strategy={self.strategy}", *(f"dtypes.{name}={self.dtype}" for name in networks)),
            paths=(str(ROOT),),
            image=image,
            upstream_path=upstream_path if card.checkout is not None else None,
            cache=False,
        )


def runs(pack: Pack, arguments: argparse.Namespace) -> Iterator[Run]:
    """Yields the runs that the arguments name: every card with its first seed before the next seed."""
    for seed in range(arguments.first, arguments.seeds):
        for model in arguments.models or pack.models():
            card, _ = pack.card(model)
            for strategy in arguments.strategies or card.strategies:
                for dtype in arguments.dtypes or DTYPES:
                    if strategy in card.strategies and (card.checkout is None or arguments.upstream_path):
                        yield Run(model, dtype, strategy, seed)


def row_of(verify: Callable[..., Any], run: Run, request: Request) -> dict[str, Any]:
    """Returns what a run said."""
    before = time.process_time()
    found = verify(request)
    units = [unit for unit in found.units if not unit.is_harmless]
    ratios = {
        "network": max((unit.ratio for unit in units if unit.kind == "network"), default=None),
        "unit": max((unit.ratio for unit in units if unit.kind != "network"), default=None),
    }
    row = {"key": run.key, **dataclasses.asdict(run), "seconds": round(time.process_time() - before, 1)}
    return {**row, "verdict": found.verdict_words, "line": found.first_line, "ratios": ratios}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the table: a row for each card, dtype and strategy."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["dtype"], row["strategy"]), []).append(row)
    lines = [
        "| card | dtype | strategy | runs | not the same | network's ratio | unit's ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, group in sorted(groups.items()):
        alarms = sum(not row["verdict"].startswith("the same ") for row in group)
        ratios = [row["ratios"] for row in group if "ratios" in row]
        worst = [max((each[kind] or 0 for each in ratios), default=0) for kind in ("network", "unit")]
        lines.append(f"| {' | '.join(key)} | {len(group)} | {alarms} | {worst[0]:.2f} | {worst[1]:.2f} |")
    return lines


def main() -> None:
    """Makes the runs that are left, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=Path("verify_clean.jsonl"))
    for name in ("models", "dtypes", "strategies"):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","))
    parser.add_argument("--seeds", type=int, default=10, help="The first seed that is not run any more.")
    parser.add_argument("--first", type=int, default=0, help="The first that is.")
    parser.add_argument("--most", type=int, help="Runs that are made at most.")
    parser.add_argument("--table", action="store_true", help="Print the table alone.")
    parser.add_argument("--upstream-path", help="A checkout, for cards whose upstream pip cannot install.")
    arguments = parser.parse_args()
    pack = find_pack((str(ROOT),))
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()] if arguments.rows.exists() else []
    known = {row["key"] for row in rows}
    left = [] if arguments.table else [run for run in runs(pack, arguments) if run.key not in known]
    with tempfile.TemporaryDirectory() as folder, verifying(Path(folder)) as verify:
        for run in left[: arguments.most]:
            row = row_of(verify, run, run.request(pack, arguments.upstream_path))
            rows.append(row)
            with arguments.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{run.key}: {row['verdict']}, {row['seconds']} s", flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
