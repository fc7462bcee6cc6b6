"""What is said of an exception that leaves code of an upstream, of a family or of a patch: where, why, and the cure.

Such code runs while a port imports, loads, prepares, traces and runs a model. The frames of a traceback say whose the
exception is: that of the innermost frame outside the libraries. If that frame is torchport's own, it is a fault of
torchport, and stays a traceback. Upstream is what the card names, and what its patches change.

From top to bottom: whose code a frame is, which frame is at fault, what to do by the kind of the exception (`CURES`),
and the context that turns exceptions into errors (`explained`).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import Literal

from torchport import engine, patch
from torchport.config import Document
from torchport.config.card import Card
from torchport.config.pack import DERIVED, Pack
from torchport.errors import (
    AbsentPackageError,
    CudaError,
    ForeignError,
    HostTensorError,
    NoLoweringError,
    OperatorError,
    TracedValueError,
    UnreadableError,
)
from torchport.files.folder import as_named
from torchport.load.foreign import is_absence, is_cuda
from torchport.patch import Entry
from torchport.patch.declared.replacement import Explained
from torchport.patch.live import counted
from torchport.patch.source import proposal
from torchport.patch.source.proposal import Proposal
from torchport.source import parsing
from torchport.source.parsing import SourceFile
from torchport.task import Task

ENGINE = {"torch", "torchax", "jax", "jaxlib", "numpy"}
"""Packages that every port runs on, beside Python's own modules: no frame of them is at fault."""
HANDS_ON = {"__torch_dispatch__", "__torch_function__", "plainly"}
"""Functions of torchport that only pass a call on: the caller of such a function is at fault, not torchport."""
Owner = Literal["upstream", "family", "patch", "script", "torchport", "library", "engine"]
OURS: tuple[Owner, ...] = ("upstream", "family", "patch", "script")
"""Whose code a port can change: by a patch, or by an editor."""
MOST_FRAMES = 2
"""Frames that are listed, the innermost ones."""


@dataclasses.dataclass(frozen=True)
class Owners:
    """Tells whose code a module is: upstream's, a family's, a patch's, a script's, or a library's."""

    pack: Pack
    card: Card | None  #: The model card; None where only patches were named.
    document: Document | None
    #: Returns the patches in force. They are read only if there is an exception.
    patches: Callable[[], Sequence[Entry]]
    family: str = ""  #: The name of the family's module; empty without a family.
    #: Packages of upstream beside those that the card and the patches name.
    others: frozenset[str] = frozenset()
    is_script: bool = False  #: Whether somebody's script called torchport, as by `port`. Its code can be at fault.
    #: Whether the patches are left out on purpose. An error then names the patch that would have helped.
    unpatched: bool = False

    @classmethod
    def of_task(cls, task: Task) -> Owners:
        """Returns the owners of code by a task's card, patches and family."""
        card, family = task.card, task.family.__name__
        return cls(task.pack, card, task.card_document, lambda: task.patches(task.stages), family=family)

    @property
    def listed(self) -> str:
        """Where a patch is to be listed, for remedies: in the card, or in the call of `torchport.applied`."""
        if self.document is None:
            return "'patches' of torchport.applied(...)"
        if self.card is not None and self.card.model.startswith(DERIVED):  # a generated card: edits of it are lost
            command = f"torchport new model NAME --pipeline {self.card.model} --out DIR"
            return f"'patches' of a card of your own ({command})"
        return f"'patches' in {self.document.place(['patches'])}"

    @functools.cached_property
    def packages(self) -> set[str]:
        """The packages of upstream: those that the card names, and those that its patches change."""
        names = set(self.others)
        if self.card is not None:
            paths = [component.class_ for component in self.card.components.values()]
            if self.card.pipeline:
                paths.append(self.card.pipeline)
            names |= {name.replace("-", "_") for name in self.card.upstream}
            names |= {re.split(r"[.:]", path)[0] for path in paths}
            if self.card.checkout:
                names |= {self.card.checkout.package}
        return (names | {entry.package for entry in self.patches()}) - ENGINE - sys.stdlib_module_names


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a traceback."""

    owner: Owner
    module: str
    file: str  #: Its file; of rewritten code, upstream's.
    line: int
    function: str  #: With its class; `<module>` where the module itself runs.
    statement: str

    @property
    def place(self) -> str:
        """`file:line`, as a path that can be opened from the current folder."""
        return f"{as_named(Path(self.file))}:{self.line}"

    @property
    def caller(self) -> str:
        """The frame's function, the script or the import of a module, as the subject of a sentence."""
        if self.function == "<module>":
            return "The script" if self.owner == "script" else f"The import of {self.module}"
        return self.function

    def text(self) -> str:
        """Returns the frame as a line: `  up/model.py:5 in Layer.forward: y = x.item()`."""
        where = f"import of {self.module}" if self.function == "<module>" else self.function
        where = "the script" if self.caller == "The script" else where
        return f"  {self.place} in {where}: {self.statement[:100]}"


