"""The pipeline: here only what it holds by value, and how it chooses the VAE's tiles."""

import torchvision.transforms as transforms  # noqa: F401

from hyvideo.commons import auto_offload_model, get_gpu_memory, get_rank  # noqa: F401
from hyvideo.commons.parallel_states import get_parallel_state  # noqa: F401
from hyvideo.models.transformers.hunyuanvideo_1_5_transformer import (
    HunyuanVideo_1_5_DiffusionTransformer,  # noqa: F401
)


class HunyuanVideo_1_5_Pipeline:
    """Knows the size and the overlap of the VAE's tiles."""

    @staticmethod
    def get_vae_inference_config(memory_limitation=None):
        memory = get_gpu_memory() if memory_limitation is None else memory_limitation
        large = memory > 21 * 1024**3
        return {"sample_size": 256 if large else 128, "tile_overlap_factor": 0.125 if large else 0.25}
