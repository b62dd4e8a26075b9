"""Optimizers that step on shards: which may, how their parameters look, what their state is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim

from lightning_zero.engine.parameter import (
    RestingParameter,
    ZeroParameter,
    set_data,
    set_local_grad,
)
from lightning_zero.engine.schedule import Schedule
from lightning_zero.engine.slot import ParameterSlot
from lightning_zero.engine.unit import Unit

OptimizerSharding = Literal["auto", "elementwise"]

_ELEMENTWISE = tuple(
    getattr(optim, name)
    for name in "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)
_CLOSURE = (optim.LBFGS,)
_SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""State of torch's elementwise optimizers that is one number per parameter, whatever its shape."""

State = dict[str, Any]


def check_optimizer(optimizer: optim.Optimizer, sharding: OptimizerSharding) -> None:
    """Refuse an optimizer that would not compute the same on shards.

    Raises:
        NotImplementedError: If it needs more than one element at a time, as far as is known.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, _CLOSURE):
        raise NotImplementedError(
            f"{name} evaluates its closure several times and combines all parameters, which cannot "
            "be done on shards: use a first-order optimizer, or strategy='ddp'."
        )
    if sharding == "elementwise" or not any(group["params"] for group in optimizer.param_groups):
        return
    # A subclass counts as long as it steps as its parent does.
    known = {inspect.unwrap(cls.step) for cls in _ELEMENTWISE}
    if inspect.unwrap(type(optimizer).step) in known:
        return
    raise NotImplementedError(
        f"{name} is not known to update each element by itself, so it might compute something else "
        f"on shards. If it does (as {', '.join(cls.__name__ for cls in _ELEMENTWISE)} do), say so "
        "with ZeroStrategy(optimizer_sharding='elementwise'); otherwise use one of these or "
        "strategy='ddp'."
    )


class ShardedOptimizer:
    """Lets one optimizer step on shards, however its ``step`` is called.

    Hooks around ``step`` first run the closure, then show the optimizer this rank's part of every
    parameter and gradient, and afterwards show the user the whole parameters again.

    Args:
        optimizer: The user's; it keeps the user's parameters in its groups.
        slots: What the engine knows of each parameter, by identity.
        schedule: Told to release before the step and which units have changed after it.
        before_step: Called when gradients must be complete.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        slots: Mapping[int, ParameterSlot],
        schedule: Schedule,
        before_step: Callable[[], None],
    ) -> None:
        self.optimizer = optimizer
        self._slots = slots
        self._schedule = schedule
        self._before_step = before_step
        self._shown: list[ParameterSlot] = []
        self._shard_state()
        self._handles = (
            optimizer.register_step_pre_hook(self._pre_step()),
            optimizer.register_step_post_hook(self._post_step()),
        )

    def detach(self) -> None:
        """Leave the optimizer alone from now on."""
        for unit in self.show_whole():  # a step has raised: the others' parts are missing
            if unit.working.is_stale_after_step:
                unit.working.rest()
        for handle in self._handles:
            handle.remove()

    def slots(self) -> list[ParameterSlot]:
        """List the parameters in the order in which ``state_dict`` numbers them.

        Raises:
            ValueError: If a parameter is not one of the module's.
        """
        found = []
        for number, group in enumerate(self.optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                slot = self._slots.get(id(param))
                if slot is None:
                    raise ValueError(
                        f"{type(self.optimizer).__name__} holds a parameter that is not one of the "
                        f"module's: number {position} of param group {number}, of shape "
                        f"{tuple(param.shape)}. Make it an attribute of the LightningModule before "
                        "training starts, or leave it out of the optimizer."
                    )
                found.append(slot)
        return found

    # The hooks are closures and not bound methods: copying an optimizer must not copy the engine.

    def _pre_step(self) -> Callable[..., Any]:
        def hook(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> Any:
            args, kwargs = _run_closure(args, kwargs)
            if optimizer is self.optimizer:
                self._schedule.changed(self.show_whole())  # the last step may have raised
                self._before_step()
                self._schedule.rest()
                self.show_shards()
            return args, kwargs

        return hook

    def _post_step(self) -> Callable[..., None]:
        def hook(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer is self.optimizer:
                self._schedule.changed(self.show_whole())

        return hook

    def show_shards(self) -> None:
        """Show the optimizer shards, with gradients where any rank has one."""
        slots = [slot for slot in self.slots() if slot.has_grad]
        for unit in dict.fromkeys(slot.unit for slot in slots):
            unit.ready_for_step()
        for slot in slots:
            grad_shard = slot.unit.grad_shard
            assert grad_shard is not None
            slot.keep_grad()
            param = slot.param
            param.__class__ = nn.Parameter  # exactly: foreach and fused variants look at the type
            set_data(param, slot.shard)
            set_local_grad(param, slot.in_shard(grad_shard))
            self._shown.append(slot)

    def show_whole(self) -> set[Unit]:
        """Show whole parameters again; return the units whose shards may have changed."""
        shown, self._shown = self._shown, []
        for slot in shown:
            # Whatever wrote to the shard: values that autograd has saved are no longer current.
            torch.autograd.graph.increment_version(slot.param)
            set_local_grad(slot.param, None)
            set_data(slot.param, slot.view)
            face = RestingParameter if slot.unit.shards_parameters else ZeroParameter
            slot.param.__class__ = face
        return {slot.unit for slot in shown}

    # State

    def _shard_state(self) -> None:
        """Cut state that was made before, of full shape, as Adagrad's is."""
        states = self.optimizer.state
        pairs = [(states[slot.param], slot) for slot in self.slots() if states.get(slot.param)]
        shaped = _shaped_keys(pairs)
        for state, slot in pairs:
            states[slot.param] = _cut(state, slot, shaped)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of full shapes, as DDP saves it; keep this rank's part.

        Raises:
            ValueError: If its groups do not fit the optimizer's.
        """
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        slots = self.slots()
        if len(numbers) != len(slots):
            raise ValueError(
                f"The checkpoint's {type(self.optimizer).__name__} state is for {len(numbers)} "
                f"parameters, but the optimizer has {len(slots)}: build the model and its param "
                "groups as they were when it was saved."
            )
        by_number = dict(zip(numbers, slots, strict=True))
        states = state_dict["state"]
        shaped = _shaped_keys([(states[number], by_number[number]) for number in states])
        cut = {number: _cut(state, by_number[number], shaped) for number, state in states.items()}
        self.optimizer.load_state_dict({**state_dict, "state": cut})

    @staticmethod
    def is_sharded(key: str, value: Any, slot: ParameterSlot) -> bool:
        """Say whether a piece of state is this rank's part of a tensor of the parameter's shape."""
        return (
            isinstance(value, Tensor) and value.shape == (slot.slice.numel,) and key not in _SCALARS
        )


def _shaped_keys(pairs: Sequence[tuple[Mapping[str, Any], ParameterSlot]]) -> set[str]:
    """List the state that has its parameter's shape, judged by all parameters that are no scalars.

    For a scalar parameter a number and a tensor of its shape look the same.
    """
    shaped, other = set(), set(_SCALARS)
    for state, slot in pairs:
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == slot.shape:
                shaped.add(key)
            else:
                other.add(key)
    return shaped - other


def _cut(state: Mapping[str, Any], slot: ParameterSlot, shaped: set[str]) -> State:
    return {
        key: slot.cut(value).clone() if key in shaped else value for key, value in state.items()
    }


def _run_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Run the closure of ``step(closure)`` now, for its gradients; let the step see its value."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        value = closure()
    replaced = functools.partial(lambda result: result, value)
    if len(args) > 1:
        return (args[0], replaced, *args[2:]), kwargs
    return args, {**kwargs, "closure": replaced}
