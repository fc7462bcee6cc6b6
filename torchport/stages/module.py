"""The module of a family: the names that its file must have. Who only reads the file needs no torch for them."""

from __future__ import annotations

from collections.abc import Collection

from torchport.errors import ReplacementError

NAMES = {
    "STAGES": "a tuple of `torchport.stages.family.Stage`, in the order in which they run",
    "TAKES_IMAGE": "whether --image may be given",
    "VARIANTS": "the names of the networks in one checkpoint; () for one",
    "batch": "the number of conditions that go through the network at a guidance scale",
    "arrange_tiny": "what writes the tiny checkpoint in a layout of upstream's own; None for diffusers' layout",
}
"""What every family has, and what it is."""


def check_complete(family: str, names: Collection[str], place: str) -> None:
    """Refuses a family that lacks a name.

    Args:
        family: As the card names it, `folder/file`.
        names: The names that its file has.
        place: Where the card names it.

    Raises:
        ReplacementError: All that it lacks.
    """
    missing = [name for name in NAMES if name not in names]
    if missing:
        remedy = "; ".join(f"{name}, {NAMES[name]}" for name in missing)
        fact = f"'patches/{family}.py' has no {', '.join(missing)}"
        raise ReplacementError(place, fact, f"Add {remedy}", family=family)
