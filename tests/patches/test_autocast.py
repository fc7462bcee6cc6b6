"""CUDA autocast without CUDA: the dtypes, in eager PyTorch, through torchax, while JAX traces, and on a GPU's kernels.

torch registers CUDA's autocast kernels in every build, and a fake tensor may say that it lies on CUDA: so torch itself
says here, without a GPU, which dtype CUDA autocast gives. On a machine with CUDA the same rows run on it:
`pytest tests/patches/test_autocast.py`.
"""

import contextlib
import sys
import threading
import warnings

import jax
import pytest
import torch
import torch.nn.functional as F
from autocast_rows import FLOAT64, INTEGERS, LOWER, ROWS, B, H, Maker, S
from torch._subclasses.fake_tensor import FakeTensorMode

from torchport import patch
from torchport.errors import PatchError

# CUDA kernels that a fake tensor cannot do without: a check of the device, cuDNN's version, a fused cell.
NOT_FAKE = {"lstm_cell", "gru_cell", "multi_head_attention_forward", "grid_sample"}
# What torchax 0.0.13 cannot lower, under autocast or not.
NOT_TORCHAX = {"conv_tbc", "addmm in place", "addmm in place of float32", "antialiased", "bicubic antialiased"}
# What asks for a value, which a trace has not, under autocast or not.
NOT_TRACEABLE = set()
# JAX has 32 bits unless asked otherwise: there is no float64 and no int64 to keep.
TORCHAX_ROWS = sorted(ROWS.keys() - NOT_TORCHAX - FLOAT64.keys() - INTEGERS.keys())


@pytest.fixture(scope="module")
def entries(root):
    return patch.read(root / "patches", ["torchax", "torch/autocast"])


@pytest.fixture(scope="module")
def patched(entries):
    """The patches, in force for the whole module: what happens without them stands in test_autocast_applied.py."""
    with patch.applied(entries) as ledger:
        yield ledger


@pytest.fixture(scope="module")
def env(patched):
    """torchax's environment, not entered."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchax

        environment = torchax.default_env()
    before = environment.config.force_materialize_views
    environment.config.force_materialize_views = True
    yield environment
    environment.config.force_materialize_views = before


@pytest.fixture
def product():
    """Gives the dtype of a product of two float32 matrices, which tells whether a region is in force."""
    a = torch.rand(2, 3)
    return lambda: (a @ a.T).dtype


def region(dtype=B, **kwargs):
    return torch.autocast("cuda", dtype, **kwargs)


def switch_kernels(on):
    """Switches torch's CUDA autocast as `torch.set_autocast_enabled` does, which is patched in some tests."""
    torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutocastCUDA, not on)


def on_fake_cuda(call, dtype=B):
    """Returns what torch's own CUDA autocast makes of a call, on fake tensors; they have a dtype and no values."""

    def move(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    with FakeTensorMode(allow_non_fake_inputs=True):
        switch_kernels(True)
        torch.set_autocast_dtype("cuda", dtype)
        try:
            return call(Maker(move=move))
        finally:
            switch_kernels(False)
            torch.set_autocast_dtype("cuda", H)


# The deprecated two have their rows because the lists name them; JAX has 32-bit integers.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:at.*nuclear_norm is deprecated",
        "ignore:torch.chain_matmul is deprec",
        "ignore:Explicitly requested dtype int64",
    ),
    pytest.mark.usefixtures("plainly_compiled"),
]


def documented(names):
    return {name: ROWS[name][1] for name in names}


def test_each_op_has_its_documented_dtype_in_eager_pytorch(patched):
    with region():
        assert {name: call(Maker()).dtype for name, (call, _) in ROWS.items()} == documented(ROWS)


def test_the_documented_dtypes_are_those_of_torchs_own_cuda_autocast():
    names = ROWS.keys() - NOT_FAKE
    assert {name: on_fake_cuda(ROWS[name][0]).dtype for name in names} == documented(names)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run `pytest tests/patches/test_autocast.py` on one"
)
def test_the_documented_dtypes_are_those_of_a_gpu():
    with torch.autocast("cuda", B):
        assert {name: call(Maker("cuda")).dtype for name, (call, _) in ROWS.items()} == documented(ROWS)


