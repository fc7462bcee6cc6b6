"""Drafts of a pack: a patch with its function, its tests and its lock row; a model card with its job and family.

Here is a patch before it is filled in, by its kind: the fields of its entry, its function and its test.
"""

from __future__ import annotations

import ast
import dataclasses
import keyword
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
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
from torchport.porting.draft.target_source import Target, check_name, find, folders_of, parameters
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
    #: Whether its id and its test also have the file's name, because two modules have functions of this name.
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
        last = self.target.partition(":")[0].rpartition(".")[2].strip("_")
        return {"op": "lowerings", "stub": "imports"}.get(self.kind, last or "patches")

    @property
    def names(self) -> str:
        """Its files below `patches/`, without their endings: `up/attention`."""
        return f"{self.package}/{self.files}"


@dataclasses.dataclass(frozen=True)
class Draft:
    """A patch before it is filled in."""

    fields: Mapping[str, Any]  #: The fields of its entry.
    python: str  #: Source; empty for a stub.
    test: Piece  #: It fails until the patch and the test's arguments are filled in.
    left: Sequence[str]  #: What to fill in.


def draft(request: PatchDraftRequest) -> Draft:
    """Returns the draft of a patch; upstream must be on the search path. Nothing of it is imported."""
    check_name(request.target, request.place)
    flags = {"stub": ("--importer MODULE", request.importers), "rewrite": ("--line N", request.line)}
    for kind, (flag, value) in flags.items():
        if request.kind == kind and not value:
            raise BadValueError(request.place, f"--kind {kind} has no {flag}", f"Add {flag}")
        if request.kind != kind and value:
            raise BadValueError(request.place, f"{flag.partition(' ')[0]} is for --kind {kind}", "Leave it out")
    if not re.fullmatch(r"[A-Za-z_]\w*", request.files, re.ASCII):
        raise BadValueError(f"--file {request.file}", "It is no name of a file of patches", "Write letters and digits")
    makers = {"rewrite": _draft_rewrite, "op": _draft_lowering, "stub": _draft_stub}
    return makers.get(request.kind, _draft_replacement)(request)


def _common_fields(request: PatchDraftRequest, path: str) -> dict[str, Any]:
    """Returns the fields of an entry of any kind. Its id is of its package and `path`: `up.block-forward`. The name of
    its file follows if a patch of torchport's has that id, as for functions of torch, or if `in_full` asks for it.
    """
    key = f"{proposal.slug(request.package)}.{proposal.slug(path)}"
    folders = find_pack().folders
    known = patch.read(folders, [request.package]) if request.package in patch.upstreams(folders) else []
    is_in_full = request.in_full or key in {entry.id for entry in known}
    fields: dict[str, Any] = {
        "id": f"{key}-{proposal.slug(request.files)}" if is_in_full else key,
        "target": request.target,
        "why": request.why,
        "equivalence": proposal.PROMISE,
        "fits": proposal.fits(request.package),
    }
    # Made only to ask whether everybody uses the target's package: the answer is the same for any kind.
    probe = proposal.entry_of({**fields, "replace": "a.py:a"}, request.package)
    if probe.is_shared and request.kind in ("replace", "wrap", "rewrite"):
        fields |= {"scope": "global", "scope_reason": "say here why that is safe for everybody"}
    return fields


def _left_to_fill_in(request: PatchDraftRequest, name: str, test: Piece, *more: str) -> list[str]:
    """Returns lines on what to fill in: the function `name`, the test's arguments, `more`, and fields of the entry."""
    why = "why, " if request.why == WHY else ""
    entry = f"In the entry: {why}equivalence, and must_be_called with the stages that must call it"
    return [f"{name} in patches/{request.names}.py", f"The arguments in {test.file}", *more, entry]


def _test(request: PatchDraftRequest, name: str, id: str, title: str, **values: object) -> Piece:
    """Returns the test of the patch with an id, by `test.jinja`, in a file of its own: it calls an `operator`, imports
    without a `package`, or compares upstream's result with the patch and without it.
    """
    file = f"tests/test_{request.package}_{name}.py"
    trial = {"file": file, "name": name, "id": id, "names": request.names}
    return Piece(file, page.rendered(TEMPLATE, trial=trial, title=title, **values), mode="new")


