"""Tests of the helper that the distributed tests run on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import ranks
from ranks import RankFailure, expect_failures, run_ranks


def test_results_come_in_the_order_of_ranks() -> None:
    def body(rank: int, world_size: int, base: int, *, factor: int) -> tuple[int, int]:
        time.sleep(0.02 * (world_size - rank))
        return base + factor * rank, world_size

    assert run_ranks(body, 3, 5, factor=10, init=False) == [(5, 3), (15, 3), (25, 3)]


def test_ranks_reduce_over_gloo() -> None:
    def body(rank: int, world_size: int) -> tuple[str, torch.Tensor]:
        tensor = torch.full((3,), float(rank + 1))
        dist.all_reduce(tensor)
        return dist.get_backend(), tensor

    results = run_ranks(body, 2)
    assert [backend for backend, _ in results] == ["gloo", "gloo"]
    assert all(torch.equal(tensor, torch.full((3,), 3.0)) for _, tensor in results)
    assert not dist.is_initialized()


def test_without_init_the_environment_serves_a_rendezvous() -> None:
    def body(rank: int, world_size: int) -> list[int]:
        assert not dist.is_initialized()
        dist.init_process_group("gloo", init_method="env://")
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(gathered, torch.tensor([rank]))
        return [int(tensor) for tensor in gathered]

    assert run_ranks(body, 3, init=False) == [[0, 1, 2]] * 3


def test_environment_is_that_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKS_REMOVED", "1")
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")

    def body(rank: int, world_size: int) -> list[str]:
        assert dist.is_torchelastic_launched()
        assert torch.get_num_threads() == 1
        assert "RANKS_REMOVED" not in os.environ
        assert "PL_GLOBAL_SEED" not in os.environ
        assert os.environ["RANKS_ADDED"] == "yes"
        return [os.environ[name] for name in names]

    env = {"RANKS_ADDED": "yes", "RANKS_REMOVED": None}
    assert run_ranks(body, 2, init=False, env=env) == [
        ["0", "0", "0", "2", "2", "127.0.0.1"],
        ["1", "1", "0", "2", "2", "127.0.0.1"],
    ]
    assert "RANKS_ADDED" not in os.environ
    assert os.environ["RANKS_REMOVED"] == "1"


def test_every_rank_starts_from_the_same_seed() -> None:
    def body(rank: int, world_size: int) -> tuple[float, float]:
        return torch.rand(1).item(), float(np.random.random())

    first = run_ranks(body, 2, init=False)
    torch.rand(1)
    assert first[0] == first[1]
    assert run_ranks(body, 2, init=False) == first


def test_large_results_arrive_whole() -> None:
    def body(rank: int, world_size: int) -> dict[str, Any]:
        return {
            "tensor": torch.full((1 << 22,), float(rank)),
            "array": np.full(1 << 20, rank),
            "half": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        }

    for rank, result in enumerate(run_ranks(body, 2, init=False)):
        assert result["tensor"].shape == (1 << 22,)
        assert bool((result["tensor"] == rank).all())
        assert bool((result["array"] == rank).all())
        assert isinstance(result["half"], torch.nn.Parameter)
        assert result["half"].dtype is torch.bfloat16


def test_a_raising_rank_is_named_and_does_not_leave_the_others_hanging() -> None:
    def body(rank: int, world_size: int) -> None:
        if rank == 1:
            raise ValueError("no such layer")
        dist.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 failed with ValueError: no such layer") as info:
        run_ranks(body, 2)
    assert time.monotonic() - start < 5
    assert info.value.rank == 1
    assert info.value.errors[1] == ("ValueError", "no such layer")
    assert 'raise ValueError("no such layer")' in info.value.failures[1]
    # The other rank saw its peer go, and said so before it could be killed.
    assert info.value.errors[0][0] == "RuntimeError"


def test_ranks_that_outlive_the_grace_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.2)

    def body(rank: int, world_size: int) -> None:
        if rank == 0:
            raise SystemExit(3)
        time.sleep(60)

    with pytest.raises(RankFailure) as info:
        run_ranks(body, 3, init=False)
    assert info.value.errors == {0: ("SystemExit", "3")}
    assert info.value.killed == [1, 2]


def test_a_segfault_is_reported_as_the_signal(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int, world_size: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankFailure, match="rank 1 failed with SIGSEGV") as info:
        run_ranks(body, 2, init=False)
    assert info.value.errors == {1: ("SIGSEGV", "killed by signal 11 (SIGSEGV)")}
    assert info.value.killed == []
    assert "Fatal Python error: Segmentation fault" in capfd.readouterr().err


def test_leaving_without_a_result_is_a_failure() -> None:
    def body(rank: int, world_size: int) -> None:
        if rank == 0:
            os._exit(0)

    failures = expect_failures(body, 2, init=False)
    assert failures == {0: ("Exit", "exited with code 0 without a result")}


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    def body(rank: int, world_size: int) -> Callable[[], int]:
        return lambda: rank

    with pytest.raises(RankFailure, match=r"[Pp]ickle"):
        run_ranks(body, 1, init=False)


def test_a_timeout_names_the_hanging_ranks_and_shows_their_stacks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def never_returns() -> None:
        dist.all_reduce(torch.ones(1))

    def body(rank: int, world_size: int) -> None:
        if rank != 1:
            never_returns()

    with pytest.raises(RankFailure, match=r"ranks that had not finished: \[0, 2\]") as info:
        run_ranks(body, 3, timeout=1.5)
    assert info.value.rank == 0
    assert info.value.errors == {r: ("Timeout", "had not finished after 1.5 s") for r in (0, 2)}
    stacks = capfd.readouterr().err
    assert stacks.count("never_returns") == 2
    assert "--- rank 2 had not finished; its threads were at ---" in stacks


def test_expected_failures_of_every_rank() -> None:
    def body(rank: int, world_size: int) -> None:
        dist.barrier()
        raise KeyError(f"rank {rank}")

    assert expect_failures(body, 2) == {r: ("KeyError", f"'rank {r}'") for r in (0, 1)}


def test_expected_failures_wait_for_the_others_and_omit_those_that_return() -> None:
    def body(rank: int, world_size: int) -> None:
        if rank == 0:
            raise ValueError("at once")
        time.sleep(0.3)
        if rank == 1:
            raise TypeError("later")

    expected = {0: ("ValueError", "at once"), 1: ("TypeError", "later")}
    assert expect_failures(body, 3, init=False) == expected
    assert expect_failures(lambda rank, world_size: None, 2, init=False) == {}


def test_expected_failures_do_not_include_a_timeout() -> None:
    def body(rank: int, world_size: int) -> None:
        if rank == 0:
            raise ValueError("alone")
        time.sleep(60)

    with pytest.raises(RankFailure) as info:
        expect_failures(body, 2, init=False, timeout=1.0)
    assert info.value.errors[0] == ("ValueError", "alone")
    assert info.value.errors[1][0] == "Timeout"


def test_what_ranks_print_reaches_the_parent(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int, world_size: int) -> None:
        print(f"to stdout from {rank}")
        print(f"to stderr from {rank}", file=sys.stderr)
        os.write(1, f"to the descriptor from {rank}\n".encode())

    print("before the fork")
    run_ranks(body, 2, init=False)
    out, err = capfd.readouterr()
    for rank in range(2):
        assert out.count(f"to stdout from {rank}") == 1
        assert out.count(f"to the descriptor from {rank}") == 1
        assert err.count(f"to stderr from {rank}") == 1
    assert out.count("before the fork") == 1


def test_what_ranks_started_ends_with_them() -> None:
    def body(rank: int, world_size: int) -> int:
        return subprocess.Popen(["sleep", "60"]).pid

    def running(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    pids = run_ranks(body, 2, init=False)
    limit = time.monotonic() + 10
    while any(map(running, pids)) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not any(map(running, pids))


def test_parent_must_not_be_a_rank_itself() -> None:
    def body(rank: int, world_size: int) -> None:
        run_ranks(lambda rank, world_size: None, 1)

    assert expect_failures(body, 1)[0][0] == "RuntimeError"
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(body, 0)


class Regression(lightning.LightningModule):
    """The least that can be trained: one linear layer towards zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        output: torch.Tensor = self.layer(batch)
        return output.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> torch.utils.data.DataLoader[torch.Tensor]:
        return torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=2)  # type: ignore[arg-type]


def test_lightning_takes_the_forked_world_as_launched() -> None:
    def body(rank: int, world_size: int) -> dict[str, Any]:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy="ddp",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_steps=2,
        )
        model = Regression()
        before = model.layer.weight.detach().clone()
        trainer.fit(model)
        assert trainer.global_rank == rank == dist.get_rank()
        assert trainer.world_size == world_size == dist.get_world_size()
        return {
            "steps": trainer.global_step,
            "moved": not torch.equal(before, model.layer.weight),
            "weight": model.layer.weight.detach(),
        }

    first, second = run_ranks(body, 2, init=False)
    assert first["steps"] == second["steps"] == 2
    assert first["moved"]
    assert torch.equal(first["weight"], second["weight"])