@pytest.mark.parametrize("dtype", [B, H], ids=str)
def test_the_lower_precision_is_the_regions(patched, dtype):
    names = LOWER.keys() - NOT_FAKE
    with region(dtype):
        found = {name: LOWER[name](Maker()).dtype for name in names}
    assert found == {name: on_fake_cuda(LOWER[name], dtype).dtype for name in names} == dict.fromkeys(names, dtype)


def test_the_lists_are_those_of_the_installed_torch(patched):
    lists = sys.modules["torchport_patches.torch.autocast"]
    kernels = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    listed = {name for name in lists.POLICIES if name not in lists.REFUSED.split()}
    assert listed - kernels == {"cudnn_convolution", "cudnn_convolution_transpose"} - kernels
    assert kernels - listed <= {"_cudnn_rnn"}  # of PyTorch built with CUDA: called for a CUDA tensor alone


@pytest.mark.parametrize("order", ["region inside", "environment inside"])
def test_each_op_has_its_documented_dtype_through_torchax(env, order):
    found = {}
    for name in TORCHAX_ROWS:
        managers = [env, region()] if order == "region inside" else [region(), env]
        with managers[0], managers[1]:
            found[name] = ROWS[name][0](Maker("jax")).dtype
    assert found == documented(TORCHAX_ROWS)


def traced(env, call, around, inside):
    """Returns the dtype of a call's result while JAX traces it, with its inputs as arguments of the program."""
    from torchax import interop

    made, dtypes = [], []
    with region():
        call(Maker(move=lambda tensor: made.append(tensor) or tensor))

    def program(arrays):
        given = iter(arrays)
        with inside:
            result = call(Maker(move=lambda tensor: next(given)))
        dtypes.append(result.dtype)
        return result

    with env:
        arrays = interop.jax_view([tensor.to("jax") for tensor in made])
    with around:
        jax.jit(lambda arrays: interop.call_torch(program, arrays)).trace(arrays)
    return dtypes[-1]


@pytest.mark.parametrize("order", ["region inside", "region around the trace"])
def test_each_op_has_its_documented_dtype_while_jax_traces(env, order):
    names = sorted(set(TORCHAX_ROWS) - NOT_TRACEABLE)
    nothing = contextlib.nullcontext()
    found = {}
    for name in names:
        around, inside = (nothing, region()) if order == "region inside" else (region(), nothing)
        found[name] = traced(env, ROWS[name][0], around, inside)
    assert found == documented(names)


def test_a_region_ends_and_may_be_disabled_within(patched, product):
    assert product() == S
    with region():
        assert product() == B
        with region(enabled=False):
            assert product() == S
            with region(H):
                assert product() == H
            assert product() == S
        assert product() == B
    assert product() == S


def test_torch_itself_tells_the_state(patched):
    states = [(torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled())]
    with region(cache_enabled=False):
        states.append(
            (torch.is_autocast_enabled(), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled())
        )
        with region(H, enabled=False):
            states.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), None))
    states.append(
        (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled())
    )
    assert states == [(False, H, True), (True, B, False), (False, H, None), (False, H, True)]


def test_without_a_dtype_it_is_cudas_float16(patched, product):
    with torch.autocast("cuda"):
        assert product() == H


def test_regions_of_other_devices_are_torchs_own(patched, product):
    with torch.autocast("cpu", B):
        assert product() == B and not torch.is_autocast_enabled("cuda")
        assert F.layer_norm(torch.rand(2, 3, dtype=B), (3,)).dtype == B
        with region(H):  # torch's CPU kernels come after ours, as the tensors do lie on the CPU
            assert F.layer_norm(torch.rand(2, 3, dtype=B), (3,)).dtype == S
    with region():
        with torch.autocast("cpu", enabled=False):
            assert product() == B


def test_an_exception_leaves_no_region_behind(patched, product):
    depth = torch._C._len_torch_function_stack()
    with pytest.raises(ZeroDivisionError), region(), region(H):
        1 / 0  # noqa: B018
    assert product() == S and torch._C._len_torch_function_stack() == depth
    with region():
        with pytest.raises(RuntimeError, match="shape"):
            torch.rand(2, 3) @ torch.rand(2, 3)
        assert product() == B


