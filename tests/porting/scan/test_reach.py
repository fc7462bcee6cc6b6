"""What an entry leads to: calls, guards by constants, training told apart."""

import gc

import pytest

from torchport.errors import BadValueError, UnknownNameError
from torchport.porting.scan.codebase import CodeUnit
from torchport.porting.scan.facts import Facts

ITEM = "x.item()"


def reaches(report):
    """The reach of each finding, by function."""
    return {one.name: one.reach for one in report.findings}


def test_a_call_a_constructor_and_a_submodule_are_followed(scanned):
    text = """
    import torch
    class Inner(torch.nn.Module):
        def forward(self, x):
            return x.item()
    class Unused(torch.nn.Module):
        def forward(self, x):
            return x.item()
    def called(x: torch.Tensor):
        return x.item()
    def uncalled(x: torch.Tensor):
        return x.item()
    class Net(torch.nn.Module):
        def __init__(self):
            self.inner = Inner()
        def forward(self, x):
            return self.helper(self.inner(called(x)))
        def helper(self, x: torch.Tensor):
            return x.item()
    """
    assert reaches(scanned({"up.py": text}, "up:Net")) == {
        "Inner.forward": "path",
        "Unused.forward": "off",
        "called": "path",
        "uncalled": "off",
        "Net.helper": "path",
    }


def test_without_an_entry_nothing_is_known_but_training(scanned):
    report = scanned({"up.py": "def f(x):\n    x.item()\ndef train_step(x):\n    x.item()\n"})
    assert reaches(report) == {"f": "unknown", "train_step": "training"}
    assert report.count() == "1 outside training: 0 covered, 0 need a rewrite, 1 unknown"


def test_a_method_of_an_unknown_object_is_looked_up_in_what_is_made(scanned):
    text = """
    class Made:
        def decode(self, x):
            return x.item()
    class NotMade:
        def decode(self, x):
            return x.item()
    class Pipeline:
        def __init__(self, vae):
            self.vae = vae
        def __call__(self, x):
            return self.vae.decode(x)
        @classmethod
        def load(cls):
            return cls(Made())
    """
    assert reaches(scanned({"up.py": text}, "up:Pipeline")) == {"Made.decode": "path", "NotMade.decode": "off"}


def test_what_a_pretrained_class_and_a_parameter_of_the_entry_name_is_made(scanned):
    text = """
    import torch
    class Vae(torch.nn.Module):
        def forward(self, x):
            return x.item()
    class Text(torch.nn.Module):
        def forward(self, x):
            return x.item()
    class Pipeline:
        def __init__(self, text: Text):
            self.vae = Vae.from_pretrained("x")
        def __call__(self, x):
            return x
    """
    assert set(reaches(scanned({"up.py": text}, "up:Pipeline")).values()) == {"path"}


@pytest.mark.parametrize(
    "guard",
    [
        "if False:",
        "if self.training:",
        "if not True:",
        "if fast:",
        "if size > 1:",
        "if mode is None:",
        "if mode == 'other':",
        "if self.flag and x:",
        "if TYPE_CHECKING:",
        "if dist.is_initialized():",
        "if torch.is_grad_enabled():",
        "if self.flag or size != 1:",
    ],
)
def test_a_constant_closes_a_way(scanned, guard):
    text = f"""
    import torch
    import torch.distributed as dist
    class Net(torch.nn.Module):
        def __init__(self):
            self.flag = False
        def forward(self, x, y):
            return self.inner(y, mode="some", size=1)
        def inner(self, x, fast=False, size=2, mode=None):
            {guard}
                return x.item()
            return x
    """
    assert reaches(scanned({"up.py": text}, "up:Net")) == {"Net.inner": "off"}


@pytest.mark.parametrize(
    "guard", ["if not self.training:", "if size:", "if other:", "if self.switched:", "if mode is not None:", "if x:"]
)
def test_what_is_open_stays_open(scanned, guard):
    text = f"""
    class Net:
        def __init__(self):
            self.switched = False
        def switch(self):
            self.switched = True
        def __call__(self, x, other):
            self.inner(x, other, size=1, mode="some")
            return self.inner(x, other, size=0, mode="some")
        def inner(self, x, other, size=0, mode=None):
            {guard}
                return x.item()
            return x
    """
    assert reaches(scanned({"up.py": text}, "up:Net")) == {"Net.inner": "path"}


def test_what_follows_a_raise_or_a_return_is_closed(scanned):
    text = """
    class Net:
        def __call__(self, x):
            if x is None:
                return self.other(x)
            raise RuntimeError
            x.item()
        def other(self, x):
            if True:
                return x
            x.item()
    """
    assert reaches(scanned({"up.py": text}, "up:Net")) == {"Net.__call__": "off", "Net.other": "off"}


def test_training_is_told_apart(scanned):
    files = {
        "up.py": "def loss(x):\n    return x.item()\ndef shared(x):\n    return x.item()\ndef run(x):\n    shared(x)\n",
        "train.py": "from up import shared\ndef step(x):\n    shared(x)\n    x.item()\n",
        "other.py": "def unused(x):\n    x.item()\n",
    }
    found = reaches(scanned(files, "up:run"))
    assert found.pop("<module>") == "training"  # it holds `shared`
    assert found == {"loss": "training", "shared": "path", "step": "training", "unused": "off"}


