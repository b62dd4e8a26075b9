"""Exchange between ranks of one host by copying straight between their memories.

A gather over sockets costs a CPU rank two copies in the kernel on either side, and that is time its
cores do not compute. Linux lets a process copy once, from or to the memory of another that it may
trace (``process_vm_readv`` and ``process_vm_writev``). Messages that say where and when still go
through gloo, and so does everything if a trial at set-up does not succeed on every rank.

- Gather of a shard with a storage of its own: the owner sends the shard's address, the reader
  copies from it when it waits and sends a receipt. The owner waits for receipts only before it
  writes to the shard again (``await_readers``).
- Gather of a shard that is a slice of the flat buffer, which user code may write to at any time:
  each rank sends the address where it wants the others' parts, and they write them there at once.
- Reduce: every rank lends each other rank a buffer; the sender writes into it and says so, the
  lender sums and lends it anew. The sender's gradients are free once they are written.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_zero.engine.collectives import GlooCollectives, Pending

_RECEIPT = 1 << 20  # added to a unit's tag


class _Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class PeerMemory:
    """Copies between this process and another one on the same host."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._read = library.process_vm_readv  # AttributeError where there is no such call
        self._write = library.process_vm_writev
        for call in (self._read, self._write):
            call.restype = ctypes.c_ssize_t
            call.argtypes = [
                ctypes.c_int,
                ctypes.POINTER(_Span),
                ctypes.c_ulong,
                ctypes.POINTER(_Span),
                ctypes.c_ulong,
                ctypes.c_ulong,
            ]

    def read(self, pid: int, address: int, into: Tensor) -> None:
        """Fill ``into`` from ``address`` of process ``pid``."""
        self._copy(self._read, pid, address, into)

    def write(self, pid: int, address: int, source: Tensor) -> None:
        """Write ``source`` to ``address`` of process ``pid``."""
        self._copy(self._write, pid, address, source)

    @staticmethod
    def _copy(call: Callable[..., int], pid: int, address: int, tensor: Tensor) -> None:
        here, left = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        while left:
            done = call(pid, _Span(here, left), 1, _Span(address, left), 1, 0)
            if done <= 0:
                code = ctypes.get_errno()
                raise RuntimeError(
                    f"Another rank went away: the memory of its process {pid} cannot be reached "
                    f"({os.strerror(code)}); its own output has the cause."
                )
            here, address, left = here + done, address + done, left - done


def find_peers(group: ProcessGroup) -> list[int] | None:
    """Return the process ids of all ranks if each can reach the memory of every other, else None.

    Tried by reading a secret of each: ids mean nothing across hosts and containers.
    """
    secret = torch.tensor([secrets.randbits(62), 0])
    cards: list[Any] = [None] * dist.get_world_size(group)
    card = (os.getpid(), secret.data_ptr(), int(secret[0]))
    dist.all_gather_object(cards, card, group=group)
    mark = dist.get_rank(group) + 1
    try:
        memory = PeerMemory()
        reached = True
        for rank, (pid, address, expected) in enumerate(cards):
            if rank + 1 != mark:
                seen = torch.zeros(1, dtype=torch.int64)
                memory.read(pid, address, seen)
                reached = reached and int(seen) == expected
                if reached:
                    memory.write(pid, address + 8, torch.tensor([mark]))
    except (AttributeError, OSError, RuntimeError):
        reached = False
    verdicts: list[Any] = [None] * len(cards)
    dist.all_gather_object(verdicts, reached, group=group)  # the secret lives until all have read
    return [pid for pid, _, _ in cards] if all(verdicts) else None


def _word() -> Tensor:
    """Make a message whose arrival says everything."""
    return torch.zeros(1, dtype=torch.uint8)


