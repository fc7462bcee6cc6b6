"""What a definition uses is followed through upstream's own source, and its change is drift that names it."""

from __future__ import annotations

import pytest
from fakes.patch_world import World

from torchport import patch
from torchport.errors import DriftError, TargetError
from torchport.patch.declared import versions
from torchport.patch.source import drift
from torchport.source.names import callees

ROTARY = """\
def rotate_half(x):
    return -x

def apply_rotary(x):
    return rotate_half(x) + x

def block(x):
    return apply_rotary(x)
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    versions.installed.cache_clear()  # another test may have installed an `up`
    world = World(tmp_path, monkeypatch)
    world.python("def new(x): return x\ndef put(x): return x\n")
    yield world
    world.close()


def _used(target="up.m:f"):
    return {name: user.partition(":")[2] for name, (_, _, user) in callees([target]).items()}


def test_functions_are_followed_to_any_depth_with_who_uses_them(world):
    world.write("up/m.py", "def c(): return 1\ndef b(): return c()\ndef f(): return map(b, [1])\ndef d(): return 2\n")
    assert _used() == {"up.m:b": "f", "up.m:c": "b"}


@pytest.mark.parametrize(
    "text",
    [
        "from up.a import g\ndef f(): return g()\n",
        "from .a import g as h\ndef f(): return h()\n",
        "from . import a\ndef f(): return a.g()\n",
        "import up.a\ndef f(): return up.a.g()\n",
        "import up.a as it\ndef f(): return it.g()\n",
        "from up import g\ndef f(): return g()\n",
        "from up.star import g as h\ndef f(): return h()\n",
        "from up.a import *\ndef f(): return g()\n",
        "from up.deep import a\ndef f(): return a.g()\n",
        "import up.deep.b\ndef f(): return up.deep.b.g()\n",
        "def f():\n    from .a import g\n    return g()\n",
        "from .a import g\n@g\ndef f(): return 1\n",
        "from .a import g\ndef f(a=g): return 1\n",
    ],
)
def test_a_name_is_found_wherever_its_package_defines_it(world, text):
    world.write("up/__init__.py", "from .a import g\n")
    world.write("up/a.py", "def g(): return 1\n")
    world.write("up/star.py", "from .a import *\n")
    world.write("up/deep/b.py", "from ..a import g\n")
    world.write("up/deep/__init__.py", "from .. import a\n")
    world.write("up/m.py", text)
    assert _used() == {"up.a:g": "f"}


def test_methods_are_found_in_the_classes_that_the_source_shows(world):
    world.write("up/base.py", "class Base:\n    def own(self): return 1\n    def far(self): return 2\n")
    world.write(
        "up/m.py",
        """
        from up.base import Base

        class Middle(Base):
            def own(self):
                return super().own()

        import up.m

        class K(up.m.Middle):
            def __init__(self):
                self.size = 1

            @classmethod
            def made(cls):
                return cls.own

            def f(self):
                return self.own() + self.far() + self.unknown()

        def made():
            return K()
        """,
    )
    assert _used("up.m:K.f") == {"up.m:Middle.own": "K.f", "up.base:Base.far": "K.f", "up.base:Base.own": "Middle.own"}
    assert _used("up.m:K.made") == {"up.m:Middle.own": "K.made", "up.base:Base.own": "Middle.own"}
    assert _used("up.m:made") == {"up.m:K.__init__": "made"}


def test_constants_and_tables_are_followed_into_what_they_are_made_of(world):
    world.write("up/m.py", "def g(): return 1\nTABLE = {'g': g}\nSCALE = 2\ndef f(): return TABLE['g']() * SCALE\n")
    assert _used() == {"up.m:SCALE": "f", "up.m:TABLE": "f", "up.m:g": "TABLE"}


def test_other_packages_locals_annotations_and_dunders_are_not_followed(world):
    world.write("other/m.py", "def g(): return 1\n")
    world.write(
        "up/m.py",
        """
        import os
        from other.m import g

        __version__ = "1"

        class Kind: pass

        def local(): return 1

        def f(a: Kind, local=0) -> Kind:
            b: Kind = a
            print(__version__, os.sep)
            return local + g() + a.local()
        """,
    )
    assert _used() == {}


def test_a_circle_of_calls_and_of_imports_ends(world):
    world.write("up/a.py", "from up.m import *\nfrom up.m import f\ndef g(): return f() + unknown()\n")
    world.write("up/m.py", "from up.a import *\nfrom up.a import g\ndef f(): return g() + f() + missing()\n")
    assert _used() == {"up.a:g": "f"}
    world.write("up/m.py", "class A(B): pass\nclass B(A):\n    def f(self): return self.g() + A.h\n")
    assert _used("up.m:B.f") == {}


def _drift(entries):
    with pytest.raises(DriftError) as caught, patch.applied(entries):
        pass
    return str(caught.value).partition(": up.m:")[2]


def test_a_sign_turned_two_calls_below_what_a_patch_relies_on_is_drift_that_names_the_place(world):
    world.write("up/m.py", ROTARY)
    entries = world.one("wrap: p.py:wrapped", "up.m:block", "relies_on: ['up.m:apply_rotary']")
    world.python("def wrapped(original, x): return x\n")
    drift.lock(entries)
    lock = (world.patches / "up" / "lock.yaml").read_text()
    assert '        up.m: "apply_rotary:' in lock and " rotate_half:" in lock
    with patch.applied(entries) as ledger:
        assert ledger.rows()[0]["drift"] == "locked"
    world.write("up/m.py", ROTARY.replace("return -x", "return x"))
    assert _drift(entries) == (
        "block is not what 'up.one' was reviewed against (up unknown): up.m:rotate_half (up/m.py:1), which "
        "up.m:apply_rotary uses, changed. Review the patch, then run: torchport patches lock up "
        "(with the --path and --upstream-path that are used here)."
    )


def test_a_replacement_relies_on_what_its_target_uses_unless_it_is_plumbing(world):
    world.write("up/m.py", ROTARY)
    entries = world.one("replace: p.py:new", "up.m:block")
    drift.lock(entries)
    world.write("up/m.py", ROTARY.replace("return -x", "return x"))
    assert "up.m:rotate_half (up/m.py:1), which up.m:apply_rotary uses, changed. Review" in _drift(entries)
    plumbing = world.one("replace: p.py:new", "up.m:block", "plumbing: true")
    with patch.applied(plumbing) as ledger:
        assert ledger.rows()[0]["drift"] == "locked"


def test_of_many_changed_callees_four_are_told(world):
    names = "abcdef"
    text = "".join(f"def {name}(): return 1\n" for name in names) + f"def g(): return {'() + '.join(names)}()\n"
    world.write("up/m.py", text)
    world.python("def new(): return 1\n")
    entries = world.one("replace: p.py:new", "up.m:g")
    drift.lock(entries)
    world.write("up/m.py", text.replace("return 1", "return 2"))
    assert "up.m:d (up/m.py:4), which up.m:g uses, changed; and 2 more. Review" in _drift(entries)


EDITED = """\
import math
from up.a import g, CONST
from up import b
try:
    from up.fast import quick
