"""What to do about an exception of foreign code, by its kind: fact, remedy, and where it helps an entry to paste."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from torchport import engine, patch
from torchport.compile.failure.frames import Frame, Owners
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
from torchport.load.foreign import is_absence, is_cuda
from torchport.patch.source import proposal
from torchport.patch.source.proposal import Proposal
from torchport.source import parsing
from torchport.source.parsing import SourceFile

Cure = tuple[str, str, Proposal | None]
"""Fact, remedy, and an entry to paste."""
EDITED = {
    "family": "It is the family's code: mend it there",
    "patch": "It is a patch's function: mend it there",
    "script": "It is your own code: mend it there",
}
"""Owners whose code is edited, not patched, and what is said of it."""


def reason(error: BaseException) -> str:
    """Returns an exception's class and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160].rstrip('.')}" if lines else type(error).__name__


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception of foreign code, the frame that is at fault, and all frames."""

    owners: Owners
    error: BaseException
    frame: Frame
    every: Sequence[Frame]

    @property
    def reason(self) -> str:
        return reason(self.error)

    @property
    def home(self) -> str:
        """The module under whose name a patch entry is written; for a family or a patch, its path in `patches/`."""
        return "script" if self.frame.owner == "script" else self.frame.module.removeprefix("torchport_patches.")

    def kind(self) -> type[ForeignError]:
        """Returns the class of torchport's error for the exception."""
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
        """Returns a patch entry that rewrites the statement at fault; None outside upstream and outside functions."""
        if self.frame.owner in EDITED or not self.frame.file.endswith(".py"):
            return None
        text = "".join(linecache.getlines(self.frame.file))
        source = SourceFile(self.frame.module, self.frame.file, text)
        try:
            return proposal.statement(source, self.frame.line, why) if text else None
        except UnreadableError:  # its file is another one by now, or nested too deep: there is no entry to paste
            return None

    def remedy(self, cure: str, entry: Proposal | None) -> str:
        """Says what to do: paste the patch entry, or mend the code by hand."""
        if entry is not None:
            return f"{cure}: {_small(entry.remedy(self.owners.listed))}" if cure else entry.remedy(self.owners.listed)
        place = EDITED.get(self.frame.owner, "It runs outside all functions, where no statement can be rewritten")
        return f"{place}. {cure}" if cure else place


def _small(text: str) -> str:
    return text[0].lower() + text[1:]


def _host_tensor(failure: Failure) -> Cure:
    """Returns fact, remedy and patch entry for a host tensor that meets a traced one."""
    entry = failure.rewritten("Computes with a tensor of the host while it is traced.")
    fact = f"{failure.frame.caller} computes with a traced tensor and with one that was made beside it, on the host"
    cure = (
        "Make it on the traced tensor's device, as torch.tensor(..., device=x.device), or register it as a buffer of "
        "the network in Stage.prepare"
    )
    return fact, failure.remedy(cure, entry), entry


def _operator(failure: Failure) -> Cure:
    """Returns fact, remedy and patch entry for an operator that computes something else than PyTorch's."""
    entry = failure.rewritten("Calls an operator that computes something else than in PyTorch.")
    found = engine.difference(failure.error)
    assert found is not None
    fact, cure = f"{failure.frame.caller} calls {found[0]}", found[1]
    return fact, failure.remedy(cure, entry), entry


def _traced_value(failure: Failure) -> Cure:
    """Returns fact, remedy and patch entry for code that asks for the value of a traced tensor."""
    entry = failure.rewritten("Asks for the value of a tensor while it is traced.")
    fact = f"{failure.frame.caller} asks for the value of a tensor, and while it is traced a tensor has none"
    cure = "Compute it from shapes, from settings, or with torch.where"
    return fact, failure.remedy(cure, entry), entry


def _no_lowering(failure: Failure) -> Cure:
    """Returns fact, remedy and patch entry for an operator that torchax cannot lower."""
    target = engine.missing_operator(failure.error)
    fact = f"{failure.frame.caller} calls an operator that torchax cannot lower"
    if target is None or not target.startswith("torch.ops.aten:"):
        entry = failure.rewritten("Calls an operator that torchax cannot lower.")
        return fact, failure.remedy("Compute it with other operators", entry), entry
    entry = proposal.operator(target, failure.home, "torchax has no lowering for it.")
    return fact, entry.remedy(failure.owners.listed), entry


