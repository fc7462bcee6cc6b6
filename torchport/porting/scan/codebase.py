"""The modules of a codebase, and who is meant by a name in them. Nothing is imported.

Files are read as strangers' files: each that cannot be read is reported, and none is fatal.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from torchport.errors import UnreadableError
from torchport.porting.scan.finding import BY_KIND
from torchport.porting.scan.syntax import MODULE, Act, Body, bodies, chain_of
from torchport.source import parsing
from torchport.source.flow import taken
from torchport.source.modules import imported_from
from torchport.source.parameters import STARRED, Function, WrittenParameter, parameters

_ALSO_ON_PYPI = {"torch", "transformers", "diffusers", "datasets", "tokenizers", "accelerate", "numpy", "peft", "tests"}
_DEPTH = 12
"""How many imports a name is followed through."""


@dataclasses.dataclass(eq=False)
class CodeUnit:
    """One function of a codebase, or what one of its modules does at import."""

    module: Module  #: Its module.
    body: Body  #: What it does.
    #: What the imports inside it bind, in full.
    imports: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its qualified name, `<module>` for what runs at import."""
        return self.body.name

    @property
    def target(self) -> str:
        """`module:Qual.name`, as patches have it."""
        return f"{self.module.name}:{self.body.name}"

    @functools.cached_property
    def owner(self) -> Class | None:
        """The class that it is a method of."""
        return self.module.classes.get(self.body.owner)

    @functools.cached_property
    def _written(self) -> list[WrittenParameter]:
        node = self.body.node
        return parameters(node) if isinstance(node, Function) else []

    @functools.cached_property
    def parameters(self) -> list[ast.arg]:
        """Its parameters by position, then those by keyword alone."""
        return [parameter.argument for parameter in self._written if parameter.kind not in STARRED]

    @functools.cached_property
    def defaults(self) -> dict[str, ast.expr]:
        """What its parameters are where a call leaves them out."""
        return {parameter.name: parameter.default for parameter in self._written if parameter.default is not None}

    @functools.cached_property
    def first(self) -> str:
        """The name of a method's first argument; empty for a static method or a function."""
        node = self.body.node
        if not self.body.owner or not self.parameters or self.has_decorator("staticmethod"):
            return ""
        return self.parameters[0].arg if isinstance(node, Function) else ""

    def has_decorator(self, name: str) -> bool:
        """Returns whether a decorator of this name stands on it."""
        node = self.body.node
        decorators = [] if isinstance(node, ast.Module) else node.decorator_list
        return any(chain_of(decorator)[-1:] == (name,) for decorator in decorators)


@dataclasses.dataclass(eq=False)
class Class:
    """One class of a codebase."""

    module: Module  #: Its module.
    name: str  #: Its qualified name.
    node: ast.ClassDef  #: Its statement.
    #: What its bases are, in full.
    bases: list[str] = dataclasses.field(default_factory=list)

    @property
    def dotted(self) -> str:
        """Its name in full."""
        return f"{self.module.name}.{self.name}"


