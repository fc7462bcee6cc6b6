"""The device that torchax registers with PyTorch, said to be what it is: none that PyTorch's own runtime can use."""

from __future__ import annotations

import types


def not_available(original, device_type, module):
    """Registers a device's module that answers as torchax's, and says that PyTorch finds no such device."""
    registered = types.ModuleType(module.__name__, module.__doc__)
    vars(registered).update(vars(module), is_available=lambda: False, device_count=lambda: 0)
    original(device_type, registered)
