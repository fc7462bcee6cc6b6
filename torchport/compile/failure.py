"""What is said of an exception that leaves code of an upstream, of a family or of a patch: where, why, and the cure.

Such code runs while a port imports, loads, prepares, traces and runs a model. The frames of a traceback say whose the
exception is: that of the innermost frame outside the libraries. If that frame is torchport's own, it is a fault of
torchport, and stays a traceback. Upstream is what the card names, and what its patches change.
"""

from __future__ import annotations

import ast
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
from types import TracebackType
from typing import Literal

from torchport import engine, patch
from torchport.errors import (
    AbsentPackageError,
    CudaError,
    ForeignError,
    HostTensorError,
    NoLoweringError,
    TracedValueError,
)
from torchport.foreign import is_absence, is_cuda
from torchport.patch.declared.replacement import Explained
from torchport.patch.source import proposal
from torchport.patch.source.proposal import Proposal
from torchport.task import Task

ENGINE = {"torch", "torchax", "jax", "jaxlib", "numpy"}
"""Packages that every port runs on, beside Python's own modules: no frame of them is at fault."""
HANDS_ON = {"__torch_dispatch__", "__torch_function__", "plainly", "call_jax", "call_torch"}
"""Functions of torchport that only pass a call on: what is raised there is for their caller to mend."""
MOST_FRAMES = 2
"""Frames that are listed, the innermost ones."""

Owner = Literal["upstream", "family", "patch", "torchport", "library", "engine"]
OURS: tuple[Owner, ...] = ("upstream", "family", "patch")
"""Whose code a port can change: by a patch, or by an editor."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a traceback.

    Attributes:
        owner: Whose code it is.
        module: The module's name.
        file: Its file; of rewritten code, upstream's.
        line: From 1.
        function: With its class; `<module>` where the module itself runs.
        statement: The line as it runs.
    """

    owner: Owner
    module: str
    file: str
    line: int
    function: str
    statement: str

    @property
    def place(self) -> str:
        """`file:line`, as a path that can be opened from the current folder."""
        file = Path(self.file)
        return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{self.line}"

    @property
    def caller(self) -> str:
        """What the code is, for a sentence."""
        return f"The import of {self.module}" if self.function == "<module>" else self.function

    def text(self) -> str:
        """Returns the frame as one line."""
        where = f"import of {self.module}" if self.function == "<module>" else self.function
        return f"  {self.place} in {where}: {self.statement[:100]}"


def explained(task: Task) -> Explained:
    """Returns a context that turns exceptions of foreign code into errors, each with its line and its cure.

    Raises:
        ForeignError: An exception that leaves code of an upstream, of the task's family, or of a patch.
    """
    return Explained(functools.partial(error_of, task))


def error_of(task: Task, exception: BaseException) -> ForeignError | None:
    """Returns the error of an exception of foreign code. None for one of torchport's own."""
    causes, packages = _causes(exception), _upstream_packages(task)
    every = [frame for cause in causes for frame in _frames(cause.__traceback__, task, packages)]
    culprit = _culprit(causes[-1], every)
    if culprit is None:
        return None
    failure = _Failure(task, causes[-1], culprit, every)
    kind = failure.kind()
    fact, remedy, entry = _CURES[kind](failure)
    error = kind(culprit.place, fact, remedy, owner=culprit.owner)
    ours = [frame for frame in every if frame.owner in OURS or frame is culprit]
    # A comprehension has a frame of its own, on its function's line.
    listed = [frame for frame, inner in zip(ours, [*ours[1:], None], strict=True) if frame != inner][-MOST_FRAMES:]
    left_out = len(every) - len(listed)
    error.details = [
        *(frame.text() for frame in listed),
        f"  {failure.reason}  ({left_out} more frames: torchport -v COMMAND)",
        *(entry.text.splitlines() if entry else ()),
    ]
    error.trace = "".join(traceback.format_exception(exception))
    return error


def _upstream_packages(task: Task) -> set[str]:
    """Returns the packages that the card names, and those that its patches change."""
    card = task.card
    classes = [
        *(component.class_ for component in card.components.values()),
        *([card.pipeline] if card.pipeline else []),
    ]
    names = {name.replace("-", "_") for name in card.upstream} | {re.split(r"[.:]", path)[0] for path in classes}
    names |= {card.checkout.package} if card.checkout else set()
    return (names | {entry.package for entry in task.patches(task.stages)}) - ENGINE


def _culprit(error: BaseException, every: Sequence[Frame]) -> Frame | None:
    """Returns the frame whose code is at fault. None if it is torchport's own."""
    if is_absence(error):  # whoever imports, of whatever package
        every = [frame for frame in every if not frame.module.startswith("torchport.patch.live")]
        culprit = next((frame for frame in reversed(every) if frame.owner != "engine"), None)
    else:
        culprit = next((frame for frame in reversed(every) if frame.owner in (*OURS, "torchport")), None)
        if culprit is not None and culprit.owner == "torchport" and culprit.function.rpartition(".")[2] in HANDS_ON:
            culprit = next((frame for frame in reversed(every) if frame.owner in OURS), None)
    return None if culprit is None or culprit.owner == "torchport" else culprit


