"""A TPU that is not there: its description, the bundles of its kernels, scheduled programs, cost."""
