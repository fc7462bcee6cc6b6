"""The function or class that the target of a new patch names: its kind and its parameters, from source alone."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import re
from collections.abc import Iterable
from inspect import Parameter
from pathlib import Path
from typing import Literal

from torchport.config.checkout import below_src
from torchport.errors import AliasError, BadValueError, TargetError, nearest
from torchport.patch.source import proposal
from torchport.source.bindings import Function, definitions, in_scope
from torchport.source.bindings import parameters as written
from torchport.source.parsing import SourceFile, is_there, package_folder, read_source

Kind = Literal["function", "method", "static method", "class method", "property", "class"]
_TARGET = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_STARS = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
_PLAIN = {"staticmethod", "classmethod", "property", "cached_property", "abstractmethod", "override", "final"}


@dataclasses.dataclass(frozen=True)
class Target:
    """A function or class of upstream, in its source."""

    name: str  #: `module:attribute.path`.
    source: SourceFile
    node: Function | ast.ClassDef
    kind: Kind

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.name.partition(":")[2].split("."))

    @property
    def place(self) -> str:
        """Its `file:line`."""
        return f"{self.source.shown}:{self.node.lineno}"

    @property
    def is_async(self) -> bool:
        return isinstance(self.node, ast.AsyncFunctionDef)

    @property
    def is_generator(self) -> bool:
        """Whether it is a generator function, or an asynchronous one."""
        body = [] if isinstance(self.node, ast.ClassDef) else self.node.body
        return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in in_scope(body))

    @property
    def decorators(self) -> list[str]:
        """Its decorators but `staticmethod` and the like. A replacement takes the place of the decorated function."""
        written = [ast.unparse(decorator) for decorator in self.node.decorator_list]
        return [decorator for decorator in written if decorator.rpartition(".")[2] not in _PLAIN]


def check_name(target: str, place: str) -> None:
    """Raises if a target is not written as `package.module:path`, in ASCII letters."""
    if not _TARGET.fullmatch(target):
        if not target.isascii() and all(map(str.isidentifier, re.split("[.:]", target))):
            fact = f"'{target}' has letters beyond ASCII, and a target of a patch has none"
            raise BadValueError(place, fact, "Patch a function that calls it, and whose name is ASCII")
        fact = f"'{target}' is no target"
        raise BadValueError(place, fact, "Write package.module:function, or package.module:Class.method")


def folders_of(modules: Iterable[str]) -> list[Path]:
    """Returns the folders of modules' top-level packages, or their files; none for a module without such a source."""
    folders = []
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):
            source = read_source(module)
            folder = None if source is None else package_folder(source)
            if folder is not None:
                folders.append(folder)
    return folders


def find(target: str, place: str) -> Target:
    """Returns the target with a name, `module:path`; refuses a name of no function or class in the module's source."""
    check_name(target, place)
    module, _, path = target.partition(":")
    try:
        source = read_source(module)
    except ModuleNotFoundError as error:
        remedy = "Install the upstream, or name its checkout with --upstream-path"
        package = module.partition(".")[0]
        if below_src(module):
            remedy = below_src(module)
        elif not is_there(package):
            remedy += f". To go on without {package}, rewrite the statements of its importers that call {path}"
        raise TargetError(place, f"There is no module {module}: {error}", remedy) from error
    if source is None:
        raise TargetError(place, f"{module} has no Python source", "Patch the function that calls it")
    parts = tuple(path.split("."))
    binding = source.where(parts)
    node = binding.node
    if isinstance(node, ast.ImportFrom | ast.Import):
        raise _imported_error(target, source, node, parts, place)
    if node is None or binding.depth < len(parts):
        raise _absent_error(target, source, parts, binding.depth, place)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        raise _constant_error(target, source, parts, node, place)
    return Target(target, source, node, _kind(node, len(parts)))


def _kind(node: Function | ast.ClassDef, depth: int) -> Kind:
    """Returns whether a definition is a class, function, property or kind of method; at module level `depth` is 1."""
    if isinstance(node, ast.ClassDef):
        return "class"
    names = {ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list}
    if depth == 1:
        return "function"
    if "staticmethod" in names or node.name == "__new__":
        return "static method"
    if "classmethod" in names:
        return "class method"
    return "property" if names & {"property", "cached_property"} else "method"


