"""Where weights, inputs and activations lie on a mesh: makes it, matches rules to tensors, and places these.

Rules match whole names (`re.fullmatch`); the first match wins. A spec names a mesh axis, several, or none, for each
dim of a tensor, from the first on; `replicate` is written out, never implied.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import ml_dtypes
import numpy
import torch
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from torchport.config import Document
from torchport.config.card import DTYPES, Job
from torchport.config.machine import Machine
from torchport.config.strategy import ActivationRule, Axis, Rule, Spec, Strategy, WeightRule, dims_of
from torchport.errors import DeadRuleError, MeshError, PlacementError, UnmatchedError, nearest
from torchport.shard import grid

AXES: tuple[Axis, ...] = ("dp", "sp", "tp")
Shape = tuple[int, ...]
RuleT = TypeVar("RuleT", bound=Rule)


def check_mesh(mesh: Mapping[Axis, int], devices: int, machine: str, place: str) -> None:
    """Refuses a mesh that does not use every device of the machine exactly once."""
    product = math.prod(mesh.values())
    if product != devices:
        axes = " x ".join(f"{axis}={size}" for axis, size in mesh.items()) or "1"
        fact = f"The mesh {axes} takes {product} device(s), and {machine} has {devices}"
        raise MeshError(place, fact, f"The axes' product must be {devices}", mesh=dict(mesh), devices=devices)


def with_mesh(job: Job, strategy: Strategy, document: Document) -> Job:
    """Returns a job with its own mesh; with its strategy's, if it has none, or if a flag sets the strategy alone."""
    exchanged = ("strategy",) in document.flags and not any(path[0] == "mesh" for path in document.flags)
    return job.model_copy(update={"mesh": strategy.mesh}) if exchanged or "mesh" not in document.data else job


def check_axes(strategy: Strategy, networks: Sequence[str], job: Job, document: Document) -> None:
    """Refuses an axis of a job's mesh that no rule of these networks names; see `check_used`."""
    if networks:
        rules = [rule for name in networks for rule in (*strategy.weights[name], *strategy.inputs[name])]
        activations = [rule for name in networks for rule in strategy.activations.get(name, [])]
        name = f"the strategy '{job.strategy}'"
        check_used(job.mesh, rules, activations, lambda axis: document.place(["mesh", axis]), name)


def check_used(
    mesh: Mapping[Axis, int],
    rules: Iterable[Rule],
    activations: Iterable[ActivationRule],
    place: Callable[[Axis], str],
    owner: str,
) -> None:
    """Refuses an axis of a mesh that no rule names: devices along the axis would repeat the same work.

    Args:
        place: Returns where an axis of the mesh is written, for errors; `owner`: whose rules they are.
    """
    used = axes_of(rules, activations)
    for axis, size in mesh.items():
        if size > 1 and axis not in used:
            without = "Write a strategy whose rules split something, or leave the axis out and plan one device"
            remedy = f"Use the axes {', '.join(sorted(used))}" if used else without
            fact = f"{axis}={size} splits nothing: no rule of {owner} names it"
            raise MeshError(place(axis), fact, remedy, axis=axis)


def axes_of(rules: Iterable[Rule], activations: Iterable[ActivationRule]) -> set[Axis]:
    """Returns the axes of a mesh that some rules name."""
    specs: list[Spec | None] = [spec for rule in rules for spec in (rule.spec, *rule.otherwise)]
    specs += [spec for rule in activations for spec in rule.outputs]
    return {axis for spec in specs for axes in dims_of(spec) for axis in axes}


def check_divides(axis: Axis, size: int, name: str, count: int, place: str) -> None:
    """Refuses an axis whose size does not divide a count that it splits: the batch, or a network's heads."""
    if count % size:
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        fact = f"{axis}={size} does not divide {name}, which is {count}"
        remedy = f"{axis} must be {'one of ' if count > 1 else ''}{divisors}"
        raise MeshError(place, fact, remedy, axis=axis, size=size, count=count)


