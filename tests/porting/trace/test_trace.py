"""A trace goes on after each stopper, and says what it assumed."""

import dataclasses
import re
import types

import pytest
import torch
from fakes.plain_pack import PlainPack

from torchport.commands import trace as command
from torchport.porting import trace as tracing
from torchport.porting.trace import assumptions
from torchport.task import Request

FORWARD = """    def forward(self, x, context):
        y = self.into(x) * self.scale + context
"""


@pytest.fixture
def plain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pack = PlainPack(tmp_path, monkeypatch)
    yield pack
    pack.close()


def write(pack, statements, head=""):
    """Puts statements at the begin of the network's forward, and others at the top of its module."""
    lines = "".join(f"        {line}\n" for line in statements)
    pack.change(FORWARD, FORWARD + lines, "../site/up/model.py")
    if head:
        pack.change("\nimport torch\n", f"\nimport torch\n{head}\n", "../site/up/model.py")


def traced(pack, **changes):
    request = Request("plain", str(pack.root / "configs/small.yaml"), paths=(str(pack.root),), **changes)
    return tracing.traced(request, None)


def test_a_package_that_is_not_there_is_named_where_a_function_of_it_is_called():
    noted = []
    notes = types.SimpleNamespace(record=lambda error, assumed: noted.append((error.name, assumed)))
    absent, x = assumptions.Anything("flash_attn", notes), torch.ones(2)
    assert absent.ops.fused(1, x) is x
    assert isinstance(absent.ops.fused(1), assumptions.Anything)
    assert noted == [
        ("flash_attn", "the call returns its first tensor"),
        ("flash_attn", "the call returns a stand-in"),
    ]


def test_a_tensor_of_the_host_is_none_of_the_networks():
    assert assumptions.is_networks(torch.ones(2, device="meta")) and not assumptions.is_networks(torch.ones(2))


def rows(report):
    """The stoppers: id, statement, and what was assumed."""
    return [(one.id, one.frames[-1].partition(": ")[2], one.assumed) for one in report.stoppers]


def test_nothing_stops_a_network_of_plain_operators(plain):
    report = traced(plain)
    assert report.stoppers == [] and report.stages == ["denoise", "decode"]
    assert report.skipped == {"encode": "it runs on the host"}
    lines = command.lines(report, True)
    assert lines[-1] == "nothing stops denoise, decode with the card's patches"
    assert f"denoise: {report.operators['denoise']}" in lines
    assert re.fullmatch(r"\d+ operators: \d+ same", report.operators["denoise"])


def test_every_question_for_a_value_is_noted_with_what_is_assumed(plain):
    write(
        plain,
        [
            "if y.sum() > 0:",
            "    y = y + 1",
            "if torch.isnan(y).any():",
            "    raise ValueError('NaN')",
            "assert (y == y).all()",
            "scale = y.mean().item()",
            "count = int(y.abs().argmax())",
            "y = y[:, : max(count, 9)] * scale",
            "picked = y[y > 0]",
            "where = (y > 0).nonzero()",
            "y = y + picked.sum() * len(where)",
        ],
    )
    report = traced(plain)
    assert rows(report) == [
        ("TP903", "if y.sum() > 0:", "the value is False"),
        ("TP903", "if torch.isnan(y).any():", "the value is False"),
        ("TP903", "assert (y == y).all()", "the value is True"),
        ("TP903", "scale = y.mean().item()", "the value is 1.0"),
        ("TP903", "count = int(y.abs().argmax())", "the value is 1"),
        ("TP903", "picked = y[y > 0]", "the mask is true everywhere"),
        ("TP903", "where = (y > 0).nonzero()", "all values are true"),
    ]
    first = report.stoppers[0]
    assert first.place.startswith("site/up/model.py:") and first.entry.startswith("- id: up.net-forward-")
    assert first.frames[-1].startswith(f"{first.place} in Net.forward") and first.folded > 10


