"""Activations by name."""

import functools

from torch import nn


def get_activation_layer(act_type):
    makers = {
        "gelu": nn.GELU,
        "gelu_tanh": functools.partial(nn.GELU, approximate="tanh"),
        "relu": nn.ReLU,
        "silu": nn.SiLU,
    }
    return makers[act_type]
