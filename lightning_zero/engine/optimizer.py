"""Optimizers that step on shards or on whole parameters: how these look, what the state is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.engine.collectives import Collectives
from lightning_zero.engine.ledger import Holdings, Ledger, distinct_nbytes
from lightning_zero.engine.observer import Event
from lightning_zero.engine.ownership import Loan, Owners
from lightning_zero.engine.parameter import (
    OwnedElsewhere,
    RestingParameter,
    ZeroParameter,
    local_grad,
    set_data,
    set_local_grad,
)
from lightning_zero.engine.schedule import Schedule
from lightning_zero.engine.slot import ParameterSlot
from lightning_zero.engine.unit import Unit

_SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""State of torch's elementwise optimizers that is one number per parameter, whatever its shape."""

_RECOUNT = 100
"""Steps after which state is counted again, though no parameter has come to have some."""

State = dict[str, Any]


class ShardedOptimizer:
    """Lets one optimizer step on shards, however its ``step`` is called.

    Hooks around ``step`` first run the closure, then show the optimizer this rank's part of every
    parameter and gradient, and afterwards show the user the whole parameters again.

    Args:
        optimizer: The user's; it keeps the user's parameters in its groups.
        slots: What the engine knows of each parameter, by identity.
        schedule: Told to release before the step and which units have changed after it.
        before_step: Called when gradients must be complete.
        ledger: Told how large the state is.

    Attributes:
        noted: What the ledger knows of the state.
        steps: How often it has stepped.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        slots: Mapping[int, ParameterSlot],
        schedule: Schedule,
        before_step: Callable[[], None],
        ledger: Ledger,
    ) -> None:
        self.noted = Holdings()
        self.steps = 0
        self._state_nbytes = self._counted = 0
        self._ledger = ledger
        self.optimizer = optimizer
        self._slots = slots
        self._schedule = schedule
        self._before_step = before_step
        self._shown: list[ParameterSlot] = []
        self._shard_state()
        self.count_state()
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
            if optimizer is not self.optimizer:
                return _run_closure(args, kwargs)
            if _is_nested(optimizer):
                return args, kwargs
            args, kwargs = _run_closure(args, kwargs)
            self.recover()
            self._before_step()
            self._schedule.rest()
            self._ledger.tell(Event.STEP)
            self.show_parts()
            return args, kwargs

        return hook

    def _post_step(self) -> Callable[..., None]:
        def hook(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer is self.optimizer and not _is_nested(optimizer):
                self.steps += 1
                settled = self.steps > 3 and self.steps % _RECOUNT
                if not settled or self._counted != len(optimizer.state):
                    self.count_state()
                self.keep_parts()
                self._schedule.changed(self.show_whole())
                self._ledger.tell(Event.STEP_END)

        return hook

    def recover(self) -> None:
        """Show whole parameters again if the last step has raised."""
        if not self._shown:
            return
        cleared = self._cleared()
        self._schedule.changed(self.show_whole())
        for slot in cleared:
            slot.write_grad(None)

    def _cleared(self) -> list[ParameterSlot]:
        """List what ``zero_grad`` has cleared after a step that has raised."""
        return [slot for slot in self._shown if local_grad(slot.param) is None]

    def show_parts(self) -> None:
        """Show the optimizer shards, with gradients where any rank has one."""
        for slot in self._ready():
            assert slot.unit.grad_shard is not None
            param = slot.param
            param.__class__ = nn.Parameter  # exactly: foreach and fused variants look at the type
            set_data(param, slot.shard)
            set_local_grad(param, slot.in_shard(slot.unit.grad_shard))
            self._shown.append(slot)

    def _ready(self) -> list[ParameterSlot]:
        """List the parameters that have a gradient, after getting gradients and shards ready."""
        slots = [slot for slot in dict.fromkeys(self.slots()) if slot.has_grad]
        for unit in dict.fromkeys(slot.unit for slot in slots):
            unit.ready_for_step()
        for slot in slots:
            slot.keep_grad()
        return slots

    def keep_parts(self) -> None:
        """Keep the values of an optimizer that has put other tensors into its parameters."""
        for slot in self._shown:
            data = slot.param.data
            if data.data_ptr() != slot.shard.data_ptr():
                slot.shard.data.copy_(data)

    def show_whole(self) -> set[Unit]:
        """Show whole parameters again; return the units whose shards may have changed."""
        shown, self._shown = self._shown, []
        for slot in shown:
            face = RestingParameter if slot.unit.shards_parameters else ZeroParameter
            slot.param.__class__ = nn.Parameter
            # Whatever wrote to the shard: values that autograd has saved are no longer current.
            torch.autograd.graph.increment_version(slot.param)
            set_local_grad(slot.param, None)
            set_data(slot.param, slot.view)
            slot.param.__class__ = face
        return {slot.unit for slot in shown}

    # State

    def count_state(self) -> None:
        """Tell the ledger how many bytes of state there are on this rank."""
        self._counted = len(self.optimizer.state)
        leaves = tree_leaves(list(self.optimizer.state.values()))
        self._state_nbytes = distinct_nbytes(leaf for leaf in leaves if isinstance(leaf, Tensor))
        self._ledger.note(self)

    def holdings(self) -> Holdings:
        """Return the bytes of state, as they were counted last."""
        return Holdings(optimizer=self._state_nbytes)

    def _shard_state(self) -> None:
        """Cut state that was made before, of full shape, as Adagrad's is."""
        states = self.optimizer.state
        pairs = [(states[slot.param], slot) for slot in self.slots() if states.get(slot.param)]
        shaped = _shaped_keys(pairs)
        for state, slot in pairs:
            states[slot.param] = tree_map(_copied, _cut(state, slot, shaped))

    def state_dict(self) -> State:
        """Return the optimizer's own state dict: of this rank's parts, by number.

        Raises:
            ValueError: If a hook has given the state other keys, so that whose it is is not known.
        """
        self.recover()
        state_dict = self.optimizer.state_dict()
        states, saved = self.optimizer.state, state_dict["state"]
        slots = self.slots()
        if all(key in range(len(slots)) for key in saved):
            return state_dict
        for number, slot in enumerate(slots):
            if states.get(slot.param) and number not in saved:
                raise ValueError(
                    f"A state_dict hook of {type(self.optimizer).__name__} renames the state of "
                    f"{slot.name}, of which each rank has only a part: let hooks keep the numbers "
                    "that torch gives."
                )
        return state_dict

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
        pairs = {key: (states[key], by_number[key]) for key in states if key in by_number}
        rest = {key: state for key, state in states.items() if key not in by_number}
        state = tree_map(_copied, {**rest, **self._keep(pairs)})
        with _as_masters(slots):
            self.optimizer.load_state_dict({**state_dict, "state": state})
        self.count_state()

    def _keep(self, pairs: Mapping[int, tuple[State, ParameterSlot]]) -> dict[int, State]:
        """Reduce full state to what this rank keeps."""
        shaped = _shaped_keys(list(pairs.values()))
        _check_shapes(pairs.values(), shaped)
        return {number: _cut(state, slot, shaped) for number, (state, slot) in pairs.items()}

    @staticmethod
    def is_sharded(key: str, value: Any, slot: ParameterSlot) -> bool:
        """Say whether a piece of state is this rank's part of a tensor of the parameter's shape."""
        return (
            isinstance(value, Tensor) and value.shape == (slot.slice.numel,) and key not in _SCALARS
        )


