"""The demo that `torchport check --model` runs: patches that its stages had to call."""

import pytest
from fakes.patch_world import World

from torchport.commands import check, demo
from torchport.commands.findings import Report, exit_code


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", "def f(a):\n    return 1\n")
    world.python("def new(a): return 'new'\n")
    yield world
    world.close()


def test_a_patch_that_a_manifest_does_not_show_as_called_is_a_finding(world):
    entries = world.one("replace: p.py:new", "up.m:f", "must_be_called: [denoise]")
    row = {"id": "up.one", "state": "applied", "calls": 0}
    report = demo.not_called([row], entries, "denoise")
    (finding,) = report.findings
    assert finding.text == "'up.one' was not called in denoise (it is applied). Find what is called instead of up.m:f."
    assert exit_code([finding]) == 5
    assert demo.not_called([row], entries, "decode") == Report()
    assert demo.not_called([{**row, "calls": 2}], entries, "denoise").findings == []
    assert demo.not_called([{**row, "state": "not needed"}], entries, "denoise") == Report()
    assert "not in the ledger" in demo.not_called([], entries, "denoise").findings[0].text
    assert check.check(world.patches, ["up"], world.site, called=lambda: report).findings[-1] == finding