def _draft_replacement(request: PatchDraftRequest) -> Draft:
    """Returns the draft of a `replace` or `wrap` for a function, method or class of upstream. Refuses the kind `value`,
    as what was found is a definition.
    """
    target = find(request.target, request.place)
    with parsing.nesting(target.source.shown, target.node.lineno):
        if request.kind == "value":
            fact = f"{request.target} is a {target.kind}, and no value"
            raise TargetError(request.place, fact, "Write --kind replace, or wrap", target=request.target)
        _check_callable(request, target)
        snake = name_of(target.path)
        path = ".".join(target.path)
        is_class = isinstance(target.node, ast.ClassDef)
        name = target.path[-1] if is_class else snake
        text = _class_text(target, name) if is_class else _function_text(target, name, request.kind == "wrap")
        fields = {**_common_fields(request, path), request.kind: f"{request.files}.py:{name}"}
        test_name = f"{request.files}_{snake}" if request.in_full else snake
        test = _agreement_test(request, test_name, fields["id"], target)
        more = [f"The decorators of {path}: {', '.join(target.decorators)}"] if target.decorators else []
        if is_class:
            more.append("The bases of the class, and whatever tests isinstance with it")
        return Draft(fields, text, test, _left_to_fill_in(request, name, test, *more))


def _check_callable(request: PatchDraftRequest, target: Target) -> None:
    """Refuses a target that no function can replace: an asynchronous generator, `__new__`, some classes."""
    what = ".".join(target.path)
    if target.is_async and target.is_generator:
        fact = f"{what} ({target.place}) is an asynchronous generator function"
        raise TargetError(request.place, fact, "Patch the function that iterates over it", target=request.target)
    if target.kind == "class" and request.kind == "wrap":
        fact = f"{what} ({target.place}) is a class, and a wrapper takes a function"
        remedy = f"Wrap one of its methods, such as {what}.__init__"
        raise TargetError(request.place, fact, remedy, target=request.target)
    for other in target.source.tree.body if target.kind == "class" else []:
        if isinstance(other, ast.ClassDef) and what in map(ast.unparse, other.bases):
            fact = f"{other.name} in the same module derives from {what} ({target.place}), and would keep it"
            raise TargetError(request.place, fact, f"Replace methods of {what}", target=request.target)
    if target.path[-1] == "__new__":
        fact = f"{what} ({target.place}) makes the object before there is one"
        raise TargetError(request.place, fact, "Replace the class, or wrap __init__", target=request.target)


def _draft_rewrite(request: PatchDraftRequest) -> Draft:
    """Returns the draft of a `rewrite` of the statement on a line of the target; refuses a line without a statement."""
    target = find(request.target, request.place)
    what = ".".join(target.path)
    line = request.line or 0
    last = target.node.end_lineno or target.node.lineno
    if isinstance(target.node, ast.ClassDef) or not target.node.lineno < line <= last:
        fact = f"Line {line} is not in the body of a function {what}: {target.place} is a {target.kind}"
        remedy = f"Name a line from {target.node.lineno + 1} to {last}" if target.kind != "class" else "Name a method"
        raise BadValueError(f"--line {line}", fact, remedy)
    statement = proposal.statement(target.source, line, request.why, request.files)
    if statement is None or "rewrite" not in statement.fields or statement.fields["target"] != request.target:
        fact = f"The statement on line {line} of {what} cannot be rewritten ({target.place})"
        remedy = "Name an outer statement, or write --kind replace"
        raise TargetError(request.place, fact, remedy, target=request.target)
    name = statement.fields["rewrite"]["put"].partition(":")[2]
    returns = f" Returns {statement.gives}." if statement.gives else ""
    doc = f"Fill in: does what is done at {what}, line {line}.{returns}"
    text = _unfilled_function(name, ", ".join(statement.parameters), doc)
    fields = {**_common_fields(request, what), **statement.fields}
    test = _agreement_test(request, f"{request.files}_{name}", fields["id"], target)
    return Draft(fields, text, test, _left_to_fill_in(request, name, test))


def _draft_lowering(request: PatchDraftRequest) -> Draft:
    """Returns the draft of an `op` for a function of torch or an ATen overload; refuses other targets."""
    module, _, path = request.target.partition(":")
    if module.partition(".")[0] != "torch":
        fact = f"{request.target} is not torch's"
        raise TargetError(request.place, fact, "Name torch.ops.aten:name.overload, or write --kind replace")
    if module.startswith("torch.ops"):
        parameter_text = _parameters_of_overload(request)
    else:
        try:
            source = read_source(module)
        except ModuleNotFoundError as error:
            raise TargetError(request.place, f"There is no module {module}", "Name a function of torch") from error
        node = source.where(tuple(path.split("."))).node if source else None
        parameter_text = parameters(node).text if isinstance(node, ast.FunctionDef) else "*args, **kwargs"
    name = re.sub(r"\W", "_", path.removesuffix(".default")).strip("_")
    fields = {**_common_fields(request, name), "op": f"{request.files}.py:{name}"}
    doc = f"Fill in: computes {request.target} of the engine's tensors, with torchport.engine.call_jax."
    operator = request.target.replace(":", ".")
    title = f"{operator} as '{fields['id']}' lowers it, and as torch computes it."
    test = _test(request, name, fields["id"], title, operator=operator)
    function = _unfilled_function(name, parameter_text, doc)
    return Draft(fields, function, test, _left_to_fill_in(request, name, test))


