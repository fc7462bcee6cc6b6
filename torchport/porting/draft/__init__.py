"""Drafts of a pack: a patch with its function, its tests and its lock row; a model card with its job and family.

Here is a patch before it is filled in, by its kind: the fields of its entry, its function and its test.
"""

from __future__ import annotations

import ast
import dataclasses
import keyword
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchport import patch
from torchport.config import parse_document
from torchport.config.checkout import below_src
from torchport.config.pack import find_pack
from torchport.errors import BadValueError, TakenNameError, TargetError, WrongTypeError
from torchport.files import page
from torchport.files.folder import as_named
from torchport.patch import patch_set
from torchport.patch.declared import Entry
from torchport.patch.declared.reading import LOCK, read_file
from torchport.patch.source import checks, drift, proposal
from torchport.porting.draft.home import Home, Piece
from torchport.porting.draft.target_source import Target, check_name, find, folder_of, parameters
from torchport.source import parsing
from torchport.source.bindings import Function
from torchport.source.parsing import is_there, read_source

TEMPLATE = Path(__file__).with_name("test.jinja")
WHY = "say here what fails, or is slow, without it"


@dataclasses.dataclass(frozen=True)
class PatchDraftRequest:
    target: str  #: `module:attribute.path`.
    kind: str
    #: The name of its files in `patches/<package>/`, without their endings; by default its module's.
    file: str | None = None
    line: int | None = None  #: Of a rewrite, the line of the statement in upstream's file.
    importers: Sequence[str] = ()
    why: str = WHY
    #: Whether its id and its test have the file's name, too: two modules have functions of this name.
    in_full: bool = False

    @property
    def place(self) -> str:
        return f"torchport new patch {self.target}"

    @property
    def package(self) -> str:
        """The folder of its files in `patches/`: the package that is changed; of a stub, the first importer's."""
        first = self.importers[0] if self.kind == "stub" and self.importers else self.target
        return re.split(r"[.:]", first)[0]

    @property
    def files(self) -> str:
        """The name of its files, without their endings."""
        if self.file is not None:
            return self.file
        if self.kind in ("op", "stub"):
            return {"op": "lowerings", "stub": "imports"}[self.kind]
        return self.target.partition(":")[0].rpartition(".")[2].strip("_") or "patches"

    @property
    def names(self) -> str:
        return f"{self.package}/{self.files}"


@dataclasses.dataclass(frozen=True)
class Draft:
    fields: Mapping[str, Any]  #: The entry's; those that every entry has may be missing.
    python: str  #: Its function's text.
    test: str  #: Its test's text.
    trial: Trial
    left: Sequence[str]  #: What to fill in.


@dataclasses.dataclass(frozen=True)
class Trial:
    """The test of a patch: it compares upstream's result with the patch and without it. It fails until the patch and
    the test's arguments are filled in, and has a file of its own.
    """

    id: str
    names: str
    name: str

    @property
    def file(self) -> str:
        return f"tests/test_{self.names.partition('/')[0]}_{self.name}.py"

    def text(self, title: str, **values: object) -> str:
        """Returns the test, by `test.jinja`: it calls an `operator`, imports without a `package`, or compares."""
        return page.rendered(TEMPLATE, trial=self, title=title, **values)


def draft(wish: PatchDraftRequest) -> Draft:
    """Returns the draft of a patch; upstream must be on the search path. Nothing of it is imported."""
    _check(wish)
    makers = {"rewrite": _rewritten, "op": _lowered, "stub": _stubbed}
    return makers.get(wish.kind, _replaced_or_wrapped)(wish)


def _check(wish: PatchDraftRequest) -> None:
    """Raises if the flags of the wished patch do not fit its kind, or if the file's name is no plain word."""
    check_name(wish.target, wish.place)
    flags = {"stub": ("--importer MODULE", wish.importers), "rewrite": ("--line N", wish.line)}
    for kind, (flag, value) in flags.items():
        if wish.kind == kind and not value:
            raise BadValueError(wish.place, f"--kind {kind} has no {flag}", f"Add {flag}")
        if wish.kind != kind and value:
            raise BadValueError(wish.place, f"{flag.partition(' ')[0]} is for --kind {kind}", "Leave it out")
    if not re.fullmatch(r"[A-Za-z_]\w*", wish.files, re.ASCII):
        raise BadValueError(f"--file {wish.file}", "It is no name of a file of patches", "Write letters and digits")


