"""hyvideo's own generate.py, unchanged, under `torchport exec`; and its patches on the stand-in of the repository.

The whole script: `TORCHPORT_HYVIDEO=DIR pytest -m upstream tests/patches/test_hyvideo_script.py`, some minutes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DIR = os.environ.get("TORCHPORT_HYVIDEO")
REASON = "needs a checkout of hyvideo: TORCHPORT_HYVIDEO=DIR pytest -m upstream"


@pytest.fixture(scope="module")
def checkpoint():
    """The card's tiny checkpoint."""
    from torchport.run import shared
    from torchport.task import Request, accept

    task = accept(Request("hyvideo", "configs/hyvideo_demo.yaml", upstream_path=DIR), dry=True)
    with shared(task) as common:
        return common.weights.folder


def script(checkpoint, out):
    """The command line of a video of one frame, the smallest that upstream makes: 848 x 480."""
    words = {"--prompt": "A cat", "--resolution": "480p", "--model_path": checkpoint, "--sr": "false", "--seed": "1"}
    words |= {"--video_length": "1", "--num_inference_steps": "2", "--output_path": out}
    return [str(Path(DIR) / "generate.py"), *(str(word) for pair in words.items() for word in pair)]


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*.py")}


@pytest.mark.upstream
@pytest.mark.skipif(DIR is None, reason=REASON)
def test_upstreams_own_script_makes_a_video_unchanged(checkpoint, tmp_path):
    import imageio.v3

    before = files_of(DIR)
    flags = ["--model", "hyvideo", "--upstream-path", DIR, "--machine", "cpu:8", "--mesh", "dp=2,tp=4"]
    command = [sys.executable, "-m", "torchport", "exec", *flags, "--", *script(checkpoint, tmp_path / "out.mp4")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    video = imageio.v3.imread(tmp_path / "out.mp4", plugin="pyav")
    assert video.shape == (1, 480, 848, 3) and 5 < video.std() < 120
    assert "compile transformer" in done.stderr and "error[" not in done.stderr
    assert files_of(DIR) == before


@pytest.mark.upstream
@pytest.mark.skipif(DIR is None, reason=REASON)
def test_without_exec_the_same_script_fails(checkpoint, tmp_path):
    command = [sys.executable, *script(checkpoint, tmp_path / "out.mp4")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "out.mp4").exists()
    assert done.stderr.splitlines()[-1].startswith(
        ("ModuleNotFoundError: No module named 'torchvision'", "RuntimeError")
    )


FAKE = """
import sys
import torch
from hyvideo.commons.parallel_states import get_parallel_state
from hyvideo.pipelines.hunyuan_video_pipeline import HunyuanVideo_1_5_Pipeline

torch.cuda.set_device(0)


class Transformer(torch.nn.Module):
    config = {"heads_num": 4, "vision_states_dim": 32}

    def __init__(self):
        super().__init__()
        self.img_in = torch.nn.Linear(4, 4)

    def get_rotary_pos_embed(self, sizes):
        return torch.ones(sizes[0], 1), torch.ones(sizes[0], 1)

    def forward(self, hidden_states, extra_kwargs=None, freqs_cos=None, freqs_sin=None):
        assert freqs_cos is not None, "computed inside, they would be constants"
        return (self.img_in(hidden_states) + extra_kwargs["byt5_text_states"] + freqs_cos.sum() + freqs_sin.sum(),)
"""
