"""LoRA files: what they add to the weights of a network, merged into each weight while it is loaded.

A pair of matrices adds `scale * alpha / rank * up @ down` to a layer's weight, of a convolution as well. A file may
also hold whole differences, of a weight or of a bias.

Source: the names of keys, and which prefixes published files have, as diffusers 0.42 reads them
(`loaders/lora_conversion_utils.py`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchport.config.card import LoraName
from torchport.errors import CheckpointBrokenError, CheckpointForeignError, DeadRuleError
from torchport.load import checkpoint, renaming
from torchport.load.adapter import Adapter
from torchport.progress import log

PARTS = {
    "lora_A.weight": "down", "lora_A.default.weight": "down", "lora_down.weight": "down", "lora.down.weight": "down",
    "lora_B.weight": "up", "lora_B.default.weight": "up", "lora_up.weight": "up", "lora.up.weight": "up",
    "lora_B.bias": "up_bias", "lora_B.default.bias": "up_bias",
    "alpha": "alpha", "diff": "weight", "diff_b": "bias",
}  # fmt: skip
"""What the last words of a key say: which half of a pair it is, its alpha, or a whole difference."""

OTHERS = {
    "dora_scale": "DoRA", "lora_magnitude_vector": "DoRA", "hada_": "LoHa", "lokr_": "LoKr", "oft_": "OFT",
    "lora_mid": "a LoRA with a third matrix", "diff_m": "a difference of modulation",
}  # fmt: skip
"""What is no sum of pairs, by a piece of its keys."""

UNREAD = ("diff_m",)
"""Those that stand beside pairs: a file without them is a LoRA that does less."""

PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "lora_unet_",
    "lora_transformer_",
)
"""What stands before a layer's name in published files, whatever the network is called."""

OF_THIS = "Name a LoRA that was made for this model"

_INTEGERS = ("I64", "I32", "I16", "I8", "U8")
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
"""How files of `torch.save` begin: of PyTorch 1.6 and later, and of those before."""


class Lora(NamedTuple):
    """A LoRA file, and how much of it is added."""

    file: Path
    scale: float


@dataclasses.dataclass(frozen=True)
class Loras:
    """The LoRA files of a component.

    Attributes:
        names: The card's rules from the names of the component's layers to those in such files.
    """

    component: str
    files: Sequence[Lora]
    names: Sequence[LoraName] = ()
    places: Sequence[str] = ()


class Addition(NamedTuple):
    """What a file adds to a tensor: `factor` times `up @ down`, or times `up` alone."""

    file: Path
    up: str
    down: str | None
    factor: float


