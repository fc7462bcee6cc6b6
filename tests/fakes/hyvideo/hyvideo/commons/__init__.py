"""What the whole package asks: which attention there is, how much memory, which rank."""

import contextlib
import importlib.util
import os
import warnings

import torch

PIPELINE_CONFIGS = {
    "480p_t2v": {"guidance_scale": 6.0, "embedded_guidance_scale": None, "flow_shift": 5.0},
    "720p_t2v": {"guidance_scale": 6.0, "embedded_guidance_scale": None, "flow_shift": 9.0},
    "720p_i2v": {"guidance_scale": 6.0, "embedded_guidance_scale": None, "flow_shift": 7.0},
}


def to_2tuple(x):
    return tuple(x) if isinstance(x, (tuple, list)) else (x, x)


def is_flash2_available():
    return importlib.util.find_spec("flash_attn") is not None


def is_flash3_available():
    return importlib.util.find_spec("flash_attn_interface") is not None


def is_sparse_attn_available():
    if "nvidia h" not in torch.cuda.get_device_properties(0).name.lower():
        return False
    return importlib.util.find_spec("flex_block_attn") is not None


def maybe_fallback_attn_mode(attn_mode):
    """Returns the mode that is there instead of the one asked for, with a warning at each call."""
    if attn_mode == "flex-block-attn":
        if not is_sparse_attn_available():
            raise ValueError(f"{attn_mode} is not available")
        return attn_mode
    chosen = attn_mode
    if chosen == "sageattn" and importlib.util.find_spec("sageattention") is None:
        chosen = "flash"
    if chosen == "flash":
        chosen = "flash3" if is_flash3_available() else "flash2" if is_flash2_available() else "torch"
    if chosen != attn_mode:
        warnings.warn(f"{attn_mode} is not installed, {chosen} is used", stacklevel=2)
    return chosen


@contextlib.contextmanager
def auto_offload_model(models, device, enabled=True):
    """Has models on a device for the length of a `with`."""
    held = [models] if isinstance(models, torch.nn.Module) else [model for model in models if model is not None]
    for model in held if enabled else ():
        model.to(device)
    yield
    for model in held if enabled else ():
        model.to("cpu")


def get_gpu_memory(device=None):
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device).total_memory


def get_rank():
    return int(os.environ.get("RANK", "0"))
