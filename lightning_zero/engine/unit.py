"""One unit: a flat buffer of parameters that are gathered, released and reduced together."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum

import torch
from torch import Tensor, nn

from lightning_zero.engine.collectives import Collectives, Pending
from lightning_zero.engine.layout import FlatLayout
from lightning_zero.engine.parameter import (
    RestingGrad,
    RestingParameter,
    ZeroParameter,
    local_grad,
    set_data,
    set_local_grad,
)
from lightning_zero.engine.placement import Placement, StagePlacement
from lightning_zero.engine.slot import ParameterSlot

_GRADIENTS = 1 << 16  # added to a unit's tag when its gradients are gathered


class UnitState(Enum):
    """What the working values of a unit are, and what memory they hold."""

    RESTING = "resting"
    """Absent or stale. Sharded parameters hold no storage, unless somebody still looks at it."""
    GATHERING = "gathering"
    """A gather is writing into the storage."""
    WORKING = "working"
    """Present."""


class Unit:
    """A flat buffer of parameters of one dtype: gather, release, reduce.

    *Tensor roles.* ``flat`` holds the working values and ``shard`` this rank's part of them, which
    is the master. With replicated parameters ``shard`` is a slice of ``flat``; with sharded ones it
    has a storage of its own and ``flat``'s is freed at rest, then comes back under the same views.
    ``grad_flat`` holds this rank's gradients, ``grad_shard`` this rank's part of their average.

    Args:
        name: For messages.
        index: Position among the units, the tag of its collectives.
        params: Named parameters of one dtype, in order.
        placement: The stage's row of the table.
        collectives: How the ranks talk.

    Attributes:
        collectives: How the ranks talk.
        touched: User code got at the working values in a way that leaves no trace.
        missing: Parameters that the backward pass under way has not reported yet.
        trainable: Whether any parameter of it is trainable in the backward pass under way.
    """

    flat: Tensor  # (flat_numel,), working dtype
    shard: Tensor  # (shard_numel,), working dtype
    grad_flat: Tensor | None  # (flat_numel,)
    grad_shard: Tensor | None  # (shard_numel,)

    def __init__(
        self,
        name: str,
        index: int,
        params: Sequence[tuple[str, nn.Parameter]],
        placement: StagePlacement,
        collectives: Collectives,
    ) -> None:
        self.name = name
        self.index = index
        self.layout = FlatLayout([param.numel() for _, param in params], collectives.world_size)
        self.dtype = params[0][1].dtype
        self.shards_parameters = placement.parameters is Placement.SHARDED
        self.shards_gradients = placement.gradients is Placement.SHARDED
        self.state = UnitState.WORKING
        self.touched = False
        self.missing = 0
        self.trainable = False
        self.grad_flat = None
        self.grad_shard = None
        self.use: Callable[..., None] = self.gather
        self.renewed: Callable[[], None] = lambda: None
        self.settle: Callable[[], None] = lambda: None
        self.collectives = collectives
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self._average: Tensor | None = None
        self._accumulates = False
        self._label = f"unit {name!r} (first parameter {params[0][0]!r})"
        self._take_over(params)
        self._know_storage()
        if self.shards_parameters:
            self.rest()
            self.free()

    # Set-up and the way back

    def _take_over(self, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Move rank 0's values into the flat buffer and the shard; free the original storages."""
        layout, talk = self.layout, self.collectives
        self.flat = torch.empty(layout.flat_numel, dtype=self.dtype, device=talk.device)
        own = self._own(self.flat)
        self.shard = torch.empty_like(own) if self.shards_parameters else own
        self.slots = [self._slot(index, name, param) for index, (name, param) in enumerate(params)]
        if talk.rank == 0:
            self.flat.zero_()  # padding
            for slot in self.slots:
                slot.view.copy_(slot.param.detach())
        if self.shards_parameters:
            source = self.flat if talk.rank == 0 else None
            talk.scatter(source, self.shard, f"the initial values of {self._label}")
        else:
            talk.broadcast(self.flat, f"the initial values of {self._label}")
        for slot in self.slots:
            slot.param.grad = None
            set_data(slot.param, slot.view)
            slot.param.__class__ = ZeroParameter
            slot.param.zero_slot = slot  # type: ignore[attr-defined]

    def _slot(self, index: int, name: str, param: nn.Parameter) -> ParameterSlot:
        offset = self.layout.offsets[index]
        part = self.layout.slice_of(index, self.collectives.rank)
        stride = param.stride()
        if not _is_dense(param):
            stride = torch.empty(param.shape, device="meta").stride()
        return ParameterSlot(
            name=name,
            param=param,
            unit=self,
            offset=offset,
            shape=param.shape,
            stride=stride,
            slice=part,
            view=self.flat.as_strided(param.shape, stride, offset),
            shard=self.shard[part.shard_start : part.shard_stop],
            original_class=type(param),
        )

    def restore(self, device: torch.device) -> None:
        """Make the parameters ordinary again, with full values on ``device``."""
        self.gather()
        self.collectives.await_readers(self.shard)
        self._hand_back(device)

    def abandon(self) -> None:
        """Do what can be done without counting on the other ranks."""
        with suppress(RuntimeError, TimeoutError):
            if not self.shards_parameters:
                self.gather()  # new values that were on their way when the run failed
                self._hand_back(torch.device("cpu"))
                return
        self.rest()

        def refuse(*_: Unit) -> None:
            raise RuntimeError(
                f"The values of {self._label} are spread over the ranks, and the run that could "
                "gather them ended with an error. Load them from a checkpoint."
            )

        self.use = refuse

    def _hand_back(self, device: torch.device) -> None:
        for slot in self.slots:
            slot.param.__class__ = slot.original_class
            set_local_grad(slot.param, None)
            full = torch.empty_strided(slot.shape, slot.stride, dtype=self.dtype, device=device)
            set_data(slot.param, full.copy_(slot.view))
            del slot.param.zero_slot  # type: ignore[attr-defined]
            slot.view = slot.shard = slot.view.new_empty(0)
        self.state = UnitState.RESTING
        self.grad_flat = self.grad_shard = None
        # Each storage goes with the last tensor that shares it.
        self.flat = self.shard = self.flat.new_empty(0)
        self._know_storage()

    def collect_master(self) -> Tensor | None:
        """Return the whole master, flat, on rank 0 and None on the others."""
        if not self.shards_parameters:
            self.gather()
            return self.flat if self.collectives.rank == 0 else None
        return self.collect(self.shard, f"values of {self._label}")

    def collect(self, shard: Tensor, label: str) -> Tensor | None:
        """Return the shards of all ranks in the unit's layout, flat, on rank 0, None on others."""
        return self.collectives.collect(shard, label)

    @property
    def flat_nbytes(self) -> int:
        """Bytes of the working values of the whole unit."""
        return self.layout.flat_numel * self.dtype.itemsize

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's part of them."""
        return self.layout.shard_numel * self.dtype.itemsize

    def ready_for_step(self) -> None:
        """Make sure that the optimizer may write to the shard."""
        if not self.shards_parameters:
            self.gather()  # the last step's new values may still be on their way
        self.collectives.await_readers(self.shard)

    @property
    def resting_nbytes(self) -> int:
        """Bytes of parameters that this rank holds between uses."""
        return self.flat_nbytes // (self.collectives.world_size if self.shards_parameters else 1)

    # Working values

    def start_gather(self) -> None:
        """Ask for the working values; ``gather`` waits for them."""
        if self.state is not UnitState.RESTING:
            return
        if not self.collectives.fills_late:
            self._make_storage()
        self._gathering = self.collectives.gather(
            self.flat.data, self.shard.data, f"gather of {self._label}", self.index
        )
        self.state = UnitState.GATHERING

    def gather(self) -> None:
        """Make the working values present."""
        if self.state is UnitState.WORKING:
            return
        self.start_gather()
        self._make_storage()
        assert self._gathering is not None
        self._gathering.wait()
        self._gathering = None
        self.state = UnitState.WORKING
        self.touched = False
        for slot in self.slots:
            slot.param.__class__ = ZeroParameter
            slot.version = slot.param._version

    def _make_storage(self) -> None:
        if self._storage.nbytes() == 0:
            self._storage.resize_(self.flat_nbytes)

    def release(self) -> None:
        """Declare the working values absent and free their storage if nobody else looks at it."""
        if self.state is UnitState.GATHERING:
            self.gather()
        if self.state is UnitState.WORKING:
            self.keep_writes()
            self.rest()
        self.free()

    def rest(self) -> None:
        """Let every next access gather first."""
        self.state = UnitState.RESTING
        for slot in self.slots:
            slot.param.__class__ = RestingParameter

    @property
    def is_stale_after_step(self) -> bool:
        """Whether working values stay present over a step and then lack the other ranks' part."""
        return not self.shards_parameters and self.collectives.world_size > 1

    def free(self) -> bool:
        """Free the storage of absent working values, unless a tensor of somebody else shares it.

        Such a tensor may be a view in a local variable, or one that a recomputation has saved. The
        decision to gather again never depends on it, since it may differ between the ranks.
        """
        if not self.shards_parameters or self.state is not UnitState.RESTING:
            return True
        if torch._C._storage_Use_Count(self._storage._cdata) > self._own_aliases:
            return False
        if not self._storage.resizable():
            self._renew()
        self._storage.resize_(0)
        return True

    def _know_storage(self) -> None:
        self._storage = self.flat.untyped_storage()
        self._own_aliases = torch._C._storage_Use_Count(self._storage._cdata)

    def _renew(self) -> None:
        """Move to another storage, since numpy or shared memory has made this one unresizable."""
        with torch.inference_mode(False):
            self.flat = torch.empty_like(self.flat)
            for slot in self.slots:
                slot.view = slot.in_flat(self.flat)
                set_data(slot.param, slot.view)
        self._know_storage()
        self.renewed()

    def keep_writes(self) -> None:
        """Write what user code did to the working values back to the master."""
        if not self.shards_parameters:
            return  # the master is a slice of the working values
        if self.touched or any(slot.param._version != slot.version for slot in self.slots):
            self.collectives.await_readers(self.shard)
            self.shard.data.copy_(self._own(self.flat.data))
            self.touched = False
            for slot in self.slots:
                slot.version = slot.param._version

    # Gradients

    def take_grad(self, slot: ParameterSlot) -> None:
        """Move the gradient that autograd put on a parameter into the gradient buffer."""
        grad = local_grad(slot.param)
        if grad is None:  # a hook of the user's took it away
            return
        if grad.layout is not torch.strided:
            _warn_of_sparse(slot.name)
            grad = grad.to_dense()
        grad = grad.detach()  # with create_graph it has one of its own
        place = slot.in_flat(self._gradient_buffer())
        if slot.local and self.shards_gradients:
            place.add_(grad)
        elif grad.data_ptr() != place.data_ptr():  # else autograd has added onto it in place
            place.copy_(grad)
        slot.local = True
        # Replicated gradients stay visible, and autograd adds the next ones onto them in place.
        set_local_grad(slot.param, None if self.shards_gradients else place)

    def _gradient_buffer(self) -> Tensor:
        if self.grad_flat is None:
            self.grad_flat = torch.empty(
                self.layout.flat_numel, dtype=self.dtype, device=self.flat.device
            )
        elif not self.shards_gradients:
            self.finish_reduce()
            if self.grad_shard is not None and self._own(self.grad_flat).is_set_to(self.grad_shard):
                self.grad_shard = self.grad_shard.clone()  # the last average lies in the way
        return self.grad_flat

    def _own(self, flat: Tensor) -> Tensor:
        return flat.view(self.collectives.world_size, -1)[self.collectives.rank]

    def start_reduce(self) -> None:
        """Ask for the average of the gradients; ``finish_reduce`` waits for it."""
        self.finish_reduce()
        flat = self._gradient_buffer()
        accumulates = self._make_room_for_average()
        for slot in self.slots:
            if not slot.local:
                slot.in_flat(flat).zero_()
            set_local_grad(slot.param, None)
            slot.has_grad |= slot.local
            slot.local = False
        base = None
        if not self.shards_gradients:
            out = self._own(flat)
            base = self.grad_shard if accumulates else None
            self.grad_shard = None
        elif accumulates or self.grad_shard is None:
            out = torch.empty_like(self.shard)
        else:
            out = self.grad_shard
        if self.shards_gradients:
            self.grad_flat = None  # the collective keeps it as long as it needs it
        self._accumulates = accumulates and base is None
        self._average = out
        label = f"reduce of {self._label}"
        self._reducing = self.collectives.reduce(flat, out, label, self.index, base)

    def _make_room_for_average(self) -> bool:
        """Prepare the gradient shard for another average; say whether it holds one already."""
        if not any(slot.reduced for slot in self.slots):
            return False
        assert self.grad_shard is not None
        for slot in self.slots:
            slot.keep_grad()
            if not slot.reduced:
                slot.in_shard(self.grad_shard).zero_()
        return True

    def finish_reduce(self) -> None:
        """Make the average present in the gradient shard."""
        if self._reducing is None:
            return
        reducing, self._reducing = self._reducing, None
        reducing.wait()
        assert self._average is not None
        if self._accumulates:
            assert self.grad_shard is not None
            self.grad_shard.add_(self._average)
        else:
            self.grad_shard = self._average
        self._average = None
        for slot in self.slots:
            slot.reduced |= slot.has_grad or slot.param.requires_grad

    def hold_grad_shard(self) -> None:
        """Make sure that there is a gradient shard to write to."""
        if self.grad_shard is None:
            self.grad_shard = torch.zeros_like(self.shard)

    def clear_grads(self) -> None:
        """Forget all gradients."""
        self.finish_reduce()
        for slot in self.slots:
            set_local_grad(slot.param, None)
            slot.local = slot.reduced = slot.has_grad = False
            slot.grad_face = slot.spare_face = None
        self.drop_grads()

    def drop_grads(self) -> None:
        """Free the gradient buffers if they hold nothing, as in a unit that was frozen."""
        if self._reducing is None and not any(slot.local or slot.reduced for slot in self.slots):
            self.grad_flat = self.grad_shard = None

    def fill_grads(self) -> None:
        """Gather the averaged gradients into the tensors that were handed out for them."""
        assert self.grad_shard is not None
        flat = self.grad_shard.new_empty(self.layout.flat_numel)
        label = f"gradients of {self._label}"
        tag = self.index + _GRADIENTS
        self.collectives.gather(flat, self.grad_shard, label, tag).wait()
        self.collectives.await_readers(self.grad_shard)
        for slot in self.slots:
            face = slot.grad_face
            if type(face) is RestingGrad:
                with torch._C.DisableTorchFunctionSubclass():
                    face.untyped_storage().resize_(face.numel() * face.element_size())
                face.__class__ = Tensor  # type: ignore[assignment]
                with torch.no_grad():
                    face.copy_(slot.in_flat(flat))


def _is_dense(param: Tensor) -> bool:
    """Say whether the elements fill one block of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return param.numel() > 0


@functools.cache
def _warn_of_sparse(name: str) -> None:
    warnings.warn(
        f"{name} has a sparse gradient, which is made dense before it is reduced; building it "
        "with sparse=False gives the same and saves the conversion.",
        stacklevel=2,
    )
