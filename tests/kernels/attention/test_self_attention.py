"""Self-attention: the TPU's form, interpreted on meshes of CPU devices, equals PyTorch's own."""

import dataclasses
import functools
import types
from copy import deepcopy

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm

from tests.attention_reference import BOUNDS
from torchport import shard
from torchport.errors import AttentionError
from torchport.kernels.attention import dispatch, for_torch, self_attention
from torchport.kernels.attention.rotary import Norm

pytestmark = pytest.mark.usefixtures("plainly_compiled")
HEADS, SIZE = 4, 128
INTERPRETED = dispatch.Context(interpret=True, bounds={"joint": 1.0})
MESHES = [{}, {"dp": 2, "sp": 4}, {"sp": 2, "tp": 2}]
NORMS = {
    "RMSNorm of each head": lambda heads, size: RMSNorm(size, eps=1e-6),
    "LayerNorm of each head": lambda heads, size: torch.nn.LayerNorm(size, eps=1e-6),
    "RMSNorm of all heads": lambda heads, size: torch.nn.RMSNorm(heads * size, eps=1e-6),
    "LayerNorm of all heads": lambda heads, size: torch.nn.LayerNorm(heads * size, eps=1e-6),
}


def drawn(tokens, longest, dtype=torch.float32, batch=2, seed=0, heads=HEADS, size=SIZE, norm="RMSNorm of each head"):
    """Projections of both streams, tables of positions, and what outputs go through."""
    make = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(*shape, generator=make)

    norms = [NORMS[norm](heads, size).to(dtype) for _ in range(4)]
    for parameter, middle in ((p, float(p.data.mean())) for one in norms for p in one.parameters()):
        parameter.data = (middle + 0.1 * some(*parameter.shape)).to(dtype)
    streams = [
        # A mean that is no rounding error of the deviation, which LayerNorm subtracts.
        for_torch.Stream(*((some(batch, n, heads * size) + 0.5).to(dtype) for _ in range(3)), *norms[2 * i : 2 * i + 2])
        for i, n in enumerate((tokens, longest))
    ]
    angles = (3 * some(tokens, size // 2)).repeat_interleave(2, dim=1)
    project = torch.nn.Linear(heads * size, 96).to(dtype)
    return streams, (angles.cos(), angles.sin()), project


@torch.no_grad()
def original(streams, tables, lengths, project):
    """PyTorch's own form, with upstream's rotation."""
    rotate = functools.partial(apply_rotary_emb, freqs_cis=tables, sequence_dim=1)
    return for_torch.self_attention(*streams, rotary=tables, rotate=rotate, lengths=lengths, project=project)


@functools.partial(jax.jit, static_argnames=("heads", "bound"))
def run(own, others, cos, sin, lengths_B, weight, bias, *, heads, bound):
    """The TPU's form and the projection of both streams."""
    out, rest = self_attention.attention(own, others, cos, sin, lengths_B, heads=heads, bound=bound)
    return self_attention.linear_of_parts(out, weight, bias), rest


def form(streams, tables, lengths, project, mesh, missing, bound=None, fill=0.0):
    """The TPU's form on a mesh of CPU devices, with as many padded tokens as are missing."""
    sizes = {axis: mesh.get(axis, 1) for axis in ("dp", "sp", "tp")}
    count = numpy.prod(list(sizes.values()))
    devices = shard.make_mesh(sizes, jax.devices()[:count])
    heads = streams[0].q.shape[2] // tables[0].shape[1]

    def array(tensor):
        return jnp.asarray(tensor.detach().float().numpy(), jnp.bfloat16 if tensor.dtype == torch.bfloat16 else None)

    def norm(module):
        if module is None:
            return None
        bias = getattr(module, "bias", None)
        return Norm(array(module.weight), None if bias is None else array(bias), **for_torch.norm_kind(module))

    def stream(own, padding):
        widths = ((0, 0), (0, padding), (0, 0))
        q, k, v = (jnp.pad(array(x), widths, constant_values=fill) for x in (own.q, own.k, own.v))
        return self_attention.Tokens(q, k, v, norm(own.norm_q), norm(own.norm_k))

    further = stream(streams[1], 0) if len(streams) > 1 else None
    inputs = (
        stream(streams[0], missing),
        further,
        *map(array, tables),
        None if lengths is None else jnp.asarray(lengths),
    )
    with jax.set_mesh(devices), dispatch.context(INTERPRETED), jax.default_matmul_precision("highest"):
        out, rest = run(*inputs, array(project.weight), array(project.bias), heads=heads, bound=bound)
    return numpy.asarray(out.astype(jnp.float32)), None if rest is None else numpy.asarray(rest.astype(jnp.float32))


def distance(a, b):
    b = b.float().numpy()
    return numpy.abs(a - b).max() / numpy.abs(b).max()


@torch.no_grad()
def test_the_plain_form_is_upstreams_bit_for_bit():
    """CogVideoX's own processor, of one sequence with the text first: the same projections, taken apart."""
    (pictures, text), tables, _ = drawn(250, 40, heads=8, size=64, norm="LayerNorm of each head")
    joined = [torch.cat([getattr(text, part), getattr(pictures, part)], dim=1) for part in "qkv"]
    attn = types.SimpleNamespace(
        heads=8,
        to_q=lambda _: joined[0],
        to_k=lambda _: joined[1],
        to_v=lambda _: joined[2],
        norm_q=pictures.norm_q,
        norm_k=pictures.norm_k,
        is_cross_attention=False,
        to_out=[torch.nn.Identity()] * 2,
    )
    wanted = CogVideoXAttnProcessor2_0()(attn, pictures.q, text.q, image_rotary_emb=tables)
    text = dataclasses.replace(text, norm_q=pictures.norm_q, norm_k=pictures.norm_k)
    ours = original([pictures, text], tables, None, torch.nn.Identity())
    assert torch.equal(ours[0], wanted[0]) and torch.equal(ours[1], wanted[1])


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


@pytest.mark.parametrize(
    ("norm", "heads", "size"),
    [
        ("LayerNorm of each head", 8, 64),
        ("RMSNorm of all heads", 4, 96),
        ("LayerNorm of all heads", 4, 48),
        ("RMSNorm of each head", 6, 16),
    ],
)
def test_every_head_size_and_norm_equals_pytorch(norm, heads, size):
    """Two heads side by side or one, padded or not."""
    streams, tables, project = drawn(250, 40, heads=heads, size=size, norm=norm)
    wanted = original(streams, tables, None, project)
    out, text = form(streams, tables, None, project, {"sp": 2}, 262, "joint")
    assert distance(out[:, :250], wanted[0]) < BOUNDS["float32"]
    assert distance(text, wanted[1]) < BOUNDS["float32"]


@pytest.mark.parametrize(
    ("norm", "mesh"),
    [
        (None, {"dp": 2}),
        ("LayerNorm of each head", {"dp": 2, "sp": 4}),
        ("RMSNorm of all heads", {"sp": 2, "tp": 2}),
        ("LayerNorm of all heads", {"sp": 2, "tp": 2}),
    ],
)
def test_tokens_alone_equal_pytorch(norm, mesh):
    streams, tables, project = drawn(250, 1, heads=8, size=64, norm=norm or "RMSNorm of each head")
    alone = [streams[0] if norm else dataclasses.replace(streams[0], norm_q=None, norm_k=None)]
    wanted, none = original(alone, tables, None, project)
    out, rest = form(alone, tables, None, project, mesh, -250 % (256 * mesh.get("sp", 1)))
    assert distance(out[:, :250], wanted) < BOUNDS["float32"]
    assert none is None and rest is None


@pytest.mark.parametrize(
    ("tokens", "longest", "heads", "size"), [(1, 1, 4, 128), (256, 300, 2, 16), (1025, 1, 4, 128)], ids=str
)
def test_any_number_of_tokens_equals_pytorch_under_a_bound(tokens, longest, heads, size):
    """1,025 tokens over two devices: values in two parts, of which a chunk takes from both, and a ragged last piece.

    With 2 heads on two devices, one of 16 features lies alone.
    """
    streams, tables, project = drawn(tokens, longest, heads=heads, size=size)
    lengths = torch.tensor([longest, 0])
    wanted = original(streams, tables, lengths, project)
    out, text = form(streams, tables, lengths.numpy(), project, {"sp": 2}, -tokens % 512, "joint")
    assert distance(out[:, :tokens], wanted[0]) < BOUNDS["float32"]
    assert distance(text, wanted[1]) < BOUNDS["float32"]


@pytest.mark.parametrize(
    ("norm", "heads", "size"), [("RMSNorm of each head", 4, 128), ("LayerNorm of each head", 8, 64)]
)
def test_bfloat16_is_as_far_from_float32_as_the_original_is(norm, heads, size):
    streams, tables, project = drawn(250, 40, torch.bfloat16, norm=norm, heads=heads, size=size)
    lengths = torch.tensor([40, 17])
    exact = [for_torch.Stream(*(part.float() for part in vars(s).values())) for s in deepcopy(streams)]
    wanted = original(exact, tables, lengths, deepcopy(project).float())
    eager = original(streams, tables, lengths, project)
    out, text = form(streams, tables, lengths.numpy(), project, {"dp": 2, "sp": 2}, 262)
    for ours, theirs, true in zip((out[:, :250], text), eager, wanted, strict=True):
        assert distance(ours, true) <= 1.5 * distance(theirs.float().numpy(), true)


def test_padding_of_tokens_and_of_further_ones_may_hold_anything():
    streams, tables, project = drawn(250, 40)
    lengths = numpy.array([40, 17])
    outputs = []
    for fill in (0.0, 1e4):
        own = [dataclasses.replace(s) for s in streams]
        for part in (own[1].q, own[1].k, own[1].v):
            part[1, 17:] = fill
        outputs.append(form(own, tables, lengths, project, MESHES[1], 774, fill=fill))
    assert (outputs[0][0][:, :250] == outputs[1][0][:, :250]).all()
    assert (outputs[0][1] == outputs[1][1]).all()


def test_tokens_that_are_no_multiple_are_refused():
    streams, tables, project = drawn(250, 40)
    with pytest.raises(AttentionError) as caught:
        form(streams, tables, numpy.array([40, 17]), project, {"sp": 2}, 6)
    text = "self_attention: There are 256 tokens, 250 of them valid. Pad them to a multiple of 512."
    assert str(caught.value) == text


@pytest.mark.parametrize("norm", [torch.nn.GroupNorm(2, 8), torch.nn.LayerNorm(8, elementwise_affine=False)], ids=repr)
def test_a_norm_that_the_kernel_does_not_compute_is_refused(norm):
    with pytest.raises(AttentionError) as caught:
        for_torch.norm_kind(norm)
    assert str(caught.value) == (
        f"self_attention: A norm of queries or keys is {norm!r}. It must be a LayerNorm or an RMSNorm with gains and "
        "eps; normalise before by any other, and pass None."
    )


def test_it_is_for_the_kernel_alone():
    fits, multiple = self_attention.fits, self_attention.multiple
    assert not fits(2, HEADS, SIZE)  # a CPU
    assert multiple() == 1
    with dispatch.context(INTERPRETED):
        assert fits(2, HEADS, SIZE) and fits(2, HEADS, 64) and multiple() == 256
        assert not fits(2, HEADS, 192) and not fits(2, HEADS, 63)  # more than a register holds; no pairs of features
    with dispatch.context(dataclasses.replace(INTERPRETED, implementation="plain")):
        assert not fits(2, HEADS, SIZE)
    with jax.set_mesh(shard.make_mesh({"dp": 2, "sp": 4, "tp": 1}, jax.devices()[:8])):
        assert multiple() == 4  # whole tokens on each device, whatever computes them
        with dispatch.context(INTERPRETED):
            assert multiple() == 1024
            assert not fits(1, HEADS, SIZE) and not fits(2, 6, SIZE)
