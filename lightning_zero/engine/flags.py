"""Lets ranks that had no gradient for a parameter learn whether another rank had one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.engine.collectives import Collectives, Pending
from lightning_zero.engine.slot import ParameterSlot


class GradientFlags:
    """One tiny all-reduce per backward pass, read only where a gradient is missing.

    A missing gradient counts as zero if any rank has one, and stays None if none has. A rank that
    misses nothing knows the answer without looking, so it never waits for the device.

    Args:
        slots: All parameters.
        collectives: How the ranks talk.
    """

    def __init__(self, slots: Sequence[ParameterSlot], collectives: Collectives) -> None:
        self._slots = list(slots)
        self._collectives = collectives
        self._flags: Tensor | None = None
        self._pending: Pending | None = None

    def start(self) -> None:
        """Tell the others which parameters have a gradient here."""
        self.settle()
        if self._collectives.world_size == 1:
            return
        flags = torch.tensor([slot.has_grad for slot in self._slots], dtype=torch.uint8)
        self._flags = flags.to(self._collectives.device, non_blocking=True)
        self._pending = self._collectives.maximum(self._flags, "exchange of missing gradients")

    def settle(self) -> None:
        """Learn what the others have said, if anything is missing here."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        assert self._flags is not None
        missing = [slot for slot in self._slots if slot.reduced and not slot.has_grad]
        if missing:
            for slot, flag in zip(self._slots, self._flags.tolist(), strict=True):
                slot.has_grad |= bool(flag)
        self._flags = None
