"""A run from its first stage to its video: the path, its journal, resuming, series, profiles."""
