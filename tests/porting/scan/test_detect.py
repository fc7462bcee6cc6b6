"""What is found in one function, and what only looks like it."""

import re

import pytest

from torchport.engine import conformance
from torchport.porting.scan import detect


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("assert x.max() <= 1", "branch"),
        ("while (x > 0).any(): x = x - 1", "branch"),
        ("y = 1 if x.sum() > 0 else 2", "branch"),
        ("y = bool(x.any())", "branch"),
        ("y = [a for a in x if a > 0]", "branch"),
        ("y = int(x[0])", "item"),
        ("y = range(x.sum())", "item"),
        ("y = x[: x.sum()]", "item"),
        ("y = x.numpy()", "item"),
        ("y = x.tolist()", "item"),
        ("y = x[x > 0]", "mask-index"),
        ("y = x[~torch.isnan(x)]", "mask-index"),
        ("y = x.nonzero()", "mask-index"),
        ("y = torch.bincount(x)", "mask-index"),
        ("y = torch.where(x > 0)", "mask-index"),
        ("x[x > 0] = x.sum()", "mask-index"),
        ("y = x.double()", "float64"),
        ("y = x.to(torch.float64)", "float64"),
        ("y = torch.fft.rfft(x)", "complex"),
        ("y = torch.equal(x, x)", "operator"),
        ("y = x.equal(x)", "operator"),
        ("y = torch.special.airy_ai(x)", "operator"),
        ("y = x.cuda()", "cuda-device"),
        ("y = x.to(f'cuda:{n}')", "cuda-device"),
        ("torch.cuda.set_device(n)", "cuda-call"),
        ("y = torch.zeros(n, device='cpu')", "host-tensor"),
        ("y = torch.ones(n, n, device=x.device)", "square-mask"),
        ("y = x[:, None] == x[None, :]", "square-mask"),
        ("y = torch.logical_and(x.unsqueeze(1), x.unsqueeze(2))", "square-mask"),
        ("for i in range(n): x[i] = 0", "inplace-loop"),
        ("for i in range(n): x[i].copy_(x[0])", "inplace-loop"),
        ("y = torch.compile(n)", "compile"),
        ("import triton", "kernel"),
        ("dist.barrier()", "process-group"),
        ("with torch.cuda.amp.autocast(): y = x", "autocast"),
    ],
)
def test_a_statement_is_found(kinds, statement, kind):
    text = f"import torch\nimport torch.distributed as dist\ndef f(x: torch.Tensor, n):\n    {statement}\n"
    assert kinds(text) == [(kind, 4)]


@pytest.mark.parametrize(
    "statement",
    [
        "assert x.shape[0] == 1 and x.dtype == torch.float32",
        "y = 1 if x is None else 2",
        "y = 1 if x.ndim == 4 else 2",
        "y = int(x.shape[0])",
        "y = len(x) if n else 0",
        "y = n.equal(x)",
        "y = x[..., 0::2]",
        "y = x[n]",
        "x[0] = 1",
        "y = torch.zeros(n, device=x.device)",
        "y = torch.zeros(3, 3, device=x.device)",
        "y = torch.where(x > 0, x, 0)",
        "torch.cuda.empty_cache()",
        "y = torch.cuda.is_available()",
        "y = dist.is_initialized()",
        "y = x.device.type == 'cuda'",
        "y = x.cpu().numpy()",
        "for i in range(n): y = x[i]",
        "for i in range(n): n[i] = 0",
        "y = x[:, None] + x[:, :, None].sum()",
        "y = torch.jit.is_scripting()",
    ],
)
def test_what_only_looks_like_it_is_not_found(kinds, statement):
    text = f"import torch\nimport torch.distributed as dist\ndef f(x: torch.Tensor, n):\n    {statement}\n"
    assert kinds(text) == []


def test_autocast_is_found_as_a_decorator_and_its_own_device_is_not(kinds):
    assert kinds("import torch\n@torch.autocast('cuda', enabled=False)\ndef f(x):\n    return x\n") == [("autocast", 2)]


def test_torch_is_known_by_any_name(kinds):
    assert kinds("from torch import float64 as wide\ndef f(x):\n    return x.to(wide)\n") == [("float64", 3)]
    assert kinds("import torch.cuda as c\nc.synchronize()\n") == [("cuda-import", 2)]


def test_a_name_of_the_functions_own_is_not_the_modules(kinds):
    assert kinds("import torch\nfrom torch import distributed as dist\ndef f(dist):\n    dist.barrier()\n") == []


def test_a_package_that_is_tried_is_found_and_not_for_certain(scanned):
    text = "try:\n    import flash_attn\nexcept ImportError:\n    flash_attn = None\n"
    [tried] = scanned({"up.py": text}).findings
    assert (tried.kind, tried.verdict) == ("kernel", "unknown")
    [needed] = scanned({"up.py": "import flash_attn\n"}).findings
    assert (needed.kind, needed.verdict) == ("kernel", "rewrite")


