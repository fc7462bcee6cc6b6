"""A class's arguments with small numbers: what `tiny:` of a card begins with.

The rules go by names, as diffusers, transformers and most repositories have them: depth, heads, widths, channels. What
no rule names keeps the class's default. Nobody but the class can say whether the numbers fit each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchport.porting.draft.constructor import Argument

DEPTH, HEADS, HEAD_SIZE, WIDTH, MLP, VOCABULARY, GROUPS, CHANNELS = 2, 4, 32, 64, 128, 1024, 8, 32
"""The largest numbers in a tiny network."""

_RULES: tuple[tuple[str, int], ...] = (
    (r"layers_per_block", 1),
    (r"(?:.*_)?base_(?:dim|channels|width)", 16),
    (r"(?:.*_)?(?:heads?|heads_num|n_heads?)", HEADS),
    (r"(?:.*_)?(?:head_dim|dim_head|head_size|d_kv)", HEAD_SIZE),
    (r"(?:.*_)?(?:layers?|blocks?|depths?)|n_layers?", DEPTH),
    (r".*(?:ffn|intermediate|mlp_dim|mlp_hidden|feedforward|d_ff).*", MLP),
    (r"(?:.*_)?vocab(?:_size|ulary)?", VOCABULARY),
    (r"(?:.*_)?groups", GROUPS),
    (r"(?:.*_)?(?:dim|dims|hidden_size|d_model|n_embd|features)|width", WIDTH),
)
_MODEL_WIDTH = re.compile(r"(?:hidden_size|dim|d_model|embed_dim|model_dim|inner_dim|width|n_embd)")


def tiny(arguments: Sequence[Argument]) -> tuple[dict[str, Any], list[str]]:
    """Returns small values by argument, and the names of the arguments that have none and need one."""
    numbers = {one.name: one.default for one in arguments}
    values: dict[str, Any] = {}
    lacking = []
    for one in arguments:
        value = _small(one.name, one.default)
        if value is None and one.required:
            lacking.append(one.name)
        elif value is not None and (one.required or (one.default is not None and value != one.default)):
            values[one.name] = value
    values |= _together(values, numbers)
    return values, [name for name in lacking if name not in values]


def _limit(name: str) -> int | None:
    return next((limit for pattern, limit in _RULES if re.fullmatch(pattern, name)), None)


def _small(name: str, default: Any) -> Any:
    """Returns a small value of one argument; None to leave it as it is."""
    limit = _limit(name)
    if isinstance(default, bool | str):
        return None
    if default is None:
        return limit
    if isinstance(default, int):
        return None if limit is None else min(default, limit)
    is_ints = isinstance(default, list | tuple) and default and all(type(one) is int for one in default)
    if not is_ints:
        return None
    if "channels" in name:  # in the same proportion, and still a multiple of the usual number of groups
        unit = max(1, min(default) // CHANNELS)
        return [one // unit // CHANNELS * CHANNELS or one for one in default]
    is_depth = limit == DEPTH and "layers" in name  # of a few layers it may be their numbers
    return None if limit is None or is_depth else [min(one, limit) for one in default]


def _together(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what must agree: a width is heads times their size, and rotary dims fill a head."""
    every = {**defaults, **values}
    heads = _first(every, r"(?:num_)?(?:attention_)?(?:heads?|heads_num|n_heads?)|num_attention_heads")
    size = _first(every, r"(?:attention_)?(?:head_dim|dim_head|head_size)")
    result: dict[str, Any] = {}
    if heads is not None and size is None:
        result |= {name: heads * HEAD_SIZE for name in values if _MODEL_WIDTH.fullmatch(name)}
    for name, value in defaults.items():
        several = isinstance(value, list | tuple) and len(value) > 1 and all(type(one) is int for one in value)
        if several and re.search(r"rope|axes", name) and sum(value) > 0:
            result[name] = _shares(value, size or HEAD_SIZE)
    return result


def _first(values: Mapping[str, Any], pattern: str) -> int | None:
    found = (value for name, value in values.items() if re.fullmatch(pattern, name) and type(value) is int)
    return next(found, None)


def _shares(parts: Sequence[int], total: int) -> list[int]:
    """Returns even numbers in the proportion of others that add up to a total."""
    shares = [max(2, one * total // sum(parts) // 2 * 2) for one in parts]
    shares[-1] += total - sum(shares)
    return shares
