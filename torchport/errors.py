"""Every way torchport can fail: one tree of classes, whose docstrings say when. `torchport explain --all` prints them.

The text of every error is `<place>: <what is, with the value>. <what must be, or the command to run>.` Below that line
an error of TP901 to TP907 has the frames of foreign code, and where it helps an entry to paste. Mistakes that are found
together are one error, with a line for each. Their examples are in `commands/examples.yaml`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import ClassVar

DRIFT_EXIT_CODE = 3  # of the commands that look for drift: an upstream changed under a patch


class TorchportError(Exception):
    """A refusal: what is wrong, and what the reader can do about it.

    Args:
        place: Where the mistake is: `file:line` for anything in YAML, else a path, flag or name.
        fact: What is wrong, with the value. One sentence without its full stop.
        remedy: What must be, or the command to run. One sentence without its full stop.
        **culprit: The values at fault. Programs read them as attributes of the exception.

    Attributes:
        details: Lines below the first one: where foreign code failed, an entry to paste.
        others: Further mistakes that were found together with this one.
        trace: The traceback of the foreign exception, as Python prints it; empty where there is none.
    """

    id: ClassVar[str] = "TP000"
    exit_code: ClassVar[int] = 2
    on_every_process: bool = False
    """Whether all processes of the run raise it at the same point. Then each ends by itself, and none is killed."""
    details: Sequence[str] = ()
    others: Sequence[TorchportError] = ()
    trace: str = ""

    def __init__(self, place: str, fact: str, remedy: str, **culprit: object) -> None:
        super().__init__(place, fact, remedy)
        self.place = place
        self.fact = fact
        self.remedy = remedy
        self.__dict__.update(culprit)

    def sentence(self) -> str:
        """Returns its first line alone."""
        return printable(f"{self.place}: {self.fact}. {self.remedy}.")

    def __str__(self) -> str:
        lines = [self.sentence(), *map(printable, self.details), *map(str, self.others)]
        return "\n".join(lines)

    def report(self) -> str:
        """Returns what a terminal shows: each mistake with its id."""
        lines = [f"error[{self.id}] {self.sentence()}", *map(printable, self.details)]
        return "\n".join([*lines, *(other.report() for other in self.others)])

    def _render_traceback_(self) -> list[str]:
        """Returns what a notebook shows."""
        return self.report().splitlines()


def combined(mistakes: Sequence[TorchportError]) -> TorchportError:
    """Returns several mistakes as one error: the first, with the others below it."""
    first, *others = mistakes
    if others:
        first.others = others
    return first


def printable(text: str) -> str:
    """Returns a text as one line, control characters escaped as `repr` does: a terminal would obey those of a file."""
    return "".join(c if c.isprintable() else " " if c == "\n" else repr(c)[1:-1] for c in text)


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a remedy that lists the names; if one of them is close to the given name, it asks for that one first.

    Of many names it lists those that are the closest.
    """
    sorted_names = sorted(names)
    close = closest(name, sorted_names)
    guess = f"Did you mean '{close}'? " if close else ""
    if len(sorted_names) > _MOST_NAMES:
        some = difflib.get_close_matches(name, sorted_names, n=_CLOSEST, cutoff=0)
        return f"{guess}The closest of {len(sorted_names)}: {', '.join(some)}"
    return f"{guess}Known: {', '.join(sorted_names)}" if sorted_names else "None are known"


def closest(name: str, names: Iterable[str]) -> str:
    """Returns the name that a misspelt one was probably meant to be; an empty one if none is close to it."""
    return "".join(difflib.get_close_matches(name, list(names), n=1, cutoff=0.6))


_MOST_NAMES = 40
"""More names than these are not listed."""
_CLOSEST = 8
"""Of so many, these are."""


def kinds() -> list[type[TorchportError]]:
    """Returns every kind of error that is raised, by id: all ids that a command can print."""
    found: list[type[TorchportError]] = [TorchportError]
    for kind in found:
        found += kind.__subclasses__()
    return sorted((kind for kind in found[1:] if "id" in kind.__dict__), key=lambda kind: kind.id)


class ConfigError(TorchportError):
    """A mistake in YAML or on the command line."""

    id = "TP100"


class SyntaxYamlError(ConfigError):
    """The file cannot be read, is not YAML, or uses tags, anchors or several documents, which are not allowed.

    Of a file of prompts: a line is not JSON.
    """

    id = "TP101"


class DuplicateKeyError(ConfigError):
    """A mapping has the same key twice. Many YAML readers silently keep the last one."""

    id = "TP102"


class UnknownKeyError(ConfigError):
    """Nothing reads this key. It is most often misspelt, and would have no effect."""

    id = "TP103"


