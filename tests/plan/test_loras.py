"""The LoRA files of a plan: those that are here are checked, and of the others the plan says so."""

import jax
import pytest
import torch
from safetensors.torch import save_file

from torchport.errors import CheckpointForeignError
from torchport.plan import aot, loras, plan
from torchport.task import Request, accept

KEY = "transformer_blocks.0.attn.to_q"


def task_of(file):
    sizes = ("height=64", "width=96", "frames=9")
    sets = (*sizes, f"lora=[{{path: {file}}}]")
    return accept(plan.on_slice(Request("hunyuan", "configs/demo.yaml", overrides=sets), None), dry=True)


def outlined(task):
    [stage] = task.stages
    with aot.outlined(task, stage, jax.devices()) as outline:
        return outline.called


def write(file, key, features):
    pair = {f"{key}.lora_A.weight": torch.ones(2, features), f"{key}.lora_B.weight": torch.ones(features, 2)}
    save_file(pair, file)


def test_a_file_that_is_not_here_is_taken_for_granted_and_the_plan_says_so(tmp_path):
    task = task_of(tmp_path / "absent.safetensors")
    assert loras.unchecked(task) == [f"the LoRA '{tmp_path}/absent.safetensors' fits: the file is not here"]
    assert plan._assumptions(task, True)[-1] == loras.unchecked(task)[0]


def test_a_file_that_is_here_is_checked_by_its_header(tmp_path):
    file = tmp_path / "style.safetensors"
    task = task_of(file)
    write(file, KEY, 64)
    features = next(size for size in (32, 64, 128) if _fits(task, file, size))
    write(file, KEY, features)
    assert outlined(task) and loras.unchecked(task) == []
    write(file, "transformer_blocks.0.attn.to_z", features)
    with pytest.raises(CheckpointForeignError) as caught:
        outlined(task)
    assert "'transformer_blocks.0.attn.to_z.lora_A.weight' is no layer of 'transformer'. Did you mean" in str(
        caught.value
    )


def _fits(task, file, features):
    write(file, KEY, features)
    try:
        outlined(task)
    except CheckpointForeignError:
        return False
    return True
