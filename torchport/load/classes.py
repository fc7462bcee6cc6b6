"""The classes that a model card names, imported; what does not exist is refused with the nearest name."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Iterable
from typing import Any

from torchport.errors import UnknownNameError, nearest


def class_of(path: str, place: str | None = None) -> Any:
    """Returns the class that a card names as `package.module:Class`; patches must be in place by now.

    Args:
        path: As the card has it.
        place: Where it is written; by default the path itself.

    Raises:
        UnknownNameError: There is no such module, or it has no such name.
    """
    module, _, name = path.partition(":")
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise _no_module(module, error.name, place or path) from error
    try:
        return getattr(home, name)
    except AttributeError as error:
        if name in dir(home):  # its own import fails
            raise
        fact = f"'{module}' has no class '{name}'"
        raise UnknownNameError(place or path, fact, _closest(name, dir(home)), name=name) from error


def _no_module(module: str, missing: str, place: str) -> UnknownNameError:
    """Returns the refusal of a module that does not exist, with the nearest one of its package."""
    package, _, name = missing.rpartition(".")
    if not package:
        fact = f"There is no package '{missing}' for '{module}'"
        return UnknownNameError(place, fact, "Install it, or mend the name", name=missing)
    paths = getattr(sys.modules[package], "__path__", ())
    names = [submodule.name for submodule in pkgutil.iter_modules(paths)]
    return UnknownNameError(place, f"'{package}' has no module '{name}'", _closest(name, names), name=missing)


def _closest(name: str, names: Iterable[str]) -> str:
    """Returns a remedy with the names that are like one; a package has too many to list all."""
    public = sorted(other for other in names if not other.startswith("_"))
    close = difflib.get_close_matches(name, public, n=3, cutoff=0.6)
    if not close:
        return nearest(name, public) if len(public) <= 10 else f"None of its {len(public)} names is like it"
    return f"The nearest {'are' if len(close) > 1 else 'is'} {', '.join(map(repr, close))}"
