"""Where a rule is written, for errors."""

import types

from torchport.compile.rules import Rules


def test_a_rule_that_a_strategy_takes_from_another_is_placed_there():
    written = ("strategies", "fast", "weights", "transformer")
    document = types.SimpleNamespace(lines={written: 7}, place=lambda path: tuple(path))
    fast = Rules("net", None, document, ("strategies", "fast"), "transformer", base="tp")
    assert fast.place("weights") == written
    assert fast.place("inputs") == ("strategies", "tp", "inputs", "transformer")
    alone = Rules("net", None, document, ("strategies", "fast"), "transformer")
    assert alone.place("inputs") == ("strategies", "fast", "inputs", "transformer")
