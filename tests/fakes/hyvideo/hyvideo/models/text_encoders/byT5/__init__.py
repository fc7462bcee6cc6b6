"""What makes the letters of quoted text tokens of the transformer."""

from torch import nn


class ByT5Mapper(nn.Module):
    """A norm and three linear layers."""

    def __init__(self, in_dim, out_dim, hidden_dim, out_dim1, use_residual=True):
        super().__init__()
        self.layernorm = nn.LayerNorm(in_dim)
        self.fc1 = nn.Linear(in_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, out_dim)
        self.fc3 = nn.Linear(out_dim, out_dim1)
        self.act_fn = nn.GELU()
        self.use_residual = use_residual

    def forward(self, x):
        hidden = self.act_fn(self.fc2(self.act_fn(self.fc1(self.layernorm(x)))))
        return self.fc3(hidden) + x if self.use_residual else self.fc3(hidden)
