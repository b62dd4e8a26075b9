"""Writes checkpoints, folders by all ranks and files by one, whole or not at all."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from lightning_zero.checkpoint import folder
from lightning_zero.checkpoint.places import place_of
from lightning_zero.checkpoint.read_sharded import META_FILE, METADATA_FILE, check_parts
from lightning_zero.checkpoint.together import Together


def write_folder(path: Path, state: dict[str, Any], meta: bytes, together: Together) -> None:
    """Write a checkpoint folder. Every rank must call it, with its own part.

    Args:
        path: The folder to make; what is there is replaced.
        state: Weights and optimizer states, for ``torch.distributed.checkpoint``.
        meta: What goes into ``meta.pt``; looked at on rank 0 only.
        together: The ranks.

    Raises:
        OSError: On every rank, if any of them cannot write.
    """

    def make() -> Path:
        made = folder.begin(path)
        made.mkdir()
        return made

    unfinished = together.first(make)
    try:
        with together:
            if not unfinished.is_dir():
                raise FileNotFoundError(
                    f"this rank does not see {unfinished}, which rank 0 has made: all nodes must "
                    "share the file system"
                )
        with together:
            _save(state, FileSystemWriter(unfinished), together.group)
        with together:
            if together.is_first:
                _write_bytes(unfinished / META_FILE, meta)
                check_parts(place_of(unfinished))  # nobody has taken it for abandoned
                folder.put(unfinished, path)
    except BaseException:
        if together.is_first:
            folder.discard(unfinished)
        raise


def write_remote(url: str, state: dict[str, Any], meta: bytes, together: Together) -> None:
    """Write a checkpoint folder to where names cannot be swapped, with its metadata last.

    Args:
        url: The folder, with the protocol of a file system that ``fsspec`` knows.
        state: As for ``write_folder``.
        meta: As for ``write_folder``.
        together: The ranks.

    Raises:
        OSError: On every rank, if any of them cannot write.
    """
    token = together.first(lambda: secrets.token_hex(4))
    with together:
        writer = _RemoteWriter(url, token, meta)
    try:
        with together:
            _save(state, writer, together.group)
    except BaseException:
        if together.is_first:
            writer.abort()
        raise


def write_file(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a full checkpoint; what is there is replaced."""
    unfinished = folder.begin(path)
    try:
        with open(unfinished, "wb") as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # of its archive, which hides why it could not be written
                raise error.__context__ or error from None
            folder.sync_file(file)
        folder.put(unfinished, path)
    except BaseException:
        folder.discard(unfinished)
        raise


def _save(state: dict[str, Any], writer: StorageWriter, group: ProcessGroup | None) -> None:
    # Of what every rank has, rank 0's counts, as in a full checkpoint: buffers may differ by rank.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    alone = group is None
    with warnings.catch_warnings() if alone else nullcontext():
        if alone:  # it says that it is alone
            warnings.simplefilter("ignore")
        try:
            save(state, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
        except CheckpointException as error:  # no Exception, in torch 2.13
            mine = error.failures.get(0 if group is None else dist.get_rank(group))
            if mine is None:  # the ranks that failed tell this one
                return
            if isinstance(mine[0], Exception):
                raise mine[0] from error
            raise RuntimeError(repr(mine[0])) from error


def _write_bytes(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        folder.sync_file(file)


@dataclass(frozen=True)
class _Prefix:
    """What the names of one rank's files begin with, as torch's writer takes it from a plan."""

    prefix: str


class _RemoteWriter(FsspecWriter):
    """Gives each save file names of its own, so that what it replaces stays whole until the end."""

    def __init__(self, url: str, token: str, meta: bytes) -> None:
        super().__init__(url, sync_files=False)  # there is nothing that could be synced
        self._url = url
        self._token = token
        self._meta = meta
        self._finished = False

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            replace(plan, storage_data=_Prefix(f"__{rank}_{self._token}_"))
            for rank, plan in enumerate(plans)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        before = {name: self._content(name) for name in (META_FILE, METADATA_FILE)}
        try:
            if before[METADATA_FILE] is not None:
                # A kill from here on leaves no checkpoint, and no mix of two.
                self.fs.rm_file(self.fs.concat_path(self.path, METADATA_FILE))
            self._write(META_FILE, self._meta)
            super().finish(metadata, results)
        except BaseException:
            for name, content in before.items():
                if content is not None:
                    with suppress(Exception):
                        self._write(name, content)
            raise
        self._finished = True
        with suppress(Exception):  # the checkpoint is whole; the next save tries again
            self._remove_files(of_this_save=False)

    def abort(self) -> None:
        """Remove what a failed save has written, as far as that is possible."""
        if not self._finished:
            with suppress(Exception):
                self._remove_files(of_this_save=True)

    def _content(self, name: str) -> bytes | None:
        place = self.fs.concat_path(self.path, name)
        if not self.fs.exists(place):
            return None
        with self.fs.create_stream(place, "rb") as file:
            content: bytes = file.read()
        return content

    def _write(self, name: str, content: bytes) -> None:
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as file:
            file.write(content)

    def _remove_files(self, of_this_save: bool) -> None:
        """Remove the ranks' files, either of this save or of all others."""
        names: Sequence[str] = self.fs.ls(self.path)
        for name in names:
            if name.endswith(".distcp") and (f"_{self._token}_" in name) == of_this_save:
                self.fs.rm_file(name)
