"""The errors of a port's first hour: each names its line and its cure, and what it says to paste works."""

import re
import types
from pathlib import Path

import jax
import pytest
import torch
from fakes.small_port import SmallPort

from torchport import errors, patch
from torchport.compile.failure import Owners
from torchport.config import parse_document
from torchport.engine import conformance
from torchport.errors import OperatorError, TorchportError
from torchport.run.path import run
from torchport.task import Execution, Request

pytestmark = pytest.mark.usefixtures("plainly_compiled")

LAYER = "        y = self.layer(x)\n"
"""The line of upstream's forward before which, and after which, a test puts its own."""
CARD = "pack/configs/models/small.yaml"
LISTED = f"under 'patches' in {CARD}:8"


@pytest.fixture
def port(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = SmallPort(tmp_path, monkeypatch)
    yield small
    small.forget()
    jax.clear_caches()


def carried(strict=False):
    """Runs the port as it is now."""
    given = {"prompt": "x", "paths": ("pack",), "out": Path("out"), "cache": False}
    return run(Request("small", "configs/small.yaml", execution=Execution(strict=strict), **given))


def refused(port, kind, strict=False):
    """Returns the lines of the one error of a run, which must be of this kind."""
    with pytest.raises(TorchportError) as caught:
        carried(strict)
    port.forget()
    assert type(caught.value) is kind, caught.value
    lines = str(caught.value).splitlines()
    assert len(lines) <= 15 + sum(line.startswith("      ") for line in lines)  # a statement of several lines
    return lines


def pasted(port, lines, python, names):
    """Puts an error's entry where it says, with Python beside it, and lists it; returns the entry as it is read."""
    start = next(n for n, line in enumerate(lines) if line.startswith("- id: "))
    assert f"Paste the entry below into patches/{names}.yaml" in lines[0].replace("paste the", "Paste the")
    assert f"list {names} {LISTED}" in lines[0]
    port.write(f"patches/{names}.yaml", "\n".join(lines[start:]) + "\n")
    if python:
        port.write(f"patches/{names}.py", python)
    port.change("configs/models/small.yaml", "denoise: []", f"denoise: [{names}]")
    [entry] = patch.read(port.pack / "patches", [names])
    return entry


def test_the_port_itself_runs(port):
    summary = carried()
    assert summary.steps == 1 and summary.operators == {"denoise": "1 operators: 1 same"}


def test_under_strict_an_operator_that_was_not_compared_is_refused_until_a_card_accepts_it(port, monkeypatch):
    known = conformance.state_of
    unknown = "unknown", "the operator was never sampled"
    monkeypatch.setattr(conformance, "state_of", lambda form: unknown if ".neg." in form.operator else known(form))
    port.change("up/model.py", LAYER, f"{LAYER}        y = y.neg()\n")
    lines = refused(port, OperatorError, strict=True)
    assert "calls aten.neg.default, which no sample has compared with PyTorch's (the operator was never " in lines[0]
    assert "or accept it under `operators` in the card, with the reason" in lines[0].lower()
    card = "configs/models/small.yaml"
    port.change(card, "frames:", "operators: {aten.neg.default: A test}\nframes:")
    assert carried(strict=True).operators["denoise"].endswith(" unknown (aten.neg.default)")


VALUES = {
    "if": ("if (y > 0).any():\n            y = y * 2", "ConcretizationTypeError"),
    "assert": ("assert (y > 0).any(), 'no'", "ConcretizationTypeError"),
    "item": ("y = y * y.sum().item()", "ConcretizationTypeError"),
    "int": ("y = y * int(y.sum())", "ConcretizationTypeError"),
    "float": ("y = y * float(y.sum())", "ConcretizationTypeError"),
    "tolist": ("y = y * y.sum(0).tolist()[0]", "TracerArrayConversionError"),
    "numpy": ("y = torch.from_numpy(y.numpy())", "TracerArrayConversionError"),
    "boolean index": ("y = y * y[y > 0].sum()", "NonConcreteBooleanIndexError"),
    "nonzero": ("y = y * y.nonzero().sum()", "ConcretizationTypeError"),
    "equal": ("y = y * torch.equal(y, x)", "TracerBoolConversionError"),
    "in a comprehension": ("y = [y * float(part.sum()) for part in y][0]", "ConcretizationTypeError"),
}


@pytest.mark.parametrize("statement", VALUES)
def test_the_value_of_a_traced_tensor_is_refused_with_a_rewrite_to_paste(port, statement):
    code, reason = VALUES[statement]
    port.change("up/model.py", LAYER, f"{LAYER}        {code}\n")
    lines = refused(port, errors.TracedValueError)
    name = "forward_14(x, y)" if "x" in re.findall(r"\w+", code) else "forward_14(y)"
    returns = "" if code.startswith("assert") else ", which returns y,"
    assert lines[0] == (
        "site/up/model.py:14: Net.forward asks for the value of a tensor, and while it is traced a tensor has none. "
        "Compute it from shapes, from settings, or with torch.where: paste the entry below into "
        f"patches/up/tracing.yaml, write {name}{returns} in tracing.py beside it, and list up/tracing {LISTED}."
    )
    assert lines[1] == "  pack/patches/up/stages.py:26 in call: return module(x)"
    assert lines[2] == f"  site/up/model.py:14 in Net.forward: {code.splitlines()[0]}"
    assert re.fullmatch(rf"  {reason}: .+ +\(\d+ more frames: torchport -v COMMAND\)", lines[3])
    entry = pasted(port, lines, f"def {name}:\n    return y\n", "up/tracing")
    assert entry.kind == "rewrite" and entry.path == ("Net", "forward") and entry.fits == {"up": "*"}
    assert carried().steps == 1


def test_a_value_that_is_asked_for_while_the_network_is_rehearsed_is_refused_in_the_same_words(port):
    port.change("patches/up/stages.py", "call=call)", "call=call,\n          like=like)")
    port.change(
        "patches/up/stages.py",
        "\n\nSTAGES",
        '\n\ndef like(parts, settings):\n    return {"x": torch.ones(8, 4)}\n\n\nSTAGES',
    )
    port.change("up/model.py", LAYER, f"{LAYER}        y = y * y.sum().item()\n")
    lines = refused(port, errors.TracedValueError)
    assert lines[0].startswith(
        "site/up/model.py:14: Net.forward asks for the value of a tensor, and while it is traced"
    )
    assert lines[3].startswith("  RuntimeError: Tensor.item() cannot be called on meta tensors  (")


def test_a_statement_that_returns_early_cannot_be_rewritten_and_its_function_is_replaced(port):
    port.change("up/model.py", LAYER, f"{LAYER}        if (y > 0).any():\n            return x\n")
    lines = refused(port, errors.TracedValueError)
    assert "write forward_14(self, x), which does what the function does, in tracing.py beside it" in lines[0]
    entry = pasted(port, lines, "def forward_14(self, x):\n    return self.layer(x)\n", "up/tracing")
    assert entry.kind == "replace"
    assert carried().steps == 1


def test_a_value_in_the_family_or_in_a_patch_is_mended_there(port):
    port.change("patches/up/stages.py", "return module(x)", "return module(x * float(x.sum()))")
    lines = refused(port, errors.TracedValueError)
    assert lines[0] == (
        "pack/patches/up/stages.py:26: call asks for the value of a tensor, and while it is traced a tensor has none. "
        "It is the family's code: mend it there. Compute it from shapes, from settings, or with torch.where."
    )
    assert len(lines) == 4
    port.change("patches/up/stages.py", "return module(x * float(x.sum()))", "return module(x)")
    port.change("up/model.py", LAYER, f"{LAYER}        y = y * y.sum().item()\n")
    pasted(port, refused(port, errors.TracedValueError), "def forward_14(y):\n    return y.tolist()\n", "up/tracing")
    lines = refused(port, errors.TracedValueError)
    assert lines[0] == (
        "pack/patches/up/tracing.py:2: forward_14 asks for the value of a tensor, and while it is traced a tensor has "
        "none. It is a patch's function: mend it there. Compute it from shapes, from settings, or with torch.where."
    )
    assert lines[1] == "  site/up/model.py:14 in Net.forward: y = __torchport_up_net_forward_14__(y=y)"


def test_a_tensor_of_the_host_that_cannot_be_a_constant_is_refused_with_what_to_do(port):
    for file, old, place in (
        ("patches/up/stages.py", "return module(x)", "pack/patches/up/stages.py:26"),
        ("up/model.py", "return y", "site/up/model.py:14"),
    ):
        drawn = f"{old} + torch.randn(4)"
        port.change(file, old, drawn)
        assert refused(port, errors.HostTensorError) == [
            f"{place}: 'randn' draws numbers while the network is traced, the same for every call. Draw them in the "
            "stage's verb, and pass them as an input."
        ]
        port.change(file, drawn, f"{old} + torch.arange(4.0)")
        assert carried().steps == 1
        port.forget()


def at_import(port, line):
    port.change("up/model.py", "\n\nclass", f"\n{line}\n\n\nclass")


@pytest.mark.parametrize("where", ["import", "constructor"])
def test_cuda_that_a_shipped_file_answers_for_is_refused_with_the_file_to_list(port, where):
    if where == "import":
        at_import(port, "DEVICE = torch.cuda.current_device()")
        place = "site/up/model.py:5: The import of up.model"
    else:
        port.change("up/model.py", "__init__()\n", "__init__()\n        self.number = torch.cuda.current_device()\n")
        place = "site/up/model.py:10: Net.__init__"
    lines = refused(port, errors.CudaError)
    assert lines[0] == (
        f"{place} asks for CUDA, and this machine has none. List torch/cuda {LISTED}, for the stage that needs it."
    )
    # The words of a PyTorch built without CUDA, and of one built with it.
    assert re.match("  AssertionError: Torch not compiled with CUDA|  RuntimeError: Found no NVIDIA driver", lines[-1])
    port.change("configs/models/small.yaml", "denoise: []", "denoise: [torch/cuda]")
    assert carried().steps == 1


EVENT = """\
class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        pass
"""
CUDA = {
    "a class of torch.cuda": (
        "EVENT = torch.cuda.Event()",
        "torch.cuda:Event",
        EVENT,
    ),
    "a tensor that is moved": (
        "TABLE = torch.zeros(3).cuda()",
        "torch:Tensor.cuda",
        "def Tensor_cuda(self, *args, **kwargs):\n    return self\n",
    ),
}


@pytest.mark.parametrize("what", CUDA)
def test_cuda_that_no_shipped_file_answers_for_is_refused_with_an_entry_to_paste(port, what):
    code, target, python = CUDA[what]
    if target == "torch.cuda:Event" and torch.backends.cuda.is_built():
        pytest.skip("a PyTorch built with CUDA makes an event without a device: run with one built for the CPU")
    at_import(port, code)
    lines = refused(port, errors.CudaError)
    assert lines[0].startswith("site/up/model.py:5: The import of up.model asks for CUDA, and this machine has none. ")
    entry = pasted(port, lines, python, "up/cuda")
    assert (entry.kind, entry.target, entry.scope) == ("replace", target, "global")
    assert carried().steps == 1


def test_a_check_for_cuda_of_upstreams_own_is_rewritten_and_torch_is_left_alone(port):
    port.change("up/model.py", LAYER, f'{LAYER}        assert torch.cuda.is_available(), "This requires CUDA"\n')
    lines = refused(port, errors.CudaError)
    entry = pasted(port, lines, "def forward_14():\n    pass\n", "up/tracing")
    assert entry.rewrite.match == "assert torch.cuda.is_available(), 'This requires CUDA'"
    assert carried().steps == 1


def test_cuda_in_a_function_of_upstream_is_refused_with_a_rewrite(port):
    port.change("up/model.py", LAYER, f"{LAYER}        y = y.cuda()\n")
    lines = refused(port, errors.CudaError)
    assert "Take the device from a tensor, as x.device: paste the entry below" in lines[0]
    pasted(port, lines, "def forward_14(y):\n    return y\n", "up/tracing")
    assert carried().steps == 1


@pytest.mark.parametrize(
    ("line", "target"),
    [
        ("from flash_absent import attend", "flash_absent:attend"),
        ("from flash_absent.ops import attend", "flash_absent:ops.attend"),
        ("import flash_absent", "flash_absent:flash_absent"),
        ("import flash_absent.ops as ops", "flash_absent:ops"),
    ],
)
def test_an_absent_package_is_refused_with_a_stub_to_paste(port, line, target):
    port.upstream("layers.py", f"import torch\n{line}\n")
    port.change("up/model.py", "import torch\n", "import torch\nfrom up import layers\n")
    lines = refused(port, errors.AbsentPackageError)
    assert lines[0] == (
        "site/up/layers.py:2: The import of up.layers needs the package flash_absent, and it is not installed. Install "
        "it. If nothing of it is called in your job: paste the entry below into patches/up/imports.yaml, and list "
        "up/imports "
        f"{LISTED}."
    )
    assert lines[1] == "  site/up/model.py:2 in import of up.model: from up import layers"
    assert lines[2] == f"  site/up/layers.py:2 in import of up.layers: {line}"
    entry = pasted(port, lines, "", "up/imports")
    assert (entry.target, entry.stub.importers) == (target, ["up.layers"])
    assert carried().steps == 1


def test_another_importer_of_a_package_that_has_a_stub_is_added_to_it(port):
    port.change("up/model.py", "import torch\n", "import torch\nimport flash_absent\n")
    pasted(port, refused(port, errors.AbsentPackageError), "", "up/imports")
    port.upstream("layers.py", "import flash_absent\n")
    port.change("up/model.py", "import torch\n", "import torch\nfrom up import layers\n")
    assert refused(port, errors.AbsentPackageError)[0] == (
        "site/up/layers.py:1: The import of up.layers needs the package flash_absent, and it is not installed. "
        "Add up.layers to 'importers' of 'up.flash-absent' in pack/patches/up/imports.yaml:1."
    )
    port.change("patches/up/imports.yaml", "[up.model]", "[up.model, up.layers]")
    assert carried().steps == 1


def test_a_package_that_a_function_imports_by_a_call_is_no_stubs_matter(port):
    port.change(
        "up/model.py", LAYER, f'{LAYER}        y = __import__("importlib").import_module("flash_absent").f(y)\n'
    )
    lines = refused(port, errors.AbsentPackageError)
    assert lines[0].startswith(
        "site/up/model.py:14: Net.forward needs the package flash_absent, and it is not installed."
    )
    pasted(port, lines, "def forward_14(y):\n    return y\n", "up/tracing")
    assert carried().steps == 1


def test_a_family_that_needs_an_absent_package_is_told_to_install_it(port):
    port.change("patches/up/stages.py", "    return module(x)", "    import flash_absent\n    return module(x)")
    assert refused(port, errors.AbsentPackageError)[0] == (
        "pack/patches/up/stages.py:26: call needs the package flash_absent, and it is not installed. "
        "It is the family's code: mend it there. Install flash_absent, or leave the import out."
    )


def test_a_name_that_an_installed_package_lacks_is_refused_with_its_version(port):
    port.change("up/model.py", "import torch\n", "import torch\nfrom packaging import versions\n")
    lines = refused(port, errors.AbsentPackageError)
    assert re.fullmatch(
        r"site/up/model.py:2: The import of up.model takes a name from packaging that it does not have. "
        r"Install a version of packaging that has it; here is packaging [\d.]+.",
        lines[0],
    )
    assert lines[2].startswith("  ImportError: cannot import name 'versions' from 'packaging' (")


LOWERING = """\
import jax.numpy as jnp

from torchport import engine


def special_airy_ai(x):
    return engine.call_jax(jnp.sin, x)
"""


def test_an_operator_without_a_lowering_is_refused_with_an_op_to_paste(port):
    port.change("up/model.py", LAYER, f"{LAYER}        y = torch.special.airy_ai(y)\n")
    lines = refused(port, errors.NoLoweringError)
    assert lines[0] == (
        "site/up/model.py:14: Net.forward calls an operator that torchax cannot lower. Paste the entry below into "
        "patches/up/lowerings.yaml, write special_airy_ai(...), which computes the operator with "
        f"torchport.engine.call_jax, in lowerings.py beside it, and list up/lowerings {LISTED}."
    )
    entry = pasted(port, lines, LOWERING, "up/lowerings")
    assert (entry.kind, entry.target) == ("op", "torch.ops.aten:special_airy_ai.default")
    assert carried().steps == 1


def test_any_other_exception_of_upstream_names_its_line(port):
    port.change("up/model.py", LAYER, f"{LAYER}        y = y.no_such_thing\n")
    lines = refused(port, errors.ForeignError)
    assert lines[0] == (
        "site/up/model.py:14: Net.forward raises AttributeError: 'Tensor' object has no attribute 'no_such_thing'. "
        "Call it otherwise in the family, or patch it: docs/patches.md."
    )
    assert lines[2] == "  site/up/model.py:14 in Net.forward: y = y.no_such_thing"


def test_a_network_that_is_called_with_an_input_of_another_name_names_the_familys_line(port):
    port.change("patches/up/stages.py", ", call=call)", ")")
    port.change("patches/up/stages.py", "call(x=x)", "call(y=x)")
    port.change("configs/models/small.yaml", "match: 'x'", "match: 'y'")
    lines = refused(port, errors.ForeignError)
    assert lines[0].startswith(
        "pack/patches/up/stages.py:22: denoise raises TypeError: Net.forward() got an unexpected keyword argument 'y'. "
    )


@pytest.mark.parametrize("verb", ["encode", "denoise", "prepare"])
def test_any_other_exception_of_a_family_names_its_line(port, verb):
    text = (port.pack / "patches/up/stages.py").read_text()
    head = re.search(rf"def {verb}\(.*\n", text)
    if head is None:
        prepare = '\n\ndef prepare(parts, settings):\n    return {}["lost"]\n\n\nSTAGES'
        text = text.replace("\n\nSTAGES", prepare).replace("call=call)", "call=call, prepare=prepare)")
    else:
        text = text.replace(head[0], f'{head[0]}    {{}}["lost"]\n')
    port.write("patches/up/stages.py", text)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if '["lost"]' in row)
    assert refused(port, errors.ForeignError)[0] == (
        f"pack/patches/up/stages.py:{line}: {verb} raises KeyError: 'lost'. It is the family's code: mend it there."
    )


