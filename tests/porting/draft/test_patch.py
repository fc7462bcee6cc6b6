"""Drafts of patches: their tests fail until they are filled in, and pass then."""

import pytest
import yaml

NET = "module.Net(4)"
X = "torch.ones(2, 3)"
FILLED = {
    # target: what a call is given, and the body of the replacement
    "scaled": (f"({X},), {{'limit': 9}}", "return x * min(by, 3 if limit is ... else limit)"),
    "later": (f"({X},), {{'by': 2}}", "return x + by"),
    "rows": (f"({X},), {{}}", "yield from (x[n] * 2 for n in range(count))"),
    "Net.forward": (
        f"({NET}, {X}, torch.zeros(1)), {{}}",
        "return self.up(x) + torch.where(text == 0, 1, text)",
    ),
    "Net.size": (f"({NET},), {{}}", "return len(self.up.weight)"),
    "Net.twice": (f"({NET},), {{}}", "return len(self.up.weight) * 2"),
    "Net.halved": (f"({X},), {{}}", "return x * (1 / by)"),
    "Net.small": (f"({X},), {{'by': 8}}", "return by * x"),
    "Net.decorated": (f"({NET}, {X}), {{}}", "return self.up(x).detach()"),
}


def name_of(path):
    return path.lower().replace(".", "_")


def body_of(name, kind, path, body):
    if kind == "replace":
        return f"import torch; {body}" if "torch" in body else body
    names = {
        "scaled": "x, by=by, limit=limit",
        "later": "x, by",
        "rows": "x, count",
        "Net.forward": "self, x, text",
        "Net.halved": "x, by",
        "Net.small": "cls, x, by",
        "Net.decorated": "self, x",
    }
    return f"return {'await ' if path == 'later' else ''}original({names.get(path, 'self')})"


@pytest.mark.parametrize(
    ("kind", "path"),
    [*(("replace", path) for path in FILLED), ("wrap", "later"), ("wrap", "rows"), ("wrap", "Net.size")],
)
def test_a_test_fails_until_function_and_arguments_are_filled_in(world, path, kind):
    world.patch(path, kind)
    name, (arguments, body) = name_of(path), FILLED[path]
    with pytest.raises(NotImplementedError, match="fill in the arguments of a call"):
        world.test_of(name)
    world.fill(
        f"tests/test_up_{name}.py",
        ('raise NotImplementedError("fill in the arguments of a call")', f"return {arguments}"),
    )
    with pytest.raises(NotImplementedError, match=f"fill in {name}"):
        world.test_of(name)
    filled = body_of(name, kind, path, body)
    raised = f'raise NotImplementedError("fill in {name}")'
    if (path, kind) == ("rows", "replace"):
        raised = 'yield from (_ for _ in ()).throw(NotImplementedError("fill in rows"))'
    world.fill("patches/up/model.py", (raised, filled))
    world.test_of(name)
    assert world.checked() == []


def test_a_patch_that_computes_something_else_fails_its_test(world):
    world.patch("Net.halved", "replace")
    world.fill(
        "tests/test_up_net_halved.py",
        ('raise NotImplementedError("fill in the arguments of a call")', f"return ({X},), {{}}"),
    )
    world.fill("patches/up/model.py", ('raise NotImplementedError("fill in net_halved")', "return x"))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        world.test_of("net_halved")


def test_a_class_is_drafted_with_its_public_methods(world):
    world.drop_child()
    world.patch("Net", "replace")
    text = world.read("patches/up/model.py")
    assert "class Net(torch.nn.Module):" in text and "def forward(self, x, text):" in text
    assert "    @staticmethod\n    def halved(x, by=2):\n" in text and "    @property\n    def twice(self):\n" in text
    with pytest.raises(NotImplementedError, match=r"fill in what an object of up\.model\.Net computes"):
        world.test_of("net")
    assert world.checked() == []


def test_a_rewrite_takes_the_statement_of_a_line(world):
    lines = (world.checkout / "up/model.py").read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if "torch.all" in text)
    out = world.patch("Net.forward", "rewrite", "--line", line)
    assert f"fill in     forward_{line} in patches/up/model.py." in out
    (entry,) = yaml.safe_load(world.read("patches/up/model.yaml"))
    assert entry["rewrite"] == {
        "match": "if torch.all(text == 0):\n    text = text + 1\n",
        "put": f"model.py:forward_{line}",
    }
    assert f"def forward_{line}(text):" in world.read("patches/up/model.py")
    name = f"model_forward_{line}"
    world.fill(
        f"tests/test_up_{name}.py",
        ('raise NotImplementedError("fill in the arguments of a call")', f"return ({NET}, {X}, torch.zeros(1)), {{}}"),
    )
    with pytest.raises(NotImplementedError, match=f"fill in forward_{line}"):
        world.test_of(name)
    world.fill("patches/up/model.py", (f'raise NotImplementedError("fill in forward_{line}")', "return text + 1"))
    world.test_of(name)
    assert world.checked() == []


