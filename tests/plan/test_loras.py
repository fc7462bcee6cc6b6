"""The LoRA files of a plan: those that are here are checked, and of the others the plan says so."""

import jax
import pytest
import torch
from safetensors.torch import save_file

from torchport import patch
from torchport.compile import network
from torchport.errors import CheckpointForeignError
from torchport.plan import aot, planning
from torchport.task import Request, accept

KEY = "transformer_blocks.0.attn.to_q"


def task_of(file):
    sizes = ("height=64", "width=96", "frames=9")
    sets = (*sizes, f"lora=[{{path: {file}}}]")
    return accept(planning.on_slice(Request("hunyuan", "configs/demo.yaml", overrides=sets), None), dry=True)


def write(file, key, shape):
    rows, columns = shape
    pair = {f"{key}.lora_A.weight": torch.ones(2, columns), f"{key}.lora_B.weight": torch.ones(rows, 2)}
    save_file(pair, file)


def test_a_file_that_is_not_here_is_taken_for_granted_and_the_plan_says_so(tmp_path):
    task = task_of(tmp_path / "absent.safetensors")
    assert aot.unchecked_loras(task) == [f"the LoRA '{tmp_path}/absent.safetensors' fits: the file is not here"]
    assert planning._assumptions(task, True, False)[-1] == aot.unchecked_loras(task)[0]


def test_a_file_that_is_here_is_checked_by_its_header(tmp_path):
    file = tmp_path / "style.safetensors"
    task = task_of(file)
    [stage] = task.stages
    with patch.applied(task.patches([stage]), stage=stage.name):
        shape = network.outline(task, "transformer").state_dict()[f"{KEY}.weight"].shape
        write(file, KEY, shape)
        aot.check_loras(task, stage)
    assert aot.unchecked_loras(task) == []
    write(file, "transformer_blocks.0.attn.to_z", shape)
    with pytest.raises(CheckpointForeignError) as caught, aot.outlined(task, stage, jax.devices()):
        pass
    text = "'transformer_blocks.0.attn.to_z.lora_A.weight' is no layer of 'transformer'."
    assert str(caught.value).startswith(f"{file}: {text}")
