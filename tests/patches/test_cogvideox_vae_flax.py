"""CogVideoX's decoder in flax.nnx against diffusers' own: the same video, and every weight accounted for.

"Agreement" is the largest difference over the largest value of the reference.
"""

import functools
import sys

import jax
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from fakes.families import PATCHES
from jax.sharding import PartitionSpec

from torchport import shard
from torchport.errors import AbsentPackageError, BadValueError, CheckpointForeignError, UnfilledWeightError
from torchport.patch.declared import replacement

FILE = PATCHES / "diffusers" / "cogvideox_vae_flax.py"
TINY = {"block_out_channels": (16, 16, 32, 32), "layers_per_block": 0, "norm_num_groups": 4}
pytestmark = pytest.mark.usefixtures("plainly_compiled")


@pytest.fixture(scope="module")
def patches():
    return replacement.module_of(FILE, "diffusers", str(FILE))


@functools.cache
def vae_of(**changes):
    """Returns upstream's VAE with weights of a seed, those of norms away from 1 and 0."""
    torch.manual_seed(0)
    vae = AutoencoderKLCogVideoX(**TINY | changes).eval()
    with torch.no_grad():
        for name, weight in vae.named_parameters():
            if ".norm_layer." in name:
                weight.add_(torch.randn_like(weight) / 4)
    return vae


def weights_of(vae):
    tensors = {f"decoder.{name}": weight for name, weight in vae.decoder.named_parameters()}
    if vae.post_quant_conv is not None:
        tensors |= {f"post_quant_conv.{name}": weight for name, weight in vae.post_quant_conv.named_parameters()}
    return {name: weight.detach().numpy() for name, weight in tensors.items()}


def latents(frames, height=4, width=6, channels=16):
    return torch.randn(1, channels, frames, height, width, generator=torch.Generator().manual_seed(frames))


def difference(patches, vae, z, mesh=None):
    """Returns how far the video in Flax is from upstream's."""
    with torch.no_grad():
        reference = vae.decode(z).sample.numpy()
    decode = jax.jit(functools.partial(patches.decoded, dict(vae.config)))
    if mesh is None:
        video = np.asarray(decode(weights_of(vae), z.numpy()))
    else:
        with jax.set_mesh(mesh):
            video = np.asarray(decode(weights_of(vae), z.numpy()))
    assert video.shape == reference.shape
    return np.abs(video - reference).max() / np.abs(reference).max()


@pytest.fixture(scope="module")
def mesh():
    return shard.make_mesh({"dp": 2, "tp": 4}, jax.devices())


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 21])
def test_it_is_upstreams_decoder_for_any_number_of_frames(patches, frames):
    assert difference(patches, vae_of(), latents(frames)) < 1e-5


def test_it_is_upstreams_decoder_with_as_many_channels_as_published(patches):
    vae = vae_of(block_out_channels=(128, 256, 256, 512), norm_num_groups=32)
    assert difference(patches, vae, latents(5, 3, 2)) < 1e-5


@pytest.mark.parametrize(
    ("frames", "height", "width"),
    [(5, 2, 16), (3, 2, 12), (21, 4, 6), (2, 3, 6), (5, 3, 5)],
    ids=["columns", "columns and two rows", "columns and four rows", "two columns", "neither"],
)
def test_it_is_upstreams_decoder_on_a_mesh_that_divides_the_frame_or_does_not(patches, mesh, frames, height, width):
    assert difference(patches, vae_of(), latents(frames, height, width), mesh) < 1e-5


@pytest.mark.parametrize(
    ("height", "width", "spec"),
    [
        (90, 160, (None, ("dp", "tp"))),
        (90, 170, (None, ("dp",))),
        (96, 170, (("tp",), ("dp",))),
        (60, 84, (("dp",), ("tp",))),
        (90, 85, (("dp",), None)),
        (45, 85, (None, None)),
    ],
)
def test_columns_are_parted_first_and_the_frame_into_as_many_parts_as_divide_it(patches, mesh, height, width, spec):
    with jax.set_mesh(mesh):
        assert patches.parting(height, width) == PartitionSpec(None, None, *spec, None)
    assert patches.parting(height, width) is None


def test_the_projection_before_the_decoder_is_computed_where_there_is_one(patches):
    levels = {"down_block_types": ("CogVideoXDownBlock3D",), "up_block_types": ("CogVideoXUpBlock3D",)}
    channels = {"block_out_channels": (16,), "latent_channels": 3, "out_channels": 3}
    vae = vae_of(use_post_quant_conv=True, **levels, **channels)
    assert difference(patches, vae, latents(3, channels=3)) < 1e-5


def test_a_weight_that_is_missing_or_left_over_or_has_another_shape_is_refused_by_its_name(patches):
    vae = vae_of()
    good, filled = weights_of(vae), functools.partial(patches.filled, dict(vae.config), spec=None)
    name = "decoder.mid_block.resnets.1.norm2.norm_layer.weight"
    with pytest.raises(UnfilledWeightError) as caught:
        filled(tensors={key: value for key, value in good.items() if key != name})
    assert str(caught.value).startswith(
        f"CogVideoX's VAE in Flax: There is no '{name}' in the checkpoint. Did you mean 'decoder.mid_block.resnets."
    )
    with pytest.raises(CheckpointForeignError) as caught:
        filled(tensors={**good, "decoder.conv_in.conv.weigth": good["decoder.conv_in.conv.weight"]})
    assert str(caught.value).startswith(
        "CogVideoX's VAE in Flax: It does not have 'decoder.conv_in.conv.weigth'. "
        "Did you mean 'decoder.conv_in.conv.weight'?"
    )
    with pytest.raises(CheckpointForeignError) as caught:
        filled(tensors={**good, name: good[name][:-1]})
    assert str(caught.value) == (f"CogVideoX's VAE in Flax: '{name}' is [31] with channels last. It must be [32].")


def test_another_activation_function_is_refused(patches):
    with pytest.raises(BadValueError) as caught:
        patches.filled({**vae_of().config, "act_fn": "gelu"}, {}, None)
    assert str(caught.value) == "CogVideoX's VAE in Flax: 'act_fn' is 'gelu'. It must be 'silu'."


def test_in_pytorch_it_is_upstreams_own(patches):
    vae, z = vae_of(), latents(3)
    with torch.no_grad():
        assert torch.equal(patches.decode(type(vae).decode, vae, z).sample, vae.decode(z).sample)


def test_without_flax_it_is_refused_with_the_command_that_installs_it(monkeypatch, tmp_path):
    copy = tmp_path / FILE.name  # a file is loaded once
    copy.write_bytes(FILE.read_bytes())
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(AbsentPackageError) as caught:
        replacement.module_of(copy, "copied", str(copy))
    assert str(caught.value) == (
        "vae: {implementation: flax}: flax is not installed. "
        "Install it: pip install 'torchport[flax]', or choose another implementation of 'vae'."
    )
