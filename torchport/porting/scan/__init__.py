"""What in a codebase will not port to TPU, found in its source alone: nothing of it is imported, and neither is torch.

    report = scanning.scan(path, ["pkg.model:Network"], folders)

From the first step to the last: `syntax` (a file as events), `codebase` (the files, and who is meant by a name in
them), `detect` (the findings of a function), `facts` (what is kept of it when its syntax tree is dropped), `reach`
(what an entry leads to), and `scanning`, where they meet what shipped patches take care of. Here stands what each
finding means, and the report, with all that a draft needs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Literal

import yaml

Effort = Literal["none", "minutes", "hours", "days"]
"""How long the patch takes: none is torchport's own, minutes a line, hours a function, days a kernel."""
Draft = Literal["replace", "rewrite", "stub", "wrap", "op", ""]
"""The kind of patch to begin with; empty where no patch would help."""


@dataclasses.dataclass(frozen=True)
class ScanRule:
    """A kind of finding."""

    id: str  #: Such as PS401.
    kind: str  #: Its name, such as `branch`.
    title: str
    why: str
    do: str
    effort: Effort  #: How long that takes.
    wrong: str  #: An example that is found.
    right: str  #: The same, ported.
    draft: Draft = ""
    stops: bool = False  #: Whether it stops a port for certain; else it may be harmless, and a trace shows it.
    in_code: bool = True  #: Whether it is in code that was read; else it is about a file that could not be.


FILE = Path(__file__).with_name("rules.yaml")
RULES = {id: ScanRule(id, **fields) for id, fields in yaml.safe_load(FILE.read_text(encoding="utf-8")).items()}
"""The rules by id."""
BY_KIND = {rule.kind: rule.id for rule in RULES.values()}
"""The ids of the rules by their kind."""


Reach = Literal["path", "training", "off", "unknown"]
"""How the entry leads there: in inference (`path`), in training alone, not at all (`off`); `unknown` without entry."""

Guard = Literal["", "process-group", "cuda"]
"""What must be there for a finding's code to run; empty if it runs without a process group and without CUDA."""
GUARDS: dict[Guard, str] = {"process-group": "only under a process group", "cuda": "only on CUDA"}
"""The guards in words."""

Verdict = Literal["covered", "rewrite", "unknown"]
"""What is left to do: nothing (`covered` by a patch), a patch to write (`rewrite`), or to trace and see (`unknown`)."""


@dataclasses.dataclass(frozen=True)
class ScanFinding:
    """One thing in the source that will not port."""

    rule: str  #: The id that `torchport explain` knows, such as PS401.
    file: str  #: Its file, as it can be opened from the current folder.
    line: int
    target: str  #: What a patch would change, as `pkg.mod:Qual.name`; `pkg.mod:<module>` for what runs at import.
    text: str
    uses: str = ""  #: The name in full of what is called or imported, as `torch.cuda.set_device`; empty for none.
    reach: Reach = "unknown"
    covered_by: tuple[str, ...] = ()
    #: Whether it is certain. It is not where an import may fail, or where a value is only assumed to be a tensor.
    sure: bool = True
    only: Guard = ""  #: What a condition around the code asks for.

    @property
    def meaning(self) -> ScanRule:
        return RULES[self.rule]

    @property
    def kind(self) -> str:
        return self.meaning.kind

    @property
    def name(self) -> str:
        return self.target.partition(":")[2]

    @property
    def verdict(self) -> Verdict:
        """What is to be done about it."""
        if self.covered_by:
            return "covered"
        return "rewrite" if self.meaning.stops and self.sure else "unknown"


@dataclasses.dataclass(frozen=True)
class Absent:
    """A package that the path imports and this environment has not."""

    package: str
    file: str
    line: int


@dataclasses.dataclass(frozen=True)
class ScanReport:
    findings: tuple[ScanFinding, ...]  #: By file and line; files that could not be read are among them.
    files: int
    lines: int
    entries: tuple[str, ...] = ()  #: The entries, as `pkg.mod:Class`; none if none was named.
    #: The packages that are imported without condition, are not installed here, and that no stub stands for. Packages
    #: of kernels are findings.
    absent: tuple[Absent, ...] = ()

    @property
    def wanted(self) -> Reach:
        """The reach of the findings that a port meets."""
        return "path" if self.entries else "unknown"

    def unpatched(self) -> list[ScanFinding]:
        """Returns the findings that a port meets without any guard, and that need a patch which is not there."""
        chosen = [finding for finding in self.findings if finding.verdict == "rewrite" and not finding.only]
        return [finding for finding in chosen if finding.reach == self.wanted]

    def count(self) -> str:
        """Returns a sentence that counts the findings on the inference path, or outside training without an entry."""
        reaches = ["path"] if self.entries else ["path", "off", "unknown"]
        chosen = [finding for finding in self.findings if finding.reach in reaches and finding.meaning.in_code]
        where = "on the inference path" if self.entries else "outside training"
        numbers: Counter[str] = Counter(finding.only or finding.verdict for finding in chosen)
        needs = "needs" if numbers["rewrite"] == 1 else "need"
        text = f"{len(chosen)} {where}: {numbers['covered']} covered, {numbers['rewrite']} {needs} a rewrite"
        guarded = [f", {numbers[only]} {words}" for only, words in GUARDS.items() if numbers[only]]
        return f"{text}, {numbers['unknown']} unknown{''.join(guarded)}"