class OwningOptimizer(ShardedOptimizer):
    """Lets one optimizer step on whole parameters, each on the rank that owns it.

    Args:
        optimizer: As for ``ShardedOptimizer``.
        slots: As for ``ShardedOptimizer``.
        schedule: As for ``ShardedOptimizer``.
        before_step: As for ``ShardedOptimizer``.
        ledger: As for ``ShardedOptimizer``.
        owners: Who owns what; parameters that are new to it get an owner.
        collectives: How the ranks talk.
        hides: Whether to take parameters of other owners out of the groups during a step, since
            the optimizer fails where a gradient is missing.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        slots: Mapping[int, ParameterSlot],
        schedule: Schedule,
        before_step: Callable[[], None],
        ledger: Ledger,
        owners: Owners,
        collectives: Collectives,
        hides: bool = False,
    ) -> None:
        self.owners = owners
        self._hides = hides
        self._hidden: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        self._groups: list[dict[str, Any]] | None = None
        self._collectives = collectives
        self._loan = Loan(owners, collectives)
        super().__init__(optimizer, slots, schedule, before_step, ledger)

    def slots(self) -> list[ParameterSlot]:
        """List the parameters as ``ShardedOptimizer`` does; every one of them has an owner."""
        slots = super().slots()
        self.owners.add(slots)  # a param group may have been added
        return slots

    def show_parts(self) -> None:
        """Show the optimizer the parameters that this rank owns, and no gradients of others."""
        self._shown = self._ready()
        self._loan.take(self._shown, type(self.optimizer).__name__)
        if self._hides:
            for group in self.optimizer.param_groups:
                self._hidden.append((group, group["params"]))
                group["params"] = [p for p in group["params"] if not isinstance(p, OwnedElsewhere)]
            groups = [group for group in self.optimizer.param_groups if group["params"]]
            self._groups, self.optimizer.param_groups = self.optimizer.param_groups, groups

    def show_whole(self) -> set[Unit]:
        """Show whole parameters again, in all groups, as ``ShardedOptimizer`` does."""
        hidden, self._hidden = self._hidden, []
        for group, params in hidden:
            group["params"] = params
        if self._groups is not None:
            self.optimizer.param_groups, self._groups = self._groups, None
        units = super().show_whole()
        self._loan.end()
        return units

    def keep_parts(self) -> None:
        """Send the new values into all shards."""
        self._loan.give_back(type(self.optimizer).__name__)

    def _cleared(self) -> list[ParameterSlot]:
        words = [self.is_mine(slot) and local_grad(slot.param) is None for slot in self._shown]
        told = torch.tensor(words, dtype=torch.uint8, device=self._collectives.device)
        self._collectives.maximum(told, "exchange of cleared gradients").wait()
        return [slot for slot, yes in zip(self._shown, told.tolist(), strict=True) if yes]

    def is_mine(self, slot: ParameterSlot) -> bool:
        """Say whether this rank owns a parameter."""
        return self.owners.of(slot) == self._collectives.rank

    def _shard_state(self) -> None:
        states = self.optimizer.state
        for slot in self.slots():
            if not self.is_mine(slot):
                states.pop(slot.param, None)

    def _keep(self, pairs: Mapping[int, tuple[State, ParameterSlot]]) -> dict[int, State]:
        return {number: state for number, (state, slot) in pairs.items() if self.is_mine(slot)}


@contextmanager
def _as_masters(slots: Iterable[ParameterSlot]) -> Generator[None, None, None]:
    """Show parameters in their masters' dtype, which torch casts the state to that it loads."""
    shown = [(slot, type(slot.param)) for slot in dict.fromkeys(slots) if slot.unit.has_master]
    for slot, _ in shown:
        slot.param.__class__ = nn.Parameter
        set_data(slot.param, slot.shard)
    try:
        yield
    finally:
        for slot, face in shown:
            set_data(slot.param, slot.view)
            slot.param.__class__ = face