def frames_of(causes: Sequence[BaseException], owners: Owners) -> list[Frame]:
    """Returns the frames in the tracebacks of an exception and its causes, the innermost last."""
    return [_frame(*pair, owners) for cause in causes for pair in traceback.walk_tb(cause.__traceback__)]


def culprit(error: BaseException, frames: Sequence[Frame]) -> Frame | None:
    """Returns the innermost frame that a port can change; None if torchport or a library is at fault."""
    if is_absence(error):  # whoever imports the absent package is at fault, a library, too
        # Our import hook lies between an import and its error.
        frames = [frame for frame in frames if not frame.module.startswith("torchport.patch.live")]
        frame = next((frame for frame in reversed(frames) if frame.owner != "engine"), None)
    else:
        frame = next((frame for frame in reversed(frames) if frame.owner in (*OURS, "torchport")), None)
        if frame is not None and frame.owner == "torchport" and frame.function.rpartition(".")[2] in HANDS_ON:
            frame = next((frame for frame in reversed(frames) if frame.owner in OURS), None)
    return None if frame is None or frame.owner == "torchport" else frame


def _script_frame(frames: Sequence[Frame], owners: Owners) -> Frame | None:
    """Returns the innermost frame that a script's author can change, for an exception of a library: first from the
    traceback, then from the running calls; None if there is no such frame.
    """
    raised_in = next((frame for frame in reversed(frames) if frame.owner in OURS), None)
    called_from = next((frame for frame in reversed(running_frames(owners)) if frame.owner in (*OURS, "library")), None)
    if raised_in is not None or called_from is None:
        return raised_in
    return dataclasses.replace(called_from, owner="script") if called_from.owner == "library" else called_from


def shown_frames(frames: Sequence[Frame], culprit: Frame) -> list[Frame]:
    """Returns the frames to show to a person, the innermost last: code that a port can change, and the code at fault.
    The frame of a comprehension has its function's name and line, and is not shown twice.
    """
    listed = [frame for frame in frames if frame.owner in OURS or frame == culprit]
    return [frame for frame, inner in zip(listed, [*listed[1:], None], strict=True) if frame != inner][-MOST_FRAMES:]


def running_frames(owners: Owners) -> list[Frame]:
    """Returns the frames of the calls that are running, the innermost last."""
    return [_frame(*pair, owners) for pair in traceback.walk_stack(sys._getframe(1))][::-1]


def _frame(frame: FrameType, line: int, owners: Owners) -> Frame:
    code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
    if counted.CALLS in code.co_freevars:  # a patch's wrapper, which counts calls, has upstream's names
        module = counted.__name__
    linecache.checkcache(code.co_filename)  # the file may have changed since it was read
    statement = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    file = code.co_filename
    if file.startswith("<torchport: "):  # rewritten code has upstream's lines
        file = file.rpartition(" in ")[2].removesuffix(">")
    name = re.sub(r"(\.<locals>)?\.<\w+>.*", "", code.co_qualname)  # without comprehensions and lambdas inside it
    owner = _owner(module, file, owners)
    if owner == "patch" and module.removeprefix("torchport_patches.").partition(".")[0] in ENGINE:
        # A patch of torch that only passes a call on, such as the mode of `torch/autocast`, counts as torch's own code.
        passes_on = name.rpartition(".")[2] in HANDS_ON or "original(" in statement
        owner = "engine" if passes_on else owner
    return Frame(owner, module, file, line, name, statement)


