"""What this rank's engine holds and has done: numbers that are always up to date.

Nothing here is estimated. Whatever holds memory for the engine (a ``Holder``) says how many bytes
it holds at this moment, read from the tensors and storages that exist; the ledger takes over the
difference to what the holder said last. So the sum cannot drift, whatever happened in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import add
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_zero.engine.observer import Event, Observer


class Holdings(NamedTuple):
    """Bytes by kind.

    Attributes:
        parameters: Values of parameters that are there all the time: whole at stages 1 and 2, this
            rank's shard at stage 3. Without wider masters the optimizer updates these.
        masters: Shards in a wider dtype than the working values'.
        gradients: This rank's gradients, the averages of its part, and what reductions need while
            they are under way.
        optimizer: The optimizers' state.
        transient: Values that come and go: gathered at stage 3, borrowed for the step of an
            optimizer that needs whole parameters; and the buffers through which ranks of one host
            exchange gradients.
    """

    parameters: int = 0
    masters: int = 0
    gradients: int = 0
    optimizer: int = 0
    transient: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self)


_KINDS = range(len(Holdings._fields))


class Holder(Protocol):
    """Something that holds memory for the engine.

    Attributes:
        noted: What it held when the ledger last asked.
    """

    noted: Holdings

    def holdings(self) -> Holdings:
        """Count the bytes that it holds now, in a time that depends on no size."""
        ...


class Ledger:
    """Bytes held by this rank, now and at the worst moment, and what moved.

    Counted is what the engine allocates. Activations, buffers of the module, batches, the gradient
    that autograd has not handed over yet and what single operations need within themselves are not;
    nor are the buffers that NCCL allocates for itself and what an allocator keeps in reserve.

    Attributes:
        total: Bytes of all kinds, now.
        peak: The largest total since ``reset_peak``.
        at_peak: Bytes by kind at that moment.
        gathers: Flat buffers whose full values were gathered.
        reductions: Flat buffers whose gradients were reduced.
        observer: Told of everything, if there is one.
        waited: Seconds that the training thread stood still for other ranks, or copied from and to
            their memory. On a GPU, where the host never waits, it stays 0.
    """

    def __init__(self) -> None:
        self._now = [0] * len(_KINDS)
        self.total = 0
        self.peak = 0
        self.at_peak = Holdings()
        self.gathers = 0
        self.reductions = 0
        self.waited = 0.0
        self.observer: Observer | None = None

    @property
    def held(self) -> Holdings:
        """Bytes by kind, now."""
        return Holdings(*self._now)

    def note(self, holder: Holder) -> None:
        """Take over what a holder holds now; to be called after whatever may have changed it."""
        self._replace(holder, holder.holdings())

    def forget(self, holder: Holder) -> None:
        """Take out what a holder held, since it is given up."""
        self._replace(holder, Holdings())

    def _replace(self, holder: Holder, new: Holdings) -> None:
        old = holder.noted
        if new == old:
            return
        holder.noted = new
        now, total = self._now, self.total
        for kind in _KINDS:
            change = new[kind] - old[kind]
            if change:
                now[kind] += change
                total += change
        self.total = total
        if total > self.peak:
            self.peak, self.at_peak = total, Holdings(*now)
        if self.observer is not None:
            self.observer.held(holder, Holdings(*now))

    def tell(self, event: Event) -> None:
        """Tell whoever watches of an event of the whole rank."""
        if self.observer is not None:
            self.observer.happened(event)

    def wait(self, label: str) -> float:
        """Note that this rank begins to wait for others; ``waited_since`` ends it.

        Returns:
            The time of ``time.perf_counter``, in seconds.
        """
        if self.observer is not None:
            self.observer.happened(Event.WAIT, label=label)
        return perf_counter()

    def waited_since(self, started: float) -> None:
        """Note that the wait is over."""
        self.waited += perf_counter() - started
        if self.observer is not None:
            self.observer.happened(Event.WAIT_END)

    def passing(self, more: Holdings) -> None:
        """Note bytes beside those of all holders, which are gone again in a moment."""
        total = self.total + sum(more)
        if total > self.peak:
            self.peak, self.at_peak = total, Holdings(*map(add, self.held, more))

    def reset_peak(self) -> None:
        """Forget the worst moment so far."""
        self.peak, self.at_peak = self.total, self.held

    def recall_peak(self, peak: int, at_peak: Holdings) -> None:
        """Go back to the worst moment before ``reset_peak``, unless there was a worse one since."""
        if peak > self.peak:
            self.peak, self.at_peak = peak, at_peak


def distinct_nbytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of the storages behind some tensors, each storage once.

    Of a tensor that wraps others, as the 8-bit state of torchao does, those others are counted.
    Layouts that have neither parts nor a storage count as nothing.
    """
    storages = {
        storage._cdata: storage
        for storage in (part.untyped_storage() for tensor in tensors for part in _parts(tensor))
    }
    return sum(storage.nbytes() for storage in storages.values())


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _parts(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is torch.strided:
        yield tensor
