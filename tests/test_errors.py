"""The tree of errors: its page, its ids, its form."""

import inspect
import pickle
import re

import pytest

from torchport import errors
from torchport.commands import explain
from torchport.errors import KINDS, BadValueError, TorchportError, UnknownKeyError, combined, nearest


def classes():
    """Every class of the module, groups included."""
    return {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, TorchportError) and kind is not TorchportError
    }


def test_ids_are_unique_and_grouped_by_their_first_digit():
    ids = [kind.id for kind in classes().values()]
    assert len(ids) == len(set(ids)) >= 33 and ids == sorted(ids)
    assert all(re.fullmatch(r"TP[1-9]\d\d", id) for id in ids)
    groups = {}
    for kind in KINDS.values():
        groups.setdefault(kind.id[2], set()).add(kind if TorchportError in kind.__bases__ else kind.__bases__[0])
    assert all(len(group) == 1 for group in groups.values()), groups


def test_every_class_says_in_a_sentence_what_it_means():
    for name, kind in classes().items():
        assert re.fullmatch(r"[A-Z].*[.]", inspect.getdoc(kind), re.DOTALL), name
        assert inspect.getdoc(kind) != inspect.getdoc(TorchportError), name


@pytest.mark.parametrize("kind", [*KINDS.values(), TorchportError])
def test_the_text_is_place_fact_remedy_and_survives_pickling_with_its_culprit(kind):
    error = kind("a.yaml:3", "'x' is 1", "It must be 2", key="x", nearest=(1, 2))
    assert str(error) == "a.yaml:3: 'x' is 1. It must be 2."
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)
    assert (again.key, again.nearest, again.place) == ("x", (1, 2), "a.yaml:3")


def test_a_notebook_shows_the_report_and_no_traceback():
    shown = combined([BadValueError("a.yaml:3", "'x' is 1", "It must be 2"), UnknownKeyError("b", "c", "d")])
    assert shown._render_traceback_() == shown.report().splitlines()
    assert [line.split()[0] for line in shown._render_traceback_()] == ["error[TP107]", "error[TP103]"]


def test_an_end_after_which_the_same_command_goes_on_has_an_exit_code_of_its_own():
    codes = {kind.__name__: kind.exit_code for kind in KINDS.values() if kind.exit_code != 2}
    assert codes == {"StoppedError": 130, "LostProcessError": 75}


def test_the_nearest_name_comes_first_and_all_are_listed():
    assert nearest("frame", ["width", "frames"]) == "Did you mean 'frames'? Known: frames, width"
    assert nearest("zzz", ["width", "frames"]) == "Known: frames, width"
    assert nearest("x", []) == "None are known"


def test_the_page_of_errors_is_current(root):
    written = (root / "docs" / "errors.md").read_text(encoding="utf-8")
    assert written == explain.page(), "write it again: torchport explain --all > docs/errors.md"


def test_every_id_that_the_code_names_is_explained(root):
    texts = [path.read_text(encoding="utf-8") for path in sorted((root / "torchport").rglob("*.py"))]
    named = {key for text in texts for key in re.findall(r"\bTP\d{3}\b", text)}
    assert named - {"TP000"} == KINDS.keys(), "TP000 is the root's, and never raised"
    raised = [line for text in texts for line in text.splitlines() if re.search(r"\bTorchportError\(", line)]
    assert raised == ["class TorchportError(Exception):"]


def test_every_id_that_an_error_can_print_is_explained(torchport, capsys):
    for kind in classes().values():
        code, out, _ = torchport("explain", kind.id, capsys=capsys)
        assert code == 0 and out[0].startswith(kind.id)


def test_the_page_has_one_section_for_each_id():
    sections = re.findall(r"^## (TP\d+) (\w+)$", explain.page(), re.MULTILINE)
    assert sections == [(id, kind.__name__) for id, kind in KINDS.items()]


def test_every_class_has_an_id_and_each_group_lists_its_errors():
    assert {kind.id for kind in classes().values()} == KINDS.keys()
    text = explain.section("TP400")
    assert text.startswith("TP400 ShardError\n\nA placement") and "This is a group. Its errors:" in text
    assert "- TP401 `MeshError`: The mesh does not fit" in text
    assert "It is a `ShardError` (TP400): A placement" in explain.section("TP401")


def test_an_error_is_explained_by_a_wrong_and_a_right_example_and_the_cure():
    text = explain.section("tp103")
    assert "\n\nWrong, in a config:\n\n```yaml\nstep: 30\n```\n\n" in text
    assert "\n\nRight, in a config:\n\n```yaml\nsteps: 30\n```\n\nCure: " in text
    assert "Upstream:\n\n```python\ndef f(x):" in explain.section("TP205")


@pytest.mark.parametrize(
    ("key", "guess"), [("TP999", "TP907"), ("TP290", "TP300"), ("TP12", "TP100"), ("TP1O9", "TP109")]
)
def test_an_id_that_does_not_exist_is_refused_with_the_nearest(key, guess):
    with pytest.raises(errors.UnknownNameError, match=f"There is no id {key}. Did you mean '{guess}'"):
        explain.section(key)


def test_control_characters_are_shown_and_not_obeyed():
    error = TorchportError("a\x1b[2J.yaml:3", "'\x07\r\x85\u2028\u202e\ud800' is 1", "It must\nbe é or 画")
    assert str(error) == "a\\x1b[2J.yaml:3: '\\x07\\r\\x85\\u2028\\u202e\\ud800' is 1. It must be é or 画."


def test_mistakes_that_are_found_together_are_one_error_with_a_line_and_an_id_each():
    error = combined([BadValueError("a:1", "One", "Mend it"), UnknownKeyError("a:2", "Two", "Mend it", key="x")])
    assert type(error) is BadValueError and str(error) == "a:1: One. Mend it.\na:2: Two. Mend it."
    assert error.sentence() == "a:1: One. Mend it."
    assert error.report() == "error[TP107] a:1: One. Mend it.\nerror[TP103] a:2: Two. Mend it."
    again = pickle.loads(pickle.dumps(error))
    assert again.report() == error.report() and again.others[0].key == "x"
    alone = BadValueError("a:1", "One", "Mend it")
    assert combined([alone]) is alone and alone.report() == "error[TP107] a:1: One. Mend it."


def test_the_lines_below_an_error_are_printable_and_travel_with_it():
    error = BadValueError("a:1", "One", "Mend it")
    error.details, error.trace = ["  a\x1b[2J", "- id: b\n"], "Traceback"
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "a:1: One. Mend it.\n  a\\x1b[2J\n- id: b " and again.trace == "Traceback"


def test_of_many_names_the_closest_are_listed():
    names = [f"name_{number}" for number in range(41)]
    assert errors.nearest("name_7x", names[:40]).startswith("Did you mean 'name_7'? Known: name_0, name_1, ")
    said = errors.nearest("name_7x", names)
    assert said.startswith("Did you mean 'name_7'? The closest of 41: name_7, ") and said.count(",") == 7
