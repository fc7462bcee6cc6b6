"""Counts what torchport/ asks a reader to learn. tests/test_house.py holds the counts: they may only fall.

python tools/house.py            # prints them
python tools/house.py --double   # prints the names that stand for two things
"""

from __future__ import annotations

import argparse
import ast
import collections
import collections.abc
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def counts(package: Path) -> dict[str, int]:
    """Returns the counts of a package, by their names in `[tool.torchport.house]` of pyproject.toml."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(package.rglob("*.py"))}
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    names = [node.name for node in nodes if isinstance(node, DEFINITIONS)]
    lines = [line for text in texts.values() for line in text.splitlines()]
    code = [line for text in texts.values() for line in _code(text)]
    return {
        "lines": len(lines),
        "modules": len(texts),
        "names": len(names),
        "public_names": sum(not name.startswith("_") for name in names),
        "options": sum(_is_option(node) for node in nodes),
        "entries": sum(not path.name.startswith("__pycache__") for path in package.iterdir()),
        "double_classes": len(double_classes(package)),
        "double_files": len(double_files(package)),
        "median_line": int(statistics.median(map(len, code))),
    }


def _code(text: str) -> list[str]:
    """Returns the lines of code: what a docstring gains or loses makes no line of it denser."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    strings = [node for node in nodes if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    words = {number for node in strings for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), 1)
    return [line for number, line in lines if line.strip() and number not in words and line.strip()[0] != "#"]


def _is_option(node: ast.AST) -> bool:
    """Returns whether a node is a call of `click.option`."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "click.option"


def double_classes(package: Path) -> list[str]:
    """Returns the public names that two classes of a package have."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in package.rglob("*.py")]
    return _double(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def double_files(package: Path) -> list[str]:
    """Returns the names that two modules of a package have, `__init__` aside."""
    return _double(file.name for file in package.rglob("*.py") if file.name != "__init__.py")


def _double(names: collections.abc.Iterable[str]) -> list[str]:
    return sorted(name for name, count in collections.Counter(names).items() if count > 1 and name[0] != "_")


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--double", action="store_true")
    package = ROOT / "torchport"
    if parser.parse_args().double:
        print(*double_classes(package), *double_files(package), sep="\n")
        return
    for name, count in counts(package).items():
        print(f"{name} = {count}")


if __name__ == "__main__":
    main()
