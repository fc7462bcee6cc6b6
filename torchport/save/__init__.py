"""What one stage hands to the next: a safetensors file that holds its own manifest.

An artefact is one file, so that one renaming replaces it: there is never a new half beside an old one. The manifest is
in the file's metadata, under a checksum of its own; the JSON beside it is a copy for people.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pydantic
import torch

from torchport.config.card import StageName
from torchport.errors import (
    ArtefactBrokenError,
    ArtefactForeignError,
    ArtefactMissingError,
    NotFiniteError,
    OutputError,
)
from torchport.files import atomic
from torchport.load.checkpoint import CODES
from torchport.load.foreign import reading
from torchport.progress import log
from torchport.save.manifest import SCHEMA, Manifest, Tensor, Version, text_of

_TEXT, _CHECKSUM = "torchport", "torchport.sha256"
"""Keys of the safetensors metadata: the manifest as JSON, and that text's sha256."""

VIDEO = "video.mp4"
CONTACT_SHEET = "contact_sheet.png"
PICTURE = "image.png"


def file_of(folder: Path, name: str) -> Path:
    """Returns the file of an artefact: `denoise.safetensors` for `denoise`."""
    return folder / f"{name}.safetensors"


def write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> Manifest:
    """Writes an artefact, and returns its manifest. At every moment the folder has the older file or the new, whole.
    `facts` are the manifest's fields but those of the tensors. Raises NotFiniteError for NaN or infinity in a tensor.
    """
    file = file_of(folder, name)
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        # PyTorch has no `isfinite` for most kinds of float8.
        values = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        if tensor.is_floating_point() and not bool(torch.isfinite(values).all()):
            bad = int((~torch.isfinite(values)).sum())
            fact = f"'{key}' has {bad} of {tensor.numel()} values that are NaN or infinite"
            advice = "Compare with --backend original: if that is finite, a patch or a precision is wrong"
            raise NotFiniteError(str(file), fact, f"Nothing was written. {advice}", key=key)
    manifest = Manifest(
        schema_version=SCHEMA,
        tensors={key: Tensor(dtype=_dtype(t), shape=list(t.shape)) for key, t in tensors.items()},
        sha256="",
        **facts,
    )

    # The copy goes first: it must never describe another artefact than the one beside it.
    atomic.remove(file.with_suffix(".json"))
    checksum = write_file(file, tensors, lambda sha256: text_of(manifest.model_copy(update={"sha256": sha256})))
    return manifest.model_copy(update={"sha256": checksum})


def write_file(file: Path, tensors: Mapping[str, torch.Tensor], text: Callable[[str], str]) -> str:
    """Writes tensors as safetensors, with a text and the text's checksum in the metadata; replaces an older file.
    Returns the checksum of the tensors. `text` makes the text from it, in a length that does not depend on it.

    A video's frames are hundreds of megabytes: they are hashed while they are written, and are not copied.
    """
    for name, tensor in tensors.items():
        if _dtype(tensor) not in CODES:
            fact = f"'{name}' is {_dtype(tensor)}, which a safetensors file cannot have"
            raise OutputError(str(file), fact, "Return it in another dtype", key=name)
    # As safetensors orders them, so that each begins at a multiple of its item's size.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    with atomic.writing(file) as temporary, ThreadPoolExecutor(1) as hashing, temporary.open("wb") as stream:
        checksum = hashing.submit(sha256_of, tensors)
        stream.seek(len(_header(tensors, text("0" * 64))))  # room for the header, which needs the checksum
        for tensor in tensors.values():
            stream.write(_memory(tensor))
        stream.seek(0)
        stream.write(_header(tensors, text(checksum.result())))
    return checksum.result()