def _is_nested(optimizer: optim.Optimizer) -> bool:
    """Say whether this hook runs for a ``super().step()`` inside another step of the optimizer."""
    steps, frame = 0, inspect.currentframe()
    while frame is not None and steps < 2:
        steps += _is_step(frame) and frame.f_locals["self"] is optimizer
        frame = frame.f_back
    return steps == 2


def _is_step(frame: FrameType) -> bool:
    """Say whether a frame is torch's wrapper of ``step``, which runs the hooks (as of 2.13)."""
    code = frame.f_code
    return code.co_filename == optim.Optimizer.profile_hook_step.__code__.co_filename and (
        code.co_name == "wrapper" and "self" in frame.f_locals
    )


def _copied(value: Any) -> Any:
    """Copy a tensor of a checkpoint, which may still be in its file."""
    return value.clone() if isinstance(value, Tensor) else value


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


def _check_shapes(
    pairs: Iterable[tuple[Mapping[str, Any], ParameterSlot]], shaped: set[str]
) -> None:
    """Refuse a piece of state that is neither a number nor of its parameter's shape.

    Raises:
        ValueError: If there is one among state that has the shape elsewhere.
    """
    pairs = list(pairs)
    fits = {
        key
        for state, slot in pairs
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() and value.shape == slot.shape
    }
    for state, slot in pairs:
        for key in sorted(fits & state.keys() - shaped):
            value = state[key]
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != slot.shape:
                raise ValueError(
                    f"The optimizer state '{key}' of {slot.name} has shape {tuple(value.shape)}, "
                    f"and the parameter has {tuple(slot.shape)}: build the model and its param "
                    "groups as they were when it was saved."
                )


def _cut(state: Mapping[str, Any], slot: ParameterSlot, shaped: set[str]) -> State:
    return {
        key: slot.cut(value).to(slot.state_dtype(value.dtype)) if key in shaped else value
        for key, value in state.items()
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
