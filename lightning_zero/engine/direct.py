"""Exchange between ranks of one host by copying straight between their memories.

Over sockets each gather costs a CPU rank two copies in the kernel and a second thread to make
them, which is time that its cores do not compute. Linux lets a process copy once, from or to the
memory of another that it may trace (``process_vm_readv`` and ``process_vm_writev``). Everything
goes through gloo instead if a trial at set-up does not succeed on every rank.

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
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_zero.engine.collectives import GlooCollectives, Pending
from lightning_zero.engine.ledger import Holdings
from lightning_zero.engine.mailbox import Mailbox

# Kinds of words.
_SHARD = b"shrd"  # here is my shard
_RECEIPT = b"rcpt"  # I have read your shard
_PLACE = b"plce"  # write your part here
_WRITTEN = b"wrtn"  # I have written my part
_LOAN = b"loan"  # write your gradients here, some time
_GRADIENT = b"grad"  # I have written my gradients

_UNCONFIRMED = 2  # gathers of one shard whose receipts may be outstanding


class _Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class PeerMemory:
    """Copies between this process and another one on the same host."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._read = library.process_vm_readv  # AttributeError where there is no such call
        self._write = library.process_vm_writev
        spans = ctypes.POINTER(_Span)
        count = ctypes.c_ulong
        for call in (self._read, self._write):
            call.restype = ctypes.c_ssize_t
            call.argtypes = [ctypes.c_int, spans, count, spans, count, count]

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
                raise ConnectionError(os.strerror(ctypes.get_errno()))
            here, address, left = here + done, address + done, left - done


class Peers(NamedTuple):
    """The other ranks, all on this host.

    Attributes:
        pids: The process of each rank.
        memory: How to reach their memories.
        mailbox: How to reach their attention.
    """

    pids: list[int]
    memory: PeerMemory
    mailbox: Mailbox


def find_peers(group: ProcessGroup) -> Peers | None:
    """Return the ranks if each can reach the memory of every other, else None.

    Tried by reading a secret of each: process ids mean nothing across hosts and containers.
    """
    rank = dist.get_rank(group)
    secret = torch.tensor([secrets.randbits(62), 0])
    card, mailbox, memory = None, None, None
    with suppress(AttributeError, OSError):  # not on Linux
        memory, mailbox = PeerMemory(), Mailbox(rank)
        card = (os.getpid(), secret.data_ptr(), int(secret[0]), mailbox.address)
    cards: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(cards, card, group=group)
    reached = None not in cards and memory is not None and _reach(memory, cards)
    if not _all_say(reached, cards, group):
        if mailbox is not None:
            mailbox.close()
        return None
    assert memory is not None
    assert mailbox is not None
    try:
        mailbox.connect([address for *_, address in cards], timeout=60.0)
    except OSError:
        reached = False
    if not _all_say(reached, cards, group):
        mailbox.close()
        return None
    return Peers([pid for pid, *_ in cards], memory, mailbox)


def _reach(memory: PeerMemory, cards: list[Any]) -> bool:
    seen = torch.zeros(1, dtype=torch.int64)
    try:
        for pid, address, expected, _ in cards:
            memory.read(pid, address, seen)
            if int(seen) != expected:
                return False
            memory.write(pid, address + 8, seen)
    except ConnectionError:
        return False
    return True


