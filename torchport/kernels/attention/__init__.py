"""Attention in pure JAX, with one door: `attention.dispatch.attention`."""
