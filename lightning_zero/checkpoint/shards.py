"""Parts of tensors, in the words of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import math
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

from lightning_zero.engine.layout import Box, boxes


class TensorShard(Tensor):
    """One rank's part of a tensor: a run of its elements, in the order in which they lie in memory.

    The stock planners of ``torch.distributed.checkpoint`` ask it for its boxes (the
    ``_Checkpointable`` protocol, torch 2.13), so the file holds them under the tensor's own name
    and at its full shape.

    Args:
        local: The elements, 1-D.
        shape: The whole tensor's.
        stride: The whole tensor's; its elements fill one block of memory.
        start: Where the run starts, in elements.
        fills_gap: Whether this rank is to stand for a tensor without elements.

    Attributes:
        local: As given.
    """

    local: Tensor
    _start: int
    _order: list[int]
    _boxes: list[Box]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        shape: torch.Size,
        stride: Sequence[int],
        start: int,
        fills_gap: bool = False,
    ) -> TensorShard:
        self: TensorShard = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device
        )
        self.local = local
        self._start = start
        # Dimensions from the one with the longest stride to the one whose elements are neighbours.
        self._order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
        inner = [shape[dim] for dim in self._order]
        self._boxes = boxes(inner, start, start + local.numel())
        if fills_gap and not shape.numel():
            self._boxes = [Box((0,) * len(inner), tuple(inner), 0)]
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def copied(self) -> TensorShard:
        """Return the same part with a copy of its elements on the CPU."""
        return self._with(self.local.detach().to("cpu", copy=True))

    def _with(self, local: Tensor) -> TensorShard:
        copy = TensorShard(local, self.shape, (0,) * self.dim(), 0)
        copy._start, copy._order, copy._boxes = self._start, self._order, self._boxes
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            f"a weight of shape {tuple(self.shape)} is inside a tuple or an object of some class, "
            "and of it this rank has only a part, which can be saved in dicts and lists alone: put "
            "it into one, or use state_dict_type='full'"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TensorShard(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            shard: TensorShard = args[0]
            return shard._with(func(shard.local, **(kwargs or {})))
        raise NotImplementedError(
            f"{func} was called on a tensor of a checkpoint that is being saved sharded, of which "
            "this rank has only a part: replace or remove it, or use state_dict_type='full'."
        )

    def _unordered(self, values: Sequence[int]) -> torch.Size:
        """Bring what stands in the order of memory into the order of dimensions."""
        result = [0] * len(values)
        for value, dim in zip(values, self._order, strict=True):
            result[dim] = value
        return torch.Size(result)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(self._unordered(box.offset), self._unordered(box.size))
            for box in self._boxes
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self._boxes:
            if self._unordered(box.offset) == index.offset:
                first = box.start - self._start
                part = self.local[first : first + math.prod(box.size)].view(box.size)
                positions = [self._order.index(dim) for dim in range(len(self._order))]
                return part.permute(positions)
        raise KeyError(f"{index}: this rank holds no such part")
