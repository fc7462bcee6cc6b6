"""Names of tensors: rules in both directions, each accounted for."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from torchport.config.card import RenameRule
from torchport.errors import BadValueError, CheckpointForeignError, DeadRuleError, TorchportError
from torchport.load import renaming


def rules(*pairs):
    return [RenameRule(match=match, to=to) for match, to in pairs]


def to_module(names, *pairs):
    chosen = rules(*pairs)
    return renaming.module_names(names, chosen, [f"card:{n}" for n in range(len(chosen))], "x.pth")


def to_file(names, *pairs, unread=""):
    chosen = rules(*pairs)
    places = [f"card:{n}" for n in range(len(chosen))]
    return renaming.file_names(names, chosen, places, lambda name: re.fullmatch(unread, name) is not None)


def refusal(kind, call):
    with pytest.raises(TorchportError) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def test_the_first_rule_that_matches_a_whole_name_counts_and_other_names_stay():
    pairs = ((r"a\.(\w+)", r"first.\1"), (r"(a|b)\.(.*)", r"second.\1.\2"))
    assert to_module(["a.x", "a.x.y", "b.z", "c.a.x"], *pairs) == {
        "first.x": "a.x",
        "second.a.x.y": "a.x.y",
        "second.b.z": "b.z",
        "c.a.x": "c.a.x",
    }


def test_groups_may_change_places():
    assert to_module(["x.3.q"], (r"(\w)\.(\d+)\.(\w)", r"\2.\3\3.\1")) == {"3.qq.x": "x.3.q"}
    assert to_file(["3.qq.x"], (r"(\w)\.(\d+)\.(\w)", r"\2.\3\3.\1")) == {"3.qq.x": "x.3.q"}


def test_a_rule_without_a_tensor_is_refused_by_its_line():
    assert refusal(DeadRuleError, lambda: to_module(["a", "b"], ("a", "c"), (r"bb\.x", "d"))) == (
        r"card:1: Rule 2, 'bb\.x', matches none of 2 tensors of x.pth. Remove it or mend it. The nearest are 'b'."
    )
    assert refusal(DeadRuleError, lambda: to_module([], ("a", "c"))) == (
        "card:0: Rule 1, 'a', matches none of 0 tensors of x.pth. Remove it or mend it. There are none."
    )
    assert "matches only tensors of x.pth that an earlier rule has taken" in refusal(
        DeadRuleError, lambda: to_module(["ab"], ("a.", "c"), ("ab", "d"))
    )


@pytest.mark.parametrize("names", [["a", "b"], ["b", "a"]])
def test_two_names_that_become_one_are_refused_by_the_rule(names):
    first, second = names
    assert refusal(CheckpointForeignError, lambda: to_module(names, ("a", "b"))) == (
        f"card:0: '{first}' and '{second}' of x.pth both become 'b'. Mend the rules, or add the one that is not used "
        "to 'unread'."
    )


@pytest.mark.parametrize(
    ("match", "to", "name", "source"),
    [
        (r"model\.(.*)", r"\1", "a.weight", "model.a.weight"),
        (r"model.(.*)", r"\1", "a.weight", "model.a.weight"),
        (r"layer(\d+)_(q|k)\.(weight|bias)", r"blocks.\1.attn.\2.\3", "blocks.12.attn.k.bias", "layer12_k.bias"),
        (r"([()\]]+)\.(\w+)", r"\2", "a", None),
        (r"x\((\d)\)", r"y\1", "y7", "x(7)"),
        (r"gamma", "norm.weight", "norm.weight", "gamma"),
        (r"(.*)\.gamma", r"\1.weight", "norm.weight", "norm.gamma"),
    ],
)
def test_a_rule_is_turned_round(match, to, name, source):
    if source is None:
        refusal(BadValueError, lambda: to_file([name], (match, to)))
    else:
        assert to_file([name], (match, to)) == {name: source}
        assert to_module([source], (match, to)) == {name: source}


@pytest.mark.parametrize("match", ["(?:a|b)x", "a?x", r"\dx", "[ab]x", "(a(b))x", "(a)(b)x", "a|x", "a+x", ".*x"])
def test_a_rule_that_loses_something_is_not_turned_round(match):
    remedy = (
        "Tiny weights need it turned round: put all that varies in 'match' into groups without groups inside, and use "
        "each of them in 'to'."
    )
    assert refusal(BadValueError, lambda: to_file(["y", "z"], (match, "y"))).endswith(remedy)


def test_names_that_no_rule_can_make_are_refused():
    assert refusal(BadValueError, lambda: to_file(["a"], (r"(a)", r"b\1"))).startswith(
        "card:0: No name in the file that becomes 'a' can be told from the rules. Tiny weights need"
    )


def test_every_rule_is_used_where_two_would_do():
    named = to_file(["a.x", "b.x"], (r"one\.(.*)", r"\1"), (r"two\.(.*)", r"\1"))
    assert sorted(named.values()) == ["one.b.x", "two.a.x"]
    assert refusal(BadValueError, lambda: to_file(["a"], (r"one\.(.*)", r"\1"), (r"two\.(.*)", r"\1"))) == (
        r"card:1: Rule 2, 'two\.(.*)', names no tensor of the tiny module. Remove it, or mend it."
    )


def test_a_name_that_is_not_read_is_no_name():
    assert to_file(["a"], unread="b") == {"a": "a"}
    named = to_file(["a", "b"], (r"one\.(.*)", r"\1"), (r"two\.(.*)", r"\1"), unread=r"one\.a")
    assert named == {"a": "two.a", "b": "one.b"}


NAMES = st.lists(st.from_regex(r"[ab]\.[0-2]\.[qk]", fullmatch=True), min_size=1, max_size=8, unique=True)
PIECES = st.sampled_from([(r"a\.", ""), (r"m\.", "a."), (r"(\d)", r"\1"), (r"(a|b)\.", r"\1."), (r"(.*)", r"\1")])


@given(NAMES, st.lists(st.lists(PIECES, min_size=1, max_size=3), max_size=2))
def test_names_that_are_turned_round_come_back(names, drawn):
    pairs = []
    for pieces in drawn:
        groups, to = 0, ""
        for _, piece in pieces:
            groups += piece.count(r"\1")
            to += piece.replace(r"\1", rf"\{groups}")
        pairs.append(("".join(match for match, _ in pieces), to))
    try:
        sources = to_file(names, *pairs)
    except BadValueError:
        assume(False)
    assume(len(set(sources.values())) == len(names))
    assert to_module(list(sources.values()), *pairs) == sources
