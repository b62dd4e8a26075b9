"""No read mixes a checkpoint with what replaces it, and no failed save costs the one before."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from modules import assert_same_tensors, quiet_trainer
from safetensors.torch import save_file
from test_loading import Elsewhere
from test_sharded_checkpoint import by_key, fit, hidden, read, saves, sharded
from torch import Tensor

import lightning_zero
from lightning_zero.checkpoint import folder, writers
from lightning_zero.checkpoint.agreement import together
from lightning_zero.checkpoint.convert import convert
from lightning_zero.checkpoint.inspect import inspect
from lightning_zero.checkpoint.load import load_lazily
from lightning_zero.checkpoint.places import place_of
from ranks import expect_failures, run_ranks


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save after two steps, both ways."""
    path = tmp_path_factory.mktemp("steps")

    def body(rank: int, world_size: int) -> None:
        for kind in ("full", "sharded"):

            def after(model: Any, kind: str = kind) -> None:
                step = model.trainer.global_step
                saves(path / f"{kind}-{step}", step)(model)

            fit(sharded(state_dict_type=kind), after)

    run_ranks(body, 2)
    return path


def replace(path: Path, by: Path) -> None:
    """Put a copy of another checkpoint in the place of one, as a save does."""
    other = path.with_name("other")
    (shutil.copytree if by.is_dir() else shutil.copy)(by, other)
    folder.put(other, path)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_what_replaces_a_checkpoint_while_it_is_read_is_not_seen(
    kind: str, steps: Path, tmp_path: Path
) -> None:
    path = tmp_path / "last"
    replace(path, steps / f"{kind}-2")
    expected = load_lazily(place_of(steps / f"{kind}-2"), trust=True).checkpoint
    checkpoint = load_lazily(place_of(path), trust=True).checkpoint
    first = checkpoint["state_dict"]["enter.weight"].read()
    assert torch.equal(first, expected["state_dict"]["enter.weight"].read())
    replace(path, steps / f"{kind}-4")
    second = checkpoint["state_dict"]["second.weight"]
    if kind == "full":
        assert torch.equal(second.read(), expected["state_dict"]["second.weight"].read())
    else:
        with pytest.raises(FileNotFoundError, match="last was replaced or removed while"):
            second.read()
    assert load_lazily(place_of(path), trust=True).checkpoint["global_step"] == 4


