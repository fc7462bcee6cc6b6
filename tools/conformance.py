"""Compares each operator of the engine with eager PyTorch, and makes the table that the engine reads.

python tools/conformance.py --operators pool      # compares the operators whose names match, and prints what differs
python tools/conformance.py --write               # compares all, and writes torchport/engine/conformance.yaml
python tools/conformance.py --write --resume kept # the same; after an interruption it goes on from that folder
python tools/conformance.py --check               # compares all, and fails when the table says something else
python tools/conformance.py --summary             # counts of the table, by state and dtype; compares nothing

A sample is run with tensors of the engine, and each call that reaches the engine's dispatcher is kept. PyTorch computes
the result of the call, so that a wrong operator spoils no other. Then `jax.jit` of the engine's lowering is compared
with PyTorch, call by call. A verdict is therefore about one operator and one form of it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import multiprocessing
import os
import pickle
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import ml_dtypes
import numpy
import operator_samples
import torch
import yaml
from operator_samples import MADE, SEED, Sample, samples, sources
from operator_table import RANDOM, Evidence, differing, drift, in_short, table, versions, written
from torch.utils import _pytree as pytree

from torchport import engine, patch
from torchport.config.pack import find_pack
from torchport.engine import conformance, tracked
from torchport.engine.conformance import Form, form_of, operator_name
from torchport.errors import TorchportError

SHAPES = 6
"""How many calls of one form are compared: they differ in shapes, numbers and values."""
RAISED = (
    engine.DiffersError,
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, RuntimeError,
    SystemError, TypeError, ValueError, TorchportError, engine.DiffersError,
)  # fmt: skip
"""What lowerings and samples raise."""
TIED = re.compile(r"torch\.argsort|aten\.(topk|sort|median|nanmedian|mode|kthvalue)")
"""Operators that return values and their places, or places alone."""
SHARES = 16
"""Into how many tasks the sources of samples are divided."""
BATCH = 32
"""How many calls are compiled as one program."""
RELATIVE = dict.fromkeys(("float64", "complex128", "float32", "complex64"), 1e-4) | {
    "bfloat16": 2**-8,
    "float16": 2**-11,
}
"""How far a value may be from PyTorch's, relative to the largest one. Below float32: one unit in the last place."""
UNSET = re.compile(r"empty|resize|new_empty")
"""Operators whose values nobody promises."""
FIRST = re.compile("_(layer|group|batch)_norm|_fused_rms_norm|_scaled_dot_product|_embedding_bag")
"""Operators whose results but the first are for the backward pass alone."""
FACTORS = re.compile(r"linalg_svd|linalg_eigh|linalg\.svd|torch\.svd")
"""Operators that return vectors, whose signs PyTorch does not promise, with the values that belong to them."""