def _entry_id(wish: PatchDraftRequest, path: str) -> str:
    """Returns the entry's id; with the name of its file where a pack beneath has that id, as for functions of torch."""
    key = f"{proposal.slug(wish.package)}.{proposal.slug(path)}"
    folders = find_pack(()).folders
    known = patch.read(folders, [wish.package]) if wish.package in patch.upstreams(folders) else []
    is_taken = wish.in_full or key in {entry.id for entry in known}
    return f"{key}-{proposal.slug(wish.files)}" if is_taken else key


def _common_fields(wish: PatchDraftRequest, path: str) -> dict[str, Any]:
    """Returns the fields of an entry of any kind."""
    fields: dict[str, Any] = {
        "id": _entry_id(wish, path),
        "target": wish.target,
        "why": wish.why,
        "equivalence": proposal.PROMISE,
        "fits": proposal.fits(wish.package),  # it reads what is installed: once
    }
    probe = proposal.entry_of({**fields, "replace": "a.py:a"}, wish.package)
    if probe.is_shared and wish.kind in ("replace", "wrap", "rewrite"):
        fields |= {"scope": "global", "scope_reason": "say here why that is safe for everybody"}
    return fields


def _left(wish: PatchDraftRequest, name: str, file: str, test: str, *more: str) -> list[str]:
    why = "why, " if wish.why == WHY else ""
    entry = f"In the entry: {why}equivalence, and must_be_called with the stages that must call it"
    return [f"{name} in {file}", f"The arguments in {test}", *more, entry]


def _replaced_or_wrapped(wish: PatchDraftRequest) -> Draft:
    """Returns the draft of a `replace` or `wrap` for a function, method or class of upstream."""
    target = find(wish.target, wish.place)
    with parsing.nesting(target.source.shown, target.node.lineno):
        return _function_draft(wish, target)


def _function_draft(wish: PatchDraftRequest, target: Target) -> Draft:
    if wish.kind == "value":
        fact = f"{wish.target} is a {target.kind}, and no value"
        raise TargetError(wish.place, fact, "Write --kind replace, or wrap", target=wish.target)
    _check_callable(wish, target)
    short, path = name_of(target.path), ".".join(target.path)
    name = target.path[-1] if target.kind == "class" else short
    is_class = isinstance(target.node, ast.ClassDef)
    text = _class_text(target, name) if is_class else _function_text(target, name, wish.kind == "wrap")
    trial = Trial(_entry_id(wish, path), wish.names, f"{wish.files}_{short}" if wish.in_full else short)
    fields = {**_common_fields(wish, path), wish.kind: f"{wish.files}.py:{name}"}
    more = [f"The decorators of {path}: {', '.join(target.decorators)}"] if target.decorators else []
    if target.kind == "class":
        more.append("The bases of the class, and whatever tests isinstance with it")
    left = _left(wish, name, f"patches/{wish.names}.py", trial.file, *more)
    return Draft(fields, text, _agreement_test(trial, target), trial, left)


def _check_callable(wish: PatchDraftRequest, target: Target) -> None:
    """Refuses a target that no function or class can replace or wrap."""
    what = ".".join(target.path)
    if target.is_async and target.is_generator:
        fact = f"{what} ({target.place}) is an asynchronous generator function"
        raise TargetError(wish.place, fact, "Patch the function that iterates over it", target=wish.target)
    if target.kind == "class" and wish.kind == "wrap":
        fact = f"{what} ({target.place}) is a class, and a wrapper takes a function"
        raise TargetError(wish.place, fact, f"Wrap one of its methods, such as {what}.__init__", target=wish.target)
    if target.kind == "class":
        for other in target.source.tree.body:
            if isinstance(other, ast.ClassDef) and what in map(ast.unparse, other.bases):
                fact = f"{other.name} in the same module derives from {what} ({target.place}), and would keep it"
                raise TargetError(wish.place, fact, f"Replace methods of {what}", target=wish.target)
    if target.path[-1] == "__new__":
        fact = f"{what} ({target.place}) makes the object before there is one"
        raise TargetError(wish.place, fact, "Replace the class, or wrap __init__", target=wish.target)