def _causes(exception: BaseException) -> list[BaseException]:
    """Returns an exception and what it was raised from: upstream wraps errors in errors that say less."""
    causes = [exception]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return causes


def _frames(trace: TracebackType | None, task: Task, packages: set[str]) -> list[Frame]:
    frames = []
    while trace is not None:
        code, module = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__", ""))
        statement = linecache.getline(code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals).strip()
        file = code.co_filename
        if file.startswith("<torchport: "):  # rewritten code has upstream's lines
            file = file.rpartition(" in ")[2].removesuffix(">")
        owner = _owner(module, file, task, packages)
        frames.append(Frame(owner, module, file, trace.tb_lineno, _name(code.co_qualname), statement))
        trace = trace.tb_next
    return frames


def _name(qualified: str) -> str:
    """Returns a function's name without the comprehensions and lambdas inside it."""
    return re.sub(r"(\.<locals>)?\.<\w+>.*", "", qualified)


def _owner(module: str, file: str, task: Task, packages: set[str]) -> Owner:
    package = module.partition(".")[0]
    if package == "torchport_patches":
        return "family" if module == task.family.__name__ else "patch"
    if package in packages:
        return "upstream"
    if package == "torchport":
        return "torchport"
    is_engine = package in ENGINE or package in sys.stdlib_module_names or file.startswith("<")
    return "engine" if is_engine else "library"


Cure = tuple[str, str, Proposal | None]
"""Fact, remedy, and an entry to paste."""


@dataclasses.dataclass(frozen=True)
class _Failure:
    """An exception, the frame whose code is at fault, and all frames."""

    task: Task
    error: BaseException
    frame: Frame
    every: Sequence[Frame]

    @property
    def reason(self) -> str:
        """The exception's own message: its first line."""
        lines = [line.strip() for line in str(self.error).splitlines() if line.strip()]
        return f"{type(self.error).__name__}: {lines[0][:160].rstrip('.')}" if lines else type(self.error).__name__

    @property
    def listed(self) -> str:
        """Where the card lists its patches."""
        return f"'patches' in {self.task.card_document.place(['patches'])}"

    @property
    def home(self) -> str:
        """The module whose upstream an entry is for; of a family or a patch, the folder that it stands in."""
        return self.frame.module.removeprefix("torchport_patches.")

    def kind(self) -> type[ForeignError]:
        """Returns the class of its error."""
        if is_absence(self.error):
            return AbsentPackageError
        if is_cuda(self.error):
            return CudaError
        if engine.missing_operator(self.error) is not None:
            return NoLoweringError
        if engine.is_host_tensor(self.error):
            return HostTensorError
        return TracedValueError if engine.is_traced_value(self.error) else ForeignError

    def rewritten(self, why: str) -> Proposal | None:
        """Returns the entry that rewrites its statement. None outside upstream and outside functions."""
        if self.frame.owner in ("family", "patch") or not self.frame.file.endswith(".py"):
            return None
        text = "".join(linecache.getlines(self.frame.file))
        return proposal.statement(self.frame.module, text, self.frame.line, why) if text else None

    def remedy(self, cure: str, entry: Proposal | None) -> str:
        """Returns the remedy: the entry to paste, or whose code is to be mended."""
        if entry is not None:
            return f"{cure}: {_small(entry.remedy(self.listed))}" if cure else entry.remedy(self.listed)
        whose = {"family": "It is the family's code: mend it there", "patch": "It is a patch's function: mend it there"}
        place = whose.get(self.frame.owner, "It runs outside all functions, where no statement can be rewritten")
        return f"{place}. {cure}" if cure else place


def _small(text: str) -> str:
    return text[0].lower() + text[1:]


def _host_tensor(failure: _Failure) -> Cure:
    entry = failure.rewritten("Computes with a tensor of the host while it is traced.")
    fact = f"{failure.frame.caller} computes with a traced tensor and with one that was made beside it, on the host"
    cure = (
        "Make it on the traced tensor's device, as torch.tensor(..., device=x.device), or register it as a buffer of "
        "the network in Stage.prepare"
    )
    return fact, failure.remedy(cure, entry), entry


def _traced_value(failure: _Failure) -> Cure:
    entry = failure.rewritten("Asks for the value of a tensor while it is traced.")
    fact = f"{failure.frame.caller} asks for the value of a tensor, and while it is traced a tensor has none"
    cure = "Compute it from shapes, from settings, or with torch.where"
    return fact, failure.remedy(cure, entry), entry


def _no_lowering(failure: _Failure) -> Cure:
    target = engine.missing_operator(failure.error)
    fact = f"{failure.frame.caller} calls an operator that torchax cannot lower"
    if target is None or not target.startswith("torch.ops.aten:"):
        entry = failure.rewritten("Calls an operator that torchax cannot lower.")
        return fact, failure.remedy("Compute it with other operators", entry), entry
    entry = proposal.operator(target, failure.home, "torchax has no lowering for it.")
    return fact, entry.remedy(failure.listed), entry


