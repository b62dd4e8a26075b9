"""A flat buffer whose full values come and go: gather and release."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from lightning_zero.engine.collectives import Collectives, Pending
from lightning_zero.engine.layout import FlatLayout
from lightning_zero.engine.ledger import Holdings
from lightning_zero.engine.observer import Event


class FlatState(Enum):
    """What the full values of a flat buffer are, and what memory they hold."""

    RESTING = "resting"
    """Absent or stale. Sharded ones hold no storage, unless somebody still looks at it."""
    GATHERING = "gathering"
    """A gather is writing into the storage."""
    WORKING = "working"
    """Present."""


class FlatBuffer:
    """Full values of one dtype, of which every rank owns one slice.

    If they are sharded, ``shard`` has a storage of its own and ``flat``'s is freed at rest, then
    comes back under the same views. If they are replicated, ``shard`` is a slice of ``flat``.

    Args:
        layout: Where parameters lie.
        dtype: Of ``flat`` and ``shard``.
        sharded: Whether the full values are absent between uses.
        collectives: How the ranks talk.
        tag: Tells this buffer's collectives from others'.
        label: For messages.

    Attributes:
        state: Starts as working, with values that are still to be filled in.
        noted: What the ledger knows of it.
        use: Makes the full values present; the schedule replaces it by something that also makes
            room.
    """

    flat: Tensor  # (layout.flat_numel,)
    shard: Tensor  # (layout.shard_numel,)

    def __init__(
        self,
        layout: FlatLayout,
        dtype: torch.dtype,
        sharded: bool,
        collectives: Collectives,
        tag: int,
        label: str,
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self.shards_parameters = sharded
        self.collectives = collectives
        self.label = label
        self.state = FlatState.WORKING
        self.use: Callable[..., None] = self.gather
        self.renewed: Callable[[], None] = lambda: None
        self.noted = Holdings()
        self._tag = tag
        self._gathering: Pending | None = None
        self.flat = torch.empty(layout.flat_numel, dtype=dtype, device=collectives.device)
        own = self.own(self.flat)
        self.shard = torch.empty_like(own) if sharded else own

    @property
    def flat_nbytes(self) -> int:
        """Bytes of the full values."""
        return self.layout.flat_numel * self.dtype.itemsize

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's part of them."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def resting_nbytes(self) -> int:
        """Bytes that this rank holds between uses."""
        return self.shard_nbytes if self.shards_parameters else self.flat_nbytes

    def holdings(self) -> Holdings:
        """Count the bytes of the values that are here now."""
        if self.shards_parameters:
            return Holdings(parameters=self.shard.nbytes, transient=self._storage.nbytes())
        return Holdings(parameters=self._storage.nbytes())

    @property
    def awaits_gradients(self) -> bool:
        """Whether the backward pass under way still has gradients to report for it."""
        return False

    @property
    def is_stale_after_step(self) -> bool:
        """Whether full values stay present over a step and then lack the other ranks' part."""
        return not self.shards_parameters and self.collectives.world_size > 1

    def own(self, flat: Tensor) -> Tensor:
        """View this rank's slice of a buffer of this layout."""
        return flat.view(self.collectives.world_size, -1)[self.collectives.rank]

    # Gather

    def start_gather(self) -> None:
        """Ask for the full values; ``gather`` waits for them."""
        if self.state is not FlatState.RESTING:
            return
        self.tell(Event.GATHER)
        if not self.collectives.fills_late:
            self._make_storage()
        self._gathering = self.collectives.gather(
            self.flat.data, self.shard.data, f"gather of {self.label}", self._tag
        )
        self.state = FlatState.GATHERING

    def gather(self) -> None:
        """Make the full values present."""
        if self.state is FlatState.WORKING:
            return
        self.start_gather()
        self._make_storage()
        assert self._gathering is not None
        self._gathering.wait()
        self._gathering = None
        self.state = FlatState.WORKING
        self.tell(Event.GATHER_END)
        self._became_present()

    def _became_present(self) -> None:
        """Show the values to whoever looks."""

    def _make_storage(self) -> None:
        if self._storage.nbytes() == 0:
            self._storage.resize_(self.flat_nbytes)
            self.collectives.ledger.note(self)

    # Release

    def release(self) -> None:
        """Declare the full values absent and free their storage if nobody else looks at it."""
        if self.state is FlatState.GATHERING:
            self.gather()
        if self.state is FlatState.WORKING:
            self.keep_writes()
            self.rest()
        self.free()

    def rest(self) -> None:
        """Let every next access gather first."""
        self.state = FlatState.RESTING

    def keep_writes(self) -> None:
        """Keep what user code did to the full values."""

    def free(self) -> bool:
        """Free the storage of absent values, unless a tensor of somebody else shares it.

        Such a tensor may be a view in a local variable, or one that a recomputation has saved. The
        decision to gather again never depends on it, since it may differ between the ranks.
        """
        if not self.shards_parameters or self.state is not FlatState.RESTING:
            return True
        if torch._C._storage_Use_Count(self._storage._cdata) > self._own_aliases:
            return False
        if not self._storage.resizable():
            self._renew()
        if self._storage.nbytes():
            self._storage.resize_(0)
            self.tell(Event.FREE)
            self.collectives.ledger.note(self)
        return True

    def tell(self, event: Event) -> None:
        """Tell whoever watches that something happens to this buffer."""
        observer = self.collectives.ledger.observer
        if observer is not None:
            observer.happened(event, self)

    def _know_storage(self) -> None:
        """Note the storage, once all views of the engine's own exist."""
        self._storage = self.flat.untyped_storage()
        self._own_aliases = torch._C._storage_Use_Count(self._storage._cdata)

    def _renew(self) -> None:
        """Move to another storage, since numpy or shared memory has made this one unresizable."""
        with torch.inference_mode(False):
            self.flat = torch.empty_like(self.flat)
            self._renew_views()
        self._know_storage()
        self.renewed()

    def _renew_views(self) -> None:
        """Make the engine's own views look at the new storage."""
