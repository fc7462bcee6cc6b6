"""LoRA files: what they add to the weights of a network, merged into each weight while it is loaded.

A pair of matrices adds `scale * alpha / rank * up @ down` to a layer's weight, of a convolution as well. A file may
also hold whole differences, of a weight or of a bias.

Source: the names of keys, and which prefixes published files have, as diffusers 0.42 reads them
(`loaders/lora_conversion_utils.py`). Alpha and rank: `LoraConfig` of PEFT 0.18; where diffusers 0.42
(`lora_adapter_metadata`), SimpleTuner (`transformer.lora_alpha`) and Kohya's scripts (`ss_network_alpha`) keep theirs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchport.config.card import LoraName
from torchport.errors import CheckpointBrokenError, CheckpointForeignError, DeadRuleError
from torchport.load import checkpoint, renaming
from torchport.progress import log

METADATA = "lora_adapter_metadata"
"""Where diffusers keeps PEFT's configuration in a file's metadata, as JSON."""

CONFIG_FILE = "adapter_config.json"
"""Where PEFT keeps it: in a file beside the weights."""

ALPHAS = ("lora_alpha", "network_alpha", "ss_network_alpha", "alpha")
RANKS = ("r", "rank", "lora_rank", "network_dim", "ss_network_dim")

_LIKE_ALPHA = re.compile(r"alpha$", re.IGNORECASE)
_SLOW = re.compile(r"\)[?]?[*+{]")
"""What makes a stranger's pattern try all ways to split a name."""
_KEEPS_THE_BASE = ("true", "false", "none", "gaussian", "eva", "orthogonal")
"""Ways of PEFT to begin a training (`init_lora_weights`) that leave the model's own weights as they are."""

_OTHER_SUMS = {
    "use_dora": "a DoRA scales each row of the sum",
    "fan_in_fan_out": "its pairs are transposed",
    "use_qalora": "its pairs act on groups of inputs",
    "use_bdlora": "its pairs are blocks of a larger matrix",
    "alora_invocation_tokens": "it acts from a token on",
    "layer_replication": "its network has layers several times",
}
"""Fields of PEFT's configuration of which any value but none and false means more than a sum of pairs."""