def _rewritten(wish: PatchDraftRequest) -> Draft:
    """Returns the draft of a `rewrite` of the statement on a line of the target; raises if that cannot be rewritten."""
    target = find(wish.target, wish.place)
    what, line = ".".join(target.path), wish.line or 0
    last = target.node.end_lineno or target.node.lineno
    if isinstance(target.node, ast.ClassDef) or not target.node.lineno < line <= last:
        fact = f"Line {line} is not in the body of a function {what}: {target.place} is a {target.kind}"
        remedy = f"Name a line from {target.node.lineno + 1} to {last}" if target.kind != "class" else "Name a method"
        raise BadValueError(f"--line {line}", fact, remedy)
    statement = proposal.statement(target.source, line, wish.why, wish.files)
    if statement is None or "rewrite" not in statement.fields or statement.fields["target"] != wish.target:
        fact = f"The statement on line {line} of {what} cannot be rewritten ({target.place})"
        raise TargetError(wish.place, fact, "Name an outer statement, or write --kind replace", target=wish.target)
    change = statement.fields["rewrite"]
    name = change["put"].partition(":")[2]
    test = Trial(statement.fields["id"], wish.names, f"{wish.files}_{name}")
    text = rewriting(name, statement.parameters, statement.gives, f"{what}, line {line}")
    fields = {**_common_fields(wish, what), **statement.fields}
    left = _left(wish, name, f"patches/{wish.names}.py", test.file)
    return Draft(fields, text, _agreement_test(test, target), test, left)


def _lowered(wish: PatchDraftRequest) -> Draft:
    """Returns the draft of an `op` for a function of torch, or raises; reads an ATen overload's schema from torch."""
    module, _, path = wish.target.partition(":")
    if module.partition(".")[0] != "torch":
        fact = f"{wish.target} is not torch's"
        raise TargetError(wish.place, fact, "Name torch.ops.aten:name.overload, or write --kind replace")
    given = _parameters_of_overload(wish) if module.startswith("torch.ops") else _parameters_of_torch_function(wish)
    name = re.sub(r"\W", "_", path.removesuffix(".default")).strip("_")
    trial = Trial(_entry_id(wish, name), wish.names, name)
    fields = {**_common_fields(wish, name), "op": f"{wish.files}.py:{name}"}
    text = lowering(name, given, wish.target)
    left = _left(wish, name, f"patches/{wish.names}.py", trial.file)
    operator = wish.target.replace(":", ".")
    test = trial.text(f"{operator} as '{trial.id}' lowers it, and as torch computes it.", operator=operator)
    return Draft(fields, text, test, trial, left)


def _parameters_of_torch_function(wish: PatchDraftRequest) -> str:
    """Returns the parameters of a Python function of torch as source text; `*args, **kwargs` if it has no source."""
    module, _, path = wish.target.partition(":")
    try:
        source = read_source(module)
    except ModuleNotFoundError as error:
        raise TargetError(wish.place, f"There is no module {module}", "Name a function of torch") from error
    node = source.where(tuple(path.split("."))).node if source else None
    return parameters(node).text if isinstance(node, ast.FunctionDef) else "*args, **kwargs"


def _parameters_of_overload(wish: PatchDraftRequest) -> str:
    """Returns the parameters of an ATen overload as source text, from its schema; raises if there is none."""
    import torch

    module, _, path = wish.target.partition(":")
    value: Any = torch.ops
    parts = [*module.split(".")[2:], *path.split(".")]
    try:
        for part in parts:
            value = getattr(value, part)
        schema = value._schema
    except AttributeError as error:
        fact = f"torch {torch.__version__} has no overload {'.'.join(parts)}"
        raise TargetError(wish.place, fact, "Name one, as torch.ops.aten:gelu.default", target=wish.target) from error
    plain = [argument for argument in schema.arguments if not argument.kwarg_only]
    named = [argument for argument in schema.arguments if argument.kwarg_only]
    texts = [_argument_text(argument) for argument in plain]
    return ", ".join([*texts, *(["*"] if named else []), *(_argument_text(argument) for argument in named)])


def _argument_text(argument: Any) -> str:
    """Returns an argument of an ATen schema as source text, with its default, or None for one that is no literal."""
    if not argument.has_default_value():
        return str(argument.name)
    value = argument.default_value
    is_plain = isinstance(value, int | float | str | bool | None)
    return f"{argument.name}={value!r}" if is_plain else f"{argument.name}=None"


def _stubbed(wish: PatchDraftRequest) -> Draft:
    """Returns the draft of a `stub` for a package that is not installed; raises if it is, or if an importer is not."""
    package = re.split(r"[.:]", wish.target)[0]
    if is_there(package):
        fact = f"The package {package} is installed, and a stub is for one that is not"
        raise TargetError(wish.place, fact, "Write --kind replace or wrap", target=wish.target)
    for module in wish.importers:
        if not is_there(module):
            remedy = below_src(module) or "Name a module of upstream; --upstream-path says where its checkout is"
            raise TargetError(f"--importer {module}", f"There is no module {module}", remedy)
    trial = Trial(_entry_id(wish, package), wish.names, f"without_{package}")
    fields = {
        **_common_fields(wish, package),
        "stub": {"package": package, "importers": list(wish.importers)},
        "plumbing": True,
        "equivalence": "bitwise",
    }
    left = ["Nothing in Python: a stub raises when it is called"]
    left += ["In the entry: why"] if wish.why == WHY else []
    module = wish.importers[0]
    test = trial.text(f"{module} is imported where {package} is not installed.", module=module, package=package)
    return Draft(fields, "", test, trial, left)


