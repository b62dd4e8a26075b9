"""What cannot work is refused by one clear error that names it and the way out, on every rank."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, MPSAccelerator
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from modules import (
    FEATURES,
    STAGES,
    Outcome,
    Perceptron,
    Supervised,
    assert_same_outcomes,
    batches,
    outcome,
    quiet_trainer,
)
from optimizers import Clipping
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import ZeroStrategy
from ranks import RankFailure, expect_failures, run_ranks

LIMIT = 10.0
"""Seconds within which every rank must have ended: far less than any collective would wait."""


def assert_refused(
    make: Callable[[], Supervised],
    strategy: Callable[[], Any],
    error: type[Exception],
    *words: str,
    world_size: int = 2,
    **settings: Any,
) -> None:
    """Assert that fitting ends soon, with one error on every rank that says ``words``."""

    def body(rank: int, world_size: int) -> None:
        model = make()
        quiet_trainer(strategy(), world_size, **settings).fit(model, batches(model, 12))

    started = time.monotonic()
    errors = expect_failures(body, world_size, timeout=LIMIT, init=False)
    assert time.monotonic() - started < LIMIT
    assert sorted(errors) == list(range(world_size))
    for kind, message in errors.values():
        assert kind == error.__name__, message
        for word in words:
            assert word in message
    assert len({re.sub(r"[Rr]ank \d+", "rank", message) for _, message in errors.values()}) == 1


# Settings, refused before anything starts


@pytest.mark.parametrize("stage", [0, 4, -1, 1.5, "3", True, None])
def test_a_stage_outside_1_to_3_is_refused(stage: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"stage={stage!r}")) as info:
        ZeroStrategy(stage=stage)
    assert "1, 2 or 3" in str(info.value)


@pytest.mark.parametrize("name", ["bucket_mb", "stall_timeout"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "25", None])
def test_sizes_and_limits_that_are_not_positive_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(f"{name}={value!r}")) as info:
        ZeroStrategy(**{name: value})
    assert "positive number" in str(info.value)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("optimizer_sharding", "'auto', 'elementwise', 'whole'"),
        ("eval_weights", "'sharded', 'gathered'"),
        ("restore_weights", "'auto', 'always', 'never'"),
    ],
)
def test_words_outside_the_choice_are_refused(name: str, choices: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='sometimes'") as info:
        ZeroStrategy(**{name: "sometimes"})  # type: ignore[arg-type]
    assert choices in str(info.value)


def test_an_unknown_argument_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="find_unused_parameters"):
        ZeroStrategy(find_unused_parameters=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("by", ["argument", "attribute"])
def test_an_accelerator_that_one_process_owns_is_refused(by: str) -> None:
    strategy = ZeroStrategy(accelerator=CPUAccelerator())
    with pytest.raises(ValueError, match="MPSAccelerator") as info:
        if by == "argument":
            ZeroStrategy(accelerator=MPSAccelerator())
        else:
            strategy.accelerator = MPSAccelerator()  # as the Trainer does
    assert "accelerator='cpu'" in str(info.value)


def test_the_trainer_refuses_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(MPSAccelerator, "parse_devices", staticmethod(lambda devices: [0]))
    with pytest.raises(ValueError, match="MPSAccelerator"):
        quiet_trainer("zero3", 1, accelerator="mps")


# Modules, refused at set-up


@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        (["Blok"], ValueError, ("'Blok'", "BatchNorm1d, GELU, Linear, MeanMetric, Sequential")),
        ("torch.nn.Conv2d", ValueError, ("'torch.nn.Conv2d'", "Linear", "'auto'")),
        ({nn.LSTM}, ValueError, ("'LSTM'", "Linear", "'layers'")),
        ([3], TypeError, ("auto_wrap_policy", "3")),
        (7, TypeError, ("auto_wrap_policy=7", "'auto'")),
    ],
)
def test_a_policy_that_fits_no_layer_is_refused(
    policy: Any, error: type[Exception], words: tuple[str, ...]
) -> None:
    assert_refused(Perceptron, lambda: ZeroStrategy(auto_wrap_policy=policy), error, *words)


@pytest.mark.parametrize("name", STAGES)
def test_a_parameter_without_values_is_refused(name: str) -> None:
    class Meta(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(FEATURES, 3, device="meta")

    class Lazy(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.LazyLinear(3)

    assert_refused(Meta, lambda: name, ValueError, "extra.weight", "meta", "configure_model")
    assert_refused(Lazy, lambda: name, ValueError, "extra.weight", "lazy", "run a batch")


class Looking(Perceptron):
    """Adds rows of two tables to its inputs, by a layer and by a function."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(optimizer="SGD", momentum=0.9)
        self.sparse = sparse
        self.layer = nn.Embedding(7, FEATURES, sparse=sparse)
        self.table = nn.Parameter(torch.randn(7, FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        rows = torch.arange(len(inputs)) % 7
        rows = rows + self.global_rank
        found = self.layer(rows) + F.embedding(rows, self.table, sparse=self.sparse)
        return super().forward(inputs + found)


@pytest.mark.parametrize("name", STAGES)
def test_a_sparse_gradient_is_made_dense_with_a_warning_and_never_dropped(name: str) -> None:
    def body(rank: int, world_size: int, name: str, sparse: bool) -> tuple[Outcome, list[str]]:
        model = Looking(sparse)
        trainer = quiet_trainer(name, world_size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, batches(model, 24))
        texts = [str(each.message) for each in caught]
        return outcome(model, trainer), [text for text in texts if "sparse" in text]

    ours = run_ranks(body, 2, name, True, init=False)
    theirs = run_ranks(body, 2, "ddp", False, init=False)
    assert_same_outcomes([run for run, _ in ours], [run for run, _ in theirs])
    for _, messages in ours:
        assert len(messages) == 2
        assert all(any(key in text for text in messages) for key in ("layer.weight", "table"))


# Optimizers


class Configured(Perceptron):
    """A model whose optimizer is made by a function."""

    def __init__(self, build: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.build = build

    def configure_optimizers(self) -> Any:
        return self.build(self.parameters())


@pytest.mark.parametrize("name", STAGES)
def test_lbfgs_is_refused(name: str) -> None:
    assert_refused(
        lambda: Configured(torch.optim.LBFGS), lambda: name, NotImplementedError, "LBFGS", "ddp"
    )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", STAGES)
def test_an_optimizer_that_holds_a_foreign_parameter_is_refused(name: str, world_size: int) -> None:
    def build(params: Any) -> torch.optim.Optimizer:
        foreign = nn.Parameter(torch.zeros(2, 5))
        return torch.optim.AdamW([{"params": list(params)}, {"params": [foreign], "lr": 1.0}])

    words = ("AdamW", "number 0 of param group 1", "(2, 5)", "LightningModule")
    assert_refused(
        lambda: Configured(build), lambda: name, ValueError, *words, world_size=world_size
    )


def test_a_checkpoint_io_that_would_never_write_is_refused() -> None:
    assert_refused(
        Perceptron,
        partial(ZeroStrategy, state_dict_type="sharded", checkpoint_io=AsyncCheckpointIO()),
        ValueError,
        "AsyncCheckpointIO",
        "state_dict_type='full'",
        "async_save=True",
    )


def test_an_optimizer_of_unknown_kind_trains_whole_and_if_declared_on_shards() -> None:
    class Signed(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-2})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad.sign(), alpha=group["lr"])
            return loss

    def body(rank: int, world_size: int, strategy: Any) -> Outcome:
        model = Configured(Signed)
        trainer = quiet_trainer(strategy() if callable(strategy) else strategy, world_size)
        trainer.fit(model, batches(model, 24))
        return outcome(model, trainer)

    expected = run_ranks(body, 2, "ddp", init=False)
    for stage in (1, 2, 3):
        for word in ("auto", "whole", "elementwise"):
            make = partial(ZeroStrategy, stage=stage, optimizer_sharding=word)
            assert_same_outcomes(run_ranks(body, 2, make, init=False), expected)


@pytest.mark.parametrize("name", STAGES)
def test_an_optimizer_that_combines_all_parameters_is_refused(name: str) -> None:
    words = ("Clipping", "combines all parameters", "strategy='ddp'")
    assert_refused(lambda: Configured(Clipping), lambda: name, NotImplementedError, *words)


# Errors of the user's own


@pytest.mark.parametrize(
    ("when", "culprit"),
    [("training_step", 0), ("backward", 1), ("optimizer step", 0), ("validation_step", 1)],
)
@pytest.mark.parametrize("name", STAGES)
def test_when_one_rank_fails_the_other_ends_with_an_error_soon(
    name: str, when: str, culprit: int
) -> None:
    class Failing(Perceptron):
        def fail(self, here: str) -> None:
            if when == here and self.global_rank == culprit and self.global_step == 1:
                raise KeyError("the user's own mistake")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.fail("training_step")
            loss = self.loss(batch)  # without logs, which talk through Lightning's own group
            loss.register_hook(lambda grad: self.fail("backward"))
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.fail("optimizer step")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.fail("validation_step")
            self.loss(batch)

    def body(rank: int, world_size: int) -> None:
        model = Failing()
        trainer = quiet_trainer(name, world_size, val_check_interval=1)
        trainer.fit(model, batches(model, 24), batches(model, 12))

    started = time.monotonic()
    errors = expect_failures(body, 2, timeout=LIMIT, init=False)
    assert time.monotonic() - started < LIMIT
    assert sorted(errors) == [0, 1]
    assert errors[culprit] == ("KeyError", '"the user\'s own mistake"')
    assert errors[1 - culprit][0] == "RuntimeError"
    assert "went away" in errors[1 - culprit][1]


def test_after_an_error_on_all_ranks_sharded_weights_say_where_they_are() -> None:
    class Failing(Perceptron):
        def on_train_batch_end(self, *args: Any) -> None:
            raise KeyError("enough")

    def body(rank: int, world_size: int) -> str:
        model = Failing()
        with pytest.raises(KeyError, match="enough"):
            quiet_trainer("zero3", world_size).fit(model, batches(model, 12))
        with pytest.raises(RuntimeError, match="checkpoint") as info:
            model.scale.item()
        with pytest.raises(ValueError, match="build the module anew"):
            quiet_trainer("zero3", world_size).fit(model, batches(model, 12))
        return str(info.value)

    assert all("spread over the ranks" in text for text in run_ranks(body, 2, init=False))


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_after_an_error_on_all_ranks_replicated_weights_are_ordinary(name: str) -> None:
    class Failing(Perceptron):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                raise KeyError("enough")

    def body(rank: int, world_size: int) -> list[Tensor]:
        model = Failing()
        with pytest.raises(KeyError, match="enough"):
            quiet_trainer(name, world_size).fit(model, batches(model, 12))
        assert all(type(param) is nn.Parameter for param in model.parameters())
        quiet_trainer(name, world_size, limit_train_batches=1).fit(model, batches(model, 12))
        return [param.detach().clone() for param in model.parameters()]

    first, second = run_ranks(body, 2, init=False)
    assert all(map(torch.equal, first, second))


def test_the_test_helper_would_notice_a_rank_that_hangs() -> None:
    def body(rank: int, world_size: int) -> None:
        if rank == 0:
            time.sleep(30)

    with pytest.raises(RankFailure, match="had not finished"):
        expect_failures(body, 2, timeout=0.3, init=False)