def _owner(module: str, file: str, owners: Owners) -> Owner:
    """Returns whose code a module is, by its name, its file, and the names of packages and family in `owners`."""
    if module.startswith(("torchport.engine", "torchport_patches.torchax")):  # they call what upstream's line asks for
        return "engine"
    package = module.partition(".")[0]
    if package == "torchport_patches":
        return "family" if module == owners.family else "patch"
    if package in owners.packages:
        return "upstream"
    if package == "torchport":
        return "torchport"
    if package == "__main__" and owners.is_script:
        return "script"
    is_engine = package in ENGINE or package in sys.stdlib_module_names or file.startswith("<")
    return "engine" if is_engine else "library"


Cure = tuple[str, str, Proposal | None]
"""The fact and the remedy of an error, and a patch entry to paste; None without an entry."""
EDITED = {
    "family": "It is the family's code: mend it there",
    "patch": "It is a patch's function: mend it there",
    "script": "It is your own code: mend it there",
}
"""Owners whose code is edited, not patched, each with the remedy."""


def class_and_message(error: BaseException) -> str:
    """Returns an exception's class and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160].rstrip('.')}" if lines else type(error).__name__


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception of foreign code, the frame that is at fault, and all frames."""

    owners: Owners
    error: BaseException
    frame: Frame
    frames: Sequence[Frame]

    @property
    def home(self) -> str:
        """The module after which a drafted patch is named; `script` for a script; of a patch its path in `patches/`."""
        return "script" if self.frame.owner == "script" else self.frame.module.removeprefix("torchport_patches.")

    def kind(self) -> type[ForeignError]:
        """Returns the class of torchport's error for the exception, such as CudaError for code that asks for CUDA."""
        if is_absence(self.error):
            return AbsentPackageError
        if is_cuda(self.error):
            return CudaError
        if engine.missing_operator(self.error) is not None:
            return NoLoweringError
        if engine.difference(self.error) is not None:
            return OperatorError
        if engine.is_host_tensor(self.error):
            return HostTensorError
        return TracedValueError if engine.is_traced_value(self.error) else ForeignError

    def rewritten(self, why: str) -> Proposal | None:
        """Returns an entry that rewrites the statement at fault because of `why`; None outside upstream's functions."""
        if self.frame.owner in EDITED or not self.frame.file.endswith(".py"):
            return None
        text = "".join(linecache.getlines(self.frame.file))
        source = SourceFile(self.frame.module, self.frame.file, text)
        try:
            return proposal.statement(source, self.frame.line, why) if text else None
        except UnreadableError:  # the file has changed meanwhile, or is nested too deep: there is no entry to paste
            return None

    def remedy(self, cure: str, entry: Proposal | None) -> str:
        """Returns the remedy, with the sentence `cure`: to paste the entry, or without an entry to mend the code."""
        if entry is not None:
            text = entry.remedy(self.owners.listed)
            return f"{cure}: {text[0].lower()}{text[1:]}" if cure else text
        place = EDITED.get(self.frame.owner, "It runs outside all functions, where no statement can be rewritten")
        return f"{place}. {cure}" if cure else place


def _rewrite(failure: Failure, why: str, deed: str, cure: str) -> Cure:
    """Returns fact, remedy and patch entry for a statement that a rewrite can replace. `deed` is the fact's predicate,
    such as "calls an operator that torchax cannot lower". `cure` says how to mend the statement.
    """
    entry = failure.rewritten(why)
    return f"{failure.frame.caller} {deed}", failure.remedy(cure, entry), entry


