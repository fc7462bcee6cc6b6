"""Lock files: what upstream's source was under each target when its patch was reviewed.

A piece of source is hashed without its formatting, comments, docstrings and annotations. The hashes do not depend on
the interpreter: empty fields, which Python versions add and drop, are left out.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Any

from torchport.errors import DriftError, OutputError, TargetError
from torchport.patch.declared import Entry
from torchport.patch.declared.reading import LOCK, Locked, LockRow, read_lock
from torchport.patch.declared.versions import installed
from torchport.patch.source.checks import source_of, statement_of
from torchport.processes import git
from torchport.source import parsing
from torchport.source.bindings import DEFINITIONS, Function, inner_blocks, parameters, signature
from torchport.source.names import bindings, callees, definition, home_of, uses
from torchport.source.parsing import SourceFile, package_folder

_GONE = "gone"


def current_row(entry: Entry) -> LockRow | None:
    """Returns a lock row of the source that an entry's target has now, without versions; None without a source."""
    source, node = source_of(entry), statement_of(entry)
    if source is None or node is None:
        return None
    with parsing.nesting(source.shown, node.lineno):
        written = str(signature(node)).replace("=Ellipsis", "=...") if isinstance(node, Function) else None
        return LockRow(
            signature=written,
            tree=_hash("".join(_plain_text(node)), 16),
            statements=" ".join(part.key for part in parts(node)),
            relies_on={name: key for name, (key, _) in _callees(entry).items()},
        )


def _with_versions(row: LockRow, entry: Entry, revision: Callable[[Path], git.Revision]) -> LockRow:
    """Returns a lock row with upstream's versions, and if a version is unknown with the commit of the checkout."""
    versions = {name: installed(name) for name in sorted(entry.fits)}
    if None in versions.values():
        source = source_of(entry)
        assert source is not None
        checkout = revision(package_folder(source))
        if checkout.commit is not None:
            known = {name: version for name, version in versions.items() if version is not None}
            return row.model_copy(update={"versions": known, "commit": checkout.commit, "dirty": checkout.dirty})
    return row.model_copy(update={"versions": {name: version or "unknown" for name, version in versions.items()}})


def _callees(entry: Entry) -> dict[str, tuple[str, str]]:
    """Returns the definitions that an entry relies on, by `module:path`: the short hash, and in words the place and the
    reason. A replacement relies on all that its target uses, as it does the target's work; but plumbing does not.
    """
    result = {}
    for target in sorted(entry.relies_on):
        place = definition(home_of(target))
        why = "which it relies on"
        result[target] = _hash_in_words(target, *place, why) if place else (_GONE, f", {why},")
    replaced = [entry.target] if entry.kind == "replace" and not entry.plumbing else []
    for name, (source, node, user) in callees([*replaced, *sorted(entry.relies_on)]).items():
        result[name] = _hash_in_words(name, source, node, f"which {user} uses")
    # The target's source is in `LockRow.tree`. Here is only the hash of the definitions that its names lead to.
    result.pop(entry.target, None)
    used = uses(home_of(entry.target)) if replaced else []
    home = source_of(entry)
    statement = statement_of(entry)
    if used and home is not None and statement is not None:
        where = f" ({home.shown}:{statement.lineno}), by what its names lead to,"
        result[entry.target] = _hash("\0".join(used), 8), where
    return result


def _hash_in_words(name: str, source: SourceFile, node: ast.stmt, why: str) -> tuple[str, str]:
    """Returns the short hash of a definition, and in words its place and the reason `why` it counts:
    `("0c41d2aa", " (up/m.py:7), which up.m:g uses,")`. The hash is of all statements that bind the name, and of the
    definitions that the names in these lead to.
    """
    home = home_of(name)
    with parsing.nesting(source.shown, node.lineno):
        nodes = bindings(source, home[1])
        # Of a loop or condition the first line alone counts.
        texts = ["".join(_plain_text(bound, blocks=isinstance(bound, DEFINITIONS))) for bound in nodes]
        key = _hash("\0".join([*texts, *uses(home)]), 8)
    return key, f" ({source.shown}:{node.lineno}), {why},"


def check(entry: Entry) -> str:
    """Returns "locked"; "unlocked" if the lock file has no row of the target; or "no source". Raises DriftError if the
    target's source now is in none of the rows.
    """
    locked = read_lock(entry.folder).get(entry.target)
    if locked is None:
        return "unlocked" if statement_of(entry) else "no source"
    fresh = current_row(entry)
    if fresh is None:
        raise _refusal(entry, locked, "the source is gone")
    if any(_same(row, fresh) for row in locked.rows):
        return "locked"

    def likeness(row: LockRow) -> tuple[float, int]:
        """Returns how much a row is like the source now: the ratio of equal statements, and the equal callees."""
        same = row.relies_on.items() & fresh.relies_on.items()
        return difflib.SequenceMatcher(None, row.statements.split(), fresh.statements.split()).ratio(), len(same)

    row = max(locked.rows, key=likeness)
    raise _refusal(entry, locked, "; ".join(_differences(entry, row, fresh)))


