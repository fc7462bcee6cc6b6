"""YAML is read strictly: every mistake is an error with file and line, and no other exception escapes."""

from typing import Annotated, Literal

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchport.config import Document, Frozen, parse_document, read_document, validated
from torchport.errors import (
    ConfigError,
    DuplicateKeyError,
    MissingKeyError,
    SyntaxYamlError,
    UnknownKeyError,
    WrongTypeError,
)


def _even(value: int) -> int:
    if value % 2:
        raise ValueError("It must be even")
    return value


class Inner(Frozen):
    """Something inside."""

    name: str
    sizes: list[int] = []


class Outer(Frozen):
    """Something with all kinds of fields."""

    count: pydantic.PositiveInt
    inner: Inner
    by_name: dict[str, Inner] = {}
    several: list[Inner] = []
    even: Annotated[int, pydantic.AfterValidator(_even)] = 0
    ratio: float = 1.0
    either: Literal["none"] | list[int] | dict[str, Inner] = "none"
    class_: str = pydantic.Field("", alias="class")


def refusal(kind, text):
    """Returns the text of the one error that reading gives, which must be of this kind."""
    with pytest.raises(ConfigError) as caught:
        validated(Outer, parse_document(text, "a.yaml"))
    assert type(caught.value) is kind
    return str(caught.value)


GOOD = "count: 1\ninner: {name: a}\n"


def test_good_yaml_becomes_a_frozen_model():
    outer = validated(Outer, parse_document(GOOD + "class: b\nby_name:\n  x: {name: y, sizes: [1, 2]}\n", "a.yaml"))
    assert (outer.count, outer.inner.name, outer.class_, outer.by_name["x"].sizes) == (1, "a", "b", [1, 2])
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        outer.count = 2


def test_an_unknown_key_is_refused_with_the_nearest():
    assert refusal(UnknownKeyError, GOOD + "rato: 2.0\n") == (
        "a.yaml:3: Unknown key 'rato'. Did you mean 'ratio'? "
        "Known: by_name, class, count, either, even, inner, ratio, several."
    )


@pytest.mark.parametrize(
    "text", ["inner: {name: a, nam: b}", "by_name:\n  x: {nam: b, name: a}", "several:\n- name: a\n  nam: b"]
)
def test_an_unknown_key_inside_is_refused_with_the_keys_of_that_place(text):
    start = "count: 1\n" if text.startswith("inner") else GOOD
    assert "Did you mean 'name'? Known: name, sizes." in refusal(UnknownKeyError, f"{start}{text}\n")


def test_a_duplicate_key_is_refused_with_both_lines():
    assert refusal(DuplicateKeyError, "count: 1\ninner: {name: a}\ncount: 2\n") == (
        "a.yaml:3: 'count' stands here and on line 1. Keep one of the two."
    )
    assert "a.yaml:4: 'name' stands here and on line 3" in refusal(
        DuplicateKeyError, "count: 1\ninner:\n  name: a\n  name: a\n"
    )


def test_keys_that_yaml_1_1_would_merge_are_kept_apart_as_written():
    assert parse_document("1: a\n1.0: b\nno: c\n'~': d\n", "a").data == {"1": "a", "1.0": "b", "no": "c", "~": "d"}


def test_a_missing_key_is_refused():
    assert refusal(MissingKeyError, "inner: {name: a}\n") == "a.yaml:1: 'count' is missing. Add 'count'."
    assert refusal(MissingKeyError, "count: 1\ninner:\n  sizes: [1]\n") == (
        "a.yaml:2: 'inner.name' is missing. Add 'name'."
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("count: '1'", "a.yaml:1: 'count' is '1' (text). It must be a whole number."),
        ("count: true", "a.yaml:1: 'count' is True (true or false). It must be a whole number."),
        ("count: 1.0", "a.yaml:1: 'count' is 1.0 (a number). It must be a whole number."),
        ("count:", "a.yaml:1: 'count' is empty. It must be a whole number."),
        ("count: 0", "a.yaml:1: 'count' is 0 (a number). It must be greater than 0."),
        ("count: [1]", "a.yaml:1: 'count' is [1] (a list). It must be a whole number."),
    ],
)
def test_a_value_of_another_type_is_refused_and_nothing_is_coerced(text, error):
    assert refusal(WrongTypeError, f"{text}\ninner: {{name: a}}\n") == error


