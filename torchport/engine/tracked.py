"""Calls each operator of a traced network in PyTorch, too: PyTorch decides dtypes, shapes and memory, JAX the values.

A traced tensor has a shadow: a tensor of PyTorch's with the same dtype, shape, strides and memory. An operator is
called with the shadows first. So PyTorch itself says which dtype and shape its result has, and whose memory it shares.

A shadow on meta has no values. A tensor that depends on no input of the network, such as a table of frequencies, has a
shadow on the host: PyTorch computes it, bit for bit as in upstream, and it enters the program as a constant.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from torchport.engine.aliasing import Section, Storage, View, extent, inverse, layout, lies_in, overlap, place
from torchport.engine.conformance import DiffersError, operator_name, watched, watching

LARGEST = 2**28
"""Bytes of the largest tensor that the host computes. A larger one is left to the devices."""
FILLED = 2**16
"""Elements of the largest tensor of one value that the host makes. A larger one costs the devices nothing."""
COPIED = 2**16
"""Bytes of the largest tensor of the host that a program has a copy of; it shares the memory of a larger one."""

_FILLS = {torch.zeros, torch.ones, torch.full, torch.empty, torch.empty_strided}
_DRAWS = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli}
_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_DECOMPOSED = {torch.Tensor.resize_, torch.Tensor.repeat_interleave, torch.nn.functional.interpolate, torch.angle}
_DECOMPOSED |= {torch.tensor_split, torch.Tensor.tensor_split}
"""Functions with a lowering that are left to PyTorch, which decomposes them into operators: it knows their views."""
_REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AssertionError)
"""The exceptions of PyTorch for an operator whose result it cannot describe without values."""

_ONE_DTYPE = {"mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "matmul", "__matmul__", "linear", "convolution"}
"""Products, which PyTorch refuses of tensors of two dtypes, and computes on meta."""

_HALVES = {torch.bfloat16, torch.float16}
"""Dtypes in which PyTorch stores values, but does not compute."""
_NARROW = {torch.uint8, torch.int8, torch.int16}
"""Dtypes to which PyTorch casts floats so that they wrap around, and JAX so that they saturate."""
_IN_STEPS = {"_adaptive_avg_pool2d", "_softmax", "_weight_norm_interface", "cumprod", "floor_divide"}
_IN_STEPS |= {"binary_cross_entropy_with_logits", "dist", "native_group_norm", "softmax"}
"""Operators of several steps that PyTorch computes in float32, beside those that it calls pointwise."""
_IN_ONE_STEP = {"abs", "add", "clamp", "clone", "div", "masked_fill", "mul", "neg", "relu", "rsub", "sub", "where"}
"""Operators of tensors whose result is rounded once in any case."""
_OF_ITS_DTYPE = {"fmod", "hardshrink", "nan_to_num", "nextafter", "pow", "remainder", "softshrink", "threshold"}
"""Operators whose numbers PyTorch rounds, too."""

_NO_DTYPE = re.compile("only support|not supported for")
"""PyTorch's words for a dtype that no device but meta takes. `not implemented for` is the host's: a GPU may take it."""

_OF_ENGINE = {"_env", "_array", "_shadow", "_memory", "_path", "_whole", "_cast", "_made_in"}
"""Attributes of a traced tensor that are the engine's; all others are upstream's."""

_META = torch.device("meta")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_UNKNOWN = object()
_trace = 0
"""The number of the trace that began last."""


def begin_trace() -> None:
    """Begins a new trace. The first time in a process, it also exchanges torchax's dispatch for `Dispatch`, and some
    methods of its tensor for those of PyTorch or of this module.
    """
    global _trace
    from torchax import default_env
    from torchax.tensor import Tensor

    environment: Any = default_env()
    environment.config.force_materialize_views = True  # torchax need not know what is a view: a `Storage` does
    _trace += 1
    if isinstance(environment.__dict__.get("dispatch"), Dispatch):
        environment.dispatch.made.clear()
        return
    environment.dispatch = Dispatch(environment, environment.dispatch)
    for name in ("__setitem__", "type_as", "shape", "ndim", "flatten", "detach", "dtype", "dim", "tolist", "numpy"):
        # These methods of torchax bypass the dispatch; those of torch.Tensor do not.
        delattr(Tensor, name)
    Tensor._elem = property(_value, lambda tensor, value: setattr(tensor, "_array", value))
    Tensor.numpy, Tensor.tolist = _numpy, lambda tensor: _numpy(tensor).tolist()
    Tensor.__deepcopy__ = lambda tensor, copies: copies.setdefault(id(tensor), tensor.clone())
    Tensor.storage_offset = _offset
    Tensor.jax = _concrete
    Tensor.data = property(torch.Tensor.detach, _set_data)


def _value(tensor: Any) -> Any:
    """Returns the JAX array of a traced tensor. For a tensor with known values, makes an array for this trace if it has
    none: upstream may keep the tensor, such as a table of frequencies, from one trace to the next.
    """
    value, trace = tensor.__dict__.get("_array"), tensor.__dict__.get("_made_in", _trace)
    if value is None or (trace != _trace and is_known(tensor)):
        value = tensor._array = _array(tensor._shadow)
        tensor._made_in = _trace
    return value


def _concrete(tensor: Any) -> Any:
    """Returns a tensor as a JAX array. Upstream's code gets no tracer for known values: transformers takes another way
    for tensors without values. torchax's code gets the array of the program, which has each table once.
    """
    import jax

    if not is_known(tensor) or sys._getframe(1).f_globals["__name__"].startswith("torchax."):
        return tensor._elem
    with jax.ensure_compile_time_eval():
        return _array(tensor._shadow)


def _numpy(tensor: Any) -> Any:
    """Returns a tensor as an array of numpy: known values from the shadow, others from JAX, which raises in a trace."""
    if is_known(tensor):
        with _plain():
            return tensor._shadow.numpy()
    return numpy.asarray(tensor._elem)


def _offset(tensor: Any) -> int:
    """Returns where a tensor begins in its memory; refuses arguments, whose offset may differ from call to call."""
    if tensor._env.dispatch._memory(tensor).is_callers:
        raise DiffersError("Tensor.storage_offset", "may have another result for the tensor of the next call")
    return int(tensor._shadow.storage_offset())


def _set_data(tensor: Any, value: torch.Tensor) -> None:
    """Gives a tensor the memory of another one, for `tensor.data = value`. Raises DiffersError unless shape, dtype and
    strides are equal, or if the tensor is the caller's.
    """
    dispatch = tensor._env.dispatch
    value = dispatch.with_values(value)
    whose = dispatch._memory(tensor).whose
    if whose or (tensor.shape, tensor.dtype, tensor.stride()) != (value.shape, value.dtype, value.stride()):
        how = f"gives {whose or 'a tensor'} the memory of another one"
        raise DiffersError("Tensor.data", how, "Write the values with copy_()")
    dispatch._rebind(tensor, value)
    tensor._memory.written = True


def _array(host: torch.Tensor) -> Any:
    """Returns a host tensor as an array of its dtype; of a small tensor, as a copy."""
    import jax
    import jax.numpy as jnp
    from torchax.ops import mappings

    if host.layout != torch.strided:
        raise TypeError(f"a tensor of the host has the layout {host.layout}; keep it as to_dense()")
    with _plain(), jax.enable_x64(True):  # also after the trace: upstream may print the tensor
        dtype = mappings.t2j_dtype(host.dtype)
        host = host.detach().resolve_conj().resolve_neg()
        if host.nbytes <= COPIED:
            host = host.clone()  # upstream may write to it when the trace is over
        if host.dtype in mappings.NUMPY_UNSUPPORTED_DTYPES:
            host = host.float()
        return jnp.asarray(host.contiguous().numpy(), dtype)


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Runs PyTorch without torchax's modes while the context lasts."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


class Dispatch:
    """Takes the place of torchax's `dispatch`, its argument `lower`: every operator of a traced network comes here."""

    def __init__(self, environment: Any, lower: Callable[..., Any]) -> None:
        from torchax.tensor import TENSOR_CONSTRUCTORS, OperatorNotFound, Tensor

        self.environment = environment
        self.lower = lower
        self.lowering = 0  # how many lowerings are being called, one in another
        self.type = Tensor
        self.not_found = OperatorNotFound
        self.constructors = TENSOR_CONSTRUCTORS
        self.made: list[weakref.ref[Any]] = []  # all tensors of the trace

    def __call__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator: in PyTorch on the host if it depends on no input of the network, else by its lowering."""
        kwargs = kwargs or {}
        traced = self._traced((args, kwargs))
        makes = self._makes(function, args, kwargs)  # whether it makes a tensor of numbers alone
        if not traced and not makes:
            return self._call_untraced(function, types, args, kwargs)
        if function in _INDEXING:
            index = self._index(args[1])
            if function is torch.Tensor.__getitem__ and isinstance(index, self.type):
                index = self._without_mask(index)
            return function(args[0], index, *args[2:])
        if function is torch.Tensor.to:
            # A traced tensor is on meta for PyTorch. So `to("jax")` of it has to return the tensor itself.
            args, kwargs = pytree.tree_map(lambda leaf: _META if _is_engine_device(leaf) else leaf, (args, kwargs))
            return function(*args, **kwargs)
        if isinstance(function, torch._ops.OpOverload):  # an operator of aten, which has arrived below autograd
            if function is torch.ops.aten.as_strided.default:
                args, kwargs = self._as_strided_of_memory(*args, **kwargs), {}
            if torch.Tag.inplace_view in function.tags:
                return self._call_inplace_view(function, types, args, kwargs)
        elif not makes and self._is_decomposed(function, kwargs):
            raise self.not_found(f"{_name(function)} is made of operators")  # then PyTorch decomposes it
        return self._call_lowered(function, types, args, kwargs, traced)

    def _call_untraced(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator of the host's tensors, or of none; it may move one of them to the devices."""
        try:
            output = self.lower(function, types, args, kwargs)
        except self.not_found:
            if not isinstance(function, torch._ops.OpOverload):
                raise
            # It makes a host tensor, as no device is named.
            with _plain():
                return function(*args, **kwargs)
        if not isinstance(output, self.type):
            return output
        # A host tensor that is moved to the devices keeps its values known.
        answer = self._ask_pytorch(function, args, kwargs, "cpu")
        is_host = isinstance(answer, torch.Tensor) and not answer.is_meta
        return self.tensor(value=None, shadow=answer) if is_host else output

    def _is_decomposed(self, function: Any, kwargs: Any) -> bool:
        """Returns whether a function is left to PyTorch, which decomposes it into operators of aten."""
        if function not in self.environment._ops or isinstance(function, torch._ops.OpOverloadPacket):
            return True
        # torchax's lowering may take `out`, and not write to it.
        return function in _DECOMPOSED or kwargs.get("out") is not None

    def _call_lowered(self, function: Any, types: Any, args: Any, kwargs: Any, traced: list[Any]) -> Any:
        """Calls an operator that PyTorch has not decomposed: on the host if its values are known, or on the devices."""
        for tensor in traced:
            self.shadow(tensor)  # makes it if it is missing
        check_read(traced, function)
        returning = _without_out(function)
        is_patched = getattr(self.environment._ops.get(function), "is_user_defined", False)
        if returning and not is_patched:
            return self._call_with_out(function, returning, args, kwargs)
        # Below autograd and in inference mode PyTorch does not decompose these.
        is_aten = isinstance(function, torch._ops.OpOverload)
        if is_aten and not is_patched and torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), _COMPOSITE):
            with self.environment._dispatch_mode:
                return function._op_dk(_COMPOSITE, *args, **kwargs)  # not `decompose`: PyTorch has others for compilers
        # A lowering may write what PyTorch refuses: torchax's attention adds a mask of 4 dims to a bias of 2.
        lowering_writes = self.lowering and _written(function, args, kwargs)
        has_values = all(is_known(tensor) for tensor in traced) and not lowering_writes
        if has_values and self._is_for_host(function, args, kwargs):
            return self._on_host(function, args, kwargs)
        return self._on_devices(function, types, args, kwargs, traced)

    def _makes(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Returns whether a function makes a tensor on the devices from numbers alone, as `torch.hann_window` does."""
        device = kwargs.get("device")
        if function in self.constructors:
            return bool(self.environment._should_use_torchax_tensor(device))
        if not _is_engine_device(device):
            return False
        return not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs)))

    def _traced(self, tree: Any) -> list[Any]:
        """Returns the traced tensors in a tree, such as an operator's arguments; those of the host are left out."""
        return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, self.type)]

    def _index(self, index: Any) -> Any:
        """Returns an index with known tensors in place of lists, arrays and masks: on meta these have no values."""
        if isinstance(index, tuple):
            return tuple(part for item in index for part in self._without_mask(self._index(item)))
        if isinstance(index, list | range | numpy.ndarray):
            with _plain():
                index = torch.as_tensor(numpy.asarray(index) if not isinstance(index, range) else list(index))
        if isinstance(index, torch.Tensor) and index.ndim and not isinstance(index, self.type):
            return self.with_values(index)
        return index

    def _without_mask(self, index: Any) -> tuple[Any, ...]:
        """Returns a mask with known values as index tensors, so that the result's size is known; else the index."""
        if not isinstance(index, self.type) or index.dtype != torch.bool or not index.ndim or not is_known(index):
            return (index,)
        with _plain():
            places = index._shadow.nonzero(as_tuple=True)
        return tuple(map(self.with_values, places))

    def shadow(self, tensor: Any) -> torch.Tensor:
        """Returns a traced tensor's shadow, PyTorch's tensor of its dtype, shape and strides; makes a missing one."""
        shadow: torch.Tensor | None = tensor.__dict__.get("_shadow")
        # An input or a weight, which `tensor` has not made.
        if shadow is None:
            shadow = tensor._shadow = _empty(tensor._elem)
            self.made.append(weakref.ref(tensor))
        return shadow

    def _is_for_host(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Returns whether the host computes an operator of known values: not if it is random, or its result large."""
        if function in _DRAWS or torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            return False
        if function in (torch.tensor, torch.as_tensor):
            return True
        answer = self._ask_pytorch(function, args, kwargs, "meta")
        if answer is _UNKNOWN:
            return function not in self.constructors
        leaves = [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
        if function in _FILLS and any(leaf.numel() > FILLED for leaf in leaves):
            return False
        return all(leaf.untyped_storage().nbytes() <= LARGEST for leaf in leaves)

    def _ask_pytorch(self, function: Any, args: Any, kwargs: Any, device: str) -> Any:
        """Calls PyTorch's operator with the shadows of its arguments on a device, `meta` or `cpu`, and returns the
        result. It is `_UNKNOWN` if PyTorch needs values that meta does not have.
        """

        def shadow(leaf: Any) -> Any:
            """Returns an argument as PyTorch gets it: of a traced tensor the shadow, on the device."""
            if isinstance(leaf, self.type):
                leaf = leaf._shadow
            if isinstance(leaf, torch.Tensor) and device == "cpu" and leaf.is_meta:
                return torch.zeros(leaf.shape, dtype=leaf.dtype)  # only its dtype matters: see `_check_dtypes`
            if isinstance(leaf, torch.Tensor):
                return leaf.to("meta") if device == "meta" and not leaf.is_meta else leaf
            return device if _is_engine_device(leaf) else leaf

        with _plain(), torch.no_grad():
            args, kwargs = pytree.tree_map(shadow, (args, kwargs))
            if function in self.constructors:
                kwargs["device"] = device
            try:
                return function(*args, **kwargs)
            except _REFUSALS as error:
                # Upstream may catch PyTorch's refusal, so it is raised: unless a lowering of torchax makes the call, or
                # meta alone refuses, which has no values, and has `_grouped_mm` as on CUDA.
                needs_values = isinstance(error, NotImplementedError | AssertionError) or "meta" in str(error).lower()
                if device == "cpu" or not (self.lowering or needs_values or _name(function) == "_grouped_mm"):
                    raise
                return _UNKNOWN

    def _on_host(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator in PyTorch on the host: arguments with known values give results with known values."""
        answer = self._ask_pytorch(function, args, kwargs, "cpu")
        for tensor in self._traced(_written(function, args, kwargs)):
            for sharing, _ in self._memory(tensor).alive():
                # An outdated copy: the operator has written to the memory.
                sharing._array = None
        return self._as_in_pytorch(function, answer, answer, self._traced((args, kwargs)), args, kwargs)

    def _on_devices(self, function: Any, types: Any, args: Any, kwargs: Any, traced: list[Any]) -> Any:
        """Calls an operator's lowering, and gives the results the dtypes, strides and memory that PyTorch says."""
        if (operators := watched()) is not None:
            with _plain():
                is_new = operators.see(function, args, kwargs)
            if is_new and sum(tensor.numel() for tensor in traced) <= FILLED:
                self._check_dtypes(function, args, kwargs)
        written = self._traced(_written(function, args, kwargs))
        for tensor in written:
            if is_known(tensor):
                self._forget(tensor)
        if not self.lowering:
            _check_overlap(written, traced)
        answer = self._ask_pytorch(function, args, kwargs, "meta")
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.with_values, (args, kwargs))
        args = self._wrapping(function, args, kwargs)
        if not self.lowering and _name(function) in _ONE_DTYPE and len({tensor.dtype for tensor in traced}) > 1:
            dtypes = " and ".join(str(tensor.dtype).removeprefix("torch.") for tensor in traced)
            raise RuntimeError(f"expected tensors of one dtype, and {_name(function)} gets {dtypes}")
        if not written:
            args, kwargs = self._in_computing_dtype(function, answer, args, kwargs)
        before = {id(tensor): tensor._elem for tensor in traced}
        properties = self.environment.param
        key = properties.prng
        self.lowering += 1
        try:
            # The operators that a lowering calls were compared with PyTorch's as parts of it.
            with watching(None):
                output = self._lowered(function, types, args, kwargs)
        finally:
            self.lowering -= 1
        if properties.prng is not key and operators is not None:
            properties.prng = key
            how = "draws numbers while the network is traced, the same for every call"
            raise DiffersError(operator_name(function), how, "Draw them outside of it, and pass them as an input")
        # Listed before the first write, which gives all tensors of its memory new values.
        for tensor, value in [(each, each._elem) for each in traced if each._elem is not before[id(each)]]:
            self._write(function, tensor, value)
        for tensor in written if _name(function) != "copy_" else ():  # `copy_` may get the array that is there already
            if tensor._elem is before[id(tensor)]:
                raise DiffersError(operator_name(function), "does not write to its argument, as PyTorch's does")
        return output if answer is _UNKNOWN else self._as_in_pytorch(function, output, answer, traced, args, kwargs)

    def _as_in_pytorch(self, function: Any, output: Any, answer: Any, traced: Any, args: Any, kwargs: Any) -> Any:
        """Returns an operator's output with the dtypes, strides and memory of `answer`, PyTorch's output for the
        shadows of `traced`. `args` may have casts of these tensors. On the host `output` is `answer`.
        """
        leaves, tree = pytree.tree_flatten(output)
        expected = pytree.tree_leaves(answer)
        if len(leaves) != len(expected):
            return output
        shapes = [getattr(leaf, "shape", None) for leaf in expected]
        shadows = {id(tensor._shadow): tensor for tensor in traced}
        for item, (leaf, shadow) in enumerate(zip(leaves, expected, strict=True)):
            is_of_host = leaf is shadow
            if not isinstance(shadow, torch.Tensor) or not (is_of_host or isinstance(leaf, self.type)):
                continue
            if id(shadow) in shadows:
                leaves[item] = shadows[id(shadow)]
            else:  # also where a lowering returns its argument, of which PyTorch makes a copy
                tensor = self.tensor(None, shadow) if is_of_host else self._with_shadow(function, leaf, shadow)
                leaves[item] = tensor
                self._note_view(tensor, function, args, kwargs, item, shapes)
                if _name(function) == "_to_copy" and not is_of_host:
                    tensor._cast = args[0]._elem, tensor._elem
        return pytree.tree_unflatten(leaves, tree)

    def _in_computing_dtype(self, function: Any, answer: Any, args: Any, kwargs: Any) -> Any:
        """Returns an operator's arguments in the dtype in which PyTorch computes.

        Integers become floats if the result is a float. Floats of 16 bits become float32 if the operator has several
        steps of arithmetic: PyTorch rounds only the last one's result.
        """
        dtypes = {tensor.dtype for tensor in self._traced((args, kwargs))}
        target = torch.float32
        is_pointwise = isinstance(answer, torch.Tensor) and _is_pointwise(function)
        has_floats = any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
        if is_pointwise and not has_floats and answer.is_floating_point():
            target = answer.dtype
        else:
            name = _name(function)
            in_steps = name in _IN_STEPS
            if is_pointwise and answer.dtype in _HALVES and name not in _OF_ITS_DTYPE:
                # PyTorch does not round the Python numbers of most operators to 16 bits.
                has_number = any(isinstance(leaf, float) for leaf in pytree.tree_leaves((args, kwargs)))
                in_steps = in_steps or has_number or name not in _IN_ONE_STEP
            dtypes = dtypes & _HALVES if in_steps else set()
        if not dtypes:
            return args, kwargs

        def cast(tensor: Any) -> Any:
            return self._with_shadow(function, tensor, tensor._shadow.to(target)) if tensor.dtype in dtypes else tensor

        with _plain():
            return pytree.tree_map_only(self.type, cast, (args, kwargs))

    def _wrapping(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Returns the arguments of a cast of floats to integers of 8 or 16 bits with int64 in place of the floats. So
        340.0 becomes 84 in uint8, as in PyTorch; JAX makes 255 of it.
        """
        if _name(function) not in ("_to_copy", "copy_") or kwargs.get("dtype", args[0].dtype) not in _NARROW:
            return args
        position = int(_name(function) == "copy_")  # `copy_(target, source)`, but `_to_copy(source)`
        with _plain():
            source = args[position]
            shadow = args[position]._shadow
            whole = self._with_shadow(function, source, shadow.long()) if shadow.is_floating_point() else source
        return *args[:position], whole, *args[position + 1 :]

    def _check_dtypes(self, function: Any, args: Any, kwargs: Any) -> None:
        """Calls an operator on the host with zeros, and raises PyTorch's error if the dtypes are not supported."""
        try:
            self._ask_pytorch(function, args, kwargs, "cpu")
        except _REFUSALS as error:
            if _NO_DTYPE.search(str(error)):
                raise

    def _call_with_out(self, function: Any, returning: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator's overload without `out` (`returning`), and copies the results into the `out` tensors."""
        given, outs = dict(kwargs), {}
        for name in _names(function):
            # An argument for a result, mostly `out`.
            if name not in _names(returning):
                outs[name] = given.pop(name)
        tensors = pytree.tree_leaves(outs)
        # PyTorch would resize the shadows themselves.
        with _plain():
            shadows = pytree.tree_map_only(self.type, lambda tensor: tensor._shadow.detach(), outs)
        self._ask_pytorch(function, args, given | shadows, "meta")  # raises where PyTorch refuses such an `out`
        answer = self._ask_pytorch(returning, args, given, "meta")
        # An operator with an argument `dtype`, such as `sum`, computes in the dtype of `out`.
        dtype = tensors[0].dtype
        if "dtype" in _names(returning) and getattr(answer, "dtype", dtype) != dtype:
            given["dtype"] = dtype
        with self.environment._dispatch_mode:
            values = pytree.tree_leaves(returning(*args, **given))
        for tensor, value in zip(tensors, values, strict=True):
            if tensor.shape != value.shape:
                self._resize(function, tensor, value)
            self(torch.ops.aten.copy_.default, (), (tensor, value), {})
        first, *others = outs.values()
        return (first, *others) if others else first

    def _resize(self, function: Any, tensor: Any, value: Any) -> None:
        """Gives an `out` tensor the size of the value to write there; refuses a tensor whose memory others share."""
        memory = self._memory(tensor)
        whose = memory.whose or ("a tensor that others share" if len(memory.alive()) > 1 else "")
        if whose:
            raise DiffersError(operator_name(function), f"resizes {whose}")
        shape, strides = value.shape, value.stride()
        device = self.shadow(value).device
        with _plain():
            tensor.resize_(shape).as_strided_(shape, strides)
            tensor._shadow = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
        tensor._array = None if is_known(tensor) else value._elem
        del tensor._memory

    def _lowered(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator's lowering. An in-place operator without a lowering, or of a 16-bit dtype in which PyTorch
        does not compute, gets the result of its functional form (`add` for `add_`) as its new value.
        """
        not_in_place = functional(function)
        if not_in_place is None or not (_is_pointwise(function) and args[0].dtype in _HALVES):
            try:
                return self.lower(function, types, args, kwargs)
            except self.not_found:
                if not_in_place is None:
                    raise
        args[0]._elem = self(not_in_place, types, args, kwargs)._elem
        return args[0]

    def with_values(self, tensor: Any) -> Any:
        """Returns a host tensor as a traced tensor with known values; traced tensors and those on meta as they are."""
        is_host = not isinstance(tensor, self.type) and not tensor.is_meta
        return self.tensor(value=None, shadow=tensor) if is_host else tensor

    def _with_shadow(self, function: Any, result: Any, shadow: torch.Tensor) -> Any:
        """Returns a lowering's result with PyTorch's dtype and strides; refuses another shape than PyTorch's."""
        from torchax.ops import mappings

        value, dtype = result._elem, mappings.t2j_dtype(shadow.dtype)
        if tuple(value.shape) != tuple(shadow.shape):
            how = f"returns the shape {list(value.shape)}, PyTorch's {list(shadow.shape)}"
            raise DiffersError(operator_name(function), how)
        if value.dtype != dtype:
            value = value.astype(dtype)
        return self.tensor(value, shadow)

    def tensor(self, value: Any, shadow: torch.Tensor) -> Any:
        """Returns a traced tensor with a value and a shadow. Beside a host shadow the value is None: see `_value`."""
        with _plain(), torch.inference_mode(False):
            tensor = torch.Tensor._make_wrapper_subclass(
                self.type, shadow.shape, shadow.stride(), shadow.storage_offset(), dtype=shadow.dtype, device=_META
            )
        tensor._env, tensor._array, tensor._shadow = self.environment, value, shadow
        self.made.append(weakref.ref(tensor))
        return tensor

    def _memory(self, tensor: Any) -> Storage:
        """Returns the `Storage` of a traced tensor, which its views share; makes one if it has none."""
        self.shadow(tensor)  # makes it if it is missing
        memory: Storage | None = tensor.__dict__.get("_memory")
        if memory is None:
            memory = tensor._memory = Storage(None if is_known(tensor) else tensor._elem, layout(tensor._shadow))
            tensor._path = ()
            memory.add(tensor, ())
        return memory

    def span(self, tensors: Sequence[Any]) -> Any:
        """Returns a tensor of one dim: the smallest part of their memory in which all these tensors lie."""
        memory = self._memory(tensors[0])
        start, order = memory.layout
        value = memory.value.transpose(order).ravel()  # the storage from its element `start` on
        with _plain():
            shadow = torch.empty(start + value.size, dtype=_empty(value).dtype, device="meta")
            ends = [extent(tensor._shadow) for tensor in tensors]
            first = min(start for start, _ in ends) // shadow.itemsize
            last = -(-max(end for _, end in ends) // shadow.itemsize)  # rounded up
            return self.tensor(value[first - start : last - start], shadow[first:last])

    def _as_strided_of_memory(self, tensor: Any, size: Any, strides: Any, offset: int | None = None) -> tuple[Any, ...]:
        """Returns the arguments of `as_strided` (tensor, size, strides, offset) for the tensor that is a view's whole
        memory: PyTorch counts elements there, not in the view.
        """
        start = self.shadow(tensor).storage_offset() if offset is None else offset
        if offset is not None:
            # Raises if the tensor's own offset is not known.
            _offset(tensor)
        while (whole := tensor.__dict__.get("_whole")) is not None:
            tensor = whole
        if not is_known(tensor) and layout(self.shadow(tensor)) != (0, [*range(tensor.ndim)]):
            raise DiffersError("aten.as_strided.default", "counts elements in memory that is not contiguous")
        return tensor, size, strides, start

    def _note_view(self, tensor: Any, function: Any, args: Any, kwargs: Any, item: int, shapes: Any) -> None:
        """Gives a result the memory of an argument if their shadows share memory: then it is a view of the argument."""
        traced = self._traced((args, kwargs))
        base = next((base for base in traced if _memory_of(base) == _memory_of(tensor)), None)
        if base is None:
            return
        memory = self._memory(base)
        view = self._view(base, function, args, kwargs, item, shapes)
        tensor._memory, tensor._path, tensor._whole = memory, (*base._path, view), base
        memory.add(tensor, tensor._path)

    def _view(self, base: Any, function: Any, args: Any, kwargs: Any, item: int, shapes: Any) -> View:
        """Returns the `View` that an operator makes of its argument `base`: how values go forward and back.

        The view does not refer to `base`, whose memory refers to the view. PyTorch refers to the bases of some views,
        too, and Python cannot collect such a cycle.
        """
        shadow = base._shadow
        args, kwargs = pytree.tree_map(lambda leaf: shadow if leaf is base else leaf, (args, kwargs))

        def forward(value: Any) -> Any:
            """Returns the view's array for an array of the base, from the operator's lowering."""
            whole = self.tensor(value, shadow.to("meta"))
            new = pytree.tree_map(lambda leaf: whole if leaf is shadow else leaf, (args, kwargs))
            return pytree.tree_leaves(self.lower(function, (), *new))[item]._elem

        def selected(numbers: torch.Tensor) -> torch.Tensor:
            """Returns the same view of a host tensor."""
            with _plain():
                new = pytree.tree_map(lambda leaf: numbers if leaf is shadow else leaf, (args, kwargs))
                chosen: torch.Tensor = pytree.tree_leaves(function(*new[0], **new[1]))[item]
                return chosen

        def backward(whole: Any, part: Any) -> Any:
            """Returns the base's new array, from its old one and the view's new one."""
            if function is torch.ops.aten.view.dtype:
                return self.lower(function, (), (self.tensor(part, _empty(part)), shadow.dtype), {})._elem
            enter = inverse(_name(function), shadow, args, kwargs, item, shapes, selected)
            if enter is None:
                raise RuntimeError("more than one element of the written-to tensor refers to one place in memory")
            return enter(whole, part)

        return View(forward, backward)

    def _write(self, function: Any, tensor: Any, value: Any) -> None:
        """Writes a value to a tensor and to its memory, and updates all tensors there; refuses memory of the caller."""
        from torchax.ops import mappings

        if is_known(tensor):
            # So that `_forget` takes the values before the write from the shadow.
            tensor._array = None
            self._forget(tensor)
        dtype = mappings.t2j_dtype(tensor._shadow.dtype)
        if value.dtype != dtype:
            value = value.astype(dtype)
        if tuple(value.shape) != tuple(tensor._shadow.shape):
            import jax.numpy as jnp

            # PyTorch refuses such a write. A lowering of torchax's makes it to a tensor that is its own.
            if value.ndim > tensor._shadow.ndim:
                tensor._array, tensor._shadow = value, _empty(value)
                return
            value = jnp.broadcast_to(value, tuple(tensor._shadow.shape))
        memory = self._memory(tensor)
        if memory.whose:
            raise DiffersError(operator_name(function), f"writes to {memory.whose}, and its caller would not see that")
        tensor._array = value
        memory.write(tensor._path, value)
        for sharing, path in memory.alive():
            if sharing is not tensor:
                sharing._array = memory.read(path)

    def _forget(self, tensor: Any) -> None:
        """Gives all tensors of a memory shadows on meta, before the devices write there: the host loses the values."""
        memory = self._memory(tensor)
        with _plain():
            count = tensor._shadow.untyped_storage().nbytes() // tensor._shadow.itemsize
            root = torch.empty(count, dtype=tensor._shadow.dtype, device="meta")
        # The whole tensor is alive: its views refer to it.
        for sharing, path in memory.alive():
            if not path:
                memory.value = sharing._elem
        for sharing, _ in memory.alive():
            value, old = sharing._elem, sharing._shadow
            with _plain():
                if old.dtype == root.dtype:
                    sharing._shadow = root.as_strided(old.shape, old.stride(), old.storage_offset())
                else:
                    sharing._shadow = old.to("meta")
            sharing._array = value

    def _call_inplace_view(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator as `unsqueeze_`, which makes its tensor another view of its memory; refuses new memory."""
        tensor = args[0]
        not_in_place = functional(function)
        if not_in_place is None:
            raise self.not_found(f"Operator with name {function.name()} has no lowering")
        memory = self._memory(tensor)
        if memory.whose:
            raise DiffersError(operator_name(function), f"reshapes {memory.whose}, and its caller would not see that")
        new = self(not_in_place, types, args, kwargs)
        if "_memory" not in new.__dict__:
            raise DiffersError(operator_name(function), "gives a tensor another size, which is no view of its memory")
        with _plain():
            function(*args, **kwargs)
        self._rebind(tensor, new)
        return tensor

    def _rebind(self, tensor: Any, new: Any) -> None:
        """Gives a tensor the memory and the values of another one."""
        before = self._memory(tensor)
        memory = self._memory(new)
        before.tensors = [(ref, path) for ref, path in before.tensors if ref() is not tensor]
        tensor._array, tensor._shadow = new.__dict__.get("_array"), new._shadow
        tensor._memory, tensor._path = memory, new._path
        if new.__dict__.get("_whole") is not tensor:
            tensor._whole = new.__dict__.get("_whole")
        memory.add(tensor, new._path)


def _check_overlap(written: Sequence[Any], traced: Sequence[Any]) -> None:
    """Refuses a write to a tensor that overlaps another argument in part: PyTorch does not define the result."""
    with _plain():
        if any(overlap(tensor._shadow, other._shadow) for tensor in written for other in traced):
            raise RuntimeError("an operator reads some elements of the written-to tensor as others: pass it a clone()")


def _empty(array: Any) -> torch.Tensor:
    """Returns an empty tensor on meta with an array's dtype and shape: its shadow."""
    from torchax.ops import mappings

    with _plain():
        return torch.empty(array.shape, dtype=mappings.j2t_dtype(array.dtype), device="meta")


def is_known(tensor: Any) -> bool:
    """Returns whether the host has the values of a traced tensor, as it depends on no input of the network."""
    shadow = tensor.__dict__.get("_shadow")
    return shadow is not None and shadow.device.type == "cpu"


def attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the attributes that upstream has given to a tensor."""
    return {name: value for name, value in vars(tensor).items() if name not in _OF_ENGINE}


def on_host(value: Any) -> Any:
    """Returns PyTorch's host tensor in place of a traced tensor with known values; anything else as it is."""
    has_values = isinstance(value, torch.Tensor) and is_known(value)
    return vars(value)["_shadow"] if has_values else value


def live_tensors() -> list[Any]:
    """Returns the tensors of the last trace that depend on the network's inputs and that something still refers to. It
    first deletes the engine's own references to them, the notes on shared memory: call it after the trace.
    """
    from torchax import default_env

    made = default_env().dispatch.made  # weak references
    for reference in made:
        if (tensor := reference()) is not None and not is_known(tensor):
            for name in ("_memory", "_path", "_whole", "_cast"):
                vars(tensor).pop(name, None)
    tensor = None  # or the last of them would seem to be referred to
    # Again, as tensors to which the notes alone referred are gone by now.
    return [tensor for reference in made if (tensor := reference()) is not None and not is_known(tensor)]


def views(tensors: list[Any], bases: Mapping[tuple[str, Any], Any]) -> dict[int, tuple[str, Any, Section]]:
    """Finds the outputs of a trace that lie in the memory of an input, a weight or another output.

    Args:
        tensors: The outputs. If some overlap, and none has all others in it, a tensor of their memory is appended.
        bases: Inputs and weights, by kind and number or name. Each is the whole of its memory.

    Returns:
        By the output's number: kind (of `bases`, or `output`) and number of the tensor that it lies in, and its
        `Section` there.
    """
    sections: dict[int, tuple[str, Any, Section]] = {}
    inputs = {_memory_of(base): key for key, base in bases.items() if not base.__dict__.get("_path")}
    groups: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault(_memory_of(tensor), []).append(number)
    for memory, numbers in groups.items():
        if memory in inputs:
            (kind, whole), base = inputs[memory], bases[inputs[memory]]
        elif len(numbers) > 1:
            sharing = [tensors[number] for number in numbers]
            index = _container(sharing)
            kind, whole = "output", numbers[index] if index < len(numbers) else len(tensors)
            # No output has all the others in it.
            if whole == len(tensors):
                tensors.append(sharing[0]._env.dispatch.span(sharing))
            base = tensors[whole]
        else:
            continue
        for number in numbers:
            part = tensors[number]._shadow
            if tensors[number] is not base and lies_in(part, base._shadow):
                sections[number] = kind, whole, place(part, base._shadow)
    return sections


def _memory_of(tensor: Any) -> int:
    """Returns a number that is equal for traced tensors with shared memory: the address of their shadows' storage."""
    return int(tensor._env.dispatch.shadow(tensor).untyped_storage()._cdata)


def _container(tensors: Sequence[Any]) -> int:
    """Returns the index of the tensor that contains all others, or `len(tensors)` if there is none. If no two overlap,
    or their memory has gaps, it is the index of the largest.
    """
    shadows = [tensor._shadow for tensor in tensors]
    largest = max(range(len(shadows)), key=lambda n: (shadows[n].is_contiguous(), shadows[n].nbytes))
    ends = sorted(map(extent, shadows))
    is_apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    inside = shadows[largest].is_contiguous() and all(lies_in(shadow, shadows[largest]) for shadow in shadows)
    return largest if inside or is_apart or tensors[0]._memory.layout is None else len(tensors)


def narrow(tensor: Any) -> Any:
    """Returns the 16-bit tensor from which a float32 tensor was cast; any other tensor itself."""
    source, value = tensor.__dict__.get("_cast", (None, None))
    if value is None or value is not tensor._elem or source.dtype.name not in ("bfloat16", "float16"):
        return tensor
    return tensor._env.dispatch.tensor(source, _empty(source)) if value.dtype.name == "float32" else tensor


def with_strides(tensor: Any, strides: Sequence[int]) -> Any:
    """Returns an argument of the network with the strides of the caller's tensor: upstream may ask for them."""
    dispatch = tensor._env.dispatch
    with _plain():
        shadow = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
    new = dispatch.tensor(tensor._elem, shadow)
    dispatch._memory(new).whose = dispatch._memory(tensor).whose
    return new


def freeze(tree: Any, whose: str) -> None:
    """Makes the engine refuse writes to tensors of a tree: the caller of the network would not see them. `whose` are
    words for the tensors, such as `an argument of the network`. If it is empty, writes are allowed again.
    """
    from torchax import default_env

    dispatch = default_env().dispatch
    for tensor in dispatch._traced(tree):
        memory = dispatch._memory(tensor)
        memory.whose, memory.is_callers = whose, True


def spoil(tensor: Any, why: str | Exception) -> None:
    """Makes the engine refuse reads of a tensor whose value is not PyTorch's. `why` is the error, or its text."""
    tensor._env.dispatch._memory(tensor).stale = why


def check_read(values: Any, function: Any = None) -> None:
    """Raises if a tree, which the operator `function` reads, has a tensor that `spoil` has marked."""
    for tensor in pytree.tree_leaves(values):
        memory = tensor.__dict__.get("_memory") if isinstance(tensor, torch.Tensor) else None
        if memory is not None and memory.stale:
            reader = "a tensor" if function is None else operator_name(function)
            raise memory.stale if isinstance(memory.stale, Exception) else DiffersError(reader, memory.stale)


def stamp(tensor: Any) -> tuple[Any, int]:
    """Returns a mark of a tensor's content, an object and a number: a write, also through a view, changes the mark."""
    if not hasattr(tensor, "_env"):
        return None, tensor._version
    memory = tensor._env.dispatch._memory(tensor)
    return memory.value, memory.written


def share_memory(tensor: Any, other: Any) -> bool:
    """Returns whether two traced tensors lie in one memory, as views of each other do."""
    if not hasattr(tensor, "_env") or not hasattr(other, "_env"):
        return False
    dispatch = tensor._env.dispatch
    return dispatch._memory(tensor) is dispatch._memory(other)


def was_written(tensor: Any) -> bool:
    """Returns whether something was written to a tensor's memory."""
    memory = tensor.__dict__.get("_memory")
    return memory is not None and memory.written


def _written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns the arguments that an operator writes to, by its schema: of `add_(x, y)` that is `[x]`."""
    if not isinstance(function, torch._ops.OpOverload):
        return []
    given = {**dict(zip(_names(function), args, strict=False)), **kwargs}
    written: list[Any] = []
    for argument in function._schema.arguments:
        # By its schema a normalization always writes to its running statistics. It does so only in training.
        is_only_read = argument.name.startswith("running_") and not given.get("training")
        if argument.alias_info is not None and argument.alias_info.is_write and not is_only_read:
            written.append(given.get(argument.name))
    return written


def functional(function: Any) -> Any:
    """Returns the functional form of an in-place operator, such as `add` for `add_`; None if there is none."""
    if not isinstance(function, torch._ops.OpOverload) or not _name(function).endswith("_"):
        return None
    packet = getattr(torch.ops.aten, _name(function).rstrip("_"), None)
    return None if packet is None else _overload(packet, function._schema.arguments)


def _overload(packet: Any, arguments: Sequence[Any]) -> Any:
    """Returns an operator's overload that takes arguments with these names and types; None if there is none."""
    wanted = [(argument.name, str(argument.type)) for argument in arguments]
    for name in packet.overloads():
        overload = getattr(packet, name)
        if [(argument.name, str(argument.type)) for argument in overload._schema.arguments] == wanted:
            return overload
    return None


@functools.cache
def _without_out(function: Any) -> Any:
    """Returns the overload of an operator with `out` that returns the results instead; None if there is none."""
    if not isinstance(function, torch._ops.OpOverload):
        return None
    arguments = function._schema.arguments
    inputs = [argument for argument in arguments if not argument.is_out]
    return None if len(inputs) == len(arguments) else _overload(function.overloadpacket, inputs)


def _names(function: Any) -> list[str]:
    return [argument.name for argument in function._schema.arguments]


def _is_pointwise(function: Any) -> bool:
    return torch.Tag.pointwise in getattr(function, "tags", ())


def _name(function: Any) -> str:
    """Returns the name of a function, or of an operator without its overload: `add_` for `aten.add_.Tensor`."""
    if isinstance(function, torch._ops.OpOverload):
        return str(function._schema.name).rpartition("::")[2]
    return str(getattr(function, "__name__", ""))


def _is_engine_device(value: Any) -> bool:
    """Returns whether an argument names the devices of the engine, `"jax:0"`. Meta counts as such, for shadows."""
    if isinstance(value, torch.device):
        return value.type in ("jax", "privateuseone", "meta")
    return isinstance(value, str) and value.partition(":")[0] in ("jax", "privateuseone")
