"""Attention by `jax.nn.dot_product_attention`: cuDNN's flash attention on NVIDIA GPUs, and XLA's on any platform.

Both mask with a large negative number, not with minus infinity: a query that sees no key would get the mean of all
values. Its output is set to 0 here, as eager PyTorch has it. Padded keys and values are set to 0 beforehand, since
neither implementation says what it does with NaN under a weight of 0.

Shapes: B batch, H heads, S queries, T keys, D features of a head. `jax.nn` wants the heads third: BSHD.

Source: limits of cuDNN as `jax/_src/cudnn/fused_attention_stablehlo.py` (`check_is_flash_attention`) and
`jax.nn.dot_product_attention` check them, jax 0.10.2. `cudnn` has not been run on a GPU by us.
"""

from __future__ import annotations

import contextlib
from typing import Literal

import jax
import jax.numpy as jnp

from torchport.errors import AttentionError
from torchport.kernels.attention.plain import Window, limits, sees_a_key, without_padding

CUDNN_DTYPES = ("bfloat16", "float16")
CUDNN_HEAD_SIZE = {"before Hopper": 128, "Hopper or later": 256}
"""Largest head size, by the GPU's generation."""


def attention(
    q_BHSD: jax.Array,
    k_BHTD: jax.Array,
    v_BHTD: jax.Array,
    *,
    lengths_B: jax.Array | None,
    scale: float,
    causal: bool,
    window: Window | None,
    implementation: Literal["cudnn", "xla"],
) -> jax.Array:
    """Returns softmax(scale * q k^T) v by cuDNN or by XLA.

    `dispatch.attention` describes the other arguments and the result.

    Args:
        q_BHSD: Queries [B, H, S, D]; bfloat16 or float32 for `xla`, bfloat16 or float16 for `cudnn`.
        implementation: `cudnn` or `xla`; `xla` needs memory for B * H * S * T scores.
    """
    queries, keys = q_BHSD.shape[2], k_BHTD.shape[2]
    left, right = limits(causal, window)
    if implementation == "cudnn":
        _check_cudnn(q_BHSD, left, right)
    # A side without a limit becomes a window as long as the sequence.
    far = max(queries, keys)
    local = (far if left is None else left, far if right is None else right)
    precise = jax.default_matmul_precision("highest") if q_BHSD.dtype == jnp.float32 else contextlib.nullcontext()
    with precise:
        o_BSHD = jax.nn.dot_product_attention(
            jnp.swapaxes(q_BHSD, 1, 2),
            jnp.swapaxes(without_padding(k_BHTD, lengths_B), 1, 2),
            jnp.swapaxes(without_padding(v_BHTD, lengths_B), 1, 2),
            scale=scale,
            is_causal=right == 0,
            # Neither implementation defines the result for zero valid keys; it is overwritten below.
            key_value_seq_lengths=None if lengths_B is None else jnp.maximum(lengths_B, 1).astype(jnp.int32),
            local_window_size=None if left is None and right in (0, None) else local,  # full and causal need none
            implementation=implementation,
        )
    o_BHSD = jnp.swapaxes(o_BSHD, 1, 2)
    seen = sees_a_key(queries, keys, lengths_B, causal, window)
    return jnp.where(seen, o_BHSD, jnp.zeros_like(o_BHSD))


def _check_cudnn(q_BHSD: jax.Array, left: int | None, right: int | None) -> None:
    """Refuses a call that cuDNN cannot compute: by dtype, head size and window, and then by this machine's GPU."""
    size, dtype = q_BHSD.shape[3], str(q_BHSD.dtype)
    if dtype not in CUDNN_DTYPES:
        fact = f"queries are {dtype}"
        remedy = f"cuDNN takes {' or '.join(CUDNN_DTYPES)}; 'plain' and 'xla' take float32"
        raise AttentionError("attention 'cudnn'", fact, remedy, dtype=dtype)
    largest = max(CUDNN_HEAD_SIZE.values())
    if size % 8 or size > largest:
        fact = f"the head size is {size}"
        remedy = f"cuDNN takes multiples of 8 up to {largest}; 'plain' and 'xla' take any"
        raise AttentionError("attention 'cudnn'", fact, remedy, head_size=size)
    if right != 0 and (left, right) != (None, None):
        fact = f"the window is {left} to the left and {right} to the right"
        remedy = "cuDNN limits the left side only beside a right side of 0, or causal; 'plain' and 'xla' limit any"
        raise AttentionError("attention 'cudnn'", fact, remedy, window=(left, right))
    # The GPU comes last: the checks above need none.
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise AttentionError(
            "attention 'cudnn'",
            f"JAX has no CUDA device here, its platform is '{jax.default_backend()}'",
            "Choose 'splash' or 'splash_transposed' on a TPU, 'plain' anywhere, or install torchport[cuda] by a GPU",
            platform=jax.default_backend(),
        ) from error
    capability = devices[0].compute_capability
    hopper = tuple(int(part) for part in capability.split(".")) >= (9, 0)
    largest = CUDNN_HEAD_SIZE["Hopper or later" if hopper else "before Hopper"]
    if size > largest:
        fact = f"the head size is {size} on a GPU of compute capability {capability}"
        raise AttentionError("attention 'cudnn'", fact, f"cuDNN takes at most {largest} there", head_size=size)
