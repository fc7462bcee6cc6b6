"""Reads files of `torch.save`: tensors by name, and never code."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchport.errors import CheckpointBrokenError, CheckpointForeignError, CheckpointMissingError, nearest
from torchport.load.checkpoint import AGAIN, CODES, WHOLE
from torchport.load.foreign import reading

LFS = b"version https://git-lfs"
"""How a pointer of Git LFS begins, which stands where the file should be."""


def header(file: Path, key: str | None = None, unread: Sequence[str] = ()) -> dict[str, Any]:
    """Returns dtype and shape of the tensors of a file, in rows as those of `checkpoint.header`; see `tensors`."""
    state = tensors(file, key, unread)
    if zipfile.is_zipfile(file):
        _check_records(file)
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state.items()}
    with reading(CheckpointBrokenError, str(file), "Not tensors by name", AGAIN):  # safetensors lacks some dtypes
        return {name: {"dtype": CODES[dtypes[name]], "shape": list(tensor.shape)} for name, tensor in state.items()}


def tensors(
    file: Path, key: str | None = None, unread: Sequence[str] = (), device: str = "meta"
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file by name. With device `cpu` their values are read from the disk when they are used.

    Args:
        file: A state dict, or a dict that has one.
        key: The state dict's key in the file, or `a.b` for a key inside `a`; by default `state_dict`, if it is there.
        unread: Regular expressions of names that are left out; they need not be tensors.
        device: `meta`, or `cpu` for a file that `check_mapped` accepts.
    """
    state = _state_dict(file, _unpickled(file, device), key)
    kept = {name: value for name, value in state.items() if not any(re.fullmatch(p, str(name)) for p in unread)}
    for name, value in kept.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            fact = f"Not tensors by name: {str(name)[:120]!r} is of the type '{type(value).__name__}'"
            dicts = sorted(str(inner) for inner, item in state.items() if isinstance(item, dict))
            remedy = "Add what the module does not use to the component's 'unread'"
            if dicts:
                keys = " or ".join(f"'{inner}'" for inner in dicts[:6])
                remedy = f"Name what holds the tensors as the component's 'key': {keys}"
            raise CheckpointBrokenError(str(file), fact, remedy, name=name)
    return {name: value.detach() for name, value in kept.items()}


def check_mapped(file: Path) -> None:
    """Refuses a file that cannot be mapped into memory: of PyTorch before 1.6, cut short, or a pointer of Git LFS."""
    if not file.is_file() or zipfile.is_zipfile(file):
        return
    with file.open("rb") as stream:
        start = stream.read(len(LFS))
    if start == LFS:
        raise CheckpointBrokenError(str(file), "It is a pointer of Git LFS, and not the file", "Run: git lfs pull")
    # "PK" is the start of a zip file, and `is_zipfile` looks for its end.
    if not start or start.startswith(b"PK"):
        raise CheckpointBrokenError(str(file), "It is empty, or ends too early", AGAIN)
    remedy = f"Write it again: python -c \"import torch; f = '{file}'; torch.save(torch.load(f), f)\""
    raise CheckpointForeignError(str(file), "It has the format of PyTorch before 1.6", remedy)


def _unpickled(file: Path, device: str) -> Any:
    """Returns what a file holds. Only tensors and plain containers are unpickled: torch refuses whatever runs code."""
    if not file.is_file():
        raise CheckpointMissingError(str(file), "The file is missing", WHOLE)
    with reading(CheckpointBrokenError, str(file), "Not tensors by name", AGAIN):
        try:
            return torch.load(file, map_location=device, weights_only=True, mmap=device == "cpu")
        except pickle.UnpicklingError as error:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if zipfile.is_zipfile(file) else []
            if not names:
                raise
            fact = f"Not tensors by name: it needs code, {', '.join(sorted(names)[:3])}"
            remedy = (
                "torchport reads none of it. If you trust the file, write its tensors alone to another one, with "
                "torch.load(FILE, weights_only=False) and torch.save"
            )
            raise CheckpointBrokenError(str(file), fact, remedy, names=names) from error


class _Inert(list[Any]):
    """Stands for whatever a pickle names or makes: it is called, filled and appended to, and does nothing."""

    name = ""  #: Of a class or function that the pickle names.

    def __call__(self, *_: Any) -> _Inert:
        return _Inert()

    def __setitem__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class _Storages(pickle.Unpickler):
    """Notes which storages a pickle of `torch.save` asks for, and how many bytes of each. It makes and runs nothing."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.sizes: dict[str, int] = {}  #: Bytes by the storage's key.

    def find_class(self, module: str, name: str) -> Any:
        """Returns an inert object with the name, in place of a class or function."""
        inert = _Inert()
        inert.name = name
        return inert

    def persistent_load(self, pid: Any) -> Any:
        """Notes the bytes of a storage. torch.save describes it as `("storage", kind, key, device, elements)`."""
        _, kind, key, _, count = pid
        storage: Any = torch.serialization.StorageType
        self.sizes[key] = count * (1 if kind.name == "UntypedStorage" else storage(kind.name).dtype.itemsize)
        return _Inert()


def _check_records(file: Path) -> None:
    """Refuses a file in which a record does not have exactly the bytes of its tensors, though torch has accepted it.
    torch maps the file into memory, whatever size a record has: a short record would go on with bytes of the next.
    """
    with (
        reading(CheckpointBrokenError, str(file), "Its records cannot be read", AGAIN),
        zipfile.ZipFile(file) as archive,
    ):
        records = archive.infolist()
        folder = records[0].filename.partition("/")[0]
        storages = _Storages(io.BytesIO(archive.read(f"{folder}/data.pkl")))
        storages.load()
    by_name = {record.filename: record for record in records}
    if len(by_name) < len(records):
        raise CheckpointBrokenError(str(file), "Two of its records have one name", AGAIN)
    for key, size in storages.sizes.items():
        record = by_name.get(f"{folder}/data/{key}")
        found = record.file_size if record is not None else 0
        if found != size or (record is not None and record.compress_type != zipfile.ZIP_STORED):
            fact = f"Its record '{key}' has {found} bytes, and its tensors have {size}"
            if found == size:
                fact = f"Its record '{key}' is compressed, and torch.save compresses none"
            raise CheckpointBrokenError(str(file), fact, AGAIN, record=key)


def _state_dict(file: Path, content: Any, key: str | None) -> dict[Any, Any]:
    """Returns the state dict in a file's content: at `key`; or without a key at `state_dict`, or else the content."""
    state = content
    words = [] if key is None else key.split(".")
    for word in words:
        if not isinstance(state, dict) or word not in state:
            known = [str(name) for name in state][:12] if isinstance(state, dict) else []
            raise CheckpointForeignError(str(file), f"It has no '{key}', the card's 'key'", nearest(word, known))
        state = state[word]
    if key is None and isinstance(state, dict):
        state = state.get("state_dict", state)
    if not isinstance(state, dict):
        fact = f"Not tensors by name: a '{type(state).__name__}'"
        raise CheckpointBrokenError(str(file), fact, AGAIN)
    return state
