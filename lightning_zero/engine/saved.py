"""Lets autograd save parameters whose storage may be freed before it needs them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_zero.engine.flat import FlatBuffer
from lightning_zero.engine.half import HalfValues
from lightning_zero.engine.schedule import Schedule
from lightning_zero.engine.slot import ParameterSlot
from lightning_zero.engine.unit import Unit


class _SavedView(NamedTuple):
    """A tensor inside a flat buffer, by place: it must not keep the storage in use."""

    buffer: FlatBuffer
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    slot: ParameterSlot | None
    version: int


class _SavedTensor(NamedTuple):
    tensor: Tensor
    version: int


class SavedParameters:
    """Packs saved tensors that live in a flat buffer by place; unpacking gathers the unit first.

    Stays entered on the training thread for as long as parameters are sharded, since user code may
    run a forward pass anywhere. Autograd does not check versions of tensors that hooks have packed
    (torch 2.13), so that is done here.

    Args:
        units: The units with sharded parameters.
        schedule: Told when a backward pass unpacks.
    """

    def __init__(self, units: Sequence[Unit], schedule: Schedule) -> None:
        self._all: list[FlatBuffer] = []
        self._slots: dict[int, list[ParameterSlot]] = {}
        for unit in units:
            slots = sorted((slot for slot in unit.slots if slot.numel), key=_offset)
            for buffer in unit.buffers:
                if buffer.shards_parameters or buffer is not unit:
                    self._all.append(buffer)
                    self._slots[id(buffer)] = slots
                    buffer.renewed = self._learn_storages
        self._learn_storages()
        self._schedule = schedule
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def _learn_storages(self) -> None:
        self._buffers = {buffer.flat.untyped_storage()._cdata: buffer for buffer in self._all}

    def enter(self) -> None:
        """Watch what autograd saves on this thread from now on."""
        self._hooks.__enter__()

    def exit(self) -> None:
        """Stop watching."""
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
        try:
            buffer = self._buffers.get(tensor.untyped_storage()._cdata)
            version = tensor._version
        except (NotImplementedError, RuntimeError):  # no storage (sparse) or no version (inference)
            return tensor.detach()
        if buffer is None or tensor.dtype != buffer.dtype or tensor.is_conj() or tensor.is_neg():
            # Detached, for a function's saved result would keep the function, and that the result.
            return _SavedTensor(tensor.detach(), version)
        offset = int(tensor.storage_offset())
        slot = self._slot_at(buffer, offset)
        if isinstance(buffer, HalfValues):
            version = slot.param._version if slot is not None else 0  # they change with the master
        elif slot is not None and (slot.offset != offset or slot.param._version != version):
            slot = None  # an alias with a counter of its own, as `.data` gives
        return _SavedView(buffer, tensor.shape, tensor.stride(), offset, slot, version)

    def _slot_at(self, buffer: FlatBuffer, offset: int) -> ParameterSlot | None:
        slots = self._slots[id(buffer)]
        position = bisect_right(slots, offset, key=_offset)
        return slots[position - 1] if position else None

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _SavedView):
            if torch._C._current_graph_task_id() != -1:  # else somebody looks at the graph
                self._schedule.note_backward()
            if packed.slot is not None:
                _check_version(packed.slot.param, packed.version, packed.slot.name)
            packed.buffer.use()
            return packed.buffer.flat.as_strided(packed.size, packed.stride, packed.offset)
        if isinstance(packed, _SavedTensor):
            _check_version(packed.tensor, packed.version, f"shape {tuple(packed.tensor.shape)}")
            return packed.tensor
        tensor: Tensor = packed
        return tensor


def _offset(slot: ParameterSlot) -> int:
    return slot.offset


def _check_version(tensor: Tensor, expected: int, what: str) -> None:
    if tensor._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {what} is at version {tensor._version}; expected version {expected} "
            "instead. Run backward before changing it."
        )
