"""A pipeline after its loop: what it has its VAE decode is noted; all else that it does with its video is refused."""

import types

import pytest
import torch

from torchport.errors import BadValueError
from torchport.stages.decoding import PostponedVae, part_of

REMEDY = "Decode on the host: add 'host: [vae]' to the card's 'call'."


class VAE(torch.nn.Module):
    """A VAE of which only the signature of `decode` counts."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("unread", torch.zeros(2, device="meta"))

    def decode(self, z, temb=None, return_dict=True):
        raise AssertionError


class Pipeline:
    """A pipeline that does nothing but what a function does with its VAE and its post-processing."""

    def __init__(self):
        self.video_processor = types.SimpleNamespace(postprocess_video=None)


@pytest.fixture
def decoding():
    return PostponedVae(VAE(), torch.float16, {}, "Pipe", "card.yaml:1")


@pytest.fixture
def of(decoding):
    """Returns what the VAE is to be called with, by a function of it and of the post-processing."""

    def inputs(function):
        pipe = Pipeline()
        decoding.take_over(pipe)
        return decoding.inputs_of(function(decoding, pipe.video_processor.postprocess_video))

    return inputs


Z = torch.ones(1, 4, 2, 3, 3)


def test_what_decode_is_called_with_is_noted_by_its_names(of):
    timestep = torch.tensor([0.5])
    inputs = of(lambda vae, post: post(vae.decode(Z, timestep, return_dict=False)[0], output_type="pt"))
    assert list(inputs) == ["z", "temb"] and inputs["temb"] is timestep
    assert inputs["z"].dtype == torch.float16 and torch.equal(inputs["z"], Z.half())  # the VAE's dtype


@pytest.mark.parametrize("name", ["video", "image"])
def test_the_output_may_be_an_object(of, name):
    inputs = of(lambda vae, post: post(**{name: vae.decode(Z).sample}, output_type="pt"))
    assert inputs["temb"] is None


def test_one_frame_may_be_picked_and_the_batch_asked_for(of):
    def picture(vae, post):
        video = vae.decode(Z).sample
        return post(video[:, :, 0], output_type="pt", do_denormalize=[True] * video.shape[0])

    assert of(picture)["picked"] == "2:0"
    video = torch.arange(12).reshape(1, 2, 3, 2)
    assert torch.equal(part_of(video, "2:0"), video[:, :, 0]) and part_of(video, "") is video


@pytest.mark.parametrize(
    ("does", "fact"),
    [
        (lambda vae, post: Z, "returns something else than its post-processed video"),
        (lambda vae, post: vae.decode(Z).sample, "returns something else than its post-processed video"),
        (
            lambda vae, post: post(vae.decode(vae.decode(Z).sample).sample, output_type="pt"),
            "calls its VAE's 'decode' more than once",
        ),
        (
            lambda vae, post: post(vae.decode(Z).sample.clamp(0, 1), output_type="pt"),
            "calls 'torch.Tensor.clamp' with what its VAE decoded",
        ),
        (
            lambda vae, post: post(vae.decode(Z).sample[:, :, 1:], output_type="pt"),
            "calls 'torch.Tensor.__getitem__' with what its VAE decoded",
        ),
        (
            lambda vae, post: post(torch.cat([vae.decode(Z).sample] * 2), output_type="pt"),
            "calls 'torch.cat' with what its VAE decoded",
        ),
        (
            lambda vae, post: post(vae.decode(Z).sample, output_type="pt") if vae.decode(Z).sample.shape[2] else None,
            "calls 'torch.Tensor.shape' with what its VAE decoded",
        ),
        (lambda vae, post: post(Z, output_type="pt"), "post-processes something else than what its VAE decoded"),
        (lambda vae, post: post(vae.decode(Z).sample), "post-processes something else than what its VAE decoded"),
        (
            lambda vae, post: post(vae.decode(Z).sample, output_type="pt", do_denormalize=[False]),
            "post-processes something else than what its VAE decoded",
        ),
        (
            lambda vae, post: post(vae.decode(Z).sample, output_type="pt") * 2,
            "calls 'torch.Tensor.mul' with its post-processed video",
        ),
        (
            lambda vae, post: vae.decode(Z, temb=torch.Generator()),
            "calls its VAE's 'decode' with a Generator as 'temb'",
        ),
        (lambda vae, post: vae.weight, "reads the VAE's weight 'weight'"),
    ],
)
def test_a_pipeline_that_does_something_else_with_its_video_is_refused(of, does, fact):
    with pytest.raises(BadValueError) as caught:
        of(does)
    assert str(caught.value) == f"card.yaml:1: 'Pipe' {fact}. {REMEDY}"


def test_a_pipeline_without_post_processing_is_refused(decoding):
    with pytest.raises(BadValueError) as caught:
        decoding.take_over(object())
    assert str(caught.value) == f"card.yaml:1: 'Pipe' has neither 'video_processor' nor 'image_processor'. {REMEDY}"


def test_buffers_of_the_vae_are_read_and_those_of_a_rehearsal_are_ones(decoding):
    assert torch.equal(decoding.mean, torch.zeros(2)) and torch.equal(decoding.unread, torch.ones(2))
