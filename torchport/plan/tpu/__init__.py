"""A TPU that is not there: its description, the bundles of a kernel, and programs as its compiler scheduled them."""
