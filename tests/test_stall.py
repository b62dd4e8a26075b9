"""Where ranks disagree, every one of them ends with an error that says why; none hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity import TRANSPORTS, talk_over
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine.engine import ZeroEngine
from ranks import expect_failures, run_ranks

LIMIT = 1.0
"""Seconds of ``stall_timeout``."""


def layers() -> nn.Sequential:
    """Build a module that the policy ``layers`` divides into units '0', '1' and '2'."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])


def sharded(stage: int = 3, stall_timeout: float = LIMIT) -> tuple[nn.Sequential, ZeroEngine]:
    """Shard such a module."""
    module = layers()
    engine = ZeroEngine(module, stage=stage, auto_wrap_policy="layers", stall_timeout=stall_timeout)
    return module, engine


def busy_elsewhere(until: Path) -> None:
    """Stand for user code that takes no part in any collective."""
    while not until.exists():
        time.sleep(0.02)


def batch(rank: int) -> Tensor:
    """Make what one rank trains on."""
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))


def step(module: nn.Module, engine: ZeroEngine, rank: int) -> None:
    """Run forward and backward."""
    with engine.forward():
        loss = module(batch(rank)).square().mean()
    loss.backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reading_a_sharded_parameter_on_one_rank_tells_what_every_rank_does(
    transport: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    talk_over(transport, monkeypatch)

    def body(rank: int, world_size: int) -> None:
        module, _ = sharded()
        if rank != 0:
            return busy_elsewhere(until=tmp_path / "done")
        try:
            module[1].weight.sum()
        finally:
            (tmp_path / "done").touch()

    errors = expect_failures(body, 3)
    assert set(errors) == {0}
    kind, message = errors[0]
    assert kind == "TimeoutError"
    assert f"Rank 0 waited more than stall_timeout={LIMIT:g} s" in message
    assert "unit '1'" in message
    assert "'1.weight'" in message
    reports = {
        line.split(":")[0].strip(): line for line in message.splitlines() if ": issued" in line
    }
    assert set(reports) == {"rank 0", "rank 1", "rank 2"}
    assert "waits for gather of unit '1' (first parameter '1.weight')" in reports["rank 0"]
    for other in ("rank 1", "rank 2"):
        assert "initial values of unit '2'" in reports[other]
        assert "is in busy_elsewhere (test_stall.py" in reports[other]
    assert "raise stall_timeout" in message


def test_reading_a_gradient_on_one_rank_is_an_error(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        module, engine = sharded(stage=1)
        step(module, engine, rank)
        if rank != 0:
            return busy_elsewhere(until=tmp_path / "done")
        try:
            module[1].weight.grad.norm()
        finally:
            (tmp_path / "done").touch()

    errors = expect_failures(body, 2)
    assert set(errors) == {0}
    kind, message = errors[0]
    assert kind == "TimeoutError"
    assert "waited more than stall_timeout" in message
    assert "gradients of unit" in message
    assert "busy_elsewhere" in message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_that_leaves_out_a_backward_pass_is_waited_for_no_longer_than_the_limit(
    stage: int, tmp_path: Path
) -> None:
    def body(rank: int, world_size: int) -> None:
        module, engine = sharded(stage)
        engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
        with engine.forward():
            loss = module(batch(rank)).square().mean()
        if rank != 0:
            return busy_elsewhere(until=tmp_path / "done")
        try:
            loss.backward()
            engine.finish_gradients()
        finally:
            (tmp_path / "done").touch()

    start = time.monotonic()
    errors = expect_failures(body, 2)
    assert time.monotonic() - start < LIMIT + 5
    assert set(errors) == {0}
    kind, message = errors[0]
    assert kind == "TimeoutError"
    assert "waits for" in message
    assert "busy_elsewhere" in message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_gather_different_units_get_errors_and_no_values(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk_over(transport, monkeypatch)

    def body(rank: int, world_size: int) -> float:
        module, _ = sharded()
        return module[rank].weight.sum().item()

    errors = expect_failures(body, 2)
    assert set(errors) == {0, 1}
    # The one whose limit comes second may find the other gone already.
    assert "TimeoutError" in {kind for kind, _ in errors.values()}
    for rank, (kind, message) in errors.items():
        assert kind in ("TimeoutError", "RuntimeError")
        assert f"unit '{rank}'" in message


def test_ranks_that_call_different_modules_get_errors_and_no_values() -> None:
    def body(rank: int, world_size: int) -> None:
        module, engine = sharded()
        with engine.forward():
            loss = module[rank](batch(rank)).square().mean()
        loss.backward()
        engine.finish_gradients()

    errors = expect_failures(body, 2)
    assert set(errors) == {0, 1}
    assert "TimeoutError" in {kind for kind, _ in errors.values()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_gradient_read_on_one_rank_is_not_mixed_with_a_parameter_read_on_another(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both gather the same unit, but not the same thing."""
    talk_over(transport, monkeypatch)

    def body(rank: int, world_size: int) -> None:
        module, engine = sharded()
        step(module, engine, rank)
        if rank == 0:
            module[1].weight.grad.sum()
        else:
            module[1].weight.sum()

    errors = expect_failures(body, 2)
    assert "TimeoutError" in {kind for kind, _ in errors.values()}


@pytest.mark.parametrize("doing", ["gather", "reduce"])
@pytest.mark.parametrize("noticed", ["before the collective", "during the collective"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_dies_is_reported_quickly(
    transport: str, noticed: str, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk_over(transport, monkeypatch)

    def body(rank: int, world_size: int) -> None:
        module, engine = sharded(stall_timeout=30.0)
        if doing == "reduce":
            with engine.forward():
                loss = module(batch(rank)).square().mean()
        if rank == 1:
            if noticed == "during the collective":
                time.sleep(0.3)
            if doing == "reduce":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        if noticed == "before the collective":
            time.sleep(0.3)
        if doing == "reduce":
            loss.backward()
            engine.finish_gradients()
        else:
            module[1].weight.sum()

    start = time.monotonic()
    errors = expect_failures(body, 3)
    assert time.monotonic() - start < 10
    assert set(errors) == {0, 1, 2}
    assert errors[1][0] == ("Exit" if doing == "reduce" else "SIGKILL")
    for rank in (0, 2):
        kind, message = errors[rank]
        assert kind == "RuntimeError"
        # A rank that failed because of rank 1 may be the one that is missed first.
        assert re.search(r"(rank [012]|another rank) went away", message.lower())
        assert "its own output has the cause" in message


def test_a_slow_rank_within_the_limit_is_no_error() -> None:
    def body(rank: int, world_size: int) -> Tensor:
        module, engine = sharded(stall_timeout=20.0)
        if rank == 1:
            time.sleep(0.5)
        step(module, engine, rank)
        if rank == 0:
            time.sleep(0.5)
        return module[0].weight.grad.clone()

    first, second = run_ranks(body, 2)
    assert torch.equal(first, second)


def test_nothing_of_the_engine_is_left_after_close() -> None:
    def body(rank: int, world_size: int) -> tuple[list[str], int]:
        before = len(dist.distributed_c10d._world.pg_map)
        module, engine = sharded()
        step(module, engine, rank)
        engine.finish_gradients()
        engine.restore()
        engine.close()
        alive = [thread.name for thread in threading.enumerate() if "zero" in thread.name]
        return alive, len(dist.distributed_c10d._world.pg_map) - before

    assert run_ranks(body, 2) == [([], 0)] * 2


ENDING = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from lightning_zero.engine.stall import StallMonitor

class Slow:
    '''A store whose calls take some time outside of Python.'''
    store = dist.HashStore()
    def clone(self):
        return self
    def set(self, *args):
        self.store.set(*args)
    def check(self, keys):
        try:
            self.store.wait(["never"], timedelta(milliseconds=int(sys.argv[1])))
        except RuntimeError:
            return False

monitor = StallMonitor(Slow(), 0, 1, timeout=0.001)
monitor._period = 0.0001
time.sleep(0.3)
"""


@pytest.mark.parametrize("milliseconds", [20, 80, 300])
def test_a_process_may_end_while_a_monitor_asks_the_store(milliseconds: int) -> None:
    root = str(Path(lightning_zero.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", ENDING, str(milliseconds)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
