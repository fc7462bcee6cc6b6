"""Calls of the ops of CUDA autocast's lists, with the dtype that PyTorch documents for them in a bfloat16 region.

Written from the documentation ("Autocast Op Reference") and from ATen/autocast_mode.h, not from our patch. Each row is
a function of a maker of tensors: the same calls run eagerly, through torchax, on fake CUDA tensors, and on a GPU.

Source: PyTorch 2.13, docs/source/amp.md and ATen/autocast_mode.h.
"""

import torch
import torch.nn.functional as F

B, S, H, D = torch.bfloat16, torch.float32, torch.float16, torch.float64
aten = torch.ops.aten


class Maker:
    """Makes tensors of small random values on one device: of float32, bfloat16, or another dtype.

    Args:
        device: The device.
        move: What is done with each tensor after it has been made on the host; by default `.to(device)`.
    """

    def __init__(self, device="cpu", move=None):
        self.move = move or (lambda tensor: tensor.to(device))
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, dtype, *shape):
        return self.move((torch.rand(shape, generator=self.generator) * 0.8 + 0.1).to(dtype))

    def ints(self, high, *shape):
        return self.move(torch.randint(0, high, shape, generator=self.generator))


# What runs in the region's dtype, whatever comes in.
LOWER = {
    "linear": lambda t: F.linear(t(S, 2, 4), t(B, 3, 4), t(S, 3)),
    "linear of float16": lambda t: F.linear(t(H, 2, 4), t(S, 3, 4)),
    "conv1d": lambda t: F.conv1d(t(S, 1, 2, 5), t(B, 3, 2, 2), t(B, 3)),
    "conv2d": lambda t: F.conv2d(t(S, 1, 2, 5, 5), t(B, 3, 2, 2, 2), t(B, 3)),
    "conv2d same": lambda t: F.conv2d(t(S, 1, 2, 5, 5), t(B, 3, 2, 3, 3), padding="same"),
    "conv3d": lambda t: F.conv3d(t(S, 1, 2, 3, 3, 3), t(B, 3, 2, 2, 2, 2), t(B, 3)),
    "conv_tbc": lambda t: torch.conv_tbc(t(S, 5, 1, 2), t(B, 2, 2, 3), t(B, 3)),
    "conv_transpose1d": lambda t: F.conv_transpose1d(t(S, 1, 2, 5), t(B, 2, 3, 2)),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t(S, 1, 2, 5, 5), t(B, 2, 3, 2, 2)),
    "conv_transpose3d": lambda t: F.conv_transpose3d(t(S, 1, 2, 3, 3, 3), t(B, 2, 3, 2, 2, 2)),
    "convolution": lambda t: torch.convolution(
        t(S, 1, 2, 5), t(B, 3, 2, 2), None, [1], [0], [1], False, [0], 1
    ),
    "prelu": lambda t: F.prelu(t(S, 2, 3), t(B, 3)),
    "addmm": lambda t: torch.addmm(t(S, 2, 3), t(B, 2, 4), t(S, 4, 3)),
    "addmm method": lambda t: t(S, 2, 3).addmm(t(B, 2, 4), t(S, 4, 3)),
    "addmv": lambda t: torch.addmv(t(S, 2), t(B, 2, 4), t(S, 4)),
    "addr": lambda t: torch.addr(t(S, 2, 3), t(B, 2), t(S, 3)),
    "matmul": lambda t: torch.matmul(t(S, 2, 4), t(B, 4, 3)),
    "matmul method": lambda t: t(S, 2, 4).matmul(t(B, 4, 3)),
    "@": lambda t: t(S, 5, 2, 4) @ t(B, 4, 3),
    "linalg.matmul": lambda t: torch.linalg.matmul(t(S, 2, 4), t(S, 4, 3)),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t(S, 2, 4), t(B, 3, 4)),
    "mm": lambda t: torch.mm(t(S, 2, 4), t(B, 4, 3)),
    "mv": lambda t: torch.mv(t(S, 2, 4), t(B, 4)),
    "linalg.vecdot": lambda t: torch.linalg.vecdot(t(S, 2, 4), t(B, 2, 4)),
    "addbmm": lambda t: torch.addbmm(t(S, 2, 3), t(B, 5, 2, 4), t(S, 5, 4, 3)),
    "baddbmm": lambda t: torch.baddbmm(t(S, 5, 2, 3), t(B, 5, 2, 4), t(S, 5, 4, 3)),
    "bmm": lambda t: torch.bmm(t(S, 5, 2, 4), t(B, 5, 4, 3)),
    "chain_matmul": lambda t: aten.chain_matmul([t(S, 2, 4), t(B, 4, 3), t(S, 3, 2)]),
    "linalg.multi_dot": lambda t: torch.linalg.multi_dot([t(S, 2, 4), t(B, 4, 3), t(S, 3, 2)]),
    "lstm_cell": lambda t: torch.lstm_cell(t(S, 2, 3), [t(B, 2, 4), t(S, 2, 4)], t(S, 16, 3), t(B, 16, 4))[0],
    "gru_cell": lambda t: torch.gru_cell(t(S, 2, 3), t(B, 2, 4), t(S, 12, 3), t(B, 12, 4)),
    "rnn_tanh_cell": lambda t: torch.rnn_tanh_cell(t(S, 2, 3), t(B, 2, 4), t(S, 4, 3), t(B, 4, 4)),
    "rnn_relu_cell": lambda t: torch.rnn_relu_cell(t(S, 2, 3), t(B, 2, 4), t(S, 4, 3), t(B, 4, 4)),
    "scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(
        t(S, 1, 2, 4, 8), t(B, 1, 2, 4, 8), t(S, 1, 2, 4, 8)
    ),
    "aten.linear": lambda t: aten.linear(t(S, 2, 4), t(B, 3, 4)),
    "aten.mm.default": lambda t: aten.mm.default(t(S, 2, 4), t(B, 4, 3)),
    "multi_head_attention_forward": lambda t: F.multi_head_attention_forward(
        *[t(S, 3, 1, 4)] * 3, 4, 2, t(S, 12, 4), t(S, 12), None, None, False, 0.0, t(S, 4, 4), t(S, 4)
    )[0],
}  # fmt: skip

