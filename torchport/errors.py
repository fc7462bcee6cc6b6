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


KINDS: dict[str, type[TorchportError]] = {}
"""Every kind of error that is raised, by id and in the order of ids: all ids that a command can print."""


class TorchportError(Exception):
    """A refusal: what is wrong, and what the reader can do about it.

    Args:
        place: Where the mistake is: `file:line` for anything in YAML, else a path, flag or name.
        fact: What is wrong, with the value. One sentence without its full stop.
        remedy: What must be, or the command to run. One sentence without its full stop.
        **culprit: The values at fault. Programs read them as attributes of the exception.
    """

    id: ClassVar[str] = "TP000"
    exit_code: ClassVar[int] = 2
    on_every_process: bool = False
    """Whether all processes of the run raise it at the same point. Then each ends by itself, and none is killed."""
    details: Sequence[str] = ()
    """Lines below the first one: where foreign code failed, an entry to paste."""
    others: Sequence[TorchportError] = ()
    """Further mistakes that were found together with this one."""
    trace: str = ""
    """The traceback of the foreign exception, as Python prints it; empty where there is none."""

    def __init_subclass__(cls, *, id: str = "") -> None:
        """Registers a class under its id, as in `class MeshError(ShardError, id="TP401")`."""
        if id:
            cls.id = id
            KINDS[id] = cls

    def __init__(self, place: str, fact: str, remedy: str, **culprit: object) -> None:
        super().__init__(place, fact, remedy)
        self.place = place
        self.fact = fact
        self.remedy = remedy
        self.__dict__.update(culprit)

    def sentence(self) -> str:
        """Returns the first line of the error's text: `configs/a.yaml:3: 'steps' is text. It must be a number.`"""
        return printable(f"{self.place}: {self.fact}. {self.remedy}.")

    def __str__(self) -> str:
        lines = [self.sentence(), *map(printable, self.details), *map(str, self.others)]
        return "\n".join(lines)

    def report(self) -> str:
        """Returns what a terminal shows: each mistake with its id, `error[TP105] configs/a.yaml:3: ...`."""
        lines = [f"error[{self.id}] {self.sentence()}", *map(printable, self.details)]
        return "\n".join([*lines, *(other.report() for other in self.others)])

    def _render_traceback_(self) -> list[str]:
        """Returns what a notebook shows in place of a traceback: IPython calls this method."""
        return self.report().splitlines()


def combined(mistakes: Sequence[TorchportError]) -> TorchportError:
    """Returns several mistakes as one error: the first, with the others below it."""
    first, *others = mistakes
    if others:
        first.others = others
    return first


def printable(text: str) -> str:
    """Returns a text as one line, control characters escaped as `repr` does: a terminal would obey those of a file."""
    line = text.replace("\n", " ")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a remedy that lists the names, as `Did you mean 'frames'? Known: frames, width` for `frame`.

    Of more than 40 names it lists the eight closest.
    """
    sorted_names = sorted(names)
    close = closest(name, sorted_names)
    guess = f"Did you mean '{close}'? " if close else ""
    if len(sorted_names) > 40:
        listed = difflib.get_close_matches(name, sorted_names, n=8, cutoff=0)
        return f"{guess}The closest of {len(sorted_names)}: {', '.join(listed)}"
    return f"{guess}Known: {', '.join(sorted_names)}" if sorted_names else "None are known"


def closest(name: str, names: Iterable[str]) -> str:
    """Returns the name that a misspelt `name` was probably meant to be; "" if none of `names` is close."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)), "")


class ConfigError(TorchportError, id="TP100"):
    """A mistake in YAML or on the command line."""


class SyntaxYamlError(ConfigError, id="TP101"):
    """The file cannot be read, is not YAML, or uses tags, anchors or several documents, which are not allowed.

    Of a file of prompts: a line is not JSON.
    """


class DuplicateKeyError(ConfigError, id="TP102"):
    """A mapping has the same key twice. Many YAML readers silently keep the last one."""


class UnknownKeyError(ConfigError, id="TP103"):
    """Nothing reads this key. It is most often misspelt, and would have no effect."""


class MissingKeyError(ConfigError, id="TP104"):
    """A required key is missing."""


class WrongTypeError(ConfigError, id="TP105"):
    """The value has the wrong type, or is outside the range of its field."""


class UnknownNameError(ConfigError, id="TP106"):
    """There is no model, config, stage, strategy or patch file of this name."""


