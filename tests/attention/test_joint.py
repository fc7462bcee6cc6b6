"""Two streams, one attention: the TPU's form, interpreted on meshes of CPU devices, equals PyTorch's own."""

import dataclasses
import functools
from copy import deepcopy

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm

from tests.attention_reference import BOUNDS
from torchport import shard
from torchport.attention import dispatch, for_torch, joint
from torchport.errors import AttentionError

pytestmark = pytest.mark.usefixtures("plainly_compiled")
HEADS, SIZE = 4, 128
FEATURES = HEADS * SIZE
INTERPRETED = dispatch.Context(interpret=True, bounds={"joint": 1.0})
MESHES = [{}, {"dp": 2, "sp": 4}, {"sp": 2, "tp": 2}]


def drawn(tokens, longest, dtype=torch.float32, batch=2, seed=0):
    """Projections of both streams, tables of positions, and what outputs go through."""
    make = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(*shape, generator=make)

    norms = [RMSNorm(SIZE, eps=1e-6).to(dtype) for _ in range(4)]
    for norm in norms:
        norm.weight.data = (1 + 0.1 * some(SIZE)).to(dtype)
    streams = [
        for_torch.Stream(*(some(batch, n, FEATURES).to(dtype) for _ in range(3)), *norms[2 * i : 2 * i + 2])
        for i, n in enumerate((tokens, longest))
    ]
    angles = (3 * some(tokens, SIZE // 2)).repeat_interleave(2, dim=1)
    project = torch.nn.Linear(FEATURES, 96).to(dtype)
    return streams, (angles.cos(), angles.sin()), project


@torch.no_grad()
def original(streams, tables, lengths, project):
    """PyTorch's own form, with upstream's rotation."""
    rotate = functools.partial(apply_rotary_emb, freqs_cis=tables, sequence_dim=1)
    return for_torch.joint(*streams, rotary=tables, rotate=rotate, lengths=lengths, project=project)


def form(streams, tables, lengths, project, mesh, missing, bound=None, fill=0.0):
    """The TPU's form on a mesh of CPU devices, with as many padded tokens as are missing."""
    sizes = {axis: mesh.get(axis, 1) for axis in ("dp", "sp", "tp")}
    count = numpy.prod(list(sizes.values()))
    devices = shard.make_mesh(sizes, jax.devices()[:count])

    def array(tensor):
        return jnp.asarray(tensor.detach().float().numpy(), jnp.bfloat16 if tensor.dtype == torch.bfloat16 else None)

    def stream(own, padding):
        widths = ((0, 0), (0, padding), (0, 0))
        q, k, v = (jnp.pad(array(x), widths, constant_values=fill) for x in (own.q, own.k, own.v))
        return joint.Tokens(q, k, v, array(own.norm_q.weight), array(own.norm_k.weight))

    def run(seen, read, cos, sin, lengths_B, weight, bias):
        out, text = joint.joint(seen, read, cos, sin, lengths_B, heads=HEADS, eps=1e-6, bound=bound)
        return joint.linear_of_parts(out, weight, bias), text

    inputs = (stream(streams[0], missing), stream(streams[1], 0), *map(array, tables), jnp.asarray(lengths))
    with jax.set_mesh(devices), dispatch.context(INTERPRETED), jax.default_matmul_precision("highest"):
        out, text = jax.jit(run)(*inputs, array(project.weight), array(project.bias))
    return numpy.asarray(out.astype(jnp.float32)), numpy.asarray(text.astype(jnp.float32))


def distance(a, b):
    b = b.float().numpy()
    return numpy.abs(a - b).max() / numpy.abs(b).max()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_equals_pytorch(mesh):
    streams, tables, project = drawn(250, 40)
    lengths = torch.tensor([40, 17])
    wanted = original(streams, tables, lengths, project)
    missing = -250 % (256 * mesh.get("sp", 1))
    out, text = form(streams, tables, lengths.numpy(), project, mesh, missing)
    assert distance(out[:, :250], wanted[0]) < BOUNDS["float32"]
    assert distance(text, wanted[1]) < BOUNDS["float32"]
    assert (text[1, 17:] == 0).all() and numpy.isfinite(out).all()


@pytest.mark.parametrize(("tokens", "longest"), [(1, 1), (256, 300), (1025, 1)], ids=str)
def test_any_number_of_tokens_equals_pytorch_under_a_bound(tokens, longest):
    """1,025 tokens over two devices: values in two parts, of which a chunk takes from both, and a ragged last piece."""
    streams, tables, project = drawn(tokens, longest)
    lengths = torch.tensor([longest, 0])
    wanted = original(streams, tables, lengths, project)
    out, text = form(streams, tables, lengths.numpy(), project, {"sp": 2}, -tokens % 512, "joint")
    assert distance(out[:, :tokens], wanted[0]) < BOUNDS["float32"]
    assert distance(text, wanted[1]) < BOUNDS["float32"]


def test_bfloat16_is_as_far_from_float32_as_the_original_is():
    streams, tables, project = drawn(250, 40, torch.bfloat16)
    lengths = torch.tensor([40, 17])
    exact = [for_torch.Stream(*(part.float() for part in vars(s).values())) for s in deepcopy(streams)]
    wanted = original(exact, tables, lengths, deepcopy(project).float())
    eager = original(streams, tables, lengths, project)
    out, text = form(streams, tables, lengths.numpy(), project, {"dp": 2, "sp": 2}, 262)
    for ours, theirs, true in zip((out[:, :250], text), eager, wanted, strict=True):
        assert distance(ours, true) <= 1.5 * distance(theirs.float().numpy(), true)


def test_padding_of_the_pictures_and_of_the_text_may_hold_anything():
    streams, tables, project = drawn(250, 40)
    lengths = numpy.array([40, 17])
    outputs = []
    for fill in (0.0, 1e4):
        own = [dataclasses.replace(s) for s in streams]
        for part in (own[1].q, own[1].k, own[1].v):
            part[1, 17:] = fill
        outputs.append(form(own, tables, lengths, project, {"sp": 2}, 262, fill=fill))
    assert (outputs[0][0][:, :250] == outputs[1][0][:, :250]).all()
    assert (outputs[0][1] == outputs[1][1]).all()


def test_tokens_that_are_no_multiple_are_refused():
    streams, tables, project = drawn(250, 40)
    with pytest.raises(AttentionError) as caught:
        form(streams, tables, numpy.array([40, 17]), project, {"sp": 2}, 6)
    text = "attention joint: The pictures have 256 tokens, 250 of them valid. Pad them to a multiple of 512."
    assert str(caught.value) == text


def test_norms_that_disagree_are_refused():
    norms = [RMSNorm(SIZE, eps=eps) for eps in (1e-6, 1e-5)]
    assert for_torch.common_eps(norms[:1]) == 1e-6
    with pytest.raises(AttentionError) as caught:
        for_torch.common_eps(norms)
    assert str(caught.value) == "attention joint: The norms' eps differ: [1e-06, 1e-05]. They must be one."


def test_it_is_for_the_kernel_alone():
    assert not joint.fits(2, HEADS, SIZE)  # a CPU
    assert joint.multiple() == 1
    with dispatch.context(INTERPRETED):
        assert joint.fits(2, HEADS, SIZE) and joint.multiple() == 256
        assert not joint.fits(2, HEADS, 64)  # rotary positions are turned in whole registers
    with dispatch.context(dataclasses.replace(INTERPRETED, implementation="plain")):
        assert not joint.fits(2, HEADS, SIZE)
    with jax.set_mesh(shard.make_mesh({"dp": 2, "sp": 4, "tp": 1}, jax.devices()[:8])):
        assert joint.multiple() == 4  # whole tokens on each device, whatever computes them
        with dispatch.context(INTERPRETED):
            assert joint.multiple() == 1024
            assert not joint.fits(1, HEADS, SIZE) and not joint.fits(2, 6, SIZE)
