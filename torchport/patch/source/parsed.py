"""What the Python file of a patch says about the function that an entry names. Nothing of it is run."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchport.errors import TorchportError
from torchport.files import folder
from torchport.patch.declared.entry import Entry
from torchport.patch.declared.replacement import does_not_load, file_of, no_such_name
from torchport.patch.source.checks import UNKNOWN
from torchport.patch.source.signature import written_signature
from torchport.patch.source.source import at_import, binding_at


def parsed(entry: Entry, reference: str) -> Any:
    """Returns what stands for the function or class that a `file.py:name` names.

    Returns:
        A class for a class; a function that has the written signature for a function; UNKNOWN where the file does not
        say what it is: an assignment, an import, a decorator that may change the signature.

    Raises:
        ReplacementError: The file is missing, is not Python, or has no such name.
    """
    path, name = file_of(entry, reference), reference.partition(":")[2]
    tree = tree_of(path, lambda error: does_not_load(entry, path, error))
    binding = binding_at(tree, (name,))
    node = binding.node
    if node is None and not binding.open:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        defined = [one.name for one in at_import(tree.body) if isinstance(one, kinds)]
        raise no_such_name(entry, path, name, [other for other in defined if not other.startswith("_")])
    if isinstance(node, ast.ClassDef):
        return type(name, (), {})
    signature = written_signature(node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    if signature is None:
        return UNKNOWN

    def stand_in() -> None:
        raise AssertionError("it is only looked at")

    stand_in.__signature__ = signature  # type: ignore[attr-defined]  # `inspect.signature` returns it
    return stand_in


def tree_of(path: Path, refusal: Callable[[Exception], TorchportError]) -> ast.Module:
    """Returns the syntax tree of a Python file.

    Args:
        path: The file.
        refusal: Returns the error for a file that cannot be read or is not Python.
    """
    try:
        return _tree(path, path.stat().st_mtime_ns)
    except (OSError, SyntaxError, ValueError) as error:  # bytes that are no UTF-8 are a ValueError
        raise refusal(error) from error


@functools.cache
def _tree(path: Path, mtime_ns: int) -> ast.Module:
    return ast.parse(folder.text(path))
