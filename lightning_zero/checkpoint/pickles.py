"""Reading pickles of unknown origin: tensors stay on disk, and no code of theirs runs unasked."""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.entries import Segment, TensorEntry, from_tensor, map_leaves
from lightning_zero.checkpoint.places import Place


class Window(io.RawIOBase):
    """A range of a file that behaves like a file."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._at = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def readinto(self, out: Any) -> int:
        self._file.seek(self._start + self._at)
        view = memoryview(out)
        n: int = self._file.readinto(view[: max(self._nbytes - self._at, 0)])  # type: ignore[attr-defined]
        self._at += n
        return n


class Inert:
    """Stands in for an object whose class is not needed; keeps its arguments and does nothing."""

    def __new__(cls, *args: Any) -> Inert:
        self = super().__new__(cls)
        self.args = args
        return self

    args: tuple[Any, ...]

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_archive(place: Place, trust: bool = False, inert: str | None = None) -> Any:
    """Read what ``torch.save`` wrote, with entries in the place of tensors.

    Args:
        place: The file.
        trust: Whether the pickle may run code.
        inert: Objects of this package become :class:`Inert`.

    Returns:
        The saved object. Its tensors are read from the file later; only those in files that torch
        older than 1.6 wrote are read at once.
    """
    with place.open() as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            return _read_legacy(file, place, trust)
        allowed: list[Any] = []
        if inert is not None and not trust:
            file.seek(0)
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            allowed = [(Inert, name) for name in names if name.split(".")[0] == inert]
        file.seek(0)
        with torch.serialization.safe_globals(allowed):
            tree = _load(file, str(place), trust, "meta")

    def placed(key: str, leaf: Any) -> Any:
        if type(leaf) in _PLAIN or isinstance(leaf, Inert):
            return leaf
        where = f"{place}: {key}"
        return (_placed if isinstance(leaf, Tensor) else _filled)(leaf, place, 0, where)

    return map_leaves(tree, placed)


def read_slice(file: BinaryIO, segment: Segment, where: str, trust: bool = False) -> Any:
    """Read an object that ``torch.save`` wrote as a part of a file; its tensors are entries."""
    window = Window(file, segment.start, segment.nbytes)
    _check_archive(window, where)
    tree = _load(window, where, trust, "cpu")
    return map_leaves(
        tree, lambda key, x: from_tensor(x, where) if isinstance(x, Tensor) else x, where
    )


def place_slice(file: BinaryIO, segment: Segment, where: str) -> TensorEntry | Tensor:
    """Find the one tensor that ``torch.save`` wrote as a part of a file, without reading it."""
    window = Window(file, segment.start, segment.nbytes)
    _check_archive(window, where)
    tensor = _load(window, where, False, "meta")
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{where}: expected a tensor there and found a {type(tensor).__name__}")
    placed = _placed(tensor, segment.file, segment.start, where)
    assert isinstance(placed, TensorEntry)
    return placed


def _check_archive(window: Window, where: str) -> None:
    if not zipfile.is_zipfile(window):
        raise ValueError(
            f"{where}: truncated or damaged (not an archive). Copy it again, or take an older "
            "checkpoint"
        )
    window.seek(0)


def _load(file: Any, where: str, trust: bool, device: str) -> Any:
    try:
        return torch.load(file, map_location=device, weights_only=not trust)
    except pickle.UnpicklingError as error:
        if trust:
            raise ValueError(f"{where}: not a readable pickle: {error}") from error
        reason = str(error).strip().splitlines()
        named = [line.strip() for line in reason if "GLOBAL" in line or "Unsupported" in line]
        raise ValueError(
            f"{where}: this pickle wants to use code that is not known to be harmless "
            f"({' '.join(named[:1] or reason[:1])}). If you trust its origin, pass "
            "weights_only=False to the Trainer's method, or --trust to the converter"
        ) from error
    except (RuntimeError, EOFError, OSError, IndexError, KeyError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{where}: truncated or damaged ({first}). Copy it again, or take an older checkpoint"
        ) from error


def _read_legacy(file: BinaryIO, place: Place, trust: bool) -> Any:
    tree = _load(file, str(place), trust, "cpu")
    return map_leaves(
        tree, lambda key, x: from_tensor(x, f"{place}: {key}") if isinstance(x, Tensor) else x
    )


def _placed(leaf: Any, file: Place, start: int, where: str) -> Any:
    """Turn a tensor that was loaded to the meta device into an entry; leave others alone."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.layout != torch.strided or leaf.is_quantized:
        raise ValueError(f"{where}: {leaf.layout} and quantized tensors cannot be converted")
    if sys.byteorder != "little":
        raise RuntimeError("checkpoints are only read on little-endian machines")
    tensor = leaf.detach()
    storage: Any = tensor.untyped_storage()
    at = getattr(storage, "_checkpoint_offset", None) if tensor.numel() else 0
    if at is None and type(leaf) not in (Tensor, nn.Parameter):
        raise ValueError(
            f"{where}: a {type(leaf).__name__} has no place of its own in a file, and is not "
            "supported: save its plain values"
        )
    if at is None:
        raise RuntimeError(
            f"torch {torch.__version__} is too old to find tensors in files: update it"
        )
    whole = Segment(file, start + at, int(storage.nbytes()))
    first = int(tensor.storage_offset()) * tensor.dtype.itemsize
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    # What has no elements has no place in a file, and is one with nothing else.
    look = (shape, strides, tensor.dtype, tensor.is_conj(), tensor.is_neg())
    identity = (whole, first, *look) if tensor.numel() else where
    nbytes = tensor.numel() * tensor.dtype.itemsize
    conjugate, negative = tensor.is_conj(), tensor.is_neg()
    if tensor.is_contiguous() and not (conjugate or negative):
        segments = [Segment(file, whole.start + first, nbytes)]
        return TensorEntry(where, shape, tensor.dtype, identity, lambda: segments)

    def load() -> Tensor:
        items = whole.nbytes // tensor.dtype.itemsize
        flat = TensorEntry(where, (items,), tensor.dtype, whole, lambda: [whole]).read()
        kept = flat.as_strided(shape, strides, tensor.storage_offset())
        kept = kept.conj().resolve_conj() if conjugate else kept
        return -kept if negative else kept

    return TensorEntry(where, shape, tensor.dtype, identity, lambda: None, load)


