"""Stage files of the hand-written ports that torchport replaces: read, never written."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from torchport.errors import ArtefactBrokenError, ArtefactForeignError
from torchport.load.foreign import reading
from torchport.progress import log

FILES = {"encode": "stage1_embeddings.safetensors", "denoise": "stage2_latents.safetensors"}
"""Their names, by stage."""

_EMBEDDINGS = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")
EMBEDDINGS = (*_EMBEDDINGS, *(f"negative_{name}" for name in _EMBEDDINGS))
"""What they hold of prompts, where a card does not name it."""
_IMAGES = ("image_latents", "image_embeds")
_SIZES = {"height": "height", "width": "width", "video_length": "frames", "num_frames": "frames", "frames": "frames"}
_DTYPES = {
    name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "bool")
}


def read(file: Path, identity: Mapping[str, Any], embeddings: Collection[str] | None) -> dict[str, torch.Tensor]:
    """Returns a stage file of a hand-written port, in the dtypes that its metadata names.

    Those files have no checksum and no patch ledger. This checks the names and kinds of their tensors, and the sizes
    that they name. If they name none, it checks the sizes of `generation_config.json` beside them.

    Args:
        file: `stage1_embeddings.safetensors` or `stage2_latents.safetensors`.
        identity: What it must have been made for.
        embeddings: The card's names for embeddings, where it has any: latents are then returned as `latents_BCTHW`,
            since the model may have other ones.
    """
    from safetensors import safe_open

    log.warning("%s has no manifest: it is taken as it is, only sizes can be checked", file)
    beside = file.parent / "generation_config.json"
    with reading(ArtefactBrokenError, str(file), "It cannot be read", "Copy or make it again"):
        with safe_open(str(file), framework="pt") as stream:
            metadata = stream.metadata() or {}
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - not a dict
        for name, dtype in json.loads(metadata.get("dtype_info", "{}")).items():
            if name in tensors:
                tensors[name] = _cast(name, tensors[name], str(dtype).removeprefix("torch."))
        config = dict(json.loads(beside.read_text(encoding="utf-8"))) if beside.is_file() else {}
        # What the file itself says counts: the configuration may be an earlier stage's.
        sizes: dict[str, tuple[str, int, Path]] = {}
        for place, values in ((beside, config), (file, metadata)):
            sizes |= {_SIZES[field]: (field, int(values[field]), place) for field in _SIZES if field in values}
    _check(file, tensors, bool(identity.get("guidance")), EMBEDDINGS if embeddings is None else embeddings)
    for key, (field, size, place) in sizes.items():
        if identity.get(key, size) != size:
            raise ArtefactForeignError(
                str(place),
                f"'{field}' is {size}, and this run's {key} is {identity[key]}",
                f"Run with --set {key}={size}",
                key=key,
            )
    return tensors if embeddings is None or "latents" not in tensors else {"latents_BCTHW": tensors["latents"]}


def _cast(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns a tensor in the dtype that the metadata names; only masks may change between float and integer."""
    torch_dtype = _DTYPES[dtype]
    if tensor.is_complex() or ("mask" not in name and tensor.is_floating_point() != torch_dtype.is_floating_point):
        raise TypeError(f"'{name}' is {str(tensor.dtype)[6:]}, and 'dtype_info' says {dtype}")
    return tensor.to(torch_dtype)


def _check(file: Path, tensors: Mapping[str, torch.Tensor], guided: bool, of_prompts: Collection[str]) -> None:
    """Refuses a hand-written port's file whose tensors are not those of its stage."""
    embeddings = file.name == FILES["encode"]
    names = list(of_prompts) if embeddings else ["latents"]
    required = [name for name in names if guided or not name.startswith("negative_")]
    for name in sorted({*tensors, *required}):
        tensor, fact = tensors.get(name), ""
        if tensor is None:
            fact = f"It lacks '{name}'"
        elif name not in names and not (embeddings and name in _IMAGES):
            fact = f"It holds '{name}'"
        elif "mask" not in name and tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            fact = f"'{name}' is {str(tensor.dtype)[6:]}"
        elif name == "latents" and tensor.ndim != 5:
            fact = f"'{name}' has shape {list(tensor.shape)}"
        elif not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            fact = f"'{name}' has {bad} of {tensor.numel()} values that are NaN or infinite"
        if fact:
            holds = f"tensors {', '.join(required)}" if embeddings else "latents [B, C, T, H, W]"
            raise ArtefactForeignError(
                str(file), fact, f"It must hold floating-point {holds}: make it again", name=name
            )
