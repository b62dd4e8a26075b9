"""What a rank sends, counted at the collectives, is what the stages promise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import parity
import pytest
import torch
from parity import Model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.engine.collectives import Traffic
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.layout import ALIGNMENT
from ranks import run_ranks


@dataclass(frozen=True)
class Sent:
    """Elements of fp32 that this rank has sent during one step."""

    gather: int
    reduce: int


@dataclass(frozen=True)
class Run:
    """What a rank has sent, beside the sizes that it follows from.

    Attributes:
        numel: Ψ, the elements of the model.
        params: How many parameters they are in.
        shards: Elements of each unit's shard, by the unit's name.
        setup: What was sent before the first step.
        steps: What each step has sent, its ``zero_grad`` included.
    """

    numel: int
    params: int
    shards: dict[str, int]
    setup: Sent
    steps: list[Sent]


def sent(traffic: Traffic) -> Sent:
    """Read the counters."""
    return Sent(traffic.gather // 4, traffic.reduce // 4)


def run(
    rank: int,
    world_size: int,
    stage: int,
    build: Callable[[], Model] = parity.Blocks,
    steps: int = 3,
    micro_batches: int = 1,
    **options: Any,
) -> Run:
    """Train for some steps and count."""
    model = build()
    engine = ZeroEngine(model, stage=stage, stall_timeout=20.0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    traffic = engine.collectives.traffic
    counts = [sent(traffic)]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro_batches - 1):
            with engine.no_sync():
                forward_and_backward(engine, model, generator)
        forward_and_backward(engine, model, generator)
        optimizer.step()
        counts.append(sent(traffic))
    result = Run(
        numel=sum(param.numel() for param in model.parameters()),
        params=len(list(model.parameters())),
        shards={unit.name: unit.layout.shard_numel for unit in engine.units},
        setup=counts[0],
        steps=[
            Sent(after.gather - before.gather, after.reduce - before.reduce)
            for before, after in itertools.pairwise(counts)
        ],
    )
    engine.restore()
    engine.close()
    return result


def forward_and_backward(engine: ZeroEngine, model: Model, generator: torch.Generator) -> None:
    """Train on one batch, but for the optimizer's step."""
    with engine.forward():
        loss = model(model.batch(generator))
    with engine.backward():
        loss.backward()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_sends_twice_the_model_and_at_stage_3_thrice(world_size: int) -> None:
    def body(rank: int, world_size: int) -> dict[Any, Run]:
        runs = {stage: run(rank, world_size, stage, bucket_mb=0.05) for stage in (1, 2)}
        for policy in ("auto", "layers"):
            runs[3, policy] = run(rank, world_size, 3, auto_wrap_policy=policy)
        return runs

    others = world_size - 1
    for results in run_ranks(body, world_size):
        for key, result in results.items():
            assert len(result.shards) > 2
            once = others * sum(result.shards.values())
            padding = ALIGNMENT * (result.params + world_size * len(result.shards))
            assert 0 <= once - result.numel * others / world_size <= padding * others / world_size
            assert result.setup == Sent(0, 0)
            if key in (1, 2):
                assert result.steps == [Sent(gather=once, reduce=once)] * 3
                continue
            # Twice but for: the root, which stays from first use until its backward; the embedding,
            # whose backward does not read it; and what forward ends with, where backward begins,
            # once a first pass has shown which unit that is.
            spared = others * (result.shards["root"] + result.shards["embedding"])
            last = others * result.shards["head"]
            first, *later = result.steps
            assert first == Sent(gather=2 * once - spared, reduce=once)
            assert later == [Sent(gather=2 * once - spared - last, reduce=once)] * 2


def test_prefetching_and_bucket_sizes_send_the_same() -> None:
    def body(rank: int, world_size: int) -> list[list[Sent]]:
        return [
            run(rank, world_size, 3, auto_wrap_policy="layers", prefetch=prefetch).steps
            for prefetch in (True, False)
        ]

    for with_prefetch, without in run_ranks(body, 2):
        assert with_prefetch == without


