"""Gradients that user code reads, changes or drops before the engine has finished with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine.engine import ZeroEngine
from ranks import run_ranks

WIDTH = 4


class Branches(nn.Module):
    """Two layers, of which a pass may use one only; each is a unit at every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, *used: int) -> torch.Tensor:
        return torch.stack([self.layers[index](x).sum() for index in used]).sum()


def shard(stage: int, **settings: Any) -> tuple[nn.Module, ZeroEngine, torch.optim.Optimizer]:
    module = Branches()
    bucket = WIDTH * WIDTH * 4 / 2**20
    engine = ZeroEngine(
        module, stage=stage, bucket_mb=bucket, auto_wrap_policy="layers", **settings
    )
    assert len(engine.units) == 2
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine.attach(optimizer)
    return module, engine, optimizer


def backward(engine: ZeroEngine, value: float, *used: int) -> None:
    with engine.forward():
        loss = engine.module(torch.full((1, WIDTH), value), *used)
    with engine.backward():
        loss.backward()


def means(module: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.mean().item() for p in module.parameters()]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_gradient_of_another_rank_is_seen_whichever_is_read_first(stage: int, layer: int) -> None:
    def body(rank: int, world_size: int) -> tuple[list[float | None], bool]:
        module, engine, optimizer = shard(stage)
        for _ in range(2):  # from the second pass on, the order of reductions is rank 0's
            optimizer.zero_grad()
            backward(engine, 1.0, *((0, 1) if rank else (1 - layer,)))
        found = means(module)
        before = [p.detach().clone() for p in module.parameters()]
        optimizer.step()
        moved = [not torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True)]
        return found, all(moved)

    expected = [1.0, 1.0]
    expected[layer] = 0.5
    assert run_ranks(body, 2) == [(expected, True)] * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("reduce_every_backward", [True, False])
def test_zero_grad_drops_what_no_reduction_has_taken(
    stage: int, reduce_every_backward: bool
) -> None:
    def body(rank: int, world_size: int) -> list[float | None]:
        module, engine, optimizer = shard(stage, reduce_every_backward=reduce_every_backward)
        backward(engine, 1.0, 0)  # nobody has a gradient of the other
        optimizer.zero_grad()
        with engine.no_sync():
            backward(engine, 7.0, 0, 1)
        optimizer.zero_grad()
        backward(engine, 1.0 + rank, 0, 1)
        return means(module)

    assert run_ranks(body, 2) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("reduce_every_backward", [True, False])
@pytest.mark.parametrize("way", ["in place", "assigned in place", "assigned"])
def test_gradients_can_be_changed_between_micro_batches(
    stage: int, reduce_every_backward: bool, way: str
) -> None:
    def body(rank: int, world_size: int) -> list[float | None]:
        module, engine, _ = shard(stage, reduce_every_backward=reduce_every_backward)
        with engine.no_sync():
            backward(engine, 1.0 + rank, 0, 1)
        for param in module.parameters():
            assert param.grad is not None
            if way == "in place":
                param.grad.mul_(0.5)
            elif way == "assigned in place":
                param.grad *= 0.5
            else:
                param.grad = param.grad * 0.5
        backward(engine, 1.0 + rank, 0, 1)
        return means(module)

    assert run_ranks(body, 2) == [[2.25, 2.25]] * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_nobody_uses_costs_no_second_set_of_averages(stage: int) -> None:
    def body(rank: int, world_size: int, *used: int) -> int:
        module = Branches()
        engine = ZeroEngine(module, stage=stage, auto_wrap_policy="none")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine.attach(optimizer)
        for _ in range(3):
            engine.ledger.reset_peak()
            with engine.forward():
                loss = module(torch.ones(1, WIDTH), *used)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return engine.ledger.peak

    assert run_ranks(body, 2, 0) == run_ranks(body, 2, 0, 1)
