"""What Python imports before anything else in a process that `torchport.processes.script` has started."""

import os
import sys

if __name__ == "sitecustomize":  # and not where somebody imports all modules of torchport
    # The torchport that this file belongs to, and no other: its modules then come from its own folder.
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120
    added = root not in sys.path
    if added:
        sys.path.insert(0, root)
    from torchport.processes import script

    if added:
        sys.path.remove(root)
    script.start()
