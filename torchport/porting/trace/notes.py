"""What a trace notes while it goes on: stoppers with the assumption after each, and constants with their lines."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torchport.compile.failure import CURES, Failure, Owners, culprit, frames_of, running_frames, shown_frames
from torchport.errors import HostTensorError, TorchportError

PACKAGE = "torchport.porting.trace"


@dataclasses.dataclass
class Stopper:
    """A place that stops a network from being traced."""

    id: str
    stage: str
    place: str  #: `file:line`.
    fact: str
    remedy: str
    frames: list[str]  #: The foreign frames that lead there, as lines, upstream's own last.
    folded: int  #: How many frames are left out: JAX's, torch's, torchport's.
    entry: str  #: An entry to paste into a file of patches; empty for none.
    assumed: str  #: What the trace goes on with.
    times: int = 1  #: How often it was met.


@dataclasses.dataclass
class Constant:
    """A tensor of the host that became a part of a program."""

    stage: str
    made: str  #: `file:line` that made it.
    used: str  #: `file:line` of the code in which it meets the network.
    dtype: str
    shape: list[int]
    bytes: int


@dataclasses.dataclass(eq=False)
class Notes:
    """Collects stoppers and constants, each place once."""

    owners: Owners
    stage: str = ""
    #: Whether the network is being lowered. Before that it is called on shapes alone, and meets the same places.
    lowers: bool = False
    stoppers: dict[tuple[str, str], Stopper] = dataclasses.field(default_factory=dict)
    constants: dict[tuple[str, str, tuple[int, ...]], Constant] = dataclasses.field(default_factory=dict)
    #: Whether the network was lowered when a place was met first.
    _met_lowered: dict[tuple[str, str], bool] = dataclasses.field(default_factory=dict)

    def record(self, error: BaseException, assumed: str, made: str | None = None) -> None:
        """Notes an exception as a stopper, or counts the stopper at its place. Raises the exception if no frame of the
        traced code is to blame.

        Args:
            assumed: What the trace goes on with, in words.
            made: The `file:line` that made a tensor of the host.
        """
        frames = [*running_frames(self.owners), *frames_of([error], self.owners)]
        stack = [frame for frame in frames if not frame.module.startswith(PACKAGE)]
        frame = culprit(error, [frame for frame in stack if frame.owner != "torchport"])
        if frame is None:
            raise error
        failure = Failure(self.owners, error, frame, stack)
        kind = type(error) if isinstance(error, HostTensorError) else failure.kind()
        key = kind.id, frame.place
        if key in self.stoppers:
            # The network runs twice, on shapes and lowered: only the pass that met the place first counts.
            if self._met_lowered[key] == self.lowers:
                self.stoppers[key].times += 1
            return
        self._met_lowered[key] = self.lowers
        if isinstance(error, TorchportError):
            fact = error.fact
            remedy = error.remedy
            entry = None
        else:
            fact, remedy, entry = CURES[kind](failure)
        if made is not None and made not in fact:
            fact += f" (the tensor is made at {made})"
        lines = [shown.text().strip() for shown in shown_frames(stack, frame)]
        text = "" if entry is None else entry.text
        folded = len(stack) - len(lines)
        self.stoppers[key] = Stopper(kind.id, self.stage, frame.place, fact, remedy, lines, folded, text, assumed)

    @contextlib.contextmanager
    def of_another_job(self) -> Iterator[None]:
        """Drops what is noted while the context lasts, because it belongs to another job."""
        before = self.stoppers, self.constants
        self.stoppers = {key: dataclasses.replace(stopper) for key, stopper in self.stoppers.items()}
        self.constants = dict(self.constants)
        try:
            yield
        finally:
            self.stoppers, self.constants = before

    def note_constant(self, tensor: Any, made: str, used: str) -> None:
        """Notes a tensor of the host, with the `file:line` that made it, and the `file:line` at which it is used."""
        shape = tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        size = tensor.numel() * tensor.dtype.itemsize
        constant = Constant(self.stage, made, used, dtype, list(shape), size)
        self.constants.setdefault((made, used, shape), constant)


@dataclasses.dataclass
class Raised(contextlib.AbstractContextManager["Raised"]):
    """A context that catches an exception of foreign code and keeps it. Torchport's own errors pass through."""

    error: Exception | None = None

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> bool:
        ours = isinstance(value, TorchportError) and not isinstance(value, HostTensorError)
        if not isinstance(value, Exception) or ours:
            return False
        self.error = value
        return True
