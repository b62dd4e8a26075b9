"""Whole-parameter ownership, for optimizers that need to see whole parameters.

Every parameter has one owner. For a step the owner borrows the parts of the gradient and of the
master that the other ranks hold, steps on full shapes, and gives the parts of the new values back.
Between steps the shards are the only home of the master; the optimizer's state stays on the owner.

Rejected: masters that live whole on their owners, which would need gathers and checkpoints of a
second kind for what one exchange per step does.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_zero.engine.collectives import Collectives
from lightning_zero.engine.layout import Slice
from lightning_zero.engine.ledger import Holdings
from lightning_zero.engine.parameter import OwnedElsewhere, set_data, set_local_grad
from lightning_zero.engine.slot import ParameterSlot

_PIECE = 64  # bytes; pieces of a buffer start at multiples of it, so that any dtype can view them


def assign(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Choose an owner for each size: the largest first, each to the rank that owns least.

    Args:
        sizes: Bytes of each parameter.
        loads: Bytes that each rank owns already; updated.

    Returns:
        The owner of each. The largest load is at most the mean plus the largest size, if it was
        before.
    """
    owners = [0] * len(sizes)
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, owner = least[0]
        owners[index] = owner
        loads[owner] = load + sizes[index]
        heapq.heapreplace(least, (loads[owner], owner))
    return owners


class Owners:
    """Who owns which parameter of a model, whichever optimizers hold it. Nothing ever moves.

    Args:
        world_size: Number of ranks, N.

    Attributes:
        loads: Bytes that each rank owns.
    """

    def __init__(self, world_size: int) -> None:
        self.loads = [0] * world_size
        self._owners: dict[ParameterSlot, int] = {}

    def add(self, slots: Iterable[ParameterSlot]) -> None:
        """Give an owner to those that have none."""
        new = [slot for slot in dict.fromkeys(slots) if slot not in self._owners]
        sizes = [slot.numel * slot.shard.element_size() for slot in new]
        self._owners.update(zip(new, assign(sizes, self.loads), strict=True))

    def of(self, slot: ParameterSlot) -> int:
        """Say which rank owns a parameter."""
        return self._owners[slot]


