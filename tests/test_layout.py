"""The arithmetic of flat buffers, for any sizes and any number of ranks, without processes."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_zero.engine.layout import ALIGNMENT, FlatLayout, Slice

numels = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 100), st.integers(0, 10**9)), max_size=12
)
world_sizes = st.one_of(st.integers(1, 9), st.integers(1, 1024))


@given(numels, world_sizes)
@example([], 1)
@example([0], 1024)
@example([1], 1024)
@example([16, 16], 2)
@example([15, 17], 2)
@settings(deadline=None)
def test_slices_of_all_ranks_partition_every_parameter_in_order(
    numels: list[int], world_size: int
) -> None:
    layout = FlatLayout(numels, world_size)
    for index, numel in enumerate(numels):
        end = 0
        for rank in range(world_size):
            part = layout.slice_of(index, rank)
            assert 0 <= part.start <= part.stop <= numel
            assert part.numel == part.stop - part.start
            if part.numel:
                assert part.start == end
                end = part.stop
        assert end == numel


@given(numels, world_sizes)
@settings(deadline=None)
def test_the_holders_of_a_parameter_are_the_ranks_with_a_part_of_it(
    numels: list[int], world_size: int
) -> None:
    layout = FlatLayout(numels, world_size)
    for index in range(len(numels)):
        found = [rank for rank in range(world_size) if layout.slice_of(index, rank).numel]
        assert list(layout.holders_of(index)) == found


@given(numels, world_sizes)
@settings(deadline=None)
def test_a_slice_is_the_same_elements_in_the_parameter_and_in_the_shard(
    numels: list[int], world_size: int
) -> None:
    layout = FlatLayout(numels, world_size)
    for rank in range(world_size):
        for index, offset in enumerate(layout.offsets):
            part = layout.slice_of(index, rank)
            assert 0 <= part.shard_start <= part.shard_stop <= layout.shard_numel
            assert part.shard_stop - part.shard_start == part.numel
            if part.numel:
                place_in_flat = offset + part.start
                assert rank * layout.shard_numel + part.shard_start == place_in_flat


@given(numels, world_sizes)
@settings(deadline=None)
def test_slices_of_a_shard_do_not_overlap(numels: list[int], world_size: int) -> None:
    layout = FlatLayout(numels, world_size)
    for rank in range(world_size):
        parts = [layout.slice_of(index, rank) for index in range(len(numels))]
        held = [(part.shard_start, part.shard_stop) for part in parts if part.numel]
        for (_, stop), (start, _) in itertools.pairwise(held):
            assert stop <= start


@given(numels, world_sizes)
@settings(deadline=None)
def test_parameters_and_shards_start_aligned_and_parameters_do_not_overlap(
    numels: list[int], world_size: int
) -> None:
    layout = FlatLayout(numels, world_size)
    assert layout.numels == tuple(numels)
    assert layout.shard_numel % ALIGNMENT == 0
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    ends = [offset + numel for offset, numel in zip(layout.offsets, numels, strict=True)]
    assert all(end <= start for end, start in zip(ends, layout.offsets[1:], strict=False))
    assert max(ends, default=0) <= layout.flat_numel


@given(numels, world_sizes)
@settings(deadline=None)
def test_padding_is_less_than_one_alignment_per_parameter_and_per_rank(
    numels: list[int], world_size: int
) -> None:
    layout = FlatLayout(numels, world_size)
    assert layout.flat_numel == layout.shard_numel * world_size
    assert layout.shard_numel >= ALIGNMENT  # an empty shard would have no address
    padding = layout.flat_numel - sum(numels)
    assert padding >= 0
    used = sum(numel > 0 for numel in numels)
    assert padding <= used * (ALIGNMENT - 1) + world_size * ALIGNMENT


@given(numels, world_sizes, st.data())
@settings(deadline=None)
def test_parameters_without_elements_belong_to_no_rank_and_take_no_room(
    numels: list[int], world_size: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(numels)))
    layout = FlatLayout([*numels[:position], 0, *numels[position:]], world_size)
    without = FlatLayout(numels, world_size)
    assert layout.flat_numel == without.flat_numel
    assert layout.offsets[:position] + layout.offsets[position + 1 :] == without.offsets
    for rank in {0, world_size // 2, world_size - 1}:
        assert layout.slice_of(position, rank) == Slice(0, 0, 0)


@given(st.integers(1, ALIGNMENT), st.integers(2, 1024))
def test_with_more_ranks_than_elements_the_first_rank_owns_them(
    numel: int, world_size: int
) -> None:
    layout = FlatLayout([numel], world_size)
    assert layout.slice_of(0, 0) == Slice(0, numel, 0)
    assert all(layout.slice_of(0, rank).numel == 0 for rank in range(1, world_size))


@given(numels)
@settings(deadline=None)
def test_one_rank_owns_everything(numels: list[int]) -> None:
    layout = FlatLayout(numels, 1)
    for index, numel in enumerate(numels):
        part = layout.slice_of(index, 0)
        assert (part.start, part.stop) == (0, numel)
        if numel:
            assert part.shard_start == layout.offsets[index]


def test_a_parameter_is_cut_where_shards_meet() -> None:
    layout = FlatLayout([40, 1, 0, 25], 3)  # at 0, 48, 64 and 64; 89 elements in shards of 32
    assert layout.offsets == (0, 48, 64, 64)
    assert (layout.shard_numel, layout.flat_numel) == (32, 96)
    assert [layout.slice_of(0, rank) for rank in range(3)] == [
        Slice(0, 32, 0),
        Slice(32, 40, 0),
        Slice(40, 40, 0),
    ]
    assert layout.slice_of(1, 1) == Slice(0, 1, 16)
    assert layout.slice_of(3, 2) == Slice(0, 25, 0)
