"""Modular pipelines of diffusers, called as other pipelines are."""

import inspect
import json
import types

import diffusers
import pytest

from torchport.errors import BadValueError
from torchport.load import checkpoint, modular


def test_a_modular_pipeline_says_what_it_takes_and_any_other_class_is_as_it_was():
    cls = modular.as_pipeline(diffusers.WanModularPipeline)
    assert modular.as_pipeline(cls) is cls is modular.as_pipeline(diffusers.WanModularPipeline)
    assert modular.as_pipeline(diffusers.WanPipeline) is diffusers.WanPipeline
    call, encode = (inspect.signature(function).parameters for function in (cls.__call__, cls.encode_prompt))
    assert {"prompt_embeds", "negative_prompt_embeds", "height", "generator", "output_type"} <= set(call)
    assert call["guidance_scale"].default == 5.0 and call["num_inference_steps"].default == 50
    assert list(encode)[1:] == ["prompt", "negative_prompt", "max_sequence_length", "do_classifier_free_guidance"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'promt'"):
        cls(text_encoder=None, tokenizer=None, transformer=None, scheduler=None, vae=None)(promt="a cat")


def test_a_guider_that_upstream_has_switched_off_takes_no_scale():
    call = inspect.signature(modular.as_pipeline(diffusers.ZImageModularPipeline).__call__).parameters
    assert "guidance_scale" not in call and "prompt_embeds" in call


def test_plain_values_of_the_constructor_are_in_the_configuration_and_their_defaults_are_upstreams():
    cls = modular.as_pipeline(diffusers.Flux2KleinModularPipeline)
    names = [each.name for each in cls.prompt_blocks.components]
    assert "is_distilled" in names
    nothing = dict.fromkeys(name for name in names if name != "is_distilled")
    assert cls(**nothing).config.is_distilled is True
    assert cls(**nothing, is_distilled=False).config.is_distilled is False


def test_blocks_without_a_prompt_or_a_loop_are_refused(monkeypatch):
    blocks = diffusers.SequentialPipelineBlocks.from_blocks_dict({})
    monkeypatch.setattr(diffusers, "NoBlocks", lambda: blocks, raising=False)
    cls = types.new_class("NoModularPipeline", (), {}, lambda body: body.update(default_blocks_name="NoBlocks"))
    with pytest.raises(BadValueError, match="'NoModularPipeline' do not encode a prompt and then run a loop"):
        modular.as_pipeline(cls)


def test_a_modular_checkpoint_says_the_classes_beside_where_the_components_come_from(tmp_path):
    where = {"pretrained_model_name_or_path": "owner/name", "subfolder": "vae"}
    index = {
        "_class_name": "WanModularPipeline",
        "vae": [None, None, {**where, "type_hint": ["diffusers", "AutoencoderKLWan"]}],
        "scheduler": ["diffusers", "UniPCMultistepScheduler", where],
        "is_distilled": True,
    }
    file = tmp_path / "modular_model_index.json"
    file.write_text(json.dumps(index))
    assert checkpoint.pipeline_index(tmp_path) == (
        file,
        {
            "_class_name": "WanModularPipeline",
            "vae": ["diffusers", "AutoencoderKLWan"],
            "scheduler": ["diffusers", "UniPCMultistepScheduler"],
            "is_distilled": True,
        },
    )
    index["vae"][2]["type_hint"] = 5  # no class
    file.write_text(json.dumps(index))
    assert checkpoint.pipeline_index(tmp_path)[1]["vae"] == [None, None]
    (tmp_path / "model_index.json").write_text("{}")
    assert checkpoint.pipeline_index(tmp_path) == (tmp_path / "model_index.json", {})