def _cuda(failure: Failure) -> Cure:
    """Returns fact, remedy and patch entry for code that asks for CUDA: a shipped patch, or a new entry."""
    owners, target = failure.owners, _torch_cuda(failure)
    fact = f"{failure.frame.caller} asks for CUDA, and this machine has none"
    why = "Asks for CUDA, also where there is none."
    if target is not None:
        names = _shipped(owners, target)
        is_listed = target in {entry.target for entry in owners.patches()}
        if names is not None and not is_listed:
            return fact, f"List {names} under {owners.listed}, for the stage that needs it", None
        if names is not None and owners.unpatched:
            return fact, f"Leave it to {names}, which the card lists and which was left out here", None
        entry: Proposal | None = proposal.function(target, failure.home, why, _parameters(target))
    else:
        entry = failure.rewritten(why)
    if entry is None and (maker := _torch_maker(failure.frame)) is not None:
        entry = proposal.function(maker, failure.home, why, "(...)", importing=True)
    return fact, failure.remedy("" if target else "Take the device from a tensor, as x.device", entry), entry


def _torch_maker(frame: Frame) -> str | None:
    """Returns the torch function that upstream's statement calls for CUDA, as a patch's target; None for other ones."""
    if frame.owner != "upstream":
        return None
    method = re.search(r"\.(cuda|to)\(", frame.statement)
    name = re.search(r"\btorch\.(\w+)\(", frame.statement)
    return f"torch:Tensor.{method[1]}" if method else f"torch:{name[1]}" if name else None


def _torch_cuda(failure: Failure) -> str | None:
    """Returns the public name of torch.cuda that raised, as a patch's target; None if upstream's own frame raised."""
    import torch

    if failure.frame == failure.every[-1]:
        return None
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


def _shipped(owners: Owners, target: str) -> str | None:
    """Returns the shipped patch file for a target in torch, as a card lists it; None if there is none."""
    folders = owners.pack.folders
    home = None if owners.card is None else owners.pack.home(owners.card.model).patches
    if "torch" not in patch.upstreams(folders if home is None else folders[folders.index(home) :]):
        return None
    for entry in patch.read(folders, ["torch"], home):
        if entry.target == target:
            return f"{entry.upstream}/{Path(entry.place.rpartition(':')[0]).stem}"
    return None


def _absent_package(failure: Failure) -> Cure:
    """Returns fact, remedy and patch entry for a failed import: to install the package, or a stub for it."""
    name = str(getattr(failure.error, "name", None) or "")
    package = name.partition(".")[0]
    if PathFinder.find_spec(package) is not None or package in sys.modules:
        names = importlib.metadata.packages_distributions().get(package, [])
        version = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names) or "an unknown version"
        fact = f"{failure.frame.caller} takes a name from {package} that it does not have"
        return fact, f"Install a version of {package} that has it; here is {version}", None
    fact = f"{failure.frame.caller} needs the package {package}, and it is not installed"
    stubs = (entry for entry in failure.owners.patches() if entry.stub is not None)
    stub = next((entry for entry in stubs if entry.package == package), None)
    if stub is not None:
        return fact, f"Add {failure.frame.module} to 'importers' of '{stub.id}' in {stub.place}", None
    if failure.frame.owner in EDITED:
        return fact, failure.remedy(f"Install {package}, or leave the import out", None), None
    why, frame, module = f"Imports {package}, which is not installed.", failure.frame, failure.frame.module
    tree = parsing.tree("".join(linecache.getlines(frame.file)), frame.file)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    # A stub serves no import that is a call.
    imported = next((n for n in imports if n.lineno <= frame.line <= (n.end_lineno or n.lineno)), None)
    entry = failure.rewritten(why) if imported is None else proposal.stub(module, imported, package, why)
    if entry is None:
        return fact, "Install it", None
    cure = "Install it. If nothing of it is called in your job"
    return fact, f"{cure}: {_small(entry.remedy(failure.owners.listed))}", entry


def _other(failure: Failure) -> Cure:
    """Returns fact, remedy and patch entry for an exception of any other kind."""
    fact = f"{failure.frame.caller} raises {failure.reason}"
    if failure.frame.owner == "upstream":
        where = "" if failure.owners.is_script else " in the family"
        return fact, f"Call it otherwise{where}, or patch it: docs/patches.md", None
    return fact, failure.remedy("", None), None


CURES: dict[type[ForeignError], Callable[[Failure], Cure]] = {
    HostTensorError: _host_tensor,
    TracedValueError: _traced_value,
    NoLoweringError: _no_lowering,
    OperatorError: _operator,
    CudaError: _cuda,
    AbsentPackageError: _absent_package,
    ForeignError: _other,
}
