"""What the Trainer saves under state_dict_type="sharded", and what stock tools read of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from modules import assert_same_tensors, batches, quiet_trainer
from optimizers import Lamb, Shampoo, torch_muon
from test_full_checkpoint import Mixed
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import writers
from ranks import expect_failures, run_ranks

STAGES = (1, 2, 3)
SAMPLES = 24  # four steps of three at two ranks


def sharded(stage: int = 3, **settings: Any) -> ZeroStrategy:
    """Make a strategy that writes folders, of a model of many units."""
    return ZeroStrategy(
        stage=stage,
        **{
            "bucket_mb": 1e-6,
            "auto_wrap_policy": "layers",
            "state_dict_type": "sharded",
            **settings,
        },
    )


class Saving(Mixed):
    """Calls a function after every batch."""

    after: Callable[[Saving], None] | None = None
    make: Callable[[Any], torch.optim.Optimizer] | None = None

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end()
        if self.after is not None:
            self.after(self)

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() if self.make is None else self.make(self.parameters())


def fit(
    strategy: ZeroStrategy,
    after: Callable[[Saving], None] | None = None,
    kind: type[Saving] = Saving,
    make: Callable[[Any], torch.optim.Optimizer] | None = None,
    optimizer: dict[str, Any] | None = None,
    ckpt_path: Path | None = None,
    **settings: Any,
) -> Saving:
    """Train with a strategy on this rank."""
    torch.manual_seed(5)
    model = kind(**(optimizer or {}))
    model.after, model.make = after, make
    trainer = quiet_trainer(strategy, torch.distributed.get_world_size(), **settings)
    trainer.fit(model, batches(model, SAMPLES, 1), ckpt_path=ckpt_path, weights_only=False)
    return model


def saves(path: Any, step: int = 3, **settings: Any) -> Callable[[Saving], None]:
    """Make what saves at a step."""

    def after(model: Saving) -> None:
        if model.trainer.global_step == step:
            model.trainer.save_checkpoint(path, **settings)

    return after


def read(folder: Path) -> dict[str, Any]:
    """Read a sharded checkpoint with torch's own tool."""
    file = folder.parent / f"{folder.name}-whole.pt"
    dcp_to_torch_save(folder, file)
    state: dict[str, Any] = torch.load(file, weights_only=False)
    state |= torch.load(folder / "meta.pt", weights_only=False)
    return state


def hidden(folder: Path) -> list[str]:
    """List what saves have not removed."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def by_key(values: dict[Any, Any]) -> dict[Any, Any]:
    """Sort a dict and those in it, since torch's files have no order."""
    return {k: by_key(v) if isinstance(v, dict) else v for k, v in sorted(values.items())}


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Compare trees down to dtypes and bits."""
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for number, value in enumerate(expected):
            assert_same(actual[number], value, f"{where}.{number}")
    else:
        assert actual == expected, where


# What is in it


def muon(params: Any) -> torch.optim.Optimizer:
    """Make torch's Muon, which takes matrices only."""
    return torch_muon([param for param in params if param.ndim == 2])


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": dict(optimizer=dict(groups=True, amsgrad=True)),
    "SGD": dict(optimizer=dict(optimizer="SGD", momentum=0.9, groups=True, schedule=True)),
    "Adafactor": dict(optimizer=dict(optimizer="Adafactor", groups=True)),
    "Lamb": dict(make=Lamb),
    "Shampoo": dict(make=Shampoo),
    "Muon": dict(make=muon),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stock_tools_read_all_that_a_full_checkpoint_holds(
    name: str, stage: int, tmp_path: Path
) -> None:
    def body(rank: int, world_size: int) -> None:
        for kind in ("full", "sharded"):
            fit(sharded(stage, state_dict_type=kind), saves(tmp_path / kind), **OPTIMIZERS[name])

    run_ranks(body, 2)
    expected = torch.load(tmp_path / "full", weights_only=False)
    ours = read(tmp_path / "sharded")
    fabric = _load_distributed_checkpoint(tmp_path / "sharded")
    assert_same(fabric["model"], ours["model"])
    assert_same(by_key(ours["model"]), by_key(expected["state_dict"]))
    assert ours["model"]["count"].item() == 2**40 + 1
    assert "frozen.weight" in ours["model"] and "scratch" not in ours["model"]
    assert ours["lightning_zero"]["aliases"] == {"second.weight": "first.weight"}
    mine, (theirs,) = ours["optimizer_0"], expected["optimizer_states"]
    names = [name for group in mine["param_groups"] for name in group["params"]]
    assert theirs["state"]
    states = {names.index(key): value for key, value in mine["state"].items()}
    assert_same(by_key(states), by_key(theirs["state"]))
    for group, reference in zip(mine["param_groups"], theirs["param_groups"], strict=True):
        assert_same({**group, "params": reference["params"]}, reference)
    for key in set(expected) - {"state_dict", "optimizer_states", "lightning_zero"}:
        assert_same(ours[key], expected[key], key)


