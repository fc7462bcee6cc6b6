"""Each operator that a patch mends: a sample that torchax 0.0.13 computes otherwise, compared with eager PyTorch."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from torchport import engine, patch

PATCHES = Path(__file__).parents[2] / "patches"
RANDOM = torch.Generator().manual_seed(0)


def values(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=RANDOM).mul(4).to(dtype)


image, volume, batch = values(1, 2, 6, 6), values(1, 2, 6, 6, 6), values(4, 3, 5)
square, row = values(3, 3), torch.tensor([1.0, 2.0, 4.0])
nan, rows = torch.full((3, 3), float("nan")), values(2, 5).sort().values
pool = {"stride": 2, "padding": 1, "ceil_mode": True}
spread = {"stride": 1, "padding": 1, "dilation": 2, "return_indices": True}
wide = torch.tensor([[1, 2**40, 3, 2**40], [-5, 0, 7, 7]])
blanks = torch.tensor([[1, float("nan"), 2, float("nan")]]).double()
lines, many, half = (values(1, 4, 7), values(4, 2, 3)), values(2, 200).bfloat16(), image.bfloat16()
bag = torch.tensor([2, 0, 2])
least = torch.full((1, 1, 5, 5), -(2**40))


def batch_norm(x, running, training):
    mean, var = running.clone(), running.clone()
    return functional.batch_norm(x, mean, var, running, running, training), mean, var


def embedding(table, places):
    table = table.clone()
    return functional.embedding(places, table, max_norm=0.5), table


SAMPLES = {
    "linear": (lambda x: functional.linear(input=x, weight=x, bias=x[0]), square),
    "addmm": (lambda base, x: torch.addmm(base, x, x, beta=0, alpha=2), nan, square),
    "addmv": (lambda base, x: torch.addmv(base[0], x, x[0], beta=0), nan, square),
    "avg_pool2d": (lambda x: functional.avg_pool2d(x, 3, **pool), image),
    "avg_pool2d without the padding": (lambda x: functional.avg_pool2d(x, 2, count_include_pad=False, **pool), image),
    "avg_pool2d of bfloat16": (lambda x: functional.avg_pool2d(x, 3, **pool), image.bfloat16()),
    "avg_pool3d": (lambda x: functional.avg_pool3d(x, 3, **pool), volume),
    "avg_pool3d divisor": (lambda x: functional.avg_pool3d(x, 2, divisor_override=3, **pool), volume[0]),
    "max_pool2d": (lambda x: functional.max_pool2d(x, 2, **spread), least),
    "max_pool3d": (lambda x: functional.max_pool3d(x, 2, **spread), least[None].expand(1, 1, 5, 5, 5)),
    "adaptive_max_pool1d": (lambda x: functional.adaptive_max_pool1d(x, 3, return_indices=True), image[0]),
    "adaptive_max_pool2d": (lambda x: functional.adaptive_max_pool2d(x, (3, 9), return_indices=True), image),
    "adaptive_max_pool3d": (lambda x: functional.adaptive_max_pool3d(x, 3, return_indices=True), volume),
    "batch_norm in training": (lambda x, running: batch_norm(x, running, True), batch, row),
    "batch_norm": (lambda x, running: batch_norm(x, running, False), batch.bfloat16(), row.bfloat16()),
    "flip": (lambda x: x.sum().flip(-1), square),
    "searchsorted": (lambda x, y: torch.searchsorted(x, y, right=True, out_int32=True), rows, rows),
    "searchsorted of a number": (lambda x: torch.searchsorted(x[0], 0.5, side="left"), rows),
    "searchsorted by a sorter": (lambda x, y: torch.searchsorted(x.flip(-1), y, sorter=_places(x)), rows, rows + 0.5),
    "contiguous": (lambda x: torch.ops.aten.contiguous(x.mT), square),
    "ldexp": (torch.ldexp, square, torch.tensor([1, -2, 3])),
    "embedding": (embedding, square, torch.tensor([0, 2, 2])),
    "repeat_interleave": (lambda n: torch.repeat_interleave(n, output_size=3), torch.tensor([1, 0, 2])),
    "argmax of 64 bits": (lambda x: (x.argmax(-1), x.argmin(), x.max(0), x.min(0, True)), wide),
    "argmax of NaN": (
        lambda x: (x.argmax(-1), x.argmin(-1, True)),
        blanks,
    ),
    "sum of a dtype": (lambda x: (x.sum(dtype=torch.float32), x.sum(-1, True, dtype=x.float().dtype)), many),
    "convolution transposed in groups": (lambda x, w: functional.conv_transpose1d(x, w, groups=2), *lines),
    "convolution transposed": (lambda x, w: functional.conv_transpose1d(x, w, w[:, 0, 0], 2, 1, 1, 2, 2), *lines),
    "convolution": (lambda x, w: functional.conv1d(x, w, w[:, 0, 0], 2, 1, 2, 2), *lines),
    "bicubic by a factor": (lambda x: functional.interpolate(x, scale_factor=0.6, mode="bicubic"), image),
    "bicubic with corners": (lambda x: functional.interpolate(x, 9, mode="bicubic", align_corners=True), image),
    "bilinear antialias": (lambda x: functional.interpolate(x, (3, 8), mode="bilinear", antialias=True), image),
    "bicubic antialias": (lambda x: functional.interpolate(x, (4, 7), mode="bicubic", antialias=True), image),
    "glu": (functional.glu, values(4, 6).bfloat16()),
    "exp2": (torch.exp2, values(50).bfloat16()),
    "fmod": (torch.fmod, values(50).bfloat16(), values(50).bfloat16()),
    "index_reduce": (lambda x, n: x.index_reduce(0, n, x, "mean"), square, bag),
    "index_reduce without itself": (
        lambda x, n: torch.index_reduce(x, 1, n, x, "prod", include_self=False),
        square,
        bag,
    ),
    "max_unpool2d": (lambda x: functional.max_unpool2d(*functional.max_pool2d(x, 2, return_indices=True), 2), image),
    "max_unpool3d": (lambda x: functional.max_unpool3d(*functional.max_pool3d(x, 2, return_indices=True), 2), volume),
    "cummax": (lambda x: (x.cummax(1), x.cummin(0), x[0, 0].cummax(0)), batch.round()),
    "renorm": (lambda x: x.renorm(2, 0, 1), square.bfloat16()),
    "vector_norm": (
        lambda x: [torch.linalg.vector_norm(x, n, dim=-1) for n in (0, 1, 2, 3, float("-inf"))],
        image.bfloat16(),
    ),
    "vector_norm of a number": (lambda x: torch.linalg.vector_norm(x.sum(), 0), square),
    "view_copy": (lambda x: torch.view_copy(x, dtype=torch.int32), square),
}


def _places(x):
    return torch.arange(x.shape[-1] - 1, -1, -1, device=x.device).expand(x.shape).contiguous()


@pytest.fixture(scope="module")
def computed():
    """What one program of the engine returns of all samples, as tensors of PyTorch."""
    import jax
    import jax.extend
    import numpy

    entries = [entry for entry in patch.read(PATCHES, ["torch"]) if entry.kind == "op"]
    with patch.applied([*patch.read(PATCHES, ["torchax"]), *entries]) as ledger:
        engine.begin_trace()
        from torchax.ops import mappings

        def body(arrays):
            return {name: tree_leaves(SAMPLES[name][0](*given)) for name, given in arrays.items()}

        with engine.operators({op.target: op.function for op in ledger.ops()}), engine.wide():
            arrays = {name: [mappings.t2j(x) for x in given] for name, (_, *given) in SAMPLES.items()}
            program = jax.make_jaxpr(lambda arrays: engine.call_torch(body, arrays), return_shape=True)
            jaxpr, shapes = program(arrays)
        flat = jax.jit(jax.extend.core.jaxpr_as_fun(jaxpr))(*jax.tree.leaves(arrays))
        kinds = [mappings.j2t_dtype(x.dtype) for x in flat]
        found = [torch.from_numpy(numpy.array(x, "float32" if x.dtype == "bfloat16" else x.dtype)) for x in flat]
        tensors = [x.to(kind) for x, kind in zip(found, kinds, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(shapes), tensors)


@pytest.mark.filterwarnings("ignore:index_reduce")  # that it is in beta
@pytest.mark.parametrize("name", SAMPLES)
def test_a_mended_operator_computes_what_pytorch_does(name, computed):
    function, *given = SAMPLES[name]
    for one, other in zip(computed[name], tree_leaves(function(*given)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
