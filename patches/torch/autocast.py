"""CUDA autocast on a machine that has no CUDA: the dtypes that `torch.autocast("cuda")` gives, op by op.

torch keeps the state itself (`torch.set_autocast_enabled`, thread by thread) and knows no tensor here to apply it to.
So two things listen to that state in its place: a function mode while PyTorch runs eagerly, and torchax's own function
mode where that is in force, eagerly or while JAX traces.

A tensor is eligible if it is floating, is not float64, and lies on the device that stands in for CUDA: any device in
eager PyTorch, torchax's where torchax is in force. Left alone, as on CUDA, are in-place ops and those with `out=`.

Source: PyTorch 2.13, ATen/autocast_mode.h (the lists, `cached_cast`, `prioritize`) and aten/src/ATen/autocast_mode.cpp.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree

from torchport.errors import PatchError, TooLateError

# AT_FORALL_LOWER_PRECISION_FP: all inputs are cast to the region's dtype.
LOWER = """
_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
"""

# AT_FORALL_FP32: all inputs are cast to float32.
FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss
cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""

# AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: in float32, unless a dtype is given.
FLOAT32_UNLESS_TOLD = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm"

# AT_FORALL_PROMOTE: all inputs are cast to the widest of theirs. `cat` and `stack` promote by themselves.
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"

# What torch composes in C++ of ops of the lists, where no mode sees the parts: the policy that the parts amount to.
SAME_AS = {
    "__matmul__": "matmul",
    "linalg_matmul": "matmul",
    "cross_entropy_loss": "nll_loss",
    "nll_loss_nd": "nll_loss",
    "square": "pow",
    "linalg_norm": "norm",
    "norm_except_dim": "norm",
    "arccos": "acos",
    "arcsin": "asin",
    "arctan2": "atan2",
    **{f"special_{name}": name for name in ("log1p", "expm1", "erfinv", "softmax", "log_softmax", "logsumexp")},
}

# The same, where no single policy amounts to the parts.
REFUSED = """
lstm gru rnn_tanh rnn_relu inner linalg_matrix_power matrix_power trapezoid trapz cumulative_trapezoid sum_to_size
pairwise_distance linear_cross_entropy vander cov corrcoef
"""

# Python functions that torchax lowers whole.
WHOLE = {"interpolate": "upsample_nearest2d"}

# The names under which torch's Python functions ask whether they are overridden.
OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class State(threading.local):
    """Whether this thread is inside an op that has had its inputs cast: what it calls is its own affair."""

    busy = False


state = State()


def without_cuda() -> bool:
    """Returns whether this machine has no CUDA device."""
    return not torch.cuda.is_available()


def listening() -> bool:
    """Returns whether this thread is in an enabled region of CUDA autocast, and not inside an op."""
    return torch.is_autocast_enabled("cuda") and not state.busy


@contextlib.contextmanager
def within_op() -> Iterator[None]:
    """Marks that an op runs."""
    state.busy = True
    try:
        yield
    finally:
        state.busy = False


Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
Eligible = Callable[[torch.Tensor], bool]
Policy = Callable[[list[torch.dtype]], torch.dtype]


def to_widest(dtypes: list[torch.dtype]) -> torch.dtype:
    """Returns the dtype that ops of the promoting list run in.

    Raises:
        RuntimeError: Where CUDA's raises: a float16 tensor in a bfloat16 region, before any float32 one.
    """
    lower = widest = torch.get_autocast_dtype("cuda")
    for dtype in dtypes:
        if torch.float32 in (dtype, widest):
            widest = torch.float32
        elif dtype != lower:
            raise RuntimeError(f"CUDA autocast to {lower} does not promote {dtype}. Cast it first, as on CUDA.")
    return widest


def same_for_all(name: str) -> Policy:
    """Returns the policy of casting to one dtype: `float32`, or the region's."""
    if name == "float32":
        return lambda dtypes: torch.float32
    return lambda dtypes: torch.get_autocast_dtype("cuda")


def banned(dtypes: list[torch.dtype]) -> torch.dtype:
    """Raises as CUDA does: under autocast, its input has lost what the logarithm needs."""
    raise RuntimeError("binary_cross_entropy is unsafe under autocast, on CUDA too. Use its form with logits.")


