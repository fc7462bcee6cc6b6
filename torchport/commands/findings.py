"""What `torchport check` finds, what it tried, and the exit code that follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torchport.errors import DRIFT_EXIT_CODE, PatchError, TorchportError
from torchport.patch import Entry

# Exit codes: the lowest of 3, 4 and 5 that occurs; 1 for findings of any other sort.
_CODES = {"TP207": DRIFT_EXIT_CODE, "TP203": 4, "TP204": 4, "TP206": 5}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    id: str  #: The diagnostic id, as TP207.
    place: str  #: `file:line`.
    text: str  #: What is wrong and what to do, without the place.
    patch: str  #: The entry's id, or empty for a whole file.
    step: str  #: schema, card, job, targets, drift, apply, undo or called.
    #: For drift, what accepting it would change in the lock file, as a unified diff.
    review: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """One step that was tried on one patch or file, with or without a finding."""

    place: str  #: `file:line`.
    patch: str  #: The entry's id, or empty for a whole file.
    step: str  #: As a finding's.
    skipped: str = ""  #: Why it was not tried after all; empty where it was.


@dataclasses.dataclass
class Report:
    """All that was found, and all that was tried."""

    findings: list[Finding] = dataclasses.field(default_factory=list)  #: What is wrong.
    cases: list[Case] = dataclasses.field(default_factory=list)  #: What was tried.

    def try_entry(self, entry: Entry, step: str, skipped: str = "") -> None:
        """Notes that a step of an entry is tried, or why it is not."""
        self.cases.append(Case(entry.place, entry.id, step, skipped))

    def add(self, error: TorchportError, step: str, patch: str = "", review: str = "") -> None:
        """Adds a refusal as a finding, once, and each other mistake that it was found with."""
        findings = [of_error(one, step, patch, review) for one in (error, *error.others)]
        self.findings += [finding for finding in findings if finding not in self.findings]

    def extend(self, other: Report) -> None:
        """Adds what another report has and this one has not; a patch is tried in more than one process."""
        self.findings = [*dict.fromkeys([*self.findings, *other.findings])]
        self.cases = [*dict.fromkeys([*self.cases, *other.cases])]


def of_error(error: TorchportError, step: str, patch: str = "", review: str = "") -> Finding:
    """Returns a refusal as a finding."""
    return Finding(error.id, error.place, f"{error.fact}. {error.remedy}.", patch, step, review)


def of_entry(entry: Entry, text: str, step: str) -> Finding:
    """Returns what no error of its own says about an entry."""
    return Finding(PatchError.id, entry.place, text, entry.id, step)


def exit_code(findings: Iterable[Finding]) -> int:
    """Returns 0 if there are none, else the lowest of 3 drift, 4 late or aliased, 5 not called; 1 for any other."""
    codes = {_CODES.get(finding.id, 1) for finding in findings}
    return min(codes - {1}, default=1) if codes else 0
