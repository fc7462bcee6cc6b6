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


def tree() -> list[str]:
    """Returns the map as a tree: a line for each unit, the highest floor first, and one for each folder inside it."""
    drawn = []
    for number, units in reversed(list(enumerate(floors()))):
        for unit in units:
            drawn += _lines(ROOT / "torchport" / unit, f"{number:>2}  ")
    width = max(len(name) for name, _ in drawn)
    return ["```text", *(f"{name:<{width}}  # {comment}" for name, comment in drawn), "```"]


def _lines(path: Path, margin: str) -> list[tuple[str, str]]:
    """Returns the names and comments of a module, or of a folder and the folders inside it."""
    if not path.is_dir():
        return [(f"{margin}{path.name}.py", sentence(path.with_suffix(".py")))]
    folders = [inner.parent for inner in sorted(path.glob("*/__init__.py"))]
    below = [line for folder in folders for line in _lines(folder, " " * (len(margin) + 2))]
    return [(f"{margin}{path.name}/", sentence(path / "__init__.py")), *below]


def page() -> str:
    """Returns CONTRIBUTING.md with the map in its place."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    return before + START + "\n".join(tree()) + "\n" + END + after


def main() -> None:
    """Prints the map, or writes it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write it into CONTRIBUTING.md")
    if parser.parse_args().write:
        (ROOT / "CONTRIBUTING.md").write_text(page(), encoding="utf-8")
    else:
        print("\n".join(tree()))


if __name__ == "__main__":
    main()