_MERGED = (
    "torchport merges pairs of matrices alone: merge this one into the checkpoint with PEFT's merge_and_unload, or "
    "name a plain LoRA"
)
_PLAIN_AGAIN = (
    "Save it again with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes a plain "
    "LoRA of it"
)
"""Remedies for a LoRA that is another sum, and for a LoRA that changes the model's own weights."""


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The settings of a training, from one of the places where a trainer may have written them."""

    name: str  #: The place, for errors.
    values: Mapping[str, Any]  #: The settings of the component, without the name of the network before them.


class _Adapter:
    """The training settings of a LoRA file, such as alpha and rank: from its metadata and PEFT's file beside it."""

    def __init__(self, file: Path, component: str, metadata: Mapping[str, str], keys: Sequence[str]) -> None:
        """Reads the settings of a file with these keys; refuses an adapter that is no plain LoRA, such as a DoRA."""
        self._file = file
        self._component = component
        self._sources = list(self._read(metadata, keys))
        for source in self._sources:
            self._check_is_sum(source)

    def scale(self, alpha: float, rank: int) -> float:
        """Returns the factor of a pair's product. `alpha / sqrt(rank)` is rank-stabilised LoRA, arXiv:2312.03732."""
        values = (str(source.values.get("use_rslora")).lower() for source in self._sources)
        is_stabilised = any(value in ("true", "1") for value in values)
        return alpha / (math.sqrt(rank) if is_stabilised else rank)

    def alpha(self, names: Sequence[str], rank: int) -> float:
        """Returns the alpha of a layer that has no tensor for it: the trainer's, or else the rank.

        Raises if the file's settings have two different alphas, or another rank. `names` are the layer's name in the
        file, and the name without each prefix.
        """
        found: dict[float, str] = {}
        for source in self._sources:
            alphas = list(self._alphas(source, names))
            found |= {value: words for words, value in alphas}
            if alphas:
                self._check_rank(source, names, rank)
        if len(found) > 1:
            fact = " and ".join(f"{words} is {value:g}" for value, words in found.items())
            remedy = "Write the file again with the alpha of its training in one place"
            raise CheckpointBrokenError(str(self._file), fact, remedy)
        return next(iter(found), float(rank))

    def _read(self, metadata: Mapping[str, str], keys: Sequence[str]) -> Iterator[_Settings]:
        """Yields the settings in PEFT's file beside the LoRA, and those in the LoRA's metadata."""
        # The configuration may be another file's, unless the name or the keys of this file are PEFT's.
        beside = config_beside(self._file)
        if beside and (self._file.stem == "adapter_model" or all(key.startswith("base_model.") for key in keys)):
            yield _Settings(f"'{CONFIG_FILE}' beside it", checkpoint.read_json(beside))
        yield _Settings("its metadata", self._component_settings(metadata))
        for key, text in sorted(metadata.items()):
            # Trainers write the same JSON under other keys.
            if key == METADATA or re.match(r'\s*\{.*"(\w+\.)?lora_alpha"', text, re.DOTALL):
                yield _Settings(f"'{key}'", self._component_settings(self._json_object(key, text)))

    def _json_object(self, key: str, content: Any) -> dict[str, Any]:
        """Returns the JSON object of a key in the metadata, given as text or parsed already; refuses other content."""
        try:
            value = json.loads(content) if isinstance(content, str) else content
        except (ValueError, RecursionError) as error:
            raise self._broken(f"'{key}' in its metadata is no JSON object") from error
        if not isinstance(value, dict):
            raise self._broken(f"'{key}' in its metadata is no JSON object")
        return value

    def _component_settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the network's settings by bare names: `{"transformer.r": 8, "r": 4}` -> `{"r": 8}`.

        A setting with the network's name in front replaces a general one. Those of text encoders are left out.
        """
        settings = {name: value for name, value in values.items() if not name.startswith("text_encoder")}
        for prefix in dict.fromkeys(("transformer.", f"{self._component}.")):  # each prefix once
            settings |= {
                name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)
            }
            settings = {name: value for name, value in settings.items() if not name.startswith(prefix)}
        return settings

    def _check_is_sum(self, source: _Settings) -> None:
        """Refuses an adapter that adds something else than products of two matrices, such as a DoRA."""
        kind = source.values.get("peft_type")
        start = str(source.values.get("init_lora_weights", True)).lower()  # True is PEFT's default
        reasons = {}
        if kind is not None and str(kind).rpartition(".")[2].upper() != "LORA":
            reasons["peft_type"] = f"is a {kind}"
        reasons |= {name: why for name, why in _OTHER_SUMS.items() if not _is_unset(source.values.get(name))}
        if start not in _KEEPS_THE_BASE:
            reasons["init_lora_weights"] = f"'{start}' changes the model's own weights"
        if reasons:
            name, why = next(iter(reasons.items()))
            remedy = _PLAIN_AGAIN if name == "init_lora_weights" else _MERGED
            raise CheckpointForeignError(str(self._file), f"{source.name} has '{name}', and {why}", remedy, key=name)

    def _alphas(self, source: _Settings, names: Sequence[str]) -> Iterator[tuple[str, float]]:
        """Yields the alphas that a source has for a layer: of a pattern that fits, or else all general ones.

        Each has words for errors before it: `("'alpha' in its metadata", 16.0)`. Refuses a setting whose name ends in
        `alpha` and is not known.
        """
        if match := self._first_matching(source, "alpha_pattern", names):
            pattern, value = match
            alpha = self._number(source, pattern, value, before="The alpha of ")
            yield f"The alpha of '{pattern}' in {source.name}", alpha
            return
        for name, value in sorted(source.values.items()):  # safetensors gives metadata in no order
            if name in ALPHAS:
                yield f"'{name}' in {source.name}", self._number(source, name, value)
            elif _LIKE_ALPHA.search(name):
                fact = f"'{name}' in {source.name} is not known, and a pair has no alpha of its own"
                remedy = f"Call it {' or '.join(map(repr, ALPHAS))}, or remove it if it is not the alpha of these pairs"
                raise CheckpointBrokenError(str(self._file), fact, remedy, key=name)

    def _check_rank(self, source: _Settings, names: Sequence[str], rank: int) -> None:
        """Raises if a source in the file's metadata gives a layer another rank than its matrices have."""
        match = self._first_matching(source, "rank_pattern", names)
        ranks = [match] if match else [(name, source.values[name]) for name in RANKS if name in source.values]
        for name, value in ranks:
            if self._number(source, name, value) != rank:
                fact = f"'{name}' in {source.name} is {value}, and '{names[0]}' has rank {rank}"
                remedy = f"Write the file again with the alpha of this rank in '{names[0]}.alpha'"
                raise CheckpointBrokenError(str(self._file), fact, remedy, key=name)

    def _first_matching(self, source: _Settings, field: str, names: Sequence[str]) -> tuple[str, Any] | None:
        """Returns the first pattern of a field that fits a layer, with its value: `("blocks.0", 16)`; None without one.

        Patterns match as in PEFT: the end of the layer's name, from a dot on.
        """
        patterns = source.values.get(field)
        if _is_unset(patterns):
            return None
        try:
            for pattern, value in self._json_object(field, patterns).items():
                if _SLOW.search(pattern):
                    raise re.error("it repeats a group, and may take for ever", pattern)
                if any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in names):
                    return pattern, value
        except re.error as error:
            raise self._broken(f"{source.name} has a '{field}' that cannot be read: {error}") from error
        return None

    def _number(self, source: _Settings, name: str, value: Any, before: str = "") -> float:
        """Returns the value of a setting as a positive number; refuses any other value."""
        try:
            if isinstance(value, bool):
                raise TypeError(f"it is {value}")
            return self.positive(float(value), f"{before}'{name}' in {source.name}")
        except (TypeError, ValueError, OverflowError) as error:
            raise self._broken(f"{source.name} has a '{name}' that is no number: {error}") from error

    def positive(self, alpha: float, name: str) -> float:
        """Returns an alpha if it is positive and finite, and refuses any other."""
        if alpha > 0 and math.isfinite(alpha):
            return alpha
        why = "and would add nothing" if alpha == 0 else "and an alpha is a positive number"
        remedy = "Write the file again with the alpha of its training; a negative 'scale' in the job subtracts a LoRA"
        raise CheckpointBrokenError(str(self._file), f"{name} is {alpha:g}, {why}", remedy, key=name)

    def _broken(self, fact: str) -> CheckpointBrokenError:
        return CheckpointBrokenError(str(self._file), fact, checkpoint.AGAIN)


