"""Ties a traced program to the patches that it was traced under."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchport.errors import StaleTraceError
from torchport.patch.declared.entry import Entry
from torchport.patch.declared.replacement import file_digest

# What is in force now, by id: the digest of each patch. `group` keeps it.
in_force: dict[str, str] = {}


def digest(entry: Entry) -> str:
    """Returns the hash of an entry and of the file that its function stands in."""
    text = json.dumps(entry.model_dump(mode="json", exclude={"why", "reported", "until"}), sort_keys=True)
    return hashlib.sha256((text + file_digest(entry)).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Trace:
    """The patches that a program was traced under, and how often each had been called by then.

    Keep it with the compiled program, in memory or, through `as_json`, beside an executable on disk.

    Attributes:
        digests: The hash of every patch, by id.
        rows: The ledger's rows when the program had been traced.
    """

    digests: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]

    def check(self) -> None:
        """Refuses to trace the program again under other patches.

        Raises:
            StaleTraceError: A patch of the trace is not in force, or not the same; or there is another one.
        """
        for key in sorted(self.digests.keys() | in_force.keys()):
            then, now = self.digests.get(key), in_force.get(key)
            if then != now:
                what = "is not in force" if now is None else "was not in force then" if then is None else "has changed"
                fact = f"A program is traced again, and '{key}' {what}"
                remedy = "Trace it inside the same 'with patch.applied(...)', or compile it anew"
                raise StaleTraceError("trace", fact, remedy, patch=key)

    def as_json(self) -> dict[str, Any]:
        """Returns the trace as plain data."""
        return {"digests": dict(self.digests), "rows": [dict(row) for row in self.rows]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trace:
        """Returns what `as_json` made."""
        return cls(dict(data["digests"]), [dict(row) for row in data["rows"]])
