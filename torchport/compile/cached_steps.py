"""Step caches: two programs of a network, one that computes all blocks and one that reuses an earlier step's.

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
from torchport.stages.outputs import TENSORS, leaves, stage_outputs

MODE, KEPT = "step_cache", "step_cache_kept"
"""Inputs of a network beside its own: `full` or `reuse`, and what an earlier step kept."""
STATE = "step_cache."
"""The prefix of this module's tensors among those of a saved step."""
CURVE = "curve"


def stacks(cache: StepCache, card: Mapping[str, Stack]) -> dict[str, Stack]:
    """Returns a card's stacks, by path, without the last blocks that each step computes: these stay unstacked."""
    lasts = {name: max(card_stack.last, cache.last_blocks) for name, card_stack in card.items()}
    return {name: card_stack.model_copy(update={"last": lasts[name]}) for name, card_stack in card.items()}


def with_cache(how: How, cache: StepCache, name: str, place: str) -> How:
    """Returns a `how` that uses a step cache: it returns a network's output and the tensors to keep for later steps."""
    is_state = isinstance(cache, DeepCache)  # keeps the blocks' outputs, not what the blocks add to their inputs

    def call(module: torch.nn.Module, **inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        """Calls the network. Its input `MODE` is `full` or `reuse`; `KEPT` has the values to reuse."""
        mode = inputs.pop(MODE, "full")
        old = inputs.pop(KEPT, ())
        blocks = [part for part in module.modules() if isinstance(part, stack.Stacked)]
        if not blocks:
            fact = f"A step cache reuses what stacked blocks compute, and '{name}' has none"
            raise StackError(place, fact, "Leave `cache` out, or name its blocks in the card's `stacks`", name=name)
        kept: list[tuple[torch.Tensor, ...]] = []
        for number, block in enumerate(blocks):
            block.around = functools.partial(_run_or_reuse, kept, old[number] if mode == "reuse" else None, is_state)
        try:
            output = how(module, **inputs)
        finally:
            for block in blocks:
                block.around = None
        return stage_outputs(output, (), name), tuple(kept)

    return call


def _run_or_reuse(
    kept: list[tuple[torch.Tensor, ...]],
    before: Sequence[torch.Tensor] | None,
    is_state: bool,
    carry: tuple[torch.Tensor, ...],
    run: stack.Run,
) -> tuple[torch.Tensor, ...]:
    """Returns stacked blocks' outputs, and appends to `kept` the tensors that later steps reuse: the outputs if
    `is_state`, else the outputs less the carry. With `before`, which an earlier step kept, no block is computed.
    """
    if before is not None:
        kept.append(tuple(before))
        return tuple(before) if is_state else tuple(x + added for x, added in zip(carry, before, strict=True))
    outputs = run(carry)
    kept.append(outputs if is_state else tuple(out - x for out, x in zip(outputs, carry, strict=True)))
    return outputs


@dataclasses.dataclass
class _Slot:
    """The tensors that a call of the network has kept for later steps; guidance has several calls in a step."""

    shapes: dict[str, tuple[int, ...]]  #: Of the inputs, by path.
    #: The tensors kept by the last step in full, then their finite differences to the steps before, one for each order.
    differences: list[Any] = dataclasses.field(default_factory=list)
    step: int = -1  #: The last step in full.


class StepCached:
    """Calls a network under a step cache: some steps compute it in full, the others reuse blocks of an earlier step.
    The denoising loop gets `self.steps` in place of its own, so that the saved state of a step has the kept tensors.
    """

    batches = True
    drops = True

    def __init__(self, compiled: Compiled, cache: StepCache, steps: family.Steps, total: int) -> None:
        """Starts at the first step, or at the step of a stopped run, with the tensors that it saved."""
        self.compiled = compiled
        self.cache = cache
        self.total = total
        self.full = frozenset(cache.computed(total))
        self.step, state = steps.resume or (0, {})
        self.calls = 0  #: Of the network, in this step.
        self.slots: list[_Slot] = []
        self._ratios: list[float] = []  # of the calls of the step in progress
        # Kept tensors of a stopped run, until their slots take them.
        self.saved = {key.removeprefix(STATE): t for key, t in state.items() if key.startswith(STATE)}
        #: By step, the norm of the kept tensors over their norm in the step before, the mean over tokens and calls
        #: (`calibrate`). A stage that goes on from another stage's steps goes on with its curve, too.
        self.curve: list[float] = self.saved.pop(CURVE, torch.zeros(0)).tolist()
        others = {key: t for key, t in state.items() if not key.startswith(STATE)}
        if isinstance(cache, Calibrate) and len(self.curve) != self.step:
            fact = f"{self.step} steps were taken before, and the curve of {len(self.curve)} of them is known"
            raise BadValueError("cache", fact, "Take all steps with 'cache: {kind: calibrate}': run every stage again")
        self.finished = steps.finished
        resume = None if steps.resume is None else (self.step, others)
        self.steps = dataclasses.replace(steps, finished=self._finished, resume=resume)

    def place(self, **inputs: Any) -> dict[str, Any]:
        return self.compiled.place(**inputs)

    def __call__(self, **inputs: Any) -> Any:
        shapes = {path: tuple(leaf.shape) for path, leaf in leaves(inputs).items() if isinstance(leaf, TENSORS)}
        if self.calls == len(self.slots):
            self.slots.append(self._slot(inputs, shapes))
        if self.slots[self.calls].shapes != shapes:  # guidance has ended: what was kept is for another batch size
            self.slots[self.calls] = self._slot(inputs, shapes)
        slot = self.slots[self.calls]
        self.calls += 1
        if self.step in self.full or not slot.differences:
            return self._computed(slot, inputs)
        if self.cache.differences:
            reused = _extrapolated(slot.differences, float(self.step - slot.step))
            return self.compiled(**inputs, **{MODE: "reuse", KEPT: reused})[0]
        # The program may write over the kept tensors that it takes, and returns them for the next call.
        output, slot.differences[0] = self.compiled(**inputs, **{MODE: "reuse", KEPT: slot.differences[0]})
        return output

    def _computed(self, slot: _Slot, inputs: Mapping[str, Any]) -> Any:
        """Returns the output of the program that computes all blocks, and keeps in the slot the tensors to reuse."""
        before = slot.differences
        if not self.cache.differences and not isinstance(self.cache, Calibrate):
            slot.differences = before = []  # frees its memory before the call
        output, kept = self.compiled(**inputs, **{MODE: "full"})
        if isinstance(self.cache, Calibrate):
            ratio = 1.0
            if before:
                # The first tensor that the first stack keeps, in this step and in the step before.
                arrays = kept[0][0], before[0][0][0]
                new, old = (jnp.linalg.norm(array.astype(jnp.float32), axis=-1) for array in arrays)
                ratio = float((new / jnp.maximum(old, 1e-12)).mean())
            self._ratios.append(ratio)
        before = before[: self.cache.differences]
        slot.differences = [kept, *(_differences(kept, before, float(self.step - slot.step)) if before else [])]
        slot.step = self.step
        return output

    def _slot(self, inputs: Mapping[str, Any], shapes: dict[str, tuple[int, ...]]) -> _Slot:
        """Compiles both programs of the call in progress; returns a slot with a stopped run's tensors if they fit."""
        kept = self.compiled.prepare(**inputs, **{MODE: "full"})[1]
        if len(self.full) < self.total:
            self.compiled.prepare(**inputs, **{MODE: "reuse", KEPT: kept})
        outlines = leaves({KEPT: kept})  # shapes with shardings, by path
        tree = jax.tree_util.tree_structure(kept)
        prefix = f"{self.calls}."
        saved = {key.removeprefix(prefix): t for key, t in self.saved.items() if key.startswith(prefix)}
        differences = []
        for order in range(self.cache.differences + 1):
            names = [f"{order}.{path}" for path in outlines]
            saved_shapes = [saved[name].shape if name in saved else None for name in names]
            if saved_shapes == [outline.shape for outline in outlines.values()]:
                pairs = zip(names, outlines.values(), strict=True)
                arrays = [shard.to_jax(saved[name], outline.sharding) for name, outline in pairs]
                differences.append(jax.tree_util.tree_unflatten(tree, arrays))
        self.saved = {key: tensor for key, tensor in self.saved.items() if not key.startswith(prefix)}
        last = max((step for step in self.full if step < self.step), default=-1)
        return _Slot(shapes, differences, last)

    def _finished(
        self, number: int, state: Mapping[str, torch.Tensor], timestep: Any = None, kept: family.Kept | None = None
    ) -> None:
        """Ends a step: passes its state to the run's `finished`, with the kept tensors if a resumed run needs them."""
        self.step, self.calls = number, 0
        if self._ratios:
            self.curve.append(sum(self._ratios) / len(self._ratios))
            self._ratios = []
        is_needed = number not in self.full or self.cache.differences > 0 or isinstance(self.cache, Calibrate)
        self.finished(number, state, timestep, self._kept if is_needed else kept)

    def _kept(self) -> dict[str, torch.Tensor]:
        """Returns all that the slots keep, as host tensors by their names in a saved step."""
        tensors = {
            f"{STATE}{number}.{order}.{path}": shard.to_torch(array)
            for number, slot in enumerate(self.slots)
            for order, difference in enumerate(slot.differences)
            for path, array in leaves({KEPT: difference}).items()
        }
        return {**tensors, **self.measured()}

    def measured(self) -> dict[str, torch.Tensor]:
        """Returns the curve by its name in a saved step; an empty dict where nothing was measured."""
        return {STATE + CURVE: torch.tensor(self.curve)} if self.curve else {}


@functools.partial(jax.jit, donate_argnames="before")
def _differences(kept: Any, before: list[Any], interval: jax.Array) -> list[Any]:
    """Returns finite differences of `kept` from order 1 on; `before` has the rows of `interval` steps ago."""
    rows = [kept]
    for old in before:
        rows.append(jax.tree.map(lambda new, past: ((new - past) / interval).astype(past.dtype), rows[-1], old))
    return rows[1:]


@jax.jit  # type: ignore[untyped-decorator]
def _extrapolated(differences: list[Any], distance: Any) -> Any:
    """Returns kept values extrapolated over a distance in steps: a Taylor series with finite differences."""
    factors = [distance**order / math.factorial(order) for order in range(len(differences))]

    def total(*terms: Any) -> Any:
        wide = sum(factor * term.astype(jnp.float32) for factor, term in zip(factors, terms, strict=True))
        return jnp.asarray(wide).astype(terms[0].dtype)

    return jax.tree.map(total, *differences)
