"""A video as bytes: the rule of the video's writer, and no number that is none becomes a byte unseen."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchport.errors import NotFiniteError
from torchport.save import video
from torchport.stages import frames


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_those_that_the_videos_writer_makes_of_numbers(dtype):
    numbers = torch.linspace(-0.2, 1.2, 3 * 64 * 64).reshape(3, 64, 64).to(dtype)
    levels, not_finite = frames.pixels(numbers)
    assert levels.dtype == torch.uint8 and len(levels.unique()) > 200 and int(not_finite) == 0
    assert (levels.permute(1, 2, 0).numpy() == video._pixels(numbers)).all()
    assert (video._pixels(levels) == video._pixels(numbers)).all()


def test_numbers_that_are_none_are_counted_and_refused():
    numbers = torch.tensor([0.0, torch.nan, torch.inf, 1.0])
    levels, not_finite = frames.pixels(numbers)
    with pytest.raises(NotFiniteError) as caught:
        frames.checked(levels, not_finite)
    assert str(caught.value) == (
        "decode.safetensors: 'frames' were made of 2 values of 4 that are NaN or infinite. Nothing was written. "
        "Compare with --backend original: if that is finite, a patch or a precision is wrong, else the weights."
    )


def test_a_rehearsals_frames_have_no_values_to_check():
    with FakeTensorMode():
        levels, not_finite = frames.pixels(torch.zeros(2, 3))
    assert frames.checked(levels, not_finite) is levels