def _agreement_test(trial: Trial, target: Target) -> str:
    """Returns the text of a test that compares the target's results with the patch and without it."""
    path = ".".join(target.path)
    title = f"{path} with the patch '{trial.id}' and without it."
    if target.kind == "class" or target.path[-1] in ("__init__", "__new__"):
        made = path.removesuffix(".__init__").removesuffix(".__new__")
        return trial.text(title, module=target.module, path=made)
    called = {"takes": _arguments_text(target), "call": _call_text(target)}
    return trial.text(title, module=target.module, is_async=target.is_async, **called)


def _arguments_text(target: Target) -> str:
    """Returns a sentence for the test that says which arguments the target takes."""
    assert not isinstance(target.node, ast.ClassDef)
    names = parameters(target.node).names
    if target.kind == "property":
        return "By position there is the object alone."
    if target.kind == "class method":
        names = names[1:]
    first = " The first one is the object." if target.kind == "method" else ""
    return f"It takes ({', '.join(names)}).{first}"


def _call_text(target: Target) -> str:
    """Returns the source text of a test's call of the target, with `args` and `kwargs`."""
    if target.kind == "property":
        return f"args[0].{target.path[-1]}"
    call = f"module.{'.'.join(target.path)}(*args, **kwargs)"
    if target.is_async:
        return f"asyncio.run({call})"
    return f"list({call})" if target.is_generator else call


@dataclasses.dataclass(frozen=True)
class DraftedPatch:
    id: str
    names: str
    function: str  #: Its function, as `model.py:forward_12`; empty for a stub.
    test: str
    lines: Sequence[str]
    left: Sequence[str]


def write_draft(wish: PatchDraftRequest, home: Home) -> DraftedPatch:
    """Writes a draft into a pack's folder, all or nothing; raises TakenNameError if a part of it is there already."""
    drafted = draft(wish)
    file = f"patches/{wish.names}.yaml"
    text = proposal.written(drafted.fields, wish.package) + "\n"
    entry = _checked(wish, drafted, home, file, text)
    pieces = [Piece(file, text)]
    reference = (entry.reference or "") if drafted.python else ""
    if drafted.python:
        python = f"patches/{wish.package}/{reference.partition(':')[0]}"
        pieces.append(Piece(python, drafted.python, head(wish.names)))
    pieces.append(Piece(drafted.trial.file, drafted.test, mode="new"))
    lock = drift.with_row(entry, drafted_entries(home, wish.package))
    pieces += [Piece(f"patches/{wish.package}/{LOCK}", lock, mode="whole")] if lock else []
    lines = home.write(pieces)
    locked = [] if lock or not entry.edits else ["Its target has no row of its own in the lock: it was there"]
    return DraftedPatch(entry.id, wish.names, reference, drafted.trial.file, lines, [*drafted.left, *locked])


def drafted_entries(home: Home, package: str) -> list[Entry]:
    folder = home.root / "patches" / package
    files = [file for file in sorted(folder.glob("*.yaml")) if file.name != LOCK] if folder.is_dir() else []
    return [entry for file in files for entry in read_file(file)]


def _checked(wish: PatchDraftRequest, drafted: Draft, home: Home, file: str, text: str) -> Entry:
    """Returns the entry of a draft, checked against its pack and against upstream's source."""
    entry = proposal.entry_of(drafted.fields, wish.package)
    path = home.root / file
    before = home.text(file)
    known = drafted_entries(home, wish.package)
    for other in known:
        if other.id == entry.id:
            fact = f"The patch '{entry.id}' is there already"
            raise TakenNameError(other.place, fact, "Change that entry, or delete it first", patch=entry.id)
    entry._place = wish.place
    patch_set.check_claims([], [*read_file(path), entry] if before else [entry])
    document = parse_document(f"{before.rstrip()}\n\n{text}" if before else text, as_named(path))
    if not isinstance(document.data, list):
        fact = "It is no list whose items stand on lines of their own"
        raise WrongTypeError(as_named(path), fact, "Choose another file with --file")
    entry._place = f"{as_named(path)}:{(before.rstrip().count(chr(10)) + 3) if before else 1}"
    entry._folder = path.parent
    if entry.edits:
        checks.check_source(entry, checks.UNKNOWN)
    return entry


