"""The frames of a traceback: whose code each is, and which one is at fault."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Literal

from torchport.config import Document
from torchport.config.card import Card
from torchport.config.pack import DERIVED, Pack
from torchport.load.foreign import is_absence
from torchport.patch import Entry
from torchport.patch.live import counted
from torchport.task import Task

ENGINE = {"torch", "torchax", "jax", "jaxlib", "numpy"}
"""Packages that every port runs on, beside Python's own modules: no frame of them is at fault."""
HANDS_ON = {"__torch_dispatch__", "__torch_function__", "plainly"}
"""Functions of torchport that only pass a call on: what is raised there is for their caller to mend."""
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
    is_script: bool = False  #: Whether somebody's script calls, as it does `port`. Its code is at fault, too.
    #: Whether the patches are left out on purpose. One that would have helped is then named.
    unpatched: bool = False

    @classmethod
    def of_task(cls, task: Task) -> Owners:
        return cls(
            task.pack, task.card, task.card_document, lambda: task.patches(task.stages), family=task.family.__name__
        )

    @property
    def listed(self) -> str:
        """Says where a patch entry is to be listed: in the card, or in the call of `torchport.applied`."""
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
            paths += [self.card.pipeline] if self.card.pipeline else []
            names |= {name.replace("-", "_") for name in self.card.upstream}
            names |= {re.split(r"[.:]", path)[0] for path in paths}
            names |= {self.card.checkout.package} if self.card.checkout else set()
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
        file = Path(self.file)
        return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{self.line}"

    @property
    def caller(self) -> str:
        """The frame's function, or what runs at module level, as the subject of a sentence."""
        if self.function == "<module>":
            return "The script" if self.owner == "script" else f"The import of {self.module}"
        return self.function

    def text(self) -> str:
        where = f"import of {self.module}" if self.function == "<module>" else self.function
        where = "the script" if self.caller == "The script" else where
        return f"  {self.place} in {where}: {self.statement[:100]}"


def frames(causes: Sequence[BaseException], owners: Owners) -> list[Frame]:
    """Returns the frames of an exception and its causes, the innermost last."""
    return [_frame(*at, owners) for cause in causes for at in traceback.walk_tb(cause.__traceback__)]


def culprit(error: BaseException, every: Sequence[Frame]) -> Frame | None:
    """Returns the frame whose code is at fault; None if that is torchport's own code, or a library's."""
    if is_absence(error):  # whoever imports the absent package is at fault, a library, too
        every = [frame for frame in every if not frame.module.startswith("torchport.patch.live")]
        frame = next((one for one in reversed(every) if one.owner != "engine"), None)
    else:
        frame = next((one for one in reversed(every) if one.owner in (*OURS, "torchport")), None)
        if frame is not None and frame.owner == "torchport" and frame.function.rpartition(".")[2] in HANDS_ON:
            frame = next((one for one in reversed(every) if one.owner in OURS), None)
    return None if frame is None or frame.owner == "torchport" else frame


def caller(every: Sequence[Frame], owners: Owners) -> Frame | None:
    """Returns the innermost frame that a script's author can change, where a library's code is at fault; or None."""
    inner = next((one for one in reversed(every) if one.owner in OURS), None)
    outer = next((one for one in reversed(live(owners)) if one.owner in (*OURS, "library")), None)
    if inner is not None or outer is None:
        return inner
    return dataclasses.replace(outer, owner="script") if outer.owner == "library" else outer


def to_list(every: Sequence[Frame], frame: Frame) -> list[Frame]:
    """Returns the frames to show to a person, the innermost last: code that a port can change, and the code at fault.
    The frame of a comprehension has its function's name and line, and is not shown twice.
    """
    ours = [other for other in every if other.owner in OURS or other == frame]
    return [other for other, inner in zip(ours, [*ours[1:], None], strict=True) if other != inner][-MOST_FRAMES:]


def of_syntax(error: BaseException) -> Frame | None:
    """Returns a frame for the line of a SyntaxError, as the file itself never ran; None for other exceptions."""
    if not isinstance(error, SyntaxError) or not error.filename or not error.lineno:
        return None
    text = (error.text or "").strip()
    return Frame("upstream", Path(error.filename).stem, error.filename, error.lineno, "<module>", text)


def live(owners: Owners) -> list[Frame]:
    """Returns the frames of the running calls, the innermost last."""
    return [_frame(*at, owners) for at in traceback.walk_stack(sys._getframe(1))][::-1]


def _frame(frame: FrameType, line: int, owners: Owners) -> Frame:
    """Returns one of Python's frames as a `Frame`, with its owner and its statement."""
    code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
    if counted.CALLS in code.co_freevars:  # a patched function's wrapper has upstream's names
        module = counted.__name__
    linecache.checkcache(code.co_filename)  # the file may have changed since it was read
    statement = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    file = code.co_filename
    if file.startswith("<torchport: "):  # rewritten code has upstream's lines
        file = file.rpartition(" in ")[2].removesuffix(">")
    name = re.sub(r"(\.<locals>)?\.<\w+>.*", "", code.co_qualname)  # without comprehensions and lambdas inside it
    owner = _owner(module, file, owners)
    owner = "engine" if owner == "patch" and _is_passage(module, name, statement) else owner
    return Frame(owner, module, file, line, name, statement)


def _is_passage(module: str, name: str, statement: str) -> bool:
    """Returns whether a frame of a patch of torch or torchax only passes a call on: then its caller is at fault. A mode
    of `torch/autocast` stands between an upstream's statement and torch, as torch's own frames do.
    """
    is_of_engine = module.split(".")[1:2] and module.split(".")[1] in ENGINE
    return bool(is_of_engine) and (name.rpartition(".")[2] in HANDS_ON or "original(" in statement)


def _owner(module: str, file: str, owners: Owners) -> Owner:
    """Returns whose code a module is, by its name, its file and what the port calls upstream."""
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
