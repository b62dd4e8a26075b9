"""When units are gathered, released and reduced.

Correctness does not rest on anything here firing in an expected order: whatever needs a unit calls
``use``, which gathers it. Hooks and the recorded order only make that early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd import Variable

from lightning_zero.engine.flat import FlatBuffer, FlatState
from lightning_zero.engine.ledger import Ledger
from lightning_zero.engine.observer import Event
from lightning_zero.engine.slot import ParameterSlot
from lightning_zero.engine.unit import Unit


class Schedule:
    """Drives the units of one module through forward, backward and step.

    Args:
        units: All units, in the order of first use.
        pinned: Units whose working values stay gathered from first use until their backward is
            done.
        prefetch: Whether to gather the next unit of the recorded order early.
        reductions_in_flight: How many reductions may hold their buffers at a time.
        agree_on: Returns rank 0's list on every rank.
        ledger: Knows who watches.

    Attributes:
        blocked: Whether backward passes keep their gradients instead of reducing them.
        rounds: Reductions of the whole model so far, one per backward pass.
        after_round: Called when all reductions of a backward pass are issued.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        pinned: Sequence[Unit],
        prefetch: bool,
        reductions_in_flight: int,
        agree_on: Callable[[list[int]], list[int]],
        ledger: Ledger,
    ) -> None:
        self._ledger = ledger
        self._units = list(units)
        self._pinned = {unit.working for unit in pinned}
        # A unit with half-precision working values has fp32 ones too, gathered on access.
        self._buffers = [buffer for unit in units for buffer in unit.buffers]
        self._prefetch = prefetch
        self._limit = reductions_in_flight
        # The order of reductions is one, whatever order gradients arrive in. Until rank 0 has seen
        # one, the last units are first, and the pinned, whose last gradient comes late, at the end.
        late = [unit for unit in units if unit.working in self._pinned]
        self._reduce_order = [u for u in reversed(self._units) if u not in late] + late
        self._completed: list[Unit] = []
        self._learned = False
        self._agree_on = agree_on
        self._cursor = 0
        self._reducing: deque[Unit] = deque()
        self._reported = False
        self._in_backward = False
        self._surrounded = False
        self._active: list[FlatBuffer] = []  # of entered and not left modules, innermost last
        self._gathered: list[FlatBuffer] = []
        self._recent: FlatBuffer | None = None
        self._kept: FlatBuffer | None = None  # gathered for forward, kept for its backward
        self._lingering: list[
            FlatBuffer
        ] = []  # released, but somebody still looks at their storage
        self._trace: list[FlatBuffer] = []
        self._plans: dict[bool, list[FlatBuffer]] = {}
        self._plan: list[FlatBuffer] = []
        self._prefetch_due = False
        self._held = False
        self.blocked = False
        self.rounds = 0
        self.after_round: Callable[[], None] = lambda: None
        for buffer in self._buffers:
            buffer.use = partial(self.use, buffer)

    # Forward

    def begin_pass(self) -> None:
        """Start a forward pass, and with it a new record of the order of units."""
        if self._in_backward and not self._surrounded:  # it ended with an error
            self._in_backward = False
            self._forget_round()
        self.rest()
        self._active.clear()
        kind = torch.is_grad_enabled()
        self._trace = []
        self._plan = self._plans.get(kind, [])
        self._plans[kind] = self._trace
        for buffer in (unit.working for unit in self._units):
            # Torch's layers take another way in evaluation if a parameter is not an ordinary one.
            if buffer in self._pinned or not (kind or buffer.shards_parameters):
                buffer.use()

    def end_forward(self) -> None:
        """Release what the forward pass has left, but for what its backward needs first."""
        for buffer in self._buffers:
            keeps = buffer in self._pinned or buffer is self._kept
            if buffer.state is FlatState.GATHERING:
                keeps = self._expects(buffer)
            if not (keeps and torch.is_grad_enabled()):
                self._release(buffer)

    def enter(self, units: Sequence[Unit]) -> None:
        """Note that the module of ``units`` begins to run."""
        for unit in units:
            self._active.append(unit.working)
            unit.working.use()

    def leave(self, units: Sequence[Unit]) -> None:
        """Note that the module of ``units`` has run."""
        for buffer in (unit.working for unit in units):
            if buffer in self._active:
                self._active.remove(buffer)
            if self._in_backward or buffer in self._active or buffer in self._pinned:
                continue  # in backward this was a recomputation, whose own backward comes next
            if self._expects(buffer) and buffer.state is FlatState.WORKING:
                self._kept = buffer  # the next to be used is this one again
                self._advance(buffer)
                self._prefetch_next()
            else:
                self._release(buffer)

    def use(self, buffer: FlatBuffer, *others: FlatBuffer) -> None:
        """Make the full values of ``buffer`` present, now.

        Args:
            buffer: A unit, or its half-precision working values.
            others: What must not be released for it.
        """
        if buffer.state is FlatState.WORKING:
            return
        if not buffer.shards_parameters:
            buffer.gather()
            return
        self._advance(buffer)
        self._make_room(others)
        buffer.gather()
        self._gathered.append(buffer)
        self._recent = buffer
        if self._in_backward and buffer.awaits_gradients:
            self._prefetch_due = True  # once the reduction before it has given its memory back
        else:
            self._prefetch_next()

    def rest(self) -> None:
        """Release everything, as before an optimizer step."""
        for buffer in self._buffers:
            self._release(buffer)
        self._free_lingering()
        self._recent = self._kept = None
        self._prefetch_due = False

    def changed(self, units: Collection[Unit]) -> None:
        """Gather what an optimizer step has changed, in the order of forward, without waiting."""
        for unit in self._units:
            if unit in units:
                unit.publish_step()
                if unit.working.is_stale_after_step:
                    unit.working.rest()
                    unit.working.start_gather()

    def _expects(self, buffer: FlatBuffer) -> bool:
        position = len(self._trace)
        return position < len(self._plan) and self._plan[position] is buffer

    def _advance(self, buffer: FlatBuffer) -> None:
        if not self._expects(buffer):
            self._plan = []  # another way than last time: no more guesses until the next pass
        self._trace.append(buffer)

    def _prefetch_next(self) -> None:
        self._prefetch_due = False
        position = len(self._trace)
        if self._prefetch and position < len(self._plan):
            self._plan[position].start_gather()

    def _make_room(self, others: Collection[FlatBuffer]) -> None:
        """Release what code that no hook sees has left gathered, but for the latest of it."""
        self._free_lingering()
        for buffer in list(self._gathered):
            keeps = buffer is self._recent or buffer in self._pinned or buffer in self._active
            if not keeps and buffer not in others:
                self._release(buffer)

    def hold(self) -> None:
        """Gather everything and release nothing until ``let_go``."""
        self._held = True
        for buffer in self._buffers:
            buffer.use()

    def let_go(self) -> None:
        """Release again what is not in use."""
        self._held = False
        self.rest()

    def _release(self, buffer: FlatBuffer) -> None:
        if not buffer.shards_parameters or self._held:
            buffer.keep_writes()
            return
        if buffer.state is FlatState.RESTING:
            return
        buffer.release()
        if buffer in self._gathered:
            self._gathered.remove(buffer)
        if not buffer.free():
            self._lingering.append(buffer)

    def _free_lingering(self) -> None:
        if self._lingering:
            self._lingering = [unit for unit in self._lingering if not unit.free()]

    # Backward

    def note_backward(self) -> None:
        """Learn from inside autograd that a backward pass is under way."""
        if self._in_backward:
            return
        Variable._execution_engine.queue_callback(self._end_backward)
        self._begin_backward()

    def _begin_backward(self) -> None:
        self._in_backward = True
        self._ledger.tell(Event.BACKWARD)
        if self._reported:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._reduce_order:
                unit.missing = sum(slot.param.requires_grad for slot in unit.slots)
                unit.trainable = unit.missing > 0
                if not unit.trainable:
                    unit.drop_grads()

    def report(self, slot: ParameterSlot) -> None:
        """Take the gradient that autograd has just put on a parameter."""
        self.note_backward()
        unit = slot.unit
        if unit.grad_flat is None:
            self._finish_reductions(self._limit - 1)
        unit.take_grad(slot)
        if self._prefetch_due:
            self._prefetch_next()
        if slot.reported:
            return
        slot.reported = self._reported = True
        unit.missing -= 1
        if unit.missing == 0:
            self._completed.append(unit)
            if unit.working not in self._active:
                self._release(unit.working)
            self._reduce_ready()

    def _reduce_ready(self) -> None:
        while self._cursor < len(self._reduce_order):
            unit = self._reduce_order[self._cursor]
            if unit.missing:
                return
            self._reduce(unit)
            self._cursor += 1

    def _reduce(self, unit: Unit) -> None:
        if not unit.trainable or self.blocked:
            return
        self._finish_reductions(self._limit - 1)
        unit.start_reduce()
        self._reducing.append(unit)

    def _finish_reductions(self, keep: int = 0) -> None:
        while len(self._reducing) > keep:
            self._reducing.popleft().finish_reduce()

    def _end_backward(self) -> None:
        if self._surrounded:
            return  # a backward pass inside the one that counts, as a reentrant checkpoint runs
        if self._reported:
            self.complete_round()
        self._in_backward = False
        self.rest()
        self._ledger.tell(Event.BACKWARD_END)

    @contextmanager
    def backward(self) -> Generator[None, None, None]:
        """Surround one backward pass: what it did is complete at the end, and not before.

        Without this, the end of the pass is what autograd takes for it. A rank on which the pass
        finds nothing to do takes part in the reductions all the same.
        """
        if self._surrounded:
            yield
            return
        rounds, self._surrounded = self.rounds, True
        self._begin_backward()
        try:
            yield
        except BaseException:
            self._forget_round()
            raise
        finally:
            self._surrounded = self._in_backward = False
        self._end_backward()
        if self.rounds == rounds and not self.blocked:
            self.complete_round()

    def complete_round(self) -> None:
        """Reduce what this backward pass has not; gradients that it did not produce are zeros."""
        if not self._reported:  # this rank alone had no backward pass
            with torch._C.DisableTorchFunctionSubclass():
                for unit in self._reduce_order:
                    unit.trainable = any(slot.param.requires_grad for slot in unit.slots)
        for unit in self._reduce_order[self._cursor :]:
            self._reduce(unit)
        self.reduce_left()  # a parameter may report again after its unit was reduced
        self._learn_order()
        self._forget_round()
        if not self.blocked:
            self.rounds += 1
            self.after_round()

    def _forget_round(self) -> None:
        self._cursor = 0
        self._reported = False
        self._completed.clear()
        for unit in self._units:
            unit.missing = 0
            for slot in unit.slots:
                slot.reported = False

    def _learn_order(self) -> None:
        """After the first backward pass, take over the order in which rank 0's units were complete.

        The order of registration is a guess; where it is wrong, gradients wait in their buffers.
        """
        order = dict.fromkeys([*self._completed, *self._reduce_order])
        if not self._learned and not self.blocked:
            self._learned = True
            indices = self._agree_on([unit.index for unit in order])
            by_index = {unit.index: unit for unit in self._units}
            self._reduce_order = [by_index[index] for index in indices]

    def reduce_left(self, thawed: Collection[Unit] = ()) -> None:
        """Reduce every unit that holds gradients which no reduction has taken, and ``thawed``."""
        for unit in self._reduce_order:
            if unit in thawed or any(slot.local for slot in unit.slots):
                unit.trainable = True
                self._reduce(unit)

    def finish(self) -> None:
        """Wait for every reduction."""
        self._finish_reductions()