def _same(row: LockRow, fresh: LockRow) -> bool:
    """Returns whether a lock row has the signature, tree and callees of the source now; it may have more callees."""
    relied = fresh.relies_on.items() <= row.relies_on.items()
    return relied and (row.signature, row.tree) == (fresh.signature, fresh.tree)


def _differences(entry: Entry, row: LockRow, fresh: LockRow) -> list[str]:
    """Returns in words what changed between a lock row and upstream now: signature, callees, statements."""
    lines = []
    if row.signature != fresh.signature:
        lines.append(f"its signature was {row.signature}, is {fresh.signature}")
    changed, new, before = [], [], row.relies_on
    for name, (key, words) in _callees(entry).items():
        if name == entry.target and row.tree != fresh.tree:
            continue  # `changes` says what its own statements are now
        if name not in before:
            new.append(f"{name}{words} is new")  # listed last: its caller, which changed, comes before it
        elif before[name] != key:
            changed.append(f"{name}{words} {'is gone' if key == _GONE else 'changed'}")
    lines += _first_four(changed + new)
    source = source_of(entry)
    if row.tree != fresh.tree and source is not None:
        node = source.where(entry.path).node
        lines += _first_four(changes(row.statements.split(), node, source.text) if node is not None else [])
    return lines


def _first_four(lines: list[str]) -> list[str]:
    return lines[:4] + ([f"and {len(lines) - 4} more"] if len(lines) > 4 else [])


def _refusal(entry: Entry, locked: Locked, difference: str) -> DriftError:
    versions = " or ".join(row.seen_at_in_words() for row in locked.rows)
    fact = f"{entry.target} is not what '{entry.id}' was reviewed against ({versions}): {difference}"
    command = f"torchport patches lock {entry.upstream} (with the --path and --upstream-path that are used here)"
    remedy = f"Review the patch, then run: {command}"
    commits = [row.seen_at_in_words() for row in locked.rows if row.seen_at_in_words().startswith("commit ")]
    if commits:
        remedy = f"Check out {commits[-1]}. Or review the patch, and run: {command}"
    return DriftError(entry.place, fact, remedy, patch=entry.id, target=entry.target)


def lock(entries: Sequence[Entry], write: bool = True) -> list[str]:
    """Records upstream's source of today as reviewed: writes the lock file of each folder of `entries`, if `write`. A
    target of which `entries` have no entry is dropped from the file. Returns a line for each target that is new,
    changed or dropped.
    """
    changed: list[str] = []
    for entry in entries:
        for target in entry.relies_on:
            if definition(home_of(target)) is None:
                fact = f"'{entry.id}' relies on {target}, which is not in the source"
                raise TargetError(entry.place, fact, "Name what it calls there", patch=entry.id, target=target)
    for folder in dict.fromkeys(entry.folder for entry in entries):
        chosen = [entry for entry in entries if entry.folder == folder and entry.edits]
        after, lines = _new_lock(read_lock(folder), chosen)
        changed += lines
        if write and lines:
            try:
                (folder / LOCK).write_text(_yaml(after.values()), encoding="utf-8")
            except OSError as error:
                remedy = "Copy the patches to a folder that can be written, and name it with --path"
                raise OutputError(str(folder / LOCK), f"It cannot be written: {error.strerror}", remedy) from error
    return changed


def review(entry: Entry, entries: Iterable[Entry]) -> str:
    """Returns a unified diff of the lock file of `entries`: its change if an entry's target were locked now."""
    before = read_lock(entry.folder)
    same = [other for other in entries if (other.target, other.folder) == (entry.target, entry.folder) and other.edits]
    after, _ = _new_lock({key: rows for key, rows in before.items() if key == entry.target}, same)
    others = {key: rows for key, rows in before.items() if key != entry.target}
    name = Path(entry.place.rpartition(":")[0]).with_name(LOCK).as_posix()
    old, new = (_yaml(locks.values()).splitlines() if locks else [] for locks in (before, others | after))
    return "\n".join(difflib.unified_diff(old, new, name, name, lineterm="", n=2))


def with_row(entry: Entry, entries: Iterable[Entry]) -> str | None:
    """Returns the text of the lock file with a row for an entry's target added; `entries` are all of its folder. None
    if there is nothing to add: the target has no source, or the lock has it already.
    """
    if not entry.edits or check(entry) != "unlocked":
        return None
    before = read_lock(entry.folder)
    same = [other for other in (*entries, entry) if other.target == entry.target and other.edits]
    after, _ = _new_lock({}, same)
    return _yaml((before | after).values())


