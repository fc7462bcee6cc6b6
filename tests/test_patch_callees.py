"""What a definition uses is followed through upstream's own source, and its change is drift that names it."""

from __future__ import annotations

import pytest
from fakes.patch_world import World

from torchport import patch
from torchport.errors import DriftError
from torchport.patch import drift, versions
from torchport.patch.callees import callees

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
    return {name: callee.through.partition(":")[2] for name, callee in callees([target]).items()}


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
    drift.lock(world.patches, entries)
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
    drift.lock(world.patches, entries)
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
    drift.lock(world.patches, entries)
    world.write("up/m.py", text.replace("return 1", "return 2"))
    assert "up.m:d (up/m.py:4), which up.m:g uses, changed; and 2 more. Review" in _drift(entries)