def test_a_decorated_function_enters_the_region_when_it_is_called(patched, product):
    @torch.autocast("cuda", dtype=B)
    def decorated(inner=product):
        return inner()

    @torch.amp.autocast("cuda", enabled=False)
    def without():
        return product()

    assert (decorated(), product()) == (B, S)
    assert decorated(inner=lambda: (decorated(), product(), without())) == (B, B, S)
    assert product() == S


def test_every_name_of_the_class_is_covered(patched, product):
    from torch import autocast as by_value
    from torch.cuda.amp import autocast as old

    for made in (lambda: by_value("cuda", B), lambda: torch.amp.autocast(device_type="cuda", dtype=B)):
        with made():
            assert product() == B
    with pytest.warns(FutureWarning, match="deprecated"):
        with old(dtype=B), torch.cuda.amp.autocast(enabled=False):
            assert product() == S
    with pytest.warns(FutureWarning, match="deprecated"), old(True, B):
        assert product() == B


def test_switching_it_on_where_nothing_listens_is_refused(patched, product):
    for arguments in (("cuda", True), (True,)):
        with pytest.raises(PatchError, match="outside every region"):
            torch.set_autocast_enabled(*arguments)
    torch.set_autocast_enabled("cpu", False)
    with region():
        torch.set_autocast_enabled("cuda", False)
        assert product() == S
        torch.set_autocast_enabled("cuda", True)
        assert product() == B
    assert product() == S


def test_each_thread_has_its_own_regions(patched, product):
    found = {}

    def work(name, dtype):
        before = product()
        with region(dtype) if dtype else contextlib.nullcontext():
            barrier.wait(10)
            found[name] = (before, product(), product())
            barrier.wait(10)

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=work, args=pair) for pair in (("b", B), ("h", H), ("none", None))]
    with region():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert product() == B
    assert found == {"b": (S, B, B), "h": (S, H, H), "none": (S, S, S)}


def test_a_generator_may_leave_its_region_out_of_turn(patched, env, product):
    def steps():
        with region():
            yield product()

    generator = steps()
    assert next(generator) == B
    with env:
        assert next(generator, None) is None
        assert torch.ones(2, 2, device="jax").dtype == S
    assert product() == S and torch._C._len_torch_function_stack() == 0


def test_the_call_says_what_float16_in_a_bfloat16_region_cannot_do(patched):
    call = lambda t: torch.addcmul(t(H, 2), t(B, 2), t(B, 2))  # noqa: E731
    with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        on_fake_cuda(call)
    with (
        region(),
        pytest.raises(RuntimeError, match=r"to torch.bfloat16 does not promote torch.float16\. Cast it first"),
    ):
        call(Maker())


def test_binary_cross_entropy_is_banned_as_on_cuda(patched):
    call = lambda t: F.binary_cross_entropy(t(S, 2), t(S, 2))  # noqa: E731
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        on_fake_cuda(call)
    with region(), pytest.raises(RuntimeError, match="unsafe under autocast"):
        call(Maker())


@pytest.mark.parametrize(
    "call",
    [
        lambda t: torch.inner(t(B, 2, 3), t(S, 2, 3)),
        lambda t: torch.trapezoid(t(B, 2, 3)),
        lambda t: F.pairwise_distance(t(B, 2, 3), t(B, 2, 3)),
        lambda t: torch.nn.LSTM(3, 4)(t(S, 2, 1, 3)),
    ],
)
def test_what_torch_composes_out_of_sight_is_refused(patched, call):
    with region(), pytest.raises(PatchError, match="casts its parts one by one, and here nothing sees them"):
        call(Maker())
    call(lambda dtype, *shape: Maker()(S, *shape))


def test_the_inputs_of_a_custom_function_are_cast(patched):
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=S)
        def forward(ctx, x, weights):
            ctx.seen = (x.dtype, weights["w"].dtype, torch.is_autocast_enabled("cuda"))
            return x @ weights["w"], ctx

    x, weights = torch.rand(2, 2, dtype=B), {"w": torch.rand(2, 2, dtype=H)}
    with region():
        result, ctx = Product.apply(x, weights)
    assert result.dtype == S and ctx.seen == (S, S, False)


