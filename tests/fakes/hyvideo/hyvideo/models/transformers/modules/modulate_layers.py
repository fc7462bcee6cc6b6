"""Shift, scale and gate from the timestep."""

from torch import nn


class ModulateDiT(nn.Module):
    """Makes `factor` vectors of a timestep's; all zero at first."""

    def __init__(self, hidden_size, factor, act_layer, dtype=None, device=None):
        super().__init__()
        self.act = act_layer()
        self.linear = nn.Linear(hidden_size, factor * hidden_size, dtype=dtype, device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return self.linear(self.act(x))


def modulate(x, shift=None, scale=None):
    scaled = x if scale is None else x * (scale[:, None] + 1)
    return scaled if shift is None else scaled + shift[:, None]


def apply_gate(x, gate=None, tanh=False):
    if gate is None:
        return x
    return x * (gate.tanh() if tanh else gate)[:, None]
