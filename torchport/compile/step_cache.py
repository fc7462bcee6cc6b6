"""Step caches: two programs of a network, one that computes all blocks and one that takes them from before.

What is kept is what leaves the stacked blocks (`deepcache`: the blocks after them are computed in every step), or what
they added to what entered them. It stays on the devices. Which step does what is known before the first one
(`torchport.config.step_cache`), so no program depends on a value.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torchport import shard
from torchport.compile import stack
from torchport.compile.eager import How
from torchport.compile.program import Compiled
from torchport.config.card import Stack
from torchport.config.step_cache import Calibrate, DeepCache, StepCache
from torchport.errors import BadValueError, StackError
from torchport.stages import family
from torchport.stages.outputs import TENSORS, leaves, of_call

MODE, KEPT = "step_cache", "step_cache_kept"
"""Inputs of a network beside its own: `full` or `reuse`, and what an earlier step kept."""
STATE = "step_cache."
"""Begins the names of tensors of a saved step that are this module's."""
CURVE = "curve"


def stacks(cache: StepCache, card: Mapping[str, Stack]) -> dict[str, Stack]:
    """Returns a network's stacks, the blocks left apart that every step computes."""
    return {name: entry.model_copy(update={"last": max(entry.last, cache.apart)}) for name, entry in card.items()}


