"""Every patch alone: what takes its target's place, beside the target, on the inputs of a real call and on others.

The original's networks are called once, on random inputs. The inputs of every function that a patch changes are noted.
Then each patch is put in force alone, and its function is called with the engine's tensors, as a run calls it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from torchport import engine, patch, shard
from torchport.attention import dispatch
from torchport.compile import network
from torchport.errors import TorchportError
from torchport.foreign import brief, refusals
from torchport.stages.constants import Constants
from torchport.stages.family import Stage, Steps
from torchport.task import Request, Task, accept
from torchport.task.devices import devices
from torchport.verify import inputs
from torchport.verify.causes import promise
from torchport.verify.facts import FAULT
from torchport.verify.inputs import Noted, made_of, noting
from torchport.verify.original import Original
from torchport.verify.port import Port
from torchport.verify.recording import Enough, under, weights_of
from torchport.verify.yardstick import computing_in, distance, floor, matched, wide_dtype, wide_module, widened

SAME, ROUNDING, BROKEN, UNCLEAR = "same", "rounding", "broken", "unclear"
"""Verdicts: the same bits; no more than rounding; more than rounding; not measured."""


@dataclasses.dataclass(frozen=True)
class Alone:
    """What a patch does alone.

    Attributes:
        patch: The entry's id.
        place: Where it is declared, `file:line`.
        promise: What it promises, in words.
        verdict: same, rounding, broken or unclear.
        why: The worst case and its figures; or why nothing was measured.
        cases: The inputs that were tried.
        refused: The inputs that the original takes and the replacement refuses.
    """

    patch: str
    place: str
    promise: str
    verdict: str
    why: str
    cases: int = 0
    refused: tuple[str, ...] = ()


def alone(request: Request) -> list[Alone]:
    """Returns every patch of a model that changes numbers, tested alone; runs in a process of its own.

    Args:
        request: Of the port.
    """
    port, original = accept(request), accept(dataclasses.replace(request, backend="original"))
    rows: dict[str, Alone] = {}
    with under(original, original.family.STAGES):
        folder = weights_of(original)
    for stage in (stage for stage in port.family.STAGES if stage.network is not None):
        known = {key for key, row in rows.items() if row.verdict != UNCLEAR}
        entries = [entry for entry in port.patches([stage]) if entry.id not in known]
        with under(original, [stage]):
            calls, whole = _noted(original, stage, folder, entries)
            base = [entry for entry in port.patches([stage]) if entry.plumbing]  # without them the engine cannot start
            for entry in entries:
                rows[entry.id] = _tested(entry, calls.get(entry.id, []), port, [*base, *_beside(entry, entries)])
        broken = [entry.id for entry in entries if rows[entry.id].verdict == BROKEN]
        if broken and whole is not None and _agrees_whole(port, stage, folder, whole):
            rows |= {key: _only_alone(rows[key]) for key in broken}
    return list(rows.values())


@dataclasses.dataclass(frozen=True)
class _Whole:
    """One call of the original's network: its inputs, what it returned, and what the yardstick did."""

    inputs: dict[str, Any]
    output: Any
    wide_output: Any


def _agrees_whole(port: Task, stage: Stage, folder: Path, whole: _Whole) -> bool:
    """Returns whether the network computes what the original's does, with all patches of its stage in force."""
    with under(port, [stage]) as ledger, engine.operators({op.target: op.function for op in ledger.ops()}):
        own, _ = Port(port, stage, folder, ledger).called(whole.inputs, [], {})
    rounding = max(distance(whole.output, whole.wide_output) or 0.0, floor(whole.output))
    added = distance(own, whole.wide_output)
    return added is not None and added <= FAULT * rounding


def _only_alone(row: Alone) -> Alone:
    """Returns what is said of a patch that differs alone, where the network with all patches does not."""
    why = f"alone it differs ({row.why}), and the network with all patches does not: another patch beside it is needed"
    return dataclasses.replace(row, verdict=UNCLEAR, why=why)


def _beside(entry: patch.Entry, entries: Sequence[patch.Entry]) -> list[patch.Entry]:
    """Returns the other patches of a patch's target: what several of them make of a function is one replacement."""
    same = [other for other in entries if other.target == entry.target and not other.plumbing]
    return [other for other in same if other.id != entry.id]


def _noted(
    task: Task, stage: Stage, folder: Path, entries: Sequence[patch.Entry]
) -> tuple[dict[str, list[Noted]], _Whole | None]:
    """Returns the calls of the patches' targets in one call of the original's network, and that call."""
    bare = dataclasses.replace(stage, prepare=None)
    parts = network.loaded(task, bare, folder)
    eager = network.eager(task, bare, parts, folder)
    if bare.like is None:
        return {}, None
    random = {name: _random(tensor) for name, tensor in bare.like(parts, task.settings).items()}
    once = _Once(eager)
    with noting([entry for entry in entries if not entry.plumbing]) as calls, contextlib.suppress(Enough):
        bare.run(parts, once, task.settings, Steps(), **random)
    original = Original(eager, task.settings.dtypes[str(stage.network)])
    output, _ = original.watched(once.inputs, [])
    return calls, _Whole(once.inputs, output, original.yardstick(once.inputs, [], {})[0])