def refused(name: str) -> Policy:
    """Returns the policy that refuses an op, rather than run it in other dtypes than on CUDA."""

    def refuse(dtypes: list[torch.dtype]) -> torch.dtype:
        fact = f"{name} runs under CUDA autocast, which casts its parts one by one, and here nothing sees them"
        raise PatchError("torch.autocast", fact, "Put it in a region with enabled=False, and cast its inputs yourself")

    return refuse


POLICIES: dict[str, Policy] = {
    **dict.fromkeys(LOWER.split(), same_for_all("lower")),
    **dict.fromkeys(FLOAT32.split(), same_for_all("float32")),
    **dict.fromkeys(FLOAT32_UNLESS_TOLD.split(), same_for_all("float32")),
    **dict.fromkeys(WIDEST.split(), to_widest),
    **{name: refused(name) for name in REFUSED.split()},
    "binary_cross_entropy": banned,
}
TOLD = frozenset(FLOAT32_UNLESS_TOLD.split())


@functools.lru_cache(maxsize=4096)
def op_name(function: Any) -> str:
    """Returns the name of the op that a function of torch's stands for, as the lists have it; "" for none."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        full = function._schema.name if isinstance(function, torch._ops.OpOverload) else function._qualified_op_name
        space, _, name = full.partition("::")
        return name if space == "aten" else ""
    name = getattr(under_check(function), "__name__", "")
    return SAME_AS.get(name, name)


def under_check(function: Any) -> Any:
    """Returns what is under the decorator of operators like `__rpow__`, which asks whether they are overridden."""
    code = getattr(function, "__code__", None)
    asks = code is not None and "handle_torch_function" in code.co_names
    return function.__wrapped__ if asks and hasattr(function, "__wrapped__") else function


@functools.lru_cache(maxsize=4096)
def body_of(function: Any) -> types.FunctionType | None:
    """Returns the Python function that one of torch's is, where it can be run without its question; else None.

    What torch writes in Python is no op: on CUDA each of its calls meets autocast on its own.
    """
    inner = under_check(function)
    if not isinstance(inner, types.FunctionType):
        return None
    asked = [name for name in OVERRIDE_CHECKS if name in inner.__code__.co_names]
    if "super" in inner.__code__.co_names:  # its C namesake would come back to it
        return None
    free = inner is not function or (asked and all(name in inner.__globals__ for name in asked))
    return inner if free else None


def unchecked(body: types.FunctionType) -> Callable[..., Any]:
    """Returns a function without its question whether somebody overrides it, to which a mode always answers yes."""
    names = {**body.__globals__, **dict.fromkeys(OVERRIDE_CHECKS, lambda *args: False)}
    free = types.FunctionType(body.__code__, names, body.__name__, body.__defaults__, body.__closure__)
    free.__kwdefaults__ = body.__kwdefaults__
    return free


def casted(name: str, args: Any, kwargs: Any, eligible: Eligible, cast: Cast) -> tuple[Any, Any]:
    """Returns an op's arguments in the dtypes that autocast gives them.

    Args:
        name: The op.
        args: Its positional arguments.
        kwargs: Its named arguments.
        eligible: Whether a tensor lies on the device that stands in for CUDA.
        cast: Casts a tensor.
    """
    policy = POLICIES.get(name)
    leaves, tree = _pytree.tree_flatten((args, kwargs))
    told = name in TOLD and any(isinstance(leaf, torch.dtype) for leaf in leaves)
    if policy is None or told or kwargs.get("out") is not None:
        return args, kwargs
    chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and eligible(leaf)]
    chosen = [i for i in chosen if leaves[i].dtype.is_floating_point and leaves[i].dtype != torch.float64]
    dtype = policy([leaves[i].dtype for i in chosen]) if chosen else None
    for i in chosen:
        if leaves[i].dtype != dtype:
            leaves[i] = cast(leaves[i], dtype)
    return _pytree.tree_unflatten(leaves, tree)


class CudaAutocast(TorchFunctionMode):
    """Does in eager PyTorch what `torch.autocast("cuda")` does on CUDA; where torchax is in force it leaves it to that.

    It has no state of its own: it asks torch at each call whether autocast is enabled, and for which dtype.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not listening() or any(is_torchax(mode) for mode in _get_current_function_mode_stack()):
            return func(*args, **kwargs)
        body = body_of(func)
        if body is not None:
            with self:
                return unchecked(body)(*args, **kwargs)
        args, kwargs = casted(op_name(func), args, kwargs, lambda tensor: True, torch.Tensor.to)
        with within_op():
            return func(*args, **kwargs)


