"""Armed before import: how patches meet the import system."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.patch_world import World

from torchport import patch
from torchport.errors import AliasError, ReplacementError, SignatureError, TargetError, TooLateError


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", "def f(a):\n    return 'old'\n")
    world.python("def new(a): return 'new'")
    yield world
    world.close()


def test_a_patch_is_applied_before_anyone_can_capture_the_original(world):
    world.write("up/user.py", "from up.m import f\n")
    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.user

        assert up.user.f(1) == "new"
    assert up.user.f(1) == "old"


def test_the_finder_is_there_only_while_something_is_armed(world):
    names = [type(finder).__module__ for finder in sys.meta_path]
    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        assert type(sys.meta_path[0]).__module__ == "torchport.patch.live.hook"
    assert [type(finder).__module__ for finder in sys.meta_path] == names


def test_a_module_sees_its_own_loader_and_spec(world):
    world.write("up/m.py", "seen = type(__loader__).__name__, type(__spec__.loader).__name__\ndef f(a): return 1\n")
    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.m

        assert up.m.seen == ("SourceFileLoader", "SourceFileLoader")
        assert inspect.getsource(up.m).startswith("seen")


def test_modules_of_namespace_packages_are_targets(world):
    (world.site / "ns").mkdir()
    world.write("ns/up/m.py", "def f(a): return 'old'\n")
    (world.site / "ns" / "up" / "__init__.py").unlink()
    with patch.applied(world.one("replace: p.py:new", "ns.up.m:f")):
        module = importlib.import_module("ns.up.m")
        assert module.f(1) == "new"
    for name in ("ns", "ns.up", "ns.up.m"):
        del sys.modules[name]


def test_a_lazy_package_is_not_woken(world):
    world.write(
        "up/__init__.py",
        """
        woken = []
        def __getattr__(name):
            woken.append(name)
            raise AttributeError(name)
        """,
    )
    world.write("up/other.py", "from up.m import f\n")
    import up
    import up.other

    with patch.applied(world.one("replace: p.py:new", "up.m:f")) as ledger:
        assert up.other.f(1) == "new"
        assert "rebound up.other.f" in ledger.rows()[0]["detail"]
    del sys.modules["up.other"]
    assert [name for name in up.woken if not name.startswith("__")] == []


def test_a_package_whose_source_is_read_is_not_run(world):
    world.write("up/__init__.py", "raise RuntimeError('ran')\n")
    entries = world.one("replace: p.py:new", "up.m:f")
    with patch.applied(entries):
        assert "up" not in sys.modules


def test_a_relative_import_and_a_reload_are_patched_as_well(world):
    world.write("up/user.py", "from .m import f\n")
    with patch.applied(world.one("replace: p.py:new", "up.m:f")) as ledger:
        import up.m
        import up.user

        assert up.user.f(1) == "new"
        importlib.reload(up.m)
        assert up.m.f(1) == "new"
        assert ledger.rows()[0]["state"] == "used"
    assert (up.m.f(1), up.user.f(1)) == ("old", "old")


def test_an_import_of_a_second_copy_is_patched_and_both_are_undone(world):
    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.m as first

        del sys.modules["up.m"]
        second = importlib.import_module("up.m")
        assert (first.f(1), second.f(1)) == ("new", "new")
    assert (first.f(1), second.f(1)) == ("old", "old")


def test_an_error_inside_an_import_reaches_the_user_though_upstream_swallows_it(world):
    world.write("up/m.py", "f = 3\nglobals()['g'] = 1\n")
    world.write("up/user.py", "try:\n    import up.m\nexcept Exception:\n    fallback = True\n")
    with pytest.raises(TargetError, match=r"up.m:f is a int"):
        with patch.applied(world.one("replace: p.py:new", "up.m:f")) as ledger:
            import up.user

            assert up.user.fallback
            with pytest.raises(TargetError, match=r"up.m:f is a int"):
                ledger.check_called()
            with pytest.raises(TargetError, match=r"up.m:f is a int"):
                ledger.raise_pending()


def test_an_error_that_a_swallowed_one_led_to_comes_second(world):
    world.write("up/m.py", "f = 3\n")
    world.write("up/user.py", "try:\n    import up.m\n    g = 1\nexcept Exception:\n    pass\n")
    with pytest.raises(TargetError) as caught:
        with patch.applied(world.one("replace: p.py:new", "up.m:f")):
            import up.user

            assert up.user.g
    assert isinstance(caught.value.__cause__, AttributeError)


def test_upstreams_own_errors_pass_unchanged(world):
    world.write("up/m.py", "def f(a): return 1\nraise ValueError('theirs')\n")
    with patch.applied(world.one("replace: p.py:new", "up.m:f")) as ledger:
        with pytest.raises(ValueError, match="theirs"):
            import up.m  # noqa: F401
        assert ledger.rows()[0]["state"] == "armed"


def test_loading_a_patch_file_must_not_import_its_target(world):
    world.python("import up.m\ndef new(a): return 1\n")
    with pytest.raises(ReplacementError) as caught, patch.applied(world.one("replace: p.py:new", "up.m:f")):
        pass
    assert str(caught.value) == (
        "patches/up/p.yaml:1: Loading 'p.py:new' imports 'up.m', the target of 'up.one'. Import it inside the function."
    )


def test_a_patch_file_that_does_not_load_is_named(world):
    world.python("def new(a) return 1\n")
    with pytest.raises(ReplacementError, match=r"'p.py' does not load for 'up.one': SyntaxError: .*Mend the file"):
        patch.applied(world.one("replace: p.py:new", "up.m:f")).__enter__()
    world.python("1 / 0\n")
    with pytest.raises(ReplacementError, match=r"'p.py' does not load for 'up.one': ZeroDivisionError: division") as e:
        patch.applied(world.one("replace: p.py:new", "up.m:f")).__enter__()
    assert isinstance(e.value.__cause__, ZeroDivisionError)


def test_a_function_or_file_that_is_missing_is_named(world):
    with pytest.raises(ReplacementError, match=r"'p.py' has no 'nwe' for 'up.one'. Did you mean 'new'"):
        patch.applied(world.one("replace: p.py:nwe", "up.m:f")).__enter__()
    with pytest.raises(ReplacementError, match=r"No file 'q.py' beside it for 'up.one'. .*Known: p.py"):
        patch.applied(world.one("replace: q.py:new", "up.m:f")).__enter__()


def test_signatures_are_compared_before_the_import(world):
    world.python("def new(b): return 'new'")
    with pytest.raises(SignatureError) as caught, patch.applied(world.one("replace: p.py:new", "up.m:f")):
        pass
    assert "up.m" not in sys.modules
    assert str(caught.value) == (
        "patches/up/p.yaml:1: 'p.py:new' does not take 'a' by name, unlike up.m:f(a). "
        "Give it the target's parameters, in its order and with defaults where it has them."
    )


def test_a_late_module_is_repaired_when_every_holder_is_found(world):
    world.write("up/user.py", "from up.m import f as g\nTABLE = {'f': g}\n")
    import up.m
    import up.user

    with patch.applied(world.one("replace: p.py:new", "up.m:f")) as ledger:
        assert (up.user.g(1), up.user.TABLE["f"](1)) == ("new", "new")
        assert ledger.rows()[0]["late"]
    assert (up.user.g(1), up.user.TABLE["f"](1)) == ("old", "old")
    assert up.user.g is up.m.f


def test_a_late_module_whose_holder_cannot_be_rebound_names_importer_and_fix(world):
    world.write("up/user.py", "from up.m import f\nPENDING = map(f, [1])\n")
    import up.user

    with pytest.raises(TooLateError) as caught, patch.applied(world.one("replace: p.py:new", "up.m:f")):
        pass
    assert str(caught.value) == (
        "patches/up/p.yaml:1: up.m was imported before its patch (up/user.py:1), and up.m:f is still held by "
        "up.user.PENDING, a map. Import it inside 'with patch.applied(...)'."
    )
    assert up.user.f(1) == "old"


def test_a_local_variable_that_holds_a_late_original_is_named(world):
    import up.m

    held = up.m.f
    with pytest.raises(TooLateError, match=r"the variable 'held' of test_a_local_variable_that_holds_a_late_original"):
        patch.applied(world.one("replace: p.py:new", "up.m:f")).__enter__()
    assert held(1) == "old"


def test_an_import_circle_that_captures_the_original_is_repaired_or_refused(world):
    world.write("up/m.py", "def f(a):\n    return 'old'\nimport up.user\n")
    world.write("up/user.py", "from up.m import f\nTABLE = [f]\n")
    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.m

        assert (up.user.f(1), up.user.TABLE[0](1)) == ("new", "new")
    assert (up.m.f(1), up.user.f(1), up.user.TABLE[0](1)) == ("old", "old", "old")
    for name in ("up.m", "up.user"):
        del sys.modules[name]
    world.write("up/user.py", "from up.m import f\ndefault = lambda a, g=f: g(a)\n")
    with pytest.raises(AliasError, match=r"still held by up.user.default.__defaults__, a tuple \(up/user.py:1\)"):
        with patch.applied(world.one("replace: p.py:new", "up.m:f")):
            import up.m


def test_no_upstream_and_no_framework_is_imported_by_the_engine():
    code = (
        "import sys, torchport.patch; print([m for m in ('torch', 'jax', 'torchax', 'diffusers') if m in sys.modules])"
    )
    root = str(Path(patch.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.filterwarnings("ignore:.*exec_module.. not found:ImportWarning")
def test_a_loader_that_makes_and_executes_a_module_in_one_is_gone_around_too(world, monkeypatch):
    class Old:
        def find_spec(self, name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, self) if name == "up.m" else None

        def load_module(self, name):
            module = sys.modules[name] = type(sys)(name)
            exec(Path("site/up/m.py").read_text(), vars(module))
            return module

    monkeypatch.setattr(sys, "meta_path", [Old(), *sys.meta_path])
    with patch.applied(world.one("replace: p.py:new", "up.m:f")) as ledger:
        import up.m

        assert up.m.f(1) == "new" and ledger.rows()[0]["calls"] == 1
    assert up.m.f(1) == "old"
