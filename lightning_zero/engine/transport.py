"""Chooses how the ranks talk."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_zero.engine.collectives import (
    Collectives,
    GlooCollectives,
    LocalCollectives,
)
from lightning_zero.engine.direct import DirectCollectives, find_peers
from lightning_zero.engine.nccl import NcclCollectives


def collectives_for(
    device: torch.device, group: ProcessGroup | None, stall_timeout: float
) -> Collectives:
    """Choose the way for a device and a process group.

    Args:
        device: Where the parameters live.
        group: The ranks that train together, or None for the default group if there is one.
        stall_timeout: Seconds that a wait may last before it becomes an error.

    Raises:
        ValueError: If the group's backend cannot carry tensors of that device.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or dist.get_world_size(group) == 1:
        return LocalCollectives(device)
    backend = dist.get_backend(group)
    if device.type == "cpu" and "gloo" in backend:
        peers = find_peers(group)
        if peers is not None:
            return DirectCollectives(group, device, stall_timeout, peers)
        return GlooCollectives(group, device, stall_timeout)
    if device.type == "cuda" and "nccl" in backend:
        return NcclCollectives(group, device, stall_timeout)
    raise ValueError(
        f"process_group_backend={backend!r} cannot carry tensors on {device.type!r}: "
        "use 'gloo' with accelerator='cpu' and 'nccl' with accelerator='gpu'."
    )
