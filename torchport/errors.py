"""Every way torchport can fail, as one tree.

TorchportError
├── ConfigError            what was written in YAML or on the command line
│   ├── SyntaxYamlError        TP101  not YAML, or YAML that a data file has no use for
│   ├── DuplicateKeyError      TP102  one key twice in a mapping
│   ├── UnknownKeyError        TP103  a key that nothing reads
│   ├── MissingKeyError        TP104  a key that cannot be left out
│   ├── WrongTypeError         TP105  a value of another type than the field's
│   ├── UnknownNameError       TP106  a model, config, stage or strategy that does not exist
│   ├── BadValueError          TP107  a value that the model or the machine cannot use
│   ├── DataFolderError        TP108  no folder with patches/ and configs/ where one was named
│   └── UpstreamError          TP109  the checkout of an upstream is missing, or is another one
├── PatchError             TP200  a patch that could not do what it declares
│   ├── TargetError            TP201  the target does not exist upstream, or cannot be imported
│   ├── ConflictError          TP202  two patches claim one target
│   ├── TooLateError           TP203  the target's module was imported before the patch
│   ├── AliasError             TP204  somebody else still holds the original
│   ├── RewriteError           TP205  the statements to rewrite are not there as often as declared
│   ├── NotCalledError         TP206  a patch that must be called in its stage was not
│   ├── DriftError             TP207  upstream's source is not what the lock file saw
│   ├── ScopeError             TP208  a target that lies in another package than it says
│   ├── SignatureError         TP209  a replacement that cannot take its target's calls
│   ├── UnsupportedError       TP210  an upstream version that the patch was not written for
│   ├── ThreadError            TP211  a second thread applies or undoes patches
│   ├── StaleTraceError        TP212  a traced program is traced again without its patches
│   ├── StubCalledError        TP214  something of an absent package is called
│   └── ReplacementError       TP213  the Python file or function beside the YAML is missing or unusable
├── LoadError              weights
│   ├── CheckpointMissingError TP301  no such folder, repository or file
│   ├── CheckpointBrokenError  TP302  a file that is truncated or is not safetensors
│   ├── CheckpointForeignError TP303  keys or shapes of another model
│   └── UnfilledWeightError    TP304  a tensor without storage after loading
├── ShardError             placement
│   ├── MeshError              TP401  a mesh that does not fit the devices, the heads or the batch
│   ├── DeadRuleError          TP402  a rule that matches no tensor
│   ├── UnmatchedError         TP403  a tensor that no rule matches
│   ├── PlacementError         TP404  an array that is not where its rule puts it
│   └── StackError             TP405  blocks that cannot run as one under a scan
├── MachineError               TP501  this machine cannot carry the job
│   ├── TopologyError          TP502  a TPU that is not there cannot be compiled for
│   ├── VmemError              TP503  a tile that does not fit the chip's vector memory
│   └── LostProcessError       TP504  another process of the run was killed, or its host is lost
├── SaveError              artefacts
│   ├── ArtefactMissingError   TP601  a stage's input is not there
│   ├── ArtefactBrokenError    TP602  an artefact that is damaged
│   ├── ArtefactForeignError   TP603  an artefact of another run, model or schema
│   ├── OutputError            TP604  the output folder cannot be written
│   └── NotFiniteError         TP605  a stage computed NaN or infinity
├── AttentionError             TP801  attention that the named implementation cannot compute
└── StoppedError               TP701  stopped by Ctrl-C or a signal, with everything finished so far saved

The text of every error is `<place>: <what is, with the value>. <what must be, or the command to run>.`
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

DRIFT_EXIT_CODE = 3  # of the commands that look for drift: an upstream changed under a patch


class TorchportError(Exception):
    """Something torchport refuses to do, said so that the reader can mend it.

    Args:
        place: Where it is wrong: `file:line` for anything written in YAML, else a path, flag or name.
        fact: What is, with the value. One sentence without its full stop.
        remedy: What must be, or the command to run. One sentence without its full stop.
        **culprit: What is at fault, kept as attributes of the exception for programs.
    """

    id: ClassVar[str] = "TP100"
    exit_code: ClassVar[int] = 2

    def __init__(self, place: str, fact: str, remedy: str, **culprit: object) -> None:
        super().__init__(place, fact, remedy)
        self.place = place
        self.fact = fact
        self.remedy = remedy
        self.__dict__.update(culprit)

    def __str__(self) -> str:
        return printable(f"{self.place}: {self.fact}. {self.remedy}.")


def printable(text: str) -> str:
    """Returns a text as one line, control characters escaped as `repr` does: a terminal would obey those of a file."""
    return "".join(c if c.isprintable() else " " if c == "\n" else repr(c)[1:-1] for c in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `known` as a remedy: the closest name first if one is close, else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    guess = f"Did you mean '{close[0]}'? " if close else ""
    return f"{guess}Known: {', '.join(names)}" if names else "None are known"


def kinds() -> list[type[TorchportError]]:
    """Returns every kind of error that has an id of its own, by id."""
    every: list[type[TorchportError]] = [TorchportError]
    for kind in every:
        every += kind.__subclasses__()
    return sorted((kind for kind in every[1:] if "id" in kind.__dict__), key=lambda kind: kind.id)


class ConfigError(TorchportError):
    """What was written in YAML or on the command line."""


class SyntaxYamlError(ConfigError):
    """The file cannot be read, is not YAML, or has tags, anchors or several documents, which no data file here has."""

    id = "TP101"


class DuplicateKeyError(ConfigError):
    """One key stands twice in a mapping; YAML readers would silently keep the last."""

    id = "TP102"


class UnknownKeyError(ConfigError):
    """A key that nothing reads. It is most often a misspelling, and would have had no effect."""

    id = "TP103"


class MissingKeyError(ConfigError):
    """A key that cannot be left out."""

    id = "TP104"


class WrongTypeError(ConfigError):
    """A value of another type, or outside the range, than the field's."""

    id = "TP105"


