"""The engine: trains one module sharded over the ranks of a process group. Knows torch only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed import ProcessGroup

from lightning_zero.engine import clipping
from lightning_zero.engine.buffers import BufferSync
from lightning_zero.engine.checks import check_module, same_on_all_ranks
from lightning_zero.engine.collectives import Collectives
from lightning_zero.engine.division import defers_reductions, divide, reductions_in_flight
from lightning_zero.engine.flags import GradientFlags
from lightning_zero.engine.kinds import OptimizerSharding, combining, needs_whole
from lightning_zero.engine.ledger import Ledger
from lightning_zero.engine.numerics import Numerics
from lightning_zero.engine.observer import Event
from lightning_zero.engine.optimizer import OwningOptimizer, ShardedOptimizer
from lightning_zero.engine.ownership import Owners
from lightning_zero.engine.placement import Placement, StagePlacement, placement_of
from lightning_zero.engine.probe import Findings, examine
from lightning_zero.engine.saved import SavedParameters
from lightning_zero.engine.schedule import Schedule
from lightning_zero.engine.slot import ParameterSlot
from lightning_zero.engine.summary import first_line
from lightning_zero.engine.transport import collectives_for
from lightning_zero.engine.unit import Unit
from lightning_zero.engine.units import UnitPlan, WrapPolicy, plan_units

_log = logging.getLogger("lightning_zero")


class ZeroEngine:
    """Shards a module in place and keeps it trainable as if it were whole.

    ```python
    engine = ZeroEngine(module, stage=3)
    optimizer = torch.optim.AdamW(module.parameters())
    engine.attach(optimizer)
    for batch in loader:
        with engine.forward():
            loss = module(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    engine.restore()
    ```

    Every rank makes the same calls. Rank 0's parameters and buffers replace those of the others.

    Args:
        module: The module; its parameter objects stay the same for the whole run.
        stage: 1, 2 or 3.
        device: Where to train; parameters may be there or on the CPU. Default: where they are.
        group: The ranks. Default: the default process group; none means one rank.
        auto_wrap_policy: The units of stage 3, see ``plan_units``.
        bucket_mb: Megabytes (2**20 bytes) of parameters per unit at stages 1 and 2.
        prefetch: Whether to gather the next unit while the one before it computes.
        broadcast_buffers: Whether rank 0's buffers replace the others' before forward passes.
        stall_timeout: Seconds that a wait for other ranks may last before it becomes an error.
        optimizer_sharding: ``"auto"`` lets optimizers that are known to be elementwise step on
            shards and every other one on whole parameters, each on the rank that owns it;
            ``"elementwise"`` and ``"whole"`` choose one of the two for all.
        reduce_every_backward: Whether a backward pass inside ``no_sync`` reduces at stages 2 and 3,
            which keeps gradients sharded; otherwise they are kept whole until the last one.
        numerics: Dtypes other than the parameters' own.

    Attributes:
        units: The units, in the order of registration.
        collectives: How the ranks talk, with its count of traffic.
        live: Whether the module is sharded; False after ``restore`` and ``abandon``.
        abandoned: Whether the run ended with an error.

    Raises:
        ValueError: If an argument or a parameter cannot be used; the message says which and why.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stage: int = 3,
        device: torch.device | None = None,
        group: ProcessGroup | None = None,
        auto_wrap_policy: WrapPolicy = "auto",
        bucket_mb: float = 25.0,
        prefetch: bool = True,
        broadcast_buffers: bool = True,
        stall_timeout: float = 300.0,
        optimizer_sharding: OptimizerSharding = "auto",
        reduce_every_backward: bool = True,
        numerics: Numerics | None = None,
    ) -> None:
        placement_of(stage)  # refuses what is none, before the ranks talk
        device = device or _device_of(module)
        numerics = numerics or Numerics()
        with same_on_all_ranks(module, group):
            check_module(module, device)
            plan_units(module, auto_wrap_policy)  # refuses a wrong policy at every stage
        self.module = module
        self.stage = stage
        self.collectives = collectives_for(device, group, stall_timeout)
        division = divide(
            module,
            stage,
            self.collectives.world_size,
            device,
            auto_wrap_policy,
            bucket_mb,
            numerics,
        )
        plans, placement = division.plans, division.placement
        self.placement = placement
        self.units = _build_units(plans, placement, numerics, self.collectives)
        reduced = (unit.reduced_nbytes for unit in self.units if unit.is_trainable)
        self.collectives.reserve(max(reduced, default=0))
        self.slots = [slot for unit in self.units for slot in unit.slots]
        self._by_param = {id(slot.param): slot for slot in self.slots}
        pinned = [self.units[index] for index in division.pinned]
        in_flight = reductions_in_flight(device)
        self.schedule = Schedule(
            self.units, pinned, prefetch, in_flight, self._first_ranks, self.ledger
        )
        self.flags = GradientFlags(self.slots, self.collectives)
        _move_buffers(module, device)
        self._buffers = BufferSync(module, self.collectives, broadcast_buffers)
        self._sharding = optimizer_sharding
        self._defers = defers_reductions(placement, reduce_every_backward)
        self._in_no_sync = False
        self._owners = Owners(self.collectives.world_size)
        self._optimizers: dict[int, ShardedOptimizer] = {}
        self.live = True
        self.abandoned = False
        self._unwatched = self.slots  # frozen parameters, which cannot have gradient hooks
        self._grad_hooks: list[Any] = []
        self._module_hooks: list[Any] = []
        self._saved: SavedParameters | None = None
        self.schedule.after_round = self.flags.start
        for unit in self.units:
            unit.settle = self.flags.settle
        if placement.parameters is Placement.SHARDED:
            self._watch_modules(plans)
        if any(unit.shards_parameters for unit in self.units):
            self._saved = SavedParameters(self.units, self.schedule)
            self._saved.enter()
        self._watch_gradients()

    # Forward and backward

    @contextmanager
    def forward(self, syncs_buffers: bool = True) -> Generator[None, None, None]:
        """Surround a forward pass of the whole module; its backward comes after, or inside.

        Args:
            syncs_buffers: Whether the pass after this one begins with a broadcast of buffers.
        """
        for sharded in self._optimizers.values():
            sharded.recover()
        self.ledger.tell(Event.FORWARD)
        self._watch_gradients()
        self._buffers.before_forward(syncs_buffers and not self._in_no_sync)
        self.schedule.begin_pass()
        yield
        self.schedule.end_forward()
        self.ledger.tell(Event.FORWARD_END)

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Surround micro-batches whose gradients need not be averaged yet."""
        before = self.schedule.blocked, self._in_no_sync
        self.schedule.blocked, self._in_no_sync = self._defers, True
        try:
            yield
        finally:
            self.schedule.blocked, self._in_no_sync = before

    def backward(self) -> AbstractContextManager[None]:
        """Surround a backward pass, where a rank might find nothing to do while others do."""
        return self.schedule.backward()

    def finish_gradients(self) -> None:
        """Wait until the average of all gradients is present, and known where it is missing."""
        with torch._C.DisableTorchFunctionSubclass():
            thawed = [slot for slot in self._unwatched if slot.param.requires_grad]
        for slot in thawed:  # in the middle of a step, when it had no hook yet
            slot.unit.take_grad(slot)
        if thawed:
            self.schedule.reduce_left({slot.unit for slot in thawed})
            self.flags.start()
            self._watch_gradients()
        self.schedule.finish()
        self.flags.settle()
        for unit in self.units:
            unit.complete_grads()

    def _watch_gradients(self) -> None:
        """Put hooks on parameters that have become trainable."""
        with torch._C.DisableTorchFunctionSubclass():
            thawed = [slot for slot in self._unwatched if slot.param.requires_grad]
            for slot in thawed:
                hook = _report_to(self.schedule, slot)
                register: Any = slot.param.register_post_accumulate_grad_hook
                self._grad_hooks.append(register(hook))
        if thawed:
            self._unwatched = [slot for slot in self._unwatched if slot not in thawed]

    def _watch_modules(self, plans: Iterable[UnitPlan]) -> None:
        by_module: dict[nn.Module, list[Unit]] = {}
        for plan, unit in zip(plans, self.units, strict=True):
            if plan.module is not None and plan.module is not self.module:
                by_module.setdefault(plan.module, []).append(unit)
        for module, units in by_module.items():
            enter, leave = _module_hooks(self.schedule, units)
            self._module_hooks += [
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave, always_call=True),
            ]

    # Optimizers

    def attach(self, optimizer: optim.Optimizer) -> ShardedOptimizer:
        """Let an optimizer over the module's parameters step sharded from now on.

        Args:
            optimizer: The optimizer; its ``step`` is then something that all ranks call.

        Returns:
            What shards it; the same for the same optimizer.

        Raises:
            NotImplementedError: If it cannot be sharded.
            ValueError: If it holds a parameter that is not the module's.
        """
        if id(optimizer) not in self._optimizers:
            whole = needs_whole(optimizer, self._sharding)
            found = self._check_whole(optimizer) if whole else Findings()
            common = (
                optimizer,
                self._by_param,
                self.schedule,
                self.finish_gradients,
                self.ledger,
            )
            self._optimizers[id(optimizer)] = (
                OwningOptimizer(*common, self._owners, self.collectives, found.needs_grads)
                if whole
                else ShardedOptimizer(*common)
            )
        return self._optimizers[id(optimizer)]

    def _check_whole(self, optimizer: optim.Optimizer) -> Findings:
        found = examine(optimizer)
        if not self.agree(not found.combines):
            raise combining(optimizer)
        if self.collectives.rank == 0 and self._sharding == "auto":
            _log.info(
                "%s is not known to update each element by itself: it steps on whole parameters, "
                "each on one rank. ZeroStrategy(optimizer_sharding='elementwise') would save "
                "traffic if it does; 'whole' says the same without this message.",
                type(optimizer).__name__,
            )
        if self.collectives.rank == 0 and not found.tried:
            _log.warning(
                "%s could not be tried on small tensors, so nobody knows whether it updates each "
                "parameter by itself. If it combines them, as by a norm over all gradients, it "
                "computes something else here than under ddp.",
                type(optimizer).__name__,
            )
        return found

    def sharded(self, optimizer: optim.Optimizer) -> ShardedOptimizer | None:
        """Return what ``attach`` made of an optimizer, if it did; it outlives ``restore``."""
        return self._optimizers.get(id(optimizer))

    @property
    def optimizers(self) -> list[ShardedOptimizer]:
        """What ``attach`` made of the optimizers, in their order."""
        return list(self._optimizers.values())

    def grad_norm(self, params: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
        """Compute the norm of the averaged gradients of ``params`` over all ranks.

        Args:
            params: Parameters of the module; one that occurs twice counts once.
            norm_type: The p of the p-norm; ``inf`` for the largest element.

        Returns:
            A scalar, fp32 at least, the same on every rank.

        Raises:
            ValueError: If a parameter is not one of the module's.
        """
        self.finish_gradients()
        return clipping.grad_norm(self._slots_of(params), self.collectives, norm_type)

    def clip_by_norm(
        self, params: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the gradients of ``params`` by their norm over all ranks; return it unclipped.

        Args:
            params: Parameters of the module.
            max_norm: What the norm may be at most.
            norm_type: The p of the p-norm.

        Returns:
            The norm before clipping, a scalar, fp32 at least, the same on every rank.

        Raises:
            ValueError: If a parameter is not one of the module's.
        """
        self.finish_gradients()
        slots = self._slots_of(params)
        return clipping.clip_by_norm(slots, self.collectives, max_norm, norm_type)

    def clip_by_value(self, params: Iterable[nn.Parameter], limit: float) -> None:
        """Clamp every element of the gradients of ``params`` to ``[-limit, limit]``.

        Raises:
            ValueError: If a parameter is not one of the module's.
        """
        self.finish_gradients()
        clipping.clip_by_value(self._slots_of(params), limit)

    def unscale(self, params: Iterable[nn.Parameter], inv_scale: Tensor, found_inf: Tensor) -> None:
        """Multiply the gradients of ``params`` by the inverse of a loss scale.

        Args:
            params: The parameters.
            inv_scale: Scalar, fp32.
            found_inf: Scalar, fp32; set to 1 on all ranks if any rank's gradients are not finite.
        """
        self.finish_gradients()
        slots = self._slots_of(params)
        clipping.unscale(slots, self.collectives, inv_scale, found_inf)

    def load_masters(self, values: Mapping[str, Tensor]) -> None:
        """Give masters that are wider than their parameters the precision of a checkpoint.

        Args:
            values: Full values by name, on every rank; others than masters' are ignored, and those
                that a hook of the module has changed on their way into the parameters.
        """
        with torch.no_grad():
            for slot in self.slots:
                value = values.get(slot.name)
                if slot.unit.has_master and value is not None:
                    wide = slot.cut(value).to(slot.shard)
                    is_same = wide.to(slot.unit.dtype) == slot.shard
                    slot.shard.copy_(torch.where(is_same, wide, slot.shard))

    def _slots_of(self, params: Iterable[nn.Parameter]) -> list[ParameterSlot]:
        found = []
        for param in params:
            if id(param) not in self._by_param:
                raise ValueError(
                    f"A parameter of shape {tuple(param.shape)} is not one of the module's, so its "
                    "gradient is not averaged: make it an attribute of the module before training."
                )
            found.append(self._by_param[id(param)])
        return found

    # What the module takes

    @property
    def ledger(self) -> Ledger:
        """What this rank holds and has done, always up to date."""
        return self.collectives.ledger

    def full_nbytes(self) -> int:
        """Count the bytes of the full parameters, without padding."""
        return sum(slot.numel * slot.unit.dtype.itemsize for slot in self.slots)

    def held_nbytes(self) -> int:
        """Count the bytes that ``hold`` keeps."""
        return sum(buffer.flat_nbytes for unit in self.units for buffer in unit.buffers)

    def summary(self) -> str:
        """Say in one line what was sharded."""
        return first_line(self)

    def _first_ranks(self, numbers: list[int]) -> list[int]:
        told = torch.tensor(numbers, dtype=torch.int64, device=self.collectives.device)
        self.collectives.broadcast(told, "broadcast of the order of reductions")
        result: list[int] = told.tolist()
        return result

    def hold(self) -> None:
        """Keep the parameters whole until ``let_go``, so that forward passes do not communicate."""
        self.schedule.hold()

    def let_go(self) -> None:
        """Shard the parameters again."""
        self.schedule.let_go()

    def agree(self, yes: bool) -> bool:
        """Say whether all ranks say yes."""
        no = torch.tensor([not yes], dtype=torch.uint8, device=self.collectives.device)
        self.collectives.maximum(no, "agreement").wait()
        return not no.item()

    def restore(self, device: torch.device | str = "cpu") -> None:
        """Make the module ordinary again, with its full weights on ``device`` in every rank.

        Every rank calls it. The optimizers' state stays sharded.

        Args:
            device: Where the weights go, which needs room for all of them.
        """
        self.schedule.rest()
        self._let_go()
        for unit in self.units:
            unit.clear_grads()
        for unit in self.units:
            unit.restore(torch.device(device))

    def abandon(self) -> None:
        """Make the module as ordinary as one rank alone can, after an error.

        Replicated weights stay as they are; reading sharded ones becomes an error.
        """
        self._let_go()
        self.abandoned = True
        _abandoned.append(self)
        self.collectives.hurry()
        for unit in self.units:
            unit.abandon()

    def close(self) -> None:
        """Give up the process groups. Nothing can be gathered or saved any more.

        Waits until the other ranks have read what they still read of this one's memory.
        """
        if not self.abandoned:
            for unit in self.units:
                self.collectives.await_readers(unit.shard)
        self.collectives.close()

    def _let_go(self) -> None:
        self.live = False
        if self._saved is not None:
            self._saved.exit()
            self._saved = None
        for sharded in self._optimizers.values():
            sharded.detach()
        for handle in (*self._grad_hooks, *self._module_hooks):
            handle.remove()
        self._grad_hooks.clear()
        self._module_hooks.clear()


