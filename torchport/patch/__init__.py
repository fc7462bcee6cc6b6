"""Changes upstream code as it is imported. It can say what it did, prove that it was used, and undo it.

    entries = patch.read(folder, ["torchax", "diffusers/hunyuan_video15"])
    with patch.applied(entries, stage="denoise") as ledger:
        ...
        ledger.check_called()

The folders, from the first step to the last: `declared` (the entries), `rewriting` (the edit of a function), `source`
(what upstream's source says), `live` (the objects of this process). Above them stand `ledger` (what became of each
patch), `aliases` (who holds the original) and `patch_set`, where they meet. None of them imports torch, jax or an
upstream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchport.patch.declared import Entry as Entry
from torchport.patch.declared import schema as schema
from torchport.patch.declared.reading import Folders as Folders
from torchport.patch.declared.reading import read as read
from torchport.patch.declared.reading import upstreams as upstreams

if TYPE_CHECKING:
    from torchport.patch.ledger import Ledger as Ledger
    from torchport.patch.ledger import Op as Op
    from torchport.patch.ledger import Trace as Trace
    from torchport.patch.patch_set import applied as applied


def __getattr__(name: str) -> Any:
    """Imports `applied` and the ledger's classes at their first use: code that only lists entries does not wait."""
    if name not in ("applied", "Ledger", "Op", "Trace"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from torchport.patch import ledger, patch_set

    return getattr(patch_set if name == "applied" else ledger, name)
