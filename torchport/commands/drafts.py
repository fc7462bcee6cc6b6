"""What nobody has filled in yet of what `torchport new` and `scan --emit` write. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torchport.errors import ReplacementError
from torchport.files.folder import as_named
from torchport.patch import Entry

_MARK = "fill in "
"""What the exception of a drafted function begins with."""
_WORDS = "say here "
"""What a drafted text of an entry begins with."""


def of_entry(entry: Entry, tree: ast.Module | None) -> Iterator[ReplacementError]:
    """Yields the refusal of an entry that is a draft.

    Args:
        entry: The entry.
        tree: The file that its function is in; None for one without.
    """
    promise = entry.equivalence.written()
    reason = next(iter(promise.values())) if isinstance(promise, dict) else ""
    texts = {"why": entry.why, "equivalence": reason, "scope_reason": entry.scope_reason}
    open_ = [key for key, text in texts.items() if str(text).startswith(_WORDS)]
    name = (entry.reference or "").partition(":")[2]
    open_ += [f"{name} in {(entry.reference or '').partition(':')[0]}"] if tree and name in _unwritten(tree) else []
    if open_:
        fact = f"'{entry.id}' is a draft: {', '.join(open_)} {'is' if len(open_) == 1 else 'are'} not filled in"
        yield ReplacementError(entry.place, fact, "Fill it in" if len(open_) == 1 else "Fill them in", patch=entry.id)


def of_family(file: Path, tree: ast.Module, place: str) -> Iterator[ReplacementError]:
    """Yields the refusal of a family whose functions are drafts.

    Args:
        file: Its file.
        tree: The file's syntax.
        place: Where a card names it.
    """
    names = sorted(_unwritten(tree))
    if names:
        yield ReplacementError(place, f"'{as_named(file)}' is a draft: {', '.join(names)}", "Fill them in")


def _unwritten(tree: ast.Module) -> set[str]:
    """Returns the functions and classes at the top of a file that raise what a draft raises."""
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and any(map(_is_mark, ast.walk(node)))
    }


def _is_mark(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "NotImplementedError" or not node.args:
        return False
    text = node.args[0]
    return isinstance(text, ast.Constant) and str(text.value).startswith(_MARK)