def test_a_stub_has_nothing_to_fill_in(world):
    world.write("checkout/up/model.py", "import flashy_attn\n\n\ndef f():\n    return flashy_attn.f()\n")
    arguments = ("flashy_attn:f", "--kind", "stub", "--importer", "up.model")
    code, out, _ = world.new("patch", *arguments)
    assert code == 0 and "fill in     Nothing in Python: a stub raises when it is called." in out
    world.test_of("without_flashy_attn")
    assert world.checked() == []


def test_a_lowering_has_the_parameters_of_torchs_schema(world):
    world.call("new", "patch", "torch.ops.aten:gelu.default", "--kind", "op", "--out", "pack")
    assert "def gelu(self, *, approximate='none'):" in world.read("patches/torch/lowerings.py")
    test = (world.pack / "tests/test_torch_gelu.py").read_text()
    test = test.replace('raise NotImplementedError("fill in the arguments of a call")', f"return ({X},), {{}}")
    scope = {"__file__": str(world.pack / "tests/test_torch_gelu.py")}
    exec(test, scope)
    with pytest.raises(NotImplementedError, match="fill in gelu"):
        scope["test_gelu_computes_what_torch_does"]()
    world.fill(
        "patches/torch/lowerings.py",
        (
            'raise NotImplementedError("fill in gelu")',
            "import jax; from torchport import engine; "
            "return engine.call_jax(lambda x: jax.nn.gelu(x, approximate=approximate != 'none'), self)",
        ),
    )
    scope["test_gelu_computes_what_torch_does"]()
    assert world.checked() == []


def test_a_lowering_whose_id_is_shipped_has_another(world):
    world.call("new", "patch", "torch.nn.functional:layer_norm", "--kind", "op", "--out", "pack")
    assert "- id: torch.layer-norm-lowerings\n" in world.read("patches/torch/lowerings.yaml")
    assert world.checked() == []


def test_a_default_that_is_no_literal_fails_where_it_is_passed_on(world):
    world.patch("scaled", "wrap")
    text = world.read("patches/up/model.py")
    assert "def scaled(original, x, *, by=2.0, limit=...):" in text and "are `...` here: limit=LIMIT." in text


def test_a_second_patch_is_appended_and_its_row_is_added(world):
    world.patch("scaled", "replace")
    lock, entries = world.read("patches/up/lock.yaml"), world.read("patches/up/model.yaml")
    out = world.patch("Net.forward", "wrap")
    assert "appended to pack/patches/up/model.yaml" in out
    assert world.read("patches/up/model.yaml").startswith(entries)
    rows = yaml.safe_load(world.read("patches/up/lock.yaml"))
    assert [row["target"] for row in rows] == ["up.model:Net.forward", "up.model:scaled"]
    assert rows[1] == yaml.safe_load(lock)[0]
    assert world.checked() == []


def test_what_is_there_already_is_never_written_over(world):
    world.patch("scaled", "replace")
    assert world.refusal("scaled", "wrap") == (
        "error[TP110] pack/patches/up/model.yaml:1: The patch 'up.scaled' is there already. Change that entry, or "
        "delete it first."
    )
    world.write("pack/patches/up/other.py", "def net_size(self):\n    return 1\n")
    assert world.refusal("Net.size", "replace", "--file", "other") == (
        "error[TP110] pack/patches/up/other.py:1: 'net_size' is there already. Choose another file with --file."
    )
    world.write("pack/tests/test_up_net_size.py", "")
    assert world.refusal("Net.size", "replace") == (
        "error[TP110] pack/tests/test_up_net_size.py: It is there already. Choose another name, or delete it first."
    )
    world.write("pack/patches/up/flow.yaml", "[]\n")
    assert world.refusal("Net.halved", "replace", "--file", "flow").startswith(
        "error[TP101] pack/patches/up/flow.yaml:3: Not YAML:"
    )


def test_two_patches_of_one_target_in_one_file_are_refused(world):
    world.drop_child()
    world.patch("Net", "replace")
    assert world.refusal("Net.forward", "replace") == (
        "error[TP202] torchport new patch up.model:Net.forward: 'up.net-forward' claims up.model:Net.forward, and "
        "'up.net' at pack/patches/up/model.yaml:1 claims up.model:Net. Keep one of the two."
    )


def test_a_target_that_drifted_from_the_lock_is_refused(world):
    world.patch("scaled", "replace")
    text = (world.checkout / "up/model.py").read_text()
    world.write("checkout/up/model.py", text.replace("x * min(by, limit)", "x + by"))
    (world.pack / "patches/up/model.yaml").unlink()
    assert world.refusal("scaled", "replace", "--file", "other").startswith(
        "error[TP207] pack/patches/up/other.yaml:1: up.model:scaled is not what 'up.scaled' was reviewed against"
    )


