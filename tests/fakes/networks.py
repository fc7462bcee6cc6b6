"""Small networks, of which a program on a mesh is made."""

import torch


class Halves(torch.nn.Module):
    """Two linear layers whose product is split and joined over `tp`; `scale` is a static argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)
        self.register_buffer("shift", torch.arange(8.0), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0, return_dict: bool = False):
        self.calls += 1
        y = self.down(torch.relu(self.up(x))) * scale + self.shift
        return (y if mask is None else y * mask.to(y.dtype), "the second output")