class BadValueError(ConfigError, id="TP107"):
    """The value has the right type, but this model or this machine cannot use it."""


class DataFolderError(ConfigError, id="TP108"):
    """The folder has neither `patches/` nor `configs/` in it."""


class UpstreamError(ConfigError, id="TP109"):
    """The checkout of an upstream package is missing, or holds another project of the same name."""


class TakenNameError(ConfigError, id="TP110"):
    """A card, a config or a patch has the name of one in a pack under it, and does not say `overrides: true`."""


class PatchError(TorchportError, id="TP200"):
    """A patch could not do what it declares.

    `torchport check` also uses this id for findings without an id of their own: a process that ended, or a module that
    was not restored.
    """


class TargetError(PatchError, id="TP201"):
    """The installed upstream does not have the target's module or attribute, or it cannot be imported."""


class ConflictError(PatchError, id="TP202"):
    """Two patches change the same target, or one changes an object that contains the other's target."""


class TooLateError(PatchError, id="TP203"):
    """The target's module was imported before the patch, and a reference to the original cannot be replaced."""


class AliasError(PatchError, id="TP204"):
    """Other code still holds the original. The patch would work in some places only."""


class RewriteError(PatchError, id="TP205"):
    """The statements to rewrite do not appear exactly `times` times, or cannot be replaced safely."""


class NotCalledError(PatchError, id="TP206"):
    """The patch declares `must_be_called` for a stage, and was not called in it."""


class DriftError(PatchError, id="TP207"):
    """The source of the target differs from the source in the lock file, which was reviewed."""


class ScopeError(PatchError, id="TP208"):
    """The target's path leads out of its package. The patch would change code of other packages."""


class SignatureError(PatchError, id="TP209"):
    """The replacement does not accept every call that its target accepts."""


class UnsupportedError(PatchError, id="TP210"):
    """The installed upstream is outside the versions that the patch was written for."""


class ThreadError(PatchError, id="TP211"):
    """A second thread applies or undoes patches while another thread has patches in force."""


class StaleTraceError(PatchError, id="TP212"):
    """A program that was traced under some patches is traced again without them."""


class ReplacementError(PatchError, id="TP213"):
    """The Python file or function that the entry names is missing, outside its folder, a draft, or cannot be loaded."""


class StubCalledError(PatchError, id="TP214"):
    """Code called something from a package that is not installed. A stub stands in for that package."""


class TwinModuleError(PatchError, id="TP215"):
    """A file was imported under two names, which makes two modules of it, and a patch changes one of them alone.

    Most often a folder inside the package is on `sys.path` too, so that `models` and `package.models` are one file. Or
    the file is run as a script, `__main__`, and imported by its name as well.
    """


class NothingAppliedError(PatchError, id="TP216"):
    """Code ran under `torchport exec` or `torchport.applied`, and imported nothing that the patches change."""


class UnreadableError(PatchError, id="TP217"):
    """A Python file cannot be read: it is not Python, nested too deep, too large, no text, or cannot be opened.

    torchport reads the sources of upstreams and of patches, and runs nothing of them.

    Attributes:
        line: The line of the mistake; 0 where Python names none.
        kind: What it is, as `torchport scan` calls it: `syntax-error`, `python-2`, `encoding`, `too-large` or
            `unreadable`.
    """

    line: int = 0
    kind: str = ""


class LoadError(TorchportError, id="TP300"):
    """Weights that cannot be read as this model's."""


class CheckpointMissingError(LoadError, id="TP301"):
    """There is no such folder, repository or file, or the repository cannot be reached."""


class CheckpointBrokenError(LoadError, id="TP302"):
    """A file is truncated, or is not safetensors, JSON or tensors of `torch.save`."""


class CheckpointForeignError(LoadError, id="TP303"):
    """The checkpoint's keys, shapes, dtypes or classes are not those of the card's model."""


class UnfilledWeightError(LoadError, id="TP304"):
    """After loading, a parameter or buffer has no values. The model would compute with garbage."""


class ShardError(TorchportError, id="TP400"):
    """A placement that is impossible, or that the devices did not make."""


class MeshError(ShardError, id="TP401"):
    """The mesh does not fit the devices, the heads, a dim of a tensor, or the batch."""


class DeadRuleError(ShardError, id="TP402"):
    """A rule for sharding or for names matches no tensor, so it has no effect. Its path is most often misspelt."""


