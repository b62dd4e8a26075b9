"""The `.ckpt` files that the Trainer writes under zero1, zero2 and zero3 are those of ddp."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import (
    CLASSES,
    FEATURES,
    Outcome,
    Supervised,
    assert_data_differs,
    assert_same_outcomes,
    assert_same_tensors,
    batches,
    outcome,
    quiet_trainer,
)
from torch import Tensor, nn
from torch.nn import functional as F

from ranks import run_ranks

DDP = "ddp_find_unused_parameters_true"
STAGES = ("zero1 small", "zero2", "zero3 layers")  # of many units, where the model would be one
ALL = (DDP, *STAGES)
TRAIN, VALIDATE = 35, 10  # samples; no rank ends with a batch of one, which batch norm refuses

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": dict(groups=True, amsgrad=True),
    "SGD": dict(momentum=0.9, groups=True, schedule=True),
    "Adagrad": dict(initial_accumulator_value=0.1),  # its state is made before the first step
    "ASGD": dict(lambd=1e-2, t0=3),
    "NAdam": dict(lr=1e-3),
    "Adafactor": dict(groups=True),  # it looks at whole parameters, and so does its state
}


class Mixed(Supervised):
    """Tied, frozen and unused parameters, single elements, and a non-contiguous weight."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.enter = nn.Linear(FEATURES, 13)
        self.norm = nn.BatchNorm1d(13)
        self.first = nn.Linear(13, 13)
        self.second = nn.Linear(13, 13, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(13, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.turned = nn.Parameter(torch.randn(13, CLASSES).t() / 4)
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.enter(inputs)))
        hidden = hidden + self.second(F.gelu(self.first(hidden))) * self.scale + self.shift
        return F.linear(hidden + self.frozen(hidden), self.turned)


def make(optimizer: str) -> Mixed:
    """Make the model with one of the optimizers."""
    return Mixed(optimizer=optimizer, **OPTIMIZERS[optimizer])


def optimizer_of(model: Supervised) -> torch.optim.Optimizer:
    """Make the optimizer that a model configures, without its schedulers."""
    configured = model.configure_optimizers()
    return configured[0][0] if isinstance(configured, tuple) else configured


def save(
    rank: int, world_size: int, name: str, optimizer: str, folder: Path, epochs: int = 1
) -> Outcome:
    """Train and let the default ModelCheckpoint save, with everything in ``folder``."""
    model = make(optimizer)
    trainer = quiet_trainer(
        name, world_size, max_epochs=epochs, enable_checkpointing=True, default_root_dir=folder
    )
    trainer.fit(model, batches(model, TRAIN, 1), batches(model, VALIDATE, 2))
    trainer.save_checkpoint(folder / "after.ckpt")
    return outcome(model, trainer)


def resume(
    rank: int, world_size: int, name: str, optimizer: str, path: Path, epochs: int = 2
) -> Outcome:
    """Go on from a file, with weights that have nothing to do with it."""
    torch.manual_seed(77 + rank)
    model = make(optimizer)
    trainer = quiet_trainer(name, world_size, max_epochs=epochs)
    loaders = batches(model, TRAIN, 1), batches(model, VALIDATE, 2)
    trainer.fit(model, *loaders, ckpt_path=path, weights_only=False)
    return outcome(model, trainer)


def only_file(folder: Path) -> Path:
    """Find what ModelCheckpoint has written."""
    (path,) = folder.glob("checkpoints/*.ckpt")
    return path


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint as anyone would."""
    return torch.load(path, map_location="cpu", weights_only=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make the folder of a run of one epoch, each only once."""

    @functools.cache
    def folder_of(name: str, optimizer: str, world_size: int = 2) -> Path:
        folder = tmp_path_factory.mktemp(f"{name}-{optimizer}-{world_size}")
        runs = run_ranks(save, world_size, name, optimizer, folder, init=False)
        assert_data_differs(runs)
        return folder

    return folder_of


class Run(NamedTuple):
    """What a body has returned and where it has written."""

    results: list[Any]
    folder: Path


