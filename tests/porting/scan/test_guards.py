"""What guards a finding: a process group, CUDA; what runs at import; and that each file is parsed once and dropped."""

import pytest

from torchport.config.pack import find_pack
from torchport.porting.scan.codebase import Codebase, find_sources
from torchport.porting.scan.scanning import _read
from torchport.source import parsing

NET = """
import torch
import torch.distributed as dist
GROUP = None
_CONTEXT_PARALLEL_GROUP = None
def get_context_parallel_group():
    return _CONTEXT_PARALLEL_GROUP
def is_active():
    return get_context_parallel_group() is not None
class Net(torch.nn.Module):
    def forward(self, x, cp_size, rank, device):
        {guard}
            {inside}
        return x
    def helper(self, x: torch.Tensor):
        return x.item()
"""


def only(report):
    return {(one.name, one.kind): one.only for one in report.findings}


@pytest.mark.parametrize("inside", ["x.item()", "self.helper(x)"])
@pytest.mark.parametrize(
    ("guard", "what"),
    [
        ("if dist.get_world_size() > 1:", "process-group"),
        ("if cp_size != 1:", "process-group"),
        ("if get_context_parallel_group() is not None:", "process-group"),
        ("if is_active():", "process-group"),
        ("if self.use_sequence_parallel and x.shape[0] > 1:", "process-group"),
        ("if 1 < self.world_size:", "process-group"),
        ("if cp_size == 1: return x\n        for _ in range(2):", "process-group"),
        ("if torch.cuda.is_available():", "cuda"),
        ("if x.is_cuda:", "cuda"),
        ('if x.device.type == "cuda":', "cuda"),
        ('if device.type != "cuda": return x\n        for _ in range(2):', "cuda"),
        ("if rank > 1:", ""),
        ("if cp_size >= 1:", ""),
        ("if not torch.cuda.is_available():", ""),
        ('if x.device.type == "cpu":', ""),
        ("if x.shape[0] > 1:", ""),
        ("if not is_active(): raise ValueError\n        for _ in range(2):", ""),
        ("if not torch.cuda.is_available(): raise ValueError\n        for _ in range(2):", ""),
    ],
)
def test_what_a_guard_asks_for_is_what_a_finding_runs_under(scanned, guard, what, inside):
    report = scanned({"up.py": NET.format(guard=guard, inside=inside)}, "up:Net")
    found = {name: value for (name, kind), value in only(report).items() if kind == "item"}
    where = "Net.helper" if "helper" in inside else "Net.forward"
    assert found[where] == what
    assert {one.reach for one in report.findings if one.name == where and one.kind == "item"} == {"path"}


def test_a_function_that_is_also_called_without_the_guard_is_not_guarded(scanned):
    text = NET.format(guard="if cp_size > 1:", inside="self.helper(x)").replace(
        "return x\n    def", "self.helper(x)\n    def"
    )
    assert only(scanned({"up.py": text}, "up:Net"))["Net.helper", "item"] == ""


def test_a_helper_that_asks_no_group_where_there_is_none_is_guarded_itself(scanned):
    files = {
        "up.py": """
            import torch
            import cp
            class Net(torch.nn.Module):
                def forward(self, x):
                    return cp.gather(x) + cp.rank()
            """,
        "cp.py": """
            import torch.distributed as dist
            _CP_GROUP = None
            def gather(x):
                if not _CP_GROUP:
                    return x
                return dist.all_gather([x], x, group=_CP_GROUP)
            def rank():
                return dist.get_node_local_rank()
            """,
    }
    report = scanned(files, "up:Net")
    assert {one.uses: one.only for one in report.findings if one.kind == "parallel-state"} == {
        "cp.gather": "process-group"
    }
    text = files["up.py"].replace("cp.gather(x) + ", "")
    report = scanned({**files, "up.py": text}, "up:Net")
    assert {one.uses: one.only for one in report.findings if one.kind == "parallel-state"} == {"cp.rank": ""}


def test_what_is_guarded_is_counted_apart(scanned):
    text = NET.format(guard="if cp_size > 1:", inside="dist.barrier()")
    assert scanned({"up.py": text}, "up:Net").count() == (
        "1 on the inference path: 0 covered, 0 need a rewrite, 0 unknown, 1 only under a process group"
    )


@pytest.mark.parametrize(
    "text",
    [
        "def f(device=torch.cuda.current_device()):\n    return device\n",
        "@keep(torch.cuda.current_device())\ndef f():\n    return 1\n",
        "class Kept:\n    device = torch.cuda.current_device()\n",
        "class Kept:\n    def f(self, device=torch.cuda.current_device()):\n        return device\n",
        "def find():\n    return torch.cuda.current_device()\ndef f(device=find()):\n    return device\n",
        "def keep(f):\n    torch.cuda.current_device()\n    return f\n@keep\ndef g():\n    return 1\n",
    ],
)
def test_what_runs_at_import_is_on_the_path_also_through_the_package(scanned, text):
    files = {
        "up/__init__.py": "from up import other\n",
        "up/other.py": f"import torch\n{text}",
        "up/net.py": "class Net:\n    def forward(self, x):\n        return x\n",
        "down.py": f"import torch\n{text}",
    }
    report = scanned(files, "up.net:Net")
    assert {(one.target.partition(":")[0], one.reach) for one in report.findings} == {
        ("up.other", "path"),
        ("down", "off"),
    }


def test_a_default_that_names_cuda_asks_nobody_at_import(scanned):
    report = scanned({"up.py": 'import torch\ndef f(device="cuda"):\n    return device\n'}, "up:f")
    assert [(one.kind, one.name) for one in report.findings] == [("cuda-device", "f")]


def test_a_choice_of_kernels_is_found_with_the_shipped_patch(scanned):
    text = """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    class Net(torch.nn.Module):
        def forward(self, x):
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                return x
        @sdpa_kernel([SDPBackend.FLASH_ATTENTION])
        def encode(self, x):
            return x
    """
    report = scanned({"up.py": text}, "up:Net", folders=find_pack(()).folders)
    assert {(one.rule, one.name): one.covered_by for one in report.findings} == {
        ("PS504", "Net.forward"): ("torch.sdpa-kernel.any",),
        ("PS504", "Net.encode"): ("torch.sdpa-kernel.any",),
    }


def test_each_file_is_parsed_once_and_its_tree_dropped(codebase, monkeypatch):
    names = ["a", "b", "c", "d"]
    text = "import torch\nfrom {} import f as g\ndef f(x: torch.Tensor) -> torch.Tensor:\n    return g(x).item()\n"
    folder = codebase(
        {f"{name}.py": text.format(other) for name, other in zip(names, names[1:] + names[:1], strict=True)}
    )
    parsed, tree = [], parsing.tree
    monkeypatch.setattr(parsing, "tree", lambda text, name: parsed.append(name) or tree(text, name))
    whole = Codebase(find_sources(folder)[0])
    found = _read(whole)
    assert sorted(parsed) == [f"{name}.py" for name in names]
    assert len([site for site in found if site.kind == "item"]) == 4
    assert all(unit.body is None for unit in whole.units) and len(whole.units) == 8