def _all_say(yes: bool, cards: list[Any], group: ProcessGroup) -> bool:
    verdicts: list[Any] = [None] * len(cards)
    dist.all_gather_object(verdicts, yes, group=group)
    return all(verdicts)


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
        peers: What ``find_peers`` has found.
    """

    fills_late = True

    def __init__(
        self, group: ProcessGroup, device: torch.device, stall_timeout: float, peers: Peers
    ) -> None:
        super().__init__(group, device, stall_timeout)
        self._pids, self._memory, self._mailbox = peers
        self._others = [self._partners(distance)[0] for distance in range(1, self.world_size)]
        self._readers: dict[int, list[int]] = {}  # receipts to come: tickets, by shard address
        self._issued: Counter[int] = Counter()
        self._lent: dict[int, Tensor] = {}  # what others write into, by rank

    def reserve(self, shard_nbytes: int) -> None:
        if self._lent:
            return  # addresses that were given away stay valid
        self._lent = {rank: torch.empty(shard_nbytes, dtype=torch.uint8) for rank in self._others}
        self.ledger.note(self)
        for rank in self._others:
            self._lend(rank)

    def holdings(self) -> Holdings:
        return Holdings(transient=sum(lent.nbytes for lent in self._lent.values()))

    def close(self) -> None:
        super().close()
        self._mailbox.close()

    def await_readers(self, shard: Tensor) -> None:
        for ticket in self._readers.pop(shard.data_ptr(), ()):
            self._await_receipt(ticket)

    def _await_receipt(self, ticket: int) -> None:
        for rank in self._others:
            self._ask(rank, _RECEIPT, ticket, "the other ranks to have read a shard")

    def _gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending:
        ticket = self._ticket(tag, label)
        chunks = flat.view(self.world_size, -1)
        if flat.untyped_storage()._cdata == shard.untyped_storage()._cdata:
            return self._gather_in_place(chunks, label, ticket)
        tickets = self._readers.setdefault(shard.data_ptr(), [])
        if len(tickets) == _UNCONFIRMED:  # long passes without a step must not pile receipts up
            self._await_receipt(tickets.pop(0))
        tickets.append(ticket)
        for rank in self._others:
            self._mailbox.send(rank, _SHARD, ticket, shard.data_ptr())

        def finish() -> None:
            chunks[self.rank].copy_(shard)
            for rank in self._others:
                address = self._ask(rank, _SHARD, ticket, label)
                self._copy(self._memory.read, rank, address, chunks[rank], label)
                self._mailbox.send(rank, _RECEIPT, ticket)

        return _DirectPending(finish)

    def _gather_in_place(self, chunks: Tensor, label: str, ticket: int) -> Pending:
        for rank in self._others:
            self._mailbox.send(rank, _PLACE, ticket, chunks[rank].data_ptr())
        for rank in self._others:
            address = self._ask(rank, _PLACE, ticket, label)
            self._copy(self._memory.write, rank, address, chunks[self.rank], label)
            self._mailbox.send(rank, _WRITTEN, ticket)

        def finish() -> None:
            for rank in self._others:
                self._ask(rank, _WRITTEN, ticket, label)

        return _DirectPending(finish)

    def _reduce(
        self, flat: Tensor, out: Tensor, label: str, tag: int, base: Tensor | None
    ) -> Pending:
        chunks = flat.view(self.world_size, -1)
        nbytes = out.numel() * out.element_size()
        if nbytes > min((lent.numel() for lent in self._lent.values()), default=0):
            return super()._reduce(flat, out, label, tag, base)
        ticket = self._ticket(tag, label)
        terms = [chunks[self.rank]] * self.world_size
        for rank in self._others:
            address = self._ask(rank, _LOAN, 0, label)
            self._copy(self._memory.write, rank, address, chunks[rank], label)
            self._mailbox.send(rank, _GRADIENT, ticket)
            terms[rank] = self._lent[rank][:nbytes].view(flat.dtype)

        def finish() -> None:
            for rank in self._others:
                self._ask(rank, _GRADIENT, ticket, label)
            self._average(terms, out, base)
            for rank in self._others:
                self._lend(rank)

        return _DirectPending(finish)

    def _ticket(self, tag: int, label: str) -> int:
        """Number a collective, so that two of one unit under way are not taken for each other."""
        self.monitor.issued(label)
        self._issued[tag] += 1
        return self._issued[tag] << 24 | tag

    def _lend(self, rank: int) -> None:
        self._mailbox.send(rank, _LOAN, 0, self._lent[rank].data_ptr())

    def _ask(self, rank: int, kind: bytes, tag: int, label: str) -> int:
        self.monitor.waits(label)
        started = self.ledger.wait(label)
        try:
            value = self._mailbox.receive(rank, kind, tag, self.monitor.timeout)
        except TimeoutError as reason:
            raise self.monitor.error(label) from reason
        except ConnectionError as reason:
            raise self._gone(rank, label) from reason
        self.ledger.waited_since(started)
        self.monitor.waits(None)
        return value

    def _copy(
        self,
        copy: Callable[[int, int, Tensor], None],
        rank: int,
        address: int,
        tensor: Tensor,
        label: str,
    ) -> None:
        started = self.ledger.wait(label)
        try:
            copy(self._pids[rank], address, tensor)
        except ConnectionError as reason:
            raise self._gone(rank, label) from reason
        self.ledger.waited_since(started)

    @staticmethod
    def _gone(rank: int, label: str) -> RuntimeError:
        return RuntimeError(
            f"Rank {rank} went away while this one waited for {label}; its own output has the "
            "cause."
        )
