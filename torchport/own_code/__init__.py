"""Somebody else's script, notebook or loop: the same patches and the same compiler as in a run.

`applied` puts a card's patches in force, `port` compiles a module that is loaded already, `arm` does in a child process
what its parent has done, and `script_process` prepares the process of `torchport exec`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torchport import patch
from torchport.config import Document, checkout, machine
from torchport.config.card import Card, Implementation
from torchport.config.pack import Pack, find_pack
from torchport.config.strategy import Axis
from torchport.errors import BadValueError, NothingAppliedError, TorchportError
from torchport.patch import Entry, Ledger
from torchport.patch.live import registry

VARIABLE = "TORCHPORT_APPLIED"
"""The variable by which children know what is in force in their parent: see `arm`."""
BESIDE = ("torchax", "torch/attention", "torch/normalization")
"""The patches that a compiled module of any model needs."""

BENEATH = ("torch", "torchax")
"""Packages that all code imports: an applied patch of theirs does not show that the model's code was imported."""


@dataclasses.dataclass(frozen=True)
class PortDefaults:
    """The default arguments of `port`: the flags of `torchport exec`."""

    strategy: str | None = None  #: The name of a strategy of the card.
    mesh: Mapping[Axis, int] | None = None  #: Sizes of the axes.
    attention: Implementation | None = None
    #: The devices, such as `cpu:8`; None: what JAX finds. A child prepares them as its parent did.
    machine: str | None = None
    #: Whether an operator is refused that no sample has compared with PyTorch's.
    strict: bool = False

    def prepare(self) -> None:
        """Gives JAX in this process the devices of `machine`; refuses if JAX runs already, with fewer devices."""
        if self.machine is not None:
            from torchport.task import devices

            devices.prepare(machine.parse_machine(self.machine, f"--machine {self.machine}"))


@dataclasses.dataclass(frozen=True)
class Session:
    """A set of patches that is in force around a user's code."""

    pack: Pack
    ledger: Ledger  #: What became of each patch.
    card: Card | None  #: The model card; None where only patches were named.
    document: Document | None  #: The card's lines, for errors.
    backend: str  #: `torchax`, or `original`: upstream in PyTorch, with its plumbing patched.
    choice: PortDefaults  #: The defaults of `port`.

    def rows(self) -> list[dict[str, Any]]:
        """Returns a plain dict for each patch: its id, its target, and its state."""
        return self.ledger.rows()

    def error_if_unused(self) -> NothingAppliedError | None:
        """Returns an error if no patch was applied, because nothing imported the patched modules; None otherwise."""
        # An outcome is set where a patch is not needed; a late patch was applied to a module that was there before.
        records = [r for r in self.ledger.records if r.entry.package not in BENEATH and r.outcome is None]
        waiting = [record for record in records if record.entry.edits and not record.late]
        if not waiting or any(record.change is not None for record in waiting):
            return None
        named = "the patches that were named" if self.card is None else f"the patches of '{self.card.model}'"
        modules = sorted({record.entry.module for record in waiting})
        more = f" and {len(modules) - 3} more modules" if len(modules) > 3 else ""
        fact = f"None of {named} was applied: nobody imported {', '.join(modules[:3])}{more}"
        return NothingAppliedError("torchport", fact, "Name the model of the code that runs, or leave its patches out")


sessions: list[Session] = []
"""The sessions in force in this process, in the order in which they were entered."""