def test_an_error_that_upstream_raises_from_another_is_explained_by_the_first(port):
    port.change(
        "up/model.py",
        LAYER,
        f"{LAYER}        try:\n            y = y * y.sum().item()\n"
        '        except TypeError as error:\n            raise RuntimeError("something failed") from error\n',
    )
    lines = refused(port, errors.TracedValueError)
    assert lines[0].startswith("site/up/model.py:15: Net.forward asks for the value of a tensor")


def test_a_fault_of_torchports_own_stays_a_traceback(port, monkeypatch):
    from torchport.compile import network

    monkeypatch.setattr(network, "module_of", lambda stage, parts: parts["no such part"])
    with pytest.raises(KeyError, match="no such part"):
        carried()


CLASSES = {
    "up.model:Nett": (errors.UnknownNameError, "'up.model' has no class 'Nett'. The nearest is 'Net'."),
    "up.models:Net": (errors.UnknownNameError, "'up' has no module 'models'. The nearest is 'model'."),
    "upp.model:Net": (
        errors.UnknownNameError,
        "There is no package 'upp' for 'upp.model'. Install it, or mend the name.",
    ),
    "up.model:register_to_config": (
        errors.BadValueError,
        "'up.model:register_to_config' is a function, and 'net' is a network. Name a class that is a torch.nn.Module.",
    ),
    "up.model:ConfigMixin": (
        errors.BadValueError,
        "'up.model:ConfigMixin' is a type, and 'net' is a network. Name a class that is a torch.nn.Module.",
    ),
}