POINTWISE = ("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt")
POINTWISE += ("sinh", "tan")

# What runs in float32, whatever comes in.
FLOAT32 = {
    **{name: lambda t, name=name: getattr(torch, name)(t(B, 2, 3)) for name in POINTWISE},
    **{f"{name} method": lambda t, name=name: getattr(t(B, 2, 3), name)() for name in ("exp", "log", "rsqrt")},
    "special.expm1": lambda t: torch.special.expm1(t(B, 2)),
    "pow": lambda t: torch.pow(t(B, 2, 3), 2),
    "pow of tensors": lambda t: torch.pow(t(B, 2, 3), t(B, 2, 3)),
    "x ** 2": lambda t: t(B, 2, 3) ** 2,
    "2 ** x": lambda t: 2 ** t(B, 2, 3),
    "1 / x": lambda t: 1 / t(B, 2, 3),
    "square": lambda t: torch.square(t(B, 2, 3)),
    "softplus": lambda t: F.softplus(t(B, 2, 3)),
    "layer_norm": lambda t: F.layer_norm(t(B, 2, 3), (3,), t(B, 3), t(B, 3)),
    "layer_norm of float16": lambda t: F.layer_norm(t(H, 2, 3), (3,)),
    "native_layer_norm": lambda t: torch.native_layer_norm(t(B, 2, 3), (3,), t(B, 3), t(B, 3), 1e-5)[0],
    "rms_norm": lambda t: F.rms_norm(t(B, 2, 3), (3,), t(B, 3)),
    "group_norm": lambda t: F.group_norm(t(B, 2, 4, 3), 2, t(B, 4), t(B, 4)),
    "frobenius_norm": lambda t: torch.norm(t(S, 2, 3), p="fro", dim=(0, 1)),
    "nuclear_norm": lambda t: torch.nuclear_norm(t(B, 3, 3)),
    "cosine_similarity": lambda t: F.cosine_similarity(t(B, 2, 3), t(B, 2, 3)),
    "poisson_nll_loss": lambda t: F.poisson_nll_loss(t(B, 2, 3), t(B, 2, 3)),
    "cosine_embedding_loss": lambda t: F.cosine_embedding_loss(t(B, 2, 3), t(B, 2, 3), t.ints(2, 2) * 2 - 1),
    "nll_loss": lambda t: F.nll_loss(t(B, 2, 3), t.ints(3, 2)),
    "nll_loss2d": lambda t: F.nll_loss(t(B, 2, 3, 2, 2), t.ints(3, 2, 2, 2)),
    "cross_entropy": lambda t: F.cross_entropy(t(B, 2, 3), t.ints(3, 2)),
    "hinge_embedding_loss": lambda t: F.hinge_embedding_loss(t(B, 2, 3), t.ints(2, 2, 3) * 2 - 1),
    "kl_div": lambda t: F.kl_div(t(B, 2, 3), t(B, 2, 3), reduction="sum"),
    "l1_loss": lambda t: F.l1_loss(t(B, 2, 3), t(B, 2, 3)),
    "smooth_l1_loss": lambda t: F.smooth_l1_loss(t(B, 2, 3), t(B, 2, 3)),
    "huber_loss": lambda t: F.huber_loss(t(B, 2, 3), t(B, 2, 3)),
    "mse_loss": lambda t: F.mse_loss(t(B, 2, 3), t(B, 2, 3)),
    "margin_ranking_loss": lambda t: F.margin_ranking_loss(t(B, 2), t(B, 2), t(B, 2)),
    "multilabel_margin_loss": lambda t: F.multilabel_margin_loss(t(B, 2, 3), t.ints(3, 2, 3)),
    "soft_margin_loss": lambda t: F.soft_margin_loss(t(B, 2, 3), t(B, 2, 3)),
    "triplet_margin_loss": lambda t: F.triplet_margin_loss(t(B, 2, 3), t(B, 2, 3), t(B, 2, 3)),
    "multi_margin_loss": lambda t: F.multi_margin_loss(t(B, 2, 3), t.ints(3, 2)),
    "binary_cross_entropy_with_logits": lambda t: F.binary_cross_entropy_with_logits(t(B, 2, 3), t(B, 2, 3)),
    "dist": lambda t: torch.dist(t(B, 2, 3), t(B, 2, 3)),
    "pdist": lambda t: F.pdist(t(B, 4, 3)),
    "cdist": lambda t: torch.cdist(t(B, 4, 3), t(B, 2, 3)),
    "renorm": lambda t: torch.renorm(t(B, 4, 3), 2, 0, 1.0),
    "logsumexp": lambda t: torch.logsumexp(t(B, 4, 3), -1),
    "nearest": lambda t: F.interpolate(t(B, 1, 2, 4, 4), scale_factor=2.0),
    "nearest 3d": lambda t: F.interpolate(t(B, 1, 2, 4, 4, 4), scale_factor=2.0),
    "nearest-exact": lambda t: F.interpolate(t(B, 1, 2, 4, 4), scale_factor=2.0, mode="nearest-exact"),
    "linear interpolation": lambda t: F.interpolate(t(B, 1, 2, 4), scale_factor=2.0, mode="linear"),
    "bilinear interpolation": lambda t: F.interpolate(t(B, 1, 2, 4, 4), scale_factor=2.0, mode="bilinear"),
    "antialiased": lambda t: F.interpolate(t(B, 1, 2, 4, 4), size=(2, 2), mode="bilinear", antialias=True),
    "trilinear": lambda t: F.interpolate(t(B, 1, 2, 4, 4, 4), scale_factor=2.0, mode="trilinear"),
    "bicubic": lambda t: F.interpolate(t(B, 1, 2, 4, 4), scale_factor=2.0, mode="bicubic"),
    "bicubic antialiased": lambda t: F.interpolate(t(B, 1, 2, 4, 4), size=(2, 2), mode="bicubic", antialias=True),
    "prod": lambda t: torch.prod(t(B, 2, 3)),
    "prod of a dim": lambda t: t(B, 2, 3).prod(1),
    "softmax": lambda t: torch.softmax(t(B, 2, 3), -1),
    "softmax method": lambda t: t(B, 2, 3).softmax(dim=-1),
    "functional softmax": lambda t: F.softmax(t(B, 2, 3), dim=-1),
    "softmin": lambda t: F.softmin(t(B, 2, 3), dim=-1),
    "log_softmax": lambda t: F.log_softmax(t(B, 2, 3), dim=-1),
    "cumprod": lambda t: torch.cumprod(t(B, 2, 3), 1),
    "cumsum": lambda t: t(B, 2, 3).cumsum(1),
    "linalg.vector_norm": lambda t: torch.linalg.vector_norm(t(B, 2, 3), dim=-1),
    "linalg.norm": lambda t: torch.linalg.norm(t(B, 2, 3), dim=-1),
    "linalg.matrix_norm": lambda t: torch.linalg.matrix_norm(t(S, 2, 3)),
    "sum": lambda t: torch.sum(t(B, 2, 3)),
    "sum of a dim": lambda t: t(B, 2, 3).sum(1, keepdim=True),
    "norm": lambda t: torch.norm(t(B, 2, 3)),
    "norm method": lambda t: t(B, 2, 3).norm(dim=-1, keepdim=True),
    "normalize": lambda t: F.normalize(t(B, 2, 3), dim=-1),
}

