"""Checks an entry against upstream's source, before anything of upstream is imported, and its function by signature."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from torchport.config.checkout import below_src
from torchport.errors import AliasError, RewriteError, ScopeError, SignatureError, TargetError, nearest
from torchport.patch import rewriting
from torchport.patch.declared import Entry
from torchport.patch.declared.replacement import file_of, no_such_name
from torchport.source import parsing
from torchport.source.bindings import (
    BY_NAME,
    POSITIONAL,
    STARRED,
    Binding,
    Function,
    binding_at,
    bound_name,
    definitions,
    written_signature,
)
from torchport.source.parsing import SourceFile, read_source, tree_of


def source_of(entry: Entry) -> SourceFile | None:
    """Returns the source of an entry's target module, None for a module in C; raises if there is no such module."""
    try:
        return read_source(entry.module)
    except ModuleNotFoundError as error:
        fact = f"'{entry.id}' finds no module {entry.module}: {error}"
        remedy = below_src(entry.module) or "Install the upstream, or give its path"
        raise TargetError(entry.place, fact, remedy, patch=entry.id) from error


def statement_of(entry: Entry) -> ast.stmt | None:
    """Returns the statement of upstream's source that binds an entry's target; None if no source shows it."""
    source = source_of(entry)
    return source.where(entry.path).node if source else None


UNKNOWN: Any = object()
"""The placeholder for a function or class of which the file, unless it is run, does not say how it is called."""


def parsed(entry: Entry, reference: str) -> Any:
    """Returns a placeholder for the function or class that a `file.py:name` names; the file is not executed. It is a
    class, or a function that has the written signature; UNKNOWN where the file does not say what it is: an assignment,
    an import, a decorator that may change the signature.
    """
    path = file_of(entry, reference)
    name = reference.partition(":")[2]
    tree = tree_of(path)
    binding = binding_at(tree, (name,))
    node = binding.node
    if node is None and not binding.open:
        known = [found.name for found in definitions(tree.body) if not found.name.startswith("_")]
        raise no_such_name(entry, path, name, known)
    if isinstance(node, ast.ClassDef):
        return type(name, (), {})
    signature = written_signature(node) if isinstance(node, Function) else None
    if signature is None:
        return UNKNOWN

    def placeholder() -> None:
        raise AssertionError("it is only looked at")

    placeholder.__signature__ = signature  # type: ignore[attr-defined]  # `inspect.signature` returns it
    return placeholder


def check_source(entry: Entry, loaded: Any, texts: dict[str, str] | None = None) -> None:
    """Refuses an entry whose target is not in the source, or whose function (`loaded`, or the placeholder of `parsed`)
    does not fit. `texts` has each module's text after earlier rewrites; a rewrite puts its own result there.
    """
    source = source_of(entry)
    if source is None:
        return
    binding = source.where(entry.path)
    if binding.node is None and not binding.open:
        raise _no_such_name(entry, source, binding)
    _check_scope(entry, binding)
    if binding.node is None or binding.depth < len(entry.path):
        # The source does not show the target itself.
        return
    if not entry.rewrite:
        _check_home(entry, source, binding.node)
    if loaded is UNKNOWN:
        return
    with parsing.nesting(source.shown, binding.node.lineno):
        if entry.rewrite:
            _check_rewrite(entry, source, binding.node, loaded, {} if texts is None else texts)
        else:
            _check_shape(entry, source, binding.node, loaded)


def _check_scope(entry: Entry, binding: Binding) -> None:
    """Refuses a path that walks out of its package: `module:nn.LayerNorm` is a name of torch if `nn` is imported."""
    if binding.depth == len(entry.path) or entry.scope == "global":
        return
    name = entry.path[binding.depth - 1]
    home = None
    if isinstance(binding.node, ast.ImportFrom) and binding.node.level == 0:
        home = binding.node.module
    elif isinstance(binding.node, ast.Import):
        home = next(a.name for a in binding.node.names if name == bound_name(a))
    if home is not None and home.partition(".")[0] != entry.package:
        raise walks_out(entry, name, home)