def test_one_unit_is_gathered_once_a_step() -> None:
    for result in run_ranks(run, 2, 3, auto_wrap_policy="none"):
        (shard,) = result.shards.values()
        assert result.steps == [Sent(gather=shard, reduce=shard)] * 3


def test_evaluation_gathers_each_unit_once_and_replicated_parameters_never() -> None:
    def body(rank: int, world_size: int) -> list[tuple[int, int]]:
        counts = []
        for stage in (1, 2, 3):
            model = parity.Blocks()
            engine = ZeroEngine(model, stage=stage)
            traffic = engine.collectives.traffic
            generator = torch.Generator().manual_seed(rank)
            for _ in range(3):
                before = traffic.gather
                with torch.no_grad(), engine.forward():
                    model(model.batch(generator))
                shards = sum(unit.shard_nbytes for unit in engine.units)
                counts.append((traffic.gather - before, shards if stage == 3 else 0))
            engine.restore()
            engine.close()
        return counts

    for counts in run_ranks(body, 2):
        for gathered, expected in counts:
            assert gathered == expected


def test_evaluation_on_held_parameters_sends_nothing() -> None:
    def body(rank: int, world_size: int) -> None:
        model = parity.Blocks()
        engine = ZeroEngine(model, stage=3, auto_wrap_policy="layers")
        engine.hold()
        once = sum(unit.shard_nbytes for unit in engine.units)
        assert engine.collectives.traffic.gather == once
        generator = torch.Generator().manual_seed(rank)
        for _ in range(2):
            with torch.no_grad(), engine.forward():
                model(model.batch(generator))
        if rank == 0:  # it may even run alone
            with torch.no_grad(), engine.forward():
                model(model.batch(generator))
        assert engine.collectives.traffic.gather == once
        engine.let_go()
        with torch.no_grad(), engine.forward():
            model(model.batch(generator))
        assert engine.collectives.traffic.gather == 2 * once

    run_ranks(body, 2)


def test_accumulation_sends_gradients_once_at_stage_1_and_every_time_where_they_are_sharded() -> (
    None
):
    def body(rank: int, world_size: int) -> dict[Any, Run]:
        runs: dict[Any, Run] = {
            stage: run(rank, world_size, stage, micro_batches=4) for stage in (1, 2, 3)
        }
        runs["late"] = run(rank, world_size, 2, micro_batches=4, reduce_every_backward=False)
        return runs

    for results in run_ranks(body, 2):
        for key, times in ((1, 1), (2, 4), (3, 4), ("late", 1)):
            once = sum(results[key].shards.values())
            assert [sent.reduce for sent in results[key].steps] == [times * once] * 3, key
            if key != 3:
                assert [sent.gather for sent in results[key].steps] == [once] * 3, key


class Checkpointed(Model):
    """Layers that are computed again in backward, the last of them too."""

    reentrant: bool

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(2, 8, generator=generator).requires_grad_()

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = checkpoint(layer, batch, use_reentrant=self.reentrant)
        return batch.square().mean()


class Reentrant(Checkpointed):
    """The older kind, whose recomputation runs a backward pass within the backward pass."""

    reentrant = True


class NonReentrant(Checkpointed):
    """The newer kind."""

    reentrant = False


@pytest.mark.parametrize("build", [NonReentrant, Reentrant])
def test_checkpointing_neither_gathers_nor_reduces_more(build: type[Checkpointed]) -> None:
    def body(rank: int, world_size: int) -> dict[int, Run]:
        return {
            stage: run(rank, world_size, stage, build, auto_wrap_policy="layers", bucket_mb=1e-4)
            for stage in (1, 2, 3)
        }

    for results in run_ranks(body, 2):
        for stage, result in results.items():
            once = sum(result.shards.values())
            assert len(result.shards) == 4
            assert [sent.reduce for sent in result.steps] == [once] * 3, stage
            for sent in result.steps:
                assert sent.gather <= (2 * once if stage == 3 else once), stage
