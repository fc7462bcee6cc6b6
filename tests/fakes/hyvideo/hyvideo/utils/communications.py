"""Collectives of a sequence that is split among processes."""

import torch
import torch.distributed as dist


def all_gather(input_: torch.Tensor, dim: int = 1, group=None):
    parts = [torch.empty_like(input_) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, input_.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def all_to_all_4D(input_, group=None, scatter_dim: int = 2, gather_dim: int = 1):
    outgoing = [part.contiguous() for part in input_.chunk(dist.get_world_size(group), dim=scatter_dim)]
    incoming = [torch.empty_like(part) for part in outgoing]
    dist.all_to_all(incoming, outgoing, group=group)
    return torch.cat(incoming, dim=gather_dim)