_PLAIN = frozenset({str, int, float, bool, bytes, complex, type(None), torch.dtype, torch.device})


def _filled(leaf: Any, file: Place, start: int, where: str) -> Any:
    """Read the tensors inside an object of some class, which nobody else finds there."""
    tensors: dict[int, Tensor] = {}
    read: dict[int, Tensor] = {}  # what is there twice stays one
    body = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if not isinstance(obj, Tensor):
                return None
            tensors[id(obj)] = obj
            return id(obj)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> Tensor:
            if number not in read:
                read[number] = _read_like(tensors[number], file, start, where)
            return read[number]

    try:
        Pickler(body).dump(leaf)
    except Exception:  # it came out of a pickle in a way of its own
        return leaf
    body.seek(0)
    return Unpickler(body).load() if tensors else leaf


def _read_like(tensor: Tensor, file: Place, start: int, where: str) -> Tensor:
    read: Tensor = _placed(tensor, file, start, where).read()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(read, tensor.requires_grad)
    return read.requires_grad_(tensor.requires_grad)


# What torch.distributed.checkpoint pickles into `.metadata`, under names of our own: importing its
# modules would cost 50 MB and half a second, and a class that is not listed here is refused.


class _Record:
    """Attributes as they were pickled."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        for name in type(self).__annotations__:
            if not hasattr(self, name):
                raise pickle.UnpicklingError(f"a {type(self).__name__} in it has no {name}")


class Metadata(_Record):
    """What ``.metadata`` holds."""

    state_dict_metadata: dict[str, Any]
    storage_data: dict[Index, StorageInfo]
    planner_data: dict[str, tuple[Any, ...]] | None = None
    version: str | None = None


class TensorMetadata(_Record):
    """A tensor's properties, full shape and boxes."""

    properties: Properties
    size: torch.Size
    chunks: list[Chunk]


class BytesMetadata(_Record):
    """Says that a value is pickled."""


class Chunk(_Record):
    """A box of a tensor."""

    offsets: torch.Size
    sizes: torch.Size


class Properties:
    """A tensor's dtype, the first of what is pickled."""

    dtype: torch.dtype

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]
        if not isinstance(self.dtype, torch.dtype):
            raise pickle.UnpicklingError("a tensor in it has no dtype")


@dataclass
class Index:
    """The key of a box: its tensor's name and where it starts."""

    fqn: str = ""
    offset: torch.Size | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fqn = state["fqn"]
        self.offset = state.get("offset")


class StorageInfo(_Record):
    """Where a box or value lies."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None


_CHECKPOINT = "torch.distributed.checkpoint"
_STAND_INS: dict[tuple[str, str], Any] = {
    (f"{_CHECKPOINT}.metadata", "Metadata"): Metadata,
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"): TensorMetadata,
    (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"): BytesMetadata,
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"): Chunk,
    (f"{_CHECKPOINT}.metadata", "TensorProperties"): Properties,
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): Inert,
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"): Index,
    (f"{_CHECKPOINT}.metadata", "StorageMeta"): Inert,
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): StorageInfo,
    ("torch.serialization", "_get_layout"): Inert,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): Inert,
    ("pathlib", "WindowsPath"): Inert,
    ("pathlib._local", "PosixPath"): Inert,
    ("pathlib._local", "WindowsPath"): Inert,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which torch.distributed.checkpoint does not write there"
            )
        return _STAND_INS[module, name]


def read_metadata(place: Place) -> Metadata:
    """Read the ``.metadata`` of a folder without importing or running anything that it names."""
    try:
        with place.open() as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{place}: refused, truncated or damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{place}: expected a Metadata object, found {type(metadata).__name__}")
    return metadata
