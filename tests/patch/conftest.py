"""The patch engine's tests leave frozen what pytest froze: whoever holds their originals is younger."""

import pytest

from torchport.patch.live import holders


@pytest.fixture(autouse=True)
def left_frozen(request, monkeypatch):
    """A walk over the million objects of torch and JAX takes most of a test's time. One test is about that walk."""
    if "thawed" not in request.fixturenames:
        monkeypatch.setattr(holders, "thaw", lambda: None)


@pytest.fixture
def thawed():
    """Asks for the walk over all objects."""
