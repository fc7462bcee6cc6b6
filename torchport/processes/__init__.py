"""Other processes, and what a process of torchport's may import: see `child`, `git` and `path`."""
