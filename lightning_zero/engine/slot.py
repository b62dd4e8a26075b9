"""What the engine knows of one parameter, and how its gradient is handed out."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.layout import Slice
from lightning_zero.engine.parameter import RestingGrad, local_grad, set_local_grad

if TYPE_CHECKING:
    from lightning_zero.engine.half import HalfValues
    from lightning_zero.engine.unit import Unit

_UNSHARED = 2  # what sys.getrefcount says of an object that only a local variable refers to


@dataclass(eq=False, slots=True)
class ParameterSlot:
    """What the engine knows of one parameter.

    Attributes:
        name: Its first name in the module.
        param: The user's object.
        unit: The unit it belongs to.
        offset: First element in the flat buffer.
        shape: Full shape.
        stride: Full strides; the flat buffer holds the elements in memory order.
        slice: The part that this rank owns.
        view: The working values in full shape, a view of the flat buffer.
        shard: This rank's part of the master, 1-D.
        original_class: The class that the parameter had before.
        version: Its version counter when it was gathered.
        reported: Whether the backward pass under way has given it a gradient.
        local: Whether the unit's gradient buffer holds a gradient of this rank for it.
        reduced: Whether the unit's gradient shard holds an average for it.
        has_grad: Whether any rank had a gradient; until flags are exchanged, whether this one had.
        grad_face: The tensor that was handed out as its gradient.
        spare_face: One that was handed out before and can be again.
        face_nbytes: Bytes that were allocated to fill ``grad_face``.
    """

    name: str
    param: nn.Parameter
    unit: Unit
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    slice: Slice
    view: Tensor
    shard: Tensor
    original_class: type[nn.Parameter]
    version: int = 0
    reported: bool = False
    local: bool = False
    reduced: bool = False
    has_grad: bool = False
    grad_face: Tensor | None = field(default=None, repr=False)
    spare_face: RestingGrad | None = field(default=None, repr=False)
    face_nbytes: int = 0

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Say in which dtype optimizer state is kept that was made in the parameter's."""
        return self.shard.dtype if dtype == self.unit.dtype else dtype

    def in_flat(self, flat: Tensor) -> Tensor:
        """View this parameter's place in a buffer of the unit's layout, in full shape."""
        return flat.as_strided(self.shape, self.stride, self.offset)

    def in_shard(self, shard: Tensor) -> Tensor:
        """View this rank's part of this parameter in a shard of the unit's layout, 1-D."""
        return shard[self.slice.shard_start : self.slice.shard_stop]

    def cut(self, full: Tensor) -> Tensor:
        """Cut this rank's part out of a tensor of the parameter's full shape, 1-D."""
        if full.stride() != self.stride:
            full = torch.empty_strided(
                self.shape, self.stride, dtype=full.dtype, device=full.device
            ).copy_(full)
        return full.as_strided((self.numel,), (1,))[self.slice.start : self.slice.stop]

    def half_for(self, func: Callable[..., Any]) -> HalfValues | None:
        """Return the half-precision working values if a function, called now, is to read them."""
        half = self.unit.half
        return half if half is not None and half.serves(func, self) else None

    def read_grad(self) -> Tensor | None:
        """Hand out the averaged gradient, or None; its values are gathered when they are used.

        Before any reduction this rank's own gradient is handed out, as by DDP within ``no_sync``.
        """
        self.unit.finish_reduce()
        if self.reduced:
            self.unit.settle()
        if not (self.reduced and self.has_grad):
            return self._local_grad()
        if self.grad_face is None:
            spare, self.spare_face = self.spare_face, None
            self.grad_face = self._new_face() if spare is None else spare
        return self.grad_face

    def _new_face(self) -> RestingGrad:
        with torch.inference_mode(False):
            face = torch.empty_strided(
                self.shape, self.stride, dtype=self.unit.dtype, device=self.view.device
            ).as_subclass(RestingGrad)
        with torch._C.DisableTorchFunctionSubclass():
            self.unit.note(passing=face.untyped_storage().nbytes())
            face.untyped_storage().resize_(0)
        face.zero_slot = self
        return face

    def _local_grad(self) -> Tensor | None:
        """View this rank's gradient that no reduction has taken yet, if user code sees that one."""
        flat = self.unit.grad_flat
        if flat is None or not self.local or (self.has_grad and local_grad(self.param) is None):
            return None
        return self.in_flat(flat)

    def write_grad(self, grad: Tensor | None) -> None:
        """Drop the gradient (None) or replace what user code sees of it.

        That is the full average, or this rank's own gradient if no reduction has taken it yet.
        """
        if grad is not None and grad is self.grad_face:
            return
        if grad is not None and grad.shape != self.shape:
            raise RuntimeError(
                f"{self.name}.grad was set to a tensor of shape {tuple(grad.shape)}; "
                f"the parameter's is {tuple(self.shape)}."
            )
        self.unit.finish_reduce()
        self.unit.settle()
        place = None if grad is None else self._local_grad()
        if grad is not None and place is not None:
            with torch.no_grad():
                place.copy_(grad)
            return
        set_local_grad(self.param, None)
        self.local = False
        if grad is not None:
            for face in (grad, self.grad_face):  # as when two parameters swap their gradients
                if type(face) is RestingGrad:
                    face.zero_slot.fill_grad(face)
        self.reduced = self.has_grad = grad is not None
        self.drop_face()
        self.grad_face = grad
        if grad is not None:
            self.unit.hold_grad_shard()

    def drop_face(self) -> None:
        """Forget the gradient that was handed out; keep it for the next if nobody looks at it."""
        face, self.grad_face = self.grad_face, None
        if type(face) is RestingGrad and sys.getrefcount(face) == _UNSHARED:
            self.spare_face = face
        self.unit.forget_face(self)

    def fill_grad(self, face: RestingGrad) -> None:
        """Give values to every gradient of the unit that was handed out and has none yet."""
        if face is not self.grad_face:
            raise RuntimeError(
                f"This gradient of {self.name} was cleared or stepped before anything read it. "
                "Clone it (param.grad.clone()) while it is current."
            )
        self.unit.fill_grads()

    def keep_grad(self) -> None:
        """Take over what user code may have done to the gradient that was handed out."""
        face = self.grad_face
        if face is not None and type(face) is not RestingGrad:
            assert self.unit.grad_shard is not None
            self.in_shard(self.unit.grad_shard).copy_(self.cut(face))
        del face  # it must not count as somebody who looks at it
        self.drop_face()
