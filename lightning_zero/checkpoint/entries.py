"""Tensors of a checkpoint as places in files: measured at once, read when they are wanted.

Whatever wrote a checkpoint, its reader hands out a :class:`View` whose tensors are
:class:`TensorEntry`. Almost always a tensor's bytes lie in a few contiguous ranges, which stream
through a fixed buffer; only what is laid out otherwise is put together in memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.places import Place

BLOCK = 8 * 2**20
"""Bytes that are in memory at a time while a tensor streams. A multiple of every element size."""


class Segment(NamedTuple):
    """A contiguous range of bytes in a file."""

    file: Place
    start: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        where: File and key, for messages.
        shape: Full shape.
        dtype: Its dtype.
        identity: Equal for entries that are one and the same tensor, such as tied weights.
        locate: Finds the ranges that make up the tensor in row-major order, or returns None where
            its elements are not in that order in the files.
        load: Reads the tensor where ``locate`` returns None.
        stored: The dtype in the files, where it is converted on the way.
        locate_run: Does as ``locate`` for the ranges that hold some of the elements, from one to
            before another, and says with which element they start. Without it all are located.
    """

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    identity: Hashable
    locate: Callable[[], list[Segment] | None]
    load: Callable[[], Tensor] | None = None
    stored: torch.dtype | None = None
    locate_run: Callable[[int, int], tuple[int, list[Segment]] | None] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def cast(self, dtype: torch.dtype) -> TensorEntry:
        """Make an entry that converts this one to another dtype while it is read."""
        return replace(self, dtype=dtype, stored=self.stored or self.dtype)

    def blocks(self) -> Iterator[memoryview]:
        """Yield the tensor's bytes in order, each block valid until the next is asked for."""
        if not self.numel:
            return
        stored = self.stored or self.dtype
        segments = self.locate()
        if segments is None:
            yield from _converted(_slices(self._loaded()), self.dtype)
        elif stored == self.dtype:
            yield from _read_blocks(segments, self.where)
        else:
            raw = _read_blocks(segments, self.where)
            yield from _converted((torch.frombuffer(b, dtype=stored) for b in raw), self.dtype)

    def read(self) -> Tensor:
        """Read the whole tensor into memory."""
        if not self.numel:
            return torch.empty(self.shape, dtype=self.dtype)
        stored = self.stored or self.dtype
        segments = self.locate()
        if segments is None:
            return self._loaded().to(self.dtype)
        data = bytearray(self.numel * stored.itemsize)
        start = 0
        for segment in segments:
            _read_into(segment, 0, memoryview(data)[start : start + segment.nbytes], self.where)
            start += segment.nbytes
        return torch.frombuffer(data, dtype=stored).view(self.shape).to(self.dtype)

    def read_range(self, start: int, stop: int) -> Tensor:
        """Read the elements from ``start`` to ``stop`` in row-major order, 1-D."""
        if stop <= start:
            return torch.empty(0, dtype=self.dtype)
        located = self._located(start, stop)
        if located is None:
            return self._loaded().view(-1)[start:stop].to(self.dtype, copy=True)
        stored = self.stored or self.dtype
        size = stored.itemsize
        data = bytearray((stop - start) * size)
        begin, segments = located
        done, at = 0, begin * size  # bytes read, and where a segment starts in the tensor
        for segment in segments:
            first = max(start * size - at, 0)
            n = min(segment.nbytes, stop * size - at) - first
            if n > 0:
                _read_into(segment, first, memoryview(data)[done : done + n], self.where)
                done += n
            at += segment.nbytes
        return torch.frombuffer(data, dtype=stored).to(self.dtype)

    def _located(self, start: int, stop: int) -> tuple[int, list[Segment]] | None:
        if self.locate_run is not None:
            return self.locate_run(start, stop)
        segments = self.locate()
        return None if segments is None else (0, segments)

    def _loaded(self) -> Tensor:
        assert self.load is not None
        return self.load().contiguous()


