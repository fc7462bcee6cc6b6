"""Small modules, of diffusers' kind and plain ones, for what no shipped model has."""

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config


class Mixed(ModelMixin, ConfigMixin):
    """Keeps one part in float32, computes one buffer itself, and has an integer buffer in its files."""

    _keep_in_fp32_modules = ["norm"]

    @register_to_config
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(width, width)
        self.norm = torch.nn.LayerNorm(width)
        self.normal = torch.nn.Linear(width, 1)
        self.register_buffer("count", torch.tensor([3]))
        self.register_buffer("table", torch.arange(width) / 10, persistent=False)


class Forgetful(ModelMixin, ConfigMixin):
    """Leaves a buffer without storage, as some rotary tables are after a construction on meta."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(2, 2)
        self.register_buffer("inv_freq", torch.empty(4, device="meta"), persistent=False)


class Plain(torch.nn.Module):
    """No class of diffusers. It reads a value of what it computes, as constructors do."""

    def __init__(self, dim, scale=2.0, **more) -> None:
        super().__init__()
        self.a = torch.nn.Linear(dim, dim)
        self.factor = torch.full((1,), scale).item()
        self.table = torch.arange(dim)
        self.register_buffer("shift", torch.arange(float(dim)))


class Layers(torch.nn.Module):
    """A network's layers as LoRA files find them: a block with matrices and a norm, and a convolution before it."""

    def __init__(self, dim=4) -> None:
        super().__init__()
        self.patch = torch.nn.Conv3d(2, dim, (1, 2, 2))
        self.blocks = torch.nn.ModuleList([torch.nn.Module() for _ in range(2)])
        for block in self.blocks:
            block.to_q, block.norm, block.to_out = (
                torch.nn.Linear(dim, 6),
                torch.nn.LayerNorm(6),
                torch.nn.Linear(6, dim),
            )
        self.table = torch.nn.Parameter(torch.zeros(2, dim))
