"""The modules of a codebase, and who is meant by a name in them. Nothing is imported.

Files are read as strangers' files: each that cannot be read is reported, and none is fatal.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from torchport.errors import UnreadableError
from torchport.porting.scan import BY_KIND, ScanFinding
from torchport.porting.scan.facts import Facts, Term
from torchport.porting.scan.syntax import MODULE, Act, Body, bodies, chain_of
from torchport.source import parsing
from torchport.source.bindings import STARRED, Function, bound_name, parameters
from torchport.source.parsing import imported_from

_ALSO_ON_PYPI = {"torch", "transformers", "diffusers", "datasets", "tokenizers", "accelerate", "numpy", "peft", "tests"}
"""Packages that most codebases import from PyPI: that a folder holds a `datasets` does not make it an import root."""
_DEPTH = 12
"""How many imports a name is followed through."""
_PARSED = 1000
"""Levels of Python's stack that the parser may use."""
_IMPORTS = re.compile(r"^(?:from\s+([\w.]+)\s+import\b|import\s+([\w., \t]+))", re.MULTILINE)


@dataclasses.dataclass(eq=False)
class CodeUnit:
    """One function of a codebase, or what one of its modules does at import."""

    module: Module
    name: str  #: Its qualified name, `<module>` for what runs at import.
    body: Body | None  #: Its events; None when `facts` are there, and the syntax tree is dropped.
    is_class: bool  #: Whether it is no function, but a class with decorators, which run at import.
    class_name: str  #: The class that it is a method of; empty for none.
    parameters: tuple[str, ...] = ()  #: Its parameters by position, then those by keyword alone.
    defaults: dict[str, Term] = dataclasses.field(default_factory=dict)  #: The defaults of parameters.
    decorators: frozenset[str] = frozenset()  #: The last names of its decorators: `no_grad` of `@torch.no_grad()`.
    returns: ast.expr | None = None  #: The annotation of its result.
    tensors: frozenset[str] = frozenset()  #: Of an `__init__`, the attributes that it makes buffers or parameters.
    imports: dict[str, str] = dataclasses.field(default_factory=dict)  #: By name, the full names that it imports.
    facts: Facts = dataclasses.field(default_factory=Facts)  #: What is kept of it without its syntax tree.

    @property
    def target(self) -> str:
        """What a patch would change, as `pkg.mod:Qual.name`."""
        return f"{self.module.name}:{self.name}"

    @property
    def dotted(self) -> str:
        """Its full name, as `pkg.mod.Qual.name`."""
        return f"{self.module.name}.{self.name}"

    @functools.cached_property
    def owner(self) -> Class | None:
        """The class that it is a method of."""
        return self.module.classes.get(self.class_name)

    def may_import(self, name: str) -> bool:
        """Returns whether a name may be imported or defined by it or its module. Any other name is local."""
        is_known = name in self.module.heads or name in self.imports
        return is_known or bool(self.module.stars)  # `from m import *` may bring any name

    @functools.cached_property
    def first(self) -> str:
        """The name of a method's first argument; empty for a static method or a function."""
        return self.parameters[0] if self.class_name and self.parameters and not self.is_static else ""

    @property
    def is_static(self) -> bool:
        return "staticmethod" in self.decorators


@dataclasses.dataclass(eq=False)
class Class:
    module: Module
    name: str
    above: tuple[tuple[str, ...], ...]  #: Its bases, as chains of names.
    variables: frozenset[str]  #: The names that its body assigns.