class _DirectPending(Pending):
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class DirectCollectives(GlooCollectives):
    """Gathers and reduces in one copy between the ranks of one host.

    Args:
        group: As for ``GlooCollectives``.
        device: The CPU.
        stall_timeout: Seconds.
        peers: Process ids of all ranks.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, stall_timeout: float, peers: list[int]
    ) -> None:
        super().__init__(group, device, stall_timeout)
        self._peers = peers
        self._memory = PeerMemory()
        self._readers: dict[int, list[dist.Work]] = {}
        self._lent = torch.empty(0, dtype=torch.uint8)  # (N, bytes): what others write into
        self._loans: dict[int, tuple[dist.Work, Tensor]] = {}  # where to write, by rank
        self._others = [self._partners(d)[0] for d in range(1, self.world_size)]
        self._sent: deque[dist.Work] = deque()

    def _tell(self, word: Tensor, rank: int, group: ProcessGroup, tag: int) -> None:
        """Send a small message without waiting for it."""
        self._sent.append(self._send(word, rank, group, tag))
        # A dropped handle would take its message back.
        while self._sent[0].is_completed() and len(self._sent) > 1:
            self._sent.popleft()

    def reserve(self, shard_nbytes: int) -> None:
        if shard_nbytes <= self._lent.shape[-1] and self._lent.dim() == 2:
            return
        self._lent = torch.empty(self.world_size, shard_nbytes, dtype=torch.uint8)
        for rank in self._others:
            self._expect_loan(rank)
        for rank in self._others:
            self._lend(rank)

    def _lend(self, rank: int) -> None:
        address = torch.tensor([self._lent[rank].data_ptr()])
        self._tell(address, rank, self.reduce_group, _RECEIPT)

    def _expect_loan(self, rank: int) -> None:
        address = torch.empty(1, dtype=torch.int64)
        work = self._receive(address, rank, self.reduce_group, _RECEIPT)
        self._loans[rank] = (work, address)

    def _gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending:
        self.monitor.issued(label)
        chunks = flat.view(self.world_size, -1)
        own = chunks[self.rank]
        if own.data_ptr() == shard.data_ptr():
            return self._gather_in_place(chunks, label, tag)
        own.copy_(shard)
        group = self.gather_group
        receipts = self._readers.setdefault(shard.data_ptr(), [])
        arrivals = []
        for rank in self._others:
            there = torch.empty(1, dtype=torch.int64)
            arrivals.append((rank, there, self._receive(there, rank, group, tag)))
            receipts.append(self._receive(_word(), rank, group, tag + _RECEIPT))
            self._tell(torch.tensor([shard.data_ptr()]), rank, group, tag)

        def finish() -> None:
            for rank, there, work in arrivals:
                self._await([work], label)
                self._memory.read(self._peers[rank], int(there), chunks[rank])
                self._tell(_word(), rank, group, tag + _RECEIPT)

        return _DirectPending(finish)

    def _gather_in_place(self, chunks: Tensor, label: str, tag: int) -> Pending:
        group = self.gather_group
        places, receipts = [], []
        for rank in self._others:
            there = torch.empty(1, dtype=torch.int64)
            places.append((rank, there, self._receive(there, rank, group, tag)))
            receipts.append(self._receive(_word(), rank, group, tag + _RECEIPT))
            self._tell(torch.tensor([chunks[rank].data_ptr()]), rank, group, tag)
        for rank, there, work in places:
            self._await([work], label)
            self._memory.write(self._peers[rank], int(there), chunks[self.rank])
            self._tell(_word(), rank, group, tag + _RECEIPT)
        return _DirectPending(lambda: self._await(receipts, label))

    def await_readers(self, shard: Tensor) -> None:
        works = self._readers.pop(shard.data_ptr(), None)
        if works:
            self._await(works, "the other ranks to have read a shard")

    def _reduce(
        self, flat: Tensor, out: Tensor, label: str, tag: int, base: Tensor | None
    ) -> Pending:
        chunks = flat.view(self.world_size, -1)
        nbytes = out.numel() * out.element_size()
        self.reserve(nbytes)
        self.monitor.issued(label)
        terms = [chunks[self.rank]] * self.world_size
        arrivals = []
        for rank in self._others:
            arrivals.append(self._receive(_word(), rank, self.reduce_group, tag))
            terms[rank] = self._lent[rank, :nbytes].view(flat.dtype)
        for rank in self._others:
            work, address = self._loans.pop(rank)
            self._await([work], label)
            self._memory.write(self._peers[rank], int(address), chunks[rank])
            self._expect_loan(rank)
            self._tell(_word(), rank, self.reduce_group, tag)

        def finish() -> None:
            self._await(arrivals, label)
            self._average(terms, out, base)
            for rank in self._others:
                self._lend(rank)

        return _DirectPending(finish)