def _cuda(failure: _Failure) -> Cure:
    task, target = failure.task, _torch_cuda(failure)
    fact = f"{failure.frame.caller} asks for CUDA, and this machine has none"
    why = "Asks for CUDA, also where there is none."
    if target is not None:
        names = _shipped(task, target)
        if names is not None and target not in {entry.target for entry in task.patches(task.stages)}:
            return fact, f"List {names} under {failure.listed}, for the stage that needs it", None
    entry = (
        failure.rewritten(why) if target is None else proposal.function(target, failure.home, why, _parameters(target))
    )
    if entry is None and (maker := _torch_maker(failure.frame)) is not None:
        entry = proposal.function(maker, failure.home, why, "(...)", importing=True)
    return fact, failure.remedy("" if target else "Take the device from a tensor, as x.device", entry), entry


def _torch_maker(frame: Frame) -> str | None:
    """Returns what moves a tensor to CUDA, or makes it there, where a module of upstream is imported, as a target."""
    if frame.owner != "upstream" or frame.function != "<module>":
        return None
    method = re.search(r"\.(cuda|to)\(", frame.statement)
    name = re.search(r"\btorch\.(\w+)\(", frame.statement)
    return f"torch:Tensor.{method[1]}" if method else f"torch:{name[1]}" if name else None


def _torch_cuda(failure: _Failure) -> str | None:
    """Returns the public function or class of torch.cuda that was called, as a target."""
    import torch

    names = re.findall(r"\btorch\.cuda\.(\w+)", failure.frame.statement)
    names += [frame.function.partition(".")[0] for frame in failure.every if frame.module.startswith("torch.cuda")]
    public = [name for name in names if not name.startswith("_") and callable(getattr(torch.cuda, name, None))]
    return f"torch.cuda:{public[0]}" if public else None


def _parameters(target: str) -> str:
    """Returns the parameters of a function or class of torch.cuda, as its replacement must have them."""
    import torch

    try:
        return str(inspect.signature(getattr(torch.cuda, target.partition(":")[2])))
    except ValueError:  # of a function in C
        return "(...)"


def _shipped(task: Task, target: str) -> str | None:
    """Returns the patch file that answers for a target of torch, as a card lists it."""
    if "torch" not in patch.upstreams(task.pack.patches):
        return None
    for entry in patch.read(task.pack.patches, ["torch"]):
        if entry.target == target:
            return f"{entry.upstream}/{Path(entry.place.rpartition(':')[0]).stem}"
    return None


def _absent_package(failure: _Failure) -> Cure:
    name = str(getattr(failure.error, "name", None) or "")
    package = name.partition(".")[0]
    if PathFinder.find_spec(package) is not None or package in sys.modules:
        version = ", ".join(f"{key} {value}" for key, value in _versions(package).items()) or "an unknown version"
        fact = f"{failure.frame.caller} takes a name from {package} that it does not have"
        return fact, f"Install a version of {package} that has it; here is {version}", None
    fact = f"{failure.frame.caller} needs the package {package}, and it is not installed"
    imported = _import_at(failure.frame)
    if failure.frame.owner in ("family", "patch"):
        return fact, failure.remedy(f"Install {package}, or leave the import out", None), None
    if imported is None:
        entry = failure.rewritten(f"Imports {package}, and the model runs without it.")
        return fact, f"Install it. If the model runs without it: {_small(failure.remedy('', entry))}", entry
    entry = proposal.stub(failure.frame.module, imported, package, f"Imports {package}; the model runs without it.")
    return fact, f"Install it. If the model runs without it: {_small(entry.remedy(failure.listed))}", entry


def _versions(package: str) -> dict[str, str]:
    """Returns the versions of the distributions that bring a package."""
    names = importlib.metadata.packages_distributions().get(package, [])
    return {name: importlib.metadata.version(name) for name in names}


def _import_at(frame: Frame) -> ast.stmt | None:
    """Returns the import statement on a frame's line. None where the import is a call."""
    text = "".join(linecache.getlines(frame.file))
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return next((n for n in nodes if n.lineno <= frame.line <= (n.end_lineno or n.lineno)), None)


def _any(failure: _Failure) -> Cure:
    fact = f"{failure.frame.caller} raises {failure.reason}"
    if failure.frame.owner == "upstream":
        return fact, "Call it otherwise in the family, or patch it: docs/patches.md", None
    return fact, failure.remedy("", None), None


_CURES: dict[type[ForeignError], Callable[[_Failure], Cure]] = {
    HostTensorError: _host_tensor,
    TracedValueError: _traced_value,
    NoLoweringError: _no_lowering,
    CudaError: _cuda,
    AbsentPackageError: _absent_package,
    ForeignError: _any,
}
