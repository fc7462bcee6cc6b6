"""What upstream's pipeline module takes from torchvision, with what is there."""

import numpy
import torch
from PIL import Image


def image_transform(resize_height, resize_width, target_height, target_width):
    """Returns upstream's transform of the first frame: resized with Lanczos, cropped at the centre, -1 to 1.

    Args:
        resize_height: In pixels, at least the target's.
        resize_width: In pixels, at least the target's.
        target_height: Of the video.
        target_width: Of the video.

    Returns:
        A function of a PIL image, which returns [3, target_height, target_width], float32.
    """

    def transform(image):
        # Source of the rounding: torchvision 0.25, transforms/v1 CenterCrop: half of the difference, rounded.
        resized = image.resize((resize_width, resize_height), Image.Resampling.LANCZOS)
        top, left = (round((a - b) / 2.0) for a, b in ((resize_height, target_height), (resize_width, target_width)))
        cropped = resized.crop((left, top, left + target_width, top + target_height))
        pixels = torch.from_numpy(numpy.array(cropped)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
        return (pixels - 0.5) / 0.5

    return transform
