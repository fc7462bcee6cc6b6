"""The Ray Data pipeline of docs/prompts.md runs as it is printed, on local workers."""

import os
import re
import sys
from pathlib import Path

import pytest
from fakes.small_videos import small_videos

from torchport import run, save
from torchport.task import Request

ROWS = [{"prompt": f"prompt {number}", "seed": number, "out": f"out/{number}"} for number in range(4)]


@pytest.fixture
def port(root, tmp_path, monkeypatch):
    """The small port, and beside its upstream the module that the page prints, for workers to import."""
    port = small_videos(tmp_path, monkeypatch)
    page = (root / "docs" / "prompts.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (port.site / "pipeline.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(port.site), str(root), *sys.path]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    yield port
    port.forget()


@pytest.mark.filterwarnings("default")  # ray's own
def test_two_workers_denoise_to_the_bytes_of_a_run(port, tmp_path):
    ray = pytest.importorskip("ray", reason="needs ray: pip install 'torchport[ray]', then pytest tests/test_ray.py")
    from pipeline import videos  # of the page

    request = Request("small", "configs/small.yaml", paths=(str(port.pack),), cache=False)
    rows = [{**row, "out": str(tmp_path / row["out"])} for row in ROWS]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        done = videos(rows, request, {"encode": 1, "denoise": 2, "decode": 1})
    finally:
        ray.shutdown()
    assert sorted(row["out"] for row in done) == [row["out"] for row in rows]
    for row in rows:
        out, alone = Path(row["out"]), Path(f"{row['out']}-alone")
        run.run(Request(request.model, request.config, row["prompt"], seed=row["seed"], paths=request.paths, out=alone))
        for stage in ("encode", "denoise", "decode"):
            ours, theirs = (save.read_manifest(save.file_of(folder, stage)) for folder in (out, alone))
            assert ours.sha256 == theirs.sha256
