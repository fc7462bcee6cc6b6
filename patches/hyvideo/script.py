"""What a whole script of Tencent's HunyuanVideo-1.5 needs beside the patches of its networks."""

import torch

CPU = torch.device("cpu")


def created_on_host(original, cls, *args, **kwargs):
    """Returns upstream's pipeline with everything on the host.

    Args:
        original: Upstream's class method.
        cls: The pipeline's class.
        *args: The checkpoint and the variant.
        **kwargs: Their dtype, and two devices, which are CUDA's.
    """
    pipe = original(cls, *args, **{**kwargs, "device": CPU, "transformer_init_device": CPU})
    pipe.execution_device = CPU
    # Upstream writes 1152, its published network's; without an image it makes so many zeros for it.
    pipe.register_to_config(vision_states_dim=pipe.transformer.config.vision_states_dim)
    return pipe
