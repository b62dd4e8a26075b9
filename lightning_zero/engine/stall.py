"""Turns a wait that lasts too long into an error that says what every rank is doing."""

from __future__ import annotations

import atexit
import json
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

from torch.distributed.distributed_c10d import Store

_log = logging.getLogger(__name__)
_LAST_WORD = 15.0  # seconds that a thread may still take when the process ends
_HIDDEN = ("torch", "lightning", "pytorch_lightning", "lightning_zero", "threading")


class StallMonitor:
    """Publishes what this rank is doing; reads what the others do when a wait runs out.

    A daemon thread writes to the store, at most ten times per ``timeout``, so training pays nothing
    for it: the training thread only assigns attributes.

    Args:
        store: A store that all ranks share.
        rank: This rank.
        world_size: Number of ranks.
        timeout: Seconds that a wait may last.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self.timeout = timeout
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._issued = "nothing yet"
        self._count = 0
        self._waits_for: str | None = None
        self._published: str | None = None
        self._asks = True
        self._main = threading.get_ident()
        self._period = min(max(timeout / 10, 0.02), 10.0)
        self._watched: deque[tuple[float, Callable[[], bool], str]] = deque()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._publish_often, daemon=True, name="zero-stall")
        self._thread.start()
        _running.add(self)

    def issued(self, what: str) -> None:
        """Note the collective that this rank issued last."""
        self._issued = what
        self._count += 1

    def waits(self, what: str | None) -> None:
        """Note the collective that this rank waits for, or that it waits no more."""
        self._waits_for = what

    def watch(self, is_done: Callable[[], bool], what: str) -> None:
        """Log an error if a collective that no host waits for, as on a GPU, takes too long.

        The process group ends such a collective itself, some time after, and knows less to say.

        Args:
            is_done: Whether the device has finished it; called from another thread.
            what: The collective.
        """
        self._watched.append((time.monotonic(), is_done, what))

    def hurry(self) -> None:
        """Let waits run out soon and ask nobody why: the run has failed already."""
        self.timeout = min(self.timeout, 2.0)
        self._asks = False

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread; the store may go away afterwards.

        Args:
            timeout: Seconds to wait for a call of the store that is under way.
        """
        self._stop.set()
        self._thread.join(timeout)

    def error(self, what: str) -> TimeoutError:
        """Build the error for a wait for ``what`` that ran out; asks all ranks what they do."""
        if not self._asks:
            return TimeoutError(f"Rank {self._rank} waited in vain for {what}.")
        with suppress(RuntimeError):
            self._store.set("asked", "1")
            self._publish(force=True)
        time.sleep(3 * self._period)  # the others' threads look at the store once per period
        lines = [f"  rank {rank}: {self._read(rank)}" for rank in range(self._world_size)]
        return TimeoutError(
            f"Rank {self._rank} waited more than stall_timeout={self.timeout:g} s for {what}. "
            "The ranks did not all reach the same collective: a parameter was read on some ranks "
            "only, a rank took another way through the model, or a rank is slow or gone. "
            "Each rank:\n" + "\n".join(lines) + "\n"
            "Make every rank run the same modules in the same order, or raise stall_timeout if a "
            "rank may take that long."
        )

    def _read(self, rank: int) -> str:
        key = str(rank)
        try:
            if not self._store.check([key]):
                return "has published nothing"
            state = json.loads(self._store.get(key))
        except (RuntimeError, ValueError) as reason:
            return f"cannot be asked ({type(reason).__name__})"
        text = f"issued {state['count']} collectives, the last: {state['issued']}"
        if state["waits_for"]:
            text += f"; waits for {state['waits_for']}"
        elif state["where"]:
            text += f"; is in {state['where']}"
        return text

    def _publish_often(self) -> None:
        cloned = False
        while not self._stop.wait(self._period):
            if not cloned:  # not before: to connect may take seconds, and most waits are short
                # On a shared client a blocking call of the training thread would stop us.
                with suppress(AttributeError, RuntimeError, NotImplementedError):
                    self._store = self._store.clone()  # type: ignore[attr-defined]
                cloned = True
            try:
                self._look_at_watched()
                self._publish(force=self._store.check(["asked"]))
            except RuntimeError:  # the store's host is gone, and with it whoever could ask
                return

    def _look_at_watched(self) -> None:
        while self._watched:
            since, is_done, what = self._watched[0]
            if not is_done():
                if time.monotonic() - since > self.timeout:
                    self._watched.clear()
                    _log.error("%s", self.error(what))
                return
            self._watched.popleft()

    def _publish(self, force: bool) -> None:
        with self._lock:
            state = dict(count=self._count, issued=self._issued, waits_for=self._waits_for)
            text = json.dumps(state)
            if text == self._published and not force:
                return
            self._published = text
            self._store.set(str(self._rank), json.dumps(dict(state, where=self._where())))

    def _where(self) -> str:
        frame: FrameType | None = sys._current_frames().get(self._main)
        while frame is not None:
            root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if root not in _HIDDEN:
                code = frame.f_code
                return f"{code.co_name} ({Path(code.co_filename).name}, line {frame.f_lineno})"
            frame = frame.f_back
        return ""


_running: weakref.WeakSet[StallMonitor] = weakref.WeakSet()


# A daemon thread that comes back from C++ while the interpreter is being finalized ends the process
# with SIGABRT ("terminate called without an active exception", Python 3.11, torch 2.13).
@atexit.register
def _stop_all() -> None:
    deadline = time.monotonic() + _LAST_WORD
    monitors = list(_running)
    for monitor in monitors:
        monitor.stop(timeout=0.0)
    for monitor in monitors:
        monitor.stop(timeout=max(0.0, deadline - time.monotonic()))


def as_timedelta(seconds: float) -> timedelta:
    """Convert seconds for torch's waits, which take whole milliseconds and read 0 as for ever."""
    return timedelta(milliseconds=max(1, int(seconds * 1000)))
