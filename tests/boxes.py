"""Tensors that are saved in several boxes, as a rank does whose part is not a whole slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a box starts in a tensor, and its size."""


class Boxes(torch.Tensor):
    """A tensor of full shape of which one rank holds some boxes.

    It takes part in ``torch.distributed.checkpoint`` by its protocol for tensor subclasses.
    """

    full: Tensor
    boxes: list[Box]

    @staticmethod
    def __new__(cls, full: Tensor, boxes: Sequence[Box]) -> Boxes:
        self: Any = torch.Tensor._make_wrapper_subclass(cls, full.shape, dtype=full.dtype)
        self.full, self.boxes = full, list(boxes)
        return self

    @classmethod
    def cut(cls, full: Tensor, parts: int) -> Boxes:
        """Cut a tensor into equal parts along its first dimension, all held here."""
        boxes: list[Box] = []
        step = max(-(-full.shape[0] // parts), 1)
        for start in range(0, full.shape[0], step):
            size = min(step, full.shape[0] - start)
            boxes.append(((start, *[0] * (full.ndim - 1)), (size, *full.shape[1:])))
        return cls(full, boxes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].full, args[0].boxes)
        raise NotImplementedError(str(func))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Boxes({tuple(self.shape)}, {self.boxes})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in self.boxes]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offset = tuple(index.offset or ())
        size = dict(self.boxes)[offset]
        part = self.full
        for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
            part = part.narrow(dim, start, length)
        return part.contiguous()


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cover the elements from ``start`` to ``stop`` of a row-major tensor with boxes."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner = torch.Size(shape[1:]).numel()
    first, last = start // inner, stop // inner
    if first == last:
        below = flat_boxes(shape[1:], start - first * inner, stop - first * inner)
        return [((first, *o), (1, *s)) for o, s in below]
    boxes: list[Box] = []
    if start % inner:
        below = flat_boxes(shape[1:], start % inner, inner)
        boxes += [((first, *o), (1, *s)) for o, s in below]
        first += 1
    if last > first:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(((first, *zeros), (last - first, *shape[1:])))
    if stop % inner:
        boxes += [((last, *o), (1, *s)) for o, s in flat_boxes(shape[1:], 0, stop % inner)]
    return boxes


def part_of(full: Tensor, rank: int, world_size: int) -> Boxes:
    """Give a rank its flat slice, which is empty for the last ranks of a small tensor."""
    if not full.numel():
        empty: list[Box] = [((0,) * full.ndim, tuple(full.shape))] if rank == 0 else []
        return Boxes(full, empty)
    share = -(-full.numel() // world_size)
    start = min(rank * share, full.numel())
    return Boxes(full, flat_boxes(tuple(full.shape), start, min(start + share, full.numel())))