def _random(tensor: torch.Tensor) -> torch.Tensor:
    """Returns random numbers, or a mask of which half is valid, like a stage's input."""
    generator = torch.Generator().manual_seed(tensor.numel())
    # What stands for a mask beforehand is all ones, or zeros of whole numbers: no prompt has no valid token.
    if tensor.ndim == 2 and (bool((tensor == 1).all()) or not tensor.is_floating_point()):
        mask = torch.ones_like(tensor)
        mask[:, tensor.shape[1] // 2 :] = 0
        return mask
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype) if tensor.is_floating_point() else tensor


class _Once:
    """An eager network that is called once."""

    batches = drops = False

    def __init__(self, eager: Any) -> None:
        self.eager = eager
        self.inputs: dict[str, Any] = {}

    def place(self, **values: Any) -> dict[str, Any]:
        """Returns the inputs as they are."""
        return values

    def __call__(self, **values: Any) -> Any:
        """Calls it, and leaves the loop."""
        self.inputs = values
        self.eager(**values)
        raise Enough


def _tested(entry: patch.Entry, calls: list[Noted], port: Task, base: list[patch.Entry]) -> Alone:
    """Returns what a patch does alone."""
    head = (entry.id, entry.place, promise(entry))
    reason = _unclear(entry, calls)
    if reason:
        return Alone(*head, UNCLEAR, reason)
    cases = [case for call in calls for case in (call, *made_of(call))]
    worst, refused, unknown, count = (-1.0, SAME, ""), [], "", 0
    # Nothing may hold upstream's function while its patch is put in force.
    every = [_original(inputs.function_of(entry), case) for case in cases]
    for case, expected in zip(cases, every, strict=True):
        if isinstance(expected, str):
            unknown = unknown or f"upstream refuses {case.what}: {expected}"
            continue
        with patch.applied([*base, entry]) as ledger, engine.operators({op.target: op.function for op in ledger.ops()}):
            own, why = _ported(entry, case, port)
        if why:
            refused.append(f"{case.what}: {why}")
            continue
        count += 1
        worst = max(worst, _judged(entry, case, own, *expected))
    if count == 0:
        return Alone(*head, UNCLEAR, f"it cannot be called alone ({refused[0] if refused else unknown})")
    return Alone(*head, worst[1], worst[2], count, tuple(refused))


def _unclear(entry: patch.Entry, calls: list[Noted]) -> str:
    """Returns why a patch cannot be tested alone; empty where it can."""
    if entry.plumbing:
        return "no tensor passes through it"
    if not calls:
        return "its target was not called"
    return "" if any(call.has_tensor for call in calls) else "its target gets no tensor"


def _original(function: Any, case: Noted) -> tuple[Any, Any] | str:
    """Returns what upstream's function returns, and what it returns in the yardstick's dtype; why, if it refuses."""
    floats = [leaf.dtype for leaf in pytree.tree_leaves((case.args, case.kwargs)) if _is_float(leaf)]
    dtype = wide_dtype(max(floats, key=lambda one: one.itemsize, default=torch.float32))
    module = _of_dtype(case)
    own, wide = case.copied(), case.copied()
    first, second = ([] if module is None else [module]), ([] if module is None else [wide_module(module, dtype)])
    args, kwargs = widened((wide.args, wide.kwargs), dtype)
    args, kwargs = pytree.tree_map_only(torch.nn.Module, lambda one: wide_module(one, dtype), (args, kwargs))
    try:
        # PyTorch's compiler asks for a device's driver, and the engine's device has none.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            output = function(*first, *own.args, **own.kwargs)
            with computing_in(dtype):
                return output, function(*second, *args, **kwargs)
    except refusals() as error:
        return brief(error)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _of_dtype(case: Noted) -> torch.nn.Module | None:
    """Returns a call's module in the dtype that its inputs were changed to."""
    names = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if case.module is None or case.what not in names:
        return case.module
    return copy.deepcopy(case.module).to(names[case.what])


