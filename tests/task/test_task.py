"""Requests: everything that is written is read and checked before anything is loaded; what the machine must carry."""

import dataclasses
import datetime
import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from fakes.families import HUNYUAN, loaded

from torchport.compile.network import check_heads
from torchport.errors import (
    BadValueError,
    CheckpointForeignError,
    CheckpointMissingError,
    MeshError,
    TorchportError,
    UnknownNameError,
    UpstreamError,
    WrongTypeError,
)
from torchport.task import Request, accept, accept_like

GIB = 2**30


def refusal(kind, call):
    """Returns the text of the error, which must be of this kind."""
    with pytest.raises(TorchportError) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.fixture
def asked(request_for):
    """Accepts a request for the demo with changes; `sets` are added to its overrides."""

    def ask(sets=(), **changes):
        request = request_for(**changes)
        return accept(dataclasses.replace(request, overrides=(*request.overrides, *sets)))

    return ask


def test_a_good_request_becomes_a_task_with_everything_read(asked, tmp_path):
    found = asked()
    assert found.original and found.checkpoint == "tiny" and found.folder == found.inputs == tmp_path / "out"
    assert [stage.name for stage in found.stages] == ["encode", "denoise", "decode"]
    assert (found.settings.height, found.settings.frames, found.settings.steps) == (64, 5, 3)
    assert found.settings.dtypes["vae"] is torch.float32 and found.dtype("vae") == "float32"
    assert "scheduler" not in found.settings.dtypes


def test_encoders_that_a_family_loads_itself_stay_on_the_host(root):
    request = Request(
        "hyvideo", "configs/hyvideo_demo.yaml", "A cat", overrides=("encode=devices",), paths=(str(root),)
    )
    text = refusal(BadValueError, lambda: accept(request))
    assert text == (
        "--set encode=devices: The family of 'hyvideo' loads its encoders itself, for the host. Write 'encode: host', "
        "or leave it out."
    )


def test_accepting_writes_nothing(asked, tmp_path):
    asked()
    assert list(tmp_path.iterdir()) == []


def test_one_stage_is_one_stage_and_needs_no_prompt_unless_it_encodes(asked, tmp_path):
    decode = asked(stage="decode", prompt=None, inputs=tmp_path / "in")
    assert [stage.name for stage in decode.stages] == ["decode"] and decode.inputs == tmp_path / "in"
    assert "prompt" not in decode.manifest_settings(decode.stages[0])
    encode = asked(stage="encode")
    assert "prompt" in encode.manifest_settings(encode.stages[0])
    for stage in ("encode", "all"):
        assert refusal(BadValueError, lambda stage=stage: asked(stage=stage, prompt=None)) == (
            "--prompt: It is missing, and the stage 'encode' needs one. Add --prompt \"...\"."
        )


def test_an_unknown_stage_is_refused_with_the_nearest(asked):
    assert refusal(UnknownNameError, lambda: asked(stage="denoize")) == (
        "--stage denoize: There is no such stage. Did you mean 'denoise'? Known: all, decode, denoise, encode."
    )


def test_a_mesh_that_does_not_fit_the_devices_is_refused(asked):
    text = refusal(MeshError, lambda: asked(["mesh={dp: 2, tp: 3}"], backend="torchax"))
    assert text == (
        "--set mesh={dp: 2, tp: 3}: The mesh dp=2 x tp=3 takes 6 device(s), and cpu:8 has 8. "
        "The axes' product must be 8."
    )


def test_a_mesh_that_does_not_fit_the_batch_is_refused(asked):
    assert refusal(MeshError, lambda: asked(["guidance_scale=1.0"], backend="torchax")).endswith(
        ": dp=2 does not divide the batch of guidance_scale 1.0, which is 1. dp must be 1."
    )
    asked(["guidance_scale=1.0", "mesh={tp: 8}"], backend="torchax")
    text = refusal(MeshError, lambda: asked(["mesh={dp: 8}"], backend="torchax"))
    assert "dp=8 does not divide the batch of guidance_scale 3.0, which is 2. dp must be one of 1, 2." in text


