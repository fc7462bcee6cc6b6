"""What a model's family offers: stages as plain verbs over tensors, and a recorder of their calls.

Here are the names that the file of a family must have. Who only reads the file needs no torch for them.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torchport.config.card import GENERIC, Card
from torchport.config.pack import Pack
from torchport.errors import ReplacementError

NAMES = {
    "STAGES": "a tuple of `torchport.stages.family.Stage`, in the order in which they run",
    "TAKES_IMAGE": "whether --image may be given; 'always' if it must be",
    "VARIANTS": "the names of the networks in one checkpoint; () for one",
    "batch": "the number of conditions that go through the network at a guidance scale",
    "arrange_tiny": "what writes the tiny checkpoint in a layout of upstream's own; None where the card says it all",
}
"""What every family has, and what it is."""
WITH_VARIANTS = {"task": "the function of a variant's name that returns what its network makes: 't2v' or 'i2v'"}
"""What a family with VARIANTS has beside these."""


def file_of(pack: Pack, card: Card, place: str) -> Path:
    """Returns the file of a card's family: in a pack, or torchport's own for `family: diffusers`."""
    if card.family == GENERIC:
        return Path(__file__).with_name("diffusers_pipeline.py")
    return pack.family_file(card, place)


def check_complete(file: str, names: Collection[str], place: str, variants: bool) -> None:
    """Raises if a family's file, which defines `names`, lacks one that each family must define, such as `STAGES`."""
    needed = {**NAMES, **(WITH_VARIANTS if variants else {})}
    missing = [name for name in needed if name not in names]
    if missing:
        remedy = "; ".join(f"{name}, {needed[name]}" for name in missing)
        raise ReplacementError(place, f"'{file}' has no {', '.join(missing)}", f"Add {remedy}", file=file)
