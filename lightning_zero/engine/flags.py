"""What the ranks tell each other once per backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.engine.collectives import Collectives, Pending
from lightning_zero.engine.slot import ParameterSlot


class GradientFlags:
    """One tiny all-reduce per backward pass: who has which gradient, and who came which way.

    A missing gradient counts as zero if any rank has one, and stays None if none has. A rank that
    misses nothing knows the answer without looking, so it need not wait for a GPU.

    The ways are compared because ranks that gather in different orders, or a different number of
    times, could otherwise take each other's old values for new ones.

    Args:
        slots: All parameters.
        collectives: How the ranks talk.
    """

    def __init__(self, slots: Sequence[ParameterSlot], collectives: Collectives) -> None:
        self._slots = list(slots)
        self._collectives = collectives
        self._told: Tensor | None = None
        self._pending: Pending | None = None
        self._trail = 0

    def start(self) -> None:
        """Tell the others which parameters have a gradient here."""
        self.settle()
        self._check_trail()
        if self._collectives.world_size == 1:
            return
        self._trail = self._collectives.trail
        words = [int(slot.has_grad) for slot in self._slots]
        words += [self._trail, -self._trail]  # the maximum of both tells whether all are equal
        told = torch.tensor(words, dtype=torch.int64)
        self._told = told.to(self._collectives.device, non_blocking=True)
        self._pending = self._collectives.maximum(self._told, "exchange of missing gradients")

    def settle(self) -> None:
        """Learn what the others have said, if anything is missing here.

        Raises:
            RuntimeError: If the ranks came different ways. A rank on a GPU looks one pass later,
                when that takes no waiting any more.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        assert self._told is not None
        # Slots of a reduction that is still under way count too: nobody will ask for them again.
        if any(
            not slot.has_grad and (slot.reduced or slot.unit.is_reducing) for slot in self._slots
        ):
            for slot, flag in zip(self._slots, self._told[:-2].tolist(), strict=True):
                slot.has_grad |= bool(flag)
        if self._told.device.type == "cpu":
            self._check_trail()

    def _check_trail(self) -> None:
        told, self._told = self._told, None
        if told is not None and told[-2:].tolist() != [self._trail, -self._trail]:
            raise RuntimeError(
                "The ranks have gathered sharded parameters in different orders or a different "
                "number of times, so their weights cannot be trusted to agree. Something runs on "
                "some ranks only, or differently: a parameter that one rank reads, a branch that "
                "depends on the data, a generation that ends at different lengths. Make all ranks "
                "do the same; ZeroStrategy(eval_weights='gathered') frees evaluation from this; "
                "at stages 1 and 2 no forward pass gathers."
            )