def test_a_region_of_autocast_is_not_at_fault_for_what_upstream_asks(plain):
    write(plain, ["with torch.autocast('cuda'):", "    picked = y[y > 0]", "    if y.sum() > 0:", "        y = y + 1"])
    plain.change("denoise: []", "denoise: [torch/autocast]")
    report = traced(plain)
    assert rows(report) == [
        ("TP903", "picked = y[y > 0]", "the mask is true everywhere"),
        ("TP903", "if y.sum() > 0:", "the value is False"),
    ]
    assert [one.times for one in report.stoppers] == [1, 1]


def test_tensors_of_the_host_are_named_with_the_lines_that_made_them(plain):
    write(
        plain,
        [
            "table = torch.arange(1000 * 16).reshape(-1, 16)[:1].float()",
            "y = y + table",
            "large = torch.ones(600_000)",
            "y = y * large[:1].sum() + large.sum()",
            "wide = torch.zeros(16)",
            "y = y + wide.add_(y.sum())",
            "y = y + torch.randn(16)",
        ],
    )
    report = traced(plain)
    statements = (plain.root / "../site/up/model.py").read_text().splitlines()
    line = {text.strip(): f"site/up/model.py:{number}" for number, text in enumerate(statements, 1)}
    (wide,) = [one for one in report.stoppers if "writes values" in one.fact]
    made = line["wide = torch.zeros(16)"]
    assert wide.id == "TP902" and wide.place == line["y = y + wide.add_(y.sum())"]
    assert wide.fact.endswith(f"(the tensor is made at {made})")
    assert wide.assumed == "nothing is written"
    (drawn,) = [one for one in report.stoppers if "draws numbers" in one.fact]
    assert drawn.assumed == "the numbers are drawn once"
    constants = {(one.made, one.used): one for one in report.constants}
    key = line["table = torch.arange(1000 * 16).reshape(-1, 16)[:1].float()"], line["y = y + table"]
    assert (constants[key].bytes, constants[key].shape) == (64, [1, 16])
    text = "\n".join(command.lines(report, True))
    assert f"float32 [1, 16] at {key[1]}, made at {key[0]}" in text


def test_cuda_and_other_processes_are_assumed(plain):
    head = "DEVICE = torch.cuda.current_device()\nimport torch.distributed as dist"
    write(plain, ["y = y.cuda() * dist.get_world_size()", "y = y + torch.ones(16, device='cuda').sum()"], head)
    report = traced(plain)
    assert {(one.id, one.assumed) for one in report.stoppers} >= {
        ("TP904", "torch.cuda.current_device returns 0"),
        ("TP901", "torch.distributed.get_world_size returns 1"),
    }
    assert torch.cuda.current_device.__module__ == "torch.cuda" and not hasattr(
        torch.cuda.current_device, "__wrapped__"
    )


def test_without_patches_what_the_card_lists_is_named_and_not_drafted_again(plain):
    request = Request("plain", str(plain.root / "configs/small.yaml"), paths=(str(plain.root),))
    calls = tracing.called(request)
    plain.close()
    write(plain, ["y = y + torch.cuda.current_device()"])
    plain.change("denoise: []", "denoise: [torch/cuda]")
    [stopper] = tracing.traced(dataclasses.replace(request, overrides=("stacked=false",)), calls).stoppers
    assert (stopper.id, stopper.entry) == ("TP904", "")
    assert stopper.remedy == "Leave it to torch/cuda, which the card lists and which was left out here"


def test_an_absent_package_is_assumed_where_nothing_guards_its_import(plain):
    head = "import flashy\ntry:\n    import other_flashy\nexcept ImportError:\n    other_flashy = None"
    write(plain, ["y = flashy.ops.attention(y, causal=True)", "assert other_flashy is None"], head)
    report = traced(plain)
    assert [(one.id, one.assumed) for one in report.stoppers] == [
        ("TP905", "the package is there, and a call of it returns its first tensor"),
        ("TP905", "the call returns its first tensor"),
    ]
    assert "stub: {package: flashy, importers: [up.model]}" in report.stoppers[0].entry


def test_an_operator_without_a_lowering_is_zeros(plain):
    write(plain, ["y = y + torch.special.airy_ai(y)"])
    report = traced(plain)
    assert rows(report) == [("TP906", "y = y + torch.special.airy_ai(y)", "the result is zeros")]


