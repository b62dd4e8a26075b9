"""A few training steps with the engine's own units and schedule, on the meta device.

Nothing is computed and nothing is sent, but every buffer is made, gathered, reduced and freed by
the code that will do it in the run, and counted by the same ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn, optim

from lightning_zero.engine.division import Division, defers_reductions, reductions_in_flight
from lightning_zero.engine.kinds import OptimizerSharding, combining, needs_whole
from lightning_zero.engine.layout import FlatLayout
from lightning_zero.engine.ledger import Holdings
from lightning_zero.engine.numerics import Numerics
from lightning_zero.engine.optimizer import ShardedOptimizer
from lightning_zero.engine.ownership import Owners
from lightning_zero.engine.parameter import set_local_grad
from lightning_zero.engine.probe import examine
from lightning_zero.engine.schedule import Schedule
from lightning_zero.engine.slot import ParameterSlot
from lightning_zero.engine.unit import Unit
from lightning_zero.planner.blueprint import Blueprint
from lightning_zero.planner.states import Pieces
from lightning_zero.planner.transports import ImaginedCollectives, Transport

_STEPS = (
    3  # the first makes the state and learns the order, the second is the first like all others
)
_MICRO_BATCHES = 3  # a first, one like all in the middle, and a last


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends.

    Attributes:
        gather: For gathers.
        reduce: For reductions.
        exchange: Between the owners of whole parameters.
    """

    gather: int
    reduce: int
    exchange: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.gather + self.reduce + self.exchange


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal has shown of one rank.

    Attributes:
        at_peak: Bytes by kind at the worst moment.
        sent: In one step.
        units: How many units there are.
        largest: Bytes of the working values of the largest.
        checkpoint: Bytes of this rank's part of a sharded checkpoint, buffers of the module aside.
        whole_checkpoint: Bytes of masters and optimizer state of all ranks.
    """

    at_peak: Holdings
    sent: Sent
    units: int
    largest: int
    checkpoint: int
    whole_checkpoint: int


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a rehearsal depends on beside the module and its division.

    Attributes:
        world_size: Number of ranks, N.
        device: Where the run will be.
        transport: How the ranks will talk.
        numerics: The dtypes.
        prefetch: As of ``ZeroStrategy``.
        whole: The optimizers that step on whole parameters, by identity.
        reduce_every_backward: As of ``ZeroStrategy``.
        micro_batches: Backward passes per step.
    """

    world_size: int
    device: torch.device
    transport: Transport
    numerics: Numerics
    prefetch: bool
    whole: frozenset[int]
    reduce_every_backward: bool
    micro_batches: int


def whole_steppers(
    optimizers: Iterable[optim.Optimizer], sharding: OptimizerSharding
) -> frozenset[int]:
    """Find the optimizers that step on whole parameters, by identity.

    Raises:
        NotImplementedError: If one cannot be sharded.
    """
    found = [optimizer for optimizer in optimizers if needs_whole(optimizer, sharding)]
    for optimizer in found:
        if examine(optimizer).combines:
            raise combining(optimizer)
    return frozenset(map(id, found))


def rehearse(blueprint: Blueprint, division: Division, conditions: Conditions) -> Rehearsed:
    """Run some steps and count; the module is as before afterwards."""
    rehearsal = _Rehearsal(blueprint, division, conditions, rank=0)
    try:
        fullest = rehearsal.fullest_rank()
        if fullest != 0:
            rehearsal.end()
            rehearsal = _Rehearsal(blueprint, division, conditions, fullest)
        return rehearsal.run()
    finally:
        rehearsal.end()