def test_a_kernel_that_a_module_hands_on_is_found_where_it_is_called(scanned):
    files = {
        "kernels.py": "try:\n    from flash_attn import flash_attn_func as fast\nexcept ImportError:\n    pass\n",
        "up.py": "import torch\nfrom kernels import fast\ndef f(q):\n    return fast(q)\n",
    }
    found = [(one.kind, one.line, one.uses) for one in scanned(files).findings if one.file.endswith("up.py")]
    assert found == [("kernel", 4, "flash_attn.flash_attn_func")]


def test_networks_parameters_and_buffers_are_tensors(kinds):
    text = """
    import torch
    class Net(torch.nn.Module):
        def __init__(self):
            self.register_buffer("seen", torch.zeros(1))
            self.scale = torch.nn.Parameter(torch.zeros(1))
        def forward(self, x):
            if self.seen > 0:
                return x
            if self.scale:
                return x
            if x.mean() > 0:
                return x
    """
    assert kinds(text) == [("branch", 8), ("branch", 10), ("branch", 12)]


def test_a_list_of_tensors_is_no_tensor(kinds):
    text = """
    import torch
    from typing import List
    def f(xs: List[torch.Tensor], y: torch.Tensor):
        if xs:
            return xs[0]
        parts = [y, y]
        for i in range(2):
            parts[i] = y
        if not parts:
            return int(xs[0])
    """
    assert kinds(text) == [("item", 11)]


def test_a_tensor_is_known_by_what_is_called_of_it(kinds):
    text = """
    import torch
    def f(scheduler):
        for i, t in enumerate(scheduler.timesteps):
            if t < 1:
                t = t.repeat(2)
    """
    assert kinds(text) == [("branch", 5)]


def test_what_is_made_in_a_constructor_is_made_once(kinds):
    text = "import torch\nclass A:\n    def __init__(self, n):\n        self.x = torch.arange(n)\n"
    assert kinds(text) == []


def test_a_helper_over_a_process_group_is_found_where_it_is_called_and_held(scanned):
    files = {
        "up/__init__.py": "",
        "up/state.py": """
            import torch.distributed as dist
            _STATE = None
            class State:
                def __init__(self):
                    self.build()
                def build(self):
                    self.rank = dist.get_rank()
            def get_state():
                global _STATE
                _STATE = _STATE or State()
                return _STATE
            def size():
                return get_state().size
            """,
        "up/net.py": "import torch\nfrom up.state import size\ndef f(x):\n    return x[: size()]\n",
    }
    found = [(one.kind, one.line, one.text) for one in scanned(files).findings if one.file.endswith("net.py")]
    assert found == [("alias", 2, "size"), ("parallel-state", 4, "size()")]


def test_a_tuple_that_a_function_says_it_returns_has_parts(kinds):
    text = """
    import torch
    def parts(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x, 1
    def f(x: torch.Tensor):
        y, n = parts(x)
        return y[:n], int(n), int(y)
    """
    assert kinds(text) == [("item", 7)]


def test_a_list_of_tensors_gives_tensors_and_a_list_of_numbers_numbers(kinds):
    text = """
    import torch
    def f(x: torch.Tensor, n: int):
        for part in [x, x * 2]:
            if part > 0:
                n += 1
        for size in (n, 2):
            if size > 0:
                n += 1
        return n
    """
    assert kinds(text) == [("branch", 5)]


def test_a_number_and_a_dictionary_without_annotation_are_no_tensors(kinds):
    text = """
    import torch
    class Net(torch.nn.Module):
        def forward(self, x, text_len, options):
            if text_len > 1 and options["fast"] > 2:
                return x[:, :text_len]
            return x
    """
    assert kinds(text) == []


def test_a_square_of_features_is_no_mask(kinds):
    assert kinds("import torch\ndef f(x: torch.Tensor, D, n):\n    return torch.eye(D, device=x.device)\n") == []


def test_a_flag_of_training_without_annotation_is_no_tensor(kinds):
    text = "import torch\nclass N(torch.nn.Module):\n    def forward(self, x, train):\n        if train: x = x + 1\n"
    assert kinds(text) == []


def test_an_operator_that_differs_for_all_of_its_arguments_is_a_finding():
    """Arguments are not known without running the code: what differs for some of them, or in 16 bits, a trace finds."""
    found = {name.removeprefix("torch.") for name in detect.DIFFERING | detect.BY_VALUES} | {"local_scalar_dense"}
    for name, samples in conformance.read().operators.items():
        rows = [row for row in samples.rows if row.dtypes - {"float16", "bfloat16"}]
        if any(not row.patch and not row.options for row in rows):
            # `aten._unique2.default` is torch.unique, `aten.linalg_ldl_solve.default` torch.linalg.ldl_solve.
            word = name.split(".")[1].lstrip("_")
            word = re.sub(r"(?<=unique)(2|_dim)$", "", re.sub(r"^(linalg|special)_", r"\1.", word))
            word = re.sub(r"(\w+_loss)_forward$", r"nn.functional.\1", word)
            assert word in found, name
