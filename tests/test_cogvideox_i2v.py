"""CogVideoX 1.5 image-to-video: what only `encode_image` sees of the image carries the stages after it, bit for bit."""

import dataclasses

import pytest
import torch
from diffusers import CogVideoXImageToVideoPipeline
from diffusers.utils import load_image
from fakes.artefacts import bits, difference, levels, same_frames, video_of
from PIL import Image
from safetensors.torch import load_file

from torchport import save
from torchport.compile.in_force import hushed
from torchport.errors import ArtefactForeignError, ArtefactMissingError, BadValueError, StoppedError
from torchport.load import tiny
from torchport.processes.stopping import Stopping
from torchport.run.path import run
from torchport.stages import file_of
from torchport.task import Request, accept

PROMPT, NEGATIVE, SEED = "A cat walks past a red sign", "blurry", 3
SMALL = ("height=32", "width=48", "frames=9", "steps=3", "save_every=1")


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """A picture of another size and shape than the video's, in a mode that is not RGB, and turned by its EXIF tag."""
    file = tmp_path_factory.mktemp("picture") / "first.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.linear_gradient("L").resize((50, 90)).save(file, exif=exif)
    return file


@pytest.fixture(scope="module")
def small(root, picture):
    return Request(
        "cogvideox_i2v",
        "configs/cogvideox_i2v_demo.yaml",
        PROMPT,
        NEGATIVE,
        seed=SEED,
        image=picture,
        overrides=SMALL,
        paths=(str(root),),
    )


@pytest.fixture(scope="module")
def upstream(pack, picture):
    card, _ = pack.card("cogvideox_i2v")
    with hushed(True):
        folder = tiny.write(card, file_of(pack, card, ""))
        pipe = CogVideoXImageToVideoPipeline.from_pretrained(folder, dtype=torch.float32)
        pipe.set_progress_bar_config(disable=True)

        def made(**kwargs):
            settings = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 3, "guidance_scale": 6.0}
            generator = torch.Generator().manual_seed(SEED)
            image = load_image(str(picture))
            return pipe(image, PROMPT, NEGATIVE, generator=generator, **settings | kwargs).frames

        return made


