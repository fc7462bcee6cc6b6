"""Which patches take care of which findings."""

import textwrap

import pytest

from torchport.config.pack import find_pack

TAIL = """
  why: A test.
  reported: "none: a test"
  until: never
  fits: {up: "*"}
  equivalence: bitwise
"""
CODE = {
    "up/__init__.py": "",
    "up/net.py": """
        import torch
        from up.attention import attend
        from up.group import rank
        class Net(torch.nn.Module):
            def __init__(self):
                self.fast = False
            def enable(self):
                self.fast = True
            def forward(self, x: torch.Tensor, positions=None):
                if positions is None:
                    positions = make(x)
                if x.sum() > 0:
                    x = x + 1
                y = x.max().item()
                if self.fast:
                    x = faster(x)
                return attend(x)[rank() :]
        def make(x):
            return torch.arange(len(x))
        def faster(x):
            return x.cpu().item()
        """,
    "up/attention.py": """
        from flash_attn import flash_attn_func
        def attend(x):
            return inner(x)
        def inner(x):
            return flash_attn_func(x, x, x)
        """,
    "up/group.py": """
        import torch.distributed as dist
        def rank():
            start()
            return dist.get_rank()
        def start():
            dist.init_process_group("nccl")
        """,
}


@pytest.fixture
def covered(scanned, tmp_path):
    """Scans `CODE` under patches; returns what covers each finding on the path, by function and kind."""

    def run(*entries, family=""):
        folder = tmp_path / "patches" / "up"
        folder.mkdir(parents=True)
        text = "".join(textwrap.dedent(entry).strip() + TAIL for entry in entries)
        (folder / "all.yaml").write_text(text, encoding="utf-8")
        (folder / "all.py").write_text("def put(x): return x\n" + family, encoding="utf-8")
        report = scanned(CODE, "up.net:Net", folders=[str(tmp_path / "patches"), *find_pack(()).folders])
        return {(one.name, one.kind): one.covered_by for one in report.findings if one.reach == "path"}

    return run


def entry(id, target, kind):
    return f"- id: {id}\n  target: {target}\n{textwrap.indent(textwrap.dedent(kind), '  ')}"


def test_without_patches_nothing_is_covered(covered):
    found = covered()
    assert not any(found.values()) and set(found) == {
        ("<module>", "alias"),
        ("<module>", "kernel"),
        ("Net.forward", "branch"),
        ("Net.forward", "item"),
        ("Net.forward", "parallel-state"),
        ("make", "host-tensor"),
        ("faster", "item"),
        ("inner", "kernel"),
        ("rank", "process-group"),
        ("start", "process-group"),
    }


def test_a_replaced_function_covers_itself_and_what_it_alone_calls(covered):
    found = covered(entry("up.attend", "up.attention:attend", "replace: all.py:put"))
    assert found["inner", "kernel"] == ("up.attend",)
    assert found["<module>", "kernel"] == () and found["Net.forward", "item"] == ()


def test_a_rewrite_covers_its_statements_alone(covered):
    kind = "rewrite:\n  match: |\n    if x.sum() > 0:\n        $...inside\n  put: all.py:put\n  gives: [x]"
    found = covered(entry("up.branch", "up.net:Net.forward", kind))
    assert found["Net.forward", "branch"] == ("up.branch",) and found["Net.forward", "item"] == ()


def test_a_wrapper_covers_nothing_of_what_it_wraps(covered):
    assert not any(covered(entry("up.attend", "up.attention:attend", "wrap: all.py:put")).values())


def test_a_stub_covers_the_import_of_its_importers(covered):
    stub = "stub: {package: flash_attn, importers: [up.attention]}"
    found = covered(entry("up.flash", "flash_attn:flash_attn_func", stub))
    assert found["<module>", "kernel"] == found["inner", "kernel"] == ("up.flash",)


def test_a_replaced_setter_of_a_flag_covers_what_the_flag_leads_to(covered):
    found = covered(entry("up.enable", "up.net:Net.enable", "replace: all.py:put"))
    assert found["faster", "item"] == ("up.enable",)


def test_an_argument_that_the_family_gives_covers_what_its_absence_leads_to(covered):
    found = covered(entry("up.attend", "up.attention:attend", "replace: all.py:put"), family='X = {"positions": 1}\n')
    assert found["make", "host-tensor"] == ("up/all",)


def test_the_maker_of_a_group_covers_everything_over_it(covered):
    found = covered(entry("up.start", "up.group:start", "replace: all.py:put"))
    names = [("start", "process-group"), ("rank", "process-group"), ("Net.forward", "parallel-state")]
    assert {found[name] for name in names} == {("up.start",)}


def test_torchs_own_patches_cover_cuda_and_autocast(scanned):
    text = """
    import torch
    def run(x):
        torch.cuda.set_device(0)
        torch.cuda.nvtx.mark("x")
        with torch.cuda.amp.autocast():
            return x
    """
    report = scanned({"up.py": text}, "up:run", folders=find_pack(()).folders)
    found = {one.line: one.covered_by for one in report.findings}
    assert found[4] == ("torch.cuda.set-device",) and found[5] == () and "torch.autocast.entered" in found[6]


def test_a_finding_names_what_a_patch_would_target(scanned):
    [finding] = scanned({"up/__init__.py": "", "up/m.py": "class A:\n    def f(self, x):\n        x.item()\n"}).findings
    assert (finding.target, finding.kind, finding.meaning.draft, finding.verdict) == (
        "up.m:A.f",
        "item",
        "rewrite",
        "unknown",
    )


def test_the_count_tells_covered_from_what_needs_a_patch(scanned):
    text = """
    import torch
    def run(x: torch.Tensor):
        torch.cuda.set_device(0)
        x = x[x > 0]
        return x.to("cuda")
    """
    report = scanned({"up.py": text}, "up:run", folders=find_pack(()).folders)
    assert report.count() == "3 on the inference path: 1 covered, 1 needs a rewrite, 1 unknown"


def test_every_row_that_must_be_patched_of_a_copy_is_covered(root, pack):
    """The fake of an upstream that tests of its patches use has the hostile code of the original."""
    from torchport.porting.scan import scanning as scan

    name = "hunyuanvideo_1_5_transformer:HunyuanVideo_1_5_DiffusionTransformer"
    report = scan.scan(root / "tests" / "fakes" / "hyvideo", [f"hyvideo.models.transformers.{name}"], pack.folders)
    on_path = [one for one in report.findings if one.reach == "path"]
    assert on_path and [one for one in on_path if one.verdict == "rewrite"] == []
