"""Writes a checkpoint folder from all ranks, so that it is there whole or not at all."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_zero.checkpoint.read_sharded import META_FILE

_PREFIX = ".unfinished-"
_OLD = "-old-"
_STALE = 24 * 3600  # seconds after which another host's unfinished save counts as abandoned


def write_folder(
    path: Path, state: dict[str, Any], meta: dict[str, Any], group: ProcessGroup | None
) -> None:
    """Write a checkpoint folder. Every rank must call it, with its own part.

    The files go into a hidden folder beside ``path``, are synced, and are renamed into place last.

    Args:
        path: The folder to make; what is there is replaced.
        state: Weights and optimizer states, for ``torch.distributed.checkpoint``.
        meta: What else there is; rank 0's goes into ``meta.pt``.
        group: The ranks, able to carry CPU tensors; None for one rank.

    Raises:
        OSError: On every rank, if any of them cannot write.
    """
    first = group is None or dist.get_rank(group) == 0
    names: list[Any] = [None]
    together = _Together(group, path)
    with together:
        if first:
            names[0] = str(_begin(path))
    if group is not None:
        dist.broadcast_object_list(names, group=group, group_src=0)
    unfinished = Path(names[0])
    try:
        with together:
            _write(unfinished, state, group)
        with together:
            if first:
                _finish(unfinished, path, meta)
    except BaseException:
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


class _Together:
    """Raises on every rank what is raised on any."""

    def __init__(self, group: ProcessGroup | None, path: Path) -> None:
        self._group = group
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        texts: list[Any] = [None if error is None else f"{type(error).__name__}: {error}"]
        if self._group is not None:
            mine, texts = texts[0], [None] * dist.get_world_size(self._group)
            dist.all_gather_object(texts, mine, group=self._group)
        failed = {rank: text for rank, text in enumerate(texts) if text is not None}
        if failed:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise OSError(
                f"The checkpoint {self._path} could not be written ({told}). What was there before "
                "is untouched, and training can go on."
            ) from error


def _begin(path: Path) -> Path:
    """Make the hidden folder; remove those of saves that were killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clean(path.parent)
    owner = f"{socket.gethostname()}-{os.getpid()}"
    unfinished = path.parent / f"{_PREFIX}{owner}-{path.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    return unfinished


def unfinished_saves(parent: Path) -> list[Path]:
    """List the hidden folders of saves into ``parent`` that nobody will finish any more."""
    return [folder for folder in sorted(parent.glob(f"{_PREFIX}*")) if _is_abandoned(folder)]


def clean(parent: Path) -> None:
    """Remove what killed saves have left."""
    for folder in unfinished_saves(parent):
        _, old, name = folder.name.partition(_OLD)
        if old and not (parent / name).exists():
            folder.rename(parent / name)  # it was killed while it replaced this one
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    host, _, rest = folder.name.removeprefix(_PREFIX).partition(f"{socket.gethostname()}-")
    if not host and rest:
        number = rest.split("-")[0]
        if number.isdigit() and int(number) != os.getpid():
            return not _is_running(int(number))
        return False
    with suppress(OSError):
        return time.time() - folder.stat().st_mtime > _STALE
    return False


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _write(folder: Path, state: dict[str, Any], group: ProcessGroup | None) -> None:
    alone = group is None
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    # Of what every rank has, rank 0's counts, as in a full checkpoint: buffers may differ by rank.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        save(state, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
    except CheckpointException as error:  # no Exception, in torch 2.13
        causes = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())
        raise OSError(causes) from error


def _finish(unfinished: Path, path: Path, meta: dict[str, Any]) -> None:
    with open(unfinished / META_FILE, "wb") as file:
        torch.save(meta, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(unfinished)
    if path.is_symlink() or path.is_file():
        path.unlink()
    _rename(unfinished, path)
    _sync(path.parent)


def _rename(source: Path, target: Path) -> None:
    """Put a folder into another's place."""
    if not target.exists():
        source.rename(target)
        return
    old = target.parent / f"{_PREFIX}{socket.gethostname()}-{os.getpid()}{_OLD}{target.name}"
    shutil.rmtree(old, ignore_errors=True)
    if not _exchange(source, target):
        target.rename(old)
        source.rename(target)
    for folder in (source, old):
        shutil.rmtree(folder, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step, where the system can (Linux)."""
    rename: Callable[..., int] | None = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
