"""CogVideoX's decoder in parts of a frame and chunks of time, against upstream's unpatched decoder in float64."""

import copy
import math

import jax
import jax.numpy as jnp
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from fakes.families import PATCHES

from torchport import engine, patch, shard
from torchport.kernels.attention import dispatch as attention
from torchport.patch.declared import replacement

FILE = PATCHES / "diffusers" / "cogvideox_vae.py"
pytestmark = pytest.mark.usefixtures("plainly_compiled")
NONE, COLUMNS, BOTH = {}, {"sp": 8}, {"dp": 2, "sp": 4}


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """torchax beside this torch needs its patches, as everything else does."""
    with patch.applied(patch.read(pack.patches, ["torchax"])):
        yield


@pytest.fixture(scope="module")
def patches():
    return replacement.module_of(FILE, "diffusers", str(FILE))


class Decoder(torch.nn.Module):
    """A VAE whose forward is the patch's decode."""

    def __init__(self, patches, vae):
        super().__init__()
        self.patches = patches
        self.vae = vae

    def forward(self, z):
        return self.patches.decode(self.vae, z).sample


def drawn(channels=(8, 8, 16), groups=4, **config):
    """Returns a VAE with weights of its own, whose norms have means far from 0, and one residual block to a level."""
    torch.manual_seed(0)
    kinds = {
        "down_block_types": ("CogVideoXDownBlock3D",) * len(channels),
        "up_block_types": ("CogVideoXUpBlock3D",) * len(channels),
    }
    sizes = {"block_out_channels": channels, "norm_num_groups": groups, "layers_per_block": 0}
    vae = AutoencoderKLCogVideoX(**kinds, **sizes, **config).eval().requires_grad_(False)
    for parameter in vae.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    return vae


@pytest.fixture(scope="module")
def small():
    return drawn()


def latents(*size):
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def upstream(vae, z):
    with torch.no_grad():
        return copy.deepcopy(vae).double()._decode(z.double()).sample


def placed(tensor):
    narrow = jnp.bfloat16 if tensor.dtype == torch.bfloat16 else None
    return jnp.asarray(tensor.float().numpy(), narrow)


def traced(patches, vae, z, mesh=NONE, precision="highest", **options):
    """Returns what the devices of a mesh make of latents."""
    import torchax

    module = Decoder(patches, vae)
    weights = {name: placed(value) for name, value in module.state_dict().items()}

    def program(weights, z):
        return torch.func.functional_call(module, weights, (z,))

    with (
        torchax.default_env(),
        jax.set_mesh(shard.make_mesh(mesh, jax.devices()[: math.prod(mesh.values())])),
        jax.default_matmul_precision(precision),
        attention.context(attention.Context(**options)),
    ):
        engine.begin_trace()
        run = jax.jit(lambda *arrays: engine.call_torch(program, *arrays))
        out = run(weights, placed(z))
    return shard.to_torch(out).float()


def apart(ours, reference):
    assert ours.shape == reference.shape
    assert 0.1 < reference.abs().max() < 100
    return ((ours - reference).abs().max() / reference.abs().max()).item()


@pytest.mark.parametrize("frames", [1, 2, 3, 6, 9])
def test_in_pytorch_it_is_upstreams(patches, small, frames):
    z = latents(1, 16, frames, 3, 5)
    with torch.no_grad():
        assert apart(patches.decode(small, z).sample, upstream(small, z)) < 1e-5
        assert torch.equal(patches.decode(small, z, return_dict=False)[0], patches.decode(small, z).sample)


SIZES = [
    (1, (3, 5), COLUMNS),
    (2, (3, 5), NONE),
    (3, (3, 5), BOTH),
    (5, (4, 9), COLUMNS),
    (9, (4, 8), NONE),
    (10, (2, 9), BOTH),
    (21, (3, 6), BOTH),
]
"""Latent frames, their rows and columns, most of which the mesh does not divide, and the mesh."""


@pytest.mark.parametrize(("frames", "size", "mesh"), SIZES, ids=str)
def test_parts_and_chunks_make_upstreams_frames(patches, small, frames, size, mesh):
    z = latents(1, 16, frames, *size)
    assert apart(traced(patches, small, z, mesh), upstream(small, z)) < 1e-5


def test_samples_have_statistics_of_their_own(patches, small):
    z = latents(2, 16, 3, 2, 3) * torch.tensor([1.0, 5.0]).view(2, 1, 1, 1, 1)
    assert apart(traced(patches, small, z, BOTH), upstream(small, z)) < 1e-5


def test_the_kernel_makes_upstreams_frames_of_parts(patches, small):
    z = latents(1, 16, 3, 2, 3)
    assert apart(traced(patches, small, z, BOTH, interpret=True), upstream(small, z)) < 1e-5


def test_the_kernel_makes_upstreams_frames_of_chunks(patches):
    vae, z = drawn(channels=(8, 16)), latents(1, 16, 9, 1, 2)
    vae.decoder.mid_block.resnets = torch.nn.ModuleList()  # an interpreted kernel takes a second to compile
    assert apart(traced(patches, vae, z, interpret=True), upstream(vae, z)) < 1e-5


def test_bfloat16_is_as_near_as_upstreams_own(patches, small):
    z = latents(1, 16, 3, 4, 6)
    reference, narrow = upstream(small, z), copy.deepcopy(small).bfloat16()
    with torch.no_grad():
        theirs = apart(narrow._decode(z.bfloat16()).sample.float(), reference)
    assert apart(traced(patches, narrow, z.bfloat16(), interpret=True), reference) < theirs


def test_a_shortcut_and_a_convolution_before_the_decoder_are_upstreams(patches):
    vae = drawn(channels=(8, 16), use_post_quant_conv=True, out_channels=16)
    z = latents(1, 16, 2, 3, 5)
    assert apart(traced(patches, vae, z, COLUMNS), upstream(vae, z)) < 1e-5
