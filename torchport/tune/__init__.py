"""Tiles of attention kernels, ranked by the compiler's own schedule or by time on a TPU."""
