"""The collectives against what they mean, computed on each rank from what all ranks put in."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.engine.collectives import Collectives, GlooCollectives, LocalCollectives
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.objects import deliver, share
from ranks import run_ranks

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
SIZES = (16, 4096)  # elements of a shard


def every_way(rank: int, world_size: int) -> list[Collectives]:
    """Make the collectives that an engine chooses by itself, and the portable ones."""
    device = torch.device("cpu")
    chosen = ZeroEngine(nn.Linear(1, 1), stall_timeout=20.0).collectives
    if world_size == 1:
        assert type(chosen) is LocalCollectives
        return [chosen]
    if type(chosen) is GlooCollectives:
        return [chosen]
    return [chosen, GlooCollectives(dist.group.WORLD, device, stall_timeout=20.0)]


def close(talk: Collectives) -> None:
    """Close once no rank needs another any more."""
    if talk.world_size > 1:
        dist.barrier()
    talk.close()


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a rank puts in; every rank can compute it."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def average(terms: list[Tensor], base: Tensor | None = None) -> Tensor:
    """Add in the order of ranks, in the terms' own dtype, then divide."""
    if base is not None:
        terms = [term + base for term in terms]
    total = terms[0].clone()
    for term in terms[1:]:
        total = total + term
    return total / len(terms)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gather_concatenates_the_shards_in_the_order_of_ranks(world_size: int) -> None:
    def body(rank: int, world_size: int) -> None:
        for talk in every_way(rank, world_size):
            for dtype in FLOATS:
                for numel in SIZES:
                    expected = torch.cat([values(r, numel, dtype) for r in range(world_size)])
                    shard = values(rank, numel, dtype)
                    flat = torch.empty(world_size * numel, dtype=dtype)
                    talk.gather(flat, shard, "a test", tag=1).wait()
                    assert torch.equal(flat, expected)
                    talk.await_readers(shard)  # else it must stay as it is
                    assert torch.equal(shard, values(rank, numel, dtype))
                    # The shard may be its own place in the result.
                    flat = torch.empty(world_size * numel, dtype=dtype)
                    own = flat.view(world_size, -1)[rank]
                    own.copy_(shard)
                    pending = talk.gather(flat, own, "a test", tag=1)
                    pending.wait()
                    pending.wait()  # a second wait does nothing
                    assert torch.equal(flat, expected)
            close(talk)

    run_ranks(body, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_reduce_averages_in_the_order_of_ranks(world_size: int) -> None:
    def body(rank: int, world_size: int) -> None:
        for talk in every_way(rank, world_size):
            for dtype in FLOATS:
                for numel in SIZES:
                    flats = [values(r, world_size * numel, dtype) for r in range(world_size)]
                    parts = [flat.view(world_size, -1)[rank] for flat in flats]
                    for based in (False, True):
                        base = values(rank, numel, dtype, seed=7) if based else None
                        expected = average(parts, base)
                        flat, out = flats[rank].clone(), torch.empty(numel, dtype=dtype)
                        talk.reduce(flat, out, "a test", 1, base).wait()
                        assert torch.equal(out, expected), (dtype, numel, based)
                        if base is not None:
                            assert torch.equal(base, values(rank, numel, dtype, seed=7))
                        # The result may be this rank's place in what it puts in.
                        flat = flats[rank].clone()
                        out = flat.view(world_size, -1)[rank]
                        pending = talk.reduce(flat, out, "a test", 1, base)
                        pending.wait()
                        pending.wait()
                        assert torch.equal(out, expected), (dtype, numel, based)
            close(talk)

    run_ranks(body, world_size)


def test_sums_do_not_depend_on_who_owns_the_result() -> None:
    terms = [2.0**25, 1.0, -(2.0**25), 1.0]  # in fp32, another order gives another sum
    assert average([torch.tensor([term]) for term in terms]).item() == 0.25

    def body(rank: int, world_size: int) -> list[Tensor]:
        averages = []
        for talk in every_way(rank, world_size):
            out = torch.empty(16)
            talk.reduce(torch.full((64,), terms[rank]), out, "a test", tag=1).wait()
            averages.append(out)
            close(talk)
        return averages

    for averages in run_ranks(body, 4):
        for out in averages:
            assert torch.equal(out, torch.full((16,), 0.25))


def test_collectives_of_different_units_may_be_waited_for_in_any_order() -> None:
    def body(rank: int, world_size: int) -> None:
        for talk in every_way(rank, world_size):
            flats = [torch.empty(64 * world_size) for _ in range(4)]
            shards = [values(rank, 64, torch.float32, seed=unit) for unit in range(4)]
            pending = [
                talk.gather(flat, shard, f"unit {unit}", unit)
                for unit, (flat, shard) in enumerate(zip(flats, shards, strict=True))
            ]
            grads = values(rank, 64 * world_size, torch.float32, seed=9)
            out = torch.empty(64)
            reducing = talk.reduce(grads, out, "unit 3", 3)
            order = (3, 1, 0, 2) if rank == 0 else (0, 2, 3, 1)
            for unit in order:
                pending[unit].wait()
            reducing.wait()
            for shard in shards:
                talk.await_readers(shard)
            for unit, flat in enumerate(flats):
                parts = [values(r, 64, torch.float32, seed=unit) for r in range(world_size)]
                assert torch.equal(flat, torch.cat(parts))
            put_in = [values(r, 64 * world_size, torch.float32, seed=9) for r in range(world_size)]
            assert torch.equal(out, average([p.view(world_size, -1)[rank] for p in put_in]))
            close(talk)

    run_ranks(body, 3)


def test_collectives_of_one_unit_are_told_apart() -> None:
    """Values and gradients of a unit may be gathered together, and finished in any order."""

    def body(rank: int, world_size: int) -> None:
        for talk in every_way(rank, world_size):
            flats = [torch.empty(64 * world_size) for _ in range(3)]
            shards = [values(rank, 64, torch.float32, seed) for seed in range(3)]
            pending = [
                talk.gather(flat, shard, "a test", tag=1)
                for flat, shard in zip(flats, shards, strict=True)
            ]
            for number in (2, 0, 1):
                pending[number].wait()
            for number, (flat, shard) in enumerate(zip(flats, shards, strict=True)):
                parts = [values(r, 64, torch.float32, number) for r in range(world_size)]
                assert torch.equal(flat, torch.cat(parts))
                talk.await_readers(shard)
            close(talk)

    run_ranks(body, 3)


def test_a_shard_may_be_written_to_once_its_readers_are_done() -> None:
    def body(rank: int, world_size: int) -> None:
        for talk in every_way(rank, world_size):
            shard = torch.empty(4096)
            for turn in range(20):
                talk.await_readers(shard)
                shard.fill_(100 * rank + turn)
                flat = torch.empty(4096 * world_size)
                pending = talk.gather(flat, shard, "a test", tag=1)
                if (turn + rank) % world_size == 0:
                    time.sleep(0.005)
                pending.wait()
                for other, part in enumerate(flat.view(world_size, -1)):
                    assert torch.equal(part, torch.full((4096,), 100.0 * other + turn))
            talk.await_readers(shard)
            close(talk)

    run_ranks(body, 3)


def test_a_shard_in_place_may_be_written_to_at_once() -> None:
    def body(rank: int, world_size: int) -> None:
        for talk in every_way(rank, world_size):
            flat = torch.zeros(4096 * world_size)
            own = flat.view(world_size, -1)[rank]
            for turn in range(20):
                own.fill_(100 * rank + turn)
                pending = talk.gather(flat, own, "a test", tag=1)
                if (turn + rank) % world_size == 0:
                    time.sleep(0.005)
                pending.wait()
                for other, part in enumerate(flat.view(world_size, -1)):
                    assert torch.equal(part, torch.full((4096,), 100.0 * other + turn))
                flat.fill_(-1.0)
            close(talk)

    run_ranks(body, 3)


def test_a_rank_that_closes_early_leaves_the_others_what_it_has_sent() -> None:
    def body(rank: int, world_size: int) -> None:
        for talk in every_way(rank, world_size):
            flat = torch.zeros(16 * world_size)
            own = flat.view(world_size, -1)[rank]
            own.fill_(rank + 1)
            dist.barrier()
            pending = talk.gather(flat, own, "a test", tag=1)
            if rank != 0:
                time.sleep(0.1)
            pending.wait()
            assert [part[0].item() for part in flat.view(world_size, -1)] == [1.0, 2.0, 3.0]
            talk.close()
            dist.barrier()

    run_ranks(body, 3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_scatter_gives_every_rank_its_part_and_collect_takes_them_back(world_size: int) -> None:
    def body(rank: int, world_size: int) -> None:
        for talk in every_way(rank, world_size):
            for dtype in FLOATS:
                for numel in SIZES:
                    whole = values(0, world_size * numel, dtype)
                    out = torch.empty(numel, dtype=dtype)
                    talk.scatter(whole.clone() if rank == 0 else None, out, "a test")
                    assert torch.equal(out, whole.view(world_size, -1)[rank])
                    collected = talk.collect(out, "a test")
                    if rank == 0:
                        assert collected is not None
                        assert torch.equal(collected, whole)
                    else:
                        assert collected is None
            close(talk)

    run_ranks(body, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_exchange_gives_every_rank_what_every_other_has_for_it(world_size: int) -> None:
    def length(source: int, to: int) -> int:
        return 0 if (source + to) % 3 == 1 else 5 * source + 3 * to + 1

    def body(rank: int, world_size: int) -> None:
        ranks = range(world_size)
        for talk in every_way(rank, world_size):
            for dtype in (torch.uint8, torch.float32, torch.bfloat16, torch.int64):
                send = [torch.full((length(rank, to),), 10 * rank + to).to(dtype) for to in ranks]
                receive = [torch.zeros(length(source, rank), dtype=dtype) for source in ranks]
                before = talk.traffic.exchange
                talk.exchange(send, receive, "a test").wait()
                for source, part in enumerate(receive):
                    assert part.tolist() == [10 * source + rank] * length(source, rank)
                sent = sum(length(rank, to) for to in ranks if to != rank)
                assert talk.traffic.exchange - before == sent * dtype.itemsize
            close(talk)

    run_ranks(body, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_objects_reach_rank_0_and_everybody(world_size: int) -> None:
    def body(rank: int, world_size: int) -> None:
        for talk in every_way(rank, world_size):
            for source in range(world_size):
                value = {"from": rank, "rows": [torch.arange(rank + 2), None]}
                got = deliver(talk, value, source, "a test")
                if rank != 0:
                    assert got is None
                else:
                    assert got["from"] == source
                    assert torch.equal(got["rows"][0], torch.arange(source + 2))
            outlines = share(talk, torch.empty(rank, 3, device="meta"), "a test")
            assert [tuple(each.shape) for each in outlines] == [(r, 3) for r in range(world_size)]
            assert all(each.is_meta for each in outlines)
            close(talk)

    run_ranks(body, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_broadcast_carries_rank_0s_tensor_of_any_dtype(world_size: int) -> None:
    def body(rank: int, world_size: int) -> None:
        for talk in every_way(rank, world_size):
            for dtype in (*FLOATS, torch.int64, torch.uint8, torch.bool):
                tensor = values(rank, 100, torch.float32).mul(10).to(dtype)
                talk.broadcast(tensor, "a test")
                assert torch.equal(tensor, values(0, 100, torch.float32).mul(10).to(dtype))
            close(talk)

    run_ranks(body, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sum_and_maximum_combine_small_tensors(world_size: int) -> None:
    def body(rank: int, world_size: int) -> None:
        for talk in every_way(rank, world_size):
            total = torch.tensor(float(rank + 1), dtype=torch.float64)
            talk.sum(total, "a test").wait()
            assert total.item() == world_size * (world_size + 1) / 2
            flags = torch.zeros(world_size + 1, dtype=torch.uint8)
            flags[rank] = 1
            talk.maximum(flags, "a test").wait()
            assert flags.tolist() == [1] * world_size + [0]
            close(talk)

    run_ranks(body, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_traffic_counts_the_bytes_that_a_rank_sends(world_size: int) -> None:
    def body(rank: int, world_size: int) -> None:
        for talk in every_way(rank, world_size):
            before = (talk.traffic.gather, talk.traffic.reduce)
            shard = torch.zeros(16)
            talk.gather(torch.empty(16 * world_size), shard, "a test", 1).wait()
            talk.await_readers(shard)
            talk.reduce(torch.zeros(32 * world_size), torch.empty(32), "a test", 1).wait()
            sent = (talk.traffic.gather - before[0], talk.traffic.reduce - before[1])
            assert sent == (64 * (world_size - 1), 128 * (world_size - 1))
            close(talk)

    run_ranks(body, world_size)


def test_a_subgroup_talks_among_itself() -> None:
    """An engine may be given a group whose ranks are not those of the world."""

    def body(rank: int, world_size: int) -> None:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        module = nn.Linear(3, 3)
        with torch.no_grad():
            module.weight.fill_(rank)
        engine = ZeroEngine(module, group=pairs[rank % 2], stall_timeout=5.0)
        talk = engine.collectives
        assert (talk.rank, talk.world_size) == (rank // 2, 2)
        flat, shard = torch.empty(32), torch.full((16,), float(rank))
        talk.gather(flat, shard, "a test", tag=1).wait()
        talk.await_readers(shard)
        assert flat.tolist() == [float(rank % 2)] * 16 + [float(rank % 2 + 2)] * 16
        engine.restore()
        assert torch.equal(module.weight, torch.full((3, 3), float(rank % 2)))
        dist.barrier()
        engine.close()

    run_ranks(body, 4)
