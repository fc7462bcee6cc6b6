"""Traces of whole models: a checkout of Tencent's repository without patches, and the demos of shipped cards with them.

TORCHPORT_HYVIDEO=DIR pytest -m upstream tests/porting/trace
"""

import os

import pytest

from torchport.porting.trace import trace
from torchport.task import Request

HYVIDEO = os.environ.get("TORCHPORT_HYVIDEO")
WITHOUT = pytest.mark.skipif(not HYVIDEO, reason="needs a checkout: TORCHPORT_HYVIDEO=DIR pytest -m upstream")


@pytest.mark.upstream
@WITHOUT
def test_the_stoppers_of_an_unpatched_checkout_are_listed():
    report = trace(Request("hyvideo", "configs/hyvideo_demo.yaml", upstream_path=HYVIDEO), patched=False)
    assert {"TP901", "TP903"} <= {one.id for one in report.stoppers}
    assert any("modules/attention.py" in one.place for one in report.stoppers)
    assert any("parallel_states.py" in one.place for one in report.stoppers)


@pytest.mark.upstream
@WITHOUT
def test_nothing_stops_a_checkout_with_its_patches():
    assert trace(Request("hyvideo", "configs/hyvideo_demo.yaml", upstream_path=HYVIDEO)).stoppers == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "config"),
    [("hunyuan", "demo"), ("cogvideox", "cogvideox_demo"), ("wan", "wan_demo")],
)
def test_nothing_stops_the_demo_of_a_shipped_card(model, config):
    report = trace(Request(model, f"configs/{config}.yaml"))
    assert report.stoppers == [] and "denoise" in report.stages