class UnknownNameError(ConfigError):
    """A model, config, stage, strategy or patch file that does not exist."""

    id = "TP106"


class BadValueError(ConfigError):
    """A value of the right type that this model or this machine cannot use."""

    id = "TP107"


class DataFolderError(ConfigError):
    """The folder that was named, or found, holds no `patches/` and `configs/`."""

    id = "TP108"


class UpstreamError(ConfigError):
    """The checkout of an upstream that no registry has is missing, or is another project's with the same name."""

    id = "TP109"


class PatchError(TorchportError):
    """A patch that could not do what it declares.

    `torchport check` reports under this id what has no other: a process that ended, a namespace that was not restored.
    """

    id = "TP200"


class TargetError(PatchError):
    """The target's module or attribute does not exist in the upstream that is installed, or cannot be imported."""

    id = "TP201"


class ConflictError(PatchError):
    """Two patches claim one target, or a target and what contains it."""

    id = "TP202"


class TooLateError(PatchError):
    """The target's module was imported before its patch was armed, and a holder cannot be repaired."""

    id = "TP203"


class AliasError(PatchError):
    """Somebody still holds the original, so that the patch would be a partial no-op."""

    id = "TP204"


class RewriteError(PatchError):
    """The statements to rewrite are not found exactly as often as `times` says, or cannot be replaced safely."""

    id = "TP205"


class NotCalledError(PatchError):
    """A patch that declares `must_be_called` for a stage was not called in it."""

    id = "TP206"


class DriftError(PatchError):
    """The source under a target is not what the lock file saw when the patch was reviewed."""

    id = "TP207"


class ScopeError(PatchError):
    """The target's path walks out of its package, so that the patch would reach strangers."""

    id = "TP208"


class SignatureError(PatchError):
    """The replacement cannot be called in every way its target can."""

    id = "TP209"


class UnsupportedError(PatchError):
    """The installed upstream is outside the versions that the patch was written for."""

    id = "TP210"


class ThreadError(PatchError):
    """A second thread applies or undoes patches while they are applied."""

    id = "TP211"


class StaleTraceError(PatchError):
    """A program traced under a set of patches is about to be traced again without that set."""

    id = "TP212"


class ReplacementError(PatchError):
    """The Python file or function that the entry names is missing, outside its folder, or does not load."""

    id = "TP213"


class StubCalledError(PatchError):
    """Something of an absent package, for which a stub stands in, is called."""

    id = "TP214"


class LoadError(TorchportError):
    """Weights that could not be read as the model's."""


class CheckpointMissingError(LoadError):
    """No such folder, repository or file, or a repository that cannot be reached."""

    id = "TP301"


class CheckpointBrokenError(LoadError):
    """A file that is truncated, or is not safetensors or JSON."""

    id = "TP302"


class CheckpointForeignError(LoadError):
    """Keys, shapes, dtypes or classes of another model than the card's."""

    id = "TP303"


class UnfilledWeightError(LoadError):
    """A parameter or buffer that has no storage after loading: it would be computed with as garbage."""

    id = "TP304"


class ShardError(TorchportError):
    """A placement that cannot be, or was not, made."""


class MeshError(ShardError):
    """A mesh that does not fit the devices, the heads, a dim of a tensor, or the batch."""

    id = "TP401"


class DeadRuleError(ShardError):
    """A sharding rule that matches no tensor: a silent no-op, most often a misspelt module path."""

    id = "TP402"


class UnmatchedError(ShardError):
    """A tensor that no rule matches. Replication is written out, never implied."""

    id = "TP403"


class PlacementError(ShardError):
    """An array whose sharding, read back from the devices, is not the one its rule asks for."""

    id = "TP404"


class MachineError(TorchportError):
    """This machine cannot carry the job: too few devices, another kind, too little memory."""

    id = "TP501"


class TopologyError(MachineError):
    """A TPU that is not there cannot be compiled for: no libtpu, no such slice, or a program its compiler refuses."""

    id = "TP502"


class VmemError(MachineError):
    """A kernel's tile does not fit the chip's vector memory (VMEM), or the part of it that the kernel may use."""

    id = "TP503"


class LostProcessError(MachineError):
    """Another process of the run was killed, or its host is lost, and none can go on without it."""

    id = "TP504"


class AttentionError(TorchportError):
    """Attention that the named implementation cannot compute here: its platform, shapes, mask or tile."""

    id = "TP801"


class StackError(ShardError):
    """Blocks that cannot be stacked: they differ in more than their weights, or keep something between calls."""

    id = "TP405"


class SaveError(TorchportError):
    """Artefacts that could not be read or written."""


class ArtefactMissingError(SaveError):
    """A stage's input is not in the folder it is read from."""

    id = "TP601"


class ArtefactBrokenError(SaveError):
    """An artefact that is damaged or cannot be read, or the copy of whose manifest was changed."""

    id = "TP602"


class ArtefactForeignError(SaveError):
    """An artefact that another run, another model, other sizes or another schema made."""

    id = "TP603"


class OutputError(SaveError):
    """The output folder cannot be written, or is full."""

    id = "TP604"


class NotFiniteError(SaveError):
    """A stage computed NaN or infinity; nothing of it is kept, since every later stage would be wrong."""

    id = "TP605"


class StoppedError(TorchportError):
    """Stopped by Ctrl-C, SIGTERM or SIGHUP after the step in progress, with everything finished so far saved."""

    id = "TP701"
    exit_code = 130