class _Rehearsal:
    def __init__(
        self, blueprint: Blueprint, division: Division, conditions: Conditions, rank: int
    ) -> None:
        self._blueprint = blueprint
        self._division = division
        self._conditions = conditions
        self._talk = ImaginedCollectives(rank, conditions.world_size, conditions.transport)
        with torch.no_grad():
            self._units = [
                Unit(plan, index, division.placement, conditions.numerics, self._talk)
                for index, plan in enumerate(division.plans)
            ]
        reduced = (unit.reduced_nbytes for unit in self._units if unit.is_trainable)
        self._talk.reserve(max(reduced, default=0))
        pinned = [self._units[index] for index in division.pinned]
        in_flight = reductions_in_flight(conditions.device)
        self._schedule = Schedule(
            self._units, pinned, conditions.prefetch, in_flight, list, self._talk.ledger
        )
        self._slots = {id(slot.param): slot for unit in self._units for slot in unit.slots}
        self._reported = _in_order_of_backward(division.root, self._slots)
        self._sharded: list[ShardedOptimizer] = []
        self._owning: list[_Owning] = []
        self._owners = Owners(conditions.world_size)
        for optimizer in blueprint.optimizers:
            if id(optimizer) in conditions.whole:
                self._owning.append(_Owning(optimizer, self._owners, self._slots))
            else:
                common = (optimizer, self._slots, self._schedule, self._finish_gradients)
                self._sharded.append(ShardedOptimizer(*common, self._talk.ledger))

    def fullest_rank(self) -> int:
        """Find the rank with most optimizer state; in all else the ranks are alike."""
        loads = torch.zeros(self._conditions.world_size, dtype=torch.int64)
        states = self._blueprint.states
        stepped = {slot for sharded in self._sharded for slot in sharded.slots()}
        for unit in self._units:
            widths = [
                _state_width(states.get(id(slot.param), {}), slot) if slot in stepped else 0
                for slot in unit.slots
            ]
            loads += _spread(unit.layout, widths)
        for owning in self._owning:
            for slot in owning.slots:
                loads[self._owners.of(slot)] += _state_nbytes(states, slot)
        return int(loads.argmax())

    def run(self) -> Rehearsed:
        traffic = self._talk.traffic
        sent = Sent(0, 0, 0)
        for _ in range(_STEPS):
            before = Sent(traffic.gather, traffic.reduce, traffic.exchange)
            self._step()
            sent = Sent(
                traffic.gather - before.gather,
                traffic.reduce - before.reduce,
                traffic.exchange - before.exchange,
            )
        return Rehearsed(
            at_peak=self._talk.ledger.at_peak,
            sent=self._extrapolated(sent),
            units=len(self._units),
            largest=max((unit.working.flat_nbytes for unit in self._units), default=0),
            checkpoint=sum(unit.master.nbytes for unit in self._units)
            + self._talk.ledger.held.optimizer,
            whole_checkpoint=self._whole_nbytes(),
        )

    def end(self) -> None:
        self._schedule.rest()
        for sharded in self._sharded:
            sharded.detach()
            sharded.optimizer.state.clear()
        for unit in self._units:
            unit.clear_grads()
            unit.restore(torch.device("meta"))

    # A step

    def _step(self) -> None:
        passes = min(self._conditions.micro_batches, _MICRO_BATCHES)
        placement = self._division.placement
        defers = defers_reductions(placement, self._conditions.reduce_every_backward)
        for number in range(passes):
            before = self._talk.traffic.gather, self._talk.traffic.reduce
            self._schedule.blocked = defers and number < passes - 1
            self._forward()
            if number == 0:
                for slot in self._slots.values():  # as `zero_grad` does, which looks first
                    if slot.read_grad() is not None:
                        slot.write_grad(None)
            self._backward()
            after = self._talk.traffic.gather, self._talk.traffic.reduce
            if number == _MICRO_BATCHES - 2:
                self._middle = after[0] - before[0], after[1] - before[1]
        self._update()

    def _extrapolated(self, sent: Sent) -> Sent:
        """Add the micro-batches that were not rehearsed."""
        more = self._conditions.micro_batches - _MICRO_BATCHES
        if more <= 0:
            return sent
        gather, reduce = self._middle
        return Sent(sent.gather + more * gather, sent.reduce + more * reduce, sent.exchange)

    def _forward(self) -> None:
        self._schedule.begin_pass()
        modules: dict[nn.Module, list[Unit]] = {}
        for plan, unit in zip(self._division.plans, self._units, strict=True):
            if plan.module is None or plan.module is self._division.root:
                unit.working.use()
            else:
                modules.setdefault(plan.module, []).append(unit)
        for units in modules.values():
            self._schedule.enter(units)
            self._schedule.leave(units)
        self._schedule.end_forward()

    def _backward(self) -> None:
        with self._schedule.backward():
            for slot, is_read in self._reported:
                if is_read:
                    slot.unit.working.use()
                if slot.param.requires_grad:
                    grad = torch.empty_strided(
                        slot.shape, slot.stride, dtype=slot.unit.dtype, device="meta"
                    )
                    set_local_grad(slot.param, grad)
                    self._schedule.report(slot)

    def _update(self) -> None:
        for sharded in self._sharded:
            self._finish_gradients()
            self._schedule.rest()
            sharded.show_parts()
            for slot in dict.fromkeys(sharded.slots()):
                if slot.has_grad:
                    pieces = self._blueprint.states.get(id(slot.param), {})
                    sharded.optimizer.state[slot.param] = _sharded_state(pieces, slot)
            sharded.count_state()
            sharded.keep_parts()
            self._schedule.changed(sharded.show_whole())
        for owning in self._owning:
            self._finish_gradients()
            self._schedule.rest()
            owning.borrow(self._talk)
            owning.noted_state(self._blueprint.states, self._talk)
            self._schedule.changed({slot.unit for slot in owning.slots})

    def _finish_gradients(self) -> None:
        self._schedule.finish()
        for unit in self._units:
            unit.complete_grads()

    def _whole_nbytes(self) -> int:
        masters = sum(slot.numel * slot.shard.element_size() for slot in self._slots.values())
        states = self._blueprint.states
        return masters + sum(_state_nbytes(states, slot) for slot in self._slots.values())