class Additions:
    """What LoRA files add to a component's tensors. A file is read tensor by tensor, when its turn comes."""

    def __init__(self, of_tensor: Mapping[str, Sequence[Addition]]) -> None:
        self.of_tensor = of_tensor
        self._streams: dict[Path, Any] = {}

    def merged(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor in float32 with all that is added to it, or itself where nothing is."""
        for each in self.of_tensor.get(name, ()):
            difference = self._read(each.file, each.up)
            if each.down is not None:
                difference = difference.flatten(1) @ self._read(each.file, each.down).flatten(1)
            tensor = tensor.to(torch.float32) + each.factor * difference.reshape(tensor.shape)
        return tensor

    def check(self) -> None:
        """Refuses NaN and infinity, before hours of work and not after them."""
        for additions in self.of_tensor.values():
            for each in additions:
                for key in filter(None, (each.up, each.down)):
                    self._read(each.file, key)

    def _read(self, file: Path, key: str) -> torch.Tensor:
        from safetensors import safe_open

        if file not in self._streams:
            self._streams[file] = safe_open(str(file), framework="pt")
        return _finite(self._streams[file].get_tensor(key), file, key).to(torch.float32)


def check_format(file: Path) -> None:
    """Refuses a file of `torch.save`, by its first bytes, whatever it is called."""
    with file.open("rb") as stream:
        start = stream.read(8)
    # A header's length may begin with the same byte as a pickle, and is never as large.
    is_pickle = start.startswith(_PICKLE) and int.from_bytes(start, "little") > checkpoint.LARGEST_HEADER
    if start.startswith(_ZIP) or is_pickle:
        fact = "It is a pickle, as torch.save writes it (.pt, .bin, .ckpt), and a pickle can run code"
        remedy = (
            "Convert it to safetensors: "
            f"python -c \"import torch, safetensors.torch as s; s.save_file(torch.load('{file}', weights_only=True), "
            f"'{file.with_suffix('.safetensors')}')\""
        )
        raise CheckpointForeignError(str(file), fact, remedy)


def _finite(tensor: torch.Tensor, file: Path, key: str) -> torch.Tensor:
    if not torch.isfinite(tensor).all():
        raise CheckpointBrokenError(str(file), f"'{key}' holds NaN or infinity", "Download the file again", key=key)
    return tensor


def additions(loras: Loras | None, shapes: Mapping[str, Sequence[int]], name_in_file: Mapping[str, str]) -> Additions:
    """Returns what a component's LoRA files add to its tensors, every key accounted for.

    Args:
        name_in_file: What the checkpoint calls each of them: a LoRA may use those names, too.
    """
    of_tensor: dict[str, list[Addition]] = {}
    if loras is None or not loras.files:
        return Additions(of_tensor)
    layers = _layers_by_name(loras, shapes, name_in_file)
    for lora in loras.files:
        count = 0
        for name, addition in _Reader(lora, loras.component, shapes).additions(layers):
            of_tensor.setdefault(name, []).append(addition)
            count += 1
        log.debug("lora %s: %d tensors of '%s', scale %g", lora.file, count, loras.component, lora.scale)
    return Additions(of_tensor)


def _layers_by_name(
    loras: Loras, shapes: Mapping[str, Sequence[int]], name_in_file: Mapping[str, str]
) -> dict[str, set[str]]:
    """Returns the layers that each name can mean: the module's names, the checkpoint's, and those of the card's rules.

    Each of them also stands there with underscores for dots.
    """
    names: dict[str, set[str]] = {}

    def note(name: str, layer: str) -> None:
        for spelling in (name, name.replace(".", "_")):
            names.setdefault(spelling, set()).add(layer)

    used = set()
    for tensor in shapes:
        layer, _, kind = tensor.rpartition(".")
        if kind not in ("weight", "bias"):
            continue
        note(layer, layer)
        if name_in_file[tensor].endswith(f".{kind}"):
            note(name_in_file[tensor].removesuffix(f".{kind}"), layer)
        for number, rule in enumerate(loras.names):
            match = re.fullmatch(rule.match, layer)
            if match is not None:
                note(match.expand(rule.to), layer)
                used.add(number)
                break
    for number, rule in enumerate(loras.names):
        if number not in used:
            fact = f"Rule {number + 1}, '{rule.match}', is the first match of no layer of '{loras.component}'"
            raise DeadRuleError(loras.places[number], fact, "Remove it, or mend it", rule=rule.match)
    return names


class _Reader:
    """One file, as its header has it: see `additions`."""

    def __init__(self, lora: Lora, component: str, shapes: Mapping[str, Sequence[int]]) -> None:
        from safetensors import safe_open

        self.file, self.scale = lora
        self.component = component
        self.shapes = shapes
        if self.file.is_file():
            check_format(self.file)
        self.entries = checkpoint.header(self.file)
        if not self.entries:
            fact = "It has no tensors, and would change nothing"
            raise CheckpointForeignError(str(self.file), fact, "Remove it from 'lora', or name a file that has some")
        self.stream: Any = safe_open(str(self.file), framework="pt")
        self.prefixes = (*PREFIXES, f"{component}.")
        metadata = self.stream.metadata() or {}  # type: ignore[no-untyped-call]
        self.adapter = Adapter(self.file, component, metadata, list(self.entries))

    def additions(self, layers: Mapping[str, set[str]]) -> Iterator[tuple[str, Addition]]:
        """Yields what the file adds to each tensor, by the module's name for it."""
        name_of_layer: dict[str, str] = {}
        for name, keys in self._keys_by_name().items():
            layer = self._layer(name, next(iter(keys.values())), layers)
            if layer in name_of_layer:
                fact = f"'{name_of_layer[layer]}' and '{name}' are both '{layer}' of '{self.component}'"
                raise CheckpointForeignError(str(self.file), fact, "Remove one of them", name=name)
            name_of_layer[layer] = name
            yield from self._of_layer(layer, name, keys)

    def _keys_by_name(self) -> dict[str, dict[str, str]]:
        keys: dict[str, dict[str, str]] = {}
        for key, entry in self.entries.items():
            ending = next((ending for ending in PARTS if key.endswith(f".{ending}")), None)
            other = next((kind for piece, kind in OTHERS.items() if f".{piece}" in key), None)
            if ending is None or other is not None:
                fact = f"'{key}' is of {other}" if other else f"'{key}' ends as no key of a LoRA does"
                raise self._foreign(fact, self._remedy(key), key)
            known = (*checkpoint.FLOATS, *_INTEGERS) if ending == "alpha" else checkpoint.FLOATS
            if entry["dtype"] not in known:
                raise self._foreign(f"'{key}' is of dtype {entry['dtype']}", f"It must be {', '.join(known)}", key)
            parts = keys.setdefault(key.removesuffix(f".{ending}"), {})
            if PARTS[ending] in parts:
                raise self._foreign(f"'{parts[PARTS[ending]]}' and '{key}' are one thing", "Remove one of them", key)
            parts[PARTS[ending]] = key
        return keys

    def _remedy(self, key: str) -> str:
        piece = next((piece for piece in OTHERS if f".{piece}" in key), "")
        if piece in UNREAD:
            less = self.file.with_suffix(f".without_{piece}.safetensors")
            return (
                f'Leave these keys out, if the LoRA may do less, and name the new file: python -c "import safetensors, '
                f"safetensors.torch as s; f = safetensors.safe_open('{self.file}', 'pt'); s.save_file({{k: "
                f"f.get_tensor(k) for k in f.keys() if '.{piece}' not in k}}, '{less}', f.metadata())\""
            )
        remedy = f"torchport merges pairs of matrices and whole differences: {', '.join(PARTS)}"
        return f"{remedy}. Merge this one into the checkpoint, or name a plain LoRA" if piece else remedy

    def _layer(self, name: str, key: str, layers: Mapping[str, set[str]]) -> str:
        """Returns the layer that a name in the file means, with or without a prefix."""
        bare = list(self._bare(name))
        fitting = sorted({layer for each in bare for layer in layers.get(each, ())})
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            fact = f"'{key}' can be {' and '.join(map(repr, fitting))} of '{self.component}'"
            raise self._foreign(fact, "Give it the name of the one with dots, as the module has it", key)
        alike = [other for other in layers if ("." in other) == ("." in bare[-1])]
        remedy = f"{renaming.closest(bare[-1], alike)}. {OF_THIS}, or add a rule to the card's 'lora_names'"
        raise self._foreign(f"'{key}' is no layer of '{self.component}'", remedy, key)

    def _bare(self, name: str) -> Iterator[str]:
        """Yields a name, and what is left of it without each prefix that it begins with."""
        yield name
        for prefix in self.prefixes:
            if name.startswith(prefix):
                yield from self._bare(name.removeprefix(prefix))

    def _of_layer(self, layer: str, name: str, keys: Mapping[str, str]) -> Iterator[tuple[str, Addition]]:
        up, down = keys.get("up"), keys.get("down")
        if up is None or down is None:
            lone = next((keys[part] for part in ("up", "down", "up_bias", "alpha") if part in keys), None)
            if lone is not None:
                fact = f"'{lone}' is there, and '{name}' lacks {'both halves' if up is down else 'the other half'}"
                remedy = "A LoRA has pairs, lora_A and lora_B or lora_down and lora_up: download the file again"
                raise CheckpointBrokenError(str(self.file), fact, remedy, key=lone)
        else:
            factor = self._factor(layer, name, up, down, keys.get("alpha"))
            yield f"{layer}.weight", Addition(self.file, up, down, factor)
            if "up_bias" in keys:
                yield self._whole(f"{layer}.bias", keys["up_bias"], factor)
        for part in ("weight", "bias"):
            if part in keys:
                yield self._whole(f"{layer}.{part}", keys[part], self.scale)

    def _whole(self, tensor: str, key: str, factor: float) -> tuple[str, Addition]:
        if tensor not in self.shapes:
            raise self._foreign(f"'{key}' is there, and '{self.component}' has no '{tensor}'", OF_THIS, key)
        if list(self.entries[key]["shape"]) != list(self.shapes[tensor]):
            raise self._shape_error(key, list(self.shapes[tensor]), tensor)
        return tensor, Addition(self.file, key, None, factor)

    def _factor(self, layer: str, name: str, up: str, down: str, alpha: str | None) -> float:
        """Returns what a pair's product is multiplied by, if the pair fits the layer's weight."""
        weight = f"{layer}.weight"
        if weight not in self.shapes:
            raise self._foreign(f"'{down}' is there, and '{self.component}' has no '{weight}'", OF_THIS, down)
        rows, *columns = self.shapes[weight]
        rank, *inner = self.entries[down]["shape"] or [0]
        if _trimmed(inner) != _trimmed(columns):
            raise self._shape_error(down, [rank, *columns], weight)
        shape = self.entries[up]["shape"]
        if len(shape) < 2 or shape[1] != rank or rank == 0:
            fact = f"'{down}' has rank {rank}, and '{up}' has shape {shape}"
            raise self._foreign(fact, "The rank must be the same: download the file again", up)
        if shape[0] != rows or _trimmed(shape[2:]):
            raise self._shape_error(up, [rows, rank], weight)
        value = self._number(alpha) if alpha else self.adapter.alpha(list(self._bare(name)), rank)
        return self.scale * self.adapter.scale(value, rank)

    def _number(self, key: str) -> float:
        if math.prod(self.entries[key]["shape"]) != 1:
            fact = f"'{key}' has shape {self.entries[key]['shape']}"
            raise CheckpointBrokenError(str(self.file), fact, "It must be one number", key=key)
        return self.adapter.positive(float(_finite(self.stream.get_tensor(key), self.file, key)), f"'{key}'")

    def _shape_error(self, key: str, shape: Sequence[int], tensor: str) -> CheckpointForeignError:
        fact = f"'{key}' has shape {self.entries[key]['shape']}"
        remedy = f"For '{tensor}', of shape {list(self.shapes[tensor])}, it must be {list(shape)}. {OF_THIS}"
        return self._foreign(fact, remedy, key)

    def _foreign(self, fact: str, remedy: str, key: str) -> CheckpointForeignError:
        return CheckpointForeignError(str(self.file), fact, remedy, key=key)


def _trimmed(shape: Sequence[int]) -> list[int]:
    """Returns a shape without the ones at its end: kernels of one position are written with them and without."""
    sizes = list(shape)
    while sizes and sizes[-1] == 1:
        sizes.pop()
    return sizes
