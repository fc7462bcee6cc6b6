"""What an entry names in a file that is read and not executed."""

import inspect
import types

import pytest

from torchport.errors import ReplacementError
from torchport.patch.source import checks


@pytest.fixture
def parsed(tmp_path):
    """Returns what `checks.parsed` finds under a name in a file of patches with a text."""

    def of(text, name):
        (tmp_path / "up" / "fast.py").write_text(text, encoding="utf-8")
        entry = types.SimpleNamespace(id="up.fast", folder=tmp_path / "up", place="up/fast.yaml:1")
        return checks.parsed(entry, f"fast.py:{name}")

    (tmp_path / "up").mkdir()
    return of


def test_a_function_is_known_by_its_signature_and_a_class_by_its_name(parsed):
    text = "def forward(x, *, scale=1.0):\n    raise SystemExit\n\nclass Fast:\n    pass\n"
    parameters = inspect.signature(parsed(text, "forward")).parameters  # a default is there, and not its value
    assert [(each.name, each.default is each.empty) for each in parameters.values()] == [("x", True), ("scale", False)]
    assert parsed(text, "Fast").__name__ == "Fast"


def test_a_name_that_a_file_may_import_is_unknown_and_one_that_it_has_not_is_refused(parsed):
    assert parsed("from up.other import *\n", "forward") is checks.UNKNOWN
    assert parsed("forward = make()\n", "forward") is checks.UNKNOWN
    with pytest.raises(ReplacementError, match=r"'fast.py' has no 'forwrd' for 'up.fast'. Did you mean 'forward'"):
        parsed("def forward(x):\n    return x\n", "forwrd")
