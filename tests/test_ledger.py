"""What the ledger says is what the storages that exist say."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import TRANSPORTS, talk_over
from test_memory import (
    ACTIVATIONS,
    DEPTH,
    GRADIENT,
    LAYER,
    MESSAGES,
    WIDTH,
    LiveStorages,
    Stack,
    autocast,
)
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.ledger import Holdings, Ledger, distinct_nbytes
from lightning_zero.engine.numerics import Numerics
from ranks import run_ranks

NUMERICS = {
    "fp32": Numerics(),
    "bf16": Numerics(autocast=torch.bfloat16),
    "bf16-all": Numerics(autocast=torch.bfloat16, cast="all"),
    "bf16-reduced": Numerics(autocast=torch.bfloat16, cast="all", reduce=torch.bfloat16),
}
SLACK = ACTIVATIONS + 2 * GRADIENT
"""Bytes of activations and of the gradient, in two dtypes at most, that autograd holds."""


def make(
    stage: int,
    numerics: Numerics,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    **settings: Any,
) -> tuple[nn.Module, ZeroEngine, torch.optim.Optimizer]:
    """Shard a stack of layers, of which each is a unit at every stage."""
    module = Stack()
    engine = ZeroEngine(
        module,
        stage=stage,
        auto_wrap_policy="layers",
        bucket_mb=LAYER / 2**20 / 2,
        numerics=numerics,
        **settings,
    )
    made = optimizer(module.parameters())
    engine.attach(made)
    return module, engine, made


def compare(stage: int, numerics: Numerics, rank: int, **settings: Any) -> list[Holdings]:
    """Train while looking at the ledger and at the storages; return what is held after each step.

    The ledger may never say more than there is, and may lack no more than what autograd holds.
    """
    batch = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(rank))
    found = []
    with LiveStorages(batch) as live:
        module, engine, optimizer = make(stage, numerics, **settings)
        ledger = engine.ledger

        def look(slack: int) -> None:
            assert 0 <= live.total() - ledger.total <= slack, (live.total(), ledger.held)
            assert sum(ledger.held) == ledger.total <= ledger.peak == sum(ledger.at_peak)

        def phase(slack: int) -> None:
            look(slack)
            assert live.peak <= ledger.peak + slack, (live.peak, ledger.at_peak)
            assert ledger.peak <= max(live.peak, live.total()) + MESSAGES
            live.restart()
            ledger.reset_peak()

        look(MESSAGES)
        for layer in module.modules():
            layer.register_forward_pre_hook(lambda *_: look(ACTIVATIONS + MESSAGES))
            layer.register_forward_hook(lambda *_: look(ACTIVATIONS + MESSAGES))
        live.restart()
        ledger.reset_peak()
        for _ in range(3):
            with engine.forward(), autocast(numerics):
                loss = module(batch)
            phase(ACTIVATIONS + MESSAGES)
            loss.backward()
            phase(SLACK + MESSAGES)
            del loss
            engine.finish_gradients()
            phase(SLACK + MESSAGES)
            optimizer.step()
            phase(3 * LAYER)  # what the optimizer needs within its step
            look(MESSAGES)
            found.append(ledger.held)
            optimizer.zero_grad()
            look(MESSAGES)
        engine.schedule.rest()
        look(MESSAGES)
        engine.restore()
        assert ledger.held._replace(optimizer=0, transient=0) == Holdings()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("numerics", "transport"),
    [*((name, TRANSPORTS[0]) for name in NUMERICS), ("bf16", TRANSPORTS[1])],
)
def test_the_ledger_agrees_with_the_storages_that_exist(
    numerics: str, transport: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk_over(transport, monkeypatch)

    def body(rank: int, world_size: int) -> list[Holdings]:
        return compare(stage, NUMERICS[numerics], rank)

    for first, second, third in run_ranks(body, 2):
        assert first == second == third  # nothing grows
        assert first.optimizer >= DEPTH * LAYER  # two states, on two ranks


@pytest.mark.parametrize("stage", [1, 3])
def test_what_owners_borrow_counts_while_they_have_it(stage: int) -> None:
    def body(rank: int, world_size: int) -> tuple[Holdings, Holdings, int]:
        batch = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(rank))
        with LiveStorages(batch) as live:
            module, engine, optimizer = make(
                stage, Numerics(), torch.optim.Adam, optimizer_sharding="whole"
            )
            for _ in range(2):
                with engine.forward():
                    loss = module(batch)
                loss.backward()
                del loss
                engine.finish_gradients()
                engine.ledger.reset_peak()
                live.restart()
                optimizer.step()
                peak = live.peak
                assert 0 <= live.total() - engine.ledger.total <= MESSAGES
                optimizer.zero_grad()
        return engine.ledger.held, engine.ledger.at_peak, peak

    for held, at_peak, live_peak in run_ranks(body, 2):
        # Half of the gradients whole, the masters too where the working values are none, and what
        # travels of both.
        assert at_peak.transient - held.transient >= DEPTH / 2 * LAYER
        assert 0 <= live_peak - at_peak.total <= 2 * LAYER


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("reduce_every_backward", [True, False])
def test_accumulated_gradients_count(stage: int, reduce_every_backward: bool) -> None:
    def body(rank: int, world_size: int) -> None:
        batch = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(rank))
        with LiveStorages(batch) as live:
            module, engine, optimizer = make(
                stage, Numerics(), reduce_every_backward=reduce_every_backward
            )
            for _ in range(2):
                for last in (False, False, True):
                    live.restart()
                    engine.ledger.reset_peak()
                    with engine.forward() if last else engine.no_sync(), engine.forward():
                        module(batch).backward()
                    assert 0 <= live.total() - engine.ledger.total <= GRADIENT + MESSAGES
                    assert abs(live.peak - engine.ledger.peak) <= SLACK
                optimizer.step()
                optimizer.zero_grad()
            assert 0 <= live.total() - engine.ledger.total <= MESSAGES

    run_ranks(body, 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_user_code_reads_count_until_they_are_dropped(stage: int) -> None:
    def body(rank: int, world_size: int) -> None:
        with LiveStorages() as live:
            module, engine, optimizer = make(stage, Numerics())
            module(torch.ones(1, WIDTH)).backward()
            engine.finish_gradients()
            before = engine.ledger.held
            for param in module.parameters():
                assert param.grad is not None
                assert param.grad.norm() >= 0
            assert engine.ledger.held.gradients - before.gradients == DEPTH * LAYER
            assert 0 <= live.total() - engine.ledger.total <= MESSAGES + ACTIVATIONS
            optimizer.step()
            assert engine.ledger.held.gradients == before.gradients
            assert 0 <= live.total() - engine.ledger.total <= MESSAGES + ACTIVATIONS

    run_ranks(body, 2)


def test_gathers_reductions_and_waiting_are_counted() -> None:
    def body(rank: int, world_size: int) -> tuple[int, int, float]:
        module, engine, optimizer = make(3, Numerics())
        assert engine.ledger.gathers == engine.ledger.reductions == 0
        for _ in range(2):
            with engine.forward():
                loss = module(torch.ones(1, WIDTH))
            if rank == 0:
                time.sleep(0.3)
            loss.backward()
            optimizer.step()
        return engine.ledger.gathers, engine.ledger.reductions, engine.ledger.waited

    first, second = run_ranks(body, 2)
    # Backward needs no values of the first layer; from the second pass on, the last one's stay.
    assert first[0] == second[0] == 2 * DEPTH + (DEPTH - 1) + (DEPTH - 2)
    assert first[1] == second[1] == 2 * DEPTH
    assert second[2] > 0.3  # the rank that slept was waited for, twice


def test_one_rank_holds_everything() -> None:
    def body(rank: int, world_size: int) -> tuple[Holdings, float]:
        module, engine, optimizer = make(3, Numerics())
        for _ in range(2):
            with engine.forward():
                loss = module(torch.ones(1, WIDTH))
            loss.backward()
            optimizer.step()
        return engine.ledger.held, engine.ledger.waited

    [(held, waited)] = run_ranks(body, 1)
    counters = 2 * DEPTH * 4
    assert held == Holdings(DEPTH * LAYER, 0, DEPTH * LAYER, 2 * DEPTH * LAYER + counters, 0)
    assert waited == 0


class Pile:
    """A holder of whatever a test says."""

    def __init__(self) -> None:
        self.noted = self.now = Holdings()

    def holdings(self) -> Holdings:
        return self.now


def test_the_peak_is_remembered_with_what_it_was_made_of() -> None:
    ledger, pile, other = Ledger(), Pile(), Pile()
    for pile.now in (Holdings(parameters=5), Holdings(parameters=5, transient=7), Holdings()):
        ledger.note(pile)
        ledger.note(pile)  # a second look changes nothing
    other.now = Holdings(masters=2)
    ledger.note(other)
    assert (ledger.total, ledger.peak) == (2, 12)
    assert ledger.at_peak == Holdings(parameters=5, transient=7)
    ledger.passing(Holdings(gradients=11))
    assert (ledger.total, ledger.peak, ledger.at_peak.gradients) == (2, 13, 11)
    ledger.reset_peak()
    assert (ledger.peak, ledger.at_peak) == (2, Holdings(masters=2))
    ledger.forget(other)
    assert ledger.held == Holdings()


def test_state_of_unusual_tensors_is_counted_by_what_they_hold() -> None:
    base = torch.ones(4, 4)
    assert distinct_nbytes([base, base[1:], base.view(-1)]) == 64
    assert distinct_nbytes([torch.eye(3).to_sparse()]) == 2 * 3 * 8 + 3 * 4
    assert distinct_nbytes([torch.eye(3).to_sparse_csr()]) == 0  # rather than an error
    wrapper = TwoTensor(torch.ones(4), torch.ones(4))  # type: ignore[no-untyped-call]
    assert distinct_nbytes([wrapper]) == 32