def _operator(failure: Failure) -> Cure:
    difference = engine.difference(failure.error)
    assert difference is not None
    fact, cure = difference
    return _rewrite(failure, "Calls an operator that computes something else than in PyTorch.", f"calls {fact}", cure)


def _no_lowering(failure: Failure) -> Cure:
    target, deed = engine.missing_operator(failure.error), "calls an operator that torchax cannot lower"
    if target is None or not target.startswith("torch.ops.aten:"):
        return _rewrite(failure, f"{deed.capitalize()}.", deed, "Compute it with other operators")
    entry = proposal.operator(target, failure.home, "torchax has no lowering for it.")
    return f"{failure.frame.caller} {deed}", entry.remedy(failure.owners.listed), entry


def _cuda(failure: Failure) -> Cure:
    import torch

    owners = failure.owners
    target = _torch_cuda(failure)
    fact = f"{failure.frame.caller} asks for CUDA, and this machine has none"
    why = "Asks for CUDA, also where there is none."
    if target is not None:
        shipped = _shipped(owners, target)
        is_listed = target in {entry.target for entry in owners.patches()}
        if shipped is not None and not is_listed:
            return fact, f"List {shipped} under {owners.listed}, for the stage that needs it", None
        if shipped is not None and owners.unpatched:
            return fact, f"Leave it to {shipped}, which the card lists and which was left out here", None
        parameters = "(...)"
        with contextlib.suppress(ValueError):  # a function in C has no signature
            parameters = str(inspect.signature(getattr(torch.cuda, target.partition(":")[2])))
        entry: Proposal | None = proposal.function(target, failure.home, why, parameters)
        return fact, failure.remedy("", entry), entry
    entry = failure.rewritten(why)
    statement = failure.frame.statement
    if entry is None and failure.frame.owner == "upstream":  # the statement runs at module level
        method = re.search(r"\.(cuda|to)\(", statement)
        name = re.search(r"\btorch\.(\w+)\(", statement)
        called = name[1] if name else ""
        called = f"Tensor.{method[1]}" if method else called
        entry = proposal.function(f"torch:{called}", failure.home, why, "(...)", importing=True) if called else None
    return fact, failure.remedy("Take the device from a tensor, as x.device", entry), entry


def _torch_cuda(failure: Failure) -> str | None:
    """Returns the function that raised as a target, `torch.cuda:synchronize`; None if the frame at fault raised."""
    import torch

    if failure.frame == failure.frames[-1]:
        return None
    names = re.findall(r"\btorch\.cuda\.(\w+)", failure.frame.statement)
    names += [frame.function.partition(".")[0] for frame in failure.frames if frame.module.startswith("torch.cuda")]
    public = [name for name in names if not name.startswith("_") and callable(getattr(torch.cuda, name, None))]
    return f"torch.cuda:{public[0]}" if public else None


def _shipped(owners: Owners, target: str) -> str | None:
    """Returns the name under which a card lists the shipped patch of a target in torch; None if there is none."""
    folders = owners.pack.folders
    home = None if owners.card is None else owners.pack.home(owners.card.model).patches
    if "torch" not in patch.upstreams(folders if home is None else folders[folders.index(home) :]):
        return None
    for entry in patch.read(folders, ["torch"], home):
        if entry.target == target:
            return f"{entry.upstream}/{Path(entry.place.rpartition(':')[0]).stem}"
    return None