# What runs in the widest dtype of its inputs: here bfloat16 with float32.
WIDEST = {
    "addcdiv": lambda t: torch.addcdiv(t(B, 2), t(S, 2), t(B, 2)),
    "addcmul": lambda t: t(B, 2).addcmul(t(B, 2), t(S, 2)),
    "atan2": lambda t: torch.atan2(t(B, 2), t(S, 2)),
    "bilinear": lambda t: F.bilinear(t(S, 2, 3), t(B, 2, 4), t(B, 5, 3, 4), t(B, 5)),
    "cross": lambda t: torch.cross(t(B, 2, 3), t(S, 2, 3), dim=1),
    "dot": lambda t: torch.dot(t(B, 3), t(S, 3)),
    "vdot": lambda t: torch.vdot(t(B, 3), t(S, 3)),
    "grid_sample": lambda t: F.grid_sample(t(B, 1, 2, 4, 4), t(S, 1, 3, 3, 2), align_corners=False),
    "index_put": lambda t: t(B, 4).index_put((t.ints(4, 2),), t(S, 2)),
    "tensordot": lambda t: torch.tensordot(t(B, 2, 4), t(S, 4, 3), dims=1),
    "scatter_add": lambda t: t(B, 4).scatter_add(0, t.ints(4, 3), t(S, 3)),
    "cat": lambda t: torch.cat([t(B, 2), t(S, 2)]),
    "cat of two low dtypes": lambda t: torch.cat([t(B, 2), t(H, 2)]),
    "stack": lambda t: torch.stack([t(S, 2), t(B, 2)]),
    "add": lambda t: t(B, 2) + t(S, 2),
    "mul": lambda t: t(S, 2) * t(B, 2),
    "where": lambda t: torch.where(t.ints(2, 3).bool(), t(B, 3), t(S, 3)),
}

