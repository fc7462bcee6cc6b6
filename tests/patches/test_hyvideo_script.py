"""hyvideo's own generate.py, unchanged, under `torchport exec`; and its patches on the stand-in of the repository.

The whole script: `TORCHPORT_HYVIDEO=DIR pytest -m upstream tests/patches/test_hyvideo_script.py`, some minutes.
"""

import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import torchport

DIR = os.environ.get("TORCHPORT_HYVIDEO")
REASON = "needs a checkout of hyvideo: TORCHPORT_HYVIDEO=DIR pytest -m upstream"


@pytest.fixture(scope="module")
def checkpoint():
    """The card's tiny checkpoint."""
    from torchport.run.path import shared
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
    last = done.stderr.splitlines()[-1].removeprefix("[rank0]: ")
    assert last.startswith(("ModuleNotFoundError: No module named 'torchvision'", "RuntimeError"))


CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def functions(root):
    """The functions of the script's patches."""
    spec = importlib.util.spec_from_file_location("script", root / "patches" / "hyvideo" / "script.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Pipeline:
    """What upstream's pipeline is to the patches."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.execution_device = CUDA
        self.config = {"vision_states_dim": 1152}
        self.register_to_config = self.config.update
        self.transformer, self.vae = torch.nn.Linear(2, 2), torch.nn.Module()
        self.transformer.config = types.SimpleNamespace(vision_states_dim=32)
        self.vae.decoder = torch.nn.Linear(2, 2)

    @classmethod
    def create_pipeline(cls, path, version, **arguments):
        return cls(path=path, version=version, **arguments)

    def __call__(self, prompt):
        return prompt


def create(pipeline, *args, **kwargs):
    """Upstream's class method as a patch gets it."""
    return pipeline.create_pipeline(*args, **kwargs)


def test_the_pipeline_stays_on_the_host_whatever_its_devices_are(functions):
    devices = {"device": CUDA, "transformer_init_device": CUDA}
    pipe = functions.created_on_host(create, Pipeline, "folder", "480p_t2v", transformer_dtype=torch.float32, **devices)
    host = torch.device("cpu")
    assert pipe.execution_device == host and pipe.config == {"vision_states_dim": 32}
    assert pipe.arguments == {
        "path": "folder",
        "version": "480p_t2v",
        "transformer_dtype": torch.float32,
        "device": host,
        "transformer_init_device": host,
    }


def test_its_networks_are_ported_once_at_the_first_call(functions, monkeypatch):
    calls = []

    def port(module, **options):
        calls.append((module, options))
        ported = torch.nn.Module()
        ported.compiled = True
        return ported

    monkeypatch.setattr(functions.torchport, "port", port, raising=False)
    pipe = Pipeline()
    before = pipe.transformer, pipe.vae.decoder
    assert functions.with_programs(Pipeline.__call__, pipe, "a cat") == "a cat"
    assert functions.with_programs(Pipeline.__call__, pipe, prompt="a dog") == "a dog"
    assert tuple(module for module, _ in calls) == before
    assert [options["component"] for _, options in calls] == ["transformer", "vae"]
    rule = calls[0][1]["inputs"][0]["match"]
    assert re.fullmatch(rule, "extra_kwargs.byt5_text_mask") and not re.fullmatch(rule, "text_states")


def test_under_the_original_its_networks_stay_as_they_are(functions):
    """`port` returns the module itself then, and no table is an input of it."""
    pipe = Pipeline()
    with torchport.applied(patches=["torch/cuda"], backend="original"):
        functions.with_programs(Pipeline.__call__, pipe, "a cat")
    assert not pipe.transformer._forward_pre_hooks and isinstance(pipe.vae.decoder, torch.nn.Linear)


def test_the_rotary_tables_become_inputs(functions):
    class Transformer:
        def get_rotary_pos_embed(self, sizes):
            return [*sizes, "cos"], [*sizes, "sin"]

    args, kwargs = functions._with_tables(Transformer(), (torch.zeros(2, 4, 3, 6, 8), "t"), {"guidance": None})
    assert args[1] == "t"
    assert kwargs == {"guidance": None, "freqs_cos": [3, 6, 8, "cos"], "freqs_sin": [3, 6, 8, "sin"]}


def test_an_mp4_gets_a_codec_and_nothing_else_does(functions):
    def write(uri, ims, format=None, **kwargs):
        return uri, ims, format, kwargs

    assert functions.with_codec(write, "a.mp4", [], fps=24) == ("a.mp4", [], None, {"fps": 24, "codec": "libx264"})
    assert functions.with_codec(write, Path("a.mp4"), [], codec="mpeg4")[3] == {"codec": "mpeg4"}
    assert functions.with_codec(write, "a.gif", [], "GIF") == ("a.gif", [], "GIF", {})