def test_gradients_come_back_in_the_dtypes_of_the_leaves(patched):
    layer = torch.nn.Linear(3, 2)
    x = torch.rand(4, 3, requires_grad=True)
    with region():
        loss = F.mse_loss(layer(x), torch.zeros(4, 2))
    loss.backward()
    with torch.autocast("cpu", B):
        again = torch.nn.functional.linear(x, layer.weight, layer.bias)
    expected = torch.autograd.grad(F.mse_loss(again.float(), torch.zeros(4, 2)), layer.weight)[0]
    assert loss.dtype == layer.weight.grad.dtype == x.grad.dtype == S
    assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize("name", ["linear", "conv2d", "conv3d", "matmul", "@", "bmm", "baddbmm", "addmm", "prelu"])
def test_values_are_those_of_torchs_cpu_autocast_where_the_lists_agree(patched, name):
    call, _ = ROWS[name]
    with region():
        ours = call(Maker())
    with torch.autocast("cpu", B):
        theirs = call(Maker())
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_values_stay_within_the_bound_that_the_patch_states(patched, entries):
    bound = next(entry for entry in entries if entry.id == "torch.autocast.entered").equivalence.close.bound
    for name in ("linear", "conv3d", "scaled_dot_product_attention", "layer_norm", "softmax", "rms_norm"):
        call, _ = ROWS[name]
        maker = Maker()
        with region():
            ours = call(Maker()).double()
        exact = call(lambda dtype, *shape, maker=maker: maker(dtype, *shape).double())
        assert (ours - exact).abs().max() / exact.abs().max() <= bound


def test_an_upstreams_override_of_a_python_function_stays_whole(env):
    """A function that torchax lowers as one is cast by its name, and its lowering is called."""
    seen = []

    def attention(x, shape, *rest, **kwargs):
        seen.append(x.dtype)
        return x

    before = dict(env._ops)
    try:
        env.override_op_definition(F.layer_norm, attention)
        with env, region():
            F.layer_norm(env.to_xla(torch.ones(2, 3, dtype=B)), (3,))
    finally:
        env._ops.clear()
        env._ops.update(before)
    assert seen == [S]


def test_tensors_of_the_host_are_left_alone_where_torchax_stands_in(env, product):
    with env, region():
        assert product() == S
    with region():
        assert product() == B


class Norm(torch.nn.Module):
    """A norm over heads that computes in float32 and gives what it was given."""

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


class Block(torch.nn.Module):
    """Two streams with one attention over both; norms without weights, modulation, gated residuals."""

    def __init__(self, width):
        super().__init__()
        self.modulation = torch.nn.Linear(width, 3 * width)
        self.norm, self.text_norm = (torch.nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.text_qkv = (torch.nn.Linear(width, 3 * width) for _ in range(2))
        self.out, self.text_out = (torch.nn.Linear(width, width) for _ in range(2))
        self.head_norm = Norm()

    def forward(self, image, text, vector):
        shift, scale, gate = self.modulation(F.silu(vector)).unsqueeze(1).chunk(3, dim=-1)
        streams = (self.norm(image), self.qkv), (self.text_norm(text), self.text_qkv)
        qkv = [layer(normed * (1 + scale) + shift) for normed, layer in streams]
        q, k, v = (
            torch.cat(parts, 1).unflatten(-1, (2, -1)).transpose(1, 2)
            for parts in zip(*(x.chunk(3, -1) for x in qkv), strict=True)
        )
        joint = F.scaled_dot_product_attention(self.head_norm(q), self.head_norm(k), v).transpose(1, 2).flatten(2)
        to_image, to_text = joint.split([image.shape[1], text.shape[1]], dim=1)
        return image + self.out(to_image) * gate, text + self.text_out(to_text) * gate


class Flow(torch.nn.Module):
    """A small video transformer of the usual constructs: what meets what decides each dtype."""

    def __init__(self, width=16):
        super().__init__()
        self.image_in = torch.nn.Conv3d(4, width, 1)
        self.text_in, self.pooled_in = torch.nn.Linear(6, width), torch.nn.Linear(6, width)
        self.vision_in = torch.nn.Sequential(
            torch.nn.LayerNorm(5), torch.nn.Linear(5, width), torch.nn.GELU(), torch.nn.Linear(width, width),
            torch.nn.LayerNorm(width),
        )  # fmt: skip
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(2))
        self.final_norm = torch.nn.LayerNorm(width, elementwise_affine=False)
        self.final = torch.nn.Linear(width, 4)

    def forward(self, latents, prompt, mask, vision):
        image = self.image_in(latents).flatten(2).transpose(1, 2)
        pooled = (prompt * mask.float().unsqueeze(-1)).sum(1) / mask.float().sum(1, keepdim=True)
        vector = self.pooled_in(pooled)
        text = torch.cat([self.vision_in(vision), self.text_in(prompt)], dim=1)
        for block in self.blocks:
            image, text = block(image, text, vector)
        return self.final(self.final_norm(torch.cat([image, text], 1)).narrow(1, 0, image.shape[1]))


