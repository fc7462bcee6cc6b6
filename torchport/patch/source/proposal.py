"""Entries of patches to paste: what an error proposes for a statement, a function or a package of upstream."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from packaging.version import Version

from torchport.errors import ConflictError, RewriteError
from torchport.patch import rewriting
from torchport.patch.declared import Entry, mistake
from torchport.patch.rewriting import runs, statements
from torchport.source import parsing
from torchport.source.bindings import (
    Chain,
    Function,
    arguments,
    blocks,
    definitions,
    exposed,
    inner_blocks,
    names_bound,
    read_after,
)
from torchport.source.parsing import SourceFile

LONGEST = 4
"""Lines of a statement that is written out in a `match`; the blocks of a longer one become holes."""
PROMISE = {"algebraic": "say here why it computes the same"}


@dataclasses.dataclass(frozen=True)
class Proposal:
    """An entry to paste."""

    text: str  #: The entry as YAML, a list with one item. It follows the schema.
    names: str  #: The file that it goes into, as a card lists it: `up/tracing`.
    #: The Python to write beside it, as `forward_12(x, mask), which returns y`; empty for a stub.
    write: str = ""
    #: The entry's fields; those that every entry has are left out.
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parameters: Sequence[str] = ()  #: Of a rewrite, those of its function.
    gives: str = ""  #: Of a rewrite, what its function returns, in words; empty where it returns nothing.

    def remedy(self, listed: str) -> str:
        """Returns the remedy that an error prints with this entry. `listed` is where the card lists its patches."""
        write = f"write {self.write} in {self.names.partition('/')[2]}.py beside it, " if self.write else ""
        return f"Paste the entry below into patches/{self.names}.yaml, {write}and list {self.names} under {listed}"


def stub(module: str, imported: ast.stmt, package: str, why: str) -> Proposal:
    """Returns a proposed entry that stubs an absent package for the module that imports it."""
    home = module.partition(".")[0]
    fields = {
        "id": f"{slug(home)}.{slug(package)}",
        "target": f"{package}:{_imported_path(imported, package)}",
        "stub": {"package": package, "importers": [module]},
        "why": why,
        "plumbing": True,
        "equivalence": "bitwise",
    }
    return Proposal(written(fields, home), f"{home}/imports")


def _imported_path(imported: ast.stmt, package: str) -> str:
    """Returns the first name that a statement imports from a package, for a target: `ops.attention` for `from
    flash.ops import attention`; the package's name if there is none.
    """
    aliases = imported.names if isinstance(imported, ast.Import | ast.ImportFrom) else []
    if isinstance(imported, ast.ImportFrom):
        path = (imported.module or package).split(".")[1:]
        path += [alias.name for alias in aliases[:1] if alias.name != "*"]
    else:
        path = [part for alias in aliases for part in alias.name.split(".")[1:]][:1]
    return ".".join(path) or package


def operator(target: str, module: str, why: str) -> Proposal:
    """Returns a proposed entry with a lowering of an operator, `torch.ops.aten:name.overload`, that upstream calls."""
    home = module.partition(".")[0]
    name = re.sub(r"\W", "_", target.partition(":")[2].removesuffix(".default")).strip("_")
    fields = {
        "id": f"{slug(home)}.{slug(name)}",
        "target": target,
        "op": f"lowerings.py:{name}",
        "why": why,
        "equivalence": PROMISE,
    }
    write = f"{name}(...), which computes the operator with torchport.engine.call_jax,"
    return Proposal(written(fields, "torch"), f"{home}/lowerings", write)


def function(target: str, module: str, why: str, parameters: str, *, importing: bool = False) -> Proposal:
    """Returns a proposed entry that replaces a function or class of torch, which an upstream module calls. With
    `importing` it is in force only while modules of that upstream are imported.
    """
    home = module.partition(".")[0]
    path = target.partition(":")[2]
    name = re.sub(r"\W", "_", path)
    fields = {
        "id": f"{slug(home)}.{slug(target)}",
        "target": target,
        "replace": f"cuda.py:{name}",
        "why": why,
        "equivalence": "bitwise",
        "scope": "global",
        "scope_reason": "Without CUDA the call can only raise, and it is looked up when it is made.",
        "plumbing": True,
    }
    if importing:
        fields |= {"lifetime": {"while_importing": home}, "scope_reason": f"In force only while {home} is imported."}
    write = f"{name}{parameters}, which answers without CUDA,"
    return Proposal(written(fields, "torch"), f"{home}/cuda", write)


def statement(source: SourceFile, line: int, why: str, file: str = "tracing") -> Proposal | None:
    """Returns a proposed rewrite of the upstream statement on a line, or else a replacement of its function.

    None for a statement outside all functions, or in one that no entry can name. `file` is the name, without ending, of
    the files that the entry and its function go into. Raises UnreadableError if the source is no Python.
    """
    with parsing.nesting(source.shown, line):
        spot = _spot(source.tree, line)
        origin = None if spot is None else _origin(spot)  # the assignment of the name that an `if` tests
        if origin is not None:
            spot, line = origin, origin.statement.lineno
        if spot is None or not "".join([source.module, *spot.names]).isascii():
            return None
        return _proposed(source, spot, line, why, file)


def _proposed(source: SourceFile, spot: _Spot, line: int, why: str, file: str) -> Proposal:
    """Returns a rewrite of the statement at a spot, if the engine could make it; else a replacement of its function."""
    home, name = source.module.partition(".")[0], f"{spot.names[-1].strip('_')}_{line}"
    fields = {
        "id": f"{slug(home)}.{slug('.'.join(spot.names))}-{line}",
        "target": f"{source.module}:{'.'.join(spot.names)}",
        "why": why,
        "equivalence": PROMISE,
    }
    local = arguments(spot.function) | names_bound(spot.function.body)
    parameters = sorted(exposed([spot.statement])[0] & local)
    site = spot.function.name, rewriting.first_line(spot.function), source.file
    for change in _rewrites(spot, f"{file}.py:{name}"):
        candidate = {**fields, "rewrite": change}
        try:
            rewriting.edit(entry_of(candidate, home), source.text, site, parameters)  # a trial: its result is not used
        except (RewriteError, ConflictError):
            continue
        gives = change.get("gives", sorted(names_bound([spot.statement])))
        returns = "what the statement returns" if isinstance(spot.statement, ast.Return) else ", ".join(gives)
        write = f"{name}({', '.join(parameters)}){f', which returns {returns},' if returns else ''}"
        text = written(candidate, home)
        names = f"{home}/{file}"
        return Proposal(text, names, write, fields=candidate, parameters=parameters, gives=returns)
    write = f"{name}({ast.unparse(spot.function.args)}), which does what the function does,"
    replaced = {**fields, "replace": f"{file}.py:{name}"}
    return Proposal(written(replaced, home), f"{home}/{file}", write, replaced)


@dataclasses.dataclass(frozen=True)
class _Spot:
    """A statement of a function or method, and not of a function inside it."""

    names: tuple[str, ...]  #: The path of the function: `("Block", "forward")`.
    function: Function
    block: list[ast.stmt]  #: The list that the statement is in.
    index: int
    chain: Chain  #: The statements around the list.
    statement: ast.stmt  #: `block[index]`.


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _spot(tree: ast.Module, line: int) -> _Spot | None:
    """Returns the statement on a line, in a function's own scope; None outside of functions. Of the statements that
    begin on the line the outermost (all of `if x.any(): return`); if none does, the innermost around the line.
    """
    names: list[str] = []
    body: list[ast.stmt] = tree.body
    while True:
        inside = next((node for node in definitions(body) if _covers(node, line)), None)
        if inside is None:
            return None
        names.append(inside.name)
        if not isinstance(inside, ast.ClassDef):
            break
        body = inside.body
    spots = [spot for spot in _spots(tuple(names), inside) if _covers(spot.statement, line)]
    return next((spot for spot in spots if spot.statement.lineno == line), spots[-1] if spots else None)


def _spots(names: tuple[str, ...], function: Function) -> list[_Spot]:
    spots: list[_Spot] = []
    for block, chain in blocks(function):
        spots += [_Spot(names, function, block, index, chain, node) for index, node in enumerate(block)]
    return spots


def _origin(spot: _Spot) -> _Spot | None:
    """Returns the only assignment of `name` for `if name:`, `if not name:` or `assert name`; None for other spots."""
    test = getattr(spot.statement, "test", None)
    test = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
    if not isinstance(test, ast.Name) or test.id in arguments(spot.function):
        return None
    spots = _spots(spot.names, spot.function)
    assignments = [other for other in spots if test.id in names_bound([other.statement])]
    statement = assignments[0].statement if len(assignments) == 1 else None
    plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1 and names_bound([statement]) == {test.id}
    return assignments[0] if plain else None


def _rewrites(spot: _Spot, function: str) -> Iterator[dict[str, Any]]:
    """Yields the `rewrite` fields that replace a statement by a call, the most readable `match` first."""
    inside = names_bound([spot.statement])
    after = sorted(read_after(spot.function, spot.chain, spot.block, spot.index + 1) & inside)
    gives = {"gives": after} if len(inside) > 1 else {}
    for match in _matches(spot.statement):
        change = {"match": match, "put": function, **gives}
        times = len(list(runs(spot.function, statements(match))))
        yield change if times == 1 else {**change, "times": times}


def _matches(node: ast.stmt) -> Iterator[str]:
    """Yields patterns that match a statement: its text if short, then its text with holes in place of its blocks."""
    text = ast.unparse(node)
    if len(text.splitlines()) <= LONGEST:
        yield text
    hollow = copy.deepcopy(node)
    holes = inner_blocks(hollow)
    for number, block in enumerate(holes):  # each is a list inside `hollow`
        block[:] = [ast.Expr(ast.Name(f"_torchport_hole_{number}"))]
    if holes:
        yield re.sub(r"_torchport_hole_(\d+)", r"$...block\1", ast.unparse(ast.fix_missing_locations(hollow)))


def slug(text: str) -> str:
    """Returns a text as a part of an entry's id: `"Block.forward_1"` -> `"block-forward-1"`."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:50].strip("-") or "x"


