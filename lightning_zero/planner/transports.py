"""Collectives that send nothing and count everything, for the planner."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.engine.collectives import Collectives, Pending
from lightning_zero.engine.ledger import Holdings


@dataclass(frozen=True, kw_only=True)
class Transport:
    """What a way to talk keeps in memory. Tests hold each against the real one.

    Attributes:
        fills_late: As of ``Collectives``.
        receives: Whether it receives a part from every other rank while under way.
        lends: Whether it has lent such buffers for good.
        adds_base: Whether an average to add to costs room for another one.
    """

    fills_late: bool = False
    receives: bool = False
    lends: bool = False
    adds_base: bool = False


DIRECT = Transport(fills_late=True, lends=True)
"""Between the CPU ranks of one host (``engine/direct.py``)."""
GLOO = Transport(receives=True)
"""Between CPU ranks of several hosts."""
NCCL = Transport(adds_base=True)
"""Between GPUs."""


def transport_for(device: torch.device, num_nodes: int) -> Transport:
    """Choose the way that ``collectives_for`` would choose."""
    if device.type == "cuda":
        return NCCL
    return DIRECT if num_nodes == 1 else GLOO


class _Imagined(Pending):
    def __init__(self, keeps: bool, scratch_nbytes: int) -> None:
        self.holds = keeps
        self.scratch_nbytes = scratch_nbytes

    def wait(self) -> None:
        pass


class ImaginedCollectives(Collectives):
    """Takes part in collectives on the meta device.

    Args:
        rank: As which rank.
        world_size: Number of ranks, N.
        transport: What they would keep in memory.
    """

    def __init__(self, rank: int, world_size: int, transport: Transport) -> None:
        super().__init__(rank, world_size, torch.device("meta"))
        self.fills_late = transport.fills_late and world_size > 1
        self._transport = transport
        self._lent = 0

    def holdings(self) -> Holdings:
        return Holdings(transient=self._lent)

    def reserve(self, shard_nbytes: int) -> None:
        if self._transport.lends:
            self._lent = (self.world_size - 1) * shard_nbytes
            self.ledger.note(self)

    def _gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending:
        return _Imagined(self.world_size > 1, 0)

    def _reduce(
        self, flat: Tensor, out: Tensor, label: str, tag: int, base: Tensor | None
    ) -> Pending:
        if self.world_size == 1:
            return _Imagined(False, 0)
        scratch = 0
        if self._transport.receives:
            scratch = (self.world_size - 1) * out.nbytes
        elif self._transport.adds_base and base is not None:
            scratch = out.nbytes
        return _Imagined(True, scratch)

    def _exchange(self, send: list[Tensor], receive: list[Tensor], label: str) -> Pending:
        return _Imagined(False, 0)

    def scatter(self, flat: Tensor | None, out: Tensor, label: str) -> None:
        pass

    def collect(self, shard: Tensor, label: str) -> Tensor | None:
        return None

    def broadcast(self, tensor: Tensor, label: str) -> None:
        pass

    def sum(self, tensor: Tensor, label: str) -> Pending:
        return _Imagined(False, 0)

    def maximum(self, tensor: Tensor, label: str) -> Pending:
        return _Imagined(False, 0)
