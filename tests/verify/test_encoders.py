"""Encoders on the devices are compared module by module with those of the host."""

import dataclasses
import re

import pytest
import torch

from tests.fakes.verifying import small, verifying
from torchport.verify import encoders
from torchport.verify.report import Verdict

PLANTED = """
- id: planted.gated
  target: transformers.models.t5.modeling_t5:T5DenseGatedActDense.forward
  wrap: planted.py:gated
  why: a fault
  reported: "none: planted"
  until: never
  fits: {transformers: "*"}
  equivalence: {algebraic: "the same, it says"}
"""
GATED = """
def gated(original, self, hidden_states):
    return original(self, hidden_states) * 1.0001
"""


@pytest.mark.parametrize("is_planted", [True, False])
def test_the_module_and_the_patch_of_a_fault_in_an_encoder_are_named(is_planted, root, tmp_path):
    request = small(root, "cogvideox")
    request = dataclasses.replace(request, overrides=(*request.overrides, "encode=devices"))
    if is_planted:
        (tmp_path / "patches" / "planted").mkdir(parents=True)
        (tmp_path / "configs" / "models").mkdir(parents=True)
        (tmp_path / "patches" / "planted" / "planted.yaml").write_text(PLANTED)
        (tmp_path / "patches" / "planted" / "planted.py").write_text(GATED)
        card = (root / "configs" / "models" / "cogvideox.yaml").read_text()
        planted = card.replace("\npatches:\n", "\noverrides: true\npatches:\n  encode: [planted]\n")
        (tmp_path / "configs" / "models" / "cogvideox.yaml").write_text(planted)
        request = dataclasses.replace(request, paths=(str(tmp_path), *request.paths))
    originals = tmp_path / "originals"
    originals.mkdir()
    with verifying(originals) as verify:
        result = verify(request, steps=(0,))
    [module] = [seam for seam in result.seams if seam.name.startswith("text_encoder.")]
    if not is_planted:
        assert result.verdict is Verdict.SAME and module.verdict is Verdict.SAME
        return
    assert result.verdict is Verdict.OTHER
    named = r"text_encoder\.encoder\.block\.0\.layer\.1\.DenseReluDense .*patch planted\.gated .*planted\.yaml:2"
    assert re.search(named, result.first_line), result.first_line


def test_the_first_module_at_fault_counts_or_else_the_worst():
    exact = torch.ones(3, dtype=torch.float64)
    yardstick = encoders.Yardstick([(n, exact.float() + 1e-6) for n in ("e.a", "e.b", "e.c")], [], {})
    yardstick.wide.extend((name, exact) for name, _ in yardstick.host)
    for errors, name in (((1e-6, 2e-6, 1e-6), "e.b"), ((1e-6, 1e-3, 1e-2), "e.b"), ((0.0, 0.0, 2e-6), "e.c")):
        port = [(path, exact + error) for (path, _), error in zip(yardstick.host, errors, strict=True)]
        [seam] = encoders._seams("encode", yardstick, port)
        assert seam.name == name and (seam.verdict is Verdict.OTHER) == (max(errors) > 1e-4)