def _new_lock(before: dict[str, Locked], entries: Sequence[Entry]) -> tuple[dict[str, Locked], list[str]]:
    """Returns the locks of the entries' targets as they are now, and a line for each target that changes."""
    current: dict[str, LockRow] = {}
    after: dict[str, Locked] = {}
    changed: list[str] = []
    # For a revision git reads a whole package.
    revision = functools.cache(git.revision)
    for entry in entries:
        fresh = current_row(entry)
        if fresh is None:
            continue
        # Several entries may have one target: its row gets the callees of all.
        earlier = current.get(entry.target)
        relied = {**(earlier.relies_on if earlier else {}), **fresh.relies_on}
        fresh = _with_versions(fresh.model_copy(update={"relies_on": relied}), entry, revision)
        current[entry.target] = fresh
        old = before[entry.target].rows if entry.target in before else []
        after[entry.target] = Locked(target=entry.target, rows=_rows(old, fresh))
    for target in sorted(before.keys() | after.keys()):
        if before.get(target) != after.get(target):
            if target not in after:
                word = "dropped"
            elif target in before:
                word = "changed"
            else:
                word = "new"
            changed.append(f"{target}: {word}")
    return after, changed


def _rows(old: Sequence[LockRow], fresh: LockRow) -> list[LockRow]:
    """Returns the rows with the fresh one in place of its equal, or at the end, and without rows that it supersedes."""
    same = next((row for row in old if _same(row, fresh)), None)
    if same is not None and not _says_more(fresh, same):
        fresh = fresh.model_copy(update={"versions": same.versions, "commit": same.commit, "dirty": same.dirty})
    kept = [row for row in old if row is same or not (_same(row, fresh) or _is_superseded(row, fresh))]
    rows = [fresh if row is same else row for row in kept]
    return rows if same is not None else [*rows, fresh]


def _is_superseded(row: LockRow, fresh: LockRow) -> bool:
    """Returns whether a new row takes the place of an old row: both are for the same version or commit."""
    if row.commit is None and fresh.commit is not None:
        return "unknown" in row.versions.values()
    # What a commit has stays known, though its checkout has changes now.
    loses_nothing = row.commit is None or row.dirty or not fresh.dirty
    return (row.versions, row.commit) == (fresh.versions, fresh.commit) and loses_nothing


def _says_more(fresh: LockRow, row: LockRow) -> bool:
    """Returns whether a new row has what an old row of the same source lacks: a commit, or one without changes."""
    if row.commit is None:
        return fresh.commit is not None and "unknown" in row.versions.values()
    return row.dirty and fresh.commit is not None and not fresh.dirty


def _yaml(locked: Iterable[Locked]) -> str:
    """Returns the text of a lock file. Of rows with the same tree, the first alone has the statements."""
    out = ["# Written by: torchport patches lock. What upstream's source was when its patches were reviewed."]
    for locked_target in sorted(locked, key=operator.attrgetter("target")):
        out += [f"- target: {locked_target.target}", "  rows:"]
        written: set[str] = set()
        for row in locked_target.rows:
            versions = ", ".join(f'{name}: "{version}"' for name, version in row.versions.items())
            seen = [f"versions: {{{versions}}}"] if versions or row.commit is None else []
            if row.commit is not None:
                seen.append(f'commit: "{row.commit}"')
            if row.dirty:
                seen.append("dirty: true")
            out += [f"    - {seen[0]}", *(f"      {line}" for line in seen[1:])]
            if row.signature is not None:
                out.append(f'      signature: "{row.signature}"')
            out.append(f'      tree: "{row.tree}"')
            if row.tree not in written:
                out.append(f'      statements: "{row.statements}"')
            written.add(row.tree)
            by_module: dict[str, list[str]] = {}
            for name, key in sorted(row.relies_on.items()):
                module, _, path = name.partition(":")
                by_module.setdefault(module, []).append(f"{path}:{key}")
            if by_module:
                out.append("      relies_on:")
                out += [f'        {module}: "{" ".join(keys)}"' for module, keys in sorted(by_module.items())]
    return "\n".join(out) + "\n"


_SKIPPED = {"ctx", "kind", "type_comment", "annotation", "returns", "type_params", "type_ignores"}
_BLOCKS = {"body", "orelse", "finalbody", "handlers", "cases"}
_MARKS = {
    Parameter.POSITIONAL_ONLY: "/",
    Parameter.POSITIONAL_OR_KEYWORD: "",
    Parameter.VAR_POSITIONAL: "*",
    Parameter.KEYWORD_ONLY: "*,",
    Parameter.VAR_KEYWORD: "**",
}
"""What the hash of a parameter has before its name."""