def _all_fields(fields: Mapping[str, Any], package: str) -> dict[str, Any]:
    fixed = {"reported": "none: correct on a GPU", "until": "never", "fits": fields.get("fits") or fits(package)}
    order = ("id", "target", "replace", "wrap", "rewrite", "op", "stub", "why", *fixed, "equivalence")
    merged = {**fixed, **fields}
    usual = {key: merged[key] for key in order if key in merged}
    return usual | merged


def fits(package: str) -> dict[str, str]:
    """Returns an entry's `fits` for a package: its installed version, or `*` if it is no installed distribution."""
    names = _distributions(tuple(sys.path)).get(package, [])
    if not names:
        return {package: "*"}
    version = Version(importlib.metadata.version(names[0]))
    return {names[0]: f"=={version.base_version}" if version.local else f"=={version}"}


@functools.cache
def _distributions(path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Returns the distributions by package; cached by the search path, as the look-up is slow and drafts are many."""
    return importlib.metadata.packages_distributions()


def entry_of(fields: Mapping[str, Any], package: str) -> Entry:
    """Returns an entry of a package's patches with these fields and, for the others, the usual values."""
    return Entry.model_validate(_all_fields(fields, package))


def written(fields: Mapping[str, Any], package: str) -> str:
    """Returns a proposed entry as YAML. All proposals are written here, so that each follows the schema."""
    whole = _all_fields(fields, package)
    first = mistake(Entry.model_validate(whole))
    assert first is None, first
    lines = [line for key, value in whole.items() for line in _yaml_lines(key, value)]
    return "\n".join([f"- {lines[0]}", *(f"  {line}" for line in lines[1:])])


def _yaml_lines(key: str, value: Any) -> list[str]:
    """Returns the lines of one field of an entry in YAML: `("fits", {"up": "*"})` -> `["fits: {up: '*'}"]`."""
    if key == "rewrite":
        return [f"{key}:", *(f"  {line}" for name, part in value.items() for line in _yaml_lines(name, part))]
    if isinstance(value, str) and "\n" in value:
        return [f"{key}: |", *(f"  {line}" for line in value.splitlines())]
    flow = isinstance(value, dict | list)
    text = yaml.safe_dump(value, default_flow_style=flow, sort_keys=False, width=10_000, allow_unicode=True)
    # PyYAML ends a document that is a bare scalar with this mark.
    text = text.removesuffix("...\n")
    return [f"{key}: {text.strip()}"]
