"""Prints the map of torchport/: its floors from the import contract, a sentence for each from the code.

python tools/map.py            # prints it
python tools/map.py --write    # writes it into CONTRIBUTING.md
"""

from __future__ import annotations

import argparse
import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- map: python tools/map.py --write -->\n", "<!-- end of the map -->\n"


def floors() -> list[list[str]]:
    """Returns the units of each floor, the lowest first, as the contract `floors` has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    [contract] = [one for one in settings["contracts"] if one["id"] == "floors"]
    return [[unit.strip() for unit in layer.split("|")] for layer in reversed(contract["layers"])]


def sentence(file: Path) -> str:
    """Returns the first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    return (text or "").partition("\n")[0]


def rows() -> list[str]:
    """Returns the map as a Markdown table."""
    lines = ["| floor | room | what it is | what lies in it |", "|---|---|---|---|"]
    for number, units in enumerate(floors()):
        for unit in units:
            folder = ROOT / "torchport" / unit
            if folder.is_dir():
                inside = sorted(p.stem if p.suffix else f"{p.name}/" for p in folder.iterdir() if _is_part(p))
                lines.append(f"| {number} | `{unit}/` | {sentence(folder / '__init__.py')} | {' '.join(inside)} |")
            else:
                lines.append(f"| {number} | `{unit}` | {sentence(folder.with_suffix('.py'))} | |")
    return lines


def _is_part(path: Path) -> bool:
    return (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").is_file()


def page() -> str:
    """Returns CONTRIBUTING.md with the map in its place."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    return before + START + "\n".join(rows()) + "\n" + END + after


def main() -> None:
    """Prints the map, or writes it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write it into CONTRIBUTING.md")
    if parser.parse_args().write:
        (ROOT / "CONTRIBUTING.md").write_text(page(), encoding="utf-8")
    else:
        print("\n".join(rows()))


if __name__ == "__main__":
    main()
