"""Whether an operator agrees with PyTorch: the form of its call, looked up in the table of operators.

`python tools/conformance.py --write` makes the table, `conformance.yaml`, from PyTorch's own samples of its operators.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FILE = Path(__file__).with_name("conformance.yaml")
PLACES = frozenset({"device", "generator", "layout", "memory_format", "non_blocking", "pin_memory", "requires_grad"})
"""Arguments that say where a tensor lies, and nothing about its values."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of an operator's call, as the table `conformance.yaml` knows it."""

    operator: str  #: `aten.avg_pool2d.default`, `torch.nn.functional.linear`.
    dtypes: frozenset[str]  #: Of the arguments that are tensors.
    #: The arguments that differ from their defaults, `ceil_mode=True`, and the traits of the inputs, `0-dim`.
    options: frozenset[str]


class Row(NamedTuple):
    """A group of forms of an operator that differ from PyTorch in the same way."""

    options: frozenset[str]  #: A call of these forms has all of these options.
    dtypes: frozenset[str]  #: And a tensor of one of these dtypes; empty where no argument is a tensor.
    what: str  #: How they differ.
    patch: str  #: The id of the patch that mends them; empty if none does.


class _Samples(NamedTuple):
    """The table's samples of one operator: the dtypes and options with which a sample agreed, and forms that differ."""

    dtypes: frozenset[str]
    options: frozenset[str]
    rows: tuple[Row, ...]


class _Table(NamedTuple):
    """The table of operators, with the versions for which it was made."""

    versions: Mapping[str, str]
    random: frozenset[str]
    operators: Mapping[str, _Samples]


