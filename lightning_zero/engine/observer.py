"""What somebody can learn who watches the engine at work."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lightning_zero.engine.flat import FlatBuffer
    from lightning_zero.engine.ledger import Holder, Holdings


class Event(Enum):
    """A moment of the training thread. Those that begin and end come in pairs, most of them nested.

    Gathers and reductions overlap whatever lies between their two moments.
    """

    FORWARD = "forward begins"
    FORWARD_END = "forward ends"
    BACKWARD = "backward begins"
    BACKWARD_END = "backward ends"
    STEP = "an optimizer begins to step"
    STEP_END = "it has stepped, and its parameters are whole again"
    GATHER = "a gather is asked for"
    GATHER_END = "its values are present"
    FREE = "full values were freed"
    REDUCE = "a reduction is asked for"
    REDUCE_END = "the average is present"
    WAIT = "the thread begins to wait for other ranks"
    WAIT_END = "it goes on"


class Observer(Protocol):
    """Told what the engine does, as long as it is ``ledger.observer``. It must not raise."""

    def happened(
        self, event: Event, buffer: FlatBuffer | None = None, label: str | None = None
    ) -> None:
        """Learn of an event, at the moment at which it happens.

        Args:
            event: What.
            buffer: Whose values or gradients, for gathers, reductions and releases.
            label: What is waited for.
        """

    def held(self, holder: Holder, total: Holdings) -> None:
        """Learn what the rank holds, whenever that changes.

        Args:
            holder: The one whose holdings have changed; it has them as ``noted``.
            total: What all holders hold.
        """

    def moved(self, label: str, started: Any, done: Any) -> None:
        """Learn of a transfer on a stream of its own.

        Args:
            label: What is transferred.
            started: A ``torch.cuda.Event`` with timing, recorded before it.
            done: One recorded after it.
        """
