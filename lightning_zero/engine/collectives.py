"""One interface for the engine's communication, with a gloo way and a lonely way.

A reduction sums and then divides by the number of ranks; ``AVG`` is never used, for gloo's silently
sums. On the CPU the sum is taken in rank order, so that a value does not depend on which rank owns
it; NCCL has an order of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_zero.engine.ledger import Holdings, Ledger
from lightning_zero.engine.stall import StallMonitor, as_timedelta


@dataclass(slots=True)
class Traffic:
    """Bytes that this rank has sent, by kind. Padding is included."""

    gather: int = 0
    reduce: int = 0
    exchange: int = 0


class Pending(ABC):
    """A collective under way. Its tensors must neither be written nor freed before ``wait``.

    Attributes:
        holds: Whether it keeps its tensors until then.
        scratch_nbytes: Bytes of what it has allocated beside them, until then.
    """

    holds = True
    scratch_nbytes = 0

    @abstractmethod
    def wait(self) -> None:
        """Make the result usable by whatever the caller runs next. A second call does nothing."""


class _Done(Pending):
    holds = False

    def wait(self) -> None:
        pass


class Collectives(ABC):
    """What the engine asks of the ranks; each call is made by all of them, in the same order.

    Attributes:
        rank: This rank, from 0.
        world_size: Number of ranks, N.
        device: The device whose tensors travel.
        traffic: Counts what was sent.
        ledger: Counts what this rank holds, and what was done.
        noted: What the ledger knows of the buffers that stay.
        fills_late: Whether the result of a gather needs its storage in ``wait`` only.
        trail: A number that tells by which gathers a rank got here; ranks that took the same way
            through the model have the same.
    """

    fills_late = False

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.traffic = Traffic()
        self.ledger = Ledger()
        self.noted = Holdings()
        self.trail = 0

    def holdings(self) -> Holdings:
        """Count the bytes of the buffers that stay between collectives."""
        return Holdings()

    def gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending:
        """Fill ``flat`` with the shards of all ranks.

        Args:
            flat: Shape ``(N * S,)``, the result.
            shard: Shape ``(S,)``, this rank's part; may be its place in ``flat`` itself.
            label: What is gathered, for error messages.
            tag: A number per unit; ranks that gather different units never take one for another's.
        """
        self.traffic.gather += (self.world_size - 1) * shard.nbytes
        self.ledger.gathers += 1
        self.trail = (self.trail * 1_000_003 + tag + 1) % 2**31
        return self._gather(flat, shard, label, tag)

    def reduce(
        self, flat: Tensor, out: Tensor, label: str, tag: int, base: Tensor | None = None
    ) -> Pending:
        """Average ``flat`` over the ranks and keep this rank's part.

        Args:
            flat: Shape ``(N * S,)``, this rank's contribution. Its values are lost.
            out: Shape ``(S,)``, the result; may be this rank's place in ``flat`` itself.
            label: What is reduced, for error messages.
            tag: As for ``gather``.
            base: Shape ``(S,)``, an average to accumulate onto: on the CPU it is added to every
                rank's contribution before the sum, as DDP does; under NCCL to the new average.
        """
        self.traffic.reduce += (self.world_size - 1) * out.nbytes
        self.ledger.reductions += 1
        return self._reduce(flat, out, label, tag, base)

    def exchange(self, send: list[Tensor], receive: list[Tensor], label: str) -> Pending:
        """Give every rank a buffer of its own.

        Args:
            send: One contiguous 1-D buffer per rank, which may be empty; this rank's is copied.
            receive: One per rank, each as long as what that rank sends here.
            label: What is exchanged, for error messages.
        """
        receive[self.rank].copy_(send[self.rank])
        others = [*send[: self.rank], *send[self.rank + 1 :]]
        self.traffic.exchange += sum(buffer.nbytes for buffer in others)
        return self._exchange(send, receive, label)

    @abstractmethod
    def _gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending: ...

    @abstractmethod
    def _exchange(self, send: list[Tensor], receive: list[Tensor], label: str) -> Pending: ...

    @abstractmethod
    def _reduce(
        self, flat: Tensor, out: Tensor, label: str, tag: int, base: Tensor | None
    ) -> Pending: ...

    @abstractmethod
    def scatter(self, flat: Tensor | None, out: Tensor, label: str) -> None:
        """Give every rank its part of rank 0's ``flat``, which is None on the others."""

    @abstractmethod
    def collect(self, shard: Tensor, label: str) -> Tensor | None:
        """Return the shards of all ranks, concatenated, on rank 0 and None on the others."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, label: str) -> None:
        """Overwrite ``tensor`` with rank 0's."""

    @abstractmethod
    def sum(self, tensor: Tensor, label: str) -> Pending:
        """Replace a small ``tensor`` by its sum over the ranks."""

    @abstractmethod
    def maximum(self, tensor: Tensor, label: str) -> Pending:
        """Replace a small ``tensor`` by its elementwise maximum over the ranks."""

    def reserve(self, shard_nbytes: int) -> None:  # noqa: B027
        """Get ready for reductions whose results have up to ``shard_nbytes`` bytes."""

    def await_readers(self, shard: Tensor) -> None:  # noqa: B027
        """Wait until no other rank reads ``shard``, which was given to ``gather``, any more."""

    def hurry(self) -> None:  # noqa: B027
        """Wait only briefly from now on, since the run has failed."""

    def close(self) -> None:  # noqa: B027
        """Give up the process groups."""