Ran = Callable[..., Run]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run a body with a folder at two ranks, each only once."""

    @functools.cache
    def run(body: Callable[..., Any], name: str) -> Run:
        folder = tmp_path_factory.mktemp(f"{body.__name__}-{name}")
        return Run(run_ranks(body, 2, name, folder, init=False), folder)

    return run


@functools.cache
def uninterrupted(world_size: int, optimizer: str) -> list[Outcome]:
    """What two epochs under ddp give."""

    def train(rank: int, world_size: int) -> Outcome:
        model = make(optimizer)
        trainer = quiet_trainer(DDP, world_size, max_epochs=2)
        trainer.fit(model, batches(model, TRAIN, 1), batches(model, VALIDATE, 2))
        return outcome(model, trainer)

    return run_ranks(train, world_size, init=False)


def second_epoch(runs: list[Outcome]) -> list[Outcome]:
    """Keep what a run that was resumed after the first epoch can have seen."""
    halves = []
    for run in runs:
        half = len(run.losses) // 2
        halves.append(Outcome(run.state, run.losses[half:], run.rates[half:], run.metrics))
    return halves


def assert_same_content(actual: Any, expected: Any, where: str = "checkpoint") -> None:
    """Assert that two nested objects are the same down to the dtype and strides of tensors."""
    assert type(actual) is type(expected), where
    if isinstance(expected, Tensor):
        assert actual.shape == expected.shape, where
        assert actual.dtype == expected.dtype, where
        assert actual.device == expected.device, where
        assert actual.stride() == expected.stride(), where
        assert torch.equal(actual, expected), where
    elif isinstance(expected, Mapping):
        # The one key more says who wrote it, and what its random numbers were.
        assert [key for key in actual if key != "lightning_zero"] == list(expected), where
        for key, value in expected.items():
            assert_same_content(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_same_content(actual[index], value, f"{where}[{index}]")
    else:
        assert actual == expected, where


def without_paths(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Drop what names the folder of the run."""
    callbacks = {
        key: {
            name: value for name, value in state.items() if "path" not in name and name != "dirpath"
        }
        for key, state in checkpoint["callbacks"].items()
    }
    for state in callbacks.values():
        state.pop("best_k_models", None)
    return {**checkpoint, "callbacks": callbacks}


# The file


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", STAGES)
def test_the_file_holds_exactly_what_that_of_ddp_holds(
    name: str, optimizer: str, saved: Callable[..., Path]
) -> None:
    path, reference = (only_file(saved(n, optimizer)) for n in (name, DDP))
    ours, theirs = load(path), load(reference)
    assert path.name == reference.name
    assert_same_content(without_paths(ours), without_paths(theirs))
    record = io.BytesIO()
    torch.save(ours["lightning_zero"], record)
    assert abs(path.stat().st_size - record.tell() - reference.stat().st_size) < 2000

    weights = ours["state_dict"]
    assert weights["first.weight"].data_ptr() == weights["second.weight"].data_ptr()
    (state,) = ours["optimizer_states"]
    model = make(optimizer)
    shapes = [
        tuple(param.shape)
        for group in optimizer_of(model).param_groups
        for param in group["params"]
    ]
    unused = [number for number, shape in enumerate(shapes) if shape in ((7, 13), (7,))]
    single = [number for number, shape in enumerate(shapes) if shape in ((), (1,))]
    assert len(unused) == len(single) == 2
    assert set(single) <= set(state["state"])
    if optimizer != "Adagrad":
        assert not set(unused) & set(state["state"])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", STAGES)
def test_saving_after_fit_includes_the_optimizer_state(
    name: str, world_size: int, saved: Callable[..., Path]
) -> None:
    folder, reference = saved(name, "AdamW", world_size), saved(DDP, "AdamW", world_size)
    after = load(folder / "after.ckpt")
    assert after["optimizer_states"][0]["state"]
    assert_same_content(without_paths(after), without_paths(load(reference / "after.ckpt")))


def fit_and_test(rank: int, world_size: int, name: str, folder: Path) -> None:
    """Save after an evaluation that followed the fit."""
    model = make("AdamW")
    trainer = quiet_trainer(name, world_size)
    trainer.fit(model, batches(model, TRAIN, 1))
    trainer.test(model, batches(model, VALIDATE, 2), verbose=False)
    trainer.save_checkpoint(folder / "file.ckpt")


@pytest.mark.parametrize("name", STAGES)
def test_saving_after_fit_and_test_still_includes_the_optimizer_state(name: str, ran: Ran) -> None:
    ours, theirs = (load(ran(fit_and_test, each).folder / "file.ckpt") for each in (name, DDP))
    assert theirs["optimizer_states"][0]["state"]
    assert_same_content(ours, theirs)


def fit_and_freeze(rank: int, world_size: int, name: str, folder: Path) -> None:
    """Freeze a layer between the fit and an evaluation, then save."""
    model = make("AdamW")
    trainer = quiet_trainer(name, world_size)
    trainer.fit(model, batches(model, TRAIN, 1))
    model.enter.requires_grad_(False)
    trainer.validate(model, batches(model, VALIDATE, 2), verbose=False)
    trainer.save_checkpoint(folder / "file.ckpt")


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])  # whose units it changes
def test_freezing_a_layer_after_fit_does_not_shift_the_optimizer_state(name: str, ran: Ran) -> None:
    ours, theirs = (load(ran(fit_and_freeze, each).folder / "file.ckpt") for each in (name, DDP))
    assert_same_content(ours, theirs)