def test_a_function_that_is_handed_on_is_reached(scanned):
    text = """
    import functools
    def one(x): x.item()
    def two(x): x.item()
    class Net:
        def __call__(self, run, x):
            run(one)
            run(functools.partial(two, 1))
            run(self.three)
            return isinstance(x, Other)
        def three(self, x): x.item()
    class Other:
        def __call__(self, x): x.item()
    """
    found = reaches(scanned({"up.py": text}, "up:Net"))
    assert found == {"one": "path", "two": "path", "Net.three": "path", "Other.__call__": "off"}


def test_a_table_is_followed_where_it_is_read(scanned):
    files = {
        "up.py": """
            from tables import TABLE
            from tables import OTHER
            def run(x):
                return TABLE["one"](x)
            """,
        "tables.py": """
            def one(x): x.item()
            def two(x): x.item()
            TABLE = {"one": one}
            OTHER = [two]
            """,
    }
    found = reaches(scanned(files, "up:run"))
    assert found == {"one": "path", "two": "off"}


def test_properties_super_and_overrides_are_followed(scanned):
    text = """
    class Above:
        def __call__(self, x):
            return self.step(x)
        def step(self, x):
            return x.item()
    class Net(Above):
        def __call__(self, x):
            self.rank
            return super().__call__(x)
        @property
        def rank(self):
            return self.value.item()
        def step(self, x):
            return x.item()
    """
    found = reaches(scanned({"up.py": text}, "up:Net"))
    assert found == {"Above.step": "path", "Net.rank": "path", "Net.step": "path"}


@pytest.mark.parametrize("calls", ["later(), Above().run(x)", "Above().run(x), later()"])
def test_an_override_is_followed_whichever_class_is_made_first(scanned, calls):
    text = f"""
    class Above:
        def run(self, x):
            return self.step(x)
        def step(self, x):
            return 0
    class Net(Above):
        def step(self, x):
            return x.item()
    def later():
        return Net()
    def entry(x):
        return {calls}
    """
    assert reaches(scanned({"up.py": text}, "up:entry")) == {"Net.step": "path"}


def test_imports_run_what_modules_do(scanned):
    files = {
        "up/__init__.py": "",
        "up/net.py": "from .device import NAME\nclass Net:\n    def forward(self, x):\n        return x\n",
        "up/device.py": "import torch\nNAME = torch.cuda.get_device_name()\n",
        "up/other.py": "import torch\nNAME = torch.cuda.get_device_name()\n",
    }
    report = scanned(files, "up.net:Net")
    assert {one.target: one.reach for one in report.findings} == {
        "up.device:<module>": "path",
        "up.other:<module>": "off",
    }


def test_a_folder_without_init_is_no_part_of_a_name(scanned):
    files = {
        "src/up/net.py": "from up.inner import f\ndef run(x):\n    f(x)\n",
        "src/up/inner.py": "def f(x):\n    x.item()\n",
        "demos/app.py": "from tool import g\n",
        "demos/tool.py": "def g(x):\n    x.item()\n",
    }
    found = {one.target: one.reach for one in scanned(files, "up.net:run").findings}
    assert found == {"up.inner:f": "path", "up.net:<module>": "path", "tool:g": "off", "app:<module>": "off"}


def test_a_package_can_be_scanned_from_its_inside(codebase):
    from torchport.porting.scan import scanning as scan

    folder = codebase({"up/__init__.py": "", "up/net.py": "from up.inner import f\ndef run(x):\n    f(x)\n"})
    (folder / "up" / "inner.py").write_text("def f(x):\n    x.item()\n")
    report = scan.scan(folder / "up", ["up.net:run"])
    assert {one.target: one.reach for one in report.findings if one.kind == "item"} == {"up.inner:f": "path"}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("up", "--entry up: It is no name of a class or function. Write it as package.module:Class."),
        ("down:Net", "--entry down:Net: The codebase has no module 'down'. Name a module of the folder"),
        ("a.up:Net", "--entry a.up:Net: The codebase has no module 'a.up'. Did you mean 'up'?"),
        ("up:Nets", "--entry up:Nets: 'up' has no 'Nets'. Did you mean 'Net'? Known: Net."),
    ],
)
def test_an_entry_that_is_not_there_is_refused(scanned, entry, said):
    with pytest.raises((BadValueError, UnknownNameError)) as refusal:
        scanned({"up.py": "class Net:\n    pass\n"}, entry)
    assert refusal.value.sentence().startswith(said)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    from torchport.porting.scan import scanning as scan

    with pytest.raises(BadValueError, match="There is no such folder or file"):
        scan.scan(tmp_path / "absent")


def test_nothing_of_a_codebase_is_kept_after_its_scan(scanned):
    scanned({"up.py": "class Network:\n    def forward(self):\n        return helper()\ndef helper():\n    return 1\n"})
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, (Facts, CodeUnit))]