@contextlib.contextmanager
def applied(
    model: str | None = None,
    *,
    patches: Sequence[str] = (),
    upstream_path: str | Path | None = None,
    backend: Literal["torchax", "original"] = "torchax",
    paths: Sequence[str] = (),
    choice: PortDefaults | None = None,
) -> Iterator[Session]:
    """Puts the patches of a model in force while the context lasts; import upstream inside it.

    Args:
        model: Name of a model card. None: only `patches`, and those that a compiled module needs.
        patches: Further patches, as a card names them: `folder` or `folder/file`.
        upstream_path: The checkout of an upstream that is no installed package.
        backend: `torchax`, or `original`: only plumbing, and the patches under the card's `original`.
        paths: Folders with `patches/` or `configs/`, the highest first; torchport's own lie under them.
        choice: The defaults of `port`.

    Yields:
        The session: `rows()` says what became of each patch.

    Raises:
        TorchportError: A patch cannot be applied as declared.
        NothingAppliedError: The code inside imported nothing that the patches change.
    """
    if model is None and upstream_path is not None:
        fact = "It is the checkout of a card's upstream, and no model is named"
        raise BadValueError(f"upstream_path={str(upstream_path)!r}", fact, "Name the model, or put it on sys.path")
    pack = find_pack(paths)
    card, document = (None, None) if model is None else pack.card(model)
    path = None if upstream_path is None else str(upstream_path)
    folder = None if card is None else checkout.find(card.checkout, path)
    choice = choice or PortDefaults()
    entries = entries_of(pack, card, patches, backend)
    arguments = {
        "model": model,
        "patches": list(patches),
        "upstream_path": None if folder is None else str(folder),
        "backend": backend,
        "choice": dataclasses.asdict(choice),
        "paths": [str(Path(path).resolve()) for path in paths],
    }
    unregister = atexit.unregister
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.enter_context(_on_path(folder))
        stack.enter_context(_passed_on(arguments))
        ledger = stack.enter_context(patch.applied(entries))
        session = Session(pack, ledger, card, document, backend, choice)
        sessions.append(session)
        stack.callback(sessions.remove, session)
        atexit.register(stack.close)  # Python may end inside the context: patches are undone while modules exist
        try:
            yield session
        finally:
            unregister(stack.close)
        unused = session.error_if_unused()
    if unused is not None:
        raise unused


def entries_of(pack: Pack, card: Card | None, patches: Sequence[str], backend: str) -> list[Entry]:
    """Returns the patches of all stages of a card, those of its `script`, and the further `patches`. For the backend
    `original` only the plumbing among them is returned, and the patches under the card's `original`.
    """
    names = [*BESIDE] if backend == "torchax" else []
    home = None
    if card is not None:
        names += [name for _, stage_patches in card.patch_sets() for name in stage_patches] + card.script
        home = pack.home(card.model).patches
    entries = patch.read(pack.folders, list(dict.fromkeys([*names, *patches])), home)
    if backend == "torchax":
        return entries
    needed = {entry.id for entry in patch.read(pack.folders, card.original if card is not None else [], home)}
    return [entry for entry in entries if entry.plumbing or entry.id in needed]


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """Puts a checkout first on `sys.path` while the context lasts."""
    # `checkout.on_path` would also restore the environment; here variables that the user's code sets must stay.
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have removed it
            sys.path.remove(entry)


@contextlib.contextmanager
def _passed_on(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Sets the environment variable from which `arm`, in child processes, reads the arguments of `applied`."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = json.dumps(arguments)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


_armed = contextlib.ExitStack()
"""In a child process: the context of `applied`, which `arm` has entered for as long as the process lives."""


def arm(*_: object) -> None:
    """Puts the patches of the parent process in force in this process, for as long as it lives.

    `torchport.port` gets the defaults of the parent, too: strategy, mesh, attention, and the devices.

    It is an initializer: `multiprocessing.Pool(initializer=torchport.arm)`, `ProcessPoolExecutor(initializer=...)`,
    `DataLoader(worker_init_fn=torchport.arm)`, or the first line of a script that a subprocess runs. A process that was
    forked has the patches of its parent without this call.

    Args:
        *_: The arguments of an initializer, such as the worker's number. They are ignored.

    Raises:
        BadValueError: No process above this one has patches in force.
        TooLateError: Upstream is imported already, and the original cannot be replaced everywhere.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        fact = f"No process above this one has patches in force ({VARIABLE} is not set)"
        raise BadValueError("torchport.arm", fact, "Call it in a child of torchport exec, or of torchport.applied")
    if not registry.sets:  # a forked process has the patches already
        arguments = json.loads(text)
        choice = PortDefaults(**arguments.pop("choice"))
        choice.prepare()
        _armed.enter_context(applied(**arguments, choice=choice))
        atexit.register(_disarm)


def _disarm() -> None:
    """Undoes the patches as the process ends. It prints no error: the parent process does."""
    with contextlib.suppress(TorchportError):
        _armed.close()
