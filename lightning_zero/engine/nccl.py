"""The way of communicating on GPUs: NCCL, on streams of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_zero.engine.collectives import GroupCollectives, Pending, as_bytes
from lightning_zero.engine.ledger import Ledger
from lightning_zero.engine.observer import Event

# torch 2.13 renamed the collectives of single tensors; 2.11 has the older names only.
_all_gather_single: Callable[..., dist.Work] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., dist.Work] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class _CudaPending(Pending):
    """Ordered by an event: ``wait`` lets the current stream wait, never the host.

    The tensors are kept by reference until then. They were allocated on the compute stream and
    return to it after it has waited, so the allocator reuses their memory in the right order.
    """

    def __init__(
        self,
        done: torch.cuda.Event,
        ledger: Ledger,
        label: str,
        device: torch.device,
        *keep: Tensor,
    ) -> None:
        self._done: torch.cuda.Event | None = done
        self._ledger = ledger
        self._label = label
        self._device = device
        self._keep = keep

    def wait(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            if self._ledger.observer is not None:
                self._ledger.observer.happened(Event.WAIT, label=self._label)
            torch.cuda.current_stream(self._device).wait_event(done)
            self._ledger.tell(Event.WAIT_END)
        self._keep = ()


class NcclCollectives(GroupCollectives):
    """Single-tensor collectives on a gather stream and a reduce stream."""

    def __init__(self, group: ProcessGroup, device: torch.device, stall_timeout: float) -> None:
        super().__init__(group, device, stall_timeout)
        self._gather_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reduce_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending:
        work = partial(_all_gather_single, flat, shard, group=self.gather_group)
        return self._run(self._gather_stream, work, label, flat, shard)

    def _reduce(
        self, flat: Tensor, out: Tensor, label: str, tag: int, base: Tensor | None
    ) -> Pending:
        # Allocated here, on the compute stream, and kept until it has waited.
        scratch = out if base is None else torch.empty_like(out)

        def reduce() -> None:
            _reduce_scatter_single(scratch, flat, group=self.reduce_group)
            scratch.div_(self.world_size)
            if base is not None:
                torch.add(base, scratch, out=out)

        keep = (flat, out, scratch) if base is None else (flat, out, scratch, base)
        pending = self._run(self._reduce_stream, reduce, label, *keep)
        pending.scratch_nbytes = 0 if base is None else scratch.nbytes
        return pending

    def _exchange(self, send: list[Tensor], receive: list[Tensor], label: str) -> Pending:
        work = partial(dist.all_to_all, receive, send, group=self.reduce_group)
        return self._run(self._reduce_stream, work, label, *send, *receive)

    def scatter(self, flat: Tensor | None, out: Tensor, label: str) -> None:
        chunks = None if flat is None else list(flat.view(self.world_size, -1).unbind())

        def scatter() -> None:
            dist.scatter(out, chunks, group=self.gather_group, group_src=0)

        keep = (out,) if flat is None else (out, flat)
        self._run(self._gather_stream, scatter, label, *keep).wait()

    def collect(self, shard: Tensor, label: str) -> Tensor | None:
        flat = shard.new_empty(self.world_size * shard.numel()) if self.rank == 0 else None
        chunks = None if flat is None else list(flat.view(self.world_size, -1).unbind())

        def gather() -> None:
            dist.gather(shard, chunks, group=self.gather_group, group_dst=0)

        self._run(self._gather_stream, gather, label, shard).wait()
        return flat

    def broadcast(self, tensor: Tensor, label: str) -> None:
        work = partial(dist.broadcast, as_bytes(tensor), group=self.gather_group, group_src=0)
        self._run(self._gather_stream, work, label, tensor).wait()

    def sum(self, tensor: Tensor, label: str) -> Pending:
        return self._all_reduce(tensor, dist.ReduceOp.SUM, label)

    def maximum(self, tensor: Tensor, label: str) -> Pending:
        return self._all_reduce(tensor, dist.ReduceOp.MAX, label)

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, label: str) -> Pending:
        work = partial(dist.all_reduce, tensor, op=op, group=self.reduce_group)
        return self._run(self._reduce_stream, work, label, tensor)

    def _run(
        self, stream: torch.cuda.Stream, work: Callable[[], Any], label: str, *keep: Tensor
    ) -> Pending:
        self.monitor.issued(label)
        observer = self.ledger.observer
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            started = None if observer is None else _mark(stream, timed=True)
            work()
            done = _mark(stream, timed=observer is not None)
        if observer is not None:
            observer.moved(label, started, done)
        self.monitor.watch(done.query, label)
        return _CudaPending(done, self.ledger, label, self.device, *keep)


def _mark(stream: torch.cuda.Stream, timed: bool) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
