"""Writes the checkpoints of one Trainer, one at a time, in the background if wanted."""

from __future__ import annotations

import copy
import io
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from lightning_zero.checkpoint.entries import map_leaves
from lightning_zero.checkpoint.mappings import merged, odd_mappings
from lightning_zero.checkpoint.read_sharded import RECORD
from lightning_zero.checkpoint.shards import TensorShard
from lightning_zero.checkpoint.together import Together
from lightning_zero.checkpoint.writers import write_folder, write_remote

_SLOWEST = 1800.0  # seconds that one rank's disk may be behind another's


class _Save(threading.Thread):
    """A save under way in the background, and what is to follow it.

    Attributes:
        error: What it raised.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="lightning_zero save")  # no daemon: the interpreter waits at exit
        self.error: BaseException | None = None
        self._work = work
        self._lock = threading.Lock()  # over the two below
        self._busy = True
        self._then: list[Callable[[], None]] = []

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        while (act := self._next()) is not None:
            act()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if self._then and self.error is None:
                return self._then.pop(0)
            self._busy = False
            return None

    def after(self, act: Callable[[], None]) -> None:
        """Do something when this has succeeded; after a failure it is not done."""
        with self._lock:
            if self._busy:
                self._then.append(act)
                return
        if self.error is None:
            act()


class ShardedSaver:
    """Turns what the Trainer dumps into a folder.

    Args:
        asynchronous: Whether ``save`` returns as soon as everything is copied to the CPU.
        timeout: Seconds that ranks wait for each other, if that is more than half an hour.
    """

    def __init__(self, asynchronous: bool, timeout: float) -> None:
        self._asynchronous = asynchronous
        self._timeout = max(timeout, _SLOWEST)
        self._group: ProcessGroup | None = None
        self._under_way: _Save | None = None

    def together(self, what: object) -> Together:
        """Return the ranks, to write something. Every rank must call it."""
        return Together(self._ranks(), what)

    def save(self, checkpoint: dict[str, Any], place: Path | str) -> None:
        """Write a checkpoint. Every rank must call it.

        Args:
            checkpoint: What the Trainer dumped; weights and optimizer states are this rank's.
            place: The folder to make: a path on a local file system, or the URL of one elsewhere.

        Raises:
            OSError: On every rank, if one cannot write, or could not write the last checkpoint.
        """
        self.wait()
        together = self.together(place)
        with together:
            state, rest = _divided(checkpoint)
        mappings = together.gathered(odd_mappings(state))
        with together:
            if together.is_first and RECORD in rest:
                rest[RECORD] = {**rest[RECORD], "mappings": merged(mappings)}
            meta = _packed(rest) if together.is_first else b""
            if self._asynchronous:
                state = _copied(state)

        def work() -> None:
            if isinstance(place, Path):
                write_folder(place, state, meta, together)
            else:
                write_remote(place, state, meta, together)

        if not self._asynchronous:
            work()
            return
        self._under_way = _Save(work)
        self._under_way.start()

    def after(self, act: Callable[[], None]) -> None:
        """Do something, which does not raise, once the save under way has succeeded.

        Without one, it is done at once. After a failure it is not done: what the failed save was to
        replace stays.
        """
        if self._under_way is None:
            act()
        else:
            self._under_way.after(act)

    def wait(self) -> None:
        """Wait until the save under way is done.

        Raises:
            OSError: If it failed.
        """
        if self._under_way is None:
            return
        self._under_way.join()
        error, self._under_way = self._under_way.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and give up the process group.

        Raises:
            OSError: If the save under way failed.
        """
        try:
            self.wait()
        finally:
            group, self._group = self._group, None
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def _ranks(self) -> ProcessGroup | None:
        """Return a group of all ranks for CPU tensors that nothing else uses."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        if self._group is None:
            limit = timedelta(seconds=self._timeout)
            self._group = dist.new_group(backend="gloo", timeout=limit)
        return self._group


def _divided(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide into what ranks write and what rank 0 writes, by the keys of Lightning's folders."""
    rest = dict(checkpoint)
    state = {"model": rest.pop("state_dict")}
    for number, optimizer in enumerate(rest.pop("optimizer_states", [])):
        state[f"optimizer_{number}"] = optimizer
    for key in list(rest):  # callbacks add more weights
        if any(isinstance(leaf, TensorShard) for leaf in tree_leaves(rest[key])):
            if key in state or re.fullmatch(r"state_dict|optimizer_\d+", str(key)):
                raise ValueError(
                    f"on_save_checkpoint has put weights under '{key}', which a sharded checkpoint "
                    "uses itself: take another key"
                )
            state[key] = rest.pop(key)
    return state, rest


def _packed(rest: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    return buffer.getvalue()


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Copy everything to the CPU, and what is there under several names once."""
    copies: dict[int, Any] = {}

    def copied(_: str, value: Any) -> Any:
        if id(value) not in copies:
            copies[id(value)] = _copy(value)
        return copies[id(value)]

    tree: dict[str, Any] = map_leaves(state, copied)
    return tree


def _copy(value: Any) -> Any:
    if isinstance(value, TensorShard):
        return value.copied()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)