@dataclasses.dataclass(eq=False)
class Module:
    """One module of a codebase: its functions and classes, and what its names mean."""

    name: str
    source: Source
    units: dict[str, CodeUnit] = dataclasses.field(default_factory=dict)
    classes: dict[str, Class] = dataclasses.field(default_factory=dict)
    #: What its own imports and assignments of names bind, in full.
    bound: dict[str, str] = dataclasses.field(default_factory=dict)
    stars: list[str] = dataclasses.field(default_factory=list)  #: The modules of which it imports `*`.
    #: By variable, the names in the list or dictionary that it is: `BLOCKS = {"a": Block}` gives `[("Block",)]`.
    tables: dict[str, list[tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    #: The nodes of these names, until the module was read. They are used where the table is used, and not at import.
    in_tables: set[ast.AST] = dataclasses.field(default_factory=set)
    #: A cache of `Codebase.resolve`, for functions without imports of their own.
    resolved: dict[tuple[str, ...], str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def heads(self) -> frozenset[str]:
        """The names that it defines or imports."""
        return frozenset((*self.units, *self.classes, *self.bound))

    @functools.cached_property
    def uses_torch(self) -> bool:
        """Whether some import in it is of torch; without one, no tensor is made in it."""
        if self.stars:  # `from m import *` may bring torch
            return True
        imports = [self.bound, *(unit.imports for unit in self.units.values())]
        return any(name.partition(".")[0] == "torch" for names in imports for name in names.values())


class Codebase:
    """The modules of a codebase, by name. Each is read when it is first asked for, and its syntax tree dropped soon.
    `root` is the dotted name of the folder that they lie in, if that is inside a package; else empty.
    """

    def __init__(self, sources: Iterable[Source], root: str = "") -> None:
        self.sources = list(sources)
        self._names = module_names(self.sources, root)
        self._files: dict[str, Source] = {}
        for source in self.sources:
            self._files.setdefault(self._names[source.path], source)
        self._waiting = set(self._files)  # modules that are not read yet
        self._unyielded: list[Module] = []  # modules that are read, and that `read` has still to yield
        self.tops = {name.partition(".")[0] for name in self._files}
        self.modules: dict[str, Module] = {}
        #: Files that could not be read, by their path below the folder.
        self.unread: list[ScanFinding] = []
        self.files = self.lines = 0

    def read(self) -> Iterator[Module]:
        """Yields each module once, with its syntax tree. A module that was read because another module refers to it
        comes right after. The caller drops the tree (`CodeUnit.body`) before it takes the next module.
        """
        for source in self.sources:
            self.module(self._names[source.path])
            if source is not self._files[self._names[source.path]]:
                self._tree(source)  # a second file of the same module name: it is counted, and not scanned
            while self._unyielded:
                yield self._unyielded.pop()
        # The order of the files, not the order in which they were read.
        self.modules = {name: self.modules[name] for name in self._files if name in self.modules}

    @functools.cached_property
    def units(self) -> list[CodeUnit]:
        """All functions, when all files have been read."""
        return [unit for module in self.modules.values() for unit in module.units.values()]

    def module(self, name: str) -> Module | None:
        """Returns a module, read from its file at the first call; None without a file, or if it cannot be read."""
        if name in self._waiting:
            self._waiting.remove(name)
            tree = self._tree(self._files[name])
            if tree is not None:
                module = self.modules[name] = Module(name, self._files[name])
                _fill_module(module, tree)
                self._unyielded.append(module)
        return self.modules.get(name)

    def _tree(self, source: Source) -> ast.Module | None:
        """Returns the syntax tree of a file, and counts its lines; None, with a finding in `unread`, without a tree."""
        try:
            text, tree = _parsed(source)
        except UnreadableError as error:
            self.unread.append(ScanFinding(BY_KIND[error.kind], source.path, error.line, "", error.fact))
            return None
        self.files += 1
        self.lines += text.count("\n") + 1
        return tree

    @functools.lru_cache(maxsize=8)  # noqa: B019  (a codebase lives as long as its scan)
    def _bodies(self, name: str) -> dict[str, Body]:
        """Returns the bodies of a module's functions by name, from its file, which is parsed again."""
        _, tree = _parsed(self._files[name])
        return {body.name: body for body in bodies(tree)[0]}

    def body(self, unit: CodeUnit) -> Body:
        """Returns the body of a function, parsed again if its syntax tree was dropped."""
        return unit.body or self._bodies(unit.module.name)[unit.name]

    def full_name(self, module: Module, chain: tuple[str, ...], local: Mapping[str, str] | None = None) -> str:
        """Returns the full name of a chain of names in a module, such as `torch.nn.Linear` for `("nn", "Linear")`.
        Empty where no import or definition binds the first name. `local` has the full names that a function's imports
        bind.
        """
        if not chain:
            return ""
        first, *rest = chain
        head = (local or {}).get(first) or module.bound.get(first)
        if head is None and first in module.heads:
            head = f"{module.name}.{first}"
        if head is None:
            stars = [star for star in module.stars if (there := self.module(star)) and first in there.heads]
            head = f"{stars[-1]}.{first}" if stars else None
        return "" if head is None else ".".join((head, *rest))

    def resolve(self, unit: CodeUnit, chain: tuple[str, ...]) -> str:
        """Returns the full name of a chain of names in a function, as in the module that defines the object: `pkg.m.f`
        for `("f",)` after `from pkg import f`. Empty where no import or definition binds the first name.
        """
        if not chain or not unit.may_import(chain[0]):
            return ""
        if chain[0] in unit.imports:
            return self.canonical(self.full_name(unit.module, chain, unit.imports))
        if chain not in unit.module.resolved:
            unit.module.resolved[chain] = self.canonical(self.full_name(unit.module, chain))
        return unit.module.resolved[chain]

    def has(self, dotted: str) -> bool:
        """Returns whether a full name begins with a top-level package or module of this codebase."""
        return dotted.partition(".")[0] in self.tops

    @functools.cache  # noqa: B019
    def canonical(self, dotted: str, depth: int = 0) -> str:
        """Returns the full name that a definition has in its own module: `pkg.blocks.Block` for `pkg.Block`, where
        `pkg/__init__.py` imports it. Names that this codebase does not define stay as they are.
        """
        place = self._place(dotted)
        if place is None or not place[1] or depth > _DEPTH:
            return dotted
        module, rest = place
        if rest[0] in module.units or rest[0] in module.classes:
            return dotted
        imported = self.full_name(module, rest)
        return self.canonical(imported, depth + 1) if imported and imported != dotted else dotted

    def _place(self, dotted: str) -> tuple[Module, tuple[str, ...]] | None:
        """Returns the module at the beginning of a full name, and the names after the module: the module `pkg.m` and
        `("C", "f")` for `pkg.m.C.f`. None outside of the codebase.
        """
        parts = dotted.split(".") if self.has(dotted) else []
        for end in range(len(parts), 0, -1):
            module = self.module(".".join(parts[:end]))
            if module is not None:
                return module, tuple(parts[end:])
        return None

    @functools.cache  # noqa: B019
    def table(self, dotted: str) -> list[str]:
        """Returns the full names of the functions and classes in a list or dictionary with the full name `dotted`."""
        module, rest = self._place(dotted) or (None, ())
        if module is None:
            return []
        names = [self.full_name(module, chain) for chain in module.tables.get(".".join(rest), ())]
        return [self.canonical(name) for name in names if name]

    @functools.cache  # noqa: B019
    def definition(self, dotted: str) -> CodeUnit | Class | None:
        """Returns the function or class with a full name, an inherited method included; None if there is none here."""
        place = self._place(dotted)
        if place is None or not place[1]:
            return None
        module, rest = place
        name, owner = ".".join(rest), module.classes.get(".".join(rest[:-1]))
        known = module.classes.get(name) or module.units.get(name)
        return self.method(owner, rest[-1]) if known is None and owner is not None else known

    @functools.cache  # noqa: B019
    def bases(self, cls: Class) -> tuple[str, ...]:
        """Returns the full names of a class's bases, such as `torch.nn.Module`."""
        return tuple(self.canonical(self.full_name(cls.module, base)) for base in cls.above)

    @functools.cache  # noqa: B019
    def lineage(self, cls: Class) -> tuple[Class, ...]:
        """Returns a class and the classes above it, as far as the codebase has them."""
        result: dict[Class, None] = {}
        pending = [cls]
        while pending:
            current = pending.pop()
            if current not in result:
                result[current] = None
                above = map(self.definition, reversed(self.bases(current)))
                pending += [known for known in above if isinstance(known, Class)]
        return tuple(result)

    def method(self, cls: Class, name: str, inherited: bool = False) -> CodeUnit | None:
        """Returns a method of a class or its bases by name, or None; of the bases alone if `inherited` (`super()`)."""
        if not inherited:
            return self.methods(cls).get(name)
        above = self.lineage(cls)[1:]
        return next((self.methods(base)[name] for base in above if name in self.methods(base)), None)

    @functools.cache  # noqa: B019
    def methods(self, cls: Class) -> dict[str, CodeUnit]:
        """Returns all methods of a class by name, the inherited ones included."""
        result: dict[str, CodeUnit] = {}
        for base in self.lineage(cls):
            for unit in base.module.units.values():
                if unit.class_name == base.name and not unit.is_class:
                    result.setdefault(unit.name.rpartition(".")[2], unit)
        return result

    def is_network(self, cls: Class) -> bool:
        """Returns whether a class is a network: its `forward` is what a call of it runs."""
        bases = [base for above in self.lineage(cls) for base in self.bases(above)]
        return any(base.startswith("torch.nn.") or base.endswith("ModelMixin") for base in bases)

    def forget(self) -> None:
        """Drops all that was read, once the report is made. Otherwise the garbage collector would walk all of it."""
        caches = (self._bodies, self.canonical, self.table, self.definition, self.bases, self.lineage, self.methods)
        for cache in caches:
            cache.cache_clear()
        for module in self.modules.values():
            module.units.clear()
            module.classes.clear()
        self.units.clear()


def module_names(sources: list[Source], root: str) -> dict[str, str]:
    """Returns the module name by which the codebase imports each file: `{"src/pkg/m.py": "pkg.m"}`. `root` is the
    dotted name of the package that the files lie in, or empty.
    """
    paths = [PurePosixPath(source.path) for source in sources]
    packages = {path.parent for path in paths if path.name == "__init__.py"}
    import_roots = {PurePosixPath(".")}
    if not root:
        imported = {name for source in sources for name in _imported_tops(source)}
        # A folder outside of packages is an import root if some file imports what lies in it.
        for path in paths:
            for folder in path.parents:
                inner = path.relative_to(folder).parts[0].removesuffix(".py")
                in_package = any(above in packages for above in (folder, *folder.parents))
                if inner in imported and inner not in _ALSO_ON_PYPI and not in_package:
                    import_roots.add(folder)
        import_roots |= {PurePosixPath("src")} & {folder for path in paths for folder in path.parents}  # if it is there
    result = {}
    for path in paths:
        nearest = next(folder for folder in path.parents if folder in import_roots)
        parts = list(path.relative_to(nearest).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        result[str(path)] = ".".join([*([root] if root else []), *parts]) or path.stem
    return result


def _imported_tops(source: Source) -> Iterator[str]:
    """Yields the top-level packages that a file's import lines name, by a regular expression and without a tree."""
    try:
        text = parsing.text_of(source.file, source.path)
    except UnreadableError:
        return  # reported where it is read
    for match in _IMPORTS.finditer(text):
        yield from (part.split()[0].partition(".")[0] for part in (match[1] or match[2]).split(",") if part.strip())


def _parsed(source: Source) -> tuple[str, ast.Module]:
    """Returns the text and the syntax tree of a file, or raises UnreadableError."""
    depth = sum(1 for _ in traceback.walk_stack(sys._getframe()))  # the limit counts the frames of the callers, too
    # The parser uses the C stack, which would overflow before the limit of a whole scan is reached.
    with recursion(min(sys.getrecursionlimit(), depth + _PARSED)):
        text = parsing.text_of(source.file, source.path)
        return text, parsing.tree(text, source.path)


@contextlib.contextmanager
def recursion(limit: int) -> Iterator[None]:
    """Sets Python's recursion limit while the context lasts."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _fill_module(module: Module, tree: ast.Module) -> None:
    """Fills a module with its classes and functions, and with the names that imports and assignments bind."""
    functions, classes = bodies(tree)
    for name, node in classes.items():
        targets: list[ast.expr] = []
        for statement in node.body:
            if isinstance(statement, ast.Assign):
                targets += statement.targets
            if isinstance(statement, ast.AnnAssign):
                targets += [statement.target]
        variables = frozenset(target.id for target in targets if isinstance(target, ast.Name))
        module.classes[name] = Class(module, name, tuple(map(chain_of, node.bases)), variables)
    for body in functions:
        unit = module.units[body.name] = _unit_of(module, body)
        for event in body.events:
            if event.act is Act.IMPORT:
                _bind_imports(module, event.node, module.bound if body.name == MODULE else unit.imports)
    for event in functions[0].events:  # the first is `<module>`: what runs at import
        if event.act is Act.ASSIGN and isinstance(event.node, ast.Name) and event.value is not None:
            _bind_value(module, event.node.id, event.value)


def _unit_of(module: Module, body: Body) -> CodeUnit:
    node = body.node
    unit = CodeUnit(module, body.name, body, isinstance(node, ast.ClassDef), body.owner)
    if not isinstance(node, ast.Module):
        unit.decorators = frozenset(last for decorator in node.decorator_list for last in chain_of(decorator)[-1:])
    if isinstance(node, Function):
        written = [parameter for parameter in parameters(node) if parameter.kind not in STARRED]
        unit.parameters = tuple(parameter.name for parameter in written)
        unit.returns = node.returns
        for parameter in written:
            value = parameter.default
            if value is not None:  # a default that is no constant has the unknown term, None
                unit.defaults[parameter.name] = ("const", value.value) if isinstance(value, ast.Constant) else None
        if node.name == "__init__":
            unit.tensors = frozenset(_registered_tensors(body))
    return unit


def _registered_tensors(init: Body) -> Iterator[str]:
    """Yields the names of the attributes that an `__init__` makes buffers or parameters."""
    for event in init.events:
        node, value = event.node, event.value
        if isinstance(node, ast.Call) and event.chain[-1:] in (("register_buffer",), ("register_parameter",)):
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))
        elif isinstance(node, ast.Attribute) and isinstance(value, ast.Call) and event.act is Act.ASSIGN:
            yield from [node.attr] if chain_of(value.func)[-1:] == ("Parameter",) else []


def _bind_value(module: Module, name: str, value: ast.expr) -> None:
    """Notes an assignment in a module: the names in a list or dictionary in `tables`, another name in `bound`."""
    if isinstance(value, (ast.Dict, ast.List, ast.Tuple, ast.Set)):
        nodes = [node for node in ast.walk(value) if isinstance(node, (ast.Name, ast.Attribute))]
        module.tables.setdefault(name, []).extend(map(chain_of, nodes))
        module.in_tables |= set(nodes)
    chain = chain_of(value)
    if chain and name not in module.bound and chain[0] != name:
        head = module.bound.get(chain[0]) or (f"{module.name}.{chain[0]}" if chain[0] in module.classes else "")
        if head:
            module.bound[name] = ".".join((head, *chain[1:]))


def _bind_imports(module: Module, node: ast.AST, bound: dict[str, str]) -> None:
    """Adds to `bound` the names that an import statement binds, each with its full name: `{"a": "a"}` of `import a.b`,
    `{"c": "a.b"}` of `import a.b as c`. Of `from a import *` the module goes to `module.stars`.
    """
    if isinstance(node, ast.Import):
        for alias in node.names:
            bound[bound_name(alias)] = alias.name if alias.asname else bound_name(alias)
    elif isinstance(node, ast.ImportFrom):
        home = imported_from(node, module.name, module.source.file.name == "__init__.py")
        for alias in node.names:
            if alias.name == "*":
                module.stars.append(home)
            else:
                bound[bound_name(alias)] = f"{home}.{alias.name}"


_NOT_ENTERED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    file: Path
    path: str  #: Its path below the folder, with forward slashes.


def find_sources(root: Path) -> tuple[list[Source], list[ScanFinding]]:
    """Returns the Python files of a folder, or a file alone, and a finding for each folder or link that is not read. A
    linked folder is entered once; a loop of links is a finding.
    """
    if root.is_file():
        return [Source(root, root.name)], []
    sources: list[Source] = []
    unread: list[ScanFinding] = []
    entered = {os.path.realpath(root)}
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            below = folder.relative_to(root).as_posix()
            unread.append(ScanFinding("PS906", below, 0, "", f"It cannot be opened: {error.strerror}"))
            continue
        for entry in entries:
            path, below = Path(entry.path), Path(entry.path).relative_to(root).as_posix()
            if _is_loop(path):
                unread.append(ScanFinding("PS905", below, 0, "", "It is a link that leads back to itself"))
            elif entry.is_dir() and not entry.name.startswith(".") and entry.name not in _NOT_ENTERED:
                real, top = os.path.realpath(path), Path(os.path.realpath(root))
                if entry.is_symlink() and top.is_relative_to(real):
                    unread.append(ScanFinding("PS905", below, 0, "", "It is a link to a folder that it lies in"))
                elif entry.is_symlink() and not Path(real).is_relative_to(top):
                    unread.append(ScanFinding("PS905", below, 0, "", "It is a link out of the folder"))
                elif real not in entered:
                    entered.add(real)
                    pending.append(path)
            elif entry.name.endswith(".py"):
                sources.append(Source(path, below))
    return sources, unread


def _is_loop(path: Path) -> bool:
    """Returns whether a path is a link that leads back to itself; a link to nothing is none."""
    try:
        path.stat()
    except OSError as error:
        return path.is_symlink() and not isinstance(error, FileNotFoundError)
    return False
