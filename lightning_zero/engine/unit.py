"""One unit: a flat buffer of parameters that are gathered, released and reduced together."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from lightning_zero.engine.collectives import Collectives, Pending
from lightning_zero.engine.flat import FlatBuffer, FlatState
from lightning_zero.engine.half import HalfValues
from lightning_zero.engine.layout import FlatLayout
from lightning_zero.engine.ledger import Holdings
from lightning_zero.engine.numerics import Numerics
from lightning_zero.engine.observer import Event
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
from lightning_zero.engine.units import UnitPlan

_GRADIENTS = 1 << 16  # added to a unit's tag when its gradients are gathered


class Unit(FlatBuffer):
    """A flat buffer of parameters of one dtype: gather, release, reduce.

    *Tensor roles.* ``flat`` holds the parameters' full values and ``shard`` this rank's part of
    them. ``master`` is what the optimizer updates: ``shard`` itself, unless half-precision
    parameters have a wider one. ``half`` are half-precision working values of fp32 parameters; the
    fp32 values are then sharded at every stage. ``grad_flat`` holds this rank's gradients,
    ``grad_shard`` this rank's part of their average.

    Args:
        plan: Named parameters of one dtype, in order, and whether they have half values.
        index: Position among the units, the tag of its collectives.
        placement: The stage's row of the table.
        numerics: The dtypes of the run.
        collectives: How the ranks talk.

    Attributes:
        reads_half: Whether forward passes read half-precision values.
        touched: User code got at the working values in a way that leaves no trace.
        missing: Parameters that the backward pass under way has not reported yet.
        trainable: Whether any parameter of it is trainable in the backward pass under way.
    """

    master: Tensor  # (shard_numel,), master dtype
    half: HalfValues | None
    grad_flat: Tensor | None  # (flat_numel,), grad_dtype
    grad_shard: Tensor | None  # (shard_numel,), grad_dtype until the step, then the master's

    def __init__(
        self,
        plan: UnitPlan,
        index: int,
        placement: StagePlacement,
        numerics: Numerics,
        collectives: Collectives,
    ) -> None:
        params = plan.params
        dtype = params[0][1].dtype
        sharded = placement.parameters is Placement.SHARDED
        super().__init__(
            FlatLayout([param.numel() for _, param in params], collectives.world_size),
            dtype,
            sharded or plan.half,
            collectives,
            index,
            f"unit {plan.name!r} (first parameter {params[0][0]!r})",
        )
        self.name = plan.name
        self.index = index
        self.shards_gradients = placement.gradients is Placement.SHARDED
        self.touched = False
        self.missing = 0
        self.trainable = False
        self.grad_flat = None
        self.grad_shard = None
        self.settle: Callable[[], None] = lambda: None
        half_grads = plan.half and numerics.cast == "all"
        self.grad_dtype = numerics.autocast if half_grads and numerics.autocast else dtype
        self.reduce_dtype = numerics.reduce_dtype(self.grad_dtype)
        # Replicated gradients stay visible, and autograd adds the next ones onto them in place.
        self._adds_in_place = not self.shards_gradients and self.grad_dtype == dtype
        self._reducing: Pending | None = None
        self._reducing_nbytes = 0  # of what that holds beside ``grad_flat`` and ``grad_shard``
        self._faces_nbytes = 0  # of gradients that user code has read
        self._average: Tensor | None = None
        self._accumulates = False
        self.reads_half = plan.half
        self.half = None
        self._take_over(params, numerics.master_dtype(dtype))
        self._know_storage()
        collectives.ledger.note(self)
        if self.shards_parameters:
            self.rest()
            self.free()
        if self.reads_half and numerics.autocast is not None:
            reads_all = numerics.cast == "all"
            self.half = HalfValues(self, numerics.autocast, sharded, reads_all)

    @property
    def working(self) -> FlatBuffer:
        """What forward passes read."""
        return self if self.half is None else self.half

    @property
    def buffers(self) -> tuple[FlatBuffer, ...]:
        """What holds values of its parameters."""
        return (self,) if self.half is None else (self, self.half)

    @property
    def is_trainable(self) -> bool:
        """Whether any of its parameters asks for a gradient now."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(slot.param.requires_grad for slot in self.slots)

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of this rank's part of the gradients as they are summed."""
        return self.layout.shard_numel * self.reduce_dtype.itemsize

    @property
    def awaits_gradients(self) -> bool:
        return self.missing > 0

    @property
    def is_reducing(self) -> bool:
        """Whether an average of its gradients was asked for and is not present yet."""
        return self._reducing is not None

    def holdings(self) -> Holdings:
        values = super().holdings()
        gradients = self._gradient_nbytes() + self._faces_nbytes
        if self.reads_half:  # the fp32 shard is the master, and working values are in `half`
            return Holdings(0, values.parameters, gradients, 0, values.transient)
        masters = self.master.nbytes if self.has_master else 0
        return Holdings(values.parameters, masters, gradients, 0, values.transient)

    def _gradient_nbytes(self) -> int:
        flat, shard, average = self.grad_flat, self.grad_shard, self._average
        nbytes = self._reducing_nbytes
        if flat is not None:
            nbytes += flat.nbytes
        # At stage 1 both are slices of `flat`; told by storage, as the planner's have no address.
        for part in (shard, None if average is shard else average):
            if part is not None and not (flat is not None and _share_storage(flat, part)):
                nbytes += part.nbytes
        return nbytes

    def note(self, passing: int = 0) -> None:
        """Tell the ledger what there is now, and of gradients that are gone in a moment."""
        self.collectives.ledger.note(self)
        if passing:
            self.collectives.ledger.passing(Holdings(gradients=passing))

    def forget_face(self, slot: ParameterSlot) -> None:
        """Tell the ledger that the gradient handed out for a parameter is given up."""
        if slot.face_nbytes:
            self._faces_nbytes -= slot.face_nbytes
            slot.face_nbytes = 0
            self.note()

    # Set-up and the way back

    def _take_over(
        self, params: Sequence[tuple[str, nn.Parameter]], master_dtype: torch.dtype
    ) -> None:
        """Move rank 0's values into the flat buffer and the shard; free the original storages."""
        talk = self.collectives
        self.master = self.shard.to(master_dtype)
        self.slots = [self._slot(index, name, param) for index, (name, param) in enumerate(params)]
        if talk.rank == 0:
            self.flat.zero_()  # padding
            for slot in self.slots:
                slot.view.copy_(slot.param.detach())
        if self.shards_parameters:
            source = self.flat if talk.rank == 0 else None
            talk.scatter(source, self.shard, f"the initial values of {self.label}")
        else:
            talk.broadcast(self.flat, f"the initial values of {self.label}")
        if self.has_master:
            self.master.copy_(self.shard)
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
            shard=self.master[part.shard_start : part.shard_stop],
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
                f"The values of {self.label} are spread over the ranks, and the run that could "
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
        self.state = FlatState.RESTING
        if self.half is not None:
            self.collectives.ledger.forget(self.half)
        self.grad_flat = self.grad_shard = self.half = None
        # Each storage goes with the last tensor that shares it.
        self.flat = self.shard = self.master = self.flat.new_empty(0)
        self._know_storage()
        self.note()

    def collect_master(self) -> Tensor | None:
        """Return the whole master, flat, on rank 0 and None on the others."""
        if self.master_is_whole:
            self.gather()
            return self.flat if self.collectives.rank == 0 else None
        return self.collectives.collect(self.master, f"values of {self.label}")

    def ready_for_step(self) -> None:
        """Make sure that the optimizer may write to the shard."""
        if not self.shards_parameters:
            self.gather()  # the last step's new values may still be on their way
        self.collectives.await_readers(self.shard)

    def publish_step(self) -> None:
        """Carry what an optimizer step has made of the master to where others gather it from."""
        if self.has_master:
            self.shard.copy_(self.master)
        if self.half is not None:
            self.half.renew_shard()

    @property
    def has_master(self) -> bool:
        """Whether the master is more than the parameters' own shard."""
        return self.master.dtype != self.dtype

    @property
    def master_is_whole(self) -> bool:
        """Whether the full values are the masters of all ranks, here and now."""
        return not self.shards_parameters and not self.has_master

    # Faces of the full values

    def _became_present(self) -> None:
        self.touched = False
        watched = self.half is not None and self.half.reads_all
        for slot in self.slots:
            # A function that is to read half-precision values must be seen even now.
            slot.param.__class__ = RestingParameter if watched else ZeroParameter
            slot.version = slot.param._version

    def rest(self) -> None:
        super().rest()
        for slot in self.slots:
            slot.param.__class__ = RestingParameter

    def _renew_views(self) -> None:
        for slot in self.slots:
            slot.view = slot.in_flat(self.flat)
            set_data(slot.param, slot.view)

    def keep_writes(self) -> None:
        """Write what user code did to the full values back to the master."""
        if self.state is not FlatState.WORKING:
            return
        if self.master_is_whole:
            return  # the master is a slice of the full values
        if self.touched or any(slot.param._version != slot.version for slot in self.slots):
            own = self.own(self.flat.data)
            if self.has_master:  # what was not written keeps the master's precision
                written = own != self.master.to(self.dtype)
                self.master.copy_(torch.where(written, own, self.master))
            if self.shards_parameters:
                self.collectives.await_readers(self.shard)
                self.shard.data.copy_(own)
            if self.half is not None:
                self.half.copy_writes()
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
        if slot.local and not self._adds_in_place:
            place.add_(grad)
        elif grad.data_ptr() != place.data_ptr():  # else autograd has added onto it in place
            place.copy_(grad)
        slot.local = True
        set_local_grad(slot.param, place if self._adds_in_place else None)

    def _gradient_buffer(self) -> Tensor:
        if self.grad_flat is None:
            self.grad_flat = torch.empty(
                self.layout.flat_numel, dtype=self.grad_dtype, device=self.flat.device
            )
            self.note()
        elif not self.shards_gradients:
            self.finish_reduce()
            if self.grad_shard is not None and _share_storage(self.grad_flat, self.grad_shard):
                # The last average lies in the way.
                is_kept = any(slot.reduced for slot in self.slots)
                self.grad_shard = self.grad_shard.clone() if is_kept else None
                self.note()
        return self.grad_flat

    def start_reduce(self) -> None:
        """Ask for the average of the gradients; ``finish_reduce`` waits for it."""
        self.finish_reduce()
        self.tell(Event.REDUCE)
        flat = self._gradient_buffer()
        accumulates = self._make_room_for_average()
        for slot in self.slots:
            if not slot.local:
                slot.in_flat(flat).zero_()
            set_local_grad(slot.param, None)
            slot.has_grad |= slot.local
            slot.local = False
        base = None
        if self.reduce_dtype != self.grad_dtype:
            flat = flat.to(self.reduce_dtype)
            self.note(passing=flat.nbytes)
        if not self.shards_gradients and accumulates:
            assert self.grad_shard is not None
            base = self.grad_shard.to(self.reduce_dtype)
        if flat is self.grad_flat and not self.shards_gradients and self.half is None:
            out = self.own(flat)
            self.grad_shard = None
        else:
            self.grad_flat = None  # the collective keeps it as long as it needs it
            out = self._room_for_average(accumulates)
        self._accumulates = accumulates and base is None
        self._average = out
        label = f"reduce of {self.label}"
        self._reducing = self.collectives.reduce(flat, out, label, self.index, base)
        self._reducing_nbytes = self._reducing.scratch_nbytes
        if self._reducing.holds:
            self._reducing_nbytes += 0 if flat is self.grad_flat else flat.nbytes
            if base is not None and base is not self.grad_shard:
                self._reducing_nbytes += base.nbytes
        self.note()

    def _room_for_average(self, accumulates: bool) -> Tensor:
        last = self.grad_shard
        if accumulates or last is None or last.dtype != self.reduce_dtype:
            return self.shard.new_empty(self.layout.shard_numel, dtype=self.reduce_dtype)
        return last

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
        self._reducing_nbytes = 0
        assert self._average is not None
        if self._accumulates:
            assert self.grad_shard is not None
            self.grad_shard.add_(self._average)
        elif self._average.dtype == self.grad_dtype:
            self.grad_shard = self._average
        else:
            narrow = self._average.to(self.grad_dtype)
            self.note(passing=narrow.nbytes)
            self.grad_shard = narrow
        self._average = None
        self.tell(Event.REDUCE_END)
        self.note()
        for slot in self.slots:
            slot.reduced |= slot.has_grad or slot.param.requires_grad

    def complete_grads(self) -> None:
        """Forget averages of nothing, and give the others the master's dtype for the step.

        To be called when it is known which gradients no rank has.
        """
        for slot in self.slots:
            slot.reduced &= slot.has_grad  # the next backward pass need not add to it
        if self.grad_shard is not None and self.grad_shard.dtype != self.master.dtype:
            wide = self.grad_shard.to(self.master.dtype)
            self.note(passing=wide.nbytes)
            self.grad_shard = wide
            self.note()

    def hold_grad_shard(self) -> None:
        """Make sure that there is a gradient shard to write to."""
        if self.grad_shard is None:
            self.grad_shard = torch.zeros_like(self.master)
            self.note()

    def clear_grads(self) -> None:
        """Forget all gradients."""
        self.finish_reduce()
        for slot in self.slots:
            set_local_grad(slot.param, None)
            slot.local = slot.reduced = slot.has_grad = False
            slot.grad_face = slot.spare_face = None
            self.forget_face(slot)
        self.drop_grads()

    def drop_grads(self) -> None:
        """Free the gradient buffers if they hold nothing, as in a unit that was frozen."""
        if self._reducing is None and not any(slot.local or slot.reduced for slot in self.slots):
            self.grad_flat = self.grad_shard = None
            self.note()

    def fill_grads(self) -> None:
        """Gather the averaged gradients into the tensors that were handed out for them."""
        assert self.grad_shard is not None
        flat = self.grad_shard.new_empty(self.layout.flat_numel)
        label = f"gradients of {self.label}"
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
                slot.face_nbytes = face.untyped_storage().nbytes()
                self._faces_nbytes += slot.face_nbytes
        self.note(passing=flat.nbytes)


def _share_storage(first: Tensor, second: Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


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