class Loan:
    """What the owners borrow for the steps of one optimizer.

    Args:
        owners: Who owns what.
        collectives: How the ranks talk.

    Attributes:
        noted: What the ledger knows of it.
    """

    def __init__(self, owners: Owners, collectives: Collectives) -> None:
        self.noted = Holdings()
        self._nbytes = 0  # of the tensors in full shape
        self._owners = owners
        self._talk = collectives
        self._slots: list[ParameterSlot] = []
        self._parts: dict[ParameterSlot, list[tuple[int, Slice]]] = {}

    @torch.no_grad()
    def take(self, slots: Sequence[ParameterSlot], label: str) -> None:
        """Show each parameter whole, with its gradient, to its owner, and without one to others.

        Args:
            slots: Parameters whose gradients are complete and whose shards may be written to.
            label: Whose step it is, for error messages.
        """
        self._slots = list(slots)
        mine = [slot for slot in slots if self._is_mine(slot)]
        whole = {slot: self._new_values(slot) for slot in mine}
        self._nbytes = sum(tensor.nbytes for tensors in whole.values() for tensor in tensors)
        self._talk.ledger.note(self)
        lent, borrowed = self._nothing(), self._nothing()
        for slot in slots:
            if slot.slice.numel:
                lent[self._owners.of(slot)] += self._lent(slot)
            for full in whole.get(slot, []):
                for rank, piece in self._cut(full, slot):
                    borrowed[rank].append(piece)
        self._exchange(lent, borrowed, f"gradients and parameters for {label}")
        for slot in slots:
            if slot not in whole:
                slot.param.__class__ = OwnedElsewhere
                continue
            grad, *master = whole[slot]
            slot.param.__class__ = nn.Parameter  # exactly: kernels and optimizers look at the type
            set_data(slot.param, master[0] if master else slot.view)
            set_local_grad(slot.param, grad)

    @torch.no_grad()
    def give_back(self, label: str) -> None:
        """Send the new values from the owners into the shards."""
        slots, self._slots = self._slots, []
        given, taken = self._nothing(), self._nothing()
        for slot in slots:
            if self._is_mine(slot):
                for rank, piece in self._cut(_in_order(slot), slot):
                    given[rank].append(piece)
            if slot.slice.numel:
                taken[self._owners.of(slot)].append(slot.shard.data)
        self._exchange(given, taken, f"new parameters of {label}")

    def end(self) -> None:
        """Note that nothing shows the borrowed tensors any more."""
        self._nbytes = 0
        self._talk.ledger.note(self)

    def holdings(self) -> Holdings:
        """Count the bytes that are borrowed now."""
        return Holdings(transient=self._nbytes)

    def _is_mine(self, slot: ParameterSlot) -> bool:
        return self._owners.of(slot) == self._talk.rank

    def _new_values(self, slot: ParameterSlot) -> list[Tensor]:
        """Make the full gradient, and the full master unless the working values are just that."""
        count = 1 if slot.unit.master_is_whole else 2
        return [
            torch.empty_strided(
                slot.shape, slot.stride, dtype=slot.shard.dtype, device=slot.shard.device
            )
            for _ in range(count)
        ]

    @staticmethod
    def _lent(slot: ParameterSlot) -> list[Tensor]:
        """List this rank's parts of what ``_new_values`` makes."""
        assert slot.unit.grad_shard is not None
        grad = slot.in_shard(slot.unit.grad_shard).to(slot.shard.dtype)
        return [grad] if slot.unit.master_is_whole else [grad, slot.shard]

    def _cut(self, full: Tensor, slot: ParameterSlot) -> Iterator[tuple[int, Tensor]]:
        """View each rank's part of a full tensor that has the parameter's strides, 1-D."""
        if slot not in self._parts:
            index, layout = slot.unit.slots.index(slot), slot.unit.layout
            holders = layout.holders_of(index)
            self._parts[slot] = [(rank, layout.slice_of(index, rank)) for rank in holders]
        flat = full.as_strided((slot.numel,), (1,))
        for rank, part in self._parts[slot]:
            yield rank, flat[part.start : part.stop]

    def _nothing(self) -> list[list[Tensor]]:
        return [[] for _ in range(self._talk.world_size)]

    def _exchange(
        self, outgoing: list[list[Tensor]], incoming: list[list[Tensor]], label: str
    ) -> None:
        """Send each rank its pieces, and copy into the others what each rank sends.

        Both are in the order of parameters, so that sender and receiver agree on it.
        """
        rank = self._talk.rank
        _copy(incoming[rank], outgoing[rank])  # its own parts need no buffer
        outgoing[rank], incoming[rank] = [], []
        device = self._talk.device
        send = [_buffer_for(pieces, device) for pieces in outgoing]
        receive = [_buffer_for(pieces, device) for pieces in incoming]
        for buffer, pieces in zip(send, outgoing, strict=True):
            _copy(_places(buffer, pieces), pieces)
        buffers = sum(buffer.nbytes for buffer in (*send, *receive))
        self._talk.ledger.passing(Holdings(transient=buffers))
        self._talk.exchange(send, receive, label).wait()
        for buffer, pieces in zip(receive, incoming, strict=True):
            _copy(pieces, _places(buffer, pieces))


def _in_order(slot: ParameterSlot) -> Tensor:
    """Return a parameter's new values with the strides that it had, even if a step changed them."""
    values = slot.param.data
    if values.shape != slot.shape:
        raise RuntimeError(
            f"The optimizer changed the shape of {slot.name} from {tuple(slot.shape)} to "
            f"{tuple(values.shape)}; its place in the sharded buffers is fixed."
        )
    if values.stride() == slot.stride and values.dtype == slot.shard.dtype:
        return values
    whole = torch.empty_strided(
        slot.shape, slot.stride, dtype=slot.shard.dtype, device=slot.shard.device
    )
    return whole.copy_(values)


def _extent(piece: Tensor) -> int:
    return -(-piece.numel() * piece.element_size() // _PIECE) * _PIECE


def _buffer_for(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.empty(sum(map(_extent, pieces)), dtype=torch.uint8, device=device)


def _places(buffer: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """View the places of 1-D pieces in a buffer, one after the other."""
    places, start = [], 0
    for piece in pieces:
        nbytes = piece.numel() * piece.element_size()
        places.append(buffer[start : start + nbytes].view(piece.dtype))
        start += _extent(piece)
    return places


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for target, piece in zip(to, source, strict=True):
        if target.data_ptr() != piece.data_ptr():  # a parameter that was stepped in place
            target.copy_(piece)
