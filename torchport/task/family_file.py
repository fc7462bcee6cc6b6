"""Loads a card's family: the Python file beside its patches that has the stages of its model, and its builders."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torchport.config import Document
from torchport.config.card import GENERIC, Card, check_call
from torchport.config.pack import Pack
from torchport.errors import ReplacementError, nearest
from torchport.files.folder import as_named
from torchport.patch.declared import replacement
from torchport.stages import NAMES as NAMES
from torchport.stages import check_complete, diffusers_pipeline
from torchport.stages.family import Settings, Stage


def family(pack: Pack, card: Card, document: Document) -> ModuleType:
    """Returns the Python module of a card's family: loaded from its file, or made from the card for `family:
    diffusers`.

    Raises if the file, a builder in it or a name that a family must have is missing, or if a stage is wrong.
    """
    place = document.place(["family"])
    check_call(card, document)
    if card.family == GENERIC:
        return diffusers_pipeline.family(card, document.place(["call"]))
    file = pack.family_file(card, place)
    module = _load(file, card, place)
    for name, component in card.components.items():
        if component.build is not None:
            build_place = document.place(["components", name, "build"])
            _load(file.with_name(component.build.partition(":")[0]), card, build_place)
            builder(module, component.build, build_place)  # for its error: there may be no such function
    check_complete(as_named(file), vars(module), place, variants=bool(getattr(module, "VARIANTS", ())))
    stages = module.STAGES
    if not isinstance(stages, tuple) or not stages or not all(isinstance(stage, Stage) for stage in stages):
        fact = f"STAGES in '{as_named(file)}' is no tuple of Stages"
        raise ReplacementError(place, fact, f"It must be {NAMES['STAGES']}", family=card.family)
    for stage in stages:
        _check_stage(stage, stages, card, f"Stage '{stage.name}' in '{as_named(file)}'", place)
    return module


def _check_stage(stage: Stage, stages: Sequence[Stage], card: Card, title: str, place: str) -> None:
    """Refuses a stage that names an unknown component, setting, stage or output, or whose function takes other
    arguments. Errors call the stage `title`.
    """
    earlier = [other.name for other in stages[: stages.index(stage)]]
    settings = [field.name for field in dataclasses.fields(Settings)]
    known: dict[str, Collection[str]] = dict.fromkeys(("parts", "meta", "network"), card.components)
    known |= {"uses": settings, "needs": earlier, "outputs": stage.outputs}
    for field, known_names in known.items():
        value = getattr(stage, field)
        if isinstance(value, str) and field != "network":
            fact = f"{title} has '{value}' as '{field}', which is text"
            raise ReplacementError(place, fact, f"Write a tuple: ({value!r},)", family=card.family)
        if field == "network":
            value = (value,) if value else ()
        for name in value:
            if name not in known_names:
                fact = f"{title} names '{name}' in '{field}'"
                raise ReplacementError(place, fact, nearest(name, known_names), family=card.family)
    if stage.name == "denoise" and "denoise_first" in earlier and "denoise_first" not in stage.needs:
        fact = f"{title} does not name 'denoise_first' in 'needs', and would begin anew"
        raise ReplacementError(place, fact, "Add it: the steps of the one stage go on in the other", family=card.family)
    try:
        inspect.signature(stage.run).bind_partial("parts", "call", "settings", "steps")
    except TypeError as error:
        fact = f"{title} has a function that cannot be called: {error}"
        raise ReplacementError(place, fact, "Write it as run(parts, call, settings, steps, **inputs)") from error


def _load(file: Path, card: Card, place: str) -> ModuleType:
    """Returns the module of a file among the patches; raises if the file is absent, or imports an upstream at once."""
    if not file.is_file():
        known = [other.name for other in file.parent.glob("*.py")]
        fact = f"There is no file '{file.name}' beside the family '{card.family}'"
        raise ReplacementError(place, fact, nearest(file.name, known), family=card.family)
    before = set(sys.modules)
    module = replacement.module_of(file, file.parent.name, place)
    packages = [*card.upstream, *([card.checkout.package] if card.checkout else [])]
    imported = [name for name in packages if name in sys.modules and name not in before]
    if imported:
        fact = f"'{as_named(file)}' imports '{imported[0]}' when it is loaded, before its patches are applied"
        raise ReplacementError(place, fact, "Import it inside the functions", family=card.family)
    return module


def builder(family: ModuleType, reference: str, place: str) -> Callable[..., Any]:
    """Returns the function that a reference `file.py:function` names, in a file beside the family's, or raises."""
    name, _, function = reference.partition(":")
    file = Path(str(family.__file__)).with_name(name)
    module = replacement.module_of(file, file.parent.name, place)
    if not callable(vars(module).get(function)):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ReplacementError(place, f"'{name}' has no function '{function}'", nearest(function, known))
    result: Callable[..., Any] = vars(module)[function]
    return result
