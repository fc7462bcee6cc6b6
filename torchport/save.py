"""What one stage hands to the next (safetensors and a manifest beside it), and the final video.

Everything is written to a temporary name, flushed, and renamed: a file that has its name is whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import torch

from torchport import handwritten
from torchport.card import StageName
from torchport.errors import (
    ArtefactBrokenError,
    ArtefactForeignError,
    ArtefactMissingError,
    NotFiniteError,
    OutputError,
)
from torchport.progress import log

SCHEMA = 1
"""Version of the manifest's schema; a reader refuses any other."""

VIDEO, CONTACT_SHEET = "video.mp4", "contact_sheet.png"


class Tensor(pydantic.BaseModel):
    """A tensor as a manifest describes it."""

    dtype: str
    shape: list[int]


class Manifest(pydantic.BaseModel):
    """The JSON beside an artefact: what made it.

    Attributes:
        identity: What must agree between the stages of one video: model, sizes, whether there is guidance.
        components: Digest of each component of the checkpoint that was at hand.
        inputs: sha256 of the artefacts that this one was made from, by stage.
        patches: The ledger: every patch, what it promises, what became of it.
        programs: One row for each program of the stage: whether it was "compiled" or "cached", and when it was traced.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    schema_version: int
    stage: str
    created: str
    identity: dict[str, Any]
    checkpoint: str
    components: dict[str, str]
    inputs: dict[StageName, str]
    settings: dict[str, Any]
    config: dict[str, Any]
    backend: str
    patches: list[dict[str, Any]]
    programs: list[dict[str, Any]] = []
    versions: dict[str, str]
    seconds: dict[str, float]
    tensors: dict[str, Tensor]
    sha256: str


@contextlib.contextmanager
def writing(file: Path) -> Iterator[Path]:
    """Gives a temporary path beside `file`, and renames it to `file` once it is complete and on the disk.

    Raises:
        OutputError: The folder cannot be written, or is full. Nothing is left behind, and an older file stays.
    """
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=".", suffix=file.suffix, dir=file.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        # mkstemp makes files that only their owner may read; artefacts are shared.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(file)
    except OSError as error:
        raise _unwritable(file, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _unwritable(file: Path, error: OSError) -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(str(file), "The disk is full", "Free some space, or choose another folder with --out")
    if error.errno == errno.EEXIST or (file.is_file() and error.errno == errno.ENOTDIR):
        return OutputError(str(file), "It is a file, not a folder", "Choose another folder with --out")
    reason = error.strerror or " ".join(str(error).split())
    return OutputError(str(file), f"It cannot be written: {reason}", "Choose another folder with --out")


def make_folder(folder: Path) -> None:
    """Makes the output folder, and proves that it can be written before hours are spent.

    Raises:
        OutputError: It cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise _unwritable(folder, error) from error


def write_json(file: Path, data: Any) -> None:
    """Writes JSON, whole or not at all."""
    with writing(file) as temporary:
        temporary.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> Manifest:
    """Writes an artefact and its manifest.

    Args:
        folder: The run's.
        name: The stage's, or `denoise.partial`.
        tensors: Of any dtype, in host memory.
        facts: The manifest's other fields.

    Raises:
        OutputError: The folder cannot be written, or is full.
    """
    from safetensors.torch import save

    for key, tensor in tensors.items():
        _check_finite(folder, name, key, tensor)
    data = save({key: tensor.contiguous() for key, tensor in tensors.items()})
    manifest = Manifest(
        schema_version=SCHEMA,
        tensors={key: Tensor(dtype=_dtype(t), shape=list(t.shape)) for key, t in tensors.items()},
        sha256=hashlib.sha256(data).hexdigest(),
        **facts,
    )
    # An old manifest never describes a new artefact, not even for the moment between the two renames.
    remove(folder, name, manifest_only=True)
    with writing(folder / f"{name}.safetensors") as temporary:
        temporary.write_bytes(data)
    write_json(folder / f"{name}.json", manifest.model_dump())
    return manifest


