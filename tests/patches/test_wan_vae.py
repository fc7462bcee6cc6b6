"""The decoders of Wan 2.1's and Wan 2.2's VAE under patches, against upstream's own.

"Agreement" is DESIGN's: the largest difference over the largest value of the reference.
"""

import contextlib

import jax
import jax.numpy as jnp
import pytest
import torch
from diffusers import AutoencoderKLWan
from fakes.artefacts import difference

from torchport import engine, patch
from torchport.config.pack import find_pack
from torchport.kernels.attention import dispatch as attention
from torchport.kernels.convolution import canvas, forms, kernel
from torchport.kernels.convolution.by_xla import ConvolutionRequest

pytestmark = pytest.mark.usefixtures("plainly_compiled")
INTERPRETED = attention.Context(interpret=True)
TINY = {"base_dim": 8, "decoder_base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
WAN_5B = {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}
MODELS = {
    "wan": TINY,
    "wan_5b": {**TINY, **WAN_5B},
    "fewer_channels": {**TINY, **WAN_5B, "dim_mult": [1, 1, 2, 2]},  # as published: one shortcut halves them
}
PUBLISHED = {"base_dim": 96, "decoder_base_dim": 96, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1}


def vae_of(options, z):
    """Returns a VAE that makes a video whose largest value is nearly 1, where it would be cut off."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**options).eval().requires_grad_(False)
    for name, value in vae.named_parameters():
        if name.endswith(("gamma", "bias")):
            value.add_(0.2 * torch.randn_like(value))
    last = vae.decoder.conv_out
    for value in last.parameters():
        value.mul_(1e-3)
    size = vae._decode(z).sample.abs().max()
    assert size < 1
    for value in last.parameters():
        value.mul_(0.9 / size)
    return vae


class Decoder(torch.nn.Module):
    def __init__(self, vae):
        super().__init__()
        self.vae = vae

    def forward(self, latents):
        return self.vae._decode(latents).sample


def check(options, latents, sizes=(), context=attention.NONE):
    """Compares both backends of the patched decoder with upstream's; a mesh has the sizes that are given."""
    z = torch.randn(1, 16, *latents, generator=torch.Generator().manual_seed(1))
    vae = vae_of(options, z)
    reference = vae._decode(z).sample
    module = Decoder(vae)
    weights = {name: jnp.asarray(value.numpy()) for name, value in module.named_parameters()}

    def program(weights, z):
        return engine.call_torch(lambda w, z: torch.func.functional_call(module, w, (z,)), weights, z)

    axes = ("dp", "sp")[: len(sizes)]
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.set_mesh(jax.make_mesh(sizes, axes, axis_types=types)) if sizes else contextlib.nullcontext()
    with patch.applied(patch.read(find_pack().folders, ["torchax", "diffusers/wan_vae", "diffusers/wan_vae_shortcut"])):
        engine.begin_trace()
        assert difference(vae._decode(z).sample, reference) <= 1e-5
        with mesh, attention.context(context), jax.default_matmul_precision("highest"):
            ours = jax.jit(program)(weights, jnp.asarray(z.numpy()))
    assert difference(torch.from_numpy(jax.device_get(ours).copy()), reference) <= 1e-5


@pytest.mark.parametrize(
    ("model", "frames", "sizes"),
    [
        ("wan", 1, (8,)),
        ("wan", 2, (2, 4)),
        ("wan", 5, (8,)),
        ("wan", 21, ()),
        ("fewer_channels", 2, (2,)),
        ("wan_5b", 1, (2, 4)),
        ("wan_5b", 2, (8,)),
        ("wan_5b", 5, ()),
    ],
)
def test_frames_are_upstreams_on_each_mesh_where_it_does_not_divide_the_width(model, frames, sizes):
    check(MODELS[model], (frames, 3, 5), sizes)


def test_frames_are_upstreams_with_the_published_channels():
    check(PUBLISHED, (2, 3, 3))


@pytest.mark.parametrize("options", [{}, WAN_5B], ids=["wan", "wan_5b"])
def test_frames_are_upstreams_through_the_kernel(options):
    check({**TINY, **options, "dim_mult": [1, 1], "temperal_downsample": [True]}, (9, 3, 3), (2,), INTERPRETED)


@pytest.mark.parametrize(("inputs", "outputs"), [(96, 96), (192, 16), (16, 3), (384, 130)])
def test_the_kernel_packs_channels_and_taps(inputs, outputs):
    x, weight, gains = (
        jax.random.normal(jax.random.key(n), shape)
        for n, shape in enumerate([(1, inputs, 16, 2, 3), (outputs, inputs, 3, 3, 3), (inputs,)])
    )

    def run():
        return forms.convolved(ConvolutionRequest(False), x, weight, None, gains=gains, lead=jnp.int32(3))[0]

    with jax.default_matmul_precision("highest"):
        reference = run()
        with attention.context(INTERPRETED):
            ours = run()
    assert jnp.abs(ours - reference).max() <= 1e-5 * jnp.abs(reference).max()


def test_a_tap_leaves_little_of_a_matrix_unit_empty():
    sizes = {"height": 8, "width": 8, "frames": 16, "parts": 2}
    packed = {c: kernel.Conv(inputs=c, outputs=c, **sizes) for c in (16, 96, 128, 192, 256, 384)}
    deep = {c: conv.depth * conv.together_taps for c, conv in packed.items()}
    assert deep == {16: 256, 96: 768, 128: 256, 192: 768, 256: 256, 384: 768}
    assert kernel.Conv(inputs=96, outputs=3, **sizes).sums == 128


def test_rows_are_parted_only_where_that_saves_much():
    with jax.set_mesh(jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        assert canvas.of_latents(21, 90, 160).columns == ("dp", "sp")
        assert canvas.of_latents(21, 90, 20).rows
