"""The arithmetic of flat buffers: which parameter sits where, and which slice a rank owns.

Nothing here touches a tensor or a process group, so planner, checkpoints and engine can share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT = 16
"""Parameters and shards start at multiples of this many elements: 64 bytes in fp32, as torch's own
allocations do, so that kernels see the alignment they would see under DDP."""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one parameter that one rank owns, in elements.

    Attributes:
        start: First element, counted in the parameter.
        stop: One past the last element; equal to ``start`` where the rank owns nothing of it.
        shard_start: Where that first element sits in the rank's shard.
    """

    start: int
    stop: int
    shard_start: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def shard_stop(self) -> int:
        return self.shard_start + self.numel


class FlatLayout:
    """Places parameters one after the other in a flat buffer that is cut evenly over the ranks.

    Args:
        numels: Elements of each parameter, in order. Zero is allowed.
        world_size: Number of ranks, N.

    Attributes:
        offsets: First element of each parameter in the flat buffer.
        numels: Elements of each parameter.
        shard_numel: Elements of every rank's shard, a multiple of ``ALIGNMENT`` and at least that.
        flat_numel: Elements of the whole flat buffer with padding, ``shard_numel * world_size``.
    """

    def __init__(self, numels: Sequence[int], world_size: int) -> None:
        self.world_size = world_size
        self.numels = tuple(numels)
        offsets, end = [], 0
        for numel in numels:
            offsets.append(end)
            end = _round_up(end + numel, ALIGNMENT)
        self.offsets = tuple(offsets)
        self.shard_numel = max(_round_up(-(-end // world_size), ALIGNMENT), ALIGNMENT)
        self.flat_numel = self.shard_numel * world_size

    def slice_of(self, index: int, rank: int) -> Slice:
        """Say which part of parameter ``index`` lies in the shard of ``rank``."""
        offset, numel = self.offsets[index], self.numels[index]
        shard_start = rank * self.shard_numel
        start = min(max(shard_start - offset, 0), numel)
        stop = max(min(shard_start + self.shard_numel - offset, numel), start)
        inside = offset + start - shard_start if stop > start else 0
        return Slice(start, stop, inside)

    def holders_of(self, index: int) -> range:
        """List the ranks whose shards hold a part of parameter ``index``."""
        offset, numel = self.offsets[index], self.numels[index]
        if not numel:
            return range(0)
        return range(offset // self.shard_numel, (offset + numel - 1) // self.shard_numel + 1)


class Box(NamedTuple):
    """A box of a tensor whose elements follow each other in row-major order.

    Attributes:
        offset: First index in each dimension.
        size: Length in each dimension.
        start: Its first element, counted in the whole tensor.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cover a range of elements of a row-major tensor with the fewest boxes.

    Args:
        shape: The tensor's shape.
        start: First element of the range.
        stop: One past its last element.

    Returns:
        At most ``2 * len(shape) - 1`` boxes, in order; none for an empty range.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), (), 0)]
    inner = math.prod(shape[1:])
    first, last = start // inner, stop // inner
    if start % inner and first == last:
        return _in_row(shape, first, start, stop)
    found = []
    if start % inner:
        found += _in_row(shape, first, start, (first + 1) * inner)
        first += 1
    if last > first:
        zeros = (0,) * (len(shape) - 1)
        found.append(Box((first, *zeros), (last - first, *shape[1:]), first * inner))
    if stop % inner:
        found += _in_row(shape, last, last * inner, stop)
    return found


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    """Cover a range within one index of the first dimension."""
    begin = row * math.prod(shape[1:])
    return [
        Box((row, *box.offset), (1, *box.size), begin + box.start)
        for box in boxes(shape[1:], start - begin, stop - begin)
    ]