@dataclass(frozen=True)
class Call:
    """A call of one operator, with tensors of PyTorch.

    Attributes:
        func: The torch function or ATen overload.
        args: Its arguments.
        kwargs: Those by name.
        source: The sample from which it comes.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: str = ""

    @property
    def form(self) -> Form:
        """The form of the call."""
        return form_of(self.func, self.args, self.kwargs)

    def key(self) -> tuple[Form, str]:
        """Returns what makes two calls the same: form, shapes, and arguments that are no tensors."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        shown = [f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
        return self.form, " ".join(shown)

    def on_host(self, change: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> tuple[Any, Any]:
        """Returns the arguments for PyTorch on the CPU, with each tensor changed."""
        args, kwargs = pytree.tree_map(_host_place, (self.args, self.kwargs))
        return pytree.tree_map_only(torch.Tensor, change, (args, kwargs))  # type: ignore[no-any-return]


def _host_place(value: Any) -> Any:
    """Returns the CPU in place of the engine's device."""
    if isinstance(value, torch.device) or value == "jax":
        return torch.device("cpu")
    return value


# ---------------------------------------------------------------------------------------------- the engine


@contextlib.contextmanager
def engine_in_force() -> Iterator[dict[Any, patch.Op]]:
    """Prepares the engine as a trace does, with the patches that it needs to be imported.

    Yields:
        The `op` patches: the id and the lowering, by the function that they lower.
    """
    folders = find_pack().folders
    lowerings = [entry for entry in patch.read(folders, ["torch"]) if entry.kind == "op"]
    with patch.applied([*patch.read(folders, ["torchax"]), *lowerings]) as ledger:
        engine.begin_trace()
        yield {engine._operator(op.target): op for op in ledger.ops()}


def engine_arrays(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Returns tensors of the host as the arrays that a program of the engine gets."""
    import jax.numpy as jnp

    with engine.wide():
        return [jnp.asarray(_as_numpy(tensor)) for tensor in tensors]


def _as_numpy(tensor: torch.Tensor) -> numpy.ndarray:
    """Returns a copy of a tensor's values."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        return tensor.float().numpy().astype(ml_dtypes.bfloat16)
    return tensor.numpy().copy()


# ---------------------------------------------------------------------------------------------- which calls


class Recorder:
    """Stands in the place of the engine's dispatcher: keeps each call, and has PyTorch compute its result."""

    def __init__(self, source: str) -> None:
        """Keeps no call yet."""
        self.source, self.calls = source, list[Call]()
        self.hosts: dict[int, tuple[Any, torch.Tensor]] = {}

    def arrays(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns arrays for the engine, of which the recorder knows the tensors."""
        arrays = engine_arrays(tensors)
        self.hosts |= {id(array): (array, tensor) for array, tensor in zip(arrays, tensors, strict=True)}
        return arrays

    def compute(self, engines: Any, func: Any, types: Any, args: Any, kwargs: Any, traced: Any) -> Any:
        """Computes a call in PyTorch, in the place of the engine's lowering."""
        leaves, shape = pytree.tree_flatten((args, kwargs))
        hosts = [self._host(leaf) for leaf in leaves]
        kept = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in hosts]
        call = Call(func, *pytree.tree_unflatten(kept, shape), self.source)
        self.calls.append(call)
        args, kwargs = pytree.tree_unflatten([_host_place(leaf) for leaf in hosts], shape)
        with _without_modes():
            result = func(*args, **kwargs)
        pairs = [(leaf, host) for leaf, host in zip(leaves, hosts, strict=True) if engine.is_traced(leaf)]
        for leaf, host in pairs:
            leaf._elem = self.arrays([host])[0]  # the call may have written to it
        known = {id(host): leaf for leaf, host in pairs}
        return pytree.tree_map_only(
            torch.Tensor, lambda x: known[id(x)] if id(x) in known else self._tensor(engines, x), result
        )

    def _host(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not engine.is_traced(leaf):
            return leaf
        array = leaf.jax()
        if id(array) in self.hosts:
            return self.hosts[id(array)][1]
        from torchax.ops import mappings

        return mappings.j2t(array, use_dlpack=False)

    def _tensor(self, engines: Any, host: torch.Tensor) -> Any:
        return engines.tensor(self.arrays([host])[0], host.to("meta"))


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    from torch.utils import _mode_utils

    with _mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        yield


def calls_of(sample: Sample) -> list[Call]:
    """Returns the calls of operators that a sample makes in the engine, in order; those until it fails, if it does."""
    recorder = Recorder(sample.source)
    leaves, shape = pytree.tree_flatten((sample.args, sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def body(*tensors: Any) -> list[Any]:
        mine = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            mine[place] = tensor
        args, kwargs = pytree.tree_unflatten(mine, shape)
        sample.function(*args, **kwargs)
        return []

    compute = lambda engines, *args: recorder.compute(engines, *args)  # noqa: E731  a method
    with mock.patch.object(tracked.Dispatch, "_on_devices", compute), contextlib.suppress(*RAISED), torch.no_grad():
        engine.call_torch(body, *recorder.arrays([leaves[place] for place in places]))
    return recorder.calls


# ---------------------------------------------------------------------------------------------- a verdict


class Outcome(NamedTuple):
    """What a call gave: tensors and other values in order, and its tensor arguments afterwards."""

    tensors: list[tuple[str, numpy.ndarray]]
    others: list[Any]
    arguments: list[numpy.ndarray]


def verdict(call: Call) -> str | None:
    """Returns how the engine's result of a call differs from PyTorch's; empty if it does not.

    None where PyTorch itself refuses the call, and `RANDOM` where it gives another result the next time.
    """
    return verdicts([call])[0]


def verdicts(calls: Sequence[Call]) -> list[str | None]:
    """Returns the verdicts of several calls, which are compiled as one program: most of the time goes there."""
    found: list[Any] = [_reference(call) for call in calls]
    traces = {n: traced(calls[n]) for n, want in enumerate(found) if isinstance(want, Outcome)}
    outcomes = computed({n: trace for n, trace in traces.items() if isinstance(trace, Trace)})
    for n, got in (traces | outcomes).items():
        found[n] = got if isinstance(got, str) else _difference(calls[n], found[n], got)
    return found


def _reference(call: Call) -> Outcome | str | None:
    """Returns what PyTorch gives; `RANDOM` if it gives that only once, and None if it refuses the call."""
    try:
        want = in_pytorch(call)
        again = in_pytorch(call, seed=SEED + 1)
    except RAISED:
        return None
    if torch.Tag.nondeterministic_seeded in getattr(call.func, "tags", ()) and not _tensors(call.args, call.kwargs):
        return RANDOM  # also of no numbers at all, which are the same each time
    pairs = zip(want.tensors, again.tensors, strict=True)
    return RANDOM if not _unset(call) and any(_compared(a, b, "exact") for (_, a), (_, b) in pairs) else want


def _unset(call: Call) -> bool:
    return UNSET.search(operator_name(call.func)) is not None


def _raised(error: BaseException) -> str:
    """Returns an exception in words that do not depend on shapes or on places in memory."""
    line = re.sub(r"0x[0-9a-f]+|\d+", "N", str(error).strip().partition("\n")[0])
    named = "" if type(error).__module__.startswith("jax") or "Traced<" in line else f": {line[:70]}"
    return f"raises {type(error).__name__}{named}"


WHOLE = {
    torch.ops.aten.histc.default: lambda x, *rest, **options: torch.histc(x.double(), *rest, **options).to(x.dtype)
}
"""Operators that CUDA has for whole numbers, too, and the host for floats alone: how the host computes them."""


def in_pytorch(call: Call, change: Callable[[torch.Tensor], torch.Tensor] = torch.clone, seed: int = SEED) -> Outcome:
    """Computes a call in eager PyTorch on the CPU."""
    args, kwargs = call.on_host(change)
    torch.manual_seed(seed)
    with torch.no_grad():
        is_whole = bool(args) and isinstance(args[0], torch.Tensor) and not args[0].is_floating_point()
        function = WHOLE.get(call.func, call.func) if is_whole else call.func
        result = _results(call, args, function(*args, **kwargs))
    tensors = [(str(x.dtype)[6:], _as_numpy(x)) for x in result if isinstance(x, torch.Tensor)]
    others = [x for x in result if not isinstance(x, torch.Tensor)]
    return Outcome(tensors, others, [_as_numpy(x) for x in _tensors(args, kwargs)])


def _results(call: Call, args: Sequence[Any], result: Any) -> list[Any]:
    """Returns the results that are compared: beside places of a sort also the values there, and each place once."""
    leaves = pytree.tree_leaves(result)
    if call.func is torch.argsort and leaves[0].ndim:
        dim = args[1] if len(args) > 1 else call.kwargs.get("dim", -1)
        return [args[0].take_along_dim(leaves[0], dim), leaves[0].sort(dim).values, leaves[0]]
    if FACTORS.search(operator_name(call.func)):
        return _products(call, *leaves)
    return leaves[:1] if FIRST.search(operator_name(call.func)) else leaves


def _products(call: Call, *factors: torch.Tensor) -> list[torch.Tensor]:
    """Returns the values of a factorization, and products that do not depend on the signs of its vectors."""
    if "eigh" in operator_name(call.func):
        values, left = factors
        right = left.mH
    else:
        left, values, right = factors
        right = right.mH if call.func is torch.svd else right
    if not left.numel() or not right.numel():
        return [values]
    rank = values.shape[-1]
    whole = left[..., :rank] * values[..., None, :].to(left.dtype) @ right[..., :rank, :]
    return [values, whole, left.mH @ left, right @ right.mH]


def _tensors(*trees: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


class Trace(NamedTuple):
    """A call as a program of the engine."""

    program: Any
    arrays: list[Any]
    others: list[Any]
    count: int


def traced(call: Call) -> Trace | str:
    """Returns a call as the engine's program, or what it raises."""
    import jax
    import torchax
    from torchax.tensor import OperatorNotFound

    leaves, shape = pytree.tree_flatten((call.args, call.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    others: list[Any] = []

    def body(*tensors: Any) -> tuple[list[Any], list[Any]]:
        mine = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            mine[place] = tensor
        args, kwargs = pytree.tree_unflatten(mine, shape)
        with torch.no_grad():
            result = _results(call, args, call.func(*args, **kwargs))
        others.extend(x for x in result if not isinstance(x, torch.Tensor))
        return [x for x in result if isinstance(x, torch.Tensor)], list(tensors)

    arrays = engine_arrays([leaves[place] for place in places])
    program = jax.make_jaxpr(lambda *arrays: engine.call_torch(body, *arrays), return_shape=True)
    try:
        # A trace would leave its own key there.
        with engine.wide(), torchax.default_env().override_property(prng=jax.random.key(SEED)):
            jaxpr, (tensors, _) = program(*arrays)
    except OperatorNotFound:
        return "no lowering"
    except RAISED as error:
        return _raised(error)
    return Trace(jaxpr, arrays, others, len(tensors))


def computed(traces: Mapping[int, Trace]) -> dict[int, Outcome | str]:
    """Computes programs of the engine, all of them compiled as one; alone, where that raises."""
    import jax
    from jax.extend.core import jaxpr_as_fun

    def together(arrays: dict[int, Any]) -> dict[int, Any]:
        return {n: jaxpr_as_fun(trace.program)(*arrays[n]) for n, trace in traces.items()}

    try:
        results = jax.jit(together)({n: trace.arrays for n, trace in traces.items()})
    except RAISED as error:
        if len(traces) == 1:
            return dict.fromkeys(traces, _raised(error))
        return {n: found for place, trace in traces.items() for n, found in computed({place: trace}).items()}
    return {n: _outcome(traces[n], arrays) for n, arrays in results.items()}


def _outcome(trace: Trace, arrays: Sequence[Any]) -> Outcome:
    values = [numpy.asarray(array) for array in arrays]
    tensors = [(value.dtype.name, value) for value in values[: trace.count]]
    return Outcome(tensors, trace.others, values[trace.count :])


def _difference(call: Call, want: Outcome, got: Outcome) -> str:
    """Returns how two outcomes of a call differ."""
    unset = _unset(call)
    if len(want.tensors) != len(got.tensors):
        return f"returns {len(got.tensors)} tensors for {len(want.tensors)}"
    if repr(want.others) != repr(got.others) and not want.tensors:
        return "returns another value"
    exact = _in_float64(call) if any(name in RELATIVE for name, _ in want.tensors) else None
    dtypes = []
    for place, ((name, value), (other, mine)) in enumerate(zip(want.tensors, got.tensors, strict=True)):
        if value.shape != mine.shape:
            return "another shape"
        narrowed = value.astype(mine.dtype) if (name, other) == ("int64", "int32") else value
        found = "" if unset else _compared(narrowed, mine, name, exact.tensors[place][1] if exact else None)
        if found and not (place and place == len(want.tensors) - 1 and _has_ties(call)):
            return found
        if name != other:
            dtypes.append(f"dtype: {other} for {name}")
    exact_arguments = exact.arguments if exact else [None] * len(want.arguments)
    for value, mine, wide in zip(want.arguments, got.arguments, exact_arguments, strict=True):
        value = value.astype(mine.dtype) if (value.dtype.name, mine.dtype.name) == ("int64", "int32") else value
        if not unset and (value.shape != mine.shape or _compared(value, mine, value.dtype.name, wide)):
            return "an argument is not updated as in PyTorch"
    return "; ".join(dict.fromkeys(dtypes))


def _has_ties(call: Call) -> bool:
    """Returns whether an operator may choose among equal values: PyTorch does not promise which it takes."""
    if not TIED.search(operator_name(call.func)) or call.kwargs.get("stable"):
        return False
    values = _as_numpy(_tensors(call.args, call.kwargs)[0])
    return len(numpy.unique(values)) < values.size


def _in_float64(call: Call) -> Outcome | None:
    """Returns what PyTorch computes in float64; None where it has no such operator."""
    wide = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
            torch.complex64: torch.complex128}  # fmt: skip
    args, kwargs = pytree.tree_map_only(torch.dtype, lambda x: wide.get(x, x), (call.args, call.kwargs))
    try:
        return in_pytorch(Call(call.func, args, kwargs), lambda x: x.to(wide.get(x.dtype, x.dtype), copy=True))
    except RAISED:
        return None


def _compared(want: numpy.ndarray, got: numpy.ndarray, dtype: str, exact: numpy.ndarray | None = None) -> str:
    """Returns how values differ: those of floats by more than they may, all others at all."""
    if want.size == 0:
        return ""
    if dtype not in RELATIVE:
        return "" if numpy.array_equal(want, got, equal_nan=want.dtype.kind in "fcV") else "other values"
    kind = numpy.complex128 if want.dtype.kind == "c" else numpy.float64
    a, b = want.astype(kind), got.astype(kind)
    if not numpy.array_equal(numpy.isnan(a), numpy.isnan(b)):
        return "NaN at other places"
    finite = numpy.isfinite(a) & numpy.isfinite(b)
    if not numpy.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "infinity at other places"
    if not finite.any():
        return ""
    a, b = a[finite], b[finite]
    bound = RELATIVE[dtype] * max(float(numpy.abs(a).max()), 1e-6)
    if float(numpy.abs(a - b).max()) <= bound:
        return ""
    if exact is not None and exact.shape == want.shape:
        precise = exact.astype(kind)[finite]
        theirs, mine = numpy.abs(a - precise), numpy.abs(b - precise)
        if float(mine.max()) <= 2 * float(theirs.max()) + (bound if dtype in ("bfloat16", "float16") else 0):
            return ""
    return "other values"


# ---------------------------------------------------------------------------------------------- evidence


@dataclass
class Comparison:
    """Compares calls, each form with at most `SHAPES` of PyTorch's own samples, and of those that they leave out."""

    chosen: re.Pattern[str]
    patched: Mapping[Any, Any]
    counts: collections.Counter[tuple[Form, bool]] = field(default_factory=collections.Counter)
    seen: set[tuple[Form, str]] = field(default_factory=set)

    def of(self, name: str, dtype: str) -> Iterator[Evidence]:
        """Yields what the samples of one source say."""
        made = name in MADE
        calls = (call for sample in samples(name, dtype) for call in calls_of(sample) if self._is_new(call, made))
        while batch := list(itertools.islice(calls, BATCH)):
            with engine.operators({op.target: op.function for op in self.patched.values()}):
                found = verdicts(batch)
            mended = [call for call in batch if call.func in self.patched]
            without = iter(verdicts(mended) if mended else ())
            for call, what in zip(batch, found, strict=True):
                before = next(without) if call.func in self.patched else what
                if what is not None:
                    yield self._evidence(call, before, what)

    def _is_new(self, call: Call, made: bool) -> bool:
        if not self.chosen.search(operator_name(call.func)):
            return False
        key = call.key()
        if key in self.seen or self.counts[key[0], made] >= SHAPES:
            return False
        self.seen.add(key)
        self.counts[key[0], made] += 1
        return True

    def _evidence(self, call: Call, before: str | None, what: str) -> Evidence:
        """Returns what the verdicts say without the patches and with them: all are in force, as in a trace."""
        op = self.patched.get(call.func)
        if op is None or RANDOM in (before, what):
            return Evidence(call.form, what, "", call.source)
        if what:
            return Evidence(call.form, f"with {op.id}: {what}", "", call.source)
        return Evidence(call.form, before or "", op.id if before else "", call.source)


def _start_worker() -> None:
    """Prepares a process that compares."""
    import jax

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    jax.config.update("jax_disable_most_optimizations", True)  # a program runs once, and takes longer to compile


def _work(chosen: str, share: Sequence[tuple[str, str]]) -> list[Evidence]:
    """Compares the calls of some sources."""
    import jax

    with engine_in_force() as patched:
        comparison = Comparison(re.compile(chosen), patched)
        found = [one for name, dtype in share for one in comparison.of(name, dtype)]
    jax.clear_caches()  # a process would hold 4 GB of programs
    return found


def _kept_work(chosen: str, folder: Path | None, share: Sequence[tuple[str, str]]) -> list[Evidence]:
    """Compares the calls of some sources, or reads what a run before has found with the same code."""
    if folder is None:
        return _work(chosen, share)
    file = folder / f"{hashlib.sha256(repr((_code(), versions(), chosen, share)).encode()).hexdigest()[:16]}.pickle"
    if file.exists():
        return pickle.loads(file.read_bytes())  # type: ignore[no-any-return]
    found = _work(chosen, share)
    folder.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_bytes(pickle.dumps(found))
    part.rename(file)
    return found


@functools.cache
def _code() -> str:
    """Returns a hash of the code on which a comparison depends."""
    root = Path(__file__).resolve().parent.parent
    folders = root / "torchport" / "engine", root / "patches" / "torch", root / "patches" / "torchax"
    files = [file for folder in folders for suffix in ("py", "yaml") for file in sorted(folder.glob(f"*.{suffix}"))]
    files = [file for file in files if file != conformance.FILE] + [Path(__file__), Path(operator_samples.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def compared(chosen: str, jobs: int, wanted: str = "", folder: Path | None = None) -> list[Evidence]:
    """Compares operators in several processes.

    Which calls stand for a form does not depend on the number of processes: the sources have fixed shares.

    Args:
        chosen: A regular expression of their names.
        jobs: The number of processes.
        wanted: A regular expression of the sources of samples, for a quick look.
        folder: Where each share is kept as it is done, and taken from.
    """
    pairs = [pair for pair in sources() if re.search(wanted, pair[0])]
    shares = [pairs[start::SHARES] for start in range(SHARES)]
    start, evidence = time.monotonic(), list[Evidence]()
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start_worker) as pool:
        for found in pool.map(functools.partial(_kept_work, chosen, folder), shares):
            evidence += found
            minutes = (time.monotonic() - start) / 60
            print(f"{len(evidence)} calls compared, {minutes:.1f} minutes", file=sys.stderr, flush=True)
    return evidence


def merged(old: Mapping[str, Any], new: Mapping[str, Any], chosen: str) -> dict[str, Any]:
    """Returns a table with the operators of another one in the place of those whose names match."""
    kept = {name: entry for name, entry in old["operators"].items() if not re.search(chosen, name)}
    random = {name for name in old["random"] if not re.search(chosen, name)} | {*new["random"]}
    operators = dict(sorted((kept | new["operators"]).items()))
    return {"versions": new["versions"], "random": sorted(random), "operators": operators}


def main() -> int:
    """Compares, and prints, writes or checks the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--operators", default="", metavar="REGEX", help="only those whose names match")
    parser.add_argument("--samples", default="", metavar="REGEX", help="only samples of these; for a quick look")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many processes compare")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="keep there what is done, and go on from there")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--check", action="store_true", help="fail when the table says something else")
    parser.add_argument("--summary", action="store_true", help="print the counts of the table; compare nothing")
    flags = parser.parse_args()
    if flags.samples and (flags.write or flags.check):
        parser.error("the table is made from all samples: leave out --samples")
    old = yaml.safe_load(conformance.FILE.read_text(encoding="utf-8"))
    if flags.summary:
        print(in_short(old))
        return 0
    new = table(compared(flags.operators, flags.jobs, flags.samples, flags.resume))
    print("\n".join(differing(new)))
    if flags.write:
        conformance.FILE.write_text(written(merged(old, new, flags.operators)), encoding="utf-8")
    lines = drift(old, new, flags.operators) if flags.check else []
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