class _Bound(torch.nn.Module):
    """A function with its module, as one module that `functional_call` can give weights."""

    def __init__(self, function: Any, module: torch.nn.Module | None, structure: Any, others: list[Any]) -> None:
        super().__init__()
        self.function, self.module, self.structure, self.others = function, module, structure, others
        self.arguments = torch.nn.ModuleList(other for other in others if isinstance(other, torch.nn.Module))

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Calls the function."""
        values = iter(tensors)
        leaves = [next(values) if other is _TENSOR else other for other in self.others]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return _plain(self.function(*([] if self.module is None else [self.module]), *args, **kwargs))


def _plain(tree: Any) -> Any:
    """Returns a tree of dictionaries, lists and tuples alone: JAX does not know what upstream's classes hold."""
    if isinstance(tree, Mapping):
        return {key: _plain(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(map(_plain, tree)) if isinstance(tree, tuple) else list(map(_plain, tree))
    return tree


_TENSOR = object()


def _ported(entry: patch.Entry, case: Noted, port: Task) -> tuple[Any, str]:
    """Returns what a patch's function returns of the engine's tensors, on the host; and why it refuses, or nothing."""
    function = inputs.function_of(entry)
    leaves, structure = pytree.tree_flatten((case.copied().args, case.copied().kwargs))
    others = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    bound = _Bound(function, _of_dtype(case), structure, others)
    mesh = shard.make_mesh(dict.fromkeys(port.job.mesh, 1), devices(port.machine)[:1])
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    weights = {name: shard.to_jax(x.detach(), where) for name, x in (*bound.named_parameters(), *bound.named_buffers())}
    arrays = [shard.to_jax(leaf.detach(), where) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def run(parameters: Any, *tensors: Any) -> Any:
        with torch.no_grad(), Constants(engine.is_traced, engine.constant):
            return torch.func.functional_call(bound, parameters, tensors)

    try:
        with _as_in_a_run(mesh):
            output = engine.call_torch(run, weights, *arrays)
    except TorchportError as error:
        return None, error.fact
    except BaseException as error:
        if engine.missing_operator(error) is None and not isinstance(error, refusals()):
            raise
        return None, brief(error)
    return jax.tree.map(lambda leaf: shard.to_torch(leaf) if isinstance(leaf, jax.Array) else leaf, output), ""


@contextlib.contextmanager
def _as_in_a_run(mesh: jax.sharding.Mesh) -> Iterator[None]:
    engine.begin_trace()
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"), dispatch.context(dispatch.NONE):
        yield


def _judged(entry: patch.Entry, case: Noted, own: Any, original: Any, wide: Any) -> tuple[float, str, str]:
    """Returns the ratio of one case, its verdict and its figures."""
    pairs = matched(own, original)
    if not pairs:
        return 0.0, UNCLEAR, f"{case.what}: it returns tensors of other shapes than upstream"
    if all(torch.equal(one, other.to(one.dtype)) for one, other in pairs):
        return 0.0, SAME, f"{case.what}: the same bits"
    rounding = max(distance(original, wide) or 0.0, floor(original))
    added = distance(own, wide) or 0.0
    ratio = added / rounding
    words = f"{case.what}: {added:.2g} from the yardstick, upstream {rounding:.2g}"
    promised = entry.equivalence
    if promised.lossy is not None:
        return ratio, ROUNDING, f"{words}; declared lossy"
    bound = promised.close.bound if promised.close is not None else FAULT * rounding
    if promised.algebraic is not None and bound < added <= _of_any_order(case):
        return ratio, ROUNDING, f"{words}; {_of_any_order(case):.2g} in the worst order of summation"
    return ratio, ROUNDING if added <= bound else BROKEN, words


def _of_any_order(case: Noted) -> float:
    """Returns what orders of summation may differ by: half a rounding of float32 for each term of the longest sum.

    Upstream's own order may be a good one, so its rounding does not bound that of another. Source: N. Higham, Accuracy
    and Stability of Numerical Algorithms, section 4.2. The longest sum is taken to be over the longest dim, or over all
    positions of a tensor `[batch, channels, frames, height, width]`.
    """
    shapes = [leaf.shape for leaf in pytree.tree_leaves((case.args, case.kwargs)) if _is_float(leaf)]
    lengths = [size for shape in shapes for size in shape]
    lengths += [math.prod(shape[2:]) for shape in shapes if len(shape) == 5]
    return max(lengths, default=1) * torch.finfo(torch.float32).eps / 2


def lines(rows: Sequence[Alone]) -> list[str]:
    """Returns the patches as text, the broken ones first."""
    order = [BROKEN, UNCLEAR, ROUNDING, SAME]
    counts = ", ".join(f"{sum(row.verdict == verdict for row in rows)} {verdict}" for verdict in reversed(order))
    text = [f"{len(rows)} patches alone: {counts}"]
    for row in sorted(rows, key=lambda row: order.index(row.verdict)):
        refused = f"; refuses {len(row.refused)}: {row.refused[0]}" if row.refused else ""
        cases = f" ({row.cases} inputs)" if row.cases else ""
        text.append(f"{row.verdict:8} {row.patch} ({row.place}){cases}: {row.why}{refused}")
    return text