def _absent_package(failure: Failure) -> Cure:
    """Returns fact, remedy and patch entry for a failed import: to install the package, or the entry of a stub."""
    name = str(getattr(failure.error, "name", None) or "")
    package = name.partition(".")[0]
    if PathFinder.find_spec(package) is not None or package in sys.modules:
        wheels = importlib.metadata.packages_distributions().get(package, [])
        version = ", ".join(f"{wheel} {importlib.metadata.version(wheel)}" for wheel in wheels) or "an unknown version"
        fact = f"{failure.frame.caller} takes a name from {package} that it does not have"
        return fact, f"Install a version of {package} that has it; here is {version}", None
    fact = f"{failure.frame.caller} needs the package {package}, and it is not installed"
    stubs = (entry for entry in failure.owners.patches() if entry.stub is not None)
    stub = next((entry for entry in stubs if entry.package == package), None)
    if stub is not None:
        return fact, f"Add {failure.frame.module} to 'importers' of '{stub.id}' in {stub.place}", None
    if failure.frame.owner in EDITED:
        return fact, failure.remedy(f"Install {package}, or leave the import out", None), None
    why = f"Imports {package}, which is not installed."
    frame = failure.frame
    module = failure.frame.module
    tree = parsing.tree("".join(linecache.getlines(frame.file)), frame.file)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    # A call such as `import_module("x")` gets a rewrite: a stub serves `import` statements alone.
    imported = next((n for n in imports if n.lineno <= frame.line <= (n.end_lineno or n.lineno)), None)
    entry = failure.rewritten(why) if imported is None else proposal.stub(module, imported, package, why)
    if entry is None:
        return fact, "Install it", None
    return fact, failure.remedy("Install it. If nothing of it is called in your job", entry), entry


def _other(failure: Failure) -> Cure:
    fact = f"{failure.frame.caller} raises {class_and_message(failure.error)}"
    if failure.frame.owner == "upstream":
        where = "" if failure.owners.is_script else " in the family"
        return fact, f"Call it otherwise{where}, or patch it: docs/patches.md", None
    return fact, failure.remedy("", None), None


CURES: dict[type[ForeignError], Callable[[Failure], Cure]] = {
    HostTensorError: functools.partial(
        _rewrite,
        why="Computes with a tensor of the host while it is traced.",
        deed="computes with a traced tensor and with one that was made beside it, on the host",
        cure="Make it on the traced tensor's device, as torch.tensor(..., device=x.device), or register it as a buffer "
        "of the network in Stage.prepare",
    ),
    TracedValueError: functools.partial(
        _rewrite,
        why="Asks for the value of a tensor while it is traced.",
        deed="asks for the value of a tensor, and while it is traced a tensor has none",
        cure="Compute it from shapes, from settings, or with torch.where",
    ),
    NoLoweringError: _no_lowering,
    OperatorError: _operator,
    CudaError: _cuda,
    AbsentPackageError: _absent_package,
    ForeignError: _other,
}


def explained(owners: Owners) -> Explained:
    """Returns a context that turns exceptions of foreign code into errors, each with its line and its cure."""
    return Explained(functools.partial(_error_of, owners))


def _error_of(owners: Owners, exception: BaseException) -> ForeignError | None:
    """Returns the error for an exception of foreign code; None if torchport is at fault, and for a lack of memory."""
    causes = [exception]  # the first cause says most: upstream wraps errors in errors that say less
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    first = causes[-1]
    if isinstance(first, MemoryError):  # no line of code is at fault
        return None
    frames = frames_of(causes, owners)
    if isinstance(first, SyntaxError) and first.filename and first.lineno:  # the file never ran, so it has no frame
        file = first.filename
        text = (first.text or "").strip()
        frames.append(Frame("upstream", Path(file).stem, file, first.lineno, "<module>", text))
        frame: Frame | None = frames[-1]
    else:
        frame = culprit(first, frames)
    if frame is None and owners.is_script:
        frame = _script_frame(frames, owners)
    if frame is None:
        return None
    if frame not in frames:
        frames.insert(0, frame)
    failure = Failure(owners, first, frame, frames)
    kind = failure.kind()
    fact, remedy, entry = CURES[kind](failure)
    error = kind(frame.place, fact, remedy, owner=frame.owner)
    shown = shown_frames(frames, frame)
    more = f"{len(frames) - len(shown)} more frames: "
    more += "its __cause__ has them" if owners.is_script else "torchport -v COMMAND"
    error.details = [
        *(frame.text() for frame in shown),
        f"  {class_and_message(failure.error)}  ({more})",
        *(entry.text.splitlines() if entry else ()),
    ]
    error.trace = "".join(traceback.format_exception(exception))
    return error