@functools.cache
def read() -> _Table:
    """Returns the table of operators."""
    data = yaml.load(FILE.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    operators = {}
    for name, samples in data["operators"].items():
        rows = []
        for row in (*samples.get("differs", ()), *samples.get("mended", ())):
            rows.append(Row(frozenset(row["options"]), frozenset(row["dtypes"]), row["what"], row.get("patch", "")))
        operators[name] = _Samples(frozenset(samples["dtypes"]), frozenset(samples["options"]), tuple(rows))
    return _Table(data["versions"], frozenset(data["random"]), operators)


def state_of(form: Form) -> tuple[str, str]:
    """Returns the table's state for a call of this form, and a word on it.

    Returns:
        `same` with nothing; `mended` with the patch's id; `differs` with the difference; `unknown` with the reason,
        such as the dtypes and options that no sample has.
    """
    if form.operator in read().random:
        return "unknown", "random by nature"
    samples = read().operators.get(form.operator)
    if samples is None:
        return "unknown", "the operator was never sampled"
    rows = [row for row in samples.rows if row.options <= form.options and (row.dtypes & form.dtypes or not row.dtypes)]
    if rows:
        row = min(rows, key=lambda row: row.patch != "")  # a difference without a patch counts first
        return ("mended", row.patch) if row.patch else ("differs", row.what)
    missing = sorted(form.dtypes - samples.dtypes) + sorted(form.options - samples.options)
    return ("unknown", f"never sampled: {', '.join(missing)}") if missing else ("same", "")


def form_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form:
    """Returns the form (operator, dtypes, options) of a call of a torch function or of an ATen overload."""
    import torch
    from torch.utils import _pytree as pytree

    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if func is torch.Tensor.__getitem__:
        options = {f"index: {kind}" for kind in _index_kinds(args[1])}
    elif func is torch.functional.einsum and isinstance(args[0], str):
        options = {f"equation: {kind}" for kind in _equation_kinds(args[0])}
    elif func is torch.Tensor.to:
        dtypes = [getattr(value, "dtype", value) for value in (*args[1:], *kwargs.values())]
        options = {f"dtype={_word(dtype)}" for dtype in dtypes if isinstance(dtype, torch.dtype)}
    else:
        options = set(_options(func, args, kwargs))
    options |= set(_traits(tensors))
    return Form(operator_name(func), frozenset(_word(tensor.dtype) for tensor in tensors), frozenset(options))


def _traits(tensors: Sequence[Any]) -> Iterator[str]:
    """Yields the traits of some input tensors with which lowerings often err, such as `empty` or `0-dim`."""
    import torch

    if any(tensor.numel() == 0 for tensor in tensors):
        yield "empty"
    if len({tensor.dtype for tensor in tensors}) > 1:
        yield "mixed dtypes"
    scalars = [tensor.dtype for tensor in tensors if tensor.ndim == 0]
    others = [tensor.dtype for tensor in tensors if tensor.ndim > 0]
    if scalars:
        yield "0-dim"
    if scalars and others:
        scalar, other = (functools.reduce(torch.promote_types, dtypes) for dtypes in (scalars, others))
        kinds = [(dtype.is_complex, dtype.is_floating_point, dtype != torch.bool) for dtype in (scalar, other)]
        # PyTorch keeps the dtype of tensors with dims, unless a 0-dim one is of a higher kind: float beside integers.
        if kinds[0] <= kinds[1] and torch.promote_types(other, scalar) != other:
            yield "0-dim of a wider dtype"


def operator_name(func: Callable[..., Any]) -> str:
    """Returns the name of a torch function or of an ATen overload: `torch.nn.functional.linear`, `aten.add.Tensor`."""
    import torch

    if hasattr(func, "_schema"):
        return str(func)
    return torch.overrides.resolve_name(func) or f"{func.__module__}.{func.__name__}"


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")


def _options(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yields the options of a call: arguments that are not the default, such as `dim=0`; of the arguments without a
    default the bools, dtypes and texts; and the types of numbers in the place of tensors, such as `int number`.
    """
    parameters = _parameters(func, len(args), frozenset(kwargs))
    if parameters is None:
        # A builtin whose overload is not known: an argument has no name, only its position.
        words = [(f"#{position}", value) for position, value in enumerate(args) if _is_word(value)]
        yield from (_option(name, value) for name, value in (*words, *kwargs.items()) if name not in PLACES)
        return
    for position, parameter in enumerate(parameters):
        is_named = position >= len(args)
        if parameter.name in PLACES or (is_named and parameter.name not in kwargs):
            continue
        value = kwargs[parameter.name] if is_named else args[position]
        if parameter.required and not parameter.by_name and is_named:
            yield f"{parameter.name} by keyword"
        is_option = _is_word(value) if parameter.required else not _is_default(value, parameter.default)
        if parameter.nullable and value is not None:
            yield parameter.name
        elif is_option:
            yield _option(parameter.name, value)
    for argument, value in zip(func._schema.arguments if hasattr(func, "_schema") else (), args, strict=False):
        if isinstance(value, bool | int | float | complex) and re.match("Tensor|number", str(argument.type)):
            yield f"{type(value).__name__} number"


def _is_word(value: object) -> bool:
    """Returns whether an argument is a choice among few values, so that a form has it: None, a bool, text or dtype."""
    import torch

    return value is None or isinstance(value, bool | str | torch.dtype)


def _option(name: str, value: Any) -> str:
    """Returns an option in words: with its value if there are few values, or for a zero (`beta=0`); else the name."""
    if _is_word(value):
        return f"{name}={_word(value)}"
    return f"{name}=0" if isinstance(value, int | float) and value == 0 else name


def _is_default(value: Any, default: Any) -> bool:
    # A single number counts for each dim.
    if isinstance(default, list | tuple):
        return list(value) == list(default) if isinstance(value, list | tuple) else {value} == set(default)
    if isinstance(value, bool | str) or value is None:
        return value is default or (type(value) is type(default) and value == default)  # True is not 1
    return isinstance(value, int | float) and isinstance(default, int | float) and value == default


class _Parameter(NamedTuple):
    """A parameter of an operator, from its schema or its signature."""

    name: str
    required: bool
    by_name: bool  #: Whether it can be passed by name alone.
    default: Any
    nullable: bool = False  #: Whether it is a tensor that may be None: that it is given counts as an option.


@functools.cache
def _parameters(func: Any, places: int = 0, names: frozenset[str] = frozenset()) -> list[_Parameter] | None:
    """Returns the parameters of an operator; None if they are not known. The overload of a builtin is chosen by
    `places`, the number of arguments passed by position, and `names`, those passed by name.
    """
    import torch

    if hasattr(func, "_schema"):
        declared = []
        for argument in func._schema.arguments:
            required = not argument.has_default_value()
            nullable = required and str(argument.type) == "Optional[Tensor]"
            declared.append(_Parameter(argument.name, required, argument.kwarg_only, argument.default_value, nullable))
        return declared
    with contextlib.suppress(ValueError):  # a builtin may have no signature
        signature = list(inspect.signature(func).parameters.values())
        if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature):
            return [_Parameter(p.name, p.default is p.empty, p.kind is p.KEYWORD_ONLY, p.default) for p in signature]
    # The first ATen overload that takes these arguments.
    packet = getattr(torch.ops.aten, func.__name__, None)
    for overload in packet.overloads() if packet is not None else ():
        parameters = _parameters(getattr(packet, overload)) or []
        left = parameters[places:]
        needed = {parameter.name for parameter in left if parameter.required}
        if places <= len(parameters) and needed <= names <= {parameter.name for parameter in left} | PLACES:
            return parameters
    return None


def _equation_kinds(equation: str) -> Iterator[str]:
    """Yields the traits of an equation of `einsum`: `...` for an ellipsis, `diagonal`, `3 tensors` if not two."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        yield "no output"
    if "..." in inputs:
        yield "..." if "..." in output or not arrow else "... is summed"
    if any(len(set(term := each.replace("...", ""))) < len(term) for each in terms):
        yield "diagonal"
    if len(terms) != 2:
        yield f"{min(len(terms), 3)} tensors"


def _index_kinds(index: Any) -> Iterator[str]:
    """Yields the kinds of the parts of an index, such as `mask`, `slice` or `int`."""
    import torch

    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, torch.Tensor):
            yield "mask" if part.dtype == torch.bool else "tensor"
        elif isinstance(part, slice):
            yield "slice" if part.step in (None, 1) else "step"
        else:
            yield type(part).__name__


_STOPS = re.compile("(for some inputs: )?(with [^ ]+: )?(raises|no lowering)")
_ACCEPT = "Compute it with other operators, or accept it under `operators` in the card, with the reason"
_WORST = ("differs", "unknown", "mended", "same")


class DiffersError(Exception):
    """An operator would not compute the values of PyTorch: its name, a verb with an object (`how`), and the remedy."""

    def __init__(self, operator: str, how: str, cure: str = "Compute it with other operators, and write to a copy"):
        super().__init__(f"{operator}, which {how}")
        self.cure = cure


@dataclasses.dataclass(eq=False)
class Operators:
    """A record of the operators that a network calls, and whether each agrees with PyTorch."""

    #: The reason by name of each operator that may differ.
    accepted: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Whether an operator is refused, too, that no sample has compared with PyTorch's.
    strict: bool = False
    #: The state of each form, and why.
    found: dict[Form, tuple[str, str]] = dataclasses.field(default_factory=dict, init=False)

    def see(self, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Notes a call, and returns whether no sample has its form. Raises DiffersError for a form that differs from
        PyTorch's, and if `strict` for one without a sample, unless the operator is accepted.
        """
        form = form_of(function, args, kwargs)
        if form in self.found:
            return self.found[form][0] == "unknown"
        state, what = state_of(form)
        name, _, overload = form.operator.rpartition(".")
        if state == "unknown" and name.endswith("_"):  # torchax computes `add_` by `add`
            other = state_of(dataclasses.replace(form, operator=f"{name.rstrip('_')}.{overload}"))
            if other[0] != "unknown":
                state, what = other
        stops = state == "differs" and _STOPS.match(what) is not None
        # The lowering raises an exception, which says more than ours.
        if stops:
            state = "unknown"
        if form.operator not in self.accepted:
            if state == "differs":
                raise DiffersError(form.operator, f"differs from PyTorch's on torchax ({what})", _ACCEPT)
            if state == "unknown" and self.strict and not stops:
                raise DiffersError(form.operator, f"no sample has compared with PyTorch's ({what})", _ACCEPT)
        self.found[form] = state, what
        return state == "unknown"

    def states(self) -> dict[str, str]:
        """Returns each operator's state, `same`, `mended`, `unknown` or `differs`: the worst state of its calls."""
        states: dict[str, str] = {}
        for form, (state, _) in self.found.items():
            states[form.operator] = min(states.get(form.operator, "same"), state, key=_WORST.index)
        return states

    def unknown(self) -> str:
        """Returns one line of the operators without a sample, each with the options that no sample has; or no text."""
        lines = {form.operator: what for form, (state, what) in self.found.items() if state == "unknown"}
        return "; ".join(f"{name} ({what})" for name, what in sorted(lines.items()))

    def row(self) -> dict[str, Any]:
        """Returns the operators' part of a manifest: how many agree with PyTorch, and by name those that do not."""
        states = self.states()
        others: dict[str, Any] = {state: [] for state in _WORST if state != "same"}
        for form, (state, what) in sorted(self.found.items(), key=lambda found: found[0].operator):
            if state != "same":
                accepted = f"; accepted: {self.accepted[form.operator]}" if form.operator in self.accepted else ""
                others[state].append(f"{form.operator}: {what}{accepted}")
        same = sum(state == "same" for state in states.values())
        return {"same": same, **{state: texts for state, texts in others.items() if texts}}

    def text(self) -> str:
        """Returns one line: `112 operators: 110 same, 1 mended, 1 unknown (aten.foo.default)`."""
        states = self.states()
        parts = []
        for state in reversed(_WORST):
            if names := sorted(name for name in states if states[name] == state):
                listed = f" ({', '.join(names)})" if state in ("differs", "unknown") else ""
                parts.append(f"{len(names)} {state}{listed}")
        return f"{len(states)} operators: {', '.join(parts)}"


_WATCHING: contextvars.ContextVar[Operators | None] = contextvars.ContextVar("operators", default=None)


@contextlib.contextmanager
def watching(operators: Operators | None) -> Iterator[None]:
    """Records in `operators` each operator that is traced while the context lasts; None: records none."""
    token = _WATCHING.set(operators)
    try:
        yield
    finally:
        _WATCHING.reset(token)


watched = _WATCHING.get
"""Returns the record in which `watching` notes operators; None outside of `watching`."""