@pytest.mark.parametrize("path", CLASSES)
def test_a_class_that_a_card_cannot_have_is_refused_with_the_nearest(port, path):
    kind, text = CLASSES[path]
    port.change("configs/models/small.yaml", "up.model:Net", path)
    assert refused(port, kind) == [f"{CARD}:11: {text}"]


def test_all_wrong_classes_of_a_card_are_named_together(port):
    port.change(
        "configs/models/small.yaml",
        '  net: {class: "up.model:Net", dtype: float32}',
        '  net: {class: "up.model:Nett", dtype: float32}\n  other: {class: "diffusers:UniPCMultistepSchedular"}',
    )
    port.change("patches/up/stages.py", 'Stage("encode", encode, ())', 'Stage("encode", encode, (), meta=("other",))')
    assert refused(port, errors.UnknownNameError) == [
        f"{CARD}:11: 'up.model' has no class 'Nett'. The nearest is 'Net'.",
        f"{CARD}:12: 'diffusers' has no class 'UniPCMultistepSchedular'. The nearest are 'UniPCMultistepScheduler', "
        "'DEISMultistepScheduler', 'DPMSolverMultistepScheduler'.",
    ]


def test_the_command_line_prints_few_lines_and_with_v_the_whole_traceback(port, torchport, capsys):
    port.change("up/model.py", LAYER, f"{LAYER}        y = y * y.sum().item()\n")
    words = ("run", "--model", "small", "--config", "configs/small.yaml", "--path", "pack", "--prompt", "x", "-q")
    code, out, err = torchport(*words, capsys=capsys)
    port.forget()
    assert (code, out) == (2, []) and len(err) < 15 and err[0].startswith("error[TP903] site/up/model.py:14: ")
    assert err[4] == "- id: up.net-forward-14" and not any("Traceback" in line for line in err)
    code, out, err = torchport("-v", *words, capsys=capsys)
    assert code == 2 and err[0] == "Traceback (most recent call last):"
    assert any("jax" in line for line in err) and any(line.startswith("error[TP903] ") for line in err)


