"""A frame of the original beside the port's, and their difference made visible."""

from __future__ import annotations

import io

import torch


def beside(original_CHW: torch.Tensor, port_CHW: torch.Tensor) -> dict[str, bytes]:
    """Returns two frames and their difference as PNG, by what they are.

    Args:
        original_CHW: Bytes [3, H, W].
        port_CHW: The same.
    """
    difference = (original_CHW.int() - port_CHW.int()).abs()
    greatest = int(difference.max())
    times = 255 // greatest if greatest else 1
    return {
        "the original": _png(original_CHW),
        "the port": _png(port_CHW),
        f"the difference, {times} times": _png((difference * times).to(torch.uint8)),
    }


def _png(frame_CHW: torch.Tensor) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame_CHW.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG")
    return file.getvalue()
