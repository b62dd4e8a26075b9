"""Writes a folder as ranks write it with ``torch.distributed.checkpoint``, from one process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.entries import TensorEntry
from lightning_zero.checkpoint.folder import sync_file
from lightning_zero.checkpoint.read_sharded import META_FILE, METADATA_FILE
from lightning_zero.checkpoint.write_file import Advance, write_archive

_DATA_FILE = "__0_0.distcp"


def write_sharded(
    state: Mapping[str, Any], meta: Mapping[str, Any], folder: Path, advance: Advance
) -> None:
    """Write the files of one rank and what describes them.

    Args:
        state: Weights and optimizer states, which go into the ``.distcp`` file under their own
            names.
        meta: The rest, which goes into ``meta.pt``.
        folder: An empty folder.
        advance: Called after each block.
    """
    # Imported for their names in the pickle; converting to a file goes without them.
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    values: dict[str, tuple[tuple[Any, ...], Any]] = {}
    for key, value in state.items():
        _flatten((str(key),), value, values)
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    written: dict[Any, Any] = {}
    with open(folder / _DATA_FILE, "wb") as file:
        for name, (_, value) in values.items():
            described[name] = _describe(value)
            is_tensor = isinstance(value, TensorEntry)
            identity = (value.identity, value.dtype) if is_tensor else name
            if identity not in written:
                start = file.tell()
                write_archive(value, file, advance)
                written[identity] = _StorageInfo(_DATA_FILE, start, file.tell() - start)
            offset = torch.Size([0] * len(value.shape)) if is_tensor else None
            places[MetadataIndex(name, offset)] = written[identity]
        sync_file(file)
    with open(folder / META_FILE, "wb") as file:
        write_archive(dict(meta), file, advance)
        sync_file(file)
    paths = {name: path for name, (path, _) in values.items()}
    metadata = Metadata(described, planner_data=paths, storage_data=places, version="1.0.0")
    # Last, because a folder without it is not a checkpoint.
    with open(folder / METADATA_FILE, "wb") as file:
        pickle.dump(metadata, file)
        sync_file(file)


def _describe(value: Any) -> Any:
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    if not isinstance(value, TensorEntry):
        return BytesStorageMetadata()
    size = torch.Size(value.shape)
    box = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), size, [box])


def _flatten(
    path: tuple[Any, ...], value: Any, values: dict[str, tuple[tuple[Any, ...], Any]]
) -> None:
    """List the leaves as the stock planner does: lists without tensors and dicts stay whole."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten((*path, str(key)), inner, values)
    elif isinstance(value, list) and _is_nested(value):
        for number, inner in enumerate(value):
            _flatten((*path, number), inner, values)
    else:
        name = ".".join(map(str, path))
        if name in values:
            raise ValueError(f"two values have the same dotted name '{name}': rename one")
        values[name] = path, value


def _is_nested(values: list[Any]) -> bool:
    return any(
        isinstance(value, (Mapping, TensorEntry)) or (isinstance(value, list) and _is_nested(value))
        for value in values
    )
