"""What upstream raises reads alike, whatever runs it: one error id, upstream's file and line."""

import dataclasses
import importlib
import logging
import sys

import attention_tiles
import pytest
import torch
from fakes.plain_pack import PlainPack

import torchport
from torchport.commands import shard
from torchport.compile.in_force import hushed, in_force
from torchport.config.machine import parse_machine
from torchport.errors import ForeignError, TracedValueError
from torchport.plan import aot, sweep
from torchport.porting import trace as tracing
from torchport.run.path import run
from torchport.task import Request, accept
from torchport.task.devices import devices
from torchport.verify import recording

RAISES = 'raise ValueError("the config has no heads")'
FORWARD = "        y = self.into(x)"
IMPORT = "\nimport torch\n"


@pytest.fixture
def plain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pack = PlainPack(tmp_path, monkeypatch)
    yield pack
    pack.close()


def planned(request):
    task = accept(dataclasses.replace(request, stage="denoise"), dry=True)
    with aot.outlined(task, task.stages[0], devices(task.machine)):
        pass


def ported(request):
    with torchport.applied(request.model, paths=request.paths):
        from up.model import Net

        module = Net(16, 2).eval()
        module.config = {"dim": 16}
        torchport.port(module)(torch.zeros(1, 8, 4), torch.zeros(1, 1, 16))


def verified(request):
    recording.recording_of(accept(dataclasses.replace(request, backend="original")), None, False)


IN_FORWARD = {
    "run": run,
    "plan": planned,
    "trace without patches": tracing.called,
    "verify": verified,
    "port": ported,
}
IN_IMPORT = {
    "sweep": lambda request: sweep.sweep(request, "v6e:2x4"),
    "tiles": lambda request: attention_tiles.workload_of_model(request, parse_machine("v6e:2x4", "--topology")),
    "shard": shard.rule_rows,
}
"""These call no network: they build it, and read its configuration."""


@pytest.mark.parametrize("command", [*IN_FORWARD, *IN_IMPORT, "trace"])
def test_an_exception_of_upstream_is_the_same_error_with_its_line_everywhere(plain, command):
    if command in IN_IMPORT:
        plain.change(IMPORT, f"{IMPORT}{RAISES}\n", "../site/up/model.py")
        what, where = "The import of up.model", "import of up.model"
    else:
        plain.change(FORWARD, f"        {RAISES}\n{FORWARD}", "../site/up/model.py")
        what = where = "Net.forward"
    lines = [line.strip() for line in (plain.root / "../site/up/model.py").read_text().splitlines()]
    place = f"site/up/model.py:{lines.index(RAISES) + 1}"
    request = Request("plain", "configs/small.yaml", prompt="A cat", out=plain.root / "out", paths=(str(plain.root),))
    fact = f"{what} raises ValueError: the config has no heads"
    if command == "trace":  # it goes on, and says at the end what would stop a run
        stopper = tracing.traced(request, None).stoppers[0]
        assert (stopper.id, stopper.place, stopper.fact) == (ForeignError.id, place, fact)
        return
    with pytest.raises(ForeignError) as caught:
        {**IN_FORWARD, **IN_IMPORT}[command](request)
    assert (type(caught.value), caught.value.place, caught.value.fact) == (ForeignError, place, fact)
    assert f"  {place} in {where}: {RAISES}" in str(caught.value).splitlines()


def test_a_module_of_a_package_that_no_card_names_is_upstream_for_port(plain):
    plain.change(FORWARD, f"        if (x > 0).any():\n            x = x + 1\n{FORWARD}", "../site/up/model.py")
    with torchport.applied():
        from up.model import Net

        rules = [{"match": ".*", "spec": "replicate"}]
        module = torchport.port(Net(16, 2).eval(), strategy={"weights": rules, "inputs": rules})
        with pytest.raises(TracedValueError, match=r"list up/tracing under 'patches' of torchport\.applied\("):
            module(torch.zeros(1, 8, 4), torch.zeros(1, 1, 16))


def test_a_task_runs_in_float32_whatever_its_caller_has_set(plain):
    task = accept(Request("plain", "configs/small.yaml", prompt="A cat", paths=(str(plain.root),)))
    torch.set_default_dtype(torch.float64)
    try:
        with in_force(task, task.stages):
            assert torch.zeros(1).dtype == torch.float32
        assert torch.zeros(1).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


LOGS = ("diffusers.utils.logging", "transformers.utils.logging")


def loudness():
    """How much each library prints, by its logging module."""
    logs = [importlib.import_module(name) for name in LOGS]
    return [(log.get_verbosity(), log.is_progress_bar_enabled()) for log in logs]


def test_upstreams_notes_are_hushed_and_then_as_loud_as_before():
    before = loudness()
    with hushed(True):
        assert loudness() == [(logging.ERROR, False)] * 2
    assert loudness() == before
    with hushed(False):
        assert loudness() == before


def test_a_library_that_is_imported_later_is_hushed_too(monkeypatch):
    before = loudness()
    for name in LOGS:
        monkeypatch.delitem(sys.modules, name)
    with hushed(True):
        assert not set(LOGS) & sys.modules.keys(), "no library is imported for it"
        assert loudness() == [(logging.ERROR, False)] * 2
    assert loudness() == before
