"""Whether the demo draws what its prompts say: 48 prompts that training has seen, and 12 combinations that it has not.

    python benchmarks/demo_pictures.py [--model hunyuan] [--out DIR] [--prompts 48] [--only torchax-bfloat16]

Original and port, each in float32 and in bfloat16, judged from the frames alone. A row is printed when it is ready, and
a run that was stopped goes on from DIR.
"""

import argparse
import dataclasses
from pathlib import Path

import drawing
from scenes.scene import DIRECTIONS, scenes

KINDS = [f"{backend}-{dtype}" for backend in ("original", "torchax") for dtype in ("float32", "bfloat16")]


def measure(model: str, kind: str, prompts: int, out: Path) -> list[str]:
    """Prints one row of the table; returns what is wrong."""
    backend, dtype = kind.split("-")
    request = dataclasses.replace(drawing.DEMOS[model], backend=backend, overrides=(f"dtypes.transformer={dtype}",))
    known, new = drawing.trained(prompts), drawing.held_out()
    frames = drawing.drawn(request, [scene.prompt for scene in [*known, *new]], out / model / kind)
    first, wrong = drawing.score(frames[: len(known)], known)
    second, wrong_new = drawing.score(frames[len(known) :], new)
    print(f"{backend:10}{dtype:10}{first:4} of {len(known)}{second:8} of {len(new)}", flush=True)
    return [*wrong, *wrong_new]


def contact_sheet(model: str, out: Path, file: Path) -> None:
    """Writes the README's picture: four scenes of the first kind that is there."""
    wanted = [
        ("disc", "red", "right"),
        ("square", "green", "left"),
        ("triangle", "yellow", "up"),
        ("disc", "blue", "down"),
    ]
    asked = [scene for scene in scenes() if (scene.shape, scene.colour, scene.direction) in wanted]
    asked = sorted(
        (scene for scene in asked if scene.background == "black"), key=lambda s: list(DIRECTIONS).index(s.direction)
    )
    frames = drawing.drawn(drawing.DEMOS[model], [scene.prompt for scene in asked], out / model / "sheet")
    drawing.strip([frames[:2], frames[2:]], file)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(drawing.DEMOS), default="hunyuan")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo-pictures"), help="where runs are kept")
    parser.add_argument("--prompts", type=int, default=48, help="how many of the scenes that training has seen")
    parser.add_argument("--only", choices=KINDS, action="append", help="a row; all by default")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="write the picture of the README, and no table")
    arguments = parser.parse_args()
    if arguments.sheet:
        contact_sheet(arguments.model, arguments.out, arguments.sheet)
        return
    print(f"{'backend':10}{'dtype':10}{'trained':>10}{'held out':>14}", flush=True)
    wrong = {kind: measure(arguments.model, kind, arguments.prompts, arguments.out) for kind in arguments.only or KINDS}
    for kind, lines in wrong.items():
        print("".join(f"\n{kind}: {line}" for line in lines), end="")
    print()


if __name__ == "__main__":
    main()
