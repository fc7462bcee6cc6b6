"""Entries to paste follow the schema, name what they change, and rewrite what they say."""

import ast
import textwrap

import pytest
import yaml

from torchport.patch.declared import Entry, mistake
from torchport.patch.source import proposal
from torchport.source.parsing import SourceFile

SOURCE = textwrap.dedent("""
class Net:
    def forward(self, x, mask=None):
        y = x + 1
        if (mask > 0).any():
            y = y * 2
        elif mask.any():
            y = y * 3
        z = w = int(x.sum())
        values = [y for _ in range(z)]
        for i in range(int(x.max())):
            y = y + i
            a = y
            b = a
            c = b
        assert x.any(), f"{x} is 'no' \\\\ good"
        y[mask.any()] += w
        if x.any():
            return values
        return y * x.item()

    if True:
        @staticmethod
        def _inner(x):
            def ask(u):
                return u.item()
            return ask(x)

TABLE = [1].item()
""")
LINES = SOURCE.splitlines()


def line_of(text):
    return next(n for n, line in enumerate(LINES, 1) if text in line)


def proposed(text):
    """Returns the proposal for the line with a text, and its entry as it is read."""
    made = proposal.statement(SourceFile("up.model", "up.py", SOURCE), line_of(text), "A test.")
    [data] = yaml.safe_load(made.text)
    entry = Entry.model_validate(data)
    assert mistake(entry) is None
    return made, entry


STATEMENTS = {
    "y = x + 1": ("y = x + 1", None, 1, "forward_4(x), which returns y,"),
    "if (mask > 0)": (
        "if (mask > 0).any():\n    y = y * 2\nelif mask.any():\n    y = y * 3",
        None,
        1,
        "forward_5(mask, y), which returns y,",
    ),
    "elif mask.any()": ("if mask.any():\n    y = y * 3", None, 1, "forward_7(mask, y), which returns y,"),
    "z = w = int": ("z = w = int(x.sum())", ["w", "z"], 1, "forward_9(x), which returns w, z,"),
    "values = [": ("values = [y for _ in range(z)]", None, 1, "forward_10(y, z), which returns values,"),
    "for i in": (
        "for i in range(int(x.max())):\n    $...block0",
        ["y"],
        1,
        "forward_11(x, y), which returns y,",
    ),
    "assert x.any()": ("assert x.any(), f\"{x} is 'no' \\\\ good\"", None, 1, "forward_16(x)"),
    "y[mask.any()]": ("y[mask.any()] += w", None, 1, "forward_17(mask, w, y)"),
    "return values": ("return values", None, 1, "forward_19(values), which returns what the statement returns,"),
    "return y * x.item()": (
        "return y * x.item()",
        None,
        1,
        "forward_20(x, y), which returns what the statement returns,",
    ),
}


@pytest.mark.parametrize("text", STATEMENTS)
def test_a_statement_is_rewritten_by_a_function_of_what_it_reads(text):
    match, gives, times, write = STATEMENTS[text]
    made, entry = proposed(text)
    assert ast.dump(ast.parse(entry.rewrite.match.replace("$...", "_"))) == ast.dump(
        ast.parse(match.replace("$...", "_"))
    )
    assert (entry.rewrite.gives, entry.rewrite.times, made.write) == (gives, times, write)
    assert entry.target == "up.model:Net.forward" and made.names == "up/tracing"


def test_a_statement_in_a_nested_function_is_the_statement_that_defines_it():
    made, entry = proposed("return u.item()")
    assert entry.target == "up.model:Net._inner" and entry.rewrite.match.startswith("def ask(u):")
    assert made.write == "inner_26(), which returns ask,"


def test_a_function_is_replaced_where_its_statement_returns_early():
    made, entry = proposed("        if x.any():")
    assert (entry.kind, entry.replace) == ("replace", "tracing.py:forward_18")
    assert made.write == "forward_18(self, x, mask=None), which does what the function does,"


@pytest.mark.parametrize("text", ["class Net", "def forward", "TABLE"])
def test_what_stands_outside_all_functions_cannot_be_rewritten(text):
    assert proposal.statement(SourceFile("up.model", "up.py", SOURCE), line_of(text), "A test.") is None


def test_a_statement_that_stands_twice_is_rewritten_twice():
    text = "def f(x):\n    y = x.item()\n    print(y)\n    y = x.item()\n    return y\n"
    [data] = yaml.safe_load(proposal.statement(SourceFile("up", "up.py", text), 2, "A test.").text)
    assert Entry.model_validate(data).rewrite.times == 2


ORIGIN = """\
def f(x, given, n):
    empty = (x == 0).all()
    if n:
        twice = x.any()
    else:
        twice = x.all()
    a = b = x.any()
    if not empty:
        x = x + 1
    assert twice
    assert given
    assert a
    return x
"""


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (8, "empty = (x == 0).all()"),  # rewritten where it is made
        (10, "assert twice"),  # made in two places
        (11, "assert given"),  # made elsewhere
        (12, "assert a"),  # with another name
    ],
)
def test_of_a_branch_on_a_name_the_statement_that_makes_the_name_is_rewritten(line, match):
    [data] = yaml.safe_load(proposal.statement(SourceFile("up", "up.py", ORIGIN), line, "A test.").text)
    assert Entry.model_validate(data).rewrite.match == match


def test_an_entry_fits_the_version_that_is_installed_and_any_of_a_checkout():
    import packaging

    assert proposal.fits("packaging") == {"packaging": f"=={packaging.__version__}"}
    assert proposal.fits("no_such_package") == {"no_such_package": "*"}


def test_every_kind_of_entry_follows_the_schema_and_says_what_to_write():
    imported = ast.parse("from flash_attn.ops import attend").body[0]
    made = [
        proposal.stub("up.model", imported, "flash_attn", "A test."),
        proposal.operator("torch.ops.aten:_ctc_loss.Tensor", "up.model", "A test."),
        proposal.function("torch.cuda:Event", "up.model", "A test.", "(blocking=False)"),
        proposal.function("torch:Tensor.cuda", "up.model", "A test.", "(...)", importing=True),
    ]
    entries = [Entry.model_validate(yaml.safe_load(one.text)[0]) for one in made]
    assert [mistake(entry) for entry in entries] == [None] * 4
    assert [(entry.kind, entry.target) for entry in entries] == [
        ("stub", "flash_attn:ops.attend"),
        ("op", "torch.ops.aten:_ctc_loss.Tensor"),
        ("replace", "torch.cuda:Event"),
        ("replace", "torch:Tensor.cuda"),
    ]
    assert entries[3].lifetime.while_importing == "up" and len({entry.id for entry in entries}) == 4
    assert [one.remedy("'patches'") for one in made[:3]] == [
        "Paste the entry below into patches/up/imports.yaml, and list up/imports under 'patches'",
        "Paste the entry below into patches/up/lowerings.yaml, write ctc_loss_Tensor(...), which computes the operator "
        "with torchport.engine.call_jax, in lowerings.py beside it, and list up/lowerings under 'patches'",
        "Paste the entry below into patches/up/cuda.yaml, write Event(blocking=False), which answers without CUDA, in "
        "cuda.py beside it, and list up/cuda under 'patches'",
    ]


def test_a_branch_with_its_body_on_one_line_is_rewritten_as_a_whole():
    text = "def f(x):\n    if x.any(): x = x + 1\n    return x\n"
    [data] = yaml.safe_load(proposal.statement(SourceFile("up", "up.py", text), 2, "A test.").text)
    assert data["rewrite"]["match"] == "if x.any():\n    x = x + 1\n"
