"""A run from its first stage to its video: the path, its journal, resuming, series, profiles."""

from torchport.run.journey import Summary
from torchport.run.path import run, staged

__all__ = ["Summary", "run", "staged"]
