"""The `stub` kind: an absent package that one module may import, and whose every call raises."""

import contextlib
import importlib
import importlib.util
import sys

import pytest

from torchport import patch
from torchport.errors import BadValueError, StubCalledError, TooLateError

ENTRY = """
- id: some.stub
  target: absentpackage:tools
  stub: {package: PACKAGE, importers: [stubuser]}
  why: It is not there.
  reported: "none: a test"
  until: never
  fits: {some: "*"}
  equivalence: bitwise
"""
USER = """
import json
import absentpackage
import absentpackage.tools as tools
from absentpackage.tools import resize
from absentpackage import tools as again

def use():
    return tools.resize(1)

def later():
    import absentpackage.other
    return absentpackage.other
"""


@pytest.fixture
def entries(tmp_path, monkeypatch):
    """Entries in a folder of patches; a module `stubuser` that imports the package lies on the path."""

    def made(package="absentpackage"):
        (tmp_path / "patches" / "some").mkdir(parents=True, exist_ok=True)
        (tmp_path / "patches" / "some" / "stub.yaml").write_text(ENTRY.replace("PACKAGE", package))
        return patch.read(tmp_path / "patches", ["some"])

    (tmp_path / "stubuser.py").write_text(USER)
    (tmp_path / "stranger.py").write_text("import absentpackage\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield made
    for name in ("stubuser", "stranger", "json_user"):
        sys.modules.pop(name, None)


def test_the_importer_sees_the_package_and_nobody_else_does(entries):
    with patch.applied(entries()) as ledger:
        user = importlib.import_module("stubuser")
        assert user.tools is user.again and user.absentpackage.tools is user.tools
        assert user.json.dumps([1]) == "[1]"
        assert user.later() is user.absentpackage.other
        assert "absentpackage" not in sys.modules and importlib.util.find_spec("absentpackage") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("stranger")
        assert [(row["state"], row["calls"] > 0) for row in ledger.rows()] == [("used", True)]


def test_every_call_raises_and_says_who_called_what(entries, tmp_path):
    with pytest.raises(StubCalledError) as caught:
        with patch.applied(entries()):
            importlib.import_module("stubuser").use()
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'stubuser.py'}:9: absentpackage.tools.resize is called, and 'some.stub' (")
    assert text.endswith(
        "only stands in for it. Install absentpackage, or write a patch for use. The original backend "
        "applies only the patches that the card lists under 'original'."
    )


def test_a_call_that_upstream_swallows_is_raised_at_the_end(entries):
    with pytest.raises(StubCalledError, match=r"absentpackage\.tools\.resize is called"):
        with patch.applied(entries()) as ledger:
            user = importlib.import_module("stubuser")
            with contextlib.suppress(Exception):  # what upstreams do
                user.resize()
            with pytest.raises(StubCalledError):
                ledger.check_called()


def test_a_class_may_inherit_from_a_stub_until_an_object_of_it_is_made(entries):
    text = r"absentpackage\.tools\.Base is the base of .*Mine, of which an object is made, and 'some.stub'"
    with pytest.raises(StubCalledError, match=text):
        with patch.applied(entries()):
            tools = importlib.import_module("stubuser").tools

            class Mine(tools.Base):
                size = 3

            assert Mine.size == 3
            Mine()


def test_capability_probes_do_not_find_it_inside_the_importer_either(entries):
    with patch.applied(entries()):
        user = importlib.import_module("stubuser")
        assert not hasattr(user.tools, "__version__") and not hasattr(user.tools, "__path__")


def test_an_installed_package_is_not_stood_in_for(entries, tmp_path):
    (tmp_path / "absentpackage").mkdir()
    (tmp_path / "absentpackage" / "__init__.py").write_text("def real():\n    return 1\n")
    (tmp_path / "stubuser.py").write_text("import absentpackage\n")
    importlib.invalidate_caches()
    with patch.applied(entries()) as ledger:
        assert importlib.import_module("stubuser").absentpackage.real() == 1
        (row,) = ledger.rows()
        assert (row["state"], row["detail"]) == ("not needed", "absentpackage is installed")
    sys.modules.pop("absentpackage")


def test_its_builtins_are_given_back(entries):
    with patch.applied(entries()):
        user = importlib.import_module("stubuser")
        assert user.__builtins__["__import__"] is not __import__
    held = user.__builtins__
    assert (held if isinstance(held, dict) else vars(held))["__import__"] is __import__
    with pytest.raises(ModuleNotFoundError):
        user.later()


def test_a_second_run_in_one_process_finds_the_importer_served(entries):
    with patch.applied(entries()):
        user = importlib.import_module("stubuser")
    with patch.applied(entries()) as ledger:
        assert user.later() is not None
        assert ledger.rows()[0]["state"] == "used"


def test_one_importer_sees_the_stubs_of_two_packages(entries, tmp_path):
    user = "import absentpackage\nimport goneaway\nNAMES = absentpackage.a, goneaway.b\n"
    (tmp_path / "stubuser.py").write_text(user)
    importlib.invalidate_caches()
    entries()
    second = ENTRY.replace("absentpackage", "goneaway").replace("PACKAGE", "goneaway")
    second = second.replace("some.stub", "some.other")
    (tmp_path / "patches" / "some" / "other.yaml").write_text(second)
    for _ in range(2):
        with patch.applied(patch.read(tmp_path / "patches", ["some"])) as ledger:
            user = importlib.import_module("stubuser")
            assert [one.__name__ for one in user.NAMES] == ["absentpackage.a", "goneaway.b"]
            assert [row["state"] for row in ledger.rows()] == ["used", "used"]
        held = user.__builtins__
        assert (held if isinstance(held, dict) else vars(held))["__import__"] is __import__


def test_an_importer_that_came_before_the_stub_is_refused(entries, tmp_path):
    (tmp_path / "stubuser.py").write_text(
        "try:\n    import absentpackage\nexcept ImportError:\n    absentpackage = None\n"
    )
    importlib.invalidate_caches()
    importlib.import_module("stubuser")
    with pytest.raises(TooLateError, match=r"'stubuser' was imported before its stub of absentpackage\. Import it"):
        with patch.applied(entries()):
            pass


def test_a_target_outside_the_package_is_refused(entries):
    with pytest.raises(BadValueError, match="'absentpackage:tools' is not in otherpackage"):
        entries(package="otherpackage")
