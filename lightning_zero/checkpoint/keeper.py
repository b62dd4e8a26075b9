"""What one strategy saves and loads: full or sharded, with a record of who wrote it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_zero.checkpoint.folder import recover, remove, unfinished_saves
from lightning_zero.checkpoint.full import module_state, optimizer_state
from lightning_zero.checkpoint.load import load_lazily
from lightning_zero.checkpoint.read_sharded import FORMAT, RECORD
from lightning_zero.checkpoint.rng import rng_state, set_rng_state
from lightning_zero.checkpoint.saver import ShardedSaver
from lightning_zero.checkpoint.sharded import (
    aliases,
    sharded_module_state,
    sharded_optimizer_state,
)
from lightning_zero.checkpoint.writers import write_file
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.objects import gather
from lightning_zero.engine.optimizer import ShardedOptimizer

Writer = Callable[[], None]
StateDictType = Literal["full", "sharded"]


class Checkpoints:
    """Saves in one way and loads all.

    Args:
        kind: ``"full"`` or ``"sharded"``.
        asynchronous: Whether sharded ones are written in the background.
        timeout: Seconds that ranks wait for each other.

    Attributes:
        sharded: Whether folders are written.
    """

    def __init__(self, kind: StateDictType, asynchronous: bool, timeout: float) -> None:
        self.sharded = kind == "sharded"
        self._saver = ShardedSaver(asynchronous, timeout)
        self._rng: dict[str, Any] | None = None
        self._rng_in_epoch: dict[str, Any] | None = None

    # Saving

    def module_state(self, engine: ZeroEngine, module: nn.Module) -> dict[str, Any]:
        """Return the module's state as it is to be saved."""
        return (sharded_module_state if self.sharded else module_state)(engine, module)

    def optimizer_state(self, engine: ZeroEngine, optimizer: ShardedOptimizer) -> dict[str, Any]:
        """Return an optimizer's state as it is to be saved."""
        collect = sharded_optimizer_state if self.sharded else optimizer_state
        return collect(engine, optimizer)

    def add_record(
        self, checkpoint: dict[str, Any], engine: ZeroEngine | None, module: nn.Module
    ) -> None:
        """Note in a checkpoint who writes it, and unless it is of weights only, random states."""
        from lightning_zero import __version__

        if engine is None:
            return
        record: dict[str, Any] = {
            "format": FORMAT,
            "version": __version__,
            "stage": engine.stage,
            "world_size": engine.collectives.world_size,
            "aliases": aliases(module),
        }
        if "loops" in checkpoint and not engine.abandoned:
            mine = rng_state(engine.collectives.device)
            record["rng"] = gather(engine.collectives, mine, "random states")
        checkpoint[RECORD] = record

    def save(self, checkpoint: dict[str, Any], path: Any, engine: ZeroEngine | None) -> None:
        """Write a folder; every rank must call it."""
        live = engine is not None and engine.live
        if engine is not None and live:
            engine.agree(True)  # a rank that does not come is reported as for every other wait
        self._saver.save(checkpoint, _place(path))
        if not live:  # nothing will wait later
            self._saver.close()

    def save_file(self, checkpoint: dict[str, Any], path: Any, write: Writer | None) -> None:
        """Write a file on rank 0; every rank must call it.

        Args:
            checkpoint: What the Trainer dumped.
            path: The file to make.
            write: What writes, if the user has chosen something.
        """
        together = self._saver.together(path)
        place = _place(path)
        with together:
            if together.is_first and write is None and isinstance(place, Path):
                write_file(place, checkpoint)
            elif write is not None:
                write()

    def remove(self, path: Any) -> None:
        """Remove a checkpoint once the save under way, if there is one, has succeeded."""
        place = _place(path)

        def act() -> None:
            try:
                if isinstance(place, Path):
                    remove(place)
                else:
                    TorchCheckpointIO().remove_checkpoint(place)
            except OSError as error:
                rank_zero_warn(f"The checkpoint {path} could not be removed: {error}")

        self._saver.after(act)

    def wait(self) -> None:
        """Wait for the save under way."""
        self._saver.wait()

    def close(self) -> None:
        """Wait, and give up what saving holds."""
        self._saver.close()

    # Loading

    def load(self, path: Any, trust: bool) -> dict[str, Any] | None:
        """Open a checkpoint of any kind; None if it is one that only torch can read."""
        local = _local(path)
        recover(local)
        if not local.exists():
            raise FileNotFoundError(f"There is no checkpoint {path}.")
        left = unfinished_saves(local.parent)
        if left:
            rank_zero_warn(
                f"{len(left)} save(s) beside {local} were killed before they were finished, and "
                f"are ignored: {', '.join(folder.name for folder in left)}. The next save into the "
                "same folder removes them."
            )
        if local.is_file() and not zipfile.is_zipfile(local):
            return None
        checkpoint = load_lazily(local, trust)
        self._take_record(checkpoint)
        return checkpoint

    def _take_record(self, checkpoint: dict[str, Any]) -> None:
        self._rng = self._rng_in_epoch = None
        states = checkpoint.get(RECORD, {}).get("rng")
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if states is None or len(states) != size:
            return
        self._rng = states[rank]
        if _ends_in_epoch(checkpoint):
            self._rng_in_epoch = self._rng

    def restore_rng(self, device: torch.device) -> None:
        """Go on with the random numbers of the run that was loaded."""
        state, self._rng = self._rng, None
        if state is not None:
            set_rng_state(state, device)

    def restore_rng_in_epoch(self, device: torch.device) -> None:
        """Do so again once the data loaders of a broken epoch have drawn theirs."""
        state, self._rng_in_epoch = self._rng_in_epoch, None
        if state is not None:
            set_rng_state(state, device)


def _ends_in_epoch(checkpoint: Mapping[str, Any]) -> bool:
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return not progress.get("is_last_batch", True)


def _place(path: Any) -> Path | str:
    """Return a path on a local file system, or the URL of one elsewhere."""
    system = get_filesystem(path)
    protocols = [system.protocol] if isinstance(system.protocol, str) else system.protocol
    if {"file", "local"} & set(protocols):
        return Path(system._strip_protocol(str(path)))
    return str(path)


def _local(path: Any) -> Path:
    """Return the path of a local file system that a path or URL means."""
    system = get_filesystem(path)
    if {"file", "local"} & set(system.protocol):
        return Path(system._strip_protocol(str(path)))
    raise ValueError(f"{path}: only local folders are supported for sharded checkpoints.")
