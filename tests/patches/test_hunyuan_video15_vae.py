"""The decoder of HunyuanVideo-1.5 under its patches: upstream's video, on any mesh, whole or in chunks of time."""

import contextlib
import copy
import functools
import math

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch

from torchport import engine, patch
from torchport.kernels.convolution import for_torch

pytestmark = pytest.mark.usefixtures("plainly_compiled")
FILES = ["torchax/overloads", "diffusers/hunyuan_video15_vae"]
MESHES = {"none": {}, "eight": {"sp": 8}, "two by four": {"dp": 2, "tp": 4}}


def drawn(module):
    """Returns a module whose parameters are all drawn: upstream's own initialisation has gains of 1."""
    for parameter in module.parameters():
        if parameter.dim() == 4:  # gains
            torch.nn.init.normal_(parameter, 1, 0.2)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, (1 / parameter[0].numel()) ** 0.5)
        else:
            torch.nn.init.normal_(parameter, 0, 0.1)
    return module.eval()


@pytest.fixture(scope="module")
def upstream(pack):
    """Gives upstream's module, without patches."""
    with patch.applied(patch.read(pack.folders, FILES[:1])):
        from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15

        yield autoencoder_kl_hunyuanvideo15


@pytest.fixture(scope="module")
def made(upstream):
    """Gives decoders by their channels, the same one each time."""

    @functools.cache
    def make(*channels, latents=4):
        torch.manual_seed(0)
        ratios = {"spatial_compression_ratio": 2 ** (len(channels) - 1), "temporal_compression_ratio": 4}
        vae = upstream.AutoencoderKLHunyuanVideo15(
            latent_channels=latents, block_out_channels=channels, layers_per_block=1, **ratios
        )
        return drawn(vae)

    return make


@contextlib.contextmanager
def patched(pack):
    with patch.applied(patch.read(pack.folders, FILES), stage="decode"):
        yield


def traced(decoder, latents, mesh):
    """Returns a decoder's video from a program on the first devices."""
    axes = mesh or {"dp": 1}
    count = math.prod(axes.values())
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    devices = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count], axis_types=types)
    weights = {name: jnp.asarray(value.detach().numpy()) for name, value in decoder.named_parameters()}

    def call(weights, z):
        with torch.no_grad():
            return torch.func.functional_call(decoder, weights, (z,))

    engine.begin_trace()
    place = jax.set_mesh(devices) if mesh != {} else contextlib.nullcontext()
    with place, jax.default_matmul_precision("highest"):
        run = jax.jit(lambda weights, z: engine.call_torch(call, weights, z))
        return torch.from_numpy(numpy.array(run(weights, jnp.asarray(latents.numpy()))))


def difference(video, exact):
    return ((video - exact).abs().max() / exact.abs().max()).item()


def decoded(decoder, latents):
    """Returns upstream's video in float64."""
    with torch.no_grad():
        return copy.deepcopy(decoder).double()(latents.double())


def latents(*sizes, channels=4):
    return torch.randn(1, channels, *sizes, generator=torch.Generator().manual_seed(3))


TINY = (8, 8, 16)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("sizes", [(1, 4, 5), (2, 3, 7), (5, 2, 3)], ids=str)
def test_a_tiny_decoder_makes_upstreams_video_on_every_mesh(pack, made, sizes, mesh):
    """Sizes that the meshes do not divide, and fewer columns than devices; 1, 5 and 17 frames."""
    decoder, z = made(*TINY).decoder, latents(*sizes)
    exact = decoded(decoder, z)
    with patched(pack):
        video = traced(decoder, z, MESHES[mesh])
    assert video.shape == exact.shape == (1, 3, 4 * sizes[0] - 3, 4 * sizes[1], 4 * sizes[2])
    assert difference(video, exact) <= 1e-5


@pytest.mark.parametrize("frames", [21, 31])
def test_a_long_video_in_chunks_is_upstreams(pack, made, frames):
    decoder, z = made(*TINY).decoder, latents(frames, 1, 2)
    exact = decoded(decoder, z)
    with patched(pack):
        assert difference(traced(decoder, z, {"sp": 2}), exact) <= 1e-5


def test_chunks_change_no_number_by_more_than_rounding(pack, made, monkeypatch):
    decoder, z = made(*TINY).decoder, latents(4, 2, 3)
    with patched(pack):
        chunked = traced(decoder, z, {"sp": 2})
        monkeypatch.setattr(for_torch, "by_chunks", lambda step, x: step(x))
        whole = traced(decoder, z, {"sp": 2})
    assert difference(chunked, whole) <= 1e-5


def test_with_many_channels_it_is_upstreams(pack, made):
    decoder, z = made(32, 64, 128, 256, 512, latents=32).decoder, latents(2, 3, 5, channels=32)
    with torch.no_grad():
        upstreams = decoder(z)
    with patched(pack):
        assert difference(traced(decoder, z, {"dp": 1, "tp": 2}), upstreams) <= 1e-5


def test_in_eager_pytorch_it_is_upstreams(pack, made):
    decoder, z = made(*TINY).decoder, latents(3, 2, 3)
    exact = decoded(decoder, z)
    with patched(pack), torch.no_grad():
        assert difference(decoder(z), exact) <= 1e-5


def test_padding_before_the_first_frame_may_fill_several_chunks(pack, made, monkeypatch):
    """As on a TPU, whose kernel takes 16 frames at a time."""
    from torchport.kernels.convolution import canvas

    decoder, z = made(*TINY).decoder, latents(5, 1, 2)
    exact = decoded(decoder, z)
    of_latents = canvas.of_latents
    monkeypatch.setattr(
        canvas, "of_latents", lambda *sizes, **options: of_latents(*sizes, **options | {"multiple": 16})
    )
    with patched(pack):
        assert difference(traced(decoder, z, {"sp": 2}), exact) <= 1e-5


def test_tile_by_tile_it_is_upstreams_tiled_video(pack, made):
    """Two tiles, one of four columns and one of two."""
    vae, z = copy.deepcopy(made(*TINY)), latents(1, 3, 5)
    decoder = vae.decoder
    vae.enable_tiling(16, 16, 4, 4)
    with torch.no_grad():
        upstreams = vae.decode(z).sample
    with patched(pack):
        vae.decoder = torch.nn.Identity()
        vae.decoder.forward = lambda hidden_states: traced(decoder, hidden_states, {"sp": 2})
        with torch.no_grad():
            assert difference(vae.decode(z).sample, upstreams) <= 1e-5


@pytest.mark.parametrize("mesh", MESHES)
def test_attention_by_frames_is_that_under_upstreams_mask(pack, upstream, mesh):
    torch.manual_seed(0)
    block = drawn(upstream.HunyuanVideo15AttnBlock(16))
    x = torch.randn(1, 16, 3, 5, 3)
    exact = decoded(block, x)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            with for_torch.spread(x) as (padded, form):
                return for_torch.crop(self.block(padded), form)

    with patched(pack):
        assert difference(traced(Block(), x, MESHES[mesh]), exact) <= 1e-5