_abandoned: list[ZeroEngine] = []
"""Kept for ever: the other ranks may still read and write what a failed rank has offered them."""


def _build_units(
    plans: Iterable[UnitPlan],
    placement: StagePlacement,
    numerics: Numerics,
    collectives: Collectives,
) -> list[Unit]:
    with torch.inference_mode(False), torch.no_grad():
        return [
            Unit(plan, index, placement, numerics, collectives) for index, plan in enumerate(plans)
        ]


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                child._buffers[name] = buffer.to(device)


def _report_to(schedule: Schedule, slot: ParameterSlot) -> Callable[[Tensor], None]:
    def report(_: Tensor) -> None:
        schedule.report(slot)

    return report


class ModuleHook:
    """A hook of which a copy, made with a copy or a pickle of its module, does nothing."""

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self._call = call

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *_: Any) -> None:
        if self._call is not None:
            self._call()

    def __reduce__(self) -> Any:
        return ModuleHook, ()


def _module_hooks(schedule: Schedule, units: list[Unit]) -> tuple[ModuleHook, ModuleHook]:
    return ModuleHook(lambda: schedule.enter(units)), ModuleHook(lambda: schedule.leave(units))


def _device_of(module: nn.Module) -> torch.device:
    param = next(module.parameters(), None)
    return torch.device("cpu") if param is None else param.device
