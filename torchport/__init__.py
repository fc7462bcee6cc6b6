"""torchport carries PyTorch models written for GPUs onto TPU, without editing the models' own repositories."""

__version__ = "0.1.0"

_LAZY = {
    "applied": "torchport.own_code",
    "arm": "torchport.own_code",
    "port": "torchport.own_code.port",
}


def __getattr__(name: str) -> object:
    """Imports a public name when it is first asked for: `import torchport` alone imports neither torch nor jax."""
    if name not in _LAZY:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
