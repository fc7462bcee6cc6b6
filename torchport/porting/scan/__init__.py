"""What in a codebase will not port to TPU, found in its source alone: nothing of it is imported, and neither is torch.

    report = scan.scan(path, ["pkg.model:Network"], folders)

From the first step to the last: `syntax` (a file as events), `codebase` (the files, and who is meant by a name in
them), `detect` (the findings of a function), `facts` (what is kept of it when its syntax tree is dropped), `reach`
(what an entry leads to), and `scanning`, where they meet what shipped patches take care of. `finding` says what each
finding means, and holds all that a draft needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchport.porting.scan.finding import ScanFinding as ScanFinding
    from torchport.porting.scan.finding import ScanReport as ScanReport
    from torchport.porting.scan.scanning import scan as scan


def __getattr__(name: str) -> Any:
    """Imports what scans when it is first asked for: whoever only explains a rule does not wait for it."""
    if name == "scan":
        from torchport.porting.scan import scanning

        return scanning.scan
    if name in ("ScanFinding", "ScanReport"):
        from torchport.porting.scan import finding

        return getattr(finding, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