def _parameters_of_overload(request: PatchDraftRequest) -> str:
    """Returns the parameters of an ATen overload, such as `input, *, approximate='none'`; raises for an unknown one."""
    import torch

    module, _, path = request.target.partition(":")
    overload = ".".join([*module.split(".")[2:], path])
    try:
        schema = attrgetter(f"{overload}._schema")(torch.ops)
    except AttributeError as error:
        fact = f"torch {torch.__version__} has no overload {overload}"
        remedy = "Name one, as torch.ops.aten:gelu.default"
        raise TargetError(request.place, fact, remedy, target=request.target) from error
    positional: list[str] = []
    keyword_only: list[str] = []
    for argument in schema.arguments:
        text = str(argument.name)
        if argument.has_default_value():  # None stands for a default that is no literal
            is_literal = isinstance(argument.default_value, int | float | str | bool | None)
            text += f"={argument.default_value!r}" if is_literal else "=None"
        (keyword_only if argument.kwarg_only else positional).append(text)
    return ", ".join([*positional, *(["*"] if keyword_only else []), *keyword_only])


def _draft_stub(request: PatchDraftRequest) -> Draft:
    """Returns the draft of a `stub` for an absent package; refuses an installed package, and an absent importer."""
    package = re.split(r"[.:]", request.target)[0]
    if is_there(package):
        fact = f"The package {package} is installed, and a stub is for one that is not"
        raise TargetError(request.place, fact, "Write --kind replace or wrap", target=request.target)
    for module in request.importers:
        if not is_there(module):
            remedy = below_src(module) or "Name a module of upstream; --upstream-path says where its checkout is"
            raise TargetError(f"--importer {module}", f"There is no module {module}", remedy)
    fields = {
        **_common_fields(request, package),
        "stub": {"package": package, "importers": list(request.importers)},
        "plumbing": True,
        "equivalence": "bitwise",
    }
    left = ["Nothing in Python: a stub raises when it is called"]
    if request.why == WHY:
        left.append("In the entry: why")
    module = request.importers[0]
    title = f"{module} is imported where {package} is not installed."
    test = _test(request, f"without_{package}", fields["id"], title, module=module, package=package)
    return Draft(fields, "", test, left)


def _agreement_test(request: PatchDraftRequest, name: str, id: str, target: Target) -> Piece:
    """Returns a test that compares the target's results with the patch and without it."""
    path = ".".join(target.path)
    title = f"{path} with the patch '{id}' and without it."
    if isinstance(target.node, ast.ClassDef) or target.path[-1] in ("__init__", "__new__"):
        class_path = path.removesuffix(".__init__").removesuffix(".__new__")
        return _test(request, name, id, title, module=target.source.module, path=class_path)
    # In the test, `call` is the expression that is compared, and `takes` a comment on its arguments.
    if target.kind == "property":
        call, takes = f"args[0].{target.path[-1]}", "By position there is the object alone."
    else:
        names = parameters(target.node).names[1 if target.kind == "class method" else 0 :]
        first = " The first one is the object." if target.kind == "method" else ""
        call, takes = f"module.{path}(*args, **kwargs)", f"It takes ({', '.join(names)}).{first}"
        if target.is_async:
            call = f"asyncio.run({call})"
        elif target.is_generator:
            call = f"list({call})"
    values = {"module": target.source.module, "is_async": target.is_async, "takes": takes, "call": call}
    return _test(request, name, id, title, **values)


@dataclasses.dataclass(frozen=True)
class DraftedPatch:
    """A draft that was written into a pack."""

    id: str
    names: str  #: Its files, as `PatchDraftRequest.names`.
    function: str  #: Its function, as `model.py:forward_12`; empty for a stub.
    test: str  #: Its test's file.
    lines: Sequence[str]  #: To print, one for each file.
    left: Sequence[str]  #: What to fill in.