def _check_finite(folder: Path, name: str, key: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise NotFiniteError(
            str(folder / f"{name}.safetensors"),
            f"'{key}' has {bad} of {tensor.numel()} values that are NaN or infinite",
            "Nothing was written. Compare with --backend original: if that is finite, a patch or a precision is wrong",
            key=key,
        )


def discard_stale(folder: Path, name: StageName, sha256: str, later: Sequence[StageName]) -> None:
    """Removes what later stages once made from another artefact of this name: beside the new one it would be a lie.

    Args:
        folder: The run's.
        name: The stage whose artefact has just been written.
        sha256: Of that artefact.
        later: The stages after it, in order.
    """
    changed: dict[StageName, str] = {name: sha256}
    for stage in later:
        beside = folder / f"{stage}.json"
        if not beside.is_file():
            continue
        inputs = read_manifest(beside).inputs
        if any(inputs.get(made) not in (None, sha) for made, sha in changed.items()):
            log.warning("removed %s: it was made from another '%s'", beside.with_suffix(".safetensors"), name)
            remove(folder, stage)
            changed[stage] = ""
            if stage == later[-1]:
                for picture in (VIDEO, CONTACT_SHEET):
                    (folder / picture).unlink(missing_ok=True)


def remove(folder: Path, name: str, manifest_only: bool = False) -> None:
    """Removes an artefact that is about to be replaced, or is no longer of use."""
    for suffix in (".json",) if manifest_only else (".json", ".safetensors"):
        try:
            (folder / f"{name}{suffix}").unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(folder / f"{name}{suffix}", error) from error


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _described(tensor: torch.Tensor) -> str:
    return f"{_dtype(tensor)} {list(tensor.shape)}"


def read(
    folder: Path, name: str, identity: Mapping[str, Any], components: Mapping[str, str], made_by: str
) -> tuple[dict[str, torch.Tensor], Manifest | None]:
    """Returns a stage's artefact, everything that its manifest says verified.

    Args:
        folder: Where it lies.
        name: The stage that made it.
        identity: What it must have been made for, as the reading stage is asked for it.
        components: Digests of the checkpoint that the reading stage uses.
        made_by: The command that makes it, for the error.

    Returns:
        The tensors, and the manifest; None for the stage files of a hand-written port, which have none.

    Raises:
        ArtefactMissingError: It is not there.
        ArtefactBrokenError: Its bytes, shapes or dtypes are not what the manifest says.
        ArtefactForeignError: It was made for another model, checkpoint, size or schema.
    """
    file, beside = folder / f"{name}.safetensors", folder / f"{name}.json"
    if not file.is_file() and not beside.is_file():
        old = folder / handwritten.FILES.get(name, "")
        if old.is_file():
            return handwritten.read(old, identity), None
        raise ArtefactMissingError(str(file), f"The artefact of '{name}' is not there", f"Make it with: {made_by}")
    for needed in (file, beside):
        if not needed.is_file():
            raise ArtefactBrokenError(
                str(needed), f"The other half of '{name}' is there, and this is not", f"Make both again with: {made_by}"
            )
    manifest = read_manifest(beside)
    if manifest.stage != name.partition(".")[0]:
        raise ArtefactForeignError(
            str(beside), f"It is the manifest of '{manifest.stage}'", f"Make '{name}' with: {made_by}"
        )
    data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise ArtefactBrokenError(
            str(file), f"Its sha256 is not the one in {beside.name}", f"Copy both again, or make them with: {made_by}"
        )
    tensors = _loaded(data, file)
    for key in sorted({*tensors, *manifest.tensors}):
        found = _described(tensors[key]) if key in tensors else "missing"
        noted = manifest.tensors.get(key)
        if noted is None or found != f"{noted.dtype} {noted.shape}":
            raise ArtefactBrokenError(
                str(file), f"'{key}' is {found}, unlike what {beside.name} says", f"Make both again with: {made_by}"
            )
    _same(beside, name, identity, manifest.identity, components, manifest.components)
    return tensors, manifest


def _loaded(data: bytes, file: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(data))
    except SafetensorError as error:
        raise ArtefactBrokenError(str(file), f"Not safetensors: {error}", "Copy or make the file again") from error


def read_manifest(file: Path) -> Manifest:
    """Returns a manifest.

    Raises:
        ArtefactForeignError: Of another schema version.
        ArtefactBrokenError: Not a manifest.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        version = data["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtefactBrokenError(str(file), "It is not a manifest", "Make the artefact again") from error
    if version != SCHEMA:
        raise ArtefactForeignError(
            str(file), f"Its schema version is {version!r}", f"This torchport reads {SCHEMA}: make the artefact again"
        )
    try:
        return Manifest.model_validate(data)
    except pydantic.ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ArtefactBrokenError(
            str(file), f"Its field '{where}' is missing or not what it must be", "Make the artefact again"
        ) from error


def _same(
    file: Path,
    name: str,
    wanted: Mapping[str, Any],
    found: Mapping[str, Any],
    components: Mapping[str, str],
    made_with: Mapping[str, str],
) -> None:
    """Refuses an artefact of another run."""
    for key, value in wanted.items():
        if key not in found or found[key] != value:
            raise ArtefactForeignError(
                str(file),
                f"'{name}' was made for {key} {found.get(key)!r}, and this run is for {value!r}",
                "Make it again, or run with what it was made for",
                key=key,
                found=found.get(key),
                wanted=value,
            )
    for key in sorted(set(components) & set(made_with)):
        if components[key] != made_with[key]:
            raise ArtefactForeignError(
                str(file),
                f"'{name}' was made with another checkpoint: its {key} is {made_with[key]}",
                f"Use the same --checkpoint for all stages; here {key} is {components[key]}",
                key=key,
            )


def check_lineage(folder: Path, name: str, manifest: Manifest) -> None:
    """Refuses an artefact whose own inputs are in its folder, but are not those it was made from.

    Raises:
        ArtefactForeignError: One of its inputs has been made again since.
    """
    for stage, sha in manifest.inputs.items():
        beside = folder / f"{stage}.json"
        if beside.is_file() and read_manifest(beside).sha256 != sha:
            raise ArtefactForeignError(
                str(folder / f"{name}.json"),
                f"'{name}' was made from another '{stage}' than the one beside it",
                f"Run --stage {name} again",
                stage=stage,
            )
