"""Writes the sharded checkpoints of one Trainer, one at a time, in the background if wanted."""

from __future__ import annotations

import copy
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_zero.checkpoint.entries import map_leaves
from lightning_zero.checkpoint.folder import write_folder
from lightning_zero.checkpoint.shards import TensorShard


class ShardedSaver:
    """Turns what the Trainer dumps into a folder.

    Args:
        asynchronous: Whether ``save`` returns as soon as everything is copied to the CPU.
        timeout: Seconds that ranks wait for each other.
    """

    def __init__(self, asynchronous: bool, timeout: float) -> None:
        self._asynchronous = asynchronous
        self._timeout = timeout
        self._group: ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write a checkpoint. Every rank must call it.

        Args:
            checkpoint: What the Trainer dumped; weights and optimizer states are this rank's.
            path: The folder to make.

        Raises:
            OSError: On every rank, if one cannot write, or could not write the last checkpoint.
        """
        self.wait()
        group = self._ranks()
        meta = dict(checkpoint)
        state = {"state_dict": meta.pop("state_dict")}
        for number, optimizer in enumerate(meta.pop("optimizer_states", [])):
            state[f"optimizer_{number}"] = optimizer
        if not self._asynchronous:
            write_folder(path, state, meta, group)
            return
        state = map_leaves(state, _copied)
        meta = copy.deepcopy(meta)

        def work() -> None:
            try:
                write_folder(path, state, meta, group)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="lightning_zero save", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save under way is done.

        Raises:
            OSError: If it failed.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and give up the process group."""
        try:
            self.wait()
        finally:
            group, self._group = self._group, None
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def _ranks(self) -> ProcessGroup | None:
        """Return a group of all ranks for CPU tensors that nothing else uses."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        if self._group is None:
            limit = timedelta(seconds=self._timeout)
            self._group = dist.new_group(backend="gloo", timeout=limit)
        return self._group


def _copied(key: str, value: Any) -> Any:
    if isinstance(value, TensorShard):
        return value.copied()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)