def test_a_mesh_that_does_not_fit_the_heads_is_refused_before_a_download(asked, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    published = asked(["mesh={tp: 32}", "machine=cpu:32", "guidance_scale=1.0"], backend="torchax", checkpoint="a/b@c")
    assert refusal(MeshError, lambda: check_heads(published)) == (
        "--set mesh={tp: 32}: tp=32 does not divide transformer.num_attention_heads, which is 16. "
        "tp must be one of 1, 2, 4, 8, 16."
    )
    small = asked(["mesh={tp: 8}", "guidance_scale=1.0"], backend="torchax")
    assert "transformer.num_attention_heads, which is 4" in refusal(MeshError, lambda: check_heads(small))
    check_heads(asked(["mesh={tp: 8}", "guidance_scale=1.0"]))  # the original has no mesh


def absent(*args, local_files_only=False, **kwargs):
    """Stands for a hub whose cache is empty; asking its network fails the test."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    assert local_files_only, "a download was asked for"
    raise LocalEntryNotFoundError("not here")


def test_a_head_count_that_the_card_misnames_is_refused(asked):
    found = asked(backend="torchax")
    strategy = found.card.strategies["tp"].model_copy(update={"divides": {"tp": "transformer.num_heads"}})
    wrong = dataclasses.replace(found, card=found.card.model_copy(update={"strategies": {"tp": strategy}}))
    text = refusal(BadValueError, lambda: check_heads(wrong))
    assert "'transformer.num_heads' is no number of the checkpoint's. Did you mean 'num_" in text
    assert text.startswith("configs/models/hunyuan.yaml:")


def test_an_image_and_a_checkout_that_nothing_would_read_are_refused(asked, tmp_path):
    assert refusal(BadValueError, lambda: asked(image=tmp_path / "a.png")) == (
        f"--image {tmp_path}/a.png: 'hunyuan' begins with text alone. Leave the flag out."
    )
    assert refusal(UpstreamError, lambda: asked(upstream_path="x")) == (
        "--upstream-path x: This model's upstreams are installed packages. Leave the flag out."
    )


def test_an_artefact_is_for_its_model_and_size_and_embeddings_for_any_size(asked):
    found = asked()
    assert found.identity("denoise") == found.identity("decode")
    assert {key: found.identity("denoise")[key] for key in ("height", "width", "frames")} == {
        "height": 64,
        "width": 64,
        "frames": 5,
    }
    assert found.identity("encode") == {"model": found.card.artefacts, "guidance": True}
    assert asked(["guidance_scale=1.0"]).identity("encode")["guidance"] is False


def test_what_is_shown_is_what_a_stage_uses_and_can_be_written_as_json(asked):
    found = asked()
    shown = {stage.name: found.manifest_settings(stage) for stage in found.stages}
    assert json.loads(json.dumps(shown)) == shown
    assert shown["denoise"]["dtypes"]["transformer"] == "float32" and shown["decode"]["precision"]["vae"] == "high"
    assert "steps" in shown["denoise"] and "steps" not in shown["decode"] and "seed" not in shown["encode"]


def test_an_axis_that_no_rule_names_is_refused(asked):
    text = refusal(MeshError, lambda: asked(["mesh={sp: 8}", "guidance_scale=1.0"], backend="torchax"))
    assert text == (
        "--set mesh={sp: 8}: sp=8 splits nothing: no rule of the strategy 'tp' names it. Use the axes dp, tp."
    )


def test_a_guidance_scale_that_is_no_number_of_use_is_refused(asked):
    for value in (".inf", ".nan"):
        assert "'guidance_scale' is" in refusal(WrongTypeError, lambda value=value: asked([f"guidance_scale={value}"]))


@pytest.mark.parametrize(
    ("override", "limit"),
    [
        ("height=16000000", 16_384),
        ("width=4611686018427387904", 16_384),
        ("frames=4611686018427387904", 2**20),
        ("fps=100000", 240),
        ("steps=1180591620717411303424", 1_000),
        ("guidance_scale=1e300", 1_000),
        ("text_bucket=1180591620717411303424", 2**20),
    ],
)
def test_a_number_beyond_every_machine_is_refused_at_once(asked, override, limit):
    text = refusal(WrongTypeError, lambda: asked([override]))
    assert text.startswith(f"--set {override}: '{override.partition('=')[0]}' is ")
    assert text.endswith(f"It must be less than or equal to {limit}.")


@pytest.mark.parametrize("override", ["height=72", "width=100", "frames=6"])
def test_sizes_that_the_vae_cannot_divide_are_refused(asked, override):
    refusal(BadValueError, lambda: asked([override]))


def test_a_prompt_that_is_not_unicode_is_refused(asked):
    text = refusal(BadValueError, lambda: asked(prompt="bad\udcff"))
    assert text == "--prompt: Character 4 is not Unicode text. Write it as UTF-8."


def test_inputs_of_a_run_of_all_stages_are_refused(asked, tmp_path):
    text = refusal(BadValueError, lambda: asked(inputs=tmp_path))
    assert text == (f"--inputs {tmp_path}: All stages are run here, and none is read. Leave it out, or name a --stage.")


def test_an_empty_output_folder_is_refused(asked):
    assert refusal(BadValueError, lambda: asked(out=Path())).startswith("--out: It is empty, or the current folder.")


def test_a_remedys_command_repeats_what_was_asked_for(asked, tmp_path):
    found = asked(["steps=3"], prompt='A "cat"', checkpoint="tiny", backend="original", paths=())
    sizes = "--set height=64 --set width=64 --set frames=5"
    assert found.command("encode", tmp_path) == (
        "torchport run --model hunyuan --config configs/demo.yaml --stage encode --prompt 'A \"cat\"' "
        f"--checkpoint tiny --backend original {sizes} --set steps=3 --set steps=3 --out {tmp_path}"
    )


def test_two_runs_in_one_second_get_two_folders(request_for, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    first = accept(request_for(out=None)).folder
    assert first.parent.name == "outputs" and first.name.startswith("hunyuan-demo-")

    class Clock(datetime.datetime):
        @classmethod
        def now(cls):
            return cls(2026, 11, 20, 21, 0, 0)

    monkeypatch.setattr(datetime, "datetime", Clock)
    names = []
    for _ in range(3):
        folder = accept(request_for(out=None)).folder
        folder.mkdir(parents=True)
        names.append(folder.name)
    stem = "hunyuan-demo-20261120-210000"
    assert names == [stem, f"{stem}-2", f"{stem}-3"]


def test_the_original_takes_the_plumbing_alone_and_the_port_all_patches(asked):
    original, port = asked(), asked(backend="torchax")
    assert all(entry.plumbing for entry in original.patches(original.stages))
    ids = [entry.id for entry in port.patches(port.stages)]
    assert len(ids) == len(set(ids)) and any(id.startswith("torchax.") for id in ids)
    assert any(id.startswith("diffusers.") for id in ids)
    (encode,) = [stage for stage in port.stages if stage.name == "encode"]
    assert port.patches([encode]) == [], "encoding does not go through torchax"


def test_a_stage_has_the_patches_of_the_implementation_that_the_config_names(root):
    def request(*overrides):
        config = "configs/cogvideox_demo.yaml"
        return accept(Request("cogvideox", config, "A cat", overrides=overrides, paths=(str(root),)), dry=True)

    default, flax = request(), request("vae.implementation=flax")
    decode, ids = default.stages[-1], {}
    for name, task_ in (("default", default), ("flax", flax)):
        ids[name] = {entry.id for entry in task_.patches([decode])}
    assert "diffusers.cogvideox.vae-flax" in ids["flax"] - ids["default"]
    assert default.code(decode) != flax.code(decode), "the manifest and a resumed run know which it was"
    [denoise] = default.denoising
    assert default.code(denoise) == flax.code(denoise)


def test_a_file_that_is_no_picture_is_refused(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(loaded(HUNYUAN), "TAKES_IMAGE", True)
    (tmp_path / "bad.png").write_text("no picture")
    text = refusal(BadValueError, lambda: asked(image=tmp_path / "bad.png"))
    assert text == f"--image {tmp_path / 'bad.png'}: It is no picture that can be read. Name a picture."


def test_a_variant_made_for_another_task_is_refused_with_the_other(asked, monkeypatch):
    family = loaded(HUNYUAN)
    monkeypatch.setattr(family, "VARIANTS", ("a_t2v", "a_i2v"))
    monkeypatch.setattr(family, "task", lambda variant: variant.split("_")[1], raising=False)
    assert asked(["variant=a_t2v"]).settings.variant == "a_t2v"
    text = refusal(BadValueError, lambda: asked(["variant=a_i2v"]))
    assert text == (
        "--set variant=a_i2v: 'a_i2v' is made for i2v, and this is t2v. Add --image FILE, or --set variant=a_t2v."
    )
    assert "has no variant 'b'" in refusal(UnknownNameError, lambda: asked(["variant=b"]))


def test_a_model_without_variants_refuses_one(asked):
    text = refusal(UnknownNameError, lambda: asked(["variant=x"]))
    assert text == "--set variant=x: 'hunyuan' has no variant 'x'. None are known."


def test_a_lora_must_be_there_where_steps_are_taken_and_be_of_a_network_that_takes_them(asked, tmp_path):
    file = tmp_path / "style.safetensors"
    sets = (f"lora=[{{path: {file}}}]",)
    for stage in ("all", "denoise"):
        text = refusal(CheckpointMissingError, lambda stage=stage: asked(sets, stage=stage))
        assert text.endswith(f": There is no file '{file}'. Name a LoRA in safetensors.")
        assert "lora" in text.partition(": There")[0]
    assert refusal(CheckpointMissingError, lambda: asked(sets, stage="decode", prompt=None))  # a flag is compared
    torch.save({}, file)
    text = refusal(CheckpointForeignError, lambda: asked(sets))
    assert text.startswith(f"{file}: It is a pickle, as torch.save writes it (.pt, .bin, .ckpt)")
    file.write_bytes(b"lora")
    [lora] = asked(sets).job.lora
    assert (lora.path, lora.scale, lora.component) == (str(file), 1.0, "transformer")
    text = refusal(UnknownNameError, lambda: asked((f"lora=[{{path: {file}, component: vae}}]",)))
    assert "'hunyuan' takes no steps with a network 'vae'." in text
    for scale in (101, ".nan"):
        refusal(WrongTypeError, lambda scale=scale: asked((f"lora=[{{path: {file}, scale: {scale}}}]",)))


def test_no_lora_may_be_asked_for_where_there_is_none(asked):
    task = asked(("lora=[]",))
    assert task.job.lora == [] and task.flag_settings()["lora"] == []


def test_a_lora_of_a_config_need_not_be_there_for_a_plan_or_a_stage_without_steps(request_for, root, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text((root / "configs" / "demo.yaml").read_text() + "lora: [{path: absent.safetensors}]\n")
    assert accept(request_for(config=str(config), prompt=None), dry=True).job.lora
    decode = accept(request_for(config=str(config), stage="decode", prompt=None, inputs=tmp_path))
    assert decode.job.lora and not any(stage in decode.denoising for stage in decode.stages)
    text = refusal(CheckpointMissingError, lambda: accept(request_for(config=str(config))))
    assert text.startswith(f"{config}:") and "There is no file 'absent.safetensors'" in text


def test_the_settings_of_a_stage_that_takes_steps_name_loras_by_their_bytes(asked, tmp_path):
    file = tmp_path / "style.safetensors"
    file.write_bytes(b"lora")
    task = asked((f"lora=[{{path: {file}, scale: 0.5}}]",))
    row = {"file": "style.safetensors", "sha256": sha256(b"lora").hexdigest(), "scale": 0.5, "component": "transformer"}
    encode, denoise, decode = (task.manifest_settings(stage) for stage in task.stages)
    assert denoise["lora"] == [row] and "lora" not in encode and "lora" not in decode
    assert asked().manifest_settings(task.stages[1])["lora"] == []


def test_a_negative_prompt_that_the_pipeline_does_not_take_is_refused_of_each_line_of_a_series_too():
    request = Request("wan", "configs/wan_demo.yaml", "a cat", "blurry")
    task = accept(request)
    assert task.card.call.takes_negative and accept_like(task, request).settings.negative_prompt == "blurry"
    alone = task.card.call.model_copy(update={"embeddings": {"prompt_embeds": [1, 8, 16]}, "negative_apart": False})
    task = dataclasses.replace(task, card=task.card.model_copy(update={"call": alone}))
    with pytest.raises(BadValueError, match="--negative-prompt blurry: 'wan' takes none"):
        accept_like(task, request)
    assert accept_like(task, dataclasses.replace(request, negative_prompt=None)).settings.negative_prompt == ""