def calling(how: How, cache: StepCache, name: str, place: str) -> How:
    """Returns how a network is called under a cache: it returns its first output, and what is kept."""
    is_state = isinstance(cache, DeepCache)

    def call(module: torch.nn.Module, **inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        mode, before = inputs.pop(MODE, "full"), inputs.pop(KEPT, ())
        blocks = [part for part in module.modules() if isinstance(part, stack.Stacked)]
        if not blocks:
            fact = f"A step cache reuses what stacked blocks compute, and '{name}' has none"
            raise StackError(place, fact, "Leave `cache` out, or name its blocks in the card's `stacks`", name=name)
        kept: list[tuple[torch.Tensor, ...]] = []
        for number, one in enumerate(blocks):
            one.around = functools.partial(_around, kept, before[number] if mode == "reuse" else None, is_state)
        try:
            output = how(module, **inputs)
        finally:
            for one in blocks:
                one.around = stack.through
        return of_call(output, (), name), tuple(kept)

    return call


def _around(
    kept: list[tuple[torch.Tensor, ...]],
    before: Sequence[torch.Tensor] | None,
    is_state: bool,
    carry: tuple[torch.Tensor, ...],
    run: stack.Run,
) -> tuple[torch.Tensor, ...]:
    """Returns what leaves stacked blocks, computed or from before, and notes what is kept of it."""
    if before is not None:
        kept.append(tuple(before))
        return tuple(before) if is_state else tuple(one + added for one, added in zip(carry, before, strict=True))
    outputs = run(carry)
    kept.append(outputs if is_state else tuple(out - one for out, one in zip(outputs, carry, strict=True)))
    return outputs


@dataclasses.dataclass
class _Slot:
    """What one call of a step has kept for the same call of later steps."""

    shapes: dict[str, tuple[int, ...]]
    #: What was kept in the last whole step, and its differences to those before, one for each order.
    differences: list[Any] = dataclasses.field(default_factory=list)
    step: int = -1


class StepCached:
    """A network's two programs and the loop's steps: the `Call` of a stage under a cache.

    Args:
        steps: The loop's; what a saved step kept is among its state.
    """

    batches = True
    drops = True

    def __init__(self, compiled: Compiled, cache: StepCache, steps: family.Steps, total: int) -> None:
        self.compiled = compiled
        self.cache = cache
        self.total = total
        self.full = frozenset(cache.computed(total))
        self.step, self.calls = (0, 0) if steps.resume is None else (steps.resume[0], 0)
        self.slots: list[_Slot] = []
        #: By step, the norm of what was kept over that of the step before, the mean of its calls (`calibrate`). A stage
        #: that goes on from another one's steps goes on with its curve, too.
        self.curve: list[float] = []
        self._ratios: list[float] = []  # of the calls of the step in progress
        self.saved: dict[str, torch.Tensor] = {}
        resume = steps.resume
        if resume is not None:
            self.saved = {key.removeprefix(STATE): t for key, t in resume[1].items() if key.startswith(STATE)}
            self.curve = self.saved.pop(CURVE, torch.zeros(0)).tolist()
            resume = resume[0], {key: t for key, t in resume[1].items() if not key.startswith(STATE)}
        if isinstance(cache, Calibrate) and len(self.curve) != self.step:
            fact = f"{self.step} steps were taken before, and the curve of {len(self.curve)} of them is known"
            raise BadValueError("cache", fact, "Take all steps with 'cache: {kind: calibrate}': run every stage again")
        self.finished = steps.finished
        self.steps = dataclasses.replace(steps, finished=self._finished, resume=resume)

    @property
    def seconds(self) -> float:
        return self.compiled.seconds

    def place(self, **inputs: Any) -> dict[str, Any]:
        return self.compiled.place(**inputs)

    def __call__(self, **inputs: Any) -> Any:
        shapes = {path: tuple(leaf.shape) for path, leaf in leaves(inputs).items() if isinstance(leaf, TENSORS)}
        if self.calls == len(self.slots):
            self.slots.append(self._slot(inputs, shapes))
        if self.slots[self.calls].shapes != shapes:  # guidance that ends: what was kept is of another batch
            self.slots[self.calls] = self._slot(inputs, shapes)
        slot = self.slots[self.calls]
        self.calls += 1
        if self.step in self.full or not slot.differences:
            return self._computed(slot, inputs)
        if self.cache.differences:
            reused = _SERIES(slot.differences, float(self.step - slot.step))
            return self.compiled(**inputs, **{MODE: "reuse", KEPT: reused})[0]
        output, slot.differences[0] = self.compiled(**inputs, **{MODE: "reuse", KEPT: slot.differences[0]})
        return output

    def _computed(self, slot: _Slot, inputs: Mapping[str, Any]) -> Any:
        before = slot.differences
        if not self.cache.differences and not isinstance(self.cache, Calibrate):
            slot.differences = before = []  # its memory is free for what comes
        output, kept = self.compiled(**inputs, **{MODE: "full"})
        if isinstance(self.cache, Calibrate):
            self._ratios.append(float(_ratio(kept[0][0], before[0][0][0])) if before else 1.0)
        before = before[: self.cache.differences]
        slot.differences = [kept, *(_DIVIDED(kept, before, float(self.step - slot.step)) if before else [])]
        slot.step = self.step
        return output

    def _slot(self, inputs: Mapping[str, Any], shapes: dict[str, tuple[int, ...]]) -> _Slot:
        """Returns the slot of a call that is made for the first time, with what a stopped run kept for these shapes.

        Both programs are compiled here: none in the steps that follow.
        """
        kept = self.compiled.prepare(**inputs, **{MODE: "full"})[1]
        if len(self.full) < self.total:
            self.compiled.prepare(**inputs, **{MODE: "reuse", KEPT: kept})
        places = {path: leaf.sharding for path, leaf in leaves({KEPT: kept}).items()}
        sizes = {path: leaf.shape for path, leaf in leaves({KEPT: kept}).items()}
        tree = jax.tree_util.tree_structure(kept)
        prefix = f"{self.calls}."
        mine = {key.removeprefix(prefix): t for key, t in self.saved.items() if key.startswith(prefix)}
        differences = []
        for order in range(self.cache.differences + 1):
            names = [f"{order}.{path}" for path in places]
            if all(name in mine and mine[name].shape == sizes[path] for name, path in zip(names, places, strict=True)):
                arrays = [shard.to_jax(mine[name], where) for name, where in zip(names, places.values(), strict=True)]
                differences.append(jax.tree_util.tree_unflatten(tree, arrays))
        self.saved = {key: tensor for key, tensor in self.saved.items() if not key.startswith(prefix)}
        last = max((step for step in self.full if step < self.step), default=-1)
        return _Slot(shapes, differences, last)

    def _finished(
        self, number: int, state: Mapping[str, torch.Tensor], timestep: Any = None, kept: family.Kept | None = None
    ) -> None:
        self.step, self.calls = number, 0
        if self._ratios:
            self.curve.append(sum(self._ratios) / len(self._ratios))
            self._ratios = []
        is_needed = number not in self.full or self.cache.differences > 0 or isinstance(self.cache, Calibrate)
        self.finished(number, state, timestep, self._kept if is_needed else kept)

    def _kept(self) -> dict[str, torch.Tensor]:
        tensors = {
            f"{STATE}{number}.{order}.{path}": shard.to_torch(array)
            for number, slot in enumerate(self.slots)
            for order, difference in enumerate(slot.differences)
            for path, array in leaves({KEPT: difference}).items()
        }
        return {**tensors, **self.measured()}

    def measured(self) -> dict[str, torch.Tensor]:
        """Returns the curve by its name in a saved step; nothing where there is none."""
        return {STATE + CURVE: torch.tensor(self.curve)} if self.curve else {}


def _divided(kept: Any, before: list[Any], interval: jax.Array) -> list[Any]:
    rows = [kept]
    for old in before:
        rows.append(jax.tree.map(lambda new, one: ((new - one) / interval).astype(one.dtype), rows[-1], old))
    return rows[1:]


def _series(differences: list[Any], distance: Any) -> Any:
    factors = [distance**order / math.factorial(order) for order in range(len(differences))]

    def total(*terms: Any) -> Any:
        wide = sum(factor * term.astype(jnp.float32) for factor, term in zip(factors, terms, strict=True))
        return jnp.asarray(wide).astype(terms[0].dtype)

    return jax.tree.map(total, *differences)


def _ratio(kept: jax.Array, before: jax.Array) -> jax.Array:
    """Returns the mean over tokens of the norm of what is kept over that of what was."""
    new, old = (jnp.linalg.norm(one.astype(jnp.float32), axis=-1) for one in (kept, before))
    return (new / jnp.maximum(old, 1e-12)).mean()


_DIVIDED, _SERIES = jax.jit(_divided, donate_argnums=1), jax.jit(_series)