class _Owning:
    """What an optimizer on whole parameters does to memory and traffic, by arithmetic.

    Attributes:
        slots: Its parameters.
        noted: What the ledger knows of the state.
    """

    def __init__(
        self, optimizer: optim.Optimizer, owners: Owners, slots: dict[int, ParameterSlot]
    ) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.slots = list(dict.fromkeys(slots[id(p)] for p in params if p.requires_grad))
        self.noted = Holdings()
        self._owners = owners
        self._state = 0
        owners.add(self.slots)
        units = dict.fromkeys(slot.unit for slot in self.slots)
        self._indices = {slot: index for unit in units for index, slot in enumerate(unit.slots)}

    def holdings(self) -> Holdings:
        return Holdings(optimizer=self._state)

    def noted_state(self, states: dict[int, Pieces], talk: ImaginedCollectives) -> None:
        """Let the ledger know of the state that this rank keeps."""
        self._state = sum(_state_nbytes(states, slot) for slot in self._mine(talk.rank))
        talk.ledger.note(self)

    def borrow(self, talk: ImaginedCollectives) -> None:
        """Count what ``Loan.take`` and ``Loan.give_back`` send and hold."""
        mine = set(self._mine(talk.rank))
        whole = sent = received = returned = 0
        for slot in self.slots:
            size = slot.shard.element_size()
            nbytes = slot.numel * size
            layout = slot.unit.layout
            part = size * layout.slice_of(self._indices[slot], talk.rank).numel
            times = 1 if slot.unit.master_is_whole else 2
            if slot in mine:
                whole += times * nbytes
                received += times * (nbytes - part)
                returned += nbytes - part
            else:
                sent += times * part
        talk.ledger.passing(Holdings(transient=whole + sent + received))
        talk.traffic.exchange += sent + returned

    def _mine(self, rank: int) -> Iterable[ParameterSlot]:
        return (slot for slot in self.slots if self._owners.of(slot) == rank)


def _state_nbytes(states: dict[int, Pieces], slot: ParameterSlot) -> int:
    pieces = states.get(id(slot.param), {}).values()
    return sum(piece.numel * slot.state_dtype(piece.dtype).itemsize for piece in pieces)


def _state_width(pieces: Pieces, slot: ParameterSlot) -> int:
    """Count the bytes of state per element."""
    return sum(slot.state_dtype(p.dtype).itemsize for p in pieces.values() if p.shaped)


def _spread(layout: FlatLayout, widths: Sequence[int]) -> torch.Tensor:
    """Say how many bytes lie in the shard of each rank.

    Args:
        layout: Where the parameters lie.
        widths: Bytes per element, of each parameter.

    Returns:
        Shape ``(N,)``, int64.
    """
    offsets, numels, each = (
        torch.tensor(values, dtype=torch.int64)
        for values in (layout.offsets, layout.numels, widths)
    )
    before = (numels * each).cumsum(0) - numels * each
    edges = torch.arange(layout.world_size + 1) * layout.shard_numel
    last = torch.searchsorted(offsets, edges, right=True) - 1
    inside = torch.minimum(edges - offsets[last], numels[last])
    return (before[last] + inside * each[last]).diff()


def _sharded_state(pieces: Pieces, slot: ParameterSlot) -> dict[str, torch.Tensor]:
    return {
        key: torch.empty(
            slot.slice.numel if piece.shaped else piece.numel,
            dtype=slot.state_dtype(piece.dtype),
            device="meta",
        )
        for key, piece in pieces.items()
    }


def _in_order_of_backward(
    root: nn.Module, slots: dict[int, ParameterSlot]
) -> Sequence[tuple[ParameterSlot, bool]]:
    """List the parameters from the last to the first, each with whether backward reads it."""
    found: dict[int, bool] = {}
    for module in root.modules():
        looks_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        own = list(module.parameters(recurse=False))
        # Backward of a product reports the bias before the weight, that of a norm after it.
        for param in own if any(p.dim() > 1 for p in own) else reversed(own):
            found[id(param)] = found.get(id(param), False) or not looks_up
    return [(slots[key], is_read) for key, is_read in reversed(found.items())]
