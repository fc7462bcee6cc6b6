"""Convolutions of video decoders: parts of a frame on each device, chunks of time one after the other.

`for_torch` is the door for patches. Shapes: B batch, C channels in, D channels out, T frames, H rows, W columns.
"""