def test_a_validators_own_words_are_the_remedy():
    assert refusal(WrongTypeError, GOOD + "even: 3\n") == "a.yaml:3: 'even' is 3. It must be even."


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("[1, b]", "'either.1' is 'b' (text). It must be a whole number."),
        ("{a: {name: 1}}", "'either.a.name' is 1 (a number). It must be text."),
        ("some", "'either' is 'some' (text). It must be 'none'."),
    ],
)
def test_of_alternatives_the_one_that_was_meant_is_named_and_no_name_that_nobody_wrote(value, error):
    assert refusal(WrongTypeError, f"{GOOD}either: {value}\n") == f"a.yaml:3: {error}"


def test_an_empty_file_is_refused():
    assert refusal(WrongTypeError, "").startswith("a.yaml:1: 'the file' is empty. It must be ")


def test_a_long_value_is_cut_in_the_error():
    text = refusal(WrongTypeError, f"count: {'x' * 500}\ninner: {{name: a}}\n")
    assert "xxx..." in text and len(text) < 160


def test_the_first_mistake_of_the_file_is_the_one_reported():
    assert refusal(WrongTypeError, "inner: {name: 1}\ncount: 'x'\nzz: 1\n").startswith("a.yaml:1: 'inner.name' is 1")


def test_what_is_written_wrongly_comes_before_what_is_missing():
    assert refusal(UnknownKeyError, "inner: {name: a}\ncuont: 1\n").startswith("a.yaml:2: Unknown key 'cuont'. Did you")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: [1\n", "a.yaml:2: Not YAML: "),
        ("a: b: c\n", "a.yaml:1: Not YAML: "),
        ("a: 1\n---\nb: 2\n", "a.yaml:2: A second document starts here. Keep one document to a file."),
        ("a: !!python/object:os.system x\n", "a.yaml:1: The tag tag:yaml.org,2002:python/object:os.system is not"),
        ("a: !mine x\n", "a.yaml:1: The tag !mine is not plain data. Remove the tag."),
        ("a: &x [1]\nb: *x\n", "a.yaml:1: The anchor &x is not plain data. Write the value out."),
        ("a: 1\nb: &x\n", "a.yaml:2: The anchor &x is not plain data. Write the value out."),
        ("&x a: 1\n", "a.yaml:1: The anchor &x is not plain data. Write the value out."),
        ("--- &x\na: 1\n", "a.yaml:1: The anchor &x is not plain data. Write the value out."),
        ("a: &x [*x]\n", "a.yaml:1: The anchor &x is not plain data. Write the value out."),
        ("[a]: 1\n", "a.yaml:1: A key is not a plain word. Use a string as the key."),
        ("[" * 200, "a.yaml:1: The value is nested in more than 100 others. Nest it less deeply."),
        ("a: " + "{a: " * 200, "a.yaml:1: The value is nested in more than 100 others. Nest it less deeply."),
        ("[" * 30000, "a.yaml:1: "),  # some parsers read ahead, and refuse before us
        ("a: !!int 1\n", "a.yaml:1: The tag tag:yaml.org,2002:int is not plain data. Remove the tag."),
        (f"a: {'1' * 5000}\n", "a.yaml:1: '1111"),
        ("a: \x00\n", "a.yaml:1: Not YAML: "),
    ],
)
def test_what_a_data_file_has_no_use_for_is_refused(text, error):
    with pytest.raises(SyntaxYamlError) as caught:
        parse_document(text, "a.yaml")
    assert str(caught.value).startswith(error) and "\n" not in str(caught.value)


def test_yaml_is_1_2_so_that_numbers_and_words_are_what_they_look_like():
    text = "a: 1e-5\nb: no\nc: 0o17\nd: 12:30\ne: 2026-11-20\nf: 1_000\ng: ~\nh: .inf\n"
    assert parse_document(text, "a").data == {
        "a": 1e-5,
        "b": "no",
        "c": 15,
        "d": "12:30",
        "e": "2026-11-20",
        "f": 1000,
        "g": None,
        "h": float("inf"),
    }


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"a: \xff\n")
    with pytest.raises(SyntaxYamlError) as caught:
        read_document(file, "shown.yaml")
    assert str(caught.value) == "shown.yaml:1: Byte 3 is not UTF-8. Save the file as UTF-8."