def write_draft(request: PatchDraftRequest, home: Home) -> DraftedPatch:
    """Writes a draft into a pack's folder, all or nothing; raises TakenNameError if a part of it is there already."""
    drafted = draft(request)
    pieces = [Piece(f"patches/{request.names}.yaml", proposal.written(drafted.fields, request.package) + "\n")]
    entry = _checked(request, drafted, home, pieces[0])
    reference = (entry.reference or "") if drafted.python else ""
    if drafted.python:
        head = f'"""Functions of the patches in {request.names}.yaml."""\n\nfrom __future__ import annotations\n\n\n'
        pieces.append(Piece(f"patches/{request.package}/{reference.partition(':')[0]}", drafted.python, head))
    pieces.append(drafted.test)
    lock = drift.with_row(entry, drafted_entries(home, request.package))
    if lock:
        pieces.append(Piece(f"patches/{request.package}/{LOCK}", lock, mode="whole"))
    lines = home.write(pieces)
    locked = [] if lock or not entry.edits else ["Its target has no row of its own in the lock: it was there"]
    return DraftedPatch(entry.id, request.names, reference, drafted.test.file, lines, [*drafted.left, *locked])


def drafted_entries(home: Home, package: str) -> list[Entry]:
    """Returns the entries of a pack's patches for a package."""
    files = sorted((home.root / "patches" / package).glob("*.yaml"))
    return [entry for file in files if file.name != LOCK for entry in read_file(file)]


def _checked(request: PatchDraftRequest, drafted: Draft, home: Home, piece: Piece) -> Entry:
    """Returns the entry of a draft, whose YAML is `piece`, checked against its pack and against upstream's source.
    Nothing is written.
    """
    entry = proposal.entry_of(drafted.fields, request.package)
    path = home.root / piece.file
    for other in drafted_entries(home, request.package):
        if other.id == entry.id:
            fact = f"The patch '{entry.id}' is there already"
            raise TakenNameError(other.place, fact, "Change that entry, or delete it first", patch=entry.id)
    entry._place = request.place  # for the text of a conflict: the entry has no line yet
    patch_set.check_claims(running=[], fresh=[*read_file(path), entry] if home.text(piece.file) else [entry])
    content = home.text_with(piece)
    document = parse_document(content, as_named(path))  # the file as it will be
    if not isinstance(document.data, list):
        fact = "It is no list whose items stand on lines of their own"
        raise WrongTypeError(as_named(path), fact, "Choose another file with --file")
    line = content.removesuffix(piece.text).count("\n") + 1
    entry._place = f"{as_named(path)}:{line}"
    entry._folder = path.parent
    if entry.edits:
        checks.check_source(entry, checks.UNKNOWN)
    return entry


def upstreams(request: PatchDraftRequest, checkout: Path | None) -> list[Path]:
    """Returns the folders of upstream's source, the checkout among them, where no draft may be written."""
    modules = [request.target.partition(":")[0], *request.importers]
    others = [module for module in modules if module.partition(".")[0] != "torch"]
    return [*([checkout] if checkout else []), *folders_of(others)]


ORIGINAL = "original"
"""The first parameter of a wrapper."""


def name_of(path: Sequence[str]) -> str:
    """Returns a name for a function that takes the place of `path`: `block_forward` for `("Block", "forward")`."""
    snake = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part.strip("_")).lower() for part in path]
    name = re.sub(r"\W", "_", "_".join(part for part in snake if part)) or "patched"
    return f"{name}_" if keyword.iskeyword(name) or name[0].isdigit() else name


def _function_text(target: Target, name: str, wraps: bool) -> str:
    """Returns the text of a function to fill in; with `wraps` its first argument is the target."""
    node = target.node
    assert not isinstance(node, ast.ClassDef)
    names = parameters(node).names
    original = None
    if wraps:  # another name if the target has a parameter `original`
        original = f"{ORIGINAL}_function" if ORIGINAL in {part.strip("*") for part in names} else ORIGINAL
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


def _unfilled_function(name: str, parameter_text: str, doc: str) -> str:
    return f'def {name}({parameter_text}):\n    """{doc}"""\n    raise NotImplementedError("fill in {name}")\n'


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
        if not isinstance(method, Function) or (method.name != "__init__" and method.name.startswith("_")):
            continue
        decorators = [ast.unparse(decorator).rpartition(".")[2] for decorator in method.decorator_list]
        kinds = [decorator.replace("cached_", "") for decorator in decorators]
        word = "async def" if isinstance(method, ast.AsyncFunctionDef) else "def"
        text += ["", *(f"    @{kind}" for kind in kinds if kind in ("staticmethod", "classmethod", "property"))]
        text.append(f"    {word} {method.name}({parameters(method).text}):")
        text.append(f'        raise NotImplementedError("fill in {method.name}")')
    lines = "\n".join(text) + "\n"
    return f"import torch\n\n\n{lines}" if is_module else lines
