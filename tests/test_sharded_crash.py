"""Whatever kills a rank or a disk while a checkpoint is saved, the one before stays."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from modules import assert_same_tensors
from test_sharded_checkpoint import Saving, fit, hidden, read, saves, sharded

from ranks import expect_failures, run_ranks

STALL = 5.0


def kill_at(event: str, word: str) -> None:
    """Kill this process at the first thing that Python is about to do with such a name."""

    def look(name: str, args: tuple[Any, ...]) -> None:
        if name == event and any(word in str(arg) for arg in args):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def train_and_die(
    place: Callable[[int], Path], rank: int, kind: str, arm: Callable[[], None], **settings: Any
) -> None:
    """Save after the first step, then let a rank be killed while it saves after the second."""

    def body(mine: int, world_size: int) -> None:
        def after(model: Saving) -> None:
            step = model.trainer.global_step
            if step == 2 and mine == rank:
                arm()
            if step <= 2:
                model.trainer.save_checkpoint(place(step))

        fit(sharded(state_dict_type=kind, stall_timeout=STALL, **settings), after)

    errors = expect_failures(body, 2, timeout=40)
    assert errors[rank][0] == "SIGKILL"


def step_of(path: Path) -> int:
    """Load a checkpoint and say of which step it is; all of it must be."""
    found = read(path) if path.is_dir() else torch.load(path, weights_only=False)
    optimizer = found["optimizer_0"] if path.is_dir() else found["optimizer_states"][0]
    step: int = found["global_step"]
    assert {float(state["step"]) for state in optimizer["state"].values()} == {float(step)}
    return step


def resume_and_save(path: Path, kind: str, next_path: Path, leftovers: bool) -> None:
    """Go on from a checkpoint and save again, which removes what the killed save has left."""
    step = step_of(path) + 1 if path.exists() else 3

    def body(rank: int, world_size: int) -> None:
        strategy = sharded(state_dict_type=kind)
        torch.manual_seed(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(strategy, saves(next_path, step), ckpt_path=path, max_epochs=-1, max_steps=step)
        told = [str(each.message) for each in caught if "killed before" in str(each.message)]
        assert bool(told) == leftovers

    run_ranks(body, 1)
    assert step_of(next_path) == step
    assert hidden(path.parent) == []


SHARDED_POINTS: dict[str, tuple[int, str, str]] = {
    "making the folder": (0, "os.mkdir", ".unfinished-"),
    "before rank 0's file": (0, "open", "__0_0.distcp"),
    "before rank 1's file": (1, "open", "__1_0.distcp"),
    "before the metadata": (0, "open", ".metadata.tmp"),
    "before naming the metadata": (0, "os.rename", ".metadata.tmp"),
    "before meta.pt": (0, "open", "meta.pt"),
}
SWAPPING: dict[str, tuple[int, str, str]] = {
    "before the swap": (0, "ctypes.dlsym", "renameat2"),
    "after the swap": (0, "shutil.rmtree", "-name"),
}
MOVING: dict[str, tuple[int, str, str]] = {"before the rename": (0, "os.rename", "-second")}


@pytest.mark.parametrize("point", [*SHARDED_POINTS, *MOVING])
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(
    point: str, tmp_path: Path
) -> None:
    rank, *where = {**SHARDED_POINTS, **MOVING}[point]
    paths = {1: tmp_path / "first", 2: tmp_path / "second"}
    train_and_die(paths.__getitem__, rank, "sharded", lambda: kill_at(*where))
    assert step_of(paths[1]) == 1
    assert not paths[2].exists()
    # Where rank 0 survives it removes what it has made.
    resume_and_save(paths[1], "sharded", tmp_path / "third", bool(hidden(tmp_path)))


@pytest.mark.parametrize("point", [*SHARDED_POINTS, *SWAPPING])
def test_a_rank_killed_while_replacing_a_checkpoint_leaves_one_of_the_two(
    point: str, tmp_path: Path
) -> None:
    rank, *where = {**SHARDED_POINTS, **SWAPPING}[point]
    path = tmp_path / "name"
    train_and_die(lambda step: path, rank, "sharded", lambda: kill_at(*where))
    assert step_of(path) == (2 if point == "after the swap" else 1)
    resume_and_save(path, "sharded", path, bool(hidden(tmp_path)))


@pytest.mark.parametrize(("event", "word"), [("open", ".unfinished-"), ("os.rename", "-name")])
def test_a_file_that_is_being_replaced_survives_a_kill(
    event: str, word: str, tmp_path: Path
) -> None:
    path = tmp_path / "name"
    train_and_die(lambda step: path, 0, "full", lambda: kill_at(event, word))
    assert step_of(path) == 1
    resume_and_save(path, "full", path, bool(hidden(tmp_path)))


def test_where_names_cannot_be_swapped_the_next_run_brings_the_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_zero.checkpoint.folder._exchange", lambda *_: False)
    path = tmp_path / "name"
    moved = [0]

    def arm() -> None:
        def look(name: str, args: tuple[Any, ...]) -> None:
            if name == "os.rename" and str(path) in map(str, args[:2]):
                moved[0] += 1
                if moved[0] == 2:  # the old one is aside and the new one not there yet
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)

    train_and_die(lambda step: path, 0, "sharded", arm)
    assert not path.exists()
    resume_and_save(path, "sharded", tmp_path / "third", leftovers=True)
    assert step_of(path) == 1


def test_a_save_in_the_background_may_be_killed_too(tmp_path: Path) -> None:
    paths = {1: tmp_path / "first", 2: tmp_path / "second"}
    arm = lambda: kill_at("open", "-second/meta.pt")  # noqa: E731
    train_and_die(paths.__getitem__, 0, "sharded", arm, async_save=True)
    assert step_of(paths[1]) == 1
    resume_and_save(paths[1], "sharded", tmp_path / "third", leftovers=True)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_thirty_kills_at_random_moments_never_cost_a_checkpoint(
    asynchronous: bool, tmp_path: Path
) -> None:
    draws = random.Random(6)
    torn = 0

    def body(rank: int, world_size: int, victim: int, delay: float, done: Path) -> None:
        def after(model: Saving) -> None:
            step = model.trainer.global_step
            model.trainer.save_checkpoint(done.parent / "last")
            model.trainer.save_checkpoint(done.parent / f"{step}")
            if step == 1:
                model.trainer.strategy.barrier()
                if rank == victim:
                    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if rank == 0:
                done.write_text(str(step - 1 if asynchronous else step))

        strategy = sharded(stall_timeout=STALL, async_save=asynchronous)
        fit(strategy, after, max_epochs=1000)

    for number in range(30):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        victim, delay = draws.randrange(2), draws.uniform(0, 0.2)
        errors = expect_failures(body, 2, victim, delay, folder / "done", timeout=60)
        assert errors[victim][0] == "SIGKILL"
        step = int((folder / "done").read_text() or 1)
        torn += bool(hidden(folder))
        if step:
            assert step_of(folder / "last") in (step, step + 1, step + 2)
            assert step_of(folder / f"{step}") == step
        resume_and_save(folder / "last", "sharded", folder / "next", bool(hidden(folder)))
    assert torn > 3  # else the moments prove nothing


# Disks


@contextmanager
def small_files() -> Iterator[None]:
    """Let no file grow beyond some bytes, so that a write fails half way."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def another_user() -> Iterator[None]:
    """Be a user who may not write everywhere, if this is one who may."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(mine)


def goes_on(strategy: dict[str, Any], rank: int, trouble: Any, bad: Path, match: str) -> None:
    """Meet a disk that takes nothing in a step; assert that it has no other consequence."""
    good = bad.parent / "good"

    def body(mine: int, world_size: int) -> None:
        def after(model: Saving) -> None:
            step = model.trainer.global_step
            if step == 2:
                with trouble() if mine == rank else nullcontext():
                    with pytest.raises(OSError, match=match) as info:
                        model.trainer.save_checkpoint(bad)
                        model.trainer.strategy._checkpoints.wait()
                    assert f"rank {rank}:" in str(info.value)
                    assert str(bad) in str(info.value)
            if step in (1, 3):  # the first one makes the ranks' process group, of files as well
                model.trainer.save_checkpoint(good)
                model.trainer.strategy._checkpoints.wait()

        reference = fit(sharded())
        model = fit(sharded(**strategy), after)
        assert_same_tensors(dict(model.state_dict()), dict(reference.state_dict()))

    run_ranks(body, 2)
    assert not bad.exists()
    assert step_of(good) == 3
    assert hidden(bad.parent) == []


@pytest.mark.parametrize(
    ("rank", "strategy"),
    [
        (0, dict(state_dict_type="sharded")),
        (1, dict(state_dict_type="sharded")),
        (1, dict(state_dict_type="sharded", async_save=True)),
        (0, dict(state_dict_type="full")),
    ],
)
def test_a_full_disk_is_an_error_on_all_ranks_and_training_goes_on(
    rank: int, strategy: dict[str, Any], tmp_path: Path
) -> None:
    goes_on(strategy, rank, small_files, tmp_path / "bad", "File too large")


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_read_only_folder_is_an_error_on_all_ranks_and_training_goes_on(kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # others may look, and write no more than anybody in a read-only one
        goes_on(dict(state_dict_type=kind), 0, another_user, folder / "bad", "Permission denied")


def test_a_rank_that_does_not_see_the_folder_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_dir = Path.is_dir

    def blind(self: Path, **settings: Any) -> bool:
        return is_dir(self) and os.environ["RANK"] == "0"

    def body(rank: int, world_size: int) -> None:
        def after(model: Saving) -> None:
            monkeypatch.setattr(Path, "is_dir", blind)
            model.trainer.save_checkpoint(tmp_path / "folder")

        fit(sharded(), after)

    errors = expect_failures(body, 2)
    for kind, message in errors.values():
        assert kind == "OSError"
        assert "rank 1: FileNotFoundError" in message and "share the file system" in message
    assert len(errors) == 2
    assert hidden(tmp_path) == []
