"""How a component's tensors lie in its folder: in which file, where inside it, and under which names."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from torchport.config.card import Component, RenameRule
from torchport.load import checkpoint, pickled, renaming
from torchport.load.lora import Additions, Loras, additions


class Stored(NamedTuple):
    """A tensor in a file of a checkpoint."""

    file: Path
    name: str
    """What the file calls it."""
    dtype: str
    """As safetensors calls it."""
    shape: list[int]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a component's tensors lie in its folder; by default in safetensors, under the module's own names."""

    #: From the folder: safetensors, an index of several, or a file of `torch.save`; None: whatever lies there.
    file: str | None = None
    key: str | None = None  #: Where a file of `torch.save` has the state dict.
    rename: Sequence[RenameRule] = ()  #: Rules from the file's names to the module's.
    unread: Sequence[str] = ()  #: Regular expressions of the file's names that the module does not use.
    places: Sequence[str] = ()  #: Where the card has each rule, for errors.
    #: Modules whose tensors are not wanted, though they lie there.
    without: Sequence[str] = dataclasses.field(default=(), compare=False)
    #: LoRA files that are merged into them.
    loras: Loras | None = dataclasses.field(default=None, compare=False)

    @property
    def is_pickled(self) -> bool:
        """Whether its tensors are in a file of `torch.save`."""
        return self.file is not None and not self.file.endswith((".safetensors", ".safetensors.index.json"))

    def place(self, folder: Path) -> Path:
        """Returns what holds its tensors, for errors: its file, or the folder."""
        return folder if self.file is None else folder / self.file

    def stored(self, folder: Path) -> dict[str, Stored]:
        """Returns file, dtype and shape of each tensor, by the module's name for it; no tensor is read."""
        if self.is_pickled:
            pickled.check_mapped(self.place(folder))
        by_file_name = self.stored_by_file_name(folder)
        places = self.places or [str(self.place(folder))] * len(self.rename)
        names = renaming.module_names(by_file_name, self.rename, places, str(self.place(folder)))
        unwanted = tuple(f"{module}." for module in self.without)
        return {name: by_file_name[key] for name, key in names.items() if not name.startswith(unwanted)}

    def is_unread(self, name: str) -> bool:
        """Whether the module does not use a tensor of the file."""
        return any(re.fullmatch(pattern, name) for pattern in self.unread)

    def stored_by_file_name(self, folder: Path) -> dict[str, Stored]:
        """Returns file, dtype and shape of each tensor by its name in the files, also of the modules in `without`."""
        if self.file is not None:
            checkpoint.check_file(folder, self.file)
        if self.is_pickled:
            file = self.place(folder)
            rows = {name: (file, row) for name, row in pickled.header(file, self.key, self.unread).items()}
        else:
            rows = checkpoint.weight_files(folder, self.file)
        return {
            name: Stored(file, name, row["dtype"], row["shape"])
            for name, (file, row) in rows.items()
            if not self.is_unread(name)
        }

    def additions(self, state: Mapping[str, torch.Tensor], stored: Mapping[str, Stored]) -> Additions:
        """Returns what the LoRA files add to a module's tensors; refuses a key of a LoRA file that fits none."""
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        return additions(self.loras, shapes, {name: tensor.name for name, tensor in stored.items()})

    def parameters(self, folder: Path) -> int:
        """Returns how many elements a component's tensors have, from its files' headers."""
        return sum(math.prod(stored.shape) for stored in self.stored(folder).values())

    def tensors(self, stored: Mapping[str, Stored]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name and the values of each tensor in `stored`, in host memory; opens each file once, in order."""
        from safetensors import safe_open

        in_order = sorted(stored.items(), key=lambda item: (item[1].file, item[1].name))
        for file, items in itertools.groupby(in_order, key=lambda item: item[1].file):
            read: Callable[[str], torch.Tensor]
            if self.is_pickled:
                read = pickled.tensors(file, self.key, self.unread, "cpu").__getitem__
            else:
                read = safe_open(str(file), framework="pt").get_tensor
            yield from ((name, read(where.name)) for name, where in items)


DIFFUSERS = Layout()
"""How diffusers writes a module."""


def layout_of(component: Component, file: str | None, places: Sequence[str]) -> Layout:
    """Returns a component's layout by the card. The component's `file` has the checkpoint's variant filled in. `places`
    are where the card has each rule of `rename`, for errors.
    """
    return Layout(file, component.key, tuple(component.rename), tuple(component.unread), tuple(places))
