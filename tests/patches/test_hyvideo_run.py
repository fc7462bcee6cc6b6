"""The whole path through Tencent's own repository: `TORCHPORT_HYVIDEO=DIR pytest -m upstream`.

Each backend runs in a process of its own, as people run it: once torchax is imported, upstream's compiled attention
cannot be traced by Dynamo any more.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import numpy
import pytest
import torch
from fakes.artefacts import same_frames
from PIL import Image
from safetensors.torch import load_file, save_file

from torchport.files import cache
from torchport.load import tiny
from torchport.stages import file_of

pytestmark = pytest.mark.upstream
DIR = os.environ.get("TORCHPORT_HYVIDEO")
REASON = "needs a checkout of hyvideo: TORCHPORT_HYVIDEO=DIR pytest -m upstream"
SMALL = ("height=64", "width=96", "frames=9", "steps=3")
PROMPT = 'A cat by a sign, "stop"'
CASES = {
    "t2v": (),
    "i2v": ("variant=720p_i2v",),
    "480p t2v": ("variant=480p_t2v",),
    "t2v over sp=4": ("strategy=ulysses",),
    "t2v over sp=2": ("strategy=ulysses", "mesh={dp: 2, sp: 2}", "machine=cpu:4"),
    "i2v over sp=4": ("variant=720p_i2v", "strategy=ulysses", "mesh={sp: 4}", "machine=cpu:4"),
    "t2v fsdp": ("strategy=fsdp",),
    "step-distilled i2v": (
        "variant=480p_i2v_step_distilled",
        "guidance_scale=1.0",
        "machine=cpu:4",
        "mesh={tp: 4}",
    ),
}


def torchport(*arguments, code=0):
    command = [sys.executable, "-m", "torchport", "run", "--config", "configs/hyvideo_demo.yaml", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr


def hyvideo(out, *arguments, sets=(), code=0):
    words = [word for one in (*SMALL, *sets) for word in ("--set", one)]
    return torchport(
        "--model", "hyvideo", "--upstream-path", DIR, "--prompt", PROMPT, "--out", out, *words,
        *arguments, code=code,
    )  # fmt: skip


def difference(ours, reference):
    """Returns max|a - b| / max|b|, of a reference whose size makes that mean something."""
    largest = reference.abs().max().item()
    assert 0.5 <= largest <= 20
    return (ours.double() - reference.double()).abs().max().item() / largest


@pytest.fixture
def picture(tmp_path):
    pixels = numpy.random.default_rng(1).integers(0, 256, (90, 130, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).resize((260, 180)).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


@pytest.mark.skipif(DIR is None, reason=REASON)
@pytest.mark.parametrize("case", CASES)
def test_the_port_agrees_with_the_original(case, picture, tmp_path):
    image = ("--image", picture) if "i2v" in case else ()
    for backend in ("original", "torchax"):
        hyvideo(tmp_path / backend, *image, "--backend", backend, sets=CASES[case])
    if image:
        # Upstream encodes the image in float16: a sum in another order may be the next number.
        ours, reference = (
            load_file(tmp_path / name / "encode.safetensors")["image_latents"] for name in ("torchax", "original")
        )
        assert difference(ours, reference) <= torch.finfo(torch.float16).eps
        inputs = ("--stage", "denoise", "--inputs", tmp_path / "original", *image)
        hyvideo(tmp_path / "same", *inputs, sets=CASES[case])
    ours, reference = (
        load_file(tmp_path / name / "denoise.safetensors")["latents"]
        for name in ("same" if image else "torchax", "original")
    )
    assert difference(ours, reference) <= 1e-5
    if image:
        return  # of other latents are other frames
    ours, reference = (load_file(tmp_path / name / "decode.safetensors")["frames"] for name in ("torchax", "original"))
    assert same_frames(ours, reference)


@pytest.mark.skipif(DIR is None, reason=REASON)
def test_the_original_has_its_plumbing_patched_and_named_and_nothing_else(tmp_path):
    hyvideo(tmp_path, "--backend", "original")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    used = {row["id"] for stage in manifest["stages"].values() for row in stage["patches"] if row["state"] == "used"}
    # Dynamo, which compiles upstream's own attention, saves and restores the state of autocast.
    stub = {"hyvideo.torchvision"} if importlib.util.find_spec("torchvision") is None else set()
    assert used - {"torch.autocast.switched"} == {"hyvideo.parallel-state"} | stub


@pytest.mark.skipif(DIR is None, reason=REASON)
def test_in_bfloat16_under_autocast_the_port_is_as_close_as_the_original(tmp_path):
    for name, dtype, backend in (
        ("exact", "float32", "original"),
        ("half", "bfloat16", "original"),
        ("ours", "bfloat16", "torchax"),
    ):
        hyvideo(tmp_path / name, "--backend", backend, sets=(f"dtypes.transformer={dtype}",))
    exact, half, ours = (
        load_file(tmp_path / name / "denoise.safetensors")["latents"] for name in ("exact", "half", "ours")
    )
    assert 0 < difference(half, exact) < 0.1
    assert difference(ours, exact) <= 2 * difference(half, exact)


@pytest.mark.skipif(DIR is None, reason=REASON)
def test_stage_files_of_the_other_card_are_refused_by_name_where_features_differ(tmp_path):
    sets = [word for one in SMALL for word in ("--set", one)]
    torchport("--model", "hunyuan", "--prompt", PROMPT, "--stage", "encode", "--out", tmp_path, *sets)
    text = hyvideo(tmp_path, "--stage", "denoise", code=2)
    assert (
        "error[TP603] encode.safetensors: 'prompt_embeds_2' has shape [1, 256, 48], and this run takes "
        "[1, 256, 1472]." in text
    )


@pytest.mark.skipif(DIR is None, reason=REASON)
def test_a_stage_file_with_an_image_is_refused_by_the_card_without(picture, tmp_path):
    hyvideo(tmp_path, "--stage", "encode", "--image", picture, sets=("variant=720p_i2v",))
    sets = [word for one in SMALL for word in ("--set", one)]
    text = torchport("--model", "hunyuan", "--stage", "denoise", "--out", tmp_path, *sets, code=2)
    assert "error[TP603] encode.safetensors: 'prompt_embeds_2' has shape [1, 256, 1472]" in text  # what is seen first


@pytest.mark.skipif(DIR is None, reason=REASON)
def test_a_sparse_variant_is_refused_before_anything_is_loaded(tmp_path):
    text = hyvideo(tmp_path / "out", sets=("variant=720p_t2v_distilled_sparse",), code=2)
    assert "error[TP106] --set variant=720p_t2v_distilled_sparse: 'hyvideo' has no variant" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(DIR is None, reason=REASON)
def test_under_the_emulated_autocast_every_module_returns_cudas_dtype(root):
    """The flow that CUDA's op lists give: the image's residual stays bfloat16, the text's becomes float32."""
    script = root / "tests" / "fakes" / "hyvideo_dtypes.py"
    command = [sys.executable, str(script), str(root / "patches"), DIR]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["img_in"] == "bfloat16"
    assert seen["vision_in"] == "float32", "its last op is a LayerNorm"
    norms = {path: dtype for path, dtype in seen.items() if path.rpartition(".")[2] in ("img_norm1", "txt_norm2")}
    assert len(norms) == 4 and set(norms.values()) == {"float32"}
    linear = {path: dtype for path, dtype in seen.items() if path.endswith(("_attn_q", "_attn_proj", ".fc1", ".fc2"))}
    assert len(linear) >= 16 and set(linear.values()) == {"bfloat16"}
    assert [seen[f"double_blocks.{n}"] for n in range(2)] == ["bfloat16+float32"] * 2
    assert seen["final_layer"] == seen[""] == "bfloat16"