def test_lightnings_consolidation_tool_reads_it(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        fit(sharded(), saves(tmp_path / "folder"))

    run_ranks(body, 2)
    command = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint"]
    subprocess.run([*command, tmp_path / "folder", "--output_file", tmp_path / "file"], check=True)
    whole = torch.load(tmp_path / "file", weights_only=True)
    Mixed().load_state_dict(whole["state_dict"])
    assert whole["global_step"] == 3
    assert len(whole["optimizer_states"]) == 1
    assert whole["loops"]["fit_loop"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_masters_and_the_loss_scale_are_in_it(precision: Any, tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        scaler = GradScaler("cpu", init_scale=2.0**7)
        mixed: dict[str, Any] = dict(precision=precision)
        if precision == "16-mixed":
            mixed = dict(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        fit(sharded(), saves(tmp_path / "folder"), **mixed)

    run_ranks(body, 2)
    found = read(tmp_path / "folder")
    weight = found["model"]["enter.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())
    if precision == "16-mixed":
        assert found["MixedPrecision"]["scale"] == 2.0**7


def test_each_rank_writes_its_part_and_its_random_numbers(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> Tensor:
        states: list[Tensor] = []

        def after(model: Saving) -> None:
            torch.manual_seed(rank + model.trainer.global_step)
            saves(tmp_path / "folder")(model)
            if model.trainer.global_step == 3:
                states.append(torch.get_rng_state())

        fit(sharded(), after)
        return states[0]

    states = run_ranks(body, 2)
    metadata = FileSystemReader(tmp_path / "folder").read_metadata()
    elements = dict.fromkeys(["__0_0.distcp", "__1_0.distcp"], 0)
    for index, place in metadata.storage_data.items():
        kind = metadata.state_dict_metadata[index.fqn]
        if isinstance(kind, TensorStorageMetadata):
            chunk = next(chunk for chunk in kind.chunks if chunk.offsets == index.offset)
            elements[place.relative_path] += chunk.sizes.numel()
    assert max(elements.values()) < 1.5 * min(elements.values())
    found = torch.load(tmp_path / "folder" / "meta.pt")["lightning_zero"]["rng"]
    assert [set(each) for each in found] == [{"torch", "python", "numpy"}] * 2
    for state, each in zip(states, found, strict=True):
        assert torch.equal(state, each["torch"])
    assert not torch.equal(*states)


def test_of_buffers_that_differ_rank_0s_is_saved(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        def after(model: Saving) -> None:
            model.count.fill_(rank + 40)
            saves(tmp_path / "folder")(model)

        fit(sharded(broadcast_buffers=False), after)

    run_ranks(body, 2)
    assert read(tmp_path / "folder")["model"]["count"].item() == 40


def test_edits_of_on_save_checkpoint_arrive(tmp_path: Path) -> None:
    class Editing(Saving):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            del state["frozen.bias"]
            state["renamed"] = state.pop("scale")
            state["short"] = state["enter.weight"].half()
            state["added"] = torch.arange(3)
            checkpoint["best"] = {"weight": state["enter.weight"].clone(), "note": "é"}
            checkpoint["rank"] = self.global_rank

    def body(rank: int, world_size: int) -> None:
        model = fit(sharded(), saves(tmp_path / "folder"), kind=Editing)
        model.trainer.save_checkpoint(tmp_path / "after")

    run_ranks(body, 2)
    for folder in ("folder", "after"):
        found = read(tmp_path / folder)
        weights = found["model"]
        assert not {"frozen.bias", "scale"} & set(weights)
        assert weights["renamed"].shape == ()
        assert torch.equal(weights["short"], weights["enter.weight"].half())
        assert weights["added"].tolist() == [0, 1, 2]
        assert torch.equal(found["best"]["weight"], weights["enter.weight"])
        assert found["best"]["note"] == "é"
        assert found["rank"] == 0


def test_arithmetic_on_a_part_in_on_save_checkpoint_is_refused_by_name() -> None:
    class Editing(Saving):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            with pytest.raises(NotImplementedError, match="state_dict_type='full'"):
                checkpoint["state_dict"]["enter.weight"] * 2
            raise KeyError("seen")

    def body(rank: int, world_size: int) -> None:
        fit(sharded(), saves("never"), kind=Editing)

    errors = expect_failures(body, 2)
    assert [kind for kind, _ in errors.values()] == ["KeyError"] * 2


def test_averaged_weights_are_saved_beside_the_current_ones(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        fit(sharded(), saves(tmp_path / "folder"), callbacks=[WeightAveraging()])

    run_ranks(body, 2)
    found = read(tmp_path / "folder")
    now, average = found["current_model_state"], found["model"]
    assert now["enter.weight"].shape == average["enter.weight"].shape
    assert not torch.equal(now["enter.weight"], average["enter.weight"])


def test_weights_alone_can_be_saved(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        fit(sharded(), saves(tmp_path / "folder", weights_only=True))

    run_ranks(body, 2)
    found = read(tmp_path / "folder")
    assert "optimizer_0" not in found and "callbacks" not in found
    assert "enter.weight" in found["model"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_saving_after_fit_still_has_everything(world_size: int, tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        model = fit(sharded(async_save=True), saves(tmp_path / "in", step=4), max_steps=4)
        model.trainer.save_checkpoint(tmp_path / "after")
        assert (tmp_path / "after" / ".metadata").is_file()  # nothing would wait for it later

    run_ranks(body, world_size)
    before, after = (read(tmp_path / name) for name in ("in", "after"))
    assert_same(by_key(after["model"]), by_key(before["model"]))
    mine, theirs = after["optimizer_0"], before["optimizer_0"]
    assert_same(by_key(mine["state"]), by_key(theirs["state"]))
    assert_same(mine["param_groups"], theirs["param_groups"])


# ModelCheckpoint


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("last", [True, "link"])
def test_model_checkpoint_keeps_the_best_and_the_last(
    last: Any, asynchronous: bool, tmp_path: Path
) -> None:
    def body(rank: int, world_size: int) -> None:
        callback = ModelCheckpoint(
            tmp_path, "{step}", monitor="train", mode="max", save_top_k=2, save_last=last,
            every_n_train_steps=1,
        )  # fmt: skip
        strategy = sharded(async_save=asynchronous)
        fit(strategy, max_epochs=2, enable_checkpointing=True, callbacks=[callback])
        best = sorted(Path(path).name for path in callback.best_k_models)
        found = sorted(path.name for path in tmp_path.iterdir())
        assert found == [*sorted(["last.ckpt", *best])]
        assert len(best) == 2
        torch.distributed.barrier()

    run_ranks(body, 2)
    assert (tmp_path / "last.ckpt").is_symlink() == (last == "link")
    assert all((path / ".metadata").is_file() for path in tmp_path.iterdir())
    for path in list(tmp_path.iterdir()):
        if not path.is_symlink():
            step = read(path)["global_step"]
            assert path.name in ("last.ckpt", f"step={step}.ckpt")


def test_model_checkpoint_saves_weights_alone_every_n_steps(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        callback = ModelCheckpoint(
            tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2, save_weights_only=True
        )
        fit(sharded(), enable_checkpointing=True, callbacks=[callback])

    run_ranks(body, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step=2.ckpt", "step=4.ckpt"}
    assert "optimizer_0" not in read(tmp_path / "step=2.ckpt")


def test_removing_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        model = fit(sharded(), saves(tmp_path / "folder"))
        if rank == 0:
            (tmp_path / "link").symlink_to("folder")
        model.trainer.strategy.remove_checkpoint(tmp_path / "link")
        assert not (tmp_path / "link").is_symlink()
        model.trainer.strategy.remove_checkpoint(tmp_path / "nothing")

    run_ranks(body, 2)
    assert read(tmp_path / "folder")["global_step"] == 3


# Overwriting


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("before", ["full", "sharded", "link to full", "link to sharded", "empty"])
def test_a_save_replaces_what_has_its_name_and_follows_no_link(
    before: str, kind: str, swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:  # as on systems other than Linux
        monkeypatch.setattr("lightning_zero.checkpoint.folder._exchange", lambda *_: False)
    target, path = tmp_path / "target", tmp_path / "name"

    def body(rank: int, world_size: int) -> None:
        old = before.rpartition("link to ")[2]
        if old == "empty":
            path.mkdir()
        else:
            where = path if before == old else target
            fit(sharded(state_dict_type=old), saves(where, step=1))
            if where is target:
                path.symlink_to("target")
        fit(sharded(state_dict_type=kind), saves(path))

    run_ranks(body, 1)
    assert not path.is_symlink()
    assert path.is_dir() == (kind == "sharded")
    found = read(path) if path.is_dir() else torch.load(path)
    assert found["global_step"] == 3
    assert hidden(tmp_path) == []
    if before.startswith("link"):
        old = read(target) if target.is_dir() else torch.load(target)
        assert old["global_step"] == 1


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_folder_that_is_no_checkpoint_is_never_replaced(kind: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious.txt").write_text("mine")

    def body(rank: int, world_size: int) -> None:
        fit(sharded(state_dict_type=kind), saves(tmp_path / "data"))

    errors = expect_failures(body, 2)
    assert sorted(errors) == [0, 1]
    for kind_of_error, message in errors.values():
        assert kind_of_error == "OSError"
        assert str(tmp_path / "data") in message and "no checkpoint" in message
    assert (tmp_path / "data" / "precious.txt").read_text() == "mine"
    assert hidden(tmp_path) == []


# URLs


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_urls_of_local_files_are_paths(protocol: str, tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        fit(sharded(), saves(f"{protocol}://{tmp_path}/sub/folder"))

    run_ranks(body, 2)
    assert read(tmp_path / "sub" / "folder")["global_step"] == 3
    assert hidden(tmp_path / "sub") == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_other_file_systems_get_the_metadata_last_and_no_leftovers(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int, world_size: int) -> None:
        system = fsspec.filesystem("memory")
        order: list[str] = []
        write = MemoryFileSystem._open

        def watching(self: Any, path: str, mode: str = "rb", **settings: Any) -> Any:
            if "w" in mode:
                order.append(path.rpartition("/")[2])
            return write(self, path, mode, **settings)

        monkeypatch.setattr(MemoryFileSystem, "_open", watching)

        def every(model: Saving) -> None:
            model.trainer.save_checkpoint("memory://a/name")

        strategy = sharded(async_save=asynchronous)
        model = fit(
            strategy, lambda model: saves("memory://a/name", model.trainer.global_step)(model)
        )
        files = [path.rpartition("/")[2] for path in system.ls("/a/name", detail=False)]
        assert len([name for name in files if name.endswith(".distcp")]) == 1
        assert {".metadata", "meta.pt"} < set(files) and len(files) == 3
        assert order[-2:] == ["meta.pt", ".metadata.tmp"]
        system.get("/a/name", str(tmp_path / "copy"), recursive=True)
        model.trainer.strategy.remove_checkpoint("memory://a/name")
        assert not system.exists("/a/name")

    run_ranks(body, 1)
    assert read(tmp_path / "copy")["global_step"] == 8


# In the background


class Slow:
    """Makes every write of ranks' files wait until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        write = writers.FileSystemWriter.write_data

        def waiting(*args: Any) -> Any:
            assert self.gate.wait(20)
            return write(*args)

        monkeypatch.setattr(writers.FileSystemWriter, "write_data", waiting)


def test_a_step_waits_for_the_copy_only_and_no_file_mixes_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)

    def body(rank: int, world_size: int) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}

        def after(model: Saving) -> None:
            if model.trainer.global_step == 2:
                model.trainer.save_checkpoint(tmp_path / "folder")
                whole.update({k: v.detach().clone() for k, v in model.state_dict().items()})
            if model.trainer.global_step == 4:
                assert not (tmp_path / "folder").exists()
                slow.gate.set()

        model = fit(sharded(async_save=True), after)
        assert (tmp_path / "folder").is_dir()
        assert not torch.equal(model.enter.weight, whole["enter.weight"])
        return whole

    whole = run_ranks(body, 2)[0]
    found = read(tmp_path / "folder")
    assert found["global_step"] == 2
    assert_same_tensors(by_key(found["model"]), by_key(whole))
    steps = {float(each["step"]) for each in found["optimizer_0"]["state"].values()}
    assert steps == {2.0}


def test_one_save_is_in_flight_and_the_next_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)

    def body(rank: int, world_size: int) -> None:
        def after(model: Saving) -> None:
            step = model.trainer.global_step
            if step == 2:
                threading.Timer(0.3, slow.gate.set).start()
            if step <= 2:
                model.trainer.save_checkpoint(tmp_path / f"{step}")
                assert (tmp_path / "1").exists() == (step == 2)

        fit(sharded(async_save=True), after)

    run_ranks(body, 2)
    assert [read(tmp_path / name)["global_step"] for name in "12"] == [1, 2]


def fails_on(rank: int, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Let the disk of one rank be full for some saves."""
    write = writers.FileSystemWriter.write_data
    left = [times]

    def full(self: Any, *args: Any) -> Any:
        if torch.distributed.get_rank() == rank and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *args)

    monkeypatch.setattr(writers.FileSystemWriter, "write_data", full)


def test_an_error_in_the_background_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_on(1, monkeypatch)

    def body(rank: int, world_size: int) -> None:
        def after(model: Saving) -> None:
            step = model.trainer.global_step
            if step == 1:
                model.trainer.save_checkpoint(tmp_path / "1")
            if step == 2:
                with pytest.raises(OSError, match=r"1 could not be written \(rank 1: .*No space"):
                    model.trainer.save_checkpoint(tmp_path / "2")
            if step == 3:
                model.trainer.save_checkpoint(tmp_path / "3")

        fit(sharded(async_save=True), after)

    run_ranks(body, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_an_error_in_the_background_is_raised_at_the_end_of_fit_with_the_weights_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_on(0, monkeypatch)

    def body(rank: int, world_size: int) -> None:
        strategy = sharded(async_save=True)
        torch.manual_seed(5)
        model = Saving()
        model.after = saves(tmp_path / "folder", step=4)
        trainer = quiet_trainer(strategy, world_size)
        with pytest.raises(OSError, match=r"rank 0: .*No space left"):
            trainer.fit(model, batches(model, SAMPLES, 1))
        reference = fit(sharded())
        assert_same_tensors(dict(model.state_dict()), dict(reference.state_dict()))

    run_ranks(body, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_does_not_cost_the_checkpoint_that_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writers.FileSystemWriter.write_data

    def full(self: Any, *args: Any) -> Any:
        time.sleep(0.2)  # ModelCheckpoint has asked for the removal by then
        if "step=4" in str(self.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *args)

    monkeypatch.setattr(writers.FileSystemWriter, "write_data", full)

    def body(rank: int, world_size: int) -> None:
        callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
        with pytest.raises(OSError, match="No space left"):
            fit(sharded(async_save=True), enable_checkpointing=True, callbacks=[callback])

    run_ranks(body, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step=2.ckpt"]


def test_a_process_does_not_exit_with_a_save_in_flight(tmp_path: Path) -> None:
    script = f"""
import sys, time
sys.path[:0] = {[str(Path(__file__).parent)]!r}
import torch
from lightning_zero.checkpoint import writers
from test_sharded_checkpoint import *
write = writers.FileSystemWriter.write_data
def slow(*args):
    time.sleep(0.5)
    return write(*args)
writers.FileSystemWriter.write_data = slow
class Leaves(Saving):
    def on_train_batch_end(self, *args):
        self.trainer.save_checkpoint({str(tmp_path / "folder")!r})
        sys.exit(3)
model = Leaves()
quiet_trainer(sharded(async_save=True), 1).fit(model, batches(model, SAMPLES, 1))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 3, ended.stderr
    assert read(tmp_path / "folder")["global_step"] == 1


def test_an_error_of_training_is_not_hidden_by_one_of_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_on(1, monkeypatch)

    def body(rank: int, world_size: int) -> None:
        def after(model: Saving) -> None:
            model.trainer.save_checkpoint(tmp_path / "folder")
            raise KeyError("mine")

        fit(sharded(async_save=True), after)

    errors = expect_failures(body, 2)
    assert [kind for kind, _ in errors.values()] == ["KeyError"] * 2


# Calls that cannot work


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_saving_on_one_rank_only_becomes_an_error_within_the_stall_limit(
    stage: int, asynchronous: bool, tmp_path: Path
) -> None:
    def body(rank: int, world_size: int) -> None:
        def after(model: Saving) -> None:
            if rank == 0:
                model.trainer.save_checkpoint(tmp_path / "folder")

        fit(sharded(stage, stall_timeout=1.0, async_save=asynchronous), after)

    started = time.monotonic()
    errors = expect_failures(body, 2, timeout=15)
    assert time.monotonic() - started < 15
    kind, message = errors[0]
    assert kind == "TimeoutError" and "rank 1: issued" in message
    assert 1 in errors
    assert list(tmp_path.iterdir()) == []


def test_storage_options_are_refused() -> None:
    def body(rank: int, world_size: int) -> None:
        fit(sharded(), saves("never", storage_options={}))

    ((kind, message),) = expect_failures(body, 1).values()
    assert kind == "TypeError" and "state_dict_type='full'" in message


def test_asynchronous_saves_of_files_are_refused() -> None:
    with pytest.raises(ValueError, match="async_save=True needs state_dict_type='sharded'"):
        ZeroStrategy(async_save=True)
