"""A checkpoint in the diffusers format: finds it, reads its headers, and checks that it is whole."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from torchport.config.card import DTYPES, Card, is_tiny
from torchport.config.pack import DERIVED
from torchport.errors import CheckpointBrokenError, CheckpointForeignError, CheckpointMissingError, OutputError, nearest
from torchport.files.folder import expand_home
from torchport.load.foreign import brief
from torchport.progress import log

WHOLE = "Download the checkpoint again, whole"
AGAIN = "Download the file again"
ONE_SET = "Keep one set of weights in this folder"
"""Remedies for a missing file, for a broken file, and for a file too many."""


FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes of weights that can be cast to each other, as safetensors and torch call them.

The eight-bit floats are not among them: they need scales, and no card has scales.
"""

LARGEST_JSON, LARGEST_HEADER = 2**28, 10**8
"""Bytes read of a JSON file and of a header, at most: ten times the largest vocabulary; safetensors' own limit."""

_ROOT = PurePosixPath(".")
_INDEX = ".safetensors.index.json"
_CONFIGURATIONS = ("model_index.json", "modular_model_index.json", "*/config.json", "*/scheduler_config.json")

CODES = {name: code for code, name in FLOATS.items()} | {
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16",
    "uint8": "U8", "bool": "BOOL", "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""torch's dtypes as safetensors calls them."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder in the diffusers format (`model_index.json`, one folder per component)."""

    folder: Path
    identity: str  #: What the manifest calls it: `repo@commit`, or the folder's name.
    digests: dict[str, str]  #: Of each component that is there, by name: two copies of one checkpoint agree.


def is_folder(name: str) -> bool:
    """Whether `--checkpoint` names a folder; else it names `owner/repo@revision`. `a/b` is a folder if one is there."""
    return name.startswith((".", "/", "~")) or ("@" not in name and (Path(name).exists() or name.count("/") != 1))


def check_name(name: str) -> None:
    """Refuses a name that is no `tiny`, no `tiny:random`, no folder that is there and no `owner/repo[@revision]`."""
    if is_tiny(name) or (is_folder(name) and expand_home(name).is_dir()):
        return
    repo, _, revision = name.partition("@")
    if is_folder(name) or repo.count("/") != 1 or "@" in revision:
        remedy = "Name a folder, or owner/repo@revision"
        raise CheckpointMissingError(f"--checkpoint {name}", "There is no such folder", remedy)


def local(name: str) -> Path | None:
    """Returns a checkpoint's folder if it is on this machine, named or in the hub's cache; None if it is in neither."""
    if is_folder(name):
        return _existing_folder(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repo, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or "main", local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def described(name: str, card: Card) -> Path | None:
    """Returns the folder whose `config.json` files say how a checkpoint's parts are built; None if the card says how.

    The card does for a tiny checkpoint, and for a checkpoint that is not on this machine. But a card that was derived
    from a pipeline has no published numbers: for such a card these files are downloaded, some kilobytes.
    """
    if is_tiny(name):
        return None
    folder = local(name)
    if card.model.startswith(DERIVED):
        folder = folder or _snapshot(name, list(_CONFIGURATIONS))
        check_index(folder, card)
    return folder


_WITHOUT_WEIGHTS = r"diffusers:\w+Scheduler|transformers:\w+(Tokenizer|Processor|FeatureExtractor)"
"""The classes of which an index may choose one."""


def as_published(card: Card, name: str) -> Card:
    """Returns a card with what a checkpoint's index says of the pipeline: the arguments of its constructor, and the
    classes of its scheduler, tokenizers and processors.

    A card that is derived from a pipeline has the class's defaults there. Any other card is returned as it is.
    """
    if card.call is None or not card.model.startswith(DERIVED) or is_tiny(name):
        return card
    _, index = pipeline_index(local(name) or _snapshot(name, list(_CONFIGURATIONS)))
    plain = (bool, int, float, str, type(None))  # anything else is refused later, by `check_init` or `check_index`
    init = {key: index[key] for key in card.call.init if key in index and type(index[key]) in plain}
    parts = dict(card.components)
    for part, component in parts.items():
        if component.dtype is not None or not isinstance(index.get(part), list):
            continue
        path = ":".join(map(str, index[part])).removesuffix("Fast")  # transformers 4 had each tokenizer twice
        if re.fullmatch(_WITHOUT_WEIGHTS, path):
            parts[part] = component.model_copy(update={"class_": path})
    call = card.call.model_copy(update={"init": {**card.call.init, **init}})
    return card.model_copy(update={"call": call, "components": parts})


def locate(name: str, card: Card, variant: str | None = None) -> Checkpoint:
    """Returns a checkpoint: of a folder, or of `owner/repo@revision` (by default `main`) after its download.

    Refuses a checkpoint of other classes than the card's, and a download that the disk cannot hold.
    """
    if is_folder(name):
        folder = _existing_folder(name)
        identity = f"folder:{folder.name}"
    else:
        if local(name) is None:
            _check_disk(name, card)
        log.info("checkpoint %s ...", name)
        folder = _download(name, card, variant)
        identity = f"{name.partition('@')[0]}@{folder.name}"  # the cache names a snapshot by its commit
    check_index(folder, card, variant)
    return Checkpoint(folder, identity, digests(folder, card, variant))


def _existing_folder(name: str) -> Path:
    """Returns the resolved path of a folder that `--checkpoint` names; refuses one that is not there."""
    folder = expand_home(name).resolve()
    if not folder.is_dir():
        remedy = "Name a folder, or owner/repo@revision"
        raise CheckpointMissingError(f"--checkpoint {name}", "There is no such folder", remedy)
    return folder


def _download(name: str, card: Card, variant: str | None) -> Path:
    """Returns a checkpoint's folder in the hub's cache, after downloading the files that the card needs."""
    patterns, needs_root = ["*.json"], False
    for component in card.components:
        folder, file = PurePosixPath(card.folder(component, variant)), card.file(component, variant)
        if folder != _ROOT:
            patterns.append(f"{folder}/*")
        elif file is None:
            needs_root = True
        else:
            patterns.append(file)
            if file.endswith(_INDEX):
                patterns.append(f"{file.removesuffix(_INDEX)}*.safetensors")
    snapshot = _snapshot(name, patterns)
    if needs_root:  # all files directly in the root; in a pattern of the hub, `*` also stands for a path
        _snapshot(f"{name.partition('@')[0]}@{snapshot.name}", ["*"], without=["*/*"])
    return snapshot


def _snapshot(name: str, patterns: list[str], without: list[str] | None = None) -> Path:
    """Returns a repository's folder in the hub's cache, with the files that match `patterns` and not `without`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, _, revision = name.partition("@")
    take = functools.partial(snapshot_download, allow_patterns=patterns, ignore_patterns=without or [])
    try:
        return Path(take(repo, revision=revision or "main"))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        fact = f"It is not in the cache, and cannot be downloaded: {reason}"
        remedy = "Check the name and the network, or pass --checkpoint DIR with a copy of it"
        raise CheckpointMissingError(f"--checkpoint {name}", fact, remedy, repo=repo) from error


def _check_disk(name: str, card: Card) -> None:
    """Refuses a download that the disk of the hub's cache cannot hold, before its first byte."""
    from huggingface_hub.constants import HF_HUB_CACHE

    size = sum((part.parameters or 0) * DTYPES[part.dtype or "bfloat16"] for part in card.components.values())
    folder = next(parent for parent in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < size:
        fact = f"{name} takes about {size / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free here"
        raise OutputError(HF_HUB_CACHE, fact, "Free some space, set HF_HOME to a larger disk, or pass --checkpoint DIR")


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; refuses a file that is missing, too large, or holds anything else."""
    if not file.is_file():
        raise CheckpointMissingError(str(file), "The file is missing", WHOLE)
    size = file.stat().st_size
    if size > LARGEST_JSON:  # a file with holes takes no room on a disk, and all memory when it is read
        raise CheckpointBrokenError(str(file), f"Not JSON of a checkpoint: {size} bytes", AGAIN)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointBrokenError(str(file), f"Not JSON: {brief(error)}", AGAIN) from error
    if not isinstance(data, dict):
        raise CheckpointBrokenError(str(file), "Not a JSON object", AGAIN)
    return data


def check_index(folder: Path, card: Card, variant: str | None = None) -> None:
    """Refuses a folder of other classes than the card's, by `model_index.json` or each `config.json`."""
    if card.pipeline is None:
        _check_classes(folder, card, variant)
        return
    file, index = pipeline_index(folder)
    for name, component in card.components.items():
        library, _, class_name = component.class_.partition(":")
        if name not in index:
            fact = f"It has no component '{name}'"
            remedy = f"The card '{card.model}' wants a {class_name}. {nearest(name, index)}"
            raise CheckpointForeignError(str(file), fact, remedy, component=name)
        words = index[name] if isinstance(index[name], list) else []
        classes = [str(word).removesuffix("Fast") for word in words]  # transformers 4 had each tokenizer twice
        # For a class of a pipeline, diffusers names the folder of that pipeline.
        if classes[1:] != [class_name] or classes[0] not in library.split("."):
            remedy = f"The card '{card.model}' wants {[library, class_name]}: name a checkpoint of that model"
            raise CheckpointForeignError(str(file), f"'{name}' is {index[name]}", remedy, component=name)
    if card.call is None or file.name != "model_index.json":
        return
    for name, value in index.items():
        # A component that the checkpoint lacks is [null, null].
        is_part = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
        if is_part and name not in card.components and name not in card.call.init:
            fact = f"It has the component '{name}', and the card '{card.model}' builds the pipeline without it"
            raise CheckpointForeignError(str(file), fact, "Name a card that has it: docs/cards.md", component=name)


def pipeline_index(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file that names the classes of a checkpoint's components, and its data: `[library, class]` by name.

    A modular pipeline's file also says where each component comes from. Only its `type_hint`, the class, is returned.
    """
    file = folder / "model_index.json"
    modular_file = folder / "modular_model_index.json"
    if file.is_file() or not modular_file.is_file():
        return file, read_json(file)
    index = read_json(modular_file)
    for name, value in index.items():
        if isinstance(value, list) and len(value) == 3 and isinstance(value[2], dict):
            hint = value[2].get("type_hint")
            index[name] = hint if isinstance(hint, list) and len(hint) == 2 else value[:2]
    return modular_file, index


def _check_classes(folder: Path, card: Card, variant: str | None) -> None:
    """Refuses a checkpoint in a layout of upstream's own whose components are of other classes than the card's."""
    for name, component in card.components.items():
        place, file = folder / card.folder(name, variant), card.file(name, variant)
        # The remedy of `check_file` says more than that of a missing folder.
        if file is not None and (place == folder or not place.is_dir()):
            check_file(place, file)
        if not place.is_dir():
            near = [path.name for path in place.parent.iterdir()] if place.parent.is_dir() else []
            remedy = f"Name a checkpoint that has it. {nearest(place.name, near)}"
            raise CheckpointMissingError(str(place), f"There is no folder for '{name}'", remedy)
        if file is not None or component.build is not None:
            continue  # a configuration that lies there is another component's
        config = read_json(place / "config.json") if (place / "config.json").is_file() else {}
        class_name = component.class_.partition(":")[2]
        if config.get("_class_name", class_name) != class_name:
            fact = f"'{name}' is a {config['_class_name']}"
            remedy = f"The card '{card.model}' wants a {class_name}: name a checkpoint of that model"
            raise CheckpointForeignError(str(place / "config.json"), fact, remedy, component=name)


def check_file(folder: Path, file: str) -> None:
    """Refuses a file that is not in its folder; the remedy depends on the files near it."""
    if (folder / file).is_file():
        return
    near, remedy = [path.name for path in (folder / file).parent.glob("*") if path.is_file()], WHOLE
    if (folder.parent / file).is_file():
        remedy = f"It lies in {folder.parent}: if that is the checkpoint's root, write 'folder: \".\"' in the card"
    elif near:
        remedy = f"Mend the card's 'file', or name a checkpoint that has it. {nearest(Path(file).name, near)}"
    raise CheckpointMissingError(str(folder / file), "The file is missing", remedy)


def digests(folder: Path, card: Card, variant: str | None = None) -> dict[str, str]:
    """Returns a digest of each component that a checkpoint has: `{"some_card/vae": "0123456789abcdef"}`.

    The card's name is in front, since two cards may read each other's stage files, and their checkpoints have different
    layouts.

    A digest covers every file's name and size, its first and its last 64 KiB; reading sixteen gigabytes would take too
    long. The first bytes of a safetensors file hold its header, with all names, shapes and offsets.
    """
    result = {}
    for name in card.components:
        place = folder / card.folder(name, variant)
        files = _files(folder, place, card.file(name, variant))
        sha = hashlib.sha256()
        for file in files:
            size = file.stat().st_size
            path = os.fsencode(file.relative_to(place).as_posix())  # a name may be no UTF-8
            sha.update(path + f"\0{size}\0".encode())
            with file.open("rb") as stream:
                sha.update(stream.read(2**16))
                if size > 2**16:
                    stream.seek(max(2**16, size - 2**16))
                    sha.update(stream.read(2**16))
        if files:
            result[f"{card.model}/{name}"] = sha.hexdigest()[:16]
    return result


def _files(root: Path, folder: Path, file: str | None) -> list[Path]:
    """Returns a component's files: all in its folder; in the root, which components share, its `file` with its shards.
    A component in the root without `file` has all files that lie directly in the root.
    """
    if folder != root:
        return sorted(path for path in folder.rglob("*") if path.is_file())
    if file is None:
        return sorted(path for path in root.glob("[!.]*") if path.is_file())
    named = [root / file]
    if file.endswith(_INDEX) and named[0].is_file():
        named += _shards(named[0])
    return [path for path in named if path.is_file()]


def weight_files(folder: Path, file: str | None = None) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Returns the file of each tensor and its row in the file's header, by name; refuses a tensor that is in two files.

    Args:
        file: Safetensors, or an index of several; by default the folder's index, or else all its safetensors. Then
            several indices are refused, a file that the index does not name, and a folder without any.
    """
    if file is not None:
        files = [folder / file] if file.endswith(".safetensors") else _shards(folder / file)
    else:
        indices, present = sorted(folder.glob("*.safetensors.index.json")), sorted(folder.glob("*.safetensors"))
        if len(indices) > 1:
            raise CheckpointForeignError(str(folder), f"It holds {len(indices)} indices of weights", ONE_SET)
        files = _shards(indices[0]) if indices else present
        for path in present:
            if path not in files:  # upstream may read this one, and leave the index alone
                fact = f"It holds {path.name[:120]}, which {indices[0].name[:120]} does not name"
                raise CheckpointForeignError(str(folder), fact, ONE_SET, file=path.name)
        if not files:
            raise CheckpointMissingError(str(folder), "There is no *.safetensors in it", WHOLE)
    rows: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in files:
        for name, row in header(path).items():
            if name in rows:
                fact = f"'{name[:120]}' is in {rows[name][0].name} and in {path.name}"
                raise CheckpointForeignError(str(path.parent), fact, ONE_SET, name=name)
            rows[name] = path, row
    return rows


def _shards(index: Path) -> list[Path]:
    """Returns the files that an index names, which lie beside it; refuses a name with folders in it."""
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
        raise CheckpointBrokenError(str(index), "It has no 'weight_map'", AGAIN)
    names = sorted(set(mapping.values()))
    for name in names:
        if not re.fullmatch(r"(?!\.)[\w.-]{1,255}", name, re.ASCII):
            fact = f"Its 'weight_map' names {name[:80]!r}, which is no file of this folder"
            raise CheckpointForeignError(str(index), fact, "Name files beside the index, without folders", name=name)
    return [index.parent / name for name in names]


def header(file: Path) -> dict[str, Any]:
    """Returns the header of a safetensors file; refuses a damaged file. Each tensor has a row by its name:
    `{"proj.weight": {"dtype": "BF16", "shape": [8, 8], "data_offsets": [0, 128]}}`.
    """
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise CheckpointMissingError(str(file), "The file is missing", WHOLE)
    try:
        str(file).encode()
    except UnicodeEncodeError as error:
        fact = "Its name, or that of a folder above it, is no UTF-8, and safetensors reads none of those"
        place = str(file).encode(errors="backslashreplace").decode()
        raise CheckpointBrokenError(place, fact, "Rename it") from error
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            raw = stream.read(length) if 2 <= length <= min(size - 8, LARGEST_HEADER) else None
    except OSError as error:
        raise CheckpointBrokenError(str(file), f"It cannot be read: {error.strerror}", AGAIN) from error
    if raw is None:
        raise CheckpointBrokenError(str(file), f"{size} bytes, and not safetensors", AGAIN)
    try:
        rows = json.loads(raw)
        rows.pop("__metadata__", None)
        end = 8 + length + max((row["data_offsets"][1] for row in rows.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointBrokenError(str(file), "Its header is none of safetensors", AGAIN) from error
    if size != end:
        fact = f"It has {size} bytes, and its header promises {end}"
        remedy = "Download the file again: it is truncated"
        raise CheckpointBrokenError(str(file), fact, remedy, size=size, promised=end)
    try:
        with safe_open(str(file), framework="numpy"):  # its own reader checks dtypes, shapes and offsets
            return dict(rows)
    except SafetensorError as error:
        raise CheckpointBrokenError(str(file), f"Its header is none of safetensors: {error}", AGAIN) from error