def test_a_file_of_upstream_that_is_not_python_names_its_line(port):
    port.change("up/model.py", LAYER, "        def x(:\n")
    lines = refused(port, errors.ForeignError)
    assert lines[0].startswith("site/up/model.py:13: The import of model raises SyntaxError: ")


def test_upstream_that_ends_the_process_is_refused_with_its_line(port):
    port.change("up/model.py", "import torch\n", "import sys\n\nimport torch\n\nsys.exit(3)\n")
    lines = refused(port, errors.ForeignError)
    assert lines[0].startswith("site/up/model.py:5: The import of up.model raises SystemExit: 3.")


@pytest.mark.parametrize(
    ("returns", "text"),
    [
        ("return None", "returns a NoneType. Return the stage's outputs as a dict of tensors by name."),
        (
            'return {"latents": 3}',
            "returns a int as 'latents'. Return the stage's outputs as a dict of tensors by name.",
        ),
        (
            'return {"latents": torch.zeros(2, device="meta")}',
            "returns 'latents' without values: it was computed with weights on meta. Add what computes it to the "
            "stage's `parts`.",
        ),
    ],
)
def test_a_stage_that_returns_no_tensors_by_name_is_refused_with_its_line(port, returns, text):
    family = port.pack / "patches" / "up" / "stages.py"
    source = family.read_text()
    start = source.index("def denoise(")
    body = source.index("\n", start)
    family.write_text(f"{source[:body]}\n    {returns}{source[body:]}")
    lines = refused(port, errors.ReplacementError)
    line = source[:start].count("\n") + 1
    assert lines == [f"pack/patches/up/stages.py:{line}: 'denoise' {text}"]


def test_a_patch_for_a_derived_card_is_listed_in_a_card_that_is_written_out():
    card = types.SimpleNamespace(model="diffusers:XPipeline")
    owners = Owners(None, card, parse_document("patches: {}", "/cache/diffusers:XPipeline.yaml"), list)
    assert owners.listed == (
        "'patches' of a card of your own (torchport new model NAME --pipeline diffusers:XPipeline --out DIR)"
    )
