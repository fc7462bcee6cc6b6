"""One device's view of upstream's parallel state: JAX shards the program, and upstream need not know."""

from torchport.errors import BadValueError


class OneDevice:
    """Stands where a torch DeviceMesh stood: one process, no group, and itself under every name of an axis."""

    def __getitem__(self, name):
        return self

    def get_local_rank(self):
        """Returns this process's rank: 0."""
        return 0

    def get_group(self):
        """Returns None: there is no process group to talk to."""

    def size(self):
        """Returns the number of processes."""
        return 1


def one_device(self, device_type):
    """Fills a ParallelDims as upstream's method would on one GPU, without asking for CUDA.

    Raises:
        BadValueError: Sequence parallelism of upstream's own was asked for; a mesh's `sp` axis takes its place.
    """
    if self.sp != 1:
        raise BadValueError(
            "hyvideo's sequence parallelism", f"'sp' is {self.sp}", "Leave it at 1: the job's mesh shards the program"
        )
    self.dp_replicate = 1
    self.world_mesh = OneDevice()
    self.fsdp_mesh = OneDevice()
    rank = {"sp_rank": 0, "sp_group": None}
    if hasattr(type(self), "sp_rank"):
        # Until January 2026 both were properties without setters, and asked torch.distributed for the rank.
        self.__class__ = type(type(self).__name__, (type(self),), rank)
    else:
        vars(self).update(rank)
    return self.world_mesh


def gpu_memory(device=None):
    """Returns the bytes of a GPU that upstream's published settings are for."""
    return 80 * 2**30


def no_tile_parallelism(self):
    """Leaves the VAE's tiles to one process; the tiles themselves, and their blending, are the same."""
    self._tile_parallelism_enabled = False