def fit_one_and_test_another(rank: int, world_size: int, name: str, folder: Path) -> Any:
    """Test a second module, loaded from the best checkpoint, with the Trainer of the first."""
    model = make("AdamW")
    trainer = quiet_trainer(name, world_size, enable_checkpointing=True, default_root_dir=folder)
    trainer.fit(model, batches(model, TRAIN, 1))
    path = trainer.checkpoint_callback.best_model_path
    best = Mixed.load_from_checkpoint(path, weights_only=False)
    return trainer.test(best, batches(best, VALIDATE, 2), verbose=False)


@pytest.mark.parametrize("name", STAGES)
def test_a_trainer_that_has_fitted_one_module_tests_another(name: str, ran: Ran) -> None:
    found = ran(fit_one_and_test_another, name).results
    assert found == ran(fit_one_and_test_another, DDP).results


class Saving(Mixed):
    """Saves after every batch."""

    folder: Path

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end()
        self.trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")


def fit_saving(rank: int, world_size: int, name: str, folder: Path) -> Outcome:
    """Train with many saves."""
    model = Saving(optimizer="AdamW")
    model.folder = folder
    trainer = quiet_trainer(name, world_size)
    trainer.fit(model, batches(model, TRAIN, 1))
    return outcome(model, trainer)


@pytest.mark.parametrize("name", STAGES)
def test_saving_in_the_middle_of_an_epoch_disturbs_nothing(name: str, ran: Ran) -> None:
    ours, theirs = (ran(fit_saving, each) for each in (name, DDP))
    assert_same_outcomes(ours.results, theirs.results)
    for batch in range(6):
        mine, expected = (load(run.folder / f"{batch}.ckpt") for run in (ours, theirs))
        assert_same_content(mine, expected)


def fit_saving_weights(rank: int, world_size: int, name: str, folder: Path) -> None:
    """Save weights alone, in both ways that there are."""
    model = make("AdamW")
    callback = ModelCheckpoint(folder, save_weights_only=True, filename="callback")
    trainer = quiet_trainer(name, world_size, enable_checkpointing=True, callbacks=[callback])
    trainer.fit(model, batches(model, TRAIN, 1))
    trainer.save_checkpoint(folder / "call.ckpt", weights_only=True)


@pytest.mark.parametrize("name", STAGES)
def test_weights_alone_can_be_saved(name: str, ran: Ran) -> None:
    ours, theirs = (ran(fit_saving_weights, each).folder for each in (name, DDP))
    for file in ("callback.ckpt", "call.ckpt"):
        assert "optimizer_states" not in load(ours / file)
        assert_same_content(load(ours / file), load(theirs / file))