def _header(tensors: Mapping[str, torch.Tensor], text: str) -> bytes:
    """Returns what a safetensors file begins with: the places of its tensors, and the text in its metadata."""
    checksum = hashlib.sha256(text.encode()).hexdigest()
    entries: dict[str, Any] = {"__metadata__": {_TEXT: text, _CHECKSUM: checksum}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": CODES[_dtype(tensor)], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, ensure_ascii=False).encode()
    # The tensors begin at a multiple of 8.
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _memory(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor's values, without a copy if they are contiguous."""
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def read_file(file: Path, made_by: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Returns the text and the tensors of a file that `write_file` wrote."""
    return _manifest_text(file, made_by), _load(file, made_by)


def write_copy(folder: Path, name: str, manifest: Manifest) -> None:
    """Writes the JSON file beside an artefact, which shows its manifest to people."""
    atomic.write_text(file_of(folder, name).with_suffix(".json"), text_of(manifest))


def sha256_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns a checksum of tensors that two runs share if they agree in every bit."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name}\0{_dtype(tensor)} {list(tensor.shape)}\0".encode())
        sha.update(_memory(tensor))
    return sha.hexdigest()


def discard_stale(folder: Path, name: StageName, sha256: str, later: Sequence[StageName]) -> None:
    """Removes artefacts of later stages, in their order, that were made from another artefact of this name than the one
    with this checksum. With the artefact of the last stage, its video is removed.
    """
    changed: dict[StageName, str] = {name: sha256}  # "" for a removed artefact: no input has this checksum
    for stage in later:
        file = file_of(folder, stage)
        manifest = readable_manifest(file)
        inputs = {} if manifest is None else manifest.inputs
        if any(inputs.get(input_name) not in (None, sha) for input_name, sha in changed.items()):
            log.warning("removed %s: it was made from another '%s'", file, name)
            remove(folder, stage)
            changed[stage] = ""
            if stage == later[-1]:
                atomic.remove(folder / VIDEO, folder / CONTACT_SHEET, folder / PICTURE)


def remove(folder: Path, name: str) -> None:
    """Removes an artefact and the JSON file beside it."""
    file = file_of(folder, name)
    atomic.remove(file.with_suffix(".json"), file)


def _dtype(tensor: torch.Tensor) -> str:
    """Returns the name of a tensor's dtype, such as `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def read(
    folder: Path,
    name: str,
    identity: Mapping[str, Any],
    components: Mapping[str, str],
    made_by: str,
    embeddings: Collection[str] | None = None,
) -> tuple[dict[str, torch.Tensor], Manifest | None]:
    """Returns a stage's artefact, verified against its manifest: the tensors, and the manifest, which is None for the
    stage files of a hand-written port.

    Args:
        identity: What it must have been made for: the identity of the reading stage's task.
        components: Digests of this run's checkpoint, by component.
        made_by: The command that makes the artefact, for errors.
        embeddings: The card's names for embeddings; see `_read_hand_written`.
    """
    file = file_of(folder, name)
    if not file.is_file():
        other = HAND_WRITTEN.get(name)
        if other is not None and (folder / other).is_file():
            return _read_hand_written(folder / other, identity, embeddings), None
        raise ArtefactMissingError(str(file), f"The artefact of '{name}' is not there", f"Make it with: {made_by}")
    manifest = read_manifest(file, made_by)
    if manifest.stage != name.partition(".")[0]:  # `denoise` of `denoise.step-0004`
        fact = f"It is an artefact of '{manifest.stage}'"
        raise ArtefactForeignError(str(file), fact, f"Make '{name}' with: {made_by}")
    tensors = _load(file, made_by)
    if sha256_of(tensors) != manifest.sha256:
        raise _broken_error(file, "Its tensors are not those that were written", made_by)
    copy = file.with_suffix(".json")
    if copy.is_file() and _bytes(copy) != text_of(manifest).encode():  # whoever edited it expects an effect
        fact = f"It is not the manifest that {file.name} holds, which alone counts"
        raise ArtefactBrokenError(str(copy), fact, "Remove it: the artefact is complete without it")
    _check_identity(file, name, manifest, identity, components)
    return tensors, manifest


def _broken_error(file: Path, fact: str, made_by: str) -> ArtefactBrokenError:
    return ArtefactBrokenError(str(file), fact, f"Copy the file again, or make it with: {made_by}")


def _load(file: Path, made_by: str) -> dict[str, torch.Tensor]:
    """Returns an artefact's tensors by name; refuses a file that is no safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(_bytes(file)))
    except SafetensorError as error:
        raise _broken_error(file, f"It is not safetensors: {error}", made_by) from error


def _bytes(file: Path, head: bool = False) -> bytes:
    """Returns a file's bytes; with `head` only those of a safetensors file's header, which is JSON."""
    try:
        with file.open("rb") as stream:
            if not head:
                return stream.read()
            length = int.from_bytes(stream.read(8), "little")
            return stream.read(min(length, file.stat().st_size))
    except OSError as error:
        fact = f"It cannot be read: {error.strerror}"
        raise ArtefactBrokenError(str(file), fact, "Look at the disk and at the file's permissions") from error


def read_manifest(file: Path, made_by: str = "the command that made it") -> Manifest:
    """Returns the manifest that an artefact holds; the tensors are not read. Raises ArtefactForeignError if it has
    another schema version, and ArtefactBrokenError for a file that is damaged, or no artefact.
    """
    text = _manifest_text(file, made_by)
    try:
        version = Version.model_validate_json(text).schema_version
        if version == SCHEMA:
            return Manifest.model_validate_json(text)
    except pydantic.ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        fact = f"Its manifest's field '{where}' is missing or not what it must be" if where else "It holds no manifest"
        raise _broken_error(file, fact, made_by) from error
    raise _other_schema(file, version, made_by)


def readable_manifest(file: Path) -> Manifest | None:
    """Returns the manifest of an artefact that an earlier run may have left; None if there is none that can be read."""
    if not file.is_file():
        return None
    try:
        return read_manifest(file)
    except (ArtefactBrokenError, ArtefactForeignError) as error:
        log.warning("left as it is: %s", error)
        return None


def _other_schema(file: Path, version: Any, made_by: str) -> ArtefactForeignError:
    remedy = f"This torchport reads {SCHEMA}: make the artefact again with: {made_by}"
    return ArtefactForeignError(str(file), f"Its schema version is {version!r}", remedy)


def _manifest_text(file: Path, made_by: str) -> str:
    """Returns the manifest that an artefact holds, as JSON text, after checking the text's checksum."""
    try:
        metadata = dict(json.loads(_bytes(file, head=True)).get("__metadata__", {}))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _broken_error(file, "It is not safetensors: its header cannot be read", made_by) from error
    if _TEXT not in metadata:
        if file.with_suffix(".json").is_file():
            raise _other_schema(file, 1, made_by)  # schema 1 had the manifest in a second file alone
        raise _broken_error(file, "It holds no manifest", made_by)
    text = str(metadata[_TEXT])
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get(_CHECKSUM):
        raise _broken_error(file, "Its manifest is not the one that was written", made_by)
    return text


def _check_identity(
    file: Path, name: str, manifest: Manifest, identity: Mapping[str, Any], components: Mapping[str, str]
) -> None:
    """Refuses an artefact of another model, size or checkpoint than this run has."""
    for key, value in identity.items():
        found = manifest.identity.get(key)
        if key not in manifest.identity or found != value:
            fact = f"'{name}' was made for {key} {found!r}, and this run is for {value!r}"
            remedy = "Make it again, or run with what it was made for"
            raise ArtefactForeignError(str(file), fact, remedy, key=key, found=found, wanted=value)
    for key, made_with in sorted(manifest.components.items()):
        if components.get(key, made_with) != made_with:
            fact = f"'{name}' was made with another checkpoint: its {key} is {made_with}"
            remedy = f"Use the same --checkpoint for all stages; here {key} is {components[key]}"
            raise ArtefactForeignError(str(file), fact, remedy, key=key)


def check_lineage(folder: Path, name: str, manifest: Manifest) -> None:
    """Refuses an artefact that was made from other inputs than the artefacts of earlier stages beside it."""
    for stage, sha in manifest.inputs.items():
        beside = file_of(folder, stage)
        if beside.is_file() and read_manifest(beside).sha256 != sha:
            fact = f"'{name}' was made from another '{stage}' than the one beside it"
            raise ArtefactForeignError(str(file_of(folder, name)), fact, f"Run --stage {name} again", stage=stage)


HAND_WRITTEN = {"encode": "stage1_embeddings.safetensors", "denoise": "stage2_latents.safetensors"}
"""The stage files of hand-written ports, which were made without torchport, by stage."""

_EMBEDDINGS = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")
EMBEDDINGS = (*_EMBEDDINGS, *(f"negative_{name}" for name in _EMBEDDINGS))
"""The embeddings in those files, where a card names none."""
_IMAGES = ("image_latents", "image_embeds")
_SIZES = {"height": "height", "width": "width", "video_length": "frames", "num_frames": "frames", "frames": "frames"}
_DTYPES = {
    name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "bool")
}


def _read_hand_written(
    file: Path, identity: Mapping[str, Any], embeddings: Collection[str] | None
) -> dict[str, torch.Tensor]:
    """Returns the tensors in a stage file of a hand-written port, in the dtypes that the file's metadata names. If a
    card has names for `embeddings`, latents are returned as `latents_BCTHW`, since the model may have other ones.

    Such files have no checksum and no patch ledger. What is checked: the names and kinds of their tensors, and the
    sizes in the metadata, or else those in `generation_config.json` beside the file.
    """
    from safetensors import safe_open

    log.warning("%s has no manifest: it is taken as it is, only sizes can be checked", file)
    beside = file.parent / "generation_config.json"
    with reading(ArtefactBrokenError, str(file), "It cannot be read", "Copy or make it again"):
        with safe_open(str(file), framework="pt") as stream:
            metadata = stream.metadata() or {}
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - not a dict
        for name, dtype in json.loads(metadata.get("dtype_info", "{}")).items():
            tensor, word = tensors.get(name), str(dtype).removeprefix("torch.")
            if tensor is None:
                continue
            is_other_kind = tensor.is_floating_point() != _DTYPES[word].is_floating_point
            if tensor.is_complex() or (is_other_kind and "mask" not in name):  # masks may be stored as either
                raise TypeError(f"'{name}' is {_dtype(tensor)}, and 'dtype_info' says {word}")
            tensors[name] = tensor.to(_DTYPES[word])
        config = dict(json.loads(beside.read_text(encoding="utf-8"))) if beside.is_file() else {}
        # What the file itself says counts: the configuration may be an earlier stage's.
        sizes: dict[str, tuple[str, int, Path]] = {}
        for place, values in ((beside, config), (file, metadata)):
            sizes |= {_SIZES[field]: (field, int(values[field]), place) for field in _SIZES if field in values}
    _check_hand_written(file, tensors, bool(identity.get("guidance")), EMBEDDINGS if embeddings is None else embeddings)
    for key, (field, size, place) in sizes.items():
        if identity.get(key, size) != size:
            fact = f"'{field}' is {size}, and this run's {key} is {identity[key]}"
            raise ArtefactForeignError(str(place), fact, f"Run with --set {key}={size}", key=key)
    return tensors if embeddings is None or "latents" not in tensors else {"latents_BCTHW": tensors["latents"]}


def _check_hand_written(
    file: Path, tensors: Mapping[str, torch.Tensor], is_guided: bool, embeddings: Collection[str]
) -> None:
    """Refuses a hand-written port's file without its stage's tensors. `embeddings` are names that `encode` returns."""
    is_encode = file.name == HAND_WRITTEN["encode"]
    names = list(embeddings) if is_encode else ["latents"]
    required = [name for name in names if is_guided or not name.startswith("negative_")]
    for name in sorted({*tensors, *required}):
        tensor, fact = tensors.get(name), ""
        if tensor is None:
            fact = f"It lacks '{name}'"
        elif name not in names and not (is_encode and name in _IMAGES):
            fact = f"It holds '{name}'"
        elif "mask" not in name and tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            fact = f"'{name}' is {_dtype(tensor)}"
        elif name == "latents" and tensor.ndim != 5:
            fact = f"'{name}' has shape {list(tensor.shape)}"
        elif not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            fact = f"'{name}' has {bad} of {tensor.numel()} values that are NaN or infinite"
        if fact:
            holds = f"tensors {', '.join(required)}" if is_encode else "latents [B, C, T, H, W]"
            remedy = f"It must hold floating-point {holds}: make it again"
            raise ArtefactForeignError(str(file), fact, remedy, name=name)


def step_name(stage: StageName, number: int) -> str:
    """Returns the name of the artefact that holds the latents after a step; steps count from 1."""
    return f"{stage}.step-{number:04}"


def step_numbers(folder: Path, stage: StageName) -> list[int]:
    """Returns the steps after which a run has kept the latents of a stage, in order."""
    files = folder.glob(f"{stage}.step-*.safetensors")
    matches = (re.fullmatch(rf"{stage}\.step-(\d{{4}})\.safetensors", file.name) for file in files)
    return sorted(int(match[1]) for match in matches if match)


def remove_steps_after(folder: Path, stage: StageName, number: int) -> None:
    """Removes a stage's saved latents of all steps after step `number`, which this run takes again or never takes."""
    later = [other for other in step_numbers(folder, stage) if other > number]
    atomic.remove(*(file_of(folder, step_name(stage, other)) for other in later))
