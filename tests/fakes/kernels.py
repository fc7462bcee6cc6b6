"""Pallas kernels for processes that compile them."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def product(rows=256, scratch=8, name="product", calls=1, limit=None):
    """A product of bfloat16 [rows, 512] and [512, 256], in steps of 256: `build` for the child process."""

    def kernel(a_ref, b_ref, o_ref, total, spare):
        @pl.when(pl.program_id(1) == 0)
        def _():
            total[...] = jnp.zeros_like(total)
            spare[...] = jnp.zeros_like(spare)

        total[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = (total[...] + spare[0:1, 0:1]).astype(o_ref.dtype)

    call = pl.pallas_call(
        kernel,
        name=name,
        grid=(rows // 256, 2),
        in_specs=[pl.BlockSpec((256, 256), lambda i, j: (i, j)), pl.BlockSpec((256, 256), lambda i, j: (j, 0))],
        out_specs=pl.BlockSpec((256, 256), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16),
        scratch_shapes=[pltpu.VMEM((256, 256), jnp.float32), pltpu.VMEM((scratch, 128), jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
    )
    operands = [jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)]
    return lambda a, b: [call(a * n, b) for n in range(1, calls + 1)], operands
