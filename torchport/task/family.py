"""Loads a card's family: the Python file beside its patches that has the stages of its model."""

from __future__ import annotations

import sys
from types import ModuleType

from torchport.config import Document
from torchport.config.card import Card
from torchport.config.pack import Pack
from torchport.errors import ReplacementError
from torchport.patch.declared import replacement
from torchport.stages.family import Stage
from torchport.stages.module import NAMES as NAMES
from torchport.stages.module import check_complete


def family(pack: Pack, card: Card, document: Document) -> ModuleType:
    """Returns the module of a card's family. It is loaded from its path, as the functions of patches are.

    Raises:
        UnknownNameError: The pack has no such file.
        ReplacementError: The file does not load, lacks a name, or imports an upstream before its patches are applied.
    """
    place = document.place(["family"])
    file = pack.family_file(card, place)
    path = f"patches/{card.family}.py"
    before = set(sys.modules)
    module = replacement.module_of(file, file.parent.name, place)
    packages = [*card.upstream, *([card.checkout.package] if card.checkout else [])]
    early = [name for name in packages if name in sys.modules and name not in before]
    if early:
        fact = f"'{path}' imports '{early[0]}' when it is loaded, before its patches are applied"
        raise ReplacementError(place, fact, "Import it inside the functions", family=card.family)
    check_complete(card.family, vars(module), place)
    stages = module.STAGES
    if not isinstance(stages, tuple) or not stages or not all(isinstance(stage, Stage) for stage in stages):
        fact = f"STAGES in '{path}' is no tuple of Stages"
        raise ReplacementError(place, fact, f"It must be {NAMES['STAGES']}", family=card.family)
    return module