class MissingKeyError(ConfigError):
    """A required key is missing."""

    id = "TP104"


class WrongTypeError(ConfigError):
    """The value has the wrong type, or is outside the range of its field."""

    id = "TP105"


class UnknownNameError(ConfigError):
    """There is no model, config, stage, strategy or patch file of this name."""

    id = "TP106"


class BadValueError(ConfigError):
    """The value has the right type, but this model or this machine cannot use it."""

    id = "TP107"


class DataFolderError(ConfigError):
    """The folder has neither `patches/` nor `configs/` in it."""

    id = "TP108"


class UpstreamError(ConfigError):
    """The checkout of an upstream package is missing, or holds another project of the same name."""

    id = "TP109"


class TakenNameError(ConfigError):
    """A card, a config or a patch has the name of one in a pack under it, and does not say `overrides: true`."""

    id = "TP110"


class PatchError(TorchportError):
    """A patch could not do what it declares.

    `torchport check` also uses this id for findings without an id of their own: a process that ended, or a module that
    was not restored.
    """

    id = "TP200"


class TargetError(PatchError):
    """The installed upstream does not have the target's module or attribute, or it cannot be imported."""

    id = "TP201"


class ConflictError(PatchError):
    """Two patches change the same target, or one changes an object that contains the other's target."""

    id = "TP202"


class TooLateError(PatchError):
    """The target's module was imported before the patch, and a reference to the original cannot be replaced."""

    id = "TP203"


class AliasError(PatchError):
    """Other code still holds the original. The patch would work in some places only."""

    id = "TP204"


class RewriteError(PatchError):
    """The statements to rewrite do not appear exactly `times` times, or cannot be replaced safely."""

    id = "TP205"


class NotCalledError(PatchError):
    """The patch declares `must_be_called` for a stage, and was not called in it."""

    id = "TP206"


class DriftError(PatchError):
    """The source of the target differs from the source in the lock file, which was reviewed."""

    id = "TP207"


class ScopeError(PatchError):
    """The target's path leads out of its package. The patch would change code of other packages."""

    id = "TP208"


class SignatureError(PatchError):
    """The replacement does not accept every call that its target accepts."""

    id = "TP209"


class UnsupportedError(PatchError):
    """The installed upstream is outside the versions that the patch was written for."""

    id = "TP210"


class ThreadError(PatchError):
    """A second thread applies or undoes patches while another thread has patches in force."""

    id = "TP211"


class StaleTraceError(PatchError):
    """A program that was traced under some patches is traced again without them."""

    id = "TP212"


class ReplacementError(PatchError):
    """The Python file or function that the entry names is missing, outside its folder, a draft, or cannot be loaded."""

    id = "TP213"


class StubCalledError(PatchError):
    """Code called something from a package that is not installed. A stub stands in for that package."""

    id = "TP214"


class TwinModuleError(PatchError):
    """A file was imported under two names, which makes two modules of it, and a patch changes one of them alone.

    Most often a folder inside the package is on `sys.path` too, so that `models` and `package.models` are one file. Or
    the file is run as a script, `__main__`, and imported by its name as well.
    """

    id = "TP215"


class NothingAppliedError(PatchError):
    """Code ran under `torchport exec` or `torchport.applied`, and imported nothing that the patches change."""

    id = "TP216"


class UnreadableError(PatchError):
    """A Python file cannot be read: it is not Python, nested too deep, too large, no text, or cannot be opened.

    torchport reads the sources of upstreams and of patches, and runs nothing of them.

    Attributes:
        line: The line of the mistake; 0 where Python names none.
        kind: What it is, as `torchport scan` calls it: `syntax-error`, `python-2`, `encoding`, `too-large` or
            `unreadable`.
    """

    id = "TP217"
    line: int = 0
    kind: str = ""


class LoadError(TorchportError):
    """Weights that cannot be read as this model's."""

    id = "TP300"


class CheckpointMissingError(LoadError):
    """There is no such folder, repository or file, or the repository cannot be reached."""

    id = "TP301"


class CheckpointBrokenError(LoadError):
    """A file is truncated, or is not safetensors, JSON or tensors of `torch.save`."""

    id = "TP302"


class CheckpointForeignError(LoadError):
    """The checkpoint's keys, shapes, dtypes or classes are not those of the card's model."""

    id = "TP303"


class UnfilledWeightError(LoadError):
    """After loading, a parameter or buffer has no values. The model would compute with garbage."""

    id = "TP304"


class ShardError(TorchportError):
    """A placement that is impossible, or that the devices did not make."""

    id = "TP400"


class MeshError(ShardError):
    """The mesh does not fit the devices, the heads, a dim of a tensor, or the batch."""

    id = "TP401"