def make_mesh(mesh: Mapping[Axis, int], devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """Returns JAX's mesh of these devices, with the axes dp, sp and tp; an axis that the job leaves out has size 1. The
    devices of a group along an axis are as close together as possible, inner axes first: see `grid.order`.
    """
    sizes = tuple(mesh.get(axis, 1) for axis in AXES)
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    where = grid.spots(devices)
    candidates = [list(range(len(devices)))]  # orders that `grid.order` prefers if no other is more compact
    if len({spot.island for spot in where}) == 1:  # JAX's own order, in rings of chips, is for one slice
        candidates = []
        with contextlib.suppress(NotImplementedError):  # JAX has no order for some sizes
            number = {device.id: n for n, device in enumerate(devices)}
            candidates = [[number[device.id] for device in mesh_utils.create_device_mesh(sizes, devices).flat]]
    arranged = numpy.empty(len(devices), dtype=object)
    arranged[:] = [devices[number] for number in grid.order(sizes, where, candidates)]
    return jax.sharding.Mesh(arranged.reshape(sizes), AXES, axis_types=kinds)


def abstract_mesh(mesh: Mapping[Axis, int], machine: Machine) -> jax.sharding.AbstractMesh:
    """Returns the mesh without its devices, which need not exist: enough for attention and layouts."""
    device = jax.sharding.AbstractDevice(
        device_kind=machine.kinds[0] if machine.kinds else machine.platform,
        num_cores=None if machine.chip is None else machine.chip.cores,
        platform=machine.platform,
    )
    sizes, types = tuple(mesh.get(axis, 1) for axis in AXES), (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.sharding.AbstractMesh(sizes, AXES, axis_types=types, abstract_device=device)


def match(
    rules: Sequence[RuleT],
    shapes: Mapping[str, Shape],
    mesh: Mapping[Axis, int],
    place: str,
    places: Sequence[str] = (),
) -> dict[str, RuleT]:
    """Returns the rule of every tensor by name, with the spec that fits its shape: the rule's first, or one of
    `otherwise`. Refuses a tensor without a rule, a rule without a tensor, and a shape that no spec fits.
    """
    rule_of = {
        name: _first_match(rules, name, place, f"'{name}' {list(shape)} ({math.prod(shape)} elements)")
        for name, shape in shapes.items()
    }
    check_alive(rules, list(shapes), place, places)
    return {name: _with_fitting_spec(name, shapes[name], rule, mesh, place) for name, rule in rule_of.items()}


def firsts(rules: Sequence[Rule], names: Iterable[str]) -> set[int | None]:
    """Returns the indices of the rules that are the first match of a name; among them None if a name has no match."""
    return {next((n for n, rule in enumerate(rules) if matches(rule, name)), None) for name in names}


def check_alive(rules: Sequence[Rule], names: Sequence[str], place: str, places: Sequence[str] = ()) -> None:
    """Refuses a rule that is the first match of none of these names of tensors.

    Args:
        place: Where the rules are written, for errors; `places`: where each rule is, if this is known.
    """
    used = firsts(rules, names)
    for number, rule in enumerate(rules):
        if number not in used and not rule.is_shared:  # a shared strategy is for networks that it does not know
            covered = any(matches(rule, name) for name in names)
            known = list(dict.fromkeys(names))
            unmatched = f"matches none of {len(known)} tensors"
            fact = "matches only tensors that an earlier rule has taken" if covered else unmatched
            example = rule.match.replace("\\.", ".").replace("\\d+", "0")  # a name that the rule would match
            if len(known) >= 12:  # a network may have thousands
                known = difflib.get_close_matches(example, known, n=3, cutoff=0.3) or known[:3]
            where = places[number] if places else place
            remedy = f"Remove it or mend it. {nearest(example, known)}"
            raise DeadRuleError(where, f"Rule {number + 1}, '{rule.match}', {fact}", remedy, rule=rule.match)


def _first_match(rules: Sequence[RuleT], name: str, place: str, description: str) -> RuleT:
    """Returns the first rule that matches a tensor's name. Without a match it refuses the tensor by its description."""
    for rule in rules:
        if matches(rule, name):
            return rule
    remedy = "Add a rule for it, with `spec: replicate` if every device shall have it whole"
    raise UnmatchedError(place, f"No rule matches {description}", remedy, name=name)


def input_rule(
    rules: Sequence[Rule], name: str, shape: Shape, mesh: Mapping[Axis, int], place: str, network: str
) -> Rule:
    """Returns the rule of one input of a network, with the spec that fits its shape; raises if none fits."""
    rule = _first_match(rules, name, place, f"the input '{name}' {list(shape)} of {network}")
    try:
        return _with_fitting_spec(name, shape, rule, mesh, place)
    except MeshError as error:
        raise MeshError(place, f"{error.fact}, an input of {network}", error.remedy, name=name) from error


def matches(rule: Rule, name: str) -> bool:
    """Returns whether a rule's regular expression matches the whole name of a tensor."""
    return re.fullmatch(rule.match, name) is not None


def _with_fitting_spec(name: str, shape: Shape, rule: RuleT, mesh: Mapping[Axis, int], place: str) -> RuleT:
    """Returns the rule with its first spec whose axes divide the shape; refuses a shape that no spec divides."""
    uneven: list[tuple[int, tuple[Axis, ...]]] = []
    for spec in (rule.spec, *rule.otherwise):
        if spec == "replicate":
            return rule.model_copy(update={"spec": spec})
        pairs = enumerate(zip(shape, dims_of(spec), strict=False))  # dims beyond the spec's are not split
        undivided = [(dim, axes) for dim, (size, axes) in pairs if size % ways(axes, mesh)]
        uneven += undivided
        if len(spec) > len(shape):
            if rule.is_shared:  # a shared strategy is for networks that it does not know
                continue
            fact = f"'{rule.match}' has a spec of {len(spec)} dims, and '{name}' has {len(shape)}"
            raise MeshError(place, fact, "Shorten the spec, or narrow the rule", name=name)
        if not undivided:
            return rule.model_copy(update={"spec": spec})
    dim, axes = uneven[0]
    sizes = " x ".join(f"{axis}={mesh.get(axis, 1)}" for axis in axes)
    fact = f"{sizes} does not divide dim {dim} of '{name}' {list(shape)}"
    remedy = f"Choose {' x '.join(axes)} among the divisors of {shape[dim]}"
    raise MeshError(place, fact, remedy, name=name, axis=axes[0])


def ways(axes: Iterable[str], mesh: Mapping[Any, int]) -> int:
    """Returns into how many parts some axes of a mesh split a dim: the axes dp and tp of `{dp: 2, tp: 4}` into 8."""
    return math.prod(mesh.get(axis, 1) for axis in axes)


def device_bytes(shapes: Mapping[str, Shape], rules: Mapping[str, Rule], mesh: Mapping[Axis, int], dtype: str) -> int:
    """Returns the bytes of all tensors on each device under their rules: exact, from shapes alone."""
    parts = {name: math.prod(ways(axes, mesh) for axes in dims_of(rules[name].spec)) for name in shapes}
    return sum(math.prod(shape) * DTYPES[dtype] // parts[name] for name, shape in shapes.items())


def sharding(rule: Rule, mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns a rule's spec as JAX's sharding on a mesh."""
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in dims_of(rule.spec))))


def gathered(rules: Mapping[str, WeightRule]) -> frozenset[str]:
    """Returns the names of the weights that are split over devices, and gathered where they are used (FSDP)."""
    return frozenset(name for name, rule in rules.items() if rule.gather and any(dims_of(rule.spec)))


def place(
    tensors: Iterable[tuple[str, torch.Tensor]], rules: Mapping[str, Rule], mesh: jax.sharding.Mesh
) -> dict[str, jax.Array]:
    """Returns the tensors as JAX arrays by name, each sharded by its rule; raises if JAX has placed an array otherwise.

    Args:
        tensors: Pairs of a name and a torch tensor (any shape; host memory), taken one by one: the host need not hold
            them all.
    """
    placed: dict[str, jax.Array] = {}
    for name, tensor in tensors:
        target = sharding(rules[name], mesh)
        array = to_jax(tensor, target)
        if not array.sharding.is_equivalent_to(target, array.ndim) or array.shape != tuple(tensor.shape):
            fact = f"It lies as {array.sharding} with shape {array.shape}"
            raise PlacementError(name, fact, f"Its rule puts it as {target}", name=name)
        placed[name] = array
    return placed


KINDS = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float32: numpy.float32,
    torch.float16: numpy.float16,
    torch.int64: numpy.int64,
    torch.float64: numpy.float64,
    torch.complex128: numpy.complex128,
    torch.complex64: numpy.complex64,
    torch.int32: numpy.int32,
    torch.bool: numpy.bool_,
}
"""The dtype of `to_jax`'s array for each of torch's dtypes."""


def shape(tensor: torch.Tensor, where: NamedSharding) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of the array that `to_jax` would make of a tensor."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), KINDS[tensor.dtype], sharding=where)


def to_jax(tensor: torch.Tensor, where: NamedSharding) -> jax.Array:
    """Returns a torch tensor in host memory as a JAX array of its dtype; each device receives only its own part."""
    # NumPy cannot read a conjugate or a negative that torch has not computed yet.
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16: the bits go through int16
        array: Any = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        try:
            array = tensor.numpy()
        except TypeError as error:
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise PlacementError(kind, "NumPy has no such numbers", "Cast it to a dtype that NumPy has") from error
    # Otherwise JAX would narrow 64 bits to 32.
    with jax.enable_x64(True):
        return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def to_torch(array: jax.Array) -> torch.Tensor:
    """Returns a JAX array, gathered from all hosts, as a torch tensor in host memory; bit for bit. Where several
    processes run together, all of them must call this, and each gets the whole array.
    """
    # It is read-only, so it is copied: torch's tensors can be written to.
    host = to_host(array)
    if host.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(host.view(numpy.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(host.copy())


def to_host(array: jax.Array) -> numpy.ndarray[Any, Any]:
    """Returns a JAX array as a NumPy array in host memory, gathered from all hosts; see `to_torch`."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return numpy.asarray(array)
    return numpy.asarray(multihost_utils.process_allgather(array, tiled=True))


def named_shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    """Returns the shape of each tensor, by its name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