def config_beside(file: Path) -> Path | None:
    """Returns PEFT's configuration beside a LoRA file, if there is one."""
    config = file.parent / CONFIG_FILE
    return config if config.is_file() else None


def _is_unset(value: Any) -> bool:
    """Returns whether a field of PEFT's configuration, which may be text, is none, false or empty."""
    return value in (None, [], {}) or str(value).lower() in ("false", "0", "none", "null", "", "{}", "[]")


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
    """The LoRA files of a component."""

    component: str
    files: Sequence[Lora]
    #: The card's rules from the names of the component's layers to those in such files.
    names: Sequence[LoraName] = ()
    #: Where the card has each of these rules, for errors.
    places: Sequence[str] = ()


class _Addition(NamedTuple):
    """What a file adds to a tensor: `factor` times `up @ down`, or times `up` alone."""

    file: Path
    up: str
    down: str | None
    factor: float


@dataclasses.dataclass(frozen=True)
class Additions:
    """What LoRA files add to a component's tensors. A file is read tensor by tensor, when its turn comes."""

    of_tensor: Mapping[str, Sequence[_Addition]]
    _streams: dict[Path, Any] = dataclasses.field(default_factory=dict)

    def merged(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor in float32 with all additions merged; the tensor itself if there are none."""
        for each in self.of_tensor.get(name, ()):
            difference = self._read(each.file, each.up)
            if each.down is not None:
                difference = difference.flatten(1) @ self._read(each.file, each.down).flatten(1)
            tensor = tensor.to(torch.float32) + each.factor * difference.reshape(tensor.shape)
        return tensor

    def check(self) -> None:
        """Reads all additions, and refuses NaN and infinity, before hours of work and not after them."""
        for additions in self.of_tensor.values():
            for each in additions:
                for key in filter(None, (each.up, each.down)):
                    self._read(each.file, key)  # raises for NaN and infinity

    def _read(self, file: Path, key: str) -> torch.Tensor:
        """Returns a tensor of a LoRA file in float32. The file stays open for the next one."""
        from safetensors import safe_open

        if file not in self._streams:
            self._streams[file] = safe_open(str(file), framework="pt")
        return _finite(self._streams[file].get_tensor(key), file, key).to(torch.float32)


def check_format(file: Path) -> None:
    """Refuses a file of `torch.save`, by its first bytes, whatever it is called."""
    with file.open("rb") as stream:
        start = stream.read(8)
    # A safetensors file begins with the length of its header. That may have a pickle's first byte, but is smaller.
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
    """Returns what a component's LoRA files add to its tensors; raises if a key of a file fits no tensor. A file may
    have the module's names, as `shapes` has, or the checkpoint's: `name_in_file` has these by the module's.
    """
    of_tensor: dict[str, list[_Addition]] = {}
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
    """Returns the layers that each name can mean: `{"blocks.0.to_q": {"blocks.0.to_q"}, "blocks_0_to_q": ...}`.

    Names are the module's, the checkpoint's, and those by the card's rules, with dots or underscores. Raises if a rule
    is the first match of no layer.
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
        name, number = renaming.renamed(layer, loras.names)
        note(name, layer)
        used.add(number)
    for number, rule in enumerate(loras.names):
        if number not in used:
            fact = f"Rule {number + 1}, '{rule.match}', is the first match of no layer of '{loras.component}'"
            raise DeadRuleError(loras.places[number], fact, "Remove it, or mend it", rule=rule.match)
    return names


class _Reader:
    """Matches the keys of one LoRA file with a network's layers, by the file's header; see `additions`."""

    def __init__(self, lora: Lora, component: str, shapes: Mapping[str, Sequence[int]]) -> None:
        """Reads a file's header and settings; refuses a pickle, and a file without tensors."""
        from safetensors import safe_open

        self.file, self.scale = lora
        self.component = component
        self.shapes = shapes
        if self.file.is_file():
            check_format(self.file)
        self.header = checkpoint.header(self.file)
        if not self.header:
            fact = "It has no tensors, and would change nothing"
            raise CheckpointForeignError(str(self.file), fact, "Remove it from 'lora', or name a file that has some")
        self.stream: Any = safe_open(str(self.file), framework="pt")
        self.prefixes = (*PREFIXES, f"{component}.")
        metadata = self.stream.metadata() or {}  # type: ignore[no-untyped-call]
        self.adapter = _Adapter(self.file, component, metadata, list(self.header))

    def additions(self, layers: Mapping[str, set[str]]) -> Iterator[tuple[str, _Addition]]:
        """Yields the names of tensors, each with what the file adds to it; refuses a layer that the file has twice."""
        name_of_layer: dict[str, str] = {}
        for name, keys in self._keys_by_name().items():
            layer = self._layer_named(name, next(iter(keys.values())), layers)
            if layer in name_of_layer:
                fact = f"'{name_of_layer[layer]}' and '{name}' are both '{layer}' of '{self.component}'"
                raise CheckpointForeignError(str(self.file), fact, "Remove one of them", name=name)
            name_of_layer[layer] = name
            yield from self._layer_additions(layer, name, keys)

    def _keys_by_name(self) -> dict[str, dict[str, str]]:
        """Returns the file's keys by the layer's name, and then by their part in `PARTS`; raises for other keys:
        `{"blocks.0.to_q": {"down": "blocks.0.to_q.lora_A.weight", "up": "blocks.0.to_q.lora_B.weight"}}`.
        """
        keys: dict[str, dict[str, str]] = {}
        for key, row in self.header.items():
            ending = next((ending for ending in PARTS if key.endswith(f".{ending}")), None)
            other = next((kind for piece, kind in OTHERS.items() if f".{piece}" in key), None)
            if ending is None or other is not None:
                fact = f"'{key}' is of {other}" if other else f"'{key}' does not end as a key of a LoRA"
                raise self._foreign(fact, self._remedy(key), key)
            known = (*checkpoint.FLOATS, *_INTEGERS) if ending == "alpha" else checkpoint.FLOATS
            if row["dtype"] not in known:
                raise self._foreign(f"'{key}' is of dtype {row['dtype']}", f"It must be {', '.join(known)}", key)
            parts = keys.setdefault(key.removesuffix(f".{ending}"), {})
            if PARTS[ending] in parts:
                raise self._foreign(f"'{parts[PARTS[ending]]}' and '{key}' mean the same", "Remove one of them", key)
            parts[PARTS[ending]] = key
        return keys

    def _remedy(self, key: str) -> str:
        """Returns the remedy for a key that is not merged: for some, a command that leaves such keys out."""
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

    def _layer_named(self, name: str, key: str, layers: Mapping[str, set[str]]) -> str:
        """Returns the layer that a name in the file means, with or without a prefix; raises if none or several fit."""
        bare = list(self._without_prefixes(name))
        fitting = sorted({layer for each in bare for layer in layers.get(each, ())})
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            fact = f"'{key}' can be {' and '.join(map(repr, fitting))} of '{self.component}'"
            raise self._foreign(fact, "Give it the name of the one with dots, as the module has it", key)
        alike = [other for other in layers if ("." in other) == ("." in bare[-1])]  # both with dots, or without
        remedy = f"{renaming.closest(bare[-1], alike)}. {OF_THIS}, or add a rule to the card's 'lora_names'"
        raise self._foreign(f"'{key}' is no layer of '{self.component}'", remedy, key)

    def _without_prefixes(self, name: str) -> Iterator[str]:
        """Yields a name, and what is left of it without each prefix: `transformer.blocks.0`, then `blocks.0`."""
        yield name
        for prefix in self.prefixes:
            if name.startswith(prefix):
                yield from self._without_prefixes(name.removeprefix(prefix))

    def _layer_additions(self, layer: str, name: str, keys: Mapping[str, str]) -> Iterator[tuple[str, _Addition]]:
        """Yields what the keys of one layer add to its weight and bias; refuses one matrix without the other."""
        up = keys.get("up")
        down = keys.get("down")
        if up is None or down is None:
            lone = next((keys[part] for part in ("up", "down", "up_bias", "alpha") if part in keys), None)
            if lone is not None:
                lacking = "both halves" if up is None and down is None else "the other half"
                fact = f"'{lone}' is there, and '{name}' lacks {lacking}"
                remedy = "A LoRA has pairs, lora_A and lora_B or lora_down and lora_up: download the file again"
                raise CheckpointBrokenError(str(self.file), fact, remedy, key=lone)
        else:
            factor = self._factor(layer, name, up, down, keys.get("alpha"))
            yield f"{layer}.weight", _Addition(self.file, up, down, factor)
            if "up_bias" in keys:
                yield self._difference(f"{layer}.bias", keys["up_bias"], factor)
        for part in ("weight", "bias"):
            if part in keys:
                yield self._difference(f"{layer}.{part}", keys[part], self.scale)

    def _difference(self, tensor: str, key: str, factor: float) -> tuple[str, _Addition]:
        """Returns a tensor's name with the addition of a key that holds a whole difference; refuses another shape."""
        if tensor not in self.shapes:
            raise self._foreign(f"'{key}' is there, and '{self.component}' has no '{tensor}'", OF_THIS, key)
        if list(self.header[key]["shape"]) != list(self.shapes[tensor]):
            raise self._shape_error(key, list(self.shapes[tensor]), tensor)
        return tensor, _Addition(self.file, up=key, down=None, factor=factor)

    def _factor(self, layer: str, name: str, up: str, down: str, alpha: str | None) -> float:
        """Returns the factor of a pair's product, `scale * alpha / rank`; refuses a pair that does not fit."""
        weight = f"{layer}.weight"
        if weight not in self.shapes:
            raise self._foreign(f"'{down}' is there, and '{self.component}' has no '{weight}'", OF_THIS, down)
        rows, *columns = self.shapes[weight]
        # A tensor without dims has no rank.
        rank, *inner = self.header[down]["shape"] or [0]
        if _without_trailing_ones(inner) != _without_trailing_ones(columns):
            raise self._shape_error(down, [rank, *columns], weight)
        shape = self.header[up]["shape"]
        if len(shape) < 2 or shape[1] != rank or rank == 0:
            fact = f"'{down}' has rank {rank}, and '{up}' has shape {shape}"
            raise self._foreign(fact, "The rank must be the same: download the file again", up)
        if shape[0] != rows or _without_trailing_ones(shape[2:]):
            raise self._shape_error(up, [rows, rank], weight)
        if alpha is None:
            value = self.adapter.alpha(list(self._without_prefixes(name)), rank)
        elif math.prod(self.header[alpha]["shape"]) != 1:
            fact = f"'{alpha}' has shape {self.header[alpha]['shape']}"
            raise CheckpointBrokenError(str(self.file), fact, "It must be one number", key=alpha)
        else:
            tensor = _finite(self.stream.get_tensor(alpha), self.file, alpha)
            value = self.adapter.positive(float(tensor), f"'{alpha}'")
        return self.scale * self.adapter.scale(value, rank)

    def _shape_error(self, key: str, shape: Sequence[int], tensor: str) -> CheckpointForeignError:
        fact = f"'{key}' has shape {self.header[key]['shape']}"
        remedy = f"For '{tensor}', of shape {list(self.shapes[tensor])}, it must be {list(shape)}. {OF_THIS}"
        return self._foreign(fact, remedy, key)

    def _foreign(self, fact: str, remedy: str, key: str) -> CheckpointForeignError:
        return CheckpointForeignError(str(self.file), fact, remedy, key=key)


def _without_trailing_ones(shape: Sequence[int]) -> list[int]:
    """Returns a shape without trailing ones: files may leave out the kernel dims of a 1x1 convolution."""
    sizes = list(shape)
    while sizes and sizes[-1] == 1:
        sizes.pop()
    return sizes
