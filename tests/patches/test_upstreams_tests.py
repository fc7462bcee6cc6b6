"""diffusers' own tests of a class that a card's patches change: what passes without the patches passes with them."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

TESTS = {
    "cogvideox": "tests/models/transformers/test_models_transformer_cogvideox.py",
    "hunyuan": "tests/models/transformers/test_models_transformer_hunyuan_1_5.py",
}
"""By card, the tests of its transformer's class, in a checkout of diffusers."""


@pytest.fixture(scope="module")
def checkout():
    folder = os.environ.get("DIFFUSERS_CHECKOUT")
    if folder is None:
        pytest.skip("needs its tests: DIFFUSERS_CHECKOUT=DIR pytest -m slow tests/patches/test_upstreams_tests.py")
    return Path(folder)


@pytest.fixture
def passed(checkout, root, tmp_path):
    """Returns the names of the tests in a file that pass, in a process of their own."""

    def made(file, *plugin, **variables):
        report = tmp_path / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *plugin,
            file,
        ]
        path = os.pathsep.join([str(root), str(root / "tests" / "fakes")])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **variables}
        subprocess.run(command, cwd=checkout, env=environment, capture_output=True)
        cases = xml.etree.ElementTree.parse(report).iter("testcase")
        return {f"{case.get('classname')}.{case.get('name')}" for case in cases if not list(case)}

    return made


@pytest.mark.slow
@pytest.mark.parametrize("model", TESTS)
def test_upstreams_tests_of_a_patched_class_pass_with_the_patches_in_force(passed, pack, tmp_path, model):
    names, calls = pack.card(model)[0].patches["denoise"], tmp_path / "calls.json"
    without = passed(TESTS[model])
    under = passed(TESTS[model], "-p", "under_patches", UNDER_PATCHES=",".join(names), PATCH_CALLS=str(calls))
    assert len(without) > 10 and under >= without
    called = {name for name, times in json.loads(calls.read_text()).items() if times}
    assert any(name.startswith("diffusers.") for name in called), "the tests call nothing that is patched"