# The same where all inputs are bfloat16, and what is in no list: the dtype stays.
KEPT = {
    "addcmul of one dtype": lambda t: torch.addcmul(t(B, 2), t(B, 2), t(B, 2)),
    "dot of one dtype": lambda t: torch.dot(t(B, 3), t(B, 3)),
    "cat of one dtype": lambda t: torch.cat([t(B, 2), t(B, 2)]),
    "add of one dtype": lambda t: t(B, 2) + t(B, 2),
    "mean": lambda t: t(B, 2, 3).mean(-1),
    "var": lambda t: t(B, 2, 3).var(-1),
    "gelu": lambda t: F.gelu(t(B, 2, 3), approximate="tanh"),
    "silu": lambda t: F.silu(t(B, 2, 3)),
    "sqrt": lambda t: torch.sqrt(t(B, 2, 3)),
    "sigmoid": lambda t: torch.sigmoid(t(B, 2, 3)),
    "x / 2": lambda t: t(B, 2, 3) / 2,
    "x * x": lambda t: t(B, 2, 3) * 2,
    "avg_pool2d": lambda t: F.avg_pool2d(t(B, 1, 2, 4, 4), 2),
    "interpolate area": lambda t: F.interpolate(t(B, 1, 2, 4, 4), scale_factor=0.5, mode="area"),
    "pad": lambda t: F.pad(t(B, 2, 3), (1, 1)),
    "embedding": lambda t: F.embedding(t.ints(3, 2), t(B, 3, 4)),
    "sum told": lambda t: t(B, 2, 3).sum(-1, dtype=B),
    "softmax told": lambda t: F.softmax(t(B, 2, 3), dim=-1, dtype=B),
    "cumsum told by position": lambda t: aten.cumsum(t(B, 2, 3), 0, dtype=B),
    "pow in place": lambda t: t(B, 2, 3).pow_(2),
    "addmm in place": lambda t: t(B, 2, 3).addmm_(t(B, 2, 4), t(B, 4, 3)),
}

# What float32 gives in no list, and float64 everywhere: also kept.
FLOAT32_KEPT = {
    "mean of float32": lambda t: t(S, 2, 3).mean(-1),
    "gelu of float32": lambda t: F.gelu(t(S, 2, 3)),
    "addmm in place of float32": lambda t: t(S, 2, 3).addmm_(t(S, 2, 4), t(S, 4, 3)),
    "einsum in a norm": lambda t: t(S, 2, 3) * torch.rsqrt(t(B, 2, 3).pow(2).mean(-1, keepdim=True) + 1e-6),
}
FLOAT64 = {
    "linear of float64": lambda t: F.linear(t(D, 2, 4), t(D, 3, 4)),
    "exp of float64": lambda t: torch.exp(t(D, 2)),
    "sum of float64": lambda t: t(D, 2, 3).sum(),
    "softmax of float64": lambda t: F.softmax(t(D, 2, 3), dim=-1),
}
INTEGERS = {"sum of integers": lambda t: t.ints(3, 2, 3).sum(), "prod of integers": lambda t: t.ints(3, 2, 3).prod()}

ROWS = {
    **{name: (call, B) for name, call in {**LOWER, **KEPT}.items()},
    **{name: (call, S) for name, call in {**FLOAT32, **WIDEST, **FLOAT32_KEPT}.items()},
    **{name: (call, D) for name, call in FLOAT64.items()},
    **{name: (call, torch.int64) for name, call in INTEGERS.items()},
}
assert len(ROWS) == sum(map(len, (LOWER, KEPT, FLOAT32, WIDEST, FLOAT32_KEPT, FLOAT64, INTEGERS)))
