"""Resuming, evaluating and building modules from checkpoints of both kinds, and what is refused."""

from __future__ import annotations

import functools
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from loaders import StatefulLoader
from modules import Transformer, assert_same_tensors, batches, quiet_trainer, samples
from torch import Tensor

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.agreement import together
from lightning_zero.checkpoint.pickles import read_metadata
from lightning_zero.checkpoint.places import place_of
from ranks import expect_failures, run_ranks

KINDS = ("full", "sharded")
STAGES = (1, 2, 3)


def make(**settings: Any) -> Transformer:
    """Make a small module with dropout and a tied weight."""
    return Transformer(width=16, groups=True, schedule=True, **settings)


def trainer_of(stage: int, kind: str, world_size: int, **settings: Any) -> L.Trainer:
    """Make a Trainer for a stage that saves in one way."""
    strategy = ZeroStrategy(stage=stage, state_dict_type=kind, stall_timeout=20.0)
    return quiet_trainer(strategy, world_size, **settings)


def loader(rank: int, world_size: int, shuffle: bool = True) -> StatefulLoader:
    """Deal samples that each rank shuffles by its own generator."""
    tensors = samples(make(), 48).tensors
    return StatefulLoader(tensors, 6, rank, world_size, shuffle=shuffle)


def state_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Copy a module's state."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def save(rank: int, world_size: int, stage: int, kind: str, path: Path) -> dict[str, Tensor]:
    """Train for an epoch and save."""
    model = make()
    trainer = trainer_of(stage, kind, world_size)
    trainer.fit(model, loader(rank, world_size))
    trainer.save_checkpoint(path)
    return state_of(model)


