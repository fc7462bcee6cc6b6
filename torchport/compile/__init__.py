"""A stage's network becomes programs on a mesh.

`network` builds them, and `preflight` refuses beforehand what cannot run.
"""

from torchport.compile.eager import Eager, plainly
from torchport.compile.program import Compiled, Network

__all__ = ["Compiled", "Eager", "Network", "plainly"]
