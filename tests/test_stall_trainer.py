"""Reading a sharded parameter on one rank only ends in an error that explains it, not in a hang."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from modules import Perceptron, batches, quiet_trainer
from torch import Tensor

from lightning_zero import ZeroStrategy
from ranks import expect_failures, run_ranks

STALL = 1.5
LIMIT = 15.0


class Lopsided(Perceptron):
    """Rank 0 looks at a weight that rank 1 does not look at."""

    def __init__(self, where: str, reader: int = 0) -> None:
        super().__init__()
        self.where = where
        self.reader = reader
        self.norms: list[float] = []

    def look(self, here: str) -> None:
        if here == self.where and self.reader in (self.global_rank, -1):
            self.norms.append(self.leave.weight.norm().item())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.look("training_step")
        return self.loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.look("on_train_batch_end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.look("validation_step")
        self.loss(batch)


def fit(rank: int, world_size: int, stage: int, where: str, reader: int) -> list[float]:
    """Train with a short limit on waits."""
    model = Lopsided(where, reader)
    strategy = ZeroStrategy(stage=stage, auto_wrap_policy="layers", stall_timeout=STALL)
    trainer = quiet_trainer(strategy, world_size)
    trainer.fit(model, batches(model, 24), batches(model, 12))
    return model.norms


@pytest.mark.parametrize(
    ("where", "reader"),
    [("training_step", 0), ("on_train_batch_end", 1), ("validation_step", 0)],
)
def test_a_read_on_one_rank_only_becomes_an_error_that_says_what_each_rank_waits_for(
    where: str, reader: int
) -> None:
    started = time.monotonic()
    errors = expect_failures(fit, 2, 3, where, reader, timeout=LIMIT, init=False)
    assert STALL < time.monotonic() - started < LIMIT
    assert sorted(errors) == [0, 1]
    timeouts = [message for kind, message in errors.values() if kind == "TimeoutError"]
    assert timeouts
    for kind, message in errors.values():
        assert kind == "TimeoutError" or "went away" in message, message
    for message in timeouts:
        assert "stall_timeout=1.5" in message
        assert "a parameter was read on some ranks only" in message
        assert re.search(r"rank 0: issued \d+ collectives", message)
        assert re.search(r"rank 1: issued \d+ collectives", message)
        units = re.findall(r"unit '(\w+)' \(first parameter '([\w.]+)'\)", message)
        assert units
        assert all(first.startswith(f"{unit}.") or unit == "root" for unit, first in units)
    assert any("'leave' (first parameter 'leave.weight')" in message for message in timeouts)


@pytest.mark.parametrize("stage", [1, 3])
def test_saving_on_one_rank_only_becomes_an_error(stage: int, tmp_path: Path) -> None:
    class Saving(Perceptron):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

        def on_train_batch_end(self, *args: Any) -> None:
            if self.global_rank == 0:
                self.trainer.save_checkpoint(tmp_path / "file.ckpt")

    def body(rank: int, world_size: int) -> None:
        strategy = ZeroStrategy(stage=stage, stall_timeout=1.0)
        model = Saving()
        quiet_trainer(strategy, world_size).fit(model, batches(model, 24))

    errors = expect_failures(body, 2, timeout=LIMIT, init=False)
    kind, message = errors[0]
    assert kind == "TimeoutError"
    assert "rank 1: issued" in message
    assert "went away" in errors[1][1]
    assert not (tmp_path / "file.ckpt").exists()


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end", "validation_step"])
def test_a_read_on_every_rank_gives_the_same_value_everywhere(where: str) -> None:
    first, second = run_ranks(fit, 2, 3, where, -1, init=False)
    assert first
    assert first == second


@pytest.mark.parametrize("stage", [1, 2])
def test_a_read_on_one_rank_is_free_where_parameters_are_replicated(stage: int) -> None:
    reading, other = run_ranks(fit, 2, stage, "training_step", 0, init=False)
    everywhere = run_ranks(fit, 2, stage, "training_step", -1, init=False)
    assert other == []
    assert reading == everywhere[0]