def upstreams(wish: PatchDraftRequest, checkout: Path | None) -> list[Path]:
    modules = [wish.target.partition(":")[0], *wish.importers]
    found = [folder_of(module) for module in modules if module.partition(".")[0] != "torch"]
    return [*([checkout] if checkout else []), *(version for version in found if version is not None)]


ORIGINAL = "original"


def head(names: str) -> str:
    return f'"""Functions of the patches in {names}.yaml."""\n\nfrom __future__ import annotations\n\n\n'


def name_of(path: Sequence[str]) -> str:
    snake = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part.strip("_")).lower() for part in path]
    name = re.sub(r"\W", "_", "_".join(part for part in snake if part)) or "patched"
    return f"{name}_" if keyword.iskeyword(name) or name[0].isdigit() else name


def _function_text(target: Target, name: str, wraps: bool) -> str:
    """Returns the text of a function to fill in; one that wraps gets the target as its first argument."""
    node = target.node
    assert not isinstance(node, ast.ClassDef)
    names = parameters(node).names
    taken = ORIGINAL in {name.strip("*") for name in names}
    original = (f"{ORIGINAL}_function" if taken else ORIGINAL) if wraps else None
    given = parameters(node, original)
    what = ".".join(target.path)
    lines = [f'"""Fill in: does what {what} does ({target.place}).']
    if original is not None:
        passed = ", ".join(names)
        call = "await " if target.is_async else ""
        lines = [f'"""Fill in: takes the place of {what} ({target.place}), which is `{call}{original}({passed})`.']
    if given.unknown:
        lines += ["", f"    Upstream's defaults that are `...` here: {'; '.join(given.unknown)}."]
    if target.decorators:
        outside = ", ".join(f"@{decorator}" for decorator in target.decorators)
        lines += ["", f"    It takes the place of the function with its decorators: {outside}."]
    doc = "\n".join(lines) + ('"""' if len(lines) == 1 else '\n    """')
    word = "async def" if target.is_async else "def"
    body = f'    raise NotImplementedError("fill in {name}")\n'
    if target.is_generator and original is None:  # one statement, which makes it a generator function
        body = f'    yield from (_ for _ in ()).throw(NotImplementedError("fill in {name}"))\n'
    return f"{word} {name}({given.text}):\n    {doc}\n{body}"


def rewriting(name: str, given: Sequence[str], gives: str, where: str) -> str:
    """Returns the text of a rewrite's function to fill in: it takes `given`, and returns what `gives` says in words."""
    returns = f" Returns {gives}." if gives else ""
    doc = f'"""Fill in: does what is done at {where}.{returns}"""'
    return f'def {name}({", ".join(given)}):\n    {doc}\n    raise NotImplementedError("fill in {name}")\n'


def lowering(name: str, given: str, operator: str) -> str:
    doc = f'"""Fill in: computes {operator} of the engine\'s tensors, with torchport.engine.call_jax."""'
    return f'def {name}({given}):\n    {doc}\n    raise NotImplementedError("fill in {name}")\n'


def _class_text(target: Target, name: str) -> str:
    """Returns the text of a class to fill in, with the public methods of the target."""
    node = target.node
    assert isinstance(node, ast.ClassDef)
    bases = ", ".join(map(ast.unparse, node.bases))
    is_module = any(ast.unparse(base) in ("nn.Module", "torch.nn.Module", "Module") for base in node.bases)
    above = f", which derives from {bases}" if bases else ""
    text = [f"class {name}({'torch.nn.Module' if is_module else ''}):".replace("()", "")]
    text.append(f'    """Fill in: does what {".".join(target.path)} does ({target.place}){above}."""')
    for method in node.body:
        if isinstance(method, Function) and (method.name == "__init__" or not method.name.startswith("_")):
            text += ["", *_outline(method)]
    lines = "\n".join(text) + "\n"
    return f"import torch\n\n\n{lines}" if is_module else lines


def _outline(method: Function) -> list[str]:
    kinds = [ast.unparse(decorator).rpartition(".")[2].replace("cached_", "") for decorator in method.decorator_list]
    lines = [f"    @{kind}" for kind in kinds if kind in ("staticmethod", "classmethod", "property")]
    word = "async def" if isinstance(method, ast.AsyncFunctionDef) else "def"
    lines.append(f"    {word} {method.name}({parameters(method).text}):")
    return [*lines, f'        raise NotImplementedError("fill in {method.name}")']
