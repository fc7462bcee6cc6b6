"""The processes among which a sequence is split: a CUDA mesh, made at the first question."""

import os
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


@dataclass
class ParallelDims:
    """Sizes and meshes."""

    sp: int = 1
    world_size: int = -1
    dp_replicate: int = 1

    def __post_init__(self):
        if self.world_size == -1:
            self.world_size = dist.get_world_size() if dist.is_initialized() else int(os.getenv("WORLD_SIZE", "1"))
        self.build_mesh("cuda")

    def build_mesh(self, device_type):
        sizes = [self.world_size // self.sp, self.sp]
        self.world_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=["dp", "sp"])
        sizes = [self.dp_replicate, self.world_size // self.dp_replicate]
        self.fsdp_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=["dp_replicate", "fsdp_shard"])
        self.sp_rank = self.sp_mesh.get_local_rank() if self.sp_enabled else dist.get_rank()
        self.sp_group = self.sp_mesh.get_group() if self.sp_enabled else None
        return self.world_mesh

    @property
    def sp_enabled(self):
        return self.sp > 1

    @property
    def sp_mesh(self):
        return self.world_mesh["sp"]


__parallel_dims = None


def initialize_parallel_state(sp: int = 1, dp_replicate: int = 1):
    global __parallel_dims
    __parallel_dims = ParallelDims(sp=sp, dp_replicate=dp_replicate)
    return __parallel_dims


def get_parallel_state():
    return initialize_parallel_state() if __parallel_dims is None else __parallel_dims