@dataclasses.dataclass(frozen=True)
class HashedPart:
    """One part of a definition with its hash: a statement without its blocks, a decorator, an argument or a base."""

    text: str  #: What is hashed.
    first: Any
    last: Any  #: The node that it ends with: an argument's default, or the first one.
    mark: str = ""  #: `@` for a decorator, which begins before its node.

    @property
    def key(self) -> str:
        return _hash(self.text, 6)

    def source_line(self, text: str) -> str:
        """Returns this part of a definition as one line of source, cut to 160 characters; `text` is the whole file."""
        line = self.last.end_lineno
        column = self.last.end_col_offset
        if isinstance(self.last, ast.stmt) and getattr(self.last, "body", None):  # of an `if` or `for`, the head alone
            line, column = self.last.body[0].lineno, self.last.body[0].col_offset  # type: ignore[attr-defined]
        rows = text.encode().split(b"\n")[self.first.lineno - 1 : line]
        # The last row first: it may be the only row.
        rows[-1] = rows[-1][:column]
        rows[0] = rows[0][self.first.col_offset :]
        words = self.mark + " ".join(b"\n".join(rows).decode(errors="replace").split())
        return words if len(words) <= 160 else f"{words[:157]}..."


def parts(node: ast.stmt) -> Iterator[HashedPart]:
    """Yields the parts of a statement, outer ones first: of a function decorators, name, arguments, statements."""
    if isinstance(node, DEFINITIONS):
        for decorator in node.decorator_list:
            yield HashedPart(f"@{''.join(_plain_text(decorator))}", decorator, decorator, "@")
        yield HashedPart(f"{type(node).__name__} {node.name}", node, node)
        for base in (*node.bases, *node.keywords) if isinstance(node, ast.ClassDef) else ():
            yield HashedPart("".join(_plain_text(base)), base, base)
        for name, argument, kind, default in parameters(node) if isinstance(node, Function) else ():
            yield HashedPart(f"{_MARKS[kind]}{name}={''.join(_plain_text(default))}", argument, default or argument)
    else:
        yield HashedPart("".join(_plain_text(node, blocks=False)), node, node)
    for block in inner_blocks(node):
        for statement in _without_docstring(node, block):
            yield from parts(statement)


def _without_docstring(node: ast.AST, block: list[ast.stmt]) -> list[ast.stmt]:
    """Returns the statements of a block; of the body of the definition `node` those after its docstring."""
    has_docstring = isinstance(node, DEFINITIONS) and ast.get_docstring(node, clean=False) is not None
    return block[1:] if has_docstring else block


def _plain_text(node: object, blocks: bool = True) -> Iterator[str]:
    """Yields the text of a syntax tree to hash, in pieces: without formatting, annotations and docstrings, and unless
    `blocks` without the statements inside a statement. A generator takes one frame for each level of the tree, and a
    long chain of `elif` is deep.

    `x = 1` is `(Assign targets=[(Name id=str:'x'),] value=(Constant value=int:1))`.
    """
    if isinstance(node, list):
        yield "["
        for item in node:
            yield from _plain_text(item, blocks)
            yield ","
        yield "]"
        return
    if not isinstance(node, ast.AST):
        yield f"{type(node).__name__}:{node!r}"
        return
    yield f"({type(node).__name__}"
    for field, value in ast.iter_fields(node):
        is_block = field in _BLOCKS and isinstance(value, list)
        if field in _SKIPPED and not (field == "annotation" and isinstance(node, ast.AnnAssign)):
            continue
        if value is None and not isinstance(node, ast.Constant):  # an empty field, as `[]` below
            continue
        if value == [] or (is_block and not blocks):
            continue
        yield f" {field}="
        value = _without_docstring(node, value) if field == "body" and is_block else value
        yield from _plain_text(value, blocks)
    yield ")"


def _hash(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def changes(old: list[str], node: ast.stmt, text: str) -> list[str]:
    """Returns in words how the definition `node` differs from an earlier one, of which only the hashes of its parts are
    known (`old`): `["line 7 is new: x = f(x)", "1 part before line 9 gone"]`.
    """
    new = list(parts(node))
    matcher = difflib.SequenceMatcher(None, old, [part.key for part in new], autojunk=False)
    result: list[str] = []
    for tag, old_from, old_to, new_from, new_to in matcher.get_opcodes():
        if tag == "equal":
            continue
        gone = old_to - old_from
        result += [f"line {part.first.lineno} is new: {part.source_line(text)}" for part in new[new_from:new_to]]
        if gone and new_to == new_from:
            at = new[new_from].first.lineno if new_from < len(new) else (node.end_lineno or node.lineno)
            result.append(f"{gone} {'parts' if gone > 1 else 'part'} before line {at} gone")
    return result
