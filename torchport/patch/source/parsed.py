"""What the Python file of a patch says about the function that an entry names. Nothing of it is run."""

from __future__ import annotations

import ast
from typing import Any

from torchport.patch.declared.entry import Entry
from torchport.patch.declared.replacement import file_of, no_such_name
from torchport.patch.source.checks import UNKNOWN
from torchport.source.bindings import binding_at, definitions
from torchport.source.parameters import written_signature
from torchport.source.parsing import tree_of


def parsed(entry: Entry, reference: str) -> Any:
    """Returns what stands for the function or class that a `file.py:name` names.

    Returns:
        A class for a class; a function that has the written signature for a function; UNKNOWN where the file does not
        say what it is: an assignment, an import, a decorator that may change the signature.

    Raises:
        ReplacementError: The file is missing, or has no such name.
        UnreadableError: It is not Python.
    """
    path, name = file_of(entry, reference), reference.partition(":")[2]
    tree = tree_of(path)
    binding = binding_at(tree, (name,))
    node = binding.node
    if node is None and not binding.open:
        known = [one.name for one in definitions(tree.body) if not one.name.startswith("_")]
        raise no_such_name(entry, path, name, known)
    if isinstance(node, ast.ClassDef):
        return type(name, (), {})
    signature = written_signature(node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    if signature is None:
        return UNKNOWN

    def stand_in() -> None:
        raise AssertionError("it is only looked at")

    stand_in.__signature__ = signature  # type: ignore[attr-defined]  # `inspect.signature` returns it
    return stand_in