@pytest.mark.skipif(DIR is None, reason=REASON)
def test_latents_of_one_card_are_decoded_by_the_other(tmp_path, pack):
    """Published weights of both have 32 channels and one layout of latents: the stage files interchange."""
    hyvideo(tmp_path / "one", "--stage", "encode")
    hyvideo(tmp_path / "one", "--stage", "denoise")
    card, _ = pack.card("hunyuan")
    components = {**card.tiny.components, "vae": {**card.tiny.components["vae"], "latent_channels": 32}}
    small = card.model_copy(update={"tiny": card.tiny.model_copy(update={"trained": {}, "components": components})})
    words = [word for one in SMALL for word in ("--set", one)]
    words += ["--checkpoint", tiny.write(small, file_of(pack, card, "")), "--inputs", tmp_path / "one"]
    torchport("--model", "hunyuan", "--stage", "decode", "--out", tmp_path / "two", *words)
    assert load_file(tmp_path / "two" / "decode.safetensors")["frames"].shape == (1, 9, 3, 64, 96)


@pytest.mark.skipif(DIR is None, reason=REASON)
def test_an_encoder_that_is_not_whole_is_refused_before_upstream_draws_what_it_lacks(tmp_path, pack):
    """Upstream's own loading takes an encoder without a tensor, or of integers, and says nothing."""
    hyvideo(tmp_path / "whole", "--stage", "encode")
    made = json.loads((tmp_path / "whole" / "encode.json").read_text())["checkpoint"].removeprefix("tiny:")
    folders = [path for path in cache.folder().rglob(made) if path.is_dir()]
    card, _ = pack.card("hyvideo")
    for name, lost in (("text_encoder", "self_attn.q_proj.weight"), ("text_encoder", "")):
        root = shutil.copytree(folders[0], tmp_path / "copy", dirs_exist_ok=True)
        (file,) = (root / card.folder(name, None)).glob("*.safetensors")
        tensors = load_file(file)
        kept = {key: t for key, t in tensors.items() if not key.endswith(lost)} if lost else {}
        save_file(kept or {key: t.to(torch.int8) for key, t in tensors.items()}, file, {"format": "pt"})
        text = hyvideo(tmp_path / "out", "--stage", "encode", "--checkpoint", root, code=2)
        assert "error[TP303] " in text and "Traceback" not in text