except ImportError:
    from up.slow import quick
SCALE = 2
SCALE *= 3
if CONST > 3:
    def chosen(x): return x
else:
    def chosen(x): return -x
for LAST in (1, 2): pass
TABLE = {}
TABLE["k"] = 5
class K:
    def block(self, x):
        shift = lambda ratio: ratio + 1
        summed = sum(item for item in [1])
        y = g(x) + b.g(x) + quick(x) + SCALE + chosen(x) + LAST + TABLE["k"] + math.sqrt(x)
        return type(self).kind(y) + self.__class__.sort(y) + ratio(y) + CONST
    @staticmethod
    def kind(x): return x
    @staticmethod
    def sort(x): return x
def ratio(x): return x
def item(x): return x
"""
OTHERS = {"up/a.py": "CONST = 4\ndef g(x): return x\n", "up/slow.py": "def quick(x): return x\n"}
OTHERS |= {"up/b.py": "def g(x): return -x\n", "up/fast.py": "def quick(x): return x\n"}


def _edited(world, old, new):
    """Returns what is told of an edit of the module or, where that has no such text, of another one; '' if nothing."""
    for file, text in {"up/m.py": EDITED, **OTHERS}.items():
        world.write(file, text)
    world.python("def new(self, x): return x\n")
    entries = world.one("replace: p.py:new", "up.m:K.block")
    drift.lock(entries)
    file = old.partition(":")[0] if old.startswith("up/") else "up/m.py"
    text = {"up/m.py": EDITED, **OTHERS}[file]
    assert text.count(old.removeprefix(f"{file}:")) == 1
    world.write(file, text.replace(old.removeprefix(f"{file}:"), new))
    try:
        with patch.applied(entries):
            return ""
    except DriftError as error:
        return str(error).partition("(up unknown): ")[2].partition(". Review")[0]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("from up.a import g, CONST", "from up.b import g\nfrom up.a import CONST", "up.m:K.block (up/m.py:19)"),
        ("from up.slow import quick", "from up.a import g as quick", "up.m:K.block (up/m.py:18)"),
        ("import math", "import cmath as math", "up.m:K.block (up/m.py:18), by what its names lead to, changed"),
        ("up/fast.py:return x", "return -x", "up.fast:quick"),
        ("SCALE = 2", "SCALE = 4", "up.m:SCALE"),
        ("def chosen(x): return x\n", "def chosen(x): return x + 1\n", "up.m:chosen"),
        ("CONST > 3", "CONST > 4", "up.m:chosen"),
        ("(1, 2)", "(1, 3)", "up.m:LAST"),
        ('["k"] = 5', '["k"] = 6', "up.m:TABLE"),
        ("def kind(x): return x", "def kind(x): return -x", "up.m:K.kind"),
        ("def sort(x): return x", "def sort(x): return -x", "up.m:K.sort"),
        ("def ratio(x): return x", "def ratio(x): return -x", "up.m:ratio"),
    ],
)
def test_an_import_turned_elsewhere_and_every_statement_that_binds_a_name_are_drift(world, old, new, told):
    assert _edited(world, old, new).startswith(told)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def item(x): return x", "def item(x): return -x"),
        ("import math", "import math  # a comment\nimport os"),
        ("from up.a import g, CONST", "from up.a import (\n    CONST,\n    g,\n)"),
        ("from up import b", "import up.b as b"),
        ("up/a.py:CONST = 4", "CONST = 4\nOTHER = 3"),
        ("def ratio(x): return x", 'def ratio(x: int) -> int:\n    """Text."""\n    return (x)'),
    ],
)
def test_edits_that_change_nothing_are_no_drift(world, old, new):
    assert _edited(world, old, new) == ""


def test_super_is_followed_in_a_class_as_a_whole_and_ends_outside_of_classes(world):
    world.write(
        "up/m.py",
        """
        class A:
            def g(self): return 1
        class B(A):
            def g(self): return super().g()
        def f():
            class Inner(A):
                def g(self): return super().g()
            return B(), Inner()
        """,
    )
    assert _used() == {"up.m:A": "f", "up.m:B": "f", "up.m:A.g": "B"}


@pytest.mark.parametrize("name", ["up.m:rotate_hlaf", "up.none:f"])
def test_what_a_patch_relies_on_must_be_there_to_be_locked(world, name):
    world.write("up/m.py", ROTARY)
    entries = world.one("replace: p.py:new", "up.m:block", f"relies_on: ['{name}']")
    with pytest.raises(TargetError, match=f"p.yaml:1: 'up.one' relies on {name}, which is not in the source. Name"):
        drift.lock(entries)
