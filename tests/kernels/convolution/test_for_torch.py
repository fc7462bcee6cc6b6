"""Latents spread with padding for the kernel, and what is made of them without it."""

import jax
import jax.numpy as jnp
import numpy
import pytest

from torchport import engine, patch, shard
from torchport.kernels.attention import dispatch as attention
from torchport.kernels.convolution import for_torch


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """torchax beside this torch needs its patches, as everything else does."""
    with patch.applied(patch.read(pack.patches, ["torchax"])):
        yield


@pytest.mark.parametrize("paired", [False, True])
def test_padding_of_frames_rows_and_columns_is_cropped(paired):
    """Three frames of two rows and five columns over eight devices: none of them is divided."""
    latents, sizes = numpy.arange(2 * 3 * 2 * 5, dtype="float32").reshape(1, 2, 3, 2, 5), []

    def there_and_back(x):
        with for_torch.spread(x, paired=paired) as (padded, form):
            sizes.append(padded.shape)
            return for_torch.crop(padded * 2, form)

    mesh = shard.make_mesh({"sp": 8}, jax.devices())
    with jax.set_mesh(mesh), attention.context(attention.Context(interpret=True)):
        run = jax.jit(lambda x: engine.call_torch(there_and_back, x))
        assert numpy.array_equal(run(jnp.asarray(latents)), 2 * latents)
    [(_, _, frames, height, width)] = sizes
    assert frames > 3 and height * width > 2 * 5 and height * width % 8 == 0