BLOCK = {"modulation": B, "norm": S, "text_norm": S, "qkv": B, "text_qkv": B, "head_norm": B, "out": B, "text_out": B}
# Latents and vision states in float32, prompts in float16, weights in bfloat16: the norms give float32, products
# bfloat16; the image's residual stays bfloat16, and the text's is float32, as vision ends in a norm and `cat` promotes.
FLOW = {
    "image_in": B, "text_in": B, "pooled_in": B, "vision_in": S, "vision_in.0": S, "vision_in.1": B, "vision_in.2": B,
    "vision_in.3": B, "vision_in.4": S, "blocks.0": (B, S), "blocks.1": (B, S),
    **{f"blocks.{i}.{name}": dtype for i in range(2) for name, dtype in BLOCK.items()},
    "final_norm": S, "final": B, "": B,
}  # fmt: skip


@pytest.fixture
def flow():
    """The module with bfloat16 weights, its inputs, and the dtypes of what its modules gave in the last call."""
    torch.manual_seed(0)
    model, seen = Flow().to(B).eval().requires_grad_(False), {}

    def keep(name):
        def hook(module, inputs, output):
            seen[name] = tuple(part.dtype for part in output) if isinstance(output, tuple) else output.dtype

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(keep(name))
    latents, prompt, vision = torch.randn(2, 4, 2, 3, 3), torch.randn(2, 5, 6).to(H), torch.randn(2, 3, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    return model, {"latents": latents, "prompt": prompt, "mask": mask, "vision": vision}, seen


def test_a_video_transformers_dtypes_flow_as_under_cuda_autocast(patched, flow):
    model, inputs, seen = flow
    with region():
        model(**inputs)
    assert seen == FLOW
    seen.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        switch_kernels(True)
        torch.set_autocast_dtype("cuda", B)
        try:
            fake = {name: torch.empty_like(tensor, device="cuda") for name, tensor in inputs.items()}
            weights = {name: torch.empty_like(tensor, device="cuda") for name, tensor in model.state_dict().items()}
            torch.func.functional_call(model, weights, (), fake)
        finally:
            switch_kernels(False)
            torch.set_autocast_dtype("cuda", H)
    assert seen == FLOW


def test_a_video_transformers_dtypes_flow_so_in_a_trace(env, flow):
    from torchax import interop

    model, inputs, seen = flow
    with region():
        eager = model(**inputs)
    seen.clear()

    def forward(weights, tensors):
        with region():
            return torch.func.functional_call(model, weights, (), tensors)

    with env:
        weights, arrays = ({n: t.to("jax").jax() for n, t in d.items()} for d in (model.state_dict(), inputs))
    traced = jax.jit(lambda weights, arrays: interop.call_torch(forward, weights, arrays))(weights, arrays)
    assert seen == FLOW and traced.dtype == "bfloat16"
    difference = (torch.tensor(traced.astype("float32").tolist()) - eager.float()).abs().max() / eager.abs().max()
    assert difference <= 4 * 2**-8