def walks_out(entry: Entry, name: str, home: str) -> ScopeError:
    """Returns the error for a target that leads into another package: the patch would change it for all its users."""
    fact = f"{entry.target} walks out of {entry.package}: '{name}' belongs to {home}"
    remedy = "Patch the name that its module looks up, or declare 'scope: global' with 'scope_reason'"
    return ScopeError(entry.place, fact, remedy, patch=entry.id, target=entry.target)


def _no_such_name(entry: Entry, source: SourceFile, binding: Binding) -> TargetError:
    holder = source.where(entry.path[: binding.depth]).node if binding.depth else source.tree
    known = [node.name for node in definitions(getattr(holder, "body", []))]
    name = entry.path[binding.depth]
    fact = f"'{entry.id}' finds no '{name}' in {source.shown}"
    remedy = nearest(name, known)
    if len(remedy) > 300:
        remedy = f"Look '{name}' up in the upstream that is installed"
    return TargetError(entry.place, fact, remedy, patch=entry.id, target=entry.target)


def _check_home(entry: Entry, source: SourceFile, node: ast.stmt) -> None:
    """Refuses a name that its module imports from another module of the package: the patch belongs to that module. A
    name that the module also defines is accepted, an attribute of an imported name, and one from another package: the
    patch changes it in the importing module alone.
    """
    if not isinstance(node, ast.ImportFrom) or entry.scope == "global":
        return
    home = source.imported_from(node)
    name = entry.path[0]
    is_defined = any(definition.name == name for definition in definitions(source.tree.body))
    if is_defined or len(entry.path) > 1 or home.partition(".")[0] != entry.package:
        return
    original = next((alias.name for alias in node.names if name == bound_name(alias)), name)
    fact = f"{entry.target} is imported from {home} ({source.shown}:{node.lineno})"
    raise AliasError(entry.place, fact, f"Write {home}:{original}", patch=entry.id, target=entry.target)


def _check_shape(entry: Entry, source: SourceFile, node: ast.stmt, loaded: Any) -> None:
    """Refuses a class that replaces a function, a function that replaces a class, and parameters that do not fit."""
    if isinstance(node, ast.ClassDef):
        if entry.kind == "replace" and not isinstance(loaded, type):
            fact = f"{entry.target} is a class, and '{entry.reference}' is none"
            raise SignatureError(entry.place, fact, "Write a class", patch=entry.id, target=entry.target)
        return
    if not isinstance(node, Function):
        return
    if not callable(loaded) or (entry.kind == "replace" and isinstance(loaded, type)):
        fact = f"{entry.target} ({source.shown}:{node.lineno}) is a function, and '{entry.reference}' is none"
        raise SignatureError(entry.place, fact, "Write a function", patch=entry.id, target=entry.target)
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    method = len(entry.path) > 1 and not static
    check_signature(entry, written_signature(node), loaded, method)


def _check_rewrite(entry: Entry, source: SourceFile, node: ast.stmt, loaded: Any, texts: dict[str, str]) -> None:
    """Refuses a rewrite that cannot be made in the target's source; else puts the edited text into `texts`."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        fact = f"{entry.target} is imported ({source.shown}:{node.lineno})"
        raise ScopeError(entry.place, fact, "Name the module that defines it", patch=entry.id, target=entry.target)
    if isinstance(node, ast.ClassDef):
        fact = f"{entry.target} is a class"
        raise RewriteError(entry.place, fact, "Name one of its methods", patch=entry.id, target=entry.target)
    if not isinstance(node, Function):
        return

    text = texts.get(entry.module, source.text)
    site = node.name, rewriting.first_line(node), source.file  # edits keep the line numbers
    parameters = rewriting.parameters(entry, loaded)
    texts[entry.module] = rewriting.edit(entry, text, site, parameters, home=source.text).text


def live_signature(function: Any) -> Signature | None:
    """Returns the signature of a live function or class. None for one in C that has none."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


