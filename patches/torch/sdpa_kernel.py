"""A choice of attention kernels that restricts nothing."""

from __future__ import annotations

import contextlib


@contextlib.contextmanager
def any_kernel(*backends, **settings):
    """Lets attention run by whatever kernel there is."""
    yield {}
