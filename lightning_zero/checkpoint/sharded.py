"""Sharded state: what each rank has of module and optimizers, under the names of the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.shards import TensorShard
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.optimizer import OwningOptimizer, ShardedOptimizer
from lightning_zero.engine.parameter import ZeroParameter
from lightning_zero.engine.slot import ParameterSlot


def sharded_module_state(engine: ZeroEngine, module: nn.Module) -> dict[str, Any]:
    """List ``module.state_dict()`` with this rank's part of every parameter.

    Args:
        engine: The engine that shards the module.
        module: The module, or a part of it.

    Returns:
        The state dict: parameters are :class:`TensorShard` of their masters, buffers are whole.
        Nothing is copied.
    """
    engine.schedule.rest()  # values that user code has written reach the masters
    for unit in engine.units:
        unit.ready_for_step()  # no gather is under way that still writes
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    made: dict[int, TensorShard] = {}  # tied parameters stay one
    for name, value in state.items():
        if isinstance(value, ZeroParameter):
            slot = value.zero_slot
            if id(slot) not in made:
                made[id(slot)] = _shard(engine, slot, slot.shard)
            state[name] = made[id(slot)]
        elif isinstance(value, Tensor):
            state[name] = value.detach()
    return state


def aliases(module: nn.Module) -> dict[str, str]:
    """List the further names of tied parameters, each with the first name of the same one."""
    first: dict[int, str] = {}
    found = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            found[name] = first[id(param)]
    return found


def sharded_optimizer_state(engine: ZeroEngine, sharded: ShardedOptimizer) -> dict[str, Any]:
    """List ``optimizer.state_dict()`` by parameter name, with what this rank has of the state."""
    state_dict = sharded.state_dict()
    slots = sharded.slots()
    states: dict[str, Any] = {}
    for number, slot in enumerate(slots):
        state = state_dict["state"].get(number)
        if isinstance(sharded, OwningOptimizer):
            if state and sharded.is_mine(slot):
                states[slot.name] = state
        elif state is not None:
            states[slot.name] = {
                key: _shard(engine, slot, value) if sharded.is_sharded(key, value, slot) else value
                for key, value in state.items()
            }
    states |= {  # what the optimizer keeps for itself
        key: value for key, value in state_dict["state"].items() if key not in range(len(slots))
    }
    groups = [
        {**group, "params": [slots[number].name for number in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": states, "param_groups": groups}


def _shard(engine: ZeroEngine, slot: ParameterSlot, local: Tensor) -> TensorShard:
    with torch.no_grad():
        return TensorShard(
            local.detach(),
            slot.shape,
            slot.stride,
            slot.slice.start,
            fills_gap=engine.collectives.rank == 0,
        )