def check_signature(entry: Entry, target: Signature | None, loaded: Callable[..., Any], method: bool) -> None:
    """Refuses a replacement, or a wrapper without its first parameter, that cannot take all calls of its target; does
    nothing if a signature is not known. In a `method` the first parameter is never passed by name.
    """
    ours = live_signature(loaded)
    if target is None or ours is None:
        return
    if entry.kind == "wrap":
        parameters = list(ours.parameters.values())
        if not parameters or parameters[0].kind not in (*POSITIONAL, Parameter.VAR_POSITIONAL):
            fact = f"The wrapper '{entry.reference}' of '{entry.id}' has no parameter for the original"
            raise SignatureError(entry.place, fact, "Take the original as its first parameter", patch=entry.id)
        if parameters[0].kind is not Parameter.VAR_POSITIONAL:
            ours = ours.replace(parameters=parameters[1:])
    lacking = _lacking(target, ours, method)
    if lacking:
        bare = [
            p.replace(annotation=Parameter.empty, default=p.default if p.default is Parameter.empty else ...)
            for p in target.parameters.values()
        ]
        untyped = str(Signature(bare)).replace("=Ellipsis", "=...")  # as a `def` writes it
        fact = f"'{entry.reference}' {lacking}, unlike {entry.target}{untyped}"
        remedy = "Give it the target's parameters, in its order and with defaults where it has them"
        raise SignatureError(entry.place, fact, remedy, patch=entry.id, target=entry.target)


def _lacking(target: Signature, ours: Signature, method: bool) -> str | None:
    """Returns in words why a replacement cannot take a call of its target, `"does not take *args"`; else None."""
    theirs = list(target.parameters.values())
    mine = list(ours.parameters.values())
    kinds = {parameter.kind for parameter in mine}
    positional = [parameter for parameter in mine if parameter.kind in POSITIONAL]
    # The replacement's parameters that take a parameter of the target.
    used: set[str] = set()
    lacks: list[str | None] = []
    for index, parameter in enumerate(p for p in theirs if p.kind in POSITIONAL):
        match = positional[index] if index < len(positional) else None
        never_named = (method and index == 0) or parameter.kind is Parameter.POSITIONAL_ONLY
        lacks.append(_positional_lack(parameter, match, ours, kinds, never_named))
        used.add(match.name if match else parameter.name)
    for parameter in (p for p in theirs if p.kind is Parameter.KEYWORD_ONLY):
        lacks.append(_named_lack(parameter, ours, kinds))
        used.add(parameter.name)
    for kind, mark in ((Parameter.VAR_POSITIONAL, "*args"), (Parameter.VAR_KEYWORD, "**kwargs")):
        if any(p.kind is kind for p in theirs) and kind not in kinds:
            lacks.append(f"does not take {mark}")
    required = (p for p in mine if p.kind not in STARRED and p.default is Parameter.empty)
    lacks += [f"asks for '{p.name}'" for p in required if p.name not in used]
    return next(filter(None, lacks), None)


def _positional_lack(
    theirs: Parameter, match: Parameter | None, ours: Signature, kinds: set[Any], never_named: bool
) -> str | None:
    """Returns in words why the replacement's parameter `match` cannot take what `theirs` takes; None if it can."""
    if match is None and Parameter.VAR_POSITIONAL not in kinds:
        return f"does not take '{theirs.name}' by position"
    if theirs.default is not Parameter.empty and match is not None and match.default is Parameter.empty:
        return f"asks for '{match.name}', which has a default"
    if never_named or (match is not None and match.name == theirs.name and match.kind in BY_NAME):
        return None
    named = ours.parameters.get(theirs.name)
    if match is None or named is None or named.kind is Parameter.POSITIONAL_ONLY:
        return _named_lack(theirs, ours, kinds)
    return f"has '{theirs.name}' in another place"


def _named_lack(theirs: Parameter, ours: Signature, kinds: set[Any]) -> str | None:
    """Returns in words why calls cannot pass the target's parameter `theirs` by name; None if they can."""
    match = ours.parameters.get(theirs.name)
    if match is None or match.kind not in BY_NAME:
        return None if Parameter.VAR_KEYWORD in kinds else f"does not take '{theirs.name}' by name"
    if theirs.default is not Parameter.empty and match.default is Parameter.empty:
        return f"asks for '{theirs.name}', which has a default"
    return None