@pytest.fixture(scope="module")
def original(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run(dataclasses.replace(small, out=folder, backend="original"))
    return folder


def tensors_of(folder, stage):
    return load_file(save.file_of(folder, stage))


def test_the_original_is_upstreams_pipeline_bit_for_bit(original, upstream):
    latents = upstream(output_type="latent")
    assert latents.shape == (1, 4, 16, 4, 6)
    assert torch.equal(tensors_of(original, "denoise")["latents"], latents)
    assert torch.equal(tensors_of(original, "decode")["frames"], levels(upstream(output_type="pt")))


def test_the_image_counts(small, original, tmp_path):
    other = tmp_path / "other.png"
    Image.new("RGB", (64, 64), "red").save(other)
    request = dataclasses.replace(small, prompt=None, negative_prompt=None, stage="encode_image", seed=None)
    run(dataclasses.replace(request, image=other, backend="original", out=tmp_path))
    ours, theirs = (tensors_of(folder, "encode_image")["image_moments_0"] for folder in (tmp_path, original))
    assert not torch.equal(ours, theirs)


def test_the_port_encodes_the_image_as_upstream_does(small, original, tmp_path):
    request = dataclasses.replace(small, prompt=None, negative_prompt=None, stage="encode_image", seed=None)
    run(dataclasses.replace(request, out=tmp_path))
    ours, theirs = (tensors_of(folder, "encode_image")["image_moments_0"] for folder in (tmp_path, original))
    assert difference(ours, theirs) < 1e-5


def test_what_stands_for_the_image_is_in_the_artefacts(original):
    assert set(tensors_of(original, "encode")) == {"prompt_embeds", "negative_prompt_embeds"}
    assert tensors_of(original, "encode_image")["image_moments_0"].shape == (1, 32, 1, 4, 6)
    assert tensors_of(original, "denoise")["image_latents_0"].shape == (1, 16, 1, 4, 6)


@pytest.fixture
def later(small, original):
    """A request of a stage after `encode_image`: the image is on another machine."""
    return dataclasses.replace(small, prompt=None, negative_prompt=None, image=None, inputs=original)


@pytest.mark.parametrize("strategy", ["tp", "ulysses", "fsdp"])
def test_the_port_agrees_with_upstream_after_the_first_step(later, upstream, tmp_path, strategy):
    mesh = "{dp: 2, tp: 4}" if strategy == "tp" else "{dp: 2, sp: 4}"
    overrides = (*SMALL, "steps=1", f"strategy={strategy}", f"mesh={mesh}")
    run(dataclasses.replace(later, stage="denoise", out=tmp_path, overrides=overrides))
    first = upstream(output_type="latent", num_inference_steps=1)
    assert difference(tensors_of(tmp_path, "denoise")["latents"], first) < 1e-5


def test_the_port_agrees_with_upstream_after_the_last_step(later, original, upstream, tmp_path):
    run(dataclasses.replace(later, stage="denoise", out=tmp_path))
    run(dataclasses.replace(later, stage="decode", seed=None, inputs=tmp_path, out=tmp_path))
    assert 0.5 <= tensors_of(original, "denoise")["latents"].abs().max() <= 20
    assert difference(tensors_of(tmp_path, "denoise")["latents"], upstream(output_type="latent")) < 1e-4
    assert difference(video_of(later, tmp_path), upstream(output_type="pt")) < 1e-3
    assert same_frames(tensors_of(tmp_path, "decode")["frames"], levels(upstream(output_type="pt")))


def test_four_runs_are_one_and_only_one_has_the_image(small, original, tmp_path):
    request = dataclasses.replace(small, backend="original")
    folders = [tmp_path / name for name in ("a", "a", "b", "c")]
    run(dataclasses.replace(request, stage="encode", image=None, seed=None, out=folders[0]))
    request = dataclasses.replace(request, prompt=None, negative_prompt=None)
    run(dataclasses.replace(request, stage="encode_image", seed=None, out=folders[1]))
    request = dataclasses.replace(request, image=None)
    run(dataclasses.replace(request, stage="denoise", inputs=folders[1], out=folders[2]))
    run(dataclasses.replace(request, stage="decode", inputs=folders[2], out=folders[3], seed=None))
    for folder, name in zip(folders, ("encode", "encode_image", "denoise", "decode"), strict=True):
        assert bits(folder, name) == bits(original, name)


def test_a_run_that_is_stopped_after_each_step_ends_with_the_same_bits(later, original, tmp_path, monkeypatch):
    request = dataclasses.replace(later, stage="denoise", out=tmp_path, backend="original")
    monkeypatch.setattr(Stopping, "__init__", lambda self: setattr(self, "cause", True))
    monkeypatch.setattr(Stopping, "check", lambda *_: None)
    for number in (1, 2):
        with pytest.raises(StoppedError, match=f"after step {number} of 3"):
            run(request)
    assert run(request).steps == 1
    assert bits(tmp_path, "denoise") == bits(original, "denoise")


def test_a_stopped_run_does_not_go_on_with_another_picture_of_the_same_name(small, picture, tmp_path):
    file = tmp_path / "first.png"
    file.write_bytes(picture.read_bytes())
    stages = [stage for stage in accept(small).family.STAGES if stage.name == "encode_image"]
    before = accept(dataclasses.replace(small, image=file)).manifest_settings(stages[0])
    Image.new("RGB", (64, 64), "red").save(file)
    after = accept(dataclasses.replace(small, image=file)).manifest_settings(stages[0])
    assert before["image"] == after["image"] and before["image_digest"] != after["image_digest"]


def test_a_video_from_an_image_needs_one(small):
    for stage in ("all", "encode_image"):
        with pytest.raises(BadValueError) as caught:
            accept(dataclasses.replace(small, image=None, stage=stage))
        assert str(caught.value) == (
            "--image: It is missing, and 'cogvideox_i2v' begins with an image. Add --image FILE."
        )


@pytest.mark.parametrize("name", ["other.png", "first.png"])  # the name of the image that was encoded
def test_an_image_that_comes_too_late_is_refused(small, original, tmp_path, name):
    other = tmp_path / name
    Image.new("RGB", (64, 64), "red").save(other)
    request = dataclasses.replace(small, image=other, stage="denoise", inputs=original, out=tmp_path / "out")
    with pytest.raises(
        ArtefactForeignError, match=r"'encode_image' was made with image '.*first\.png', and 'denoise' is "
    ):
        run(dataclasses.replace(request, backend="original"))


def test_an_image_of_another_size_is_refused(later, tmp_path):
    request = dataclasses.replace(later, stage="denoise", out=tmp_path, backend="original")
    with pytest.raises(ArtefactForeignError, match=r"encode_image\.safetensors: .*width.* 48.* 64"):
        run(dataclasses.replace(request, overrides=(*SMALL, "width=64")))


def test_embeddings_without_an_image_are_refused(later, original, tmp_path):
    """As the stage files of hand-written ports are, which make no videos from images."""
    from safetensors.torch import save_file

    save_file(tensors_of(original, "encode"), tmp_path / "stage1_embeddings.safetensors", {"dtype_info": "{}"})
    request = dataclasses.replace(later, stage="denoise", inputs=tmp_path, out=tmp_path / "out", backend="original")
    with pytest.raises(ArtefactMissingError, match=r"The artefact of 'encode_image' is not there.*--image FILE"):
        run(request)
