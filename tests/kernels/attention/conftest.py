"""What tests of kernels that are interpreted on a CPU share."""

import jax
import pytest


@pytest.fixture(scope="module")
def plainly_compiled():
    """Has XLA compile for the CPU without most of its optimisations.

    Each shape is a program of its own that runs once or twice: optimising it takes far longer than running it, and
    what a kernel says, in the order in which it says it, is computed either way.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
