"""Errors of one rank become errors of all, before there is an engine that could carry them."""

from __future__ import annotations

import builtins
import itertools
import json
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

_counter = itertools.count()


@contextmanager
def together(doing: str, timeout: float) -> Generator[None, None, None]:
    """Raise on every rank what is raised on any. Every rank must enter it.

    The store of the default process group carries the words, so that a rank that does not come is
    found out after ``timeout``, and no device is needed.

    Args:
        doing: What the ranks do, for messages.
        timeout: Seconds to wait for the others.

    Raises:
        TimeoutError: If a rank does not come.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = _exchange(failure, doing, timeout)
    if failure is not None:
        raise failure
    if failed:
        kind, text = next(iter(failed.values()))
        ranks = ", ".join(map(str, failed))
        raise _type(kind)(f"Failed on rank {ranks}, {doing}: {text}")


def _exchange(failure: Exception | None, doing: str, timeout: float) -> dict[int, list[str]]:
    """Tell the other ranks; return by rank the type and text of what went wrong there."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return {}
    rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore(f"lightning_zero/together/{next(_counter)}", _get_default_store())
    word = None if failure is None else [type(failure).__name__, str(failure)]
    store.set(str(rank), json.dumps(word))
    words = {}
    for other in range(size):
        try:
            store.wait([str(other)], timedelta(seconds=timeout))
        except RuntimeError as error:
            if failure is not None:
                raise failure from error
            raise TimeoutError(
                f"Rank {other} did not come within {timeout:g} s (stall_timeout), {doing}: it has "
                "ended, or does something else. See its own output."
            ) from error
        words[other] = json.loads(store.get(str(other)))
    return {other: word for other, word in words.items() if word is not None}


def _type(name: str) -> type[Exception]:
    """Return a built-in class of errors that takes one text, the nearest one to a name."""
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, OSError | ValueError | TypeError | KeyError):
        return RuntimeError if issubclass(found, UnicodeError) else found
    return RuntimeError
