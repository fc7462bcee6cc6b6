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


class Chunks(torch.nn.Module):
    """A causal decoder of chunks of frames: it returns frames, what each of its two layers saw last, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)

    def forward(self, chunk: torch.Tensor, cache: dict | None = None):
        """Chunk [B, T, 8]; the cache has tensors [B, 1, 8], which are zero before the first chunk."""
        empty = torch.zeros(len(chunk), 1, 8, device=chunk.device)
        cache = cache or {"first": empty, "later": (empty, None)}
        x, first = self._layer(self.first, chunk, cache["first"])
        y, second = self._layer(self.second, torch.tanh(x), cache["later"][0])
        return y, {"first": first, "later": (second, None)}, {"norm": y.square().mean()}

    @staticmethod
    def _layer(layer: torch.nn.Module, x: torch.Tensor, last: torch.Tensor):
        before = torch.cat([last, x[:, :-1]], 1)
        return layer(x) + 0.5 * layer(before), x[:, -1:]
