"""What a LoRA's trainer says beside its tensors: the alpha and rank of its pairs, and whether pairs are all it has.

Source: `LoraConfig` of PEFT 0.18; where diffusers 0.42 (`lora_adapter_metadata`), SimpleTuner
(`transformer.lora_alpha`) and Kohya's scripts (`ss_network_alpha`) keep theirs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchport.errors import CheckpointBrokenError, CheckpointForeignError
from torchport.load import checkpoint

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


@dataclasses.dataclass(frozen=True)
class _Source:
    """One place where a trainer has written settings.

    Attributes:
        values: The settings of the component, without the name of the network before them.
    """

    name: str
    values: Mapping[str, Any]


class Adapter:
    """The settings of one LoRA file's training."""

    def __init__(self, file: Path, component: str, metadata: Mapping[str, str], keys: Sequence[str]) -> None:
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
        """Returns the alpha of a layer that has no tensor for it: what the trainer says, or else the rank.

        Args:
            names: The layer, as the file calls it, with and without prefixes.
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

    def _read(self, metadata: Mapping[str, str], keys: Sequence[str]) -> Iterator[_Source]:
        """Yields what is written in PEFT's file beside the LoRA, and in the LoRA's metadata."""
        beside = config_beside(self._file)
        if beside and (self._file.stem == "adapter_model" or all(key.startswith("base_model.") for key in keys)):
            yield _Source(f"'{CONFIG_FILE}' beside it", checkpoint.read_json(beside))
        yield _Source("its metadata", self._of_component(metadata))
        for key, text in sorted(metadata.items()):
            if key == METADATA or re.match(r'\s*\{.*"(\w+\.)?lora_alpha"', text, re.DOTALL):
                yield _Source(f"'{key}'", self._of_component(self._object(key, text)))

    def _object(self, key: str, text: Any) -> dict[str, Any]:
        """Returns a JSON object in the metadata, or in one of its values."""
        try:
            value = json.loads(text) if isinstance(text, str) else text
        except (ValueError, RecursionError) as error:
            raise self._broken(f"'{key}' in its metadata is no JSON object") from error
        if not isinstance(value, dict):
            raise self._broken(f"'{key}' in its metadata is no JSON object")
        return value

    def _of_component(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of the network. Its own name before them goes before any network's."""
        settings = {name: value for name, value in values.items() if not name.startswith("text_encoder")}
        for prefix in dict.fromkeys(("transformer.", f"{self._component}.")):
            settings |= {
                name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)
            }
            settings = {name: value for name, value in settings.items() if not name.startswith(prefix)}
        return settings

    def _check_is_sum(self, source: _Source) -> None:
        """Refuses settings of an adapter that is more than a sum of pairs."""
        values = source.values
        kind = values.get("peft_type")
        if kind is not None and str(kind).rpartition(".")[2].upper() != "LORA":
            raise self._foreign(source, "peft_type", f"is a {kind}")
        for name, why in _OTHER_SUMS.items():
            if name in values and not _is_unset(values[name]):
                raise self._foreign(source, name, why)
        start = str(values.get("init_lora_weights", True)).lower()
        if start not in _KEEPS_THE_BASE:
            raise self._foreign(source, "init_lora_weights", f"'{start}' changes the model's own weights")

    def _foreign(self, source: _Source, name: str, why: str) -> CheckpointForeignError:
        fact = f"{source.name} has '{name}'"
        remedy = "torchport merges pairs of matrices alone"
        if name == "init_lora_weights":
            remedy = (
                "Save it again with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...), which "
                "makes a plain LoRA of it"
            )
        else:
            remedy += ": merge this one into the checkpoint with PEFT's merge_and_unload, or name a plain LoRA"
        return CheckpointForeignError(str(self._file), f"{fact}, and {why}", remedy, key=name)

    def _alphas(self, source: _Source, names: Sequence[str]) -> Iterator[tuple[str, float]]:
        of_layer = self._by_pattern(source, "alpha_pattern", names)
        if of_layer is not None:
            pattern, value = of_layer
            yield f"The alpha of '{pattern}' in {source.name}", self._number(source, pattern, value, "The alpha of ")
            return
        for name, value in sorted(source.values.items()):  # safetensors gives metadata in no order
            if name in ALPHAS:
                yield f"'{name}' in {source.name}", self._number(source, name, value)
            elif _LIKE_ALPHA.search(name):
                fact = f"'{name}' in {source.name} is not known, and a pair has no alpha of its own"
                remedy = f"Call it {' or '.join(map(repr, ALPHAS))}, or remove it if it is not the alpha of these pairs"
                raise CheckpointBrokenError(str(self._file), fact, remedy, key=name)

    def _check_rank(self, source: _Source, names: Sequence[str], rank: int) -> None:
        of_layer = self._by_pattern(source, "rank_pattern", names)
        known = [of_layer] if of_layer else [(name, source.values[name]) for name in RANKS if name in source.values]
        for name, value in known:
            if self._number(source, name, value) != rank:
                fact = f"'{name}' in {source.name} is {value}, and '{names[0]}' has rank {rank}"
                remedy = "Write the file again with the alpha of this rank in '{}'".format(f"{names[0]}.alpha")
                raise CheckpointBrokenError(str(self._file), fact, remedy, key=name)

    def _by_pattern(self, source: _Source, field: str, names: Sequence[str]) -> tuple[str, Any] | None:
        """Returns the first pattern of a field that a layer matches as PEFT matches it, with its value."""
        patterns = source.values.get(field)
        if _is_unset(patterns):
            return None
        try:
            for pattern, value in self._object(field, patterns).items():
                if _SLOW.search(pattern):
                    raise re.error("it repeats a group, and may take for ever", pattern)
                if any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in names):
                    return pattern, value
        except re.error as error:
            raise self._broken(f"{source.name} has an alpha that is none: {error}") from error
        return None

    def _number(self, source: _Source, name: str, value: Any, before: str = "") -> float:
        try:
            if isinstance(value, bool):
                raise TypeError(f"it is {value}")
            return self.positive(float(value), f"{before}'{name}' in {source.name}")
        except (TypeError, ValueError, OverflowError) as error:
            raise self._broken(f"{source.name} has an alpha that is none: '{name}', {error}") from error

    def positive(self, alpha: float, name: str) -> float:
        """Returns an alpha that may be one: it is a rank's measure, and a file's strength is its `scale`."""
        if alpha > 0 and math.isfinite(alpha):
            return alpha
        does = "and would add nothing" if alpha == 0 else "and an alpha is a positive number"
        remedy = "Write the file again with the alpha of its training; a negative 'scale' in the job subtracts a LoRA"
        raise CheckpointBrokenError(str(self._file), f"{name} is {alpha:g}, {does}", remedy, key=name)

    def _broken(self, fact: str) -> CheckpointBrokenError:
        return CheckpointBrokenError(str(self._file), fact, checkpoint.AGAIN)


def config_beside(file: Path) -> Path | None:
    """Returns PEFT's configuration beside a LoRA file, if there is one."""
    config = file.parent / CONFIG_FILE
    return config if config.is_file() else None


def _is_unset(value: Any) -> bool:
    return value in (None, [], {}) or str(value).lower() in ("false", "0", "none", "null", "", "{}", "[]")