class DeadRuleError(ShardError):
    """A rule for sharding or for names matches no tensor, so it has no effect. Its path is most often misspelt."""

    id = "TP402"


class UnmatchedError(ShardError):
    """No rule matches this tensor. If every device should hold it whole, write `replicate`."""

    id = "TP403"


class PlacementError(ShardError):
    """An array is not where its rule puts it; or it has a dtype that cannot be passed to JAX."""

    id = "TP404"


class StackError(ShardError):
    """These blocks cannot run under one scan.

    They differ in more than their weights, keep state between calls, or return a carry with another dtype or shape.
    """

    id = "TP405"


class MachineError(TorchportError):
    """This machine cannot run the job: too few devices, another kind of device, or too little memory."""

    id = "TP501"


class TopologyError(MachineError):
    """The job cannot be compiled for this absent TPU: no libtpu, no such slice, or the compiler refuses the program."""

    id = "TP502"


class VmemError(MachineError):
    """The tile of a kernel does not fit the chip's vector memory (VMEM), or the kernel's share of it."""

    id = "TP503"


class LostProcessError(MachineError):
    """Another process of the run was killed, or its host is lost. The others cannot continue without it."""

    id = "TP504"


class SaveError(TorchportError):
    """An artefact that cannot be read or written."""

    id = "TP600"


class ArtefactMissingError(SaveError):
    """The input of a stage is not in the folder where torchport looks for it."""

    id = "TP601"


class ArtefactBrokenError(SaveError):
    """The artefact is damaged or cannot be read, or the JSON copy of its manifest was edited."""

    id = "TP602"


class ArtefactForeignError(SaveError):
    """The artefact comes from another run, another model, other sizes or another schema."""

    id = "TP603"


class OutputError(SaveError):
    """The output folder or file cannot be written, or the disk is full."""

    id = "TP604"
    is_locked: bool = False
    """Whether another run has the folder locked."""


class NotFiniteError(SaveError):
    """A stage computed NaN or infinity. Its output is not kept, because every later stage would be wrong."""

    id = "TP605"


class StoppedError(TorchportError):
    """The run was stopped by Ctrl-C, SIGTERM or SIGHUP. It finished its current step and saved everything so far."""

    id = "TP701"
    exit_code = 130


class AttentionError(TorchportError):
    """The chosen implementation cannot compute this attention: wrong platform, shapes, mask or tile."""

    id = "TP801"


class ForeignError(TorchportError):
    """Code of an upstream, of a family or of a patch raised an exception.

    The error names the line of that code, and lists the frames that lead to it. Frames of PyTorch, JAX, torchax and
    torchport are left out; `torchport -v COMMAND` prints them too. An exception of torchport's own code is a traceback:
    report it.
    """

    id = "TP901"


class HostTensorError(ForeignError):
    """Code made a tensor on the host while it was traced, which cannot be a constant of the program.

    `torch.tensor`, `torch.arange` and the like make a tensor of the host. It becomes a constant when it meets a traced
    tensor, unless it is random or is written to. Make it on the traced tensor's device, as
    `torch.zeros(..., device=x.device)`. Draw random numbers in the stage's function, and pass them as an input.
    """

    id = "TP902"


class TracedValueError(ForeignError):
    """Code asks for the value of a tensor while it is traced: then it has a shape and a dtype, and no value yet.

    `if`, `assert` and `while` on a tensor ask for it, as do `.item()`, `int()`, `.tolist()`, `.numpy()`, and an index
    of booleans. The error has a `rewrite` entry for the statement. The function that it names computes the same without
    the value: from shapes, from a setting, or with `torch.where`.
    """

    id = "TP903"


class CudaError(ForeignError):
    """Code asks for CUDA on a machine without CUDA, while it is imported or when it is called.

    `patches/torch/cuda.yaml` answers the usual calls: list `torch/cuda` under `patches` in the card. For another call
    the error has an entry to paste.
    """

    id = "TP904"


class AbsentPackageError(ForeignError):
    """Code imports a package that is not installed, or a name that the installed package does not have.

    If your job calls nothing of the package, a `stub` stands in for it; the error has the entry to paste.
    """

    id = "TP905"


class NoLoweringError(ForeignError):
    """An operator has no lowering in torchax. The error has an `op` entry to paste, whose function is the lowering."""

    id = "TP906"


class OperatorError(ForeignError):
    """An operator would compute something else on the devices than in PyTorch, or what it writes would be lost.

    A write to an argument or to a buffer of the network is lost outside the program. The table of operators
    (docs/engine.md) names the operators that torchax computes otherwise. Under `--strict` an operator that no sample
    has compared with PyTorch's is refused, too.
    """

    id = "TP907"
