"""Errors of one rank become errors of all, before there is an engine that could carry them."""

from __future__ import annotations

import builtins
import itertools
import json
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

_counter = itertools.count()
_SHOWN = 8  # ranks that a message names
_SLOWEST = 1800.0  # seconds that a rank may read while the others wait


@contextmanager
def together(doing: str, timeout: float) -> Generator[None, None, None]:
    """Raise on every rank what is raised on any. Every rank must enter it.

    The store of the default process group carries the words, so that a rank that does not come is
    found out after ``timeout``, and no device is needed. A rank's work does not grow with their
    number.

    Args:
        doing: What the ranks do, for messages.
        timeout: Seconds to wait for the others to enter. One that has may take half an hour.

    Raises:
        TimeoutError: If a rank does not come.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    meeting = _Meeting(doing, timeout)
    try:
        yield
    except Exception as error:
        meeting.report(error)
        meeting.wait(error)
        raise
    meeting.wait(None)
    failed = meeting.failures()
    if failed:
        _, kind, text = min(failed)
        ranks = ", ".join(str(rank) for rank, _, _ in sorted(failed))
        raise _type(kind)(f"Failed on rank {ranks}, {doing}: {text}")


def told_by_first(value: str, doing: str, timeout: float) -> str:
    """Return rank 0's value on every rank. Every rank must call it.

    Raises:
        TimeoutError: If a rank does not come.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    meeting = _Meeting(doing, timeout)
    if dist.get_rank() == 0:
        meeting.store.set("told", value)
    meeting.wait(None)
    return meeting.store.get("told").decode()


class _Meeting:
    """The words of one occasion; every rank is at the same one, since all count alike."""

    def __init__(self, doing: str, timeout: float) -> None:
        self.store: Store = PrefixStore(
            f"lightning_zero/together/{next(_counter)}", _get_default_store()
        )
        self._doing = doing
        self._timeout = timeout
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self.store.set(f"entered {self._rank}", "")

    def report(self, error: Exception) -> None:
        """Tell the others what went wrong here."""
        number = self.store.add("failures", 1)
        word = json.dumps([self._rank, type(error).__name__, str(error)])
        self.store.set(f"failure {number}", word)

    def failures(self) -> list[tuple[int, str, str]]:
        """List rank, type and text of what was reported."""
        count = min(self.store.add("failures", 0), _SHOWN)
        words = [json.loads(self.store.get(f"failure {n}")) for n in range(1, count + 1)]
        return [(rank, kind, text) for rank, kind, text in words]

    def wait(self, failure: Exception | None) -> None:
        """Wait until all ranks are done; ``failure`` is raised rather than that they are not."""
        self.store.set(f"left {self._rank}", "")
        if self.store.add("arrived", 1) == self._size:
            self.store.set("all", "")
        if self._all_come(self._timeout):
            return
        absent, waited = self._without("entered"), self._timeout
        if not absent:  # they are slow
            waited = max(self._timeout, _SLOWEST)
            if self._all_come(waited - self._timeout):
                return
            absent = self._without("left")
        if failure is not None:
            raise failure
        raise TimeoutError(
            f"Rank {_some(absent)} did not come within {waited:g} s (stall_timeout), "
            f"{self._doing}: it has ended, or does something else. See its own output."
        )

    def _all_come(self, seconds: float) -> bool:
        try:
            self.store.wait(["all"], timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def _without(self, key: str) -> list[int]:
        return [rank for rank in range(self._size) if not self.store.check([f"{key} {rank}"])]


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"{shown} and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else shown


def _type(name: str) -> type[Exception]:
    """Return a built-in class of errors that takes one text, the nearest one to a name."""
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, OSError | ValueError | TypeError | KeyError):
        return RuntimeError if issubclass(found, UnicodeError) else found
    return RuntimeError
