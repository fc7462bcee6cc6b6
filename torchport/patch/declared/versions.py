"""Says whether an entry fits the upstream that is installed, and whether it is needed there."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from importlib.machinery import PathFinder

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from torchport.errors import ReplacementError, UnsupportedError
from torchport.patch.declared import Entry
from torchport.patch.declared.replacement import Explained, load


@functools.lru_cache
def installed(distribution: str) -> str | None:
    """Returns the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def outcome(entry: Entry, probe: bool = True) -> str | None:
    """Returns in words why an entry is not needed; None if it has to be applied. Without `probe` the entry's probe is
    not run, and its fault is assumed. Raises UnsupportedError if the upstream that is installed is outside `fits`, and
    not outside `needed`.
    """
    ranges = {name: text for name, text in (entry.needed or {}).items() if name != "probe"}
    unaffected = _outside(ranges)
    # Where a version is unknown, only `fits` can say whether the patch was written for this upstream.
    is_known = all(installed(name) is not None for name in ranges)
    misfit = None if unaffected and is_known else _outside(entry.fits)
    if misfit:
        fact = f"'{entry.id}' does not fit: {misfit}"
        raise UnsupportedError(entry.place, fact, "Review it against that version and widen 'fits'", patch=entry.id)
    if entry.stub is not None and PathFinder.find_spec(entry.stub.package) is not None:
        return f"{entry.stub.package} is installed"
    if unaffected:
        return f"{unaffected}; delete the entry when no supported upstream needs it"
    if probe and entry.needed and "probe" in entry.needed and not _run_probe(entry, entry.needed["probe"]):
        return f"{entry.needed['probe']} finds no fault"
    return None


def _outside(ranges: Mapping[str, str]) -> str | None:
    """Returns in words the first distribution that is outside its range of versions; None if there is none."""
    for name, text in ranges.items():
        if text == "*":
            continue
        version = installed(name)
        if version is None:
            return f"{name} {text} is asked for, and no version of it is known"
        try:
            # Development and local versions count, too: 2.13.0+cpu is in ==2.13.0.
            is_inside = SpecifierSet(text).contains(Version(version), prereleases=True)
        except InvalidVersion:
            is_inside = False
        if not is_inside:
            return f"{name} is {version}, not {text}"
    return None


def _run_probe(entry: Entry, reference: str) -> bool:
    probe = load(entry, reference)

    def failed(error: BaseException) -> ReplacementError:
        fact = f"The probe '{reference}' of '{entry.id}' fails: {type(error).__name__}: {error}".rstrip(".")
        return ReplacementError(entry.place, fact, "Mend the probe", patch=entry.id)

    with Explained(failed):
        answer = probe()
    if not isinstance(answer, bool):
        fact = f"The probe '{reference}' of '{entry.id}' answers {answer!r}"
        raise ReplacementError(entry.place, fact, "Return True where the patch is needed, else False", patch=entry.id)
    return answer
