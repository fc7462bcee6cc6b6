"""."""

from torchport.compile.program import Compiled, Eager, operators, plainly

__all__ = ["Compiled", "Eager", "operators", "plainly"]