class Looking(Mixed):
    """Looks at the checkpoint before it is written, and changes it."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        parameters = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        self.seen = {
            f"{name} {tuple(value.shape)} {value.dtype}": value.is_meta
            for name, value in checkpoint["state_dict"].items()
            if name in parameters
        }
        for number, state in checkpoint["optimizer_states"][0]["state"].items():
            for key, value in state.items():
                if key != "step":
                    self.seen[f"{number} {key} {tuple(value.shape)}"] = value.is_meta
        assert checkpoint["state_dict"]["count"].item() == 2**40 + 1
        del checkpoint["state_dict"]["frozen.bias"]


def fit_looking(rank: int, world_size: int, name: str, folder: Path) -> dict[str, bool]:
    """Return which names a rank saw, and whether without values."""
    model = Looking(optimizer="AdamW")
    trainer = quiet_trainer(name, world_size, enable_checkpointing=True, default_root_dir=folder)
    trainer.fit(model, batches(model, TRAIN, 1))
    return model.seen


@pytest.mark.parametrize("name", STAGES)
def test_other_ranks_see_every_name_in_the_checkpoint_and_hold_no_values(
    name: str, ran: Ran
) -> None:
    ours, theirs = (ran(fit_looking, each) for each in (name, DDP))
    assert [list(seen) for seen in ours.results] == [list(seen) for seen in theirs.results]
    first, second = ours.results
    assert not any(first.values())
    assert all(second.values())
    mine, expected = (load(only_file(run.folder)) for run in (ours, theirs))
    assert "frozen.bias" not in mine["state_dict"]
    assert_same_content(without_paths(mine), without_paths(expected))


# Reading it


@pytest.mark.parametrize("name", STAGES)
def test_load_from_checkpoint_needs_nothing_of_ours(name: str, saved: Callable[..., Path]) -> None:
    path = only_file(saved(name, "AdamW"))
    model = Mixed.load_from_checkpoint(path, map_location="cpu", weights_only=False)
    expected = load(only_file(saved(DDP, "AdamW")))["state_dict"]
    assert_same_tensors(dict(model.state_dict()), dict(expected))
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert model.hparams["amsgrad"] is True


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("source", ALL)
def test_any_strategy_resumes_from_any_other_bit_for_bit(
    source: str, target: str, saved: Callable[..., Path]
) -> None:
    path = only_file(saved(source, "AdamW"))
    runs = run_ranks(resume, 2, target, "AdamW", path, init=False)
    assert_same_outcomes(runs, second_epoch(uninterrupted(2, "AdamW")))


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "AdamW"])
@pytest.mark.parametrize("pair", [(STAGES[2], DDP), (DDP, STAGES[2]), (STAGES[0], STAGES[1])])
def test_every_kind_of_optimizer_state_survives(
    pair: tuple[str, str], optimizer: str, saved: Callable[..., Path]
) -> None:
    source, target = pair
    path = only_file(saved(source, optimizer))
    runs = run_ranks(resume, 2, target, optimizer, path, init=False)
    assert_same_outcomes(runs, second_epoch(uninterrupted(2, optimizer)))


@pytest.mark.parametrize("name", STAGES)
def test_a_resumed_run_saves_what_an_uninterrupted_one_saves(
    name: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    def body(rank: int, world_size: int, name: str, path: Path) -> None:
        model = make("NAdam")
        trainer = quiet_trainer(name, world_size, max_epochs=2)
        loaders = batches(model, TRAIN, 1), batches(model, VALIDATE, 2)
        trainer.fit(model, *loaders, ckpt_path=path, weights_only=False)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")

    for each in (name, DDP):
        run_ranks(body, 2, each, only_file(saved(DDP, "NAdam")), init=False)
    ours, theirs = (load(tmp_path / f"{each}.ckpt") for each in (name, DDP))
    assert_same_content(ours["optimizer_states"], theirs["optimizer_states"])
    assert_same_content(ours["state_dict"], theirs["state_dict"])


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize(("source", "before", "after"), [("zero3 layers", 2, 1), (DDP, 1, 2)])
def test_a_run_can_go_on_with_one_rank_more_or_less(
    source: str, before: int, after: int, optimizer: str, saved: Callable[..., Path]
) -> None:
    path = only_file(saved(source, optimizer, before))
    expected = run_ranks(resume, after, DDP, optimizer, path, init=False)
    for name in STAGES:
        runs = run_ranks(resume, after, name, optimizer, path, init=False)
        assert_same_outcomes(runs, expected)


def test_a_run_can_go_on_with_three_ranks(saved: Callable[..., Path]) -> None:
    path = only_file(saved("zero2", "SGD"))
    expected = run_ranks(resume, 3, DDP, "SGD", path, init=False)
    runs = {name: run_ranks(resume, 3, name, "SGD", path, init=False) for name in STAGES}
    for name in STAGES:
        assert_same_outcomes(runs[name], runs[STAGES[0]])
        assert_same_outcomes(runs[name], expected, exact=False)


def fit_and_test_best(rank: int, world_size: int, name: str, folder: Path) -> Any:
    """Test the best and the last checkpoint by their names."""
    model = make("SGD")
    callback = ModelCheckpoint(folder, monitor="val", save_top_k=1, save_last=True)
    trainer = quiet_trainer(
        name, world_size, max_epochs=3, enable_checkpointing=True, callbacks=[callback]
    )
    trainer.fit(model, batches(model, TRAIN, 1), batches(model, VALIDATE, 2))
    loader = batches(model, VALIDATE, 3)
    results = [
        trainer.test(model, loader, ckpt_path=which, verbose=False, weights_only=False)
        for which in ("best", "last")
    ]
    return results, callback.best_model_score


@pytest.mark.parametrize("name", STAGES)
def test_the_best_checkpoint_is_tested_as_under_ddp(name: str, ran: Ran) -> None:
    assert ran(fit_and_test_best, name).results == ran(fit_and_test_best, DDP).results


@pytest.mark.parametrize("name", STAGES)
def test_a_file_for_other_param_groups_is_refused_on_every_rank(
    name: str, saved: Callable[..., Path]
) -> None:
    class Fewer(Mixed):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.enter.parameters())

    def body(rank: int, world_size: int) -> str:
        model = Fewer(optimizer="AdamW")
        trainer = quiet_trainer(name, world_size, max_epochs=2)
        loader = batches(model, TRAIN, 1)
        with pytest.raises(ValueError, match="parameter") as info:
            trainer.fit(model, loader, ckpt_path=path, weights_only=False)
        return str(info.value)

    path = only_file(saved(name, "AdamW"))
    first, second = run_ranks(body, 2, init=False)
    assert first == second
    assert "param groups" in first