def test_a_document_knows_the_line_of_every_value():
    document = parse_document("a:\n  b:\n  - x\n  - y: 1\n# comment\nc: 2\n", "a.yaml")
    assert document.place() == "a.yaml:1"
    assert document.place(["a", "b", 1, "y"]) == "a.yaml:4"
    assert document.place(["a", "b", 7]) == "a.yaml:2", "the closest container that was written"
    assert document.place(["c"]) == "a.yaml:6"


def test_a_value_from_a_flag_is_called_by_its_flag():
    document = Document("a.yaml", {"a": {"b": 1}}, {(): 1}, {("a", "b"): "--set a.b=1"})
    assert document.place(["a", "b", "c"]) == "--set a.b=1" and document.place(["a"]) == "a.yaml:1"


def test_all_mistakes_of_a_file_are_named_together_each_with_its_line():
    text = "count: 0\ninner: {name: 1, nam: b}\nseveral:\n- {name: a, sizes: [1, b, c]}\n- {}\nrato: 2.0\nratio: x\n"
    with pytest.raises(ConfigError) as caught:
        validated(Outer, parse_document(text, "a.yaml"))
    assert type(caught.value) is WrongTypeError
    assert str(caught.value).splitlines() == [
        "a.yaml:1: 'count' is 0 (a number). It must be greater than 0.",
        "a.yaml:2: 'inner.name' is 1 (a number). It must be text.",
        "a.yaml:2: Unknown key 'inner.nam'. Did you mean 'name'? Known: name, sizes.",
        "a.yaml:4: 'several.0.sizes.1' is 'b' (text). It must be a whole number.",
        "a.yaml:4: 'several.0.sizes.2' is 'c' (text). It must be a whole number.",
        "a.yaml:6: Unknown key 'rato'. Did you mean 'ratio'? Known: by_name, class, count, either, even, inner, ratio, "
        "several.",
        "a.yaml:7: 'ratio' is 'x' (text). It must be a number.",
        "a.yaml:5: 'several.1.name' is missing. Add 'name'.",
    ]
    assert [other.id for other in caught.value.others[:2]] == ["TP105", "TP103"]


def test_of_a_value_with_alternatives_only_one_is_named_but_all_its_mistakes():
    with pytest.raises(ConfigError) as caught:
        validated(Outer, parse_document(GOOD + "either: [a, 1, b]\n", "a.yaml"))
    assert str(caught.value).splitlines() == [
        "a.yaml:3: 'either.0' is 'a' (text). It must be a whole number.",
        "a.yaml:3: 'either.2' is 'b' (text). It must be a whole number.",
    ]


YAML_LIKE = st.text(st.sampled_from("ab01.:-_{}[]&*!|>'\"#%@`~?,\\ \n\t\r\x00é\ud7ff\u2028\ufeffeE+ox<=")) | st.text()


@given(YAML_LIKE)
def test_any_text_is_a_document_or_a_config_error(text):
    try:
        document = parse_document(text, "a.yaml")
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert plain(document.data)
    try:
        validated(Outer, document)
    except ConfigError as error:
        assert str(error).startswith("a.yaml:")


@given(st.binary())
def test_any_bytes_are_a_document_or_a_config_error(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(data)
    try:
        assert plain(read_document(file).data)
    except ConfigError as error:
        assert "any.yaml:" in str(error)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("abc é'\"#:\n", max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc:#é ", max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_what_a_yaml_writer_writes_is_read_back_the_same(value):
    import json

    assert parse_document(json.dumps(value), "a.yaml").data == value


def plain(data):
    """Whether data is made of mappings with string keys, lists and scalars alone."""
    if isinstance(data, dict):
        return all(type(key) is str and plain(value) for key, value in data.items())
    return all(map(plain, data)) if isinstance(data, list) else isinstance(data, str | int | float | bool | None)
