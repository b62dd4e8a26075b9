"""Half-precision working values of fp32 parameters, for what autocast would cast anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_zero.engine.autocast import is_lowered
from lightning_zero.engine.flat import FlatBuffer, FlatState

if TYPE_CHECKING:
    from lightning_zero.engine.slot import ParameterSlot
    from lightning_zero.engine.unit import Unit

_READ_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_HALF = 1 << 17  # added to a unit's tag for its half values


class HalfValues(FlatBuffer):
    """The working values of a unit whose parameters are fp32.

    Under autocast, functions that compute in half precision read these. The parameters themselves
    stay fp32 in type, and anything else that reads them gathers fp32 values from the masters. So
    the numbers are those of autocast whatever the code does, unless ``reads_all``.

    Args:
        unit: The unit; its shards hold values already.
        dtype: fp16 or bf16.
        sharded: Whether these values are absent between uses.
        reads_all: Whether other functions read them too, widened to fp32, unless they might write.

    Attributes:
        unit: The unit.
        reads_all: As given.
    """

    def __init__(self, unit: Unit, dtype: torch.dtype, sharded: bool, reads_all: bool) -> None:
        label = f"the {str(dtype).removeprefix('torch.')} values of {unit.label}"
        super().__init__(unit.layout, dtype, sharded, unit.collectives, unit.index + _HALF, label)
        self.unit = unit
        self.reads_all = reads_all
        self._device_type = unit.flat.device.type
        self._renew_views()
        self._know_storage()
        self.collectives.ledger.note(self)
        self.shard.copy_(unit.shard)
        self.rest()
        self.free()

    @property
    def awaits_gradients(self) -> bool:
        return self.unit.awaits_gradients

    def renew_shard(self) -> None:
        """Take over what an optimizer step has made of the master; full values become stale."""
        if not self.shards_parameters:
            self.gather()  # the last step's values may still be on their way
        self.collectives.await_readers(self.shard)
        self.shard.copy_(self.unit.shard)
        self.rest()

    def copy_writes(self) -> None:
        """Take over what user code has written to the full fp32 values, without communication."""
        if self.state is FlatState.GATHERING:
            self.gather()
        self.collectives.await_readers(self.shard)
        if self.state is FlatState.WORKING:
            self.flat.data.copy_(self.unit.flat.data)
        if self.shards_parameters or self.state is FlatState.RESTING:
            self.shard.data.copy_(self.unit.shard.data)

    def serves(self, func: Callable[..., Any], slot: ParameterSlot) -> bool:
        """Say whether a function, called now on a parameter, is to read these values."""
        if not torch.is_autocast_enabled(self._device_type) or torch.compiler.is_compiling():
            return False
        if torch.get_autocast_dtype(self._device_type) is not self.dtype:
            return False
        if is_lowered(func, self._device_type, self.dtype):
            return True
        # What writes to a view of a parameter does so without gradients, or autograd refuses.
        reads = torch.is_grad_enabled() and slot.param.requires_grad and not _may_write(func)
        return self.reads_all and (reads or func in _PURE)

    def of(self, slot: ParameterSlot, func: Callable[..., Any]) -> Tensor:
        """Return the working values of one parameter for a function, connected for autograd."""
        values: Tensor = _Lower.apply(slot.param, self, slot)  # type: ignore[no-untyped-call]
        lowered = is_lowered(func, self._device_type, self.dtype)
        return values if lowered or func is F.embedding else values.float()

    def _renew_views(self) -> None:
        self._views = {id(slot): slot.in_flat(self.flat) for slot in self.unit.slots}

    def view(self, slot: ParameterSlot) -> Tensor:
        """View the working values of one parameter, in full shape."""
        return self._views[id(slot)]


class _Lower(torch.autograd.Function):
    """What autocast's cast does, without a cast: the gradient comes back in fp32."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, half: HalfValues, slot: ParameterSlot) -> Tensor:
        return half.view(slot).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].float(), None, None


_PURE = frozenset({F.embedding, F.layer_norm, F.group_norm, F.batch_norm, F.rms_norm, F.prelu})


def _may_write(func: Callable[..., Any]) -> bool:
    """Say whether a function changes its argument, or hands out something that can."""
    name: str = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    special = name.startswith("__i") or name in ("__setitem__", "__set__", "detach", "numpy")
    return in_place or special or func == _READ_DATA