def test_a_module_that_raises_returns_its_first_tensor(plain):
    raises = "        raise ValueError('no kernel')\n"
    statement = "        return x + self.down"
    plain.change(statement, raises + statement, "../site/up/model.py")
    report = traced(plain)
    assumed = "Block returns its first tensor, and the rest of its forward is not traced"
    assert rows(report) == [("TP901", "raise ValueError('no kernel')", assumed)]


def test_what_makes_a_second_program_is_named(plain):
    stages, head = "patches/up/stages.py", "def batch(guidance_scale):\n    return 1"
    plain.change(head, f"{head} + (guidance_scale > 1)", stages)
    loop = "    for number in steps.track"
    plain.change(loop, f"    latents = latents.repeat(batch(settings.guidance_scale), 1, 1)\n{loop}", stages)
    text = command.lines(traced(plain), True)
    assert "denoise: one program, called 2 times" in text
    assert "denoise: another program with guidance (guidance_scale 5.0): 'x' is [2, 8, 4], not [1, 8, 4]" in text
    assert not any("steps" in line for line in text)


GUIDED = """
class Net(Net):
    def with_guidance(self, x, context, scale):
        plain, guided = self(x, context).chunk(2)
        return torch.cat([plain + scale * (guided - plain)] * 2)
"""
CALL = """
def call(module, *, settings, **inputs):
    if settings.guidance_scale > 1:
        return module.with_guidance(**inputs, scale=settings.guidance_scale)
    return module(**inputs)


SIZES ="""


def with_guidance_inside(pack, call=CALL):
    """Lets the network combine the conditions, as `Stage.call` asks it where the job has guidance."""
    pack.write("../site/up/model.py", (pack.root / "../site/up/model.py").read_text() + GUIDED)
    stages = "patches/up/stages.py"
    pack.change("\nSIZES =", call, stages)
    pack.change('network="net", ', 'network="net", call=call, ', stages)
    loop = "    for number in steps.track"
    pack.change(loop, f"    latents = latents.repeat(1 + (settings.guidance_scale > 1), 1, 1)\n{loop}", stages)
    pack.change("guidance_scale: 1.0", "guidance_scale: 4.0", "configs/small.yaml")


def test_a_call_that_reads_guidance_gets_that_of_the_job_it_is_asked_about(plain):
    with_guidance_inside(plain)
    report = traced(plain)
    assert report.stoppers == []
    text = command.lines(report, True)
    assert "denoise: one program, called 2 times" in text
    assert "denoise: another program without guidance (guidance_scale 1.0): 'x' is [1, 8, 4], not [2, 8, 4]" in text


def test_what_stops_another_job_is_no_stopper_of_this_one(plain):
    with_guidance_inside(plain, CALL.replace("    return module(**inputs)", "    raise ValueError('no guidance')"))
    report = traced(plain)
    assert report.stoppers == []
    ends = "not known, that job ends with ValueError: no guidance"
    assert f"denoise: another program without guidance (guidance_scale 1.0): {ends}" in command.lines(report, True)


LAYERS = """
- id: up.layers
  target: absent:Linear
  stub: {package: absent, importers: [up.model]}
  why: A test.
  reported: "none: a test"
  until: never
  fits: {torch: "*"}
  equivalence: bitwise
  plumbing: true
- id: up.built
  target: up.model:Net.__init__
  rewrite: {match: "self.more = Linear(dim)", put: layers.py:built}
  why: A test.
  reported: "none: a test"
  until: never
  fits: {torch: "*"}
  equivalence: bitwise
"""


def test_a_statement_that_builds_a_part_with_an_absent_package_is_rewritten(plain):
    write(plain, ["y = self.more(y)"], "from absent.layers import Linear")
    built = "        self.out = torch"
    plain.change(built, f"        self.more = Linear(dim)\n{built}", "../site/up/model.py")
    plain.write("patches/up/layers.yaml", LAYERS)
    plain.write(
        "patches/up/layers.py", "import torch\n\ndef built(self, dim):\n    self.more = torch.nn.Linear(dim, dim)\n"
    )
    plain.change("denoise: []", "denoise: [up/layers]")
    assert traced(plain).stoppers == []