class LocalCollectives(Collectives):
    """One rank: everything is already where it belongs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, 1, device)

    def _gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending:
        if flat.data_ptr() != shard.data_ptr():
            flat.copy_(shard)
        return _Done()

    def _reduce(
        self, flat: Tensor, out: Tensor, label: str, tag: int, base: Tensor | None
    ) -> Pending:
        if base is not None:
            torch.add(base, flat, out=out)
        elif flat.data_ptr() != out.data_ptr():
            out.copy_(flat)
        return _Done()

    def _exchange(self, send: list[Tensor], receive: list[Tensor], label: str) -> Pending:
        return _Done()

    def scatter(self, flat: Tensor | None, out: Tensor, label: str) -> None:
        assert flat is not None
        out.copy_(flat)

    def collect(self, shard: Tensor, label: str) -> Tensor | None:
        return shard

    def broadcast(self, tensor: Tensor, label: str) -> None:
        pass

    def sum(self, tensor: Tensor, label: str) -> Pending:
        return _Done()

    def maximum(self, tensor: Tensor, label: str) -> Pending:
        return _Done()


class GroupCollectives(Collectives):
    """What gloo and NCCL share: groups of the engine's own, and the collectives of small things."""

    def __init__(self, group: ProcessGroup, device: torch.device, stall_timeout: float) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device)
        ranks = dist.get_process_group_ranks(group)
        backend = dist.get_backend(group)
        # Two groups, so that gathers and reductions overlap each other under NCCL. Their own limit
        # comes after ours, which knows more to say.
        limit = as_timedelta(stall_timeout + 30)
        settings: dict[str, Any] = dict(
            ranks=ranks,
            backend=backend,
            timeout=limit,
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        self.gather_group = dist.new_group(**settings)
        self.reduce_group = dist.new_group(**settings)
        store = PrefixStore(f"lightning_zero/{self.gather_group.group_name}", _store_of(group))
        self.monitor = StallMonitor(store, self.rank, self.world_size, stall_timeout)

    def hurry(self) -> None:
        self.monitor.hurry()

    def close(self) -> None:
        self.monitor.stop()
        with suppress(RuntimeError, ValueError):  # the user destroyed the default group before us
            dist.destroy_process_group(self.gather_group)
            dist.destroy_process_group(self.reduce_group)


def _store_of(group: ProcessGroup) -> Store:
    with suppress(AttributeError, RuntimeError):  # torch 2.13 has it, earlier ones do not
        return group.get_group_store()
    return dist.distributed_c10d._get_default_store()


_EXCHANGE = 1 << 20  # a tag that no unit has


def as_bytes(tensor: Tensor) -> Tensor:
    """View a 1-D tensor as bytes: transports then need not know its dtype."""
    return tensor.view(torch.uint8)


class _GlooPending(Pending):
    def __init__(
        self,
        collectives: GlooCollectives,
        works: list[dist.Work],
        label: str,
        finish: Callable[[], None] | None = None,
        scratch_nbytes: int = 0,
    ) -> None:
        self.scratch_nbytes = scratch_nbytes
        self._collectives = collectives
        self._works = works
        self._label = label
        self._finish = finish
        collectives.monitor.issued(label)

    def wait(self) -> None:
        works, self._works = self._works, []
        self._collectives._await(works, self._label)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class GlooCollectives(GroupCollectives):
    """Batched point-to-point exchange: gloo's own gather and reduce-scatter take thrice as long."""

    def _gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending:
        chunks = flat.view(self.world_size, -1)
        own = chunks[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        works = []
        for distance in range(1, self.world_size):
            to, source = self._partners(distance)
            works += [self._send(shard, to, self.gather_group, tag)]
            works += [self._receive(chunks[source], source, self.gather_group, tag)]
        return _GlooPending(self, works, label)

    def _reduce(
        self, flat: Tensor, out: Tensor, label: str, tag: int, base: Tensor | None
    ) -> Pending:
        chunks = flat.view(self.world_size, -1)
        received = flat.new_empty(self.world_size - 1, chunks.shape[1])
        terms = [chunks[self.rank]] * self.world_size
        works = []
        for distance in range(1, self.world_size):
            to, source = self._partners(distance)
            terms[source] = received[distance - 1]
            works += [self._send(chunks[to], to, self.reduce_group, tag)]
            works += [self._receive(terms[source], source, self.reduce_group, tag)]

        def average() -> None:
            self._average(terms, out, base)

        return _GlooPending(self, works, label, average, received.nbytes)

    def _exchange(self, send: list[Tensor], receive: list[Tensor], label: str) -> Pending:
        works = []
        for distance in range(1, self.world_size):
            to, source = self._partners(distance)
            if send[to].numel():  # both sides know the length, so both leave an empty one out
                works += [self._send(send[to], to, self.reduce_group, _EXCHANGE)]
            if receive[source].numel():
                works += [self._receive(receive[source], source, self.reduce_group, _EXCHANGE)]
        return _GlooPending(self, works, label)

    def _average(self, terms: list[Tensor], out: Tensor, base: Tensor | None) -> None:
        """Average one term per rank, in rank order, into ``out``; the terms are lost."""
        if base is not None:
            for term in terms:
                term.add_(base)
        # Summed into a received term, since `out` may be one that is still to be added.
        total = terms[1] if self.rank == 0 else terms[0]
        torch.add(terms[0], terms[1], out=total)
        for term in terms[2:]:
            total.add_(term)
        torch.div(total, self.world_size, out=out)

    def _await(self, works: list[dist.Work], label: str) -> None:
        if not works:
            return
        self.monitor.waits(label)
        started = self.ledger.wait(label)
        for work in works:
            try:
                work.wait(as_timedelta(self.monitor.timeout))
            except RuntimeError as reason:
                if "imed out" in str(reason):
                    raise self.monitor.error(label) from reason
                raise _gone(label, reason) from reason
        self.ledger.waited_since(started)
        self.monitor.waits(None)

    def scatter(self, flat: Tensor | None, out: Tensor, label: str) -> None:
        if flat is None:
            works = [self._receive(out, 0, self.gather_group, 0)]
        else:
            chunks = flat.view(self.world_size, -1)
            others = range(1, self.world_size)
            works = [self._send(chunks[to], to, self.gather_group, 0) for to in others]
            out.copy_(chunks[0])
        _GlooPending(self, works, label).wait()

    def collect(self, shard: Tensor, label: str) -> Tensor | None:
        if self.rank != 0:
            works = [self._send(shard, 0, self.gather_group, 0)]
            _GlooPending(self, works, label).wait()
            return None
        flat = shard.new_empty(self.world_size * shard.numel())
        chunks = flat.view(self.world_size, -1)
        others = range(1, self.world_size)
        works = [self._receive(chunks[source], source, self.gather_group, 0) for source in others]
        chunks[0].copy_(shard)
        _GlooPending(self, works, label).wait()
        return flat

    def broadcast(self, tensor: Tensor, label: str) -> None:
        work = dist.broadcast(as_bytes(tensor), group=self.gather_group, group_src=0, async_op=True)
        _GlooPending(self, [work], label).wait()

    def sum(self, tensor: Tensor, label: str) -> Pending:
        return self._all_reduce(tensor, dist.ReduceOp.SUM, label)

    def maximum(self, tensor: Tensor, label: str) -> Pending:
        return self._all_reduce(tensor, dist.ReduceOp.MAX, label)

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, label: str) -> Pending:
        work = dist.all_reduce(tensor, op=op, group=self.reduce_group, async_op=True)
        return _GlooPending(self, [work], label)

    def _partners(self, distance: int) -> tuple[int, int]:
        return (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size

    @staticmethod
    def _send(tensor: Tensor, to: int, group: ProcessGroup, tag: int) -> dist.Work:
        try:
            work = dist.isend(as_bytes(tensor), group=group, group_dst=to, tag=tag)
        except RuntimeError as reason:
            raise _gone(f"rank {to} to take something", reason) from reason
        assert work is not None
        return work

    @staticmethod
    def _receive(tensor: Tensor, source: int, group: ProcessGroup, tag: int) -> dist.Work:
        try:
            work = dist.irecv(as_bytes(tensor), group=group, group_src=source, tag=tag)
        except RuntimeError as reason:
            raise _gone(f"something of rank {source}", reason) from reason
        assert work is not None
        return work


def _gone(label: str, reason: RuntimeError) -> RuntimeError:
    return RuntimeError(
        f"Another rank went away while this one waited for {label}; its own output has the cause. "
        f"({reason})"
    )
