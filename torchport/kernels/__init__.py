"""Attention and convolution: one door each, a plain form and a fast one for each platform."""
