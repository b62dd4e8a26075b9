"""Keeps the buffers of a module equal on all ranks, as DDP does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_zero.engine.collectives import Collectives


class BufferSync:
    """Broadcasts rank 0's buffers at set-up and before forward passes, one message per dtype.

    Like DDP, a forward pass is preceded by a broadcast unless the pass before it ran without
    gradients or without synchronisation (``DistributedDataParallel.require_forward_param_sync``).

    Args:
        module: Whose buffers, persistent or not.
        collectives: How the ranks talk.
        enabled: Whether to broadcast before forward passes; at set-up it is always done.
    """

    def __init__(self, module: nn.Module, collectives: Collectives, enabled: bool) -> None:
        self._module = module
        self._collectives = collectives
        self._enabled = enabled
        self._due = True
        self.broadcast()

    def before_forward(self, syncs: bool) -> None:
        """Broadcast if it is due.

        Args:
            syncs: Whether this pass synchronises, so that the next one begins with a broadcast.
        """
        if self._enabled and self._due:
            self.broadcast()
        self._due = torch.is_grad_enabled() and syncs

    @torch.no_grad()
    def broadcast(self) -> None:
        """Overwrite all buffers with rank 0's."""
        if self._collectives.world_size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._module.buffers():
            if buffer.numel() and buffer.layout is torch.strided:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for dtype, buffers in by_dtype.items():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            self._collectives.broadcast(flat, f"broadcast of {len(buffers)} {dtype} buffers")
            if self._collectives.rank != 0:
                pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
                for buffer, piece in zip(buffers, pieces, strict=True):
                    buffer.copy_(piece.view_as(buffer))