def test_what_was_opened_is_closed_with_the_last_that_reads_it(steps: Path) -> None:
    def handles() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = handles()
    checkpoint = load_lazily(place_of(steps / "sharded-2"), trust=True).checkpoint
    weight = checkpoint["state_dict"]["enter.weight"]
    assert handles() == before + 1
    del checkpoint
    weight.read()
    del weight
    assert handles() == before


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_ranks_that_open_two_checkpoints_say_so(kind: str, steps: Path, tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        mine = tmp_path / f"{rank}"
        mine.mkdir()
        (mine / "last").symlink_to(steps / f"{kind}-{2 + 2 * rank}")
        os.chdir(mine)
        fit(sharded(), ckpt_path=Path("last"))

    errors = expect_failures(body, 2)
    assert len(errors) == 2
    for name, text in errors.values():
        assert name == "ValueError"
        assert "last" in text and "step 2" in text and "step 4" in text and "replaced" in text


def test_ranks_wait_for_a_slow_reader_beyond_the_limit_and_not_for_one_that_is_absent() -> None:
    def body(rank: int, world_size: int) -> float:
        torch.distributed.barrier()
        began = time.monotonic()
        with together("loading x", timeout=1.0):
            if rank == 1:
                time.sleep(2.0)
        return time.monotonic() - began

    assert min(run_ranks(body, 2)) >= 1.5


# Other file systems


def test_ranks_save_to_and_resume_from_another_file_system(tmp_path: Path) -> None:
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    url = f"elsewhere://{tmp_path}/sub/name"

    def body(rank: int, world_size: int) -> Any:
        model = fit(sharded(), saves(url, 4))
        expected = fit(sharded(), max_epochs=2)
        again = fit(sharded(), ckpt_path=url, max_epochs=2)
        assert_same_tensors(dict(again.state_dict()), dict(expected.state_dict()))
        return {name: value.clone() for name, value in model.state_dict().items()}

    weights = run_ranks(body, 2)[0]
    names = sorted(path.name for path in (tmp_path / "sub" / "name").iterdir())
    assert len([name for name in names if name.endswith(".distcp")]) == 2
    assert len(names) == 4
    convert(url, tmp_path / "weights.pt", progress=False)
    assert_same_tensors(by_key(torch.load(tmp_path / "weights.pt")), by_key(weights))
    report = inspect(url)
    assert report.whole and report.step == 4 and report.path == url
    with lightning_zero.open_checkpoint(url) as file:
        found = torch.load(file, weights_only=True)["state_dict"]
    assert_same_tensors(by_key(found), by_key(weights))


def test_what_lies_elsewhere_is_not_copied_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    fetched: list[Any] = []
    monkeypatch.setattr(Elsewhere, "get", lambda *args, **_: fetched.append(args))
    url = f"elsewhere://{tmp_path}/name"

    def body(rank: int, world_size: int) -> None:
        fit(sharded(), saves(url, 4))
        trainer = quiet_trainer(sharded(), world_size, max_epochs=1)
        assert trainer.strategy._checkpoints.load(url, True, None)["global_step"] == 4
        assert fetched == []

    run_ranks(body, 2)


@pytest.mark.parametrize("moment", ["_write", "_remove_files", "rename"])
def test_a_save_elsewhere_that_fails_leaves_a_checkpoint(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    url = f"elsewhere://{tmp_path}/name"
    broken: Any = writers._RemoteWriter if moment != "rename" else Elsewhere
    original = getattr(broken, moment)

    def fail_once(*args: Any, **settings: Any) -> Any:
        monkeypatch.setattr(broken, moment, original)
        raise OSError(errno.EIO, "the network is down")

    def body(rank: int, world_size: int) -> None:
        def after(model: Any) -> None:
            step = model.trainer.global_step
            if step == 2:
                monkeypatch.setattr(broken, moment, fail_once)
                if moment == "_remove_files":
                    model.trainer.save_checkpoint(url)  # whole; only what it replaced stays
                else:
                    with pytest.raises(OSError, match="the network is down"):
                        model.trainer.save_checkpoint(url)
                model.trainer.strategy.barrier()
                found = load_lazily(place_of(url), True).checkpoint
                assert found["global_step"] == (2 if moment == "_remove_files" else 1)
                assert isinstance(found["state_dict"]["enter.weight"].read(), Tensor)
                model.trainer.strategy.barrier()
            elif step in (1, 3):
                model.trainer.save_checkpoint(url)

        fit(sharded(), after)

    run_ranks(body, 2)
    assert load_lazily(place_of(url), True).checkpoint["global_step"] == 3
    assert len(list((tmp_path / "name").glob("*.distcp"))) == 2


# Where names cannot be swapped


@pytest.fixture
def no_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_exchange", lambda *_: False)


@pytest.mark.usefixtures("no_swap")
def test_a_second_rename_that_fails_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, unfinished = tmp_path / "name", tmp_path / "new"
    for each, text in ((path, "old"), (unfinished, "new")):
        each.mkdir()
        (each / "meta.pt").write_text(text)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self == unfinished:
            raise OSError(errno.EIO, "no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no"):
        folder.put(unfinished, path)
    assert (path / "meta.pt").read_text() == "old"


def aside(path: Path) -> Path:
    """Name what a save on another host has put aside."""
    return path.parent / f"{folder._PREFIX}another-7-77-0123abcd{folder._OLD}{path.name}"


def test_what_another_host_has_put_aside_and_never_replaced_comes_back_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_RENAMING", 0.3)
    path = tmp_path / "name"
    aside(path).mkdir()
    folder.recover(path)
    assert path.is_dir() and hidden(tmp_path) == []
    monkeypatch.setattr(folder, "_RENAMING", 20.0)
    folder.recover(tmp_path / "no other")  # does not wait
    path.rename(aside(path))
    (tmp_path / "made").mkdir()
    late = threading.Timer(0.1, (tmp_path / "made").rename, [path])
    late.start()
    folder.recover(path)
    late.join()
    assert path.is_dir() and aside(path).is_dir()  # the new one came in time


def test_a_file_elsewhere_that_was_replaced_is_not_read_on(tmp_path: Path) -> None:
    def put(step: int) -> None:
        with fsspec.open("memory://places/a.ckpt", "wb") as file:
            torch.save({"state_dict": {"w": torch.full((3,), step)}, "global_step": step}, file)

    put(1)
    first = load_lazily(place_of("memory://places/a.ckpt"), False).checkpoint
    assert first["state_dict"]["w"].tolist() == [1, 1, 1]
    again = load_lazily(place_of("memory://places/a.ckpt"), False).checkpoint
    put(2)
    with pytest.raises(ValueError, match=r"a\.ckpt was replaced while it was read"):
        again["state_dict"]["w"].tolist()


class Remembering(Elsewhere):
    """Keeps what it has listed, as file systems on a network do."""

    protocol = "remembering"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("remembering://"))

    def info(self, path: str, **settings: Any) -> Any:
        if path not in self.dircache:
            self.dircache[path] = super().info(path, **settings)
        return self.dircache[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


def test_what_a_file_system_remembers_of_an_old_checkpoint_is_forgotten(tmp_path: Path) -> None:
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    for step in (1, 2000):
        save_file({"w": torch.ones(step)}, tmp_path / "a.safetensors")
        report = inspect(f"remembering://{tmp_path}/a.safetensors")
        assert report.whole and report.weights[0].shape == (step,)


# What is in a folder beside the checkpoint


@pytest.mark.parametrize("swaps", [True, False])
def test_files_of_others_stay_in_a_folder_that_is_replaced(
    swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(folder, "_exchange", lambda *_: False)

    def body(rank: int, world_size: int) -> None:
        def after(model: Any) -> None:
            step = model.trainer.global_step
            if step < 3:
                model.trainer.save_checkpoint(tmp_path / "name")
            if step == 1 and rank == 0:
                (tmp_path / "name" / "notes.txt").write_text("mine")
                (tmp_path / "name" / "more").mkdir()

        fit(sharded(), after)

    run_ranks(body, 2)
    assert read(tmp_path / "name")["global_step"] == 2
    assert (tmp_path / "name" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "name" / "more").is_dir()
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("swaps", [True, False])
def test_files_of_others_stay_in_a_folder_whose_link_is_replaced(
    swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(folder, "_exchange", lambda *_: False)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "notes.txt").write_text("mine")
    (tmp_path / "last").symlink_to("first")
    unfinished = folder.begin(tmp_path / "last")
    unfinished.mkdir()
    folder.put(unfinished, tmp_path / "last")
    assert (tmp_path / "first" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "last").is_symlink() and hidden(tmp_path) == []


def test_a_container_of_the_same_host_does_not_count_as_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = folder.begin(tmp_path / "name")
    theirs.mkdir()
    renamed = theirs.with_name(theirs.name.replace(str(os.getpid()), "999999999"))
    theirs.rename(renamed)
    assert folder.unfinished_saves(tmp_path) == [renamed]  # the number names nobody
    monkeypatch.setattr(folder, "_host", lambda: "this-other")
    assert folder.unfinished_saves(tmp_path) == []


def test_a_part_that_was_removed_while_others_wrote_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writers._write_bytes

    def losing(path: Path, content: bytes) -> None:
        (path.parent / "__1_0.distcp").unlink()
        write(path, content)

    def body(rank: int, world_size: int) -> None:
        def after(model: Any) -> None:
            if model.trainer.global_step == 1:
                model.trainer.save_checkpoint(tmp_path / "name")
            if model.trainer.global_step == 2:
                monkeypatch.setattr(writers, "_write_bytes", losing)
                with pytest.raises(OSError, match=r"__1_0.distcp is missing"):
                    model.trainer.save_checkpoint(tmp_path / "name")

        fit(sharded(), after)

    run_ranks(body, 2)
    assert read(tmp_path / "name")["global_step"] == 1
