"""Writes single files block by block: safetensors, and the archives that ``torch.load`` reads."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor

from lightning_zero.checkpoint.entries import TensorEntry
from lightning_zero.checkpoint.pickles import Inert
from lightning_zero.checkpoint.read_file import SAFETENSORS_DTYPES

Advance = Callable[[int], object]
"""Is told how many bytes have been written."""

_ALIGNMENT = 64  # Where torch lets the tensors of an archive start.
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def write_safetensors(
    weights: Mapping[str, TensorEntry],
    metadata: Mapping[str, str],
    file: BinaryIO,
    advance: Advance,
) -> None:
    """Write a safetensors file: the header's length, the header, the tensors end to end."""
    # The widest dtype comes first, which keeps every tensor aligned to its own element size.
    order = sorted(weights.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, entry in order:
        if entry.dtype not in _DTYPE_NAMES:
            raise ValueError(
                f"{entry.where}: safetensors has no name for {entry.dtype}: pass --dtype, or write "
                "a .pt file"
            )
        header[name] = {
            "dtype": _DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, entry in order:
        for block in entry.blocks():
            file.write(block)
            advance(len(block))


def write_archive(tree: Any, file: IO[bytes], advance: Advance) -> None:
    """Write a tree as ``torch.save`` would, with the bytes of its entries read on the way.

    Args:
        tree: Any picklable object; tensors in it are entries. Entries of one identity are written
            once and share their memory when they are loaded.
        file: Where to write; archives may follow each other in one file.
        advance: Called after each block.

    ``torch.save`` itself wants the tensors in memory. Its ``skip_data`` does not, but reserves
    memory for them all the same, and leaves checksums that do not match the bytes filled in later.
    """
    body = io.BytesIO()
    pickler = _Pickler(body)
    pickler.dump(tree)
    start = file.tell()
    with zipfile.ZipFile(_Part(file, start), "w", allowZip64=True) as archive:
        _add(archive, "data.pkl", body.getbuffer())
        _add(archive, "byteorder", b"little")
        for entry, storage in pickler.storages.values():
            info = _info(f"data/{storage.key}", file.tell() - start)
            with archive.open(info, "w", force_zip64=True) as record:
                for block in entry.blocks():
                    record.write(block)
                    advance(len(block))
        _add(archive, "version", b"3\n")
    file.seek(0, os.SEEK_END)


def _add(archive: zipfile.ZipFile, name: str, data: Any) -> None:
    archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)


def _info(name: str, at: int) -> zipfile.ZipInfo:
    """Describe a record at ``at`` that is padded so that its data is aligned."""
    info = zipfile.ZipInfo(f"archive/{name}")
    # A local header has 30 bytes, the name, and here 20 bytes for 64-bit sizes; the padding is a
    # field with a header of 4 bytes.
    before = at + 30 + len(info.filename) + 20 + 4
    padding = -before % _ALIGNMENT
    info.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    return info


class _Part(io.RawIOBase):
    """What follows a position in a file, as a file of its own."""

    def __init__(self, file: IO[bytes], start: int) -> None:
        self._file, self._start = file, start

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET:
            offset += self._start
        return self._file.seek(offset, whence) - self._start

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


class _Storage:
    """A tensor's memory in an archive."""

    def __init__(self, key: str, kind: type, numel: int) -> None:
        self.key, self.kind, self.numel = key, kind, numel


class _Pickler(pickle.Pickler):
    """Pickles entries as the tensors that they stand for."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[Any, tuple[TensorEntry, _Storage]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cpu", obj.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            raise ValueError(
                f"a tensor of shape {tuple(obj.shape)} inside an object of some class cannot be "
                "converted: pass --weights-only to leave everything but weights out"
            )
        if isinstance(obj, Inert):
            raise ValueError(
                "an object of a class that was not loaded cannot be converted: pass --weights-only "
                "to leave everything but weights out, or --trust where its package is installed"
            )
        if not isinstance(obj, TensorEntry):
            return NotImplemented
        storage = self._storage(obj)
        strides = [1]
        for size in reversed(obj.shape[1:]):
            strides.insert(0, strides[0] * max(size, 1))
        kept = tuple(strides[: len(obj.shape)])
        hooks: OrderedDict[Any, Any] = OrderedDict()
        if storage.kind is torch.UntypedStorage:
            made = (storage, 0, obj.shape, kept, False, hooks, obj.dtype)
            return torch._utils._rebuild_tensor_v3, made
        return torch._utils._rebuild_tensor_v2, (storage, 0, obj.shape, kept, False, hooks)

    def _storage(self, entry: TensorEntry) -> _Storage:
        key = (entry.identity, entry.dtype)
        if key not in self.storages:
            kind = torch.storage._dtype_to_storage_type_map().get(entry.dtype)
            kind_class = torch.UntypedStorage if kind is None else getattr(torch, kind)
            numel = entry.nbytes if kind is None else entry.numel
            storage = _Storage(str(len(self.storages)), kind_class, numel)
            self.storages[key] = entry, storage
        return self.storages[key][1]
