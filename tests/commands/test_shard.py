"""What rules match, as a table: counts, specs in use and bytes, from shapes alone."""

import pytest

from torchport.commands.shard import RuleRow, lines, request_of, rule_rows
from torchport.errors import MeshError
from torchport.task import Request


def found(*overrides, strategy, config="configs/demo.yaml"):
    """The transformer's rows by kind and pattern."""
    rows = rule_rows(request_of("hunyuan", config, strategy, (), overrides=overrides))
    return {(row.kind, row.pattern): row for row in rows if row.component == "transformer"}


def request(*overrides):
    return Request("hunyuan", "configs/demo.yaml", overrides=overrides)


def test_every_rule_is_shown_with_what_it_matches_and_the_bytes_on_a_device():
    rows = rule_rows(request())
    weights = [row for row in rows if row.component == "transformer" and row.kind == "weights"]
    assert all(row.matches for row in weights)
    columns = next(row for row in weights if "to_[qkv]" in row.pattern and "weight" in row.pattern)
    assert columns.specs == ("[tp]",) and columns.matches == 2 * 6 * 2
    # Two blocks, six projections of 4 x 32 features with their biases, float32, tp=4.
    assert columns.bytes == 12 * (128 * 128 + 128) * 4 // 4
    assert {row.component for row in rows} == {"transformer", "vae"}


def test_activation_rules_are_shown_with_the_modules_they_match():
    rows = rule_rows(request("strategy=ulysses", "mesh={dp: 2, sp: 4}"))
    found = {row.pattern: (row.specs, row.matches) for row in rows if row.kind == "activations"}
    assert found == {
        "x_embedder": (("[dp, sp]",), 1),
        r"transformer_blocks\.\d+\.(attn|ff|ff_context)": (("free",), 6),
        r"transformer_blocks\.\d+": (("[dp, sp]", "[dp]"), 2),
    }


def test_without_a_config_the_published_network_is_shown_on_the_strategys_own_mesh():
    rows = found(config=None, strategy="fsdp")
    matrices = rows["weights", r".*\.weight"]
    # 3 rows of 2048 features, which eight devices cannot share by rows.
    assert matrices.specs == ("[(dp, sp)]", "[-, (dp, sp)]") and matrices.matches == 786
    assert matrices.notes == ("gathered where they are used", "1 by fallback from [(dp, sp)]")
    assert 2 * 2**30 < matrices.bytes * 1.04 < 2.1 * 2**30


def test_inputs_whose_shapes_are_known_are_shown_with_what_they_get():
    def inputs(*overrides):
        rows = rule_rows(request("strategy=tp_replicated_rows", *overrides))
        return {row.component: row for row in rows if row.kind == "inputs"}

    found = inputs("height=192", "width=320")
    assert found["transformer"].specs == ("[dp]",) and found["transformer"].matches == 7
    assert found["vae"].specs == ("[-, -, -, -, tp]",), "20 columns, which four devices share, and eight cannot"
    assert found["vae"].notes == ("1 by fallback from [-, -, -, -, (dp, tp)]",)
    wide = inputs("width=128")["vae"]
    assert wide.specs == ("[-, -, -, -, (dp, tp)]",) and not wide.notes


def test_a_module_is_counted_for_the_rule_that_it_has():
    rows = found(strategy="tp_replicated_rows")
    assert rows["activations", r"transformer_blocks\.\d+\.attn"].matches == 2
    assert rows["activations", r"transformer_blocks\.\d+"].notes == ("may be padded",)


def test_a_rule_that_does_not_divide_is_refused_here_too():
    with pytest.raises(MeshError, match="tp=3 does not divide"):
        rule_rows(request("mesh={tp: 3}", "machine=cpu:3"))


def test_the_table_reads_as_text():
    rows = [
        RuleRow("net", "weights", r"a\..*", ("[tp]",), 12, 3 * 2**20),
        RuleRow("net", "activations", "b", ("[dp, sp]", "free"), 2, None, ("may be padded",)),
    ]
    assert lines(rows) == [
        "net: 3.0 MiB of weights on each device",
        r"  weights     [tp]                       12    3.0 MiB  a\..*",
        "  activations [dp, sp] | free             2             b  (may be padded)",
    ]