def _imported_error(target: str, source: SourceFile, node: ast.stmt, parts: tuple[str, ...], place: str) -> AliasError:
    """Returns the error for a target that its module imports: name the defining module, or stub it if it is absent."""
    home = source.module
    if isinstance(node, ast.ImportFrom):
        home = source.imported_from(node)
        name = next((alias.name for alias in node.names if parts[0] in (alias.asname, alias.name)), parts[0])
        home = f"{home}:{'.'.join([name, *parts[1:]])}"
    fact = f"{target} is imported ({source.shown}:{node.lineno}: {ast.unparse(node)})"
    package = re.split(r"[.:]", home)[0]
    if is_there(package):
        return AliasError(place, fact, f"Name it where it is defined: {home}", target=target)
    remedy = f"Install {package}. Or stub it ({package}:{parts[0]} --kind stub --importer {source.module})"
    remedy += f", and rewrite each statement that calls {parts[0]}"
    rewrites = []  # as arguments of `torchport new patch`
    for call in ast.walk(source.tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == parts[0]:
            statement = proposal.statement(source, call.lineno, f"It calls {parts[0]}.")
            if statement is not None and "rewrite" in statement.fields:
                rewrites.append(f"{statement.fields['target']} --kind rewrite --line {call.lineno}")
    if rewrites:
        remedy += f": {', '.join(rewrites[:4])}"
    return AliasError(place, f"{fact}, and {package} is not installed", remedy, target=target)


def _absent_error(target: str, source: SourceFile, parts: tuple[str, ...], depth: int, place: str) -> TargetError:
    """Returns the error for a target of whose path the source shows only the first `depth` names."""
    holder = source.where(parts[:depth]).node if depth else source.tree
    if isinstance(holder, Function):
        what = ".".join(parts[:depth])
        fact = f"{what} ({source.shown}:{holder.lineno}) is a function, and no patch can name what is inside it"
        remedy = f"Patch {what}, or rewrite a statement of it: {source.module}:{what} --kind rewrite --line N"
        return TargetError(place, fact, remedy, target=target)
    body = getattr(holder, "body", [])
    known = [node.name for node in definitions(body)]
    if isinstance(holder, ast.ClassDef) and holder.bases:
        bases = ", ".join(map(ast.unparse, holder.bases))
        fact = f"{'.'.join(parts[:depth])} ({source.shown}:{holder.lineno}) does not define '{parts[depth]}'"
        remedy = f"If it is inherited from {bases}, name the class that defines it"
        if known:
            remedy += f". {nearest(parts[depth], known)}"
        return TargetError(place, fact, remedy, target=target)
    fact = f"There is no '{parts[min(depth, len(parts) - 1)]}' in {source.shown} that a patch can name"
    return TargetError(place, fact, nearest(parts[min(depth, len(parts) - 1)], known), target=target)


def _constant_error(target: str, source: SourceFile, parts: tuple[str, ...], node: ast.stmt, place: str) -> TargetError:
    name, readers = parts[-1], []
    for outer in ast.walk(source.tree):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {getattr(inner, "id", getattr(inner, "attr", None)) for inner in ast.walk(outer)}
            if name in names:
                readers.append(f"{outer.name} (line {outer.lineno})")
    fact = f"{target} is a value ({source.shown}:{node.lineno}), and other modules may hold it already"
    several = f"; in this module: {', '.join(readers[:4])}" if readers else ""
    return TargetError(place, fact, f"Replace, wrap or rewrite a function that reads it{several}", target=target)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """A function's parameters in source, without annotations."""

    #: Such as `x, *, mode=...`. The `...` stands for a default that is no literal; code that gets it fails at once.
    text: str
    names: list[str]  #: Each with its stars.
    unknown: list[str]  #: Those whose default is no literal, as `mode=DEFAULT`.


def parameters(node: Function, before: str | None = None) -> Parameters:
    """Returns a function's parameters as text and names; the text has a parameter `before` in front if it is given."""
    in_source = written(node)
    names = [f"{_STARS.get(parameter.kind, '')}{parameter.name}" for parameter in in_source]
    defaults = [(parameter.name, parameter.default) for parameter in in_source if parameter.default is not None]
    unknown = [f"{name}={ast.unparse(default)}" for name, default in defaults if not is_literal(default)]
    shown = copy.deepcopy(node.args)
    for argument in ast.walk(shown):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    no_literal = ast.Constant(...)
    shown.defaults = [default if is_literal(default) else no_literal for default in shown.defaults]
    shown.kw_defaults = [value if value is None or is_literal(value) else no_literal for value in shown.kw_defaults]
    if before is not None:
        (shown.posonlyargs or shown.args).insert(0, ast.arg(before))
    return Parameters(ast.unparse(shown), names, unknown)


def is_literal(node: ast.expr) -> bool:
    """Returns whether an expression is a value alone, such as `(1, "a")`, and no name or call."""
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True
