"""Changes upstream code as it is imported; can say what it did, prove that it was used, and undo it.

    entries = patch.read(folder, ["torchax", "diffusers/hunyuan_video15"])
    with patch.applied(entries, stage="denoise") as ledger:
        ...
        ledger.check_called()

The modules, from the first step to the last: `entry` and `reading` (YAML); `versions`, `replacement`, `slice`,
`source`, `signature`, `scope`, `checks`, `fingerprint`, `drift` (what is checked before anything changes); `hook` (the
import system); `target`, `change`, `counted` (one change of live code); `pattern`, `flow`, `rewrite`, `recompile` (the
edit of a function); `holders`, `naming`, `capture`, `aliases` (who holds the original); `ledger`, `trace`; and
`group`, where they meet. None of them imports torch, jax or an upstream.
"""

from torchport.patch.applied import applied as applied
from torchport.patch.declared.entry import Entry as Entry
from torchport.patch.declared.entry import schema as schema
from torchport.patch.declared.reading import read as read
from torchport.patch.declared.reading import upstreams as upstreams
from torchport.patch.ledger import Ledger as Ledger
from torchport.patch.ledger import Op as Op
from torchport.patch.trace import Trace as Trace