@dataclass
class View:
    """What a checkpoint holds, with tensors as entries.

    Attributes:
        path: What was opened.
        format: One of ``sharded``, ``deepspeed``, ``lightning``, ``weights``, ``safetensors``.
        weights: The state dict: entries, and whatever else modules put there.
        optimizers: The optimizers' state dicts. States are keyed by parameter name in folders that
            ranks wrote, and by number, as torch does, in files.
        rest: Everything else at the checkpoint's top level: loops, callbacks, hyper-parameters.
        record: Which writer wrote it, where that is known: ``stage``, ``world_size``, ``version``.
        missing: What a whole checkpoint of this format would also have.
        broken: Why values that are neither weights nor tensors could not be read.
    """

    path: Place
    format: str
    weights: dict[str, Any]
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    broken: list[Exception] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """The weights that are tensors."""
        return {k: v for k, v in self.weights.items() if isinstance(v, TensorEntry)}


def from_tensor(tensor: Tensor, where: str) -> TensorEntry:
    """Make an entry of a tensor that is in memory already."""
    tensor = tensor.detach()
    return TensorEntry(
        where, tuple(tensor.shape), tensor.dtype, id(tensor), _nowhere, lambda: tensor
    )


def _nowhere() -> None:
    return None


def map_leaves(tree: Any, change: Callable[[str, Any], Any], key: str = "") -> Any:
    """Copy nested dicts, lists and tuples with every leaf replaced by ``change(its key, leaf)``."""
    if isinstance(tree, dict):
        # A copy of the same class, with the attributes that it carries.
        same = copy.copy(tree)
        for name, value in tree.items():
            same[name] = map_leaves(value, change, f"{key}.{name}" if key else str(name))
        return same
    if isinstance(tree, (list, tuple)):
        made_list = [
            map_leaves(v, change, f"{key}.{i}" if key else str(i)) for i, v in enumerate(tree)
        ]
        if hasattr(tree, "_fields"):
            return type(tree)(*made_list)
        return type(tree)(made_list) if isinstance(tree, tuple) else made_list
    return change(key, tree)


def entries(tree: Any) -> dict[str, TensorEntry]:
    """List the entries in a tree by their dotted keys."""
    found: dict[str, TensorEntry] = {}

    def note(key: str, leaf: Any) -> Any:
        if isinstance(leaf, TensorEntry):
            found[key] = leaf
        return leaf

    map_leaves(tree, note)
    return found


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.view(-1)
    step = BLOCK // tensor.dtype.itemsize
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]


def _converted(parts: Iterator[Tensor], dtype: torch.dtype) -> Iterator[memoryview]:
    """Copy tensors through one buffer, which is how their bytes come out without numpy."""
    buffer = bytearray(0)
    target = torch.empty(0, dtype=dtype)
    for part in parts:
        if part.numel() > target.numel():
            buffer = bytearray(part.numel() * dtype.itemsize)
            target = torch.frombuffer(buffer, dtype=dtype)
        target[: part.numel()].copy_(part)
        yield memoryview(buffer)[: part.numel() * dtype.itemsize]


def _read_blocks(segments: Sequence[Segment], where: str) -> Iterator[memoryview]:
    """Read ranges one after the other; a block may span several, so that it is whole elements."""
    total = sum(segment.nbytes for segment in segments)
    buffer = memoryview(bytearray(min(BLOCK, total)))
    filled = 0
    for segment in segments:
        done = 0
        while done < segment.nbytes:
            n = min(len(buffer) - filled, segment.nbytes - done)
            _read_into(segment, done, buffer[filled : filled + n], where)
            filled += n
            done += n
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _read_into(segment: Segment, start: int, out: memoryview, where: str) -> None:
    with open_holding(segment.file, where) as file:
        file.seek(segment.start + start)
        done = 0
        while done < len(out):
            n = file.readinto(out[done:])
            if not n:
                raise ValueError(
                    f"{segment.file} is truncated: {where} should reach to byte "
                    f"{segment.start + segment.nbytes}, but the file ends before. Copy it again, "
                    "or take an older checkpoint"
                )
            done += n


def open_holding(file: Place, where: str) -> Any:
    """Open a file that holds ``where``.

    Raises:
        FileNotFoundError: If it is not there any more.
    """
    try:
        return file.open()
    except FileNotFoundError as error:
        if error.errno is None:  # it says more
            raise
        raise FileNotFoundError(
            f"{file} is missing, which holds {where.removeprefix(f'{file}: ')}: copy the files of "
            "all ranks, or take an older checkpoint"
        ) from error