@pytest.mark.parametrize(
    ("path", "kind", "flags", "says"),
    [
        ("LIMIT", "value", (), "up.model:LIMIT is a value (up/model.py:7), and other modules may hold it already. "),
        (
            "LIMIT",
            "replace",
            (),
            "rewrite a function that reads it; in this module: scaled (line 10).",
        ),
        ("scaled", "value", (), "up.model:scaled is a function, and no value. Write --kind replace, or wrap."),
        ("stream", "wrap", (), "stream (up/model.py:24) is an asynchronous generator function. Patch the function"),
        ("Net", "wrap", (), "Net (up/model.py:28) is a class, and a wrapper takes a function. Wrap one of its methods"),
        (
            "Net",
            "replace",
            (),
            "Child in the same module derives from Net (up/model.py:28), and would keep it. ",
        ),
        ("Child.forward", "wrap", (), "If it is inherited from Net, name the class that defines it."),
        ("scald", "wrap", (), "There is no 'scald' in up/model.py that a patch can name. Did you mean 'scaled'?"),
        (
            "shifted",
            "wrap",
            (),
            "(up/model.py:5: from up.other import shifted). Name it where it is defined: up.other:",
        ),
        ("Net forward", "wrap", (), "'up.model:Net forward' is no target. Write package.module:function, or "),
        ("Net.forward", "rewrite", (), "--kind rewrite has no --line N. Add --line N."),
        ("Net.forward", "rewrite", ("--line", 3), "--line 3: Line 3 is not in the body of a function Net.forward"),
        ("Net.forward", "wrap", ("--line", 3), "--line is for --kind rewrite. Leave it out."),
        ("scaled", "stub", ("--importer", "up.x"), "The package up is installed, and a stub is for one that is not."),
        ("scaled", "op", (), "up.model:scaled is not torch's. Name torch.ops.aten:name.overload, or write --kind"),
        (
            "scaled.inner",
            "replace",
            (),
            "scaled (up/model.py:10) is a function, and no patch can name what is inside it. Patch scaled, or rewrite "
            "a statement of it: up.model:scaled --kind rewrite --line N.",
        ),
        ("größe", "wrap", (), "'up.model:größe' has letters beyond ASCII, and a target of a patch has none. Patch a"),
        (
            "scaled",
            "wrap",
            ("--file", "a/b"),
            "--file a/b: It is no name of a file of patches. Write letters",
        ),
    ],
)
def test_what_cannot_be_patched_is_refused_by_name(world, path, kind, flags, says):
    assert says in world.refusal(path, kind, *flags)


def test_nothing_is_written_into_upstream_or_site_packages(world, tmp_path, capsys):
    import sysconfig

    def refusal(out, *flags):
        code, _, (line,) = world.call("new", "patch", "up.model:scaled", "--kind", "wrap", "--out", out, *flags)
        assert code == 2
        return line

    assert refusal("checkout/mine", "--upstream-path", "checkout") == (
        "error[TP604] --out checkout/mine: It lies in the upstream at checkout, which is never written to. Name a "
        "folder of your own."
    )
    (tmp_path / "link").mkdir()
    (tmp_path / "link/patches").symlink_to(tmp_path / "checkout/up")
    assert "It lies in the upstream at checkout/up, which is never written to." in refusal("link")  # found on the path
    assert "It lies among installed packages, where nothing is written." in refusal(
        sysconfig.get_paths()["purelib"] + "/mine"
    )
    world.write("plain", "")
    assert refusal("plain") == "error[TP604] --out plain: It is a file, not a folder. Name a folder of your own."
    assert not (tmp_path / "checkout/mine").exists() and len(list((tmp_path / "checkout/up").iterdir())) == 3


def test_a_name_from_an_absent_package_is_patched_where_it_is_called(world):
    world.write(
        "checkout/up/model.py",
        """\
        from timmy.layers import Attention


        class Block:
            def __init__(self, width):
                self.attn = Attention(width)
        """,
    )
    assert world.refusal("Attention", "replace").endswith(
        "(up/model.py:1: from timmy.layers import Attention), and timmy is not installed. Install timmy. Or stub it "
        "(timmy:Attention --kind stub --importer up.model), and rewrite each statement that calls Attention: "
        "up.model:Block.__init__ --kind rewrite --line 6."
    )
    world.patch("Block.__init__", "rewrite", "--line", "6")
    assert "def init_6(self, width):" in world.read("patches/up/model.py")
    code, _, error = world.new("patch", "timmy.layers:Attention", "--kind", "replace")
    assert code == 2 and "To go on without timmy, rewrite the statements of its importers" in error[0]


def test_a_package_below_src_is_named_with_its_folder(world):
    world.write("checkout/src/below/m.py", "def f(x):\n    return x\n")
    code, _, error = world.new("patch", "below.m:f", "--kind", "replace")
    assert code == 2 and error[0].endswith("It lies below src: write --upstream-path checkout/src.")