Saved = Callable[..., tuple[Path, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save once for each stage and kind; return where, and the weights."""

    @functools.cache
    def run(kind: str, stage: int = 3, world_size: int = 2) -> tuple[Path, dict[str, Tensor]]:
        path = tmp_path_factory.mktemp(f"{kind}-{stage}") / "saved.ckpt"
        return path, run_ranks(save, world_size, stage, kind, path, init=False)[0]

    return run


@pytest.fixture
def copied(saved: Saved, tmp_path: Path) -> Callable[[str], Path]:
    """Copy a checkpoint, to damage it."""

    def copy(kind: str) -> Path:
        source, _ = saved(kind)
        target = tmp_path / f"{kind}.ckpt"
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        return target

    return copy


# Going on in the middle of an epoch


class Pausing(Transformer):
    """Saves after some batches, and notes what it drew."""

    path: Path | None = None
    stops_at = 11  # of 8 batches an epoch, so in the middle of the second

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.drawn.append((batch[0].sum().item(), torch.rand(1).item()))
        return loss

    def on_fit_start(self) -> None:
        self.drawn: list[tuple[float, float]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if self.path is not None and self.trainer.global_step == self.stops_at:
            self.trainer.save_checkpoint(self.path)


def pause(
    rank: int, world_size: int, stage: int, kind: str, path: Path, resumes: bool, epochs: int = 3
) -> Any:
    """Train three epochs, or the rest of them from the middle of the second one."""
    torch.manual_seed((177 if resumes else 5) + 1000 * rank)
    model = Pausing(width=16)
    model.path = None if resumes else path
    trainer = trainer_of(stage, kind, world_size, max_epochs=epochs)
    trainer.fit(model, loader(rank, world_size), ckpt_path=path if resumes else None)
    tail = slice(-(8 * epochs - Pausing.stops_at), None)
    return model.losses[tail], model.drawn[tail], state_of(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_goes_on_in_the_middle_of_an_epoch_bit_for_bit_on_every_rank(
    stage: int, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "middle.ckpt"
    expected = run_ranks(pause, 2, stage, kind, path, False, init=False)
    found = run_ranks(pause, 2, stage, kind, path, True, init=False)
    assert len(found[0][0]) == 13
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0]
        assert ours[1] == theirs[1]
        assert_same_tensors(ours[2], theirs[2])
    assert found[0][1] != found[1][1]  # ranks shuffle and drop in ways of their own


# Which checkpoint


def best_and_last(rank: int, world_size: int, stage: int, kind: str, folder: Path) -> Any:
    """Test the best, the last and a named checkpoint; then go on from the last."""
    callback = ModelCheckpoint(folder, monitor="val", save_top_k=1, save_last=True)
    model = make(lr=0.3)
    settings = dict(enable_checkpointing=True, callbacks=[callback])
    trainer = trainer_of(stage, kind, world_size, max_epochs=3, **settings)
    trainer.fit(model, batches(model, 24), batches(model, 12, 2))
    tests = [
        trainer.test(model, batches(model, 12, 3), ckpt_path=which, verbose=False)
        for which in ("best", "last", callback.best_model_path)
    ]
    assert tests[0] == tests[2]
    validated = trainer.validate(model, batches(model, 12, 2), ckpt_path="best", verbose=False)
    again = trainer_of(
        stage, kind, world_size, max_epochs=4, enable_checkpointing=True, default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
    )  # fmt: skip
    fresh = make(lr=0.3)
    again.fit(fresh, batches(fresh, 24), ckpt_path="last")
    assert again.current_epoch == 4
    assert len(fresh.losses) == 4
    score = callback.best_model_score
    return tests, validated, score, Path(callback.last_model_path).is_dir(), state_of(fresh)


@pytest.mark.parametrize("stage", STAGES)
def test_the_best_and_the_last_folder_are_found_by_name(stage: int, tmp_path: Path) -> None:
    full, sharded = (
        run_ranks(best_and_last, 2, stage, kind, tmp_path / kind, init=False) for kind in KINDS
    )
    for ours, theirs in zip(sharded, full, strict=True):
        assert ours[:3] == theirs[:3]
        assert (ours[3], theirs[3]) == (True, False)
        assert_same_tensors(ours[4], theirs[4])
    assert sharded[0][1][0]["val"] == pytest.approx(sharded[0][2].item())


# How strictly


def fit_from(
    rank: int,
    world_size: int,
    path: Any,
    module: type[Transformer] = Transformer,
    stage: int = 3,
    **settings: Any,
) -> dict[str, Tensor]:
    """Load a checkpoint, train no further, and return the weights."""
    torch.manual_seed(4)
    model = module(width=16, groups=True, schedule=True)
    plugins = settings.pop("plugins", None)
    trainer = trainer_of(stage, "full", world_size, max_epochs=1, plugins=plugins)
    trainer.fit(model, loader(rank, world_size), ckpt_path=path, **settings)
    return state_of(model)


class Wider(Transformer):
    """Has a weight more, asks for no strictness, and has the optimizer skip that weight."""

    strict_loading = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.extra = torch.nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
        del self.position
        self.position = 0.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []
        checkpoint["lr_schedulers"] = []


@pytest.mark.parametrize("kind", KINDS)
def test_without_strictness_weights_may_be_missing_and_left_over(kind: str, saved: Saved) -> None:
    path, weights = saved(kind)
    for rank, found in enumerate(run_ranks(fit_strictless, 2, path, init=False)):
        assert torch.equal(found.pop("extra"), torch.full((3,), 7.0)), rank
        assert_same_tensors(found, {k: v for k, v in weights.items() if k != "position"})


def fit_strictless(rank: int, world_size: int, path: Path) -> dict[str, Tensor]:
    """Load into another module for an evaluation."""
    model = Wider(width=16)
    trainer = trainer_of(3, "full", world_size)
    trainer.validate(model, batches(model, 12), ckpt_path=path, verbose=False)
    return state_of(model)


@pytest.mark.parametrize("weights_only", [None, True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_ours_needs_no_trust(
    kind: str, weights_only: bool | None, saved: Saved
) -> None:
    path, weights = saved(kind)
    found = run_ranks(fit_from, 2, path, weights_only=weights_only, init=False)
    assert_same_tensors(found[1], weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_evaluations_take_a_checkpoint(what: str, kind: str, saved: Saved) -> None:
    path, weights = saved(kind)

    def evaluate(rank: int, world_size: int, path: Path | None) -> Any:
        model = make()
        if path is None:
            model.load_state_dict(weights)
        trainer = trainer_of(2, kind, world_size)
        quiet = {} if what == "predict" else {"verbose": False}
        return getattr(trainer, what)(model, batches(model, 12), ckpt_path=path, **quiet)

    found, expected = (run_ranks(evaluate, 2, each, init=False) for each in (path, None))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# Without a Trainer


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_module_is_built_from_a_folder_without_a_process_group(
    weights_only: bool, saved: Saved
) -> None:
    path, weights = saved("sharded")
    with lightning_zero.open_checkpoint(path, weights_only=weights_only) as file:
        model = Transformer.load_from_checkpoint(file)
    assert_same_tensors(state_of(model), weights)
    assert model.head.weight is model.embedding.weight
    assert model.hparams["groups"] is True


def test_a_module_is_built_from_a_full_file(saved: Saved) -> None:
    path, weights = saved("full")
    for source in (path, lightning_zero.open_checkpoint(path)):
        assert_same_tensors(state_of(Transformer.load_from_checkpoint(source)), weights)


def test_a_folder_that_was_opened_holds_what_a_full_file_does(saved: Saved) -> None:
    path, _ = saved("sharded")
    with lightning_zero.open_checkpoint(path) as file:
        found = torch.load(file, weights_only=True)
    full = torch.load(saved("full")[0], weights_only=True)
    assert set(found) == set(full)
    torch.testing.assert_close(found["optimizer_states"], full["optimizer_states"], rtol=0, atol=0)
    assert found["lr_schedulers"] == full["lr_schedulers"]
    assert "optimizer_states" not in torch.load(
        lightning_zero.open_checkpoint(path, weights_only=True), weights_only=True
    )


def test_opening_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "no"))):
        lightning_zero.open_checkpoint(tmp_path / "no")


# Other ways to files


class Noting(TorchCheckpointIO):
    """Notes what it loads, and fails on one rank if told to."""

    fails = False

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.loaded.append(str(path))
        if self.fails and torch.distributed.get_rank() == 1:
            raise OSError(f"{path}: the disk of this node is gone")
        return super().load_checkpoint(path, *args, **kwargs)


class Failing(Noting):
    fails = True


def fit_with_plugin(rank: int, world_size: int, path: Path) -> tuple[Any, list[str]]:
    """Load through a plugin of the user's."""
    plugin = Noting()
    weights = fit_from(rank, world_size, path, plugins=[plugin])
    return weights, plugin.loaded


def test_a_checkpoint_io_of_the_users_loads_full_files(saved: Saved) -> None:
    path, weights = saved("full")
    for found, loaded in run_ranks(fit_with_plugin, 2, path, init=False):
        assert_same_tensors(found, weights)
        assert loaded == [str(path)]


def test_folders_are_loaded_beside_a_checkpoint_io_of_the_users(saved: Saved) -> None:
    path, weights = saved("sharded")
    for found, loaded in run_ranks(fit_with_plugin, 2, path, init=False):
        assert_same_tensors(found, weights)
        assert loaded == []


def test_an_error_on_one_rank_is_raised_on_all(saved: Saved) -> None:
    path, _ = saved("full")

    def body(rank: int, world_size: int) -> None:
        fit_from(rank, world_size, path, plugins=[Failing()])

    errors = expect_failures(body, 3, init=False, timeout=30)
    assert {kind for kind, _ in errors.values()} == {"OSError"}
    assert "the disk of this node is gone" in errors[0][1]
    assert "rank 1" in errors[0][1] and "rank 1" in errors[2][1]


class Vault(TorchCheckpointIO):
    """Keeps checkpoints under names of its own."""

    path: Path

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        assert path == "vault://7"
        return super().load_checkpoint(self.path, *args, **kwargs)


def test_a_checkpoint_io_of_the_users_may_have_names_of_its_own(saved: Saved) -> None:
    def body(rank: int, world_size: int) -> Any:
        plugin = Vault()
        plugin.path = saved("full")[0]
        return fit_from(rank, world_size, "vault://7", plugins=[plugin])

    weights = saved("full")[1]
    for found in run_ranks(body, 2, init=False):
        assert_same_tensors(found, weights)


def test_a_rank_that_does_not_come_to_load_is_named() -> None:
    def body(rank: int, world_size: int) -> None:
        if rank != 1:
            with together("loading x", timeout=0.5):
                pass

    errors = expect_failures(body, 3, timeout=20)
    assert sorted(errors) == [0, 2]
    for kind, text in errors.values():
        assert kind == "TimeoutError"
        assert "Rank 1" in text and "loading x" in text


class Elsewhere(LocalFileSystem):
    """A file system that is not local by its name."""

    protocol = "elsewhere"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("elsewhere://"))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_loaded_from_urls(kind: str, saved: Saved) -> None:
    path, weights = saved(kind)
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    for found in run_ranks(fit_from, 2, f"elsewhere://{path}", init=False):
        assert_same_tensors(found, weights)


# What is refused


def assert_refused(path: Path, *words: str, kind: str | None = None, **settings: Any) -> None:
    """Assert that all ranks report a checkpoint in the same words, and soon."""
    errors = expect_failures(fit_from, 2, path, init=False, timeout=30, **settings)
    assert sorted(errors) == [0, 1]
    for name, text in errors.values():
        assert kind is None or name == kind, (name, text)
        for word in (path.name, *words):
            assert word in text


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a full file holds."""
    checkpoint = torch.load(path, weights_only=False)
    change(checkpoint)
    torch.save(checkpoint, path)


def test_a_missing_key_is_named(copied: Callable[[str], Path]) -> None:
    path = copied("full")
    edit(path, lambda checkpoint: checkpoint["state_dict"].pop("blocks.1.project.bias"))
    assert_refused(path, "blocks.1.project.bias", "Missing key", kind="RuntimeError")


def test_an_extra_key_is_named(copied: Callable[[str], Path]) -> None:
    path = copied("full")
    edit(path, lambda checkpoint: checkpoint["state_dict"].update(more=torch.ones(2)))
    assert_refused(path, "more", "Unexpected key", kind="RuntimeError")


def test_a_reshaped_key_is_named(copied: Callable[[str], Path]) -> None:
    path = copied("full")
    edit(path, lambda checkpoint: checkpoint["state_dict"].update({"norm.bias": torch.ones(17)}))
    assert_refused(path, "norm.bias", "17", "16", kind="RuntimeError")


class Narrow(Transformer):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "width": 8})


class More(Transformer):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.more = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_folder_for_another_module_is_refused(stage: int, saved: Saved) -> None:
    path, _ = saved("sharded")
    assert_refused(path, "norm.bias", "16", "8", kind="RuntimeError", module=Narrow, stage=stage)
    assert_refused(path, "more.weight", kind="RuntimeError", module=More, stage=stage)


def test_reshaped_optimizer_state_is_named(copied: Callable[[str], Path]) -> None:
    path = copied("full")

    def reshape(checkpoint: dict[str, Any]) -> None:
        states = checkpoint["optimizer_states"][0]["state"]
        number = next(n for n, state in states.items() if state["exp_avg"].shape == (31, 16))
        states[number]["exp_avg"] = torch.zeros(16, 31)

    edit(path, reshape)
    assert_refused(path, "exp_avg", "embedding.weight", "(16, 31)", kind="ValueError")


def test_two_optimizers_do_not_fit_one(copied: Callable[[str], Path]) -> None:
    path = copied("full")
    edit(
        path,
        lambda checkpoint: checkpoint["optimizer_states"].extend([*checkpoint["optimizer_states"]]),
    )
    assert_refused(path, "2 optimizers", kind="ValueError")


class Regrouped(Transformer):
    """Puts one parameter into the other group."""

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        first, second = configured[0][0].param_groups
        first["params"].append(second["params"].pop(1))
        first["params"].insert(1, second["params"].pop())
        second["params"] += [first["params"].pop(0), first["params"].pop(-2)]
        return configured


def test_a_folder_with_other_param_groups_is_refused_by_name(saved: Saved) -> None:
    path, _ = saved("sharded")
    assert_refused(path, "was in group 1", "param groups", kind="ValueError", module=Regrouped)


class Turned(Transformer):
    """Lists the parameters of each group the other way round."""

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        for group in configured[0][0].param_groups:
            group["params"].reverse()
        return configured


def test_optimizer_state_of_a_folder_is_matched_by_name(saved: Saved, tmp_path: Path) -> None:
    path, _ = saved("sharded")

    def body(rank: int, world_size: int, module: type[Transformer], path: Path) -> Any:
        torch.manual_seed(4)
        model = module(width=16, groups=True, schedule=True)
        trainer = trainer_of(3, "sharded", world_size, max_epochs=1)
        trainer.fit(model, loader(rank, world_size), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / module.__name__)

    for module in (Transformer, Turned):
        run_ranks(body, 2, module, path, init=False)
    files = [lightning_zero.open_checkpoint(tmp_path / m) for m in ("Transformer", "Turned")]
    kept, turned = (torch.load(file)["optimizer_states"][0] for file in files)
    numbers = dict(
        zip(
            (n for group in kept["param_groups"] for n in group["params"]),
            (n for group in turned["param_groups"] for n in reversed(group["params"])),
            strict=True,
        )
    )
    assert any(a != b for a, b in numbers.items())
    for a, b in numbers.items():
        torch.testing.assert_close(kept["state"][a], turned["state"][b], rtol=0, atol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_torn_folder_is_refused(stage: int, copied: Callable[[str], Path]) -> None:
    path = copied("sharded")
    (path / ".metadata").unlink()
    assert_refused(path, ".metadata", "torn", kind="FileNotFoundError", stage=stage)


def test_a_folder_without_its_meta_file_is_refused(copied: Callable[[str], Path]) -> None:
    path = copied("sharded")
    (path / "meta.pt").unlink()
    assert_refused(path, "meta.pt", kind="FileNotFoundError")


def test_a_missing_file_of_one_rank_is_named(copied: Callable[[str], Path]) -> None:
    path = copied("sharded")
    (path / "__1_0.distcp").unlink()
    assert_refused(path, "__1_0.distcp", kind="FileNotFoundError")


def test_a_truncated_file_of_one_rank_is_named(copied: Callable[[str], Path]) -> None:
    path = copied("sharded")
    os.truncate(path / "__1_0.distcp", (path / "__1_0.distcp").stat().st_size - 100)
    assert_refused(path, "__1_0.distcp", "truncated", kind="ValueError")


def test_damage_that_only_the_reading_rank_meets_is_reported_by_all(
    copied: Callable[[str], Path],
) -> None:
    path = copied("sharded")
    places = read_metadata(place_of(path / ".metadata")).storage_data
    part = max(
        (p for p in places if p.fqn.endswith("model.embedding.weight")), key=lambda p: p.offset
    )
    info = places[part]
    with open(path / info.relative_path, "r+b") as file:
        file.seek(info.offset)
        file.write(b"\0" * info.length)
    assert_refused(path, info.relative_path, "embedding.weight", "damaged", kind="RuntimeError")


def test_a_truncated_full_file_is_named(copied: Callable[[str], Path]) -> None:
    path = copied("full")
    os.truncate(path, path.stat().st_size // 2)
    assert_refused(path, "damaged", kind="ValueError")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path / "none.ckpt", "There is no", kind="FileNotFoundError")


def test_a_newer_format_is_refused(copied: Callable[[str], Path]) -> None:
    path = copied("full")
    edit(path, lambda checkpoint: checkpoint["lightning_zero"].update(format=99))
    assert_refused(path, "99", "update lightning_zero", kind="ValueError")
    path = copied("sharded")
    edit(path / "meta.pt", lambda meta: meta["lightning_zero"].update(format=99))
    assert_refused(path, "99", "update lightning_zero", kind="ValueError")


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_that_runs_code_is_refused_unless_it_is_trusted(
    kind: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    path = copied(kind)
    file = path / "meta.pt" if path.is_dir() else path
    proof = tmp_path / "proof"
    edit(file, lambda checkpoint: checkpoint.update(evil=Touch(proof)))
    assert_refused(path, "weights_only=False", "getattr", kind="ValueError", weights_only=True)
    assert_refused(path, "weights_only=False", kind="ValueError")
    assert not proof.exists()
    run_ranks(fit_from, 2, path, weights_only=False, init=False)
    assert proof.exists()


def test_a_metadata_file_that_runs_code_is_refused_even_if_trusted(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    path, proof = copied("sharded"), tmp_path / "proof"
    (path / ".metadata").write_bytes(pickle.dumps(Touch(proof)))
    assert_refused(path, ".metadata", "touch", kind="ValueError", weights_only=False)
    assert not proof.exists()


# Memory


def status(key: str) -> int:
    """Read a number of this process from the kernel, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{key}:\s+(\d+) kB", text, re.M)[1]) * 1024


class Large(L.LightningModule):
    """Weights of 350 MB, of which the largest is 28 MB; Adam makes that 1.05 GB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(2650, 2650, bias=False) for _ in range(12)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise AssertionError("there is nothing to train")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Measured(ZeroStrategy):
    """Measures by how much the most memory held exceeds what was held before."""

    grown: dict[str, int]
    peak = 0

    def measure(self, name: str, work: Callable[[], Any]) -> Any:
        before = status("VmRSS")
        self.peak = max(self.peak, status("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        result = work()
        self.peak = max(self.peak, status("VmHWM"))
        self.grown[name] = status("VmHWM") - before
        return result

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        return self.measure("open", lambda: super(Measured, self).load_checkpoint(*args, **kwargs))

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.measure(
            "weights", lambda: super(Measured, self).load_model_state_dict(*args, **kwargs)
        )

    def load_optimizer_state_dict(self, *args: Any, **kwargs: Any) -> None:
        load = super().load_optimizer_state_dict
        self.measure("optimizer", lambda: load(*args, **kwargs))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_takes_the_memory_of_its_share_while_it_loads(stage: int, tmp_path: Path) -> None:
    path = tmp_path / "large.ckpt"

    def write(rank: int, world_size: int) -> None:
        model = Large()
        optimizer = model.configure_optimizers()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        trainer = quiet_trainer("ddp", 1)
        trainer.strategy.connect(model)
        trainer.strategy.optimizers = [optimizer]
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        torch.save(checkpoint, path)

    def load(rank: int, world_size: int) -> tuple[dict[str, int], int, int]:
        model = Large()
        strategy = Measured(stage=stage)
        strategy.grown = {}
        trainer = quiet_trainer(strategy, world_size, limit_train_batches=0, max_epochs=1)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(world_size)), ckpt_path=path)
        state = trainer.optimizers[0].state
        held = sum(v.nbytes for s in state.values() for v in s.values())
        return strategy.grown, held, strategy.peak - before

    run_ranks(write, 1, init=False)
    size = path.stat().st_size
    assert size > 1e9
    largest = 2650 * 2650 * 4
    for grown, held, whole in run_ranks(load, 4, init=False, timeout=300):
        assert set(grown) == {"open", "weights", "optimizer"}
        assert held == pytest.approx(size * 2 / 3 / 4, rel=0.01)
        assert sum(grown.values()) < 1.5 * size / 4 + largest
        assert grown["optimizer"] < 1.5 * held + largest
        assert whole < 1.5 * size / 4 + largest  # from the call of fit on
