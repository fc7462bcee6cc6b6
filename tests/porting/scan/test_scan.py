"""Every rule finds its wrong example and not its right one, and `explain` knows it."""

import re

import pytest

from torchport.commands import explain
from torchport.porting.scan import BY_KIND, RULES

HEAD = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import get_rank, get_world_size
"""
RANKS = """\
import torch.distributed as dist
def get_rank():
    return dist.get_rank()
def get_world_size():
    return dist.get_world_size()
"""
BODY = """\
def f(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, q, k, v, n, device, model, net, parts, group):
    mask = y > 0
    valid = y > 0
"""
IN_FUNCTION = [
    rule
    for rule in RULES.values()
    if rule.in_code and rule.kind not in ("cuda-import", "alias", "compile", "kernel", "complex")
]


def found(scanned, text, head=HEAD):
    report = scanned({"up.py": head + text, "ranks.py": RANKS})
    return {one.kind for one in report.findings if one.file.endswith("up.py") and one.kind != "alias"}


def inside(text):
    return BODY + "".join(f"    {line}\n" for line in text.splitlines())


@pytest.mark.parametrize("rule", IN_FUNCTION, ids=lambda rule: rule.kind)
def test_a_wrong_example_is_found_and_the_right_one_is_not(scanned, rule):
    assert rule.kind in found(scanned, inside(rule.wrong))
    if not rule.right.startswith(("patches:", "strategies:")):
        assert found(scanned, inside(rule.right)) == set()


@pytest.mark.parametrize("kind", ["cuda-import", "compile"])
def test_a_wrong_example_of_a_module_is_found(scanned, kind):
    rule = RULES[BY_KIND[kind]]
    assert found(scanned, rule.wrong + "\n") == {kind}


def test_a_call_of_a_kernel_is_found(scanned):
    rule = RULES[BY_KIND["kernel"]]
    assert found(scanned, inside(rule.wrong), "import torch\nfrom flash_attn import flash_attn_func\n") == {"kernel"}
    assert found(scanned, inside(rule.right)) == set()


def test_complex_numbers_are_found(scanned):
    rule = RULES[BY_KIND["complex"]]
    assert found(scanned, inside(f"freqs = a\n{rule.wrong}")) == {"complex"}


@pytest.mark.parametrize("id", RULES)
def test_explain_shows_a_wrong_and_a_right_example_and_the_cure(id):
    text = explain.section(id.lower())
    assert text.startswith(f"{id} {RULES[id].kind}\n\n{RULES[id].title}")
    block = r"\n\n```\w+\n.*\n```\n\n"
    assert re.search(rf"Wrong:{block}Right:{block}Cure: .*\sEffort:\s\w+\.$", text, re.DOTALL)


def test_ids_and_kinds_are_unique():
    assert len(RULES) == len(BY_KIND) and all(re.fullmatch(r"PS[1-9]\d\d", id) for id in RULES)
