"""Full state: what one process would have saved, collected unit by unit on rank 0's CPU.

On the other ranks the same names stand for tensors on the meta device: right in shape and dtype and
without memory, so that code which edits a checkpoint before it is written runs on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zero.engine.collectives import Collectives
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.objects import deliver, share
from lightning_zero.engine.optimizer import OwningOptimizer, ShardedOptimizer
from lightning_zero.engine.parameter import ZeroParameter
from lightning_zero.engine.slot import ParameterSlot
from lightning_zero.engine.unit import Unit

_BATCH = 64 * 2**20  # bytes of optimizer state that travel at a time


def module_state(engine: ZeroEngine, module: nn.Module) -> dict[str, Any]:
    """Collect ``module.state_dict()`` with full parameters. Every rank must call it.

    Args:
        engine: The engine that shards the module.
        module: The module, or a part of it.

    Returns:
        The state dict; tensors are on the CPU on rank 0, parameters on the meta device on others.
        Parameters that are tied stay tied.
    """
    full = {}
    engine.schedule.rest()  # values that user code has written reach the masters
    for unit in engine.units:
        flat = unit.collect_master()
        for slot in unit.slots:
            full[id(slot.param)] = _full(slot, flat)
    # `keep_vars` hands out the parameters themselves, which gathers nothing.
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, ZeroParameter):
            state[name] = full[id(value)]
        elif isinstance(value, Tensor):
            state[name] = value.detach()
    return state


def optimizer_state(engine: ZeroEngine, sharded: ShardedOptimizer) -> dict[str, Any]:
    """Collect ``optimizer.state_dict()`` with full state. Every rank must call it.

    Returns:
        The state dict as DDP would save it, numbered by position in the param groups; tensors of
        parameter shape are on the CPU on rank 0 and on the meta device on others.
    """
    state_dict = sharded.state_dict()
    numbers: dict[int, int] = {}
    for number, slot in enumerate(sharded.slots()):
        numbers.setdefault(id(slot), number)
    if isinstance(sharded, OwningOptimizer):
        owners = {numbers[id(slot)]: sharded.owners.of(slot) for slot in sharded.slots()}
        states = _owned_states(engine.collectives, state_dict["state"], owners)
        return {**state_dict, "state": states}
    states = {number: dict(state) for number, state in state_dict["state"].items()}
    for unit in engine.units:
        members = {numbers[id(slot)]: slot for slot in unit.slots if id(slot) in numbers}
        keys = dict.fromkeys(
            (key, value.dtype)
            for number, slot in members.items()
            for key, value in states.get(number, {}).items()
            if sharded.is_sharded(key, value, slot)
        )
        for key, dtype in keys:
            _fill(unit, members, states, key, dtype)
    for state in states.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and not value.is_meta:
                state[key] = value.cpu()
    return {**state_dict, "state": states}


def _owned_states(
    collectives: Collectives, states: Mapping[Any, Any], owners: Mapping[int, int]
) -> dict[Any, Any]:
    """Bring the state of each parameter from its owner to rank 0, some at a time."""
    rank = collectives.rank
    owned = {key: state for key, state in states.items() if owners.get(key) == rank}
    outlines = share(collectives, _moved(owned, "meta"), "names of optimizer state")
    full = {key: state for key, state in states.items() if key not in owners}
    for owner, outline in enumerate(outlines):
        for numbers in _batches(outline):
            mine = _moved({n: owned[n] for n in numbers}, "cpu") if rank == owner else None
            batch = deliver(collectives, mine, owner, f"optimizer states of rank {owner}")
            for number in numbers:
                full[number] = batch[number] if rank == 0 else outline[number]
    return {number: full[number] for number in sorted(full, key=_in_order)}


def _batches(outline: Mapping[int, Any]) -> Iterator[list[int]]:
    """Divide one owner's parameters so that the states of a batch are small, or of one."""
    batch: list[int] = []
    size = 0
    for number, state in outline.items():
        batch.append(number)
        size += sum(t.nbytes for t in tree_leaves(state) if isinstance(t, Tensor))
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _in_order(number: Any) -> tuple[bool, Any]:
    return isinstance(number, str), number


def _moved(value: Any, device: str) -> Any:
    """Copy the tensors in a piece of state to a device."""
    if isinstance(value, Tensor):
        return _moved_tensor(value.detach(), device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value


def _moved_tensor(tensor: Tensor, device: str) -> Tensor:
    try:
        return tensor.to(device, copy=True)
    except (RuntimeError, NotImplementedError, TypeError):  # a subclass that knows no other device
        if device != "meta":
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _fill(
    unit: Unit,
    members: dict[int, ParameterSlot],
    states: dict[int, dict[str, Any]],
    key: str,
    dtype: torch.dtype,
) -> None:
    """Replace one kind of state of a unit's parameters by full tensors."""
    device = unit.collectives.device
    shard = torch.zeros(unit.layout.shard_numel, dtype=dtype, device=device)
    found = {}
    for number, slot in members.items():
        value: Any = states.get(number, {}).get(key)
        if ShardedOptimizer.is_sharded(key, value, slot) and value.dtype == dtype:
            slot.in_shard(shard).copy_(value)
            found[number] = slot
    flat = unit.collectives.collect(shard, f"{key} of {unit.name}")
    for number, slot in found.items():
        states[number][key] = _full(slot, flat, dtype)


def _full(slot: ParameterSlot, flat: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Copy one parameter's part out of a collected flat buffer, without its neighbours."""
    device = "meta" if flat is None else "cpu"
    full = torch.empty_strided(
        slot.shape, slot.stride, dtype=dtype or slot.unit.master.dtype, device=device
    )
    return full if flat is None else full.copy_(slot.in_flat(flat))