@dataclasses.dataclass(eq=False)
class Module:
    """One module of a codebase."""

    name: str  #: Its name, as others import it.
    source: Source  #: Its file.
    #: Its functions by qualified name, and `<module>`.
    units: dict[str, CodeUnit] = dataclasses.field(default_factory=dict)
    #: Its classes by qualified name.
    classes: dict[str, Class] = dataclasses.field(default_factory=dict)
    #: What its own imports and assignments of names bind, in full.
    bound: dict[str, str] = dataclasses.field(default_factory=dict)
    #: The modules that it imports everything of.
    stars: list[str] = dataclasses.field(default_factory=list)
    #: What stands in the lists and dictionaries that its names are bound to.
    tables: dict[str, list[ast.expr]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def in_tables(self) -> frozenset[int]:
        """What stands in tables, by identity: it is used where a table is read."""
        return frozenset(id(node) for nodes in self.tables.values() for node in nodes)

    @functools.cached_property
    def methods(self) -> dict[str, list[CodeUnit]]:
        """The methods of each class, by its name."""
        result: dict[str, list[CodeUnit]] = defaultdict(list)
        for unit in self.units.values():
            if unit.body.owner and not isinstance(unit.body.node, ast.ClassDef):
                result[unit.body.owner].append(unit)
        return result

    @property
    def is_package(self) -> bool:
        """Whether it is the `__init__.py` of a folder."""
        return PurePosixPath(self.source.path).name == "__init__.py"

    @functools.cached_property
    def uses_torch(self) -> bool:
        """Whether some import in it is of torch; without one, no tensor is made in it."""
        everything = [
            *self.bound.values(),
            *(imported for unit in self.units.values() for imported in unit.imports.values()),
        ]
        return any(name.partition(".")[0] == "torch" for name in everything) or bool(self.stars)


class Codebase:
    """The modules of a codebase, by name.

    Args:
        sources: Its files.
        root: The dotted name of the folder that they lie in, if that is inside a package; else empty.
    """

    def __init__(self, sources: Iterable[Source], root: str = "") -> None:
        listed = list(sources)
        names = module_names(listed, root)
        self.modules: dict[str, Module] = {}
        for source in listed:
            module = Module(names[source.path], source)
            self.modules.setdefault(module.name, module)
            _fill(module)
        self.units = [unit for module in self.modules.values() for unit in module.units.values()]
        for module in self.modules.values():
            for kind in module.classes.values():
                kind.bases = [self.canonical(self.full(module, chain_of(base), {})) for base in kind.node.bases]

    def full(self, module: Module, chain: tuple[str, ...], local: dict[str, str]) -> str:
        """Returns a chain of names in full, as one module means it; empty where nothing that is known binds it."""
        if not chain:
            return ""
        head = local.get(chain[0]) or module.bound.get(chain[0])
        if head is None and (chain[0] in module.units or chain[0] in module.classes):
            head = f"{module.name}.{chain[0]}"
        if head is None:
            for star in module.stars:
                known = self.modules.get(star)
                if known and (chain[0] in known.units or chain[0] in known.classes or chain[0] in known.bound):
                    head = f"{star}.{chain[0]}"
        return "" if head is None else ".".join((head, *chain[1:]))

    @functools.cache  # noqa: B019  (a codebase lives as long as its scan)
    def canonical(self, dotted: str, depth: int = 0) -> str:
        """Returns a name in full as its home has it, followed through the imports of this codebase."""
        place = self._place(dotted)
        if place is None or not place[1] or depth > _DEPTH:
            return dotted
        module, rest = place
        if rest[0] in module.units or rest[0] in module.classes:
            return dotted
        onward = self.full(module, rest, {})
        return self.canonical(onward, depth + 1) if onward and onward != dotted else dotted

    def _place(self, dotted: str) -> tuple[Module, tuple[str, ...]] | None:
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            module = self.modules.get(".".join(parts[:end]))
            if module is not None:
                return module, tuple(parts[end:])
        return None

    def table(self, dotted: str) -> tuple[Module, list[ast.expr]] | None:
        """Returns the table that a name in full is bound to, and its module."""
        place = self._place(dotted)
        if place is None or len(place[1]) != 1 or place[1][0] not in place[0].tables:
            return None
        return place[0], place[0].tables[place[1][0]]

    @functools.cache  # noqa: B019
    def definition(self, dotted: str) -> CodeUnit | Class | None:
        """Returns the function or class that a name in full is; of a class, also an inherited method."""
        place = self._place(dotted)
        if place is None or not place[1]:
            return None
        module, rest = place
        name = ".".join(rest)
        if name in module.classes:
            return module.classes[name]
        if name in module.units:
            return module.units[name]
        above = module.classes.get(".".join(rest[:-1]))
        return None if above is None else self.method(above, rest[-1])

    def lineage(self, kind: Class, seen: frozenset[str] = frozenset()) -> Iterator[Class]:
        """Yields a class and those above it, as far as the codebase has them."""
        yield kind
        for base in kind.bases:
            above = self.definition(base)
            if isinstance(above, Class) and above.dotted not in seen:
                yield from self.lineage(above, seen | {kind.dotted})

    def method(self, kind: Class, name: str, inherited: bool = False) -> CodeUnit | None:
        """Returns the first method of a name in a class or above it; only above it if it is inherited."""
        if not inherited:
            return self.methods(kind).get(name)
        above = list(self.lineage(kind))[1:]
        return next((unit for base in above if (unit := self.methods(base).get(name)) is not None), None)

    @functools.cache  # noqa: B019
    def methods(self, kind: Class) -> dict[str, CodeUnit]:
        """Returns all methods of a class and those above it, by name."""
        result: dict[str, CodeUnit] = {}
        for above in self.lineage(kind):
            for unit in above.module.methods.get(above.name, ()):
                result.setdefault(unit.name.rpartition(".")[2], unit)
        return result

    def is_network(self, kind: Class) -> bool:
        """Returns whether a class is a network: its `forward` is what a call of it runs."""
        bases = [base for above in self.lineage(kind) for base in above.bases]
        return any(base.startswith("torch.nn.") or base.endswith("ModelMixin") for base in bases)

    @functools.cached_property
    def subclasses(self) -> dict[str, list[Class]]:
        """The classes right below each class, by its name in full."""
        result: dict[str, list[Class]] = defaultdict(list)
        for module in self.modules.values():
            for kind in module.classes.values():
                for base in kind.bases:
                    result[base].append(kind)
        return result


def module_names(sources: list[Source], root: str) -> dict[str, str]:
    """Returns the module that each file is, as imports of the codebase name it: below `src/` there is no `src.`"""
    paths = [PurePosixPath(source.path) for source in sources]
    packages = {path.parent for path in paths if path.name == "__init__.py"}
    imported = {name for source in sources for name in _imported_tops(source.tree)}
    starts = {PurePosixPath(".")}
    if not root:
        for path in paths:
            for folder in path.parents:
                inner = path.relative_to(folder).parts[0].removesuffix(".py")
                inside = any(above in packages for above in (folder, *folder.parents))
                if inner in imported and inner not in _ALSO_ON_PYPI and not inside:
                    starts.add(folder)
        starts |= {PurePosixPath("src")} & {folder for path in paths for folder in path.parents}
    return {str(path): _module_name(path, starts, root) for path in paths}


def _module_name(path: PurePosixPath, starts: set[PurePosixPath], root: str) -> str:
    start = next(folder for folder in path.parents if folder in starts)
    parts = list(path.relative_to(start).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join([*([root] if root else []), *parts]) or path.stem


def _imported_tops(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def _fill(module: Module) -> None:
    """Reads a module's functions, classes, and what its names are bound to."""
    functions, classes = bodies(module.source.tree)
    module.classes = {name: Class(module, name, node) for name, node in classes.items()}
    for body in functions:
        unit = CodeUnit(module, body)
        module.units[body.name] = unit
        bound = module.bound if body.name == MODULE else unit.imports
        for event in body.events:
            if event.act is Act.IMPORT:
                _bind(module, event.node, bound)
    for event in module.units[MODULE].body.events:
        if event.act is Act.ASSIGN and isinstance(event.node, ast.Name) and event.value is not None:
            _bind_value(module, event.node.id, event.value)


def _bind_value(module: Module, name: str, value: ast.expr) -> None:
    """Notes `klass = Other`, of names that no import binds, and tables."""
    if isinstance(value, (ast.Dict, ast.List, ast.Tuple, ast.Set)):
        nodes = [node for node in ast.walk(value) if isinstance(node, (ast.Name, ast.Attribute))]
        module.tables.setdefault(name, []).extend(nodes)
    chain = chain_of(value)
    if chain and name not in module.bound and chain[0] != name:
        head = module.bound.get(chain[0]) or (f"{module.name}.{chain[0]}" if chain[0] in module.classes else "")
        if head:
            module.bound[name] = ".".join((head, *chain[1:]))


def _bind(module: Module, node: ast.AST, bound: dict[str, str]) -> None:
    if isinstance(node, ast.Import):
        for alias in node.names:
            bound[taken(alias)] = alias.name if alias.asname else taken(alias)
    elif isinstance(node, ast.ImportFrom):
        home = imported_from(node, module.name, module.is_package)
        for alias in node.names:
            if alias.name == "*":
                module.stars.append(home)
            else:
                bound[taken(alias)] = f"{home}.{alias.name}"


_NOT_ENTERED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A file that was read."""

    path: str  #: Its path below the folder, with forward slashes.
    tree: ast.Module  #: Its syntax tree.
    lines: int  #: The number of its lines.


@dataclasses.dataclass(frozen=True)
class Unread:
    """A file or folder that was not read."""

    path: str  #: Its path below the folder.
    line: int  #: The line of a mistake in it; 0 for none.
    rule: str  #: The id that `torchport explain` knows.
    why: str  #: What is wrong with it, without a full stop.


def read_sources(root: Path) -> tuple[list[Source], list[Unread]]:
    """Returns the files of a folder, or one file, and what could not be read."""
    sources: list[Source] = []
    unread: list[Unread] = []
    files = iter([(root, root.name)]) if root.is_file() else _walk(root, unread)
    for file, name in files:
        source = _read_file(file, name)
        if isinstance(source, Source):
            sources.append(source)
        else:
            unread.append(source)
    return sources, unread


def _walk(root: Path, unread: list[Unread]) -> Iterator[tuple[Path, str]]:
    """Yields the Python files below a folder. A linked folder is entered once, a loop of links is reported."""
    entered = {os.path.realpath(root)}
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            unread.append(Unread(_below(root, folder), 0, "PS906", f"It cannot be opened: {error.strerror}"))
            continue
        for entry in entries:
            path = Path(entry.path)
            if _is_loop(path):
                unread.append(Unread(_below(root, path), 0, "PS905", "It is a link that leads back to itself"))
            elif entry.is_dir() and not entry.name.startswith(".") and entry.name not in _NOT_ENTERED:
                real, top = os.path.realpath(path), Path(os.path.realpath(root))
                if entry.is_symlink() and top.is_relative_to(real):
                    unread.append(Unread(_below(root, path), 0, "PS905", "It is a link to a folder that it lies in"))
                elif entry.is_symlink() and not Path(real).is_relative_to(top):
                    unread.append(Unread(_below(root, path), 0, "PS905", "It is a link out of the folder"))
                elif real not in entered:
                    entered.add(real)
                    pending.append(path)
            elif entry.name.endswith(".py"):
                yield path, _below(root, path)


def _below(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _is_loop(path: Path) -> bool:
    """Returns whether a link never arrives."""
    if not path.is_symlink():
        return False
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _read_file(file: Path, name: str) -> Source | Unread:
    try:
        text = parsing.text_of(file, name)
        return Source(name, parsing.tree(text, name), text.count("\n") + 1)
    except UnreadableError as error:
        return Unread(name, error.line, BY_KIND[error.kind], error.fact)
