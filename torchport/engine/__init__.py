"""The engine under a port: torchax, behind a few functions.

No other folder of torchport imports torchax, so that it can be exchanged. It is imported when a function is called:
its patches must be in place by then.
"""

from __future__ import annotations

import contextlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchport.engine.aliasing import Section as Section
from torchport.engine.aliasing import extent as extent
from torchport.engine.aliasing import lies_in as lies_in
from torchport.engine.conformance import DiffersError as DiffersError
from torchport.engine.conformance import Operators as Operators
from torchport.engine.conformance import watching as watching
from torchport.engine.tracked import attributes as attributes
from torchport.engine.tracked import begin_trace as begin_trace
from torchport.engine.tracked import check_read as check_read
from torchport.engine.tracked import freeze as freeze
from torchport.engine.tracked import live_tensors as live_tensors
from torchport.engine.tracked import narrow as narrow
from torchport.engine.tracked import on_host as on_host
from torchport.engine.tracked import share_memory as share_memory
from torchport.engine.tracked import spoil as spoil
from torchport.engine.tracked import stamp as stamp
from torchport.engine.tracked import views as views
from torchport.engine.tracked import was_written as was_written
from torchport.engine.tracked import with_strides as with_strides


def call_jax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a JAX function with torchax tensors, and returns its results as torchax tensors."""
    from torchax import interop

    return interop.call_jax(function, *args, **kwargs)


def call_kernel(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls, as `call_jax` does, a JAX function that has only 32-bit types. Wider arguments become 32-bit."""
    import jax

    def in_32_bits(value: Any) -> Any:
        is_wide = isinstance(value, jax.Array) and value.dtype.name in _IN_32_BITS
        return value.astype(_IN_32_BITS[value.dtype.name]) if is_wide else value

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(in_32_bits, (args, kwargs))
        with jax.enable_x64(False):
            return function(*args, **kwargs)

    return call_jax(call, *args, **kwargs)


_IN_32_BITS = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def call_torch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a PyTorch function with JAX arrays, and returns its results as JAX arrays. `jax.jit` may trace the call."""
    from torchax import interop

    with wide():
        return interop.call_torch(function, *args, **kwargs)


def wide() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which JAX has 64-bit types, as PyTorch has: for the trace of a program, not its lowering."""
    import jax

    context: contextlib.AbstractContextManager[Any] = jax.enable_x64(True)
    return context


def is_traced(value: object) -> bool:
    """Returns whether a value is a torchax tensor; False as long as torchax is not imported."""
    module = sys.modules.get("torchax.tensor")
    return module is not None and isinstance(value, module.Tensor)


def constant(tensor: Any) -> Any:
    """Returns a host tensor as a torchax tensor whose values are constants of the program."""
    import torchax

    environment = torchax.default_env()
    dispatch = environment.__dict__.get("dispatch")  # there during a trace: it keeps the values known
    return environment.to_xla(tensor) if dispatch is None else dispatch.with_values(tensor)


def array(tensor: Any) -> Any:
    """Returns a tensor of the engine as a JAX array, without copying."""
    return tensor._elem


def missing_operator(error: BaseException) -> str | None:
    """Returns the operator that has no lowering, `torch.ops.aten:name.overload`; "" without a name; else None."""
    module = sys.modules.get("torchax.tensor")
    if module is None or not isinstance(error, module.OperatorNotFound):
        return None
    name = re.search(r"(\w+)::(\w+)(\.\w+)?", str(error))
    return f"torch.ops.{name[1]}:{name[2]}{name[3] or '.default'}" if name else ""


def difference(error: BaseException) -> tuple[str, str] | None:
    """Returns the text of a `DiffersError` (the operator and its difference) and the remedy; None for other errors."""
    return (str(error), error.cure) if isinstance(error, DiffersError) else None


def is_host_tensor(error: BaseException) -> bool:
    """Returns whether an exception says that an operator gets a host tensor beside a torchax or meta tensor."""
    return isinstance(error, AssertionError | RuntimeError) and _HOST_TENSOR.search(str(error)) is not None


def is_traced_value(error: BaseException) -> bool:
    """Returns whether an exception says that code asks for the value of a tensor that is traced, or on meta."""
    import jax

    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
        return True
    if isinstance(error, jax.errors.TracerIntegerConversionError | jax.errors.NonConcreteBooleanIndexError):
        return True
    kinds = (NotImplementedError, RuntimeError, TypeError)
    return isinstance(error, kinds) and _NO_VALUE.search(str(error)) is not None


_HOST_TENSOR = re.compile(r"Expect a Tensor or a View but got|Tensor on device \w+ is not on the expected device")
_NO_VALUE = re.compile(r"\b[Mm]eta tensors?\b|Meta Tensors|Meta tensors|meta device type tensor|register_meta")
"""Messages of torchax and torch, from torchax/tensor.py of torchax 0.0.13 and torch/_meta_registrations.py of 2.13."""


@contextlib.contextmanager
def operators(replacements: Mapping[str, Any]) -> Iterator[None]:
    """Registers lowerings of torch functions and ATen overloads in torchax while the context lasts. They are given by
    target: `torch.nn.functional:scaled_dot_product_attention`, `torch.ops.aten:add.Tensor`.
    """
    if not replacements:
        yield
        return
    import torchax

    environment = torchax.default_env()
    before = dict(environment._ops)
    try:
        for target, function in replacements.items():
            environment.override_op_definition(_operator(target), function)
        yield
    finally:
        # torchax offers no way to remove a lowering, so the whole table is restored.
        environment._ops.clear()
        environment._ops.update(before)


def _operator(target: str) -> Any:
    """Returns a torch function or an ATen overload by its target; see `operators`."""
    # Python cannot import `torch.ops.aten`.
    return pkgutil.resolve_name(target.replace("torch.ops.aten:", "torch:ops.aten."))