class UnmatchedError(ShardError, id="TP403"):
    """No rule matches this tensor. If every device should hold it whole, write `replicate`."""


class PlacementError(ShardError, id="TP404"):
    """An array is not where its rule puts it; or it has a dtype that cannot be passed to JAX."""


class StackError(ShardError, id="TP405"):
    """These blocks cannot run under one scan.

    They differ in more than their weights, keep state between calls, or return a carry with another dtype or shape.
    """


class MachineError(TorchportError, id="TP501"):
    """This machine cannot run the job: too few devices, another kind of device, or too little memory."""


class TopologyError(MachineError, id="TP502"):
    """The job cannot be compiled for this absent TPU: no libtpu, no such slice, or the compiler refuses the program."""


class VmemError(MachineError, id="TP503"):
    """The tile of a kernel does not fit the chip's vector memory (VMEM), or the kernel's share of it."""


class LostProcessError(MachineError, id="TP504"):
    """Another process of the run was killed, or its host is lost. The others cannot continue without it."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: the same command, run again, goes on


class SaveError(TorchportError, id="TP600"):
    """An artefact that cannot be read or written."""


class ArtefactMissingError(SaveError, id="TP601"):
    """The input of a stage is not in the folder where torchport looks for it."""


class ArtefactBrokenError(SaveError, id="TP602"):
    """The artefact is damaged or cannot be read, or the JSON copy of its manifest was edited."""


class ArtefactForeignError(SaveError, id="TP603"):
    """The artefact comes from another run, another model, other sizes or another schema."""


class OutputError(SaveError, id="TP604"):
    """The output folder or file cannot be written, or the disk is full."""

    is_locked: bool = False
    """Whether another run has the folder locked."""


class NotFiniteError(SaveError, id="TP605"):
    """A stage computed NaN or infinity. Its output is not kept, because every later stage would be wrong."""


class StoppedError(TorchportError, id="TP701"):
    """The run was stopped by Ctrl-C, SIGTERM or SIGHUP. It finished its current step and saved everything so far."""

    exit_code = 130


class AttentionError(TorchportError, id="TP801"):
    """The chosen implementation cannot compute this attention: wrong platform, shapes, mask or tile."""


class ForeignError(TorchportError, id="TP901"):
    """Code of an upstream, of a family or of a patch raised an exception.

    The error names the line of that code, and lists the frames that lead to it. Frames of PyTorch, JAX, torchax and
    torchport are left out; `torchport -v COMMAND` prints them too. An exception of torchport's own code is a traceback:
    report it.
    """


class HostTensorError(ForeignError, id="TP902"):
    """Code made a tensor on the host while it was traced, which cannot be a constant of the program.

    `torch.tensor`, `torch.arange` and the like make a tensor of the host. It becomes a constant when it meets a traced
    tensor, unless it is random or is written to. Make it on the traced tensor's device, as
    `torch.zeros(..., device=x.device)`. Draw random numbers in the stage's function, and pass them as an input.
    """


class TracedValueError(ForeignError, id="TP903"):
    """Code asks for the value of a tensor while it is traced: then it has a shape and a dtype, and no value yet.

    `if`, `assert` and `while` on a tensor ask for it, as do `.item()`, `int()`, `.tolist()`, `.numpy()`, and an index
    of booleans. The error has a `rewrite` entry for the statement. The function that it names computes the same without
    the value: from shapes, from a setting, or with `torch.where`.
    """


class CudaError(ForeignError, id="TP904"):
    """Code asks for CUDA on a machine without CUDA, while it is imported or when it is called.

    `patches/torch/cuda.yaml` answers the usual calls: list `torch/cuda` under `patches` in the card. For another call
    the error has an entry to paste.
    """


class AbsentPackageError(ForeignError, id="TP905"):
    """Code imports a package that is not installed, or a name that the installed package does not have.

    If your job calls nothing of the package, a `stub` stands in for it; the error has the entry to paste.
    """


class NoLoweringError(ForeignError, id="TP906"):
    """An operator has no lowering in torchax. The error has an `op` entry to paste, whose function is the lowering."""


class OperatorError(ForeignError, id="TP907"):
    """An operator would compute something else on the devices than in PyTorch, or what it writes would be lost.

    A write to an argument or to a buffer of the network is lost outside the program. The table of operators
    (docs/engine.md) names the operators that torchax computes otherwise. Under `--strict` an operator that no sample
    has compared with PyTorch's is refused, too.
    """