def through_torchax(original, self, func, types, args=(), kwargs=None):
    """Does the same in torchax's function mode, for torchax's tensors.

    A Python function for which torchax has a lowering is an op: it is cast by its name, and stays whole.
    """
    kwargs = kwargs or {}
    if not listening():
        return original(self, func, types, args, kwargs)
    whole = func in self.env._ops or func in self.env._decomps
    body = None if whole else body_of(func)
    if body is not None:
        with self:
            return unchecked(body)(*args, **kwargs)
    with within_op():
        cast = functools.partial(_to, original, self)
        name = "" if _is_area(func, args, kwargs) else WHOLE.get(op_name(func), op_name(func))
        args, kwargs = casted(name, args, kwargs, is_torchax, cast)
        return original(self, func, types, args, kwargs)


def _is_area(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a call is `interpolate(mode="area")`, which pools: the one mode that is in no list."""
    return func is torch.nn.functional.interpolate and "area" in (kwargs.get("mode"), *args[3:4])


def _to(original: Any, mode: Any, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    return original(mode, torch.Tensor.to, (), (tensor, dtype), {})


def is_torchax(thing: Any) -> bool:
    """Returns whether something is torchax's: a tensor, a view, a mode."""
    return type(thing).__module__.partition(".")[0] == "torchax"


def made(original, self, device_type, dtype=None, enabled=True, cache_enabled=None):
    """Makes a region that is enabled if it was asked to be, where torch would disable it for want of CUDA.

    A network that asks one of its tensors for the device's name gets that of what stands in for CUDA.
    """
    device_type = "cuda" if device_type in ("meta", "jax") else device_type
    if device_type != "cuda":
        original(self, device_type, dtype, enabled, cache_enabled)
        return
    original(self, device_type, dtype, False, cache_enabled)
    self._enabled = enabled
    self._stands_in = True


def entered(original, self):
    """Enters a region; one for CUDA listens as well.

    Raises:
        TooLateError: It was made before the patches were in force, when torch disabled it.
    """
    if self.device == "cuda" and not vars(self).get("_stands_in"):
        fact = "A region of CUDA autocast was made before its patch was in force, and torch has disabled it"
        raise TooLateError("torch.autocast", fact, "Import the module with this decorator under the patches")
    if self.device != "cuda":
        return original(self)
    _push_mode(CudaAutocast())
    try:
        return original(self)
    except BaseException:
        _leave()
        raise


def left(original, self, exc_type, exc_val, exc_tb):
    """Leaves a region, by an exception too; a generator may leave it after modes that were entered later."""
    try:
        return original(self, exc_type, exc_val, exc_tb)
    finally:
        if self.device == "cuda":
            _leave()


def _leave() -> None:
    above = []
    while not isinstance(mode := _pop_mode(), CudaAutocast):
        above.append(mode)
    for mode in reversed(above):
        _push_mode(mode)


def cast_inputs(original, value, device_type, dtype):
    """Casts the inputs of `torch.amp.custom_fwd(cast_inputs=...)`: those on the device that stands in for CUDA."""
    if device_type == "cuda" and isinstance(value, torch.Tensor):
        device_type = value.device.type
    return original(value, device_type, dtype)


def _by_dynamo():
    """Whether Dynamo asks: it saves and restores the state around a compilation, with no mode on the stack."""
    frame, names = sys._getframe(1), []
    while frame is not None and len(names) < 6:
        names.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return any(name.startswith(("torch._guards", "torch._dynamo")) for name in names)


def switched(original, *args, **kwargs):
    """Switches autocast on or off; CUDA's on only where something listens.

    Raises:
        PatchError: Nothing does, and the call would be without effect.
    """
    given = (*args, *kwargs.values())
    on = any(value is True for value in given)
    cuda = "cuda" in given or len(given) == 1  # the form with one argument is the old one, CUDA's
    listens = any(isinstance(mode, CudaAutocast) for mode in _get_current_function_mode_stack())
    if on and cuda and not listens and not _by_dynamo():
        fact = "set_autocast_enabled('cuda', True) is called outside every region of torch.autocast('cuda')"
        raise PatchError("torch.autocast", fact, "Enter torch.autocast('cuda') instead, which brings what listens")
    return original(*args, **kwargs)
