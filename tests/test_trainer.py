"""The Trainer under zero1, zero2 and zero3 has the numbers and the habits of the one under ddp."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from modules import (
    STAGES,
    Outcome,
    Perceptron,
    Supervised,
    Transformer,
    assert_data_differs,
    assert_same_outcomes,
    assert_same_tensors,
    batches,
    outcome,
    quiet_trainer,
    samples,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lightning_zero
from ranks import run_ranks

T = TypeVar("T")
Make = Callable[[], Supervised]

MODELS: dict[str, Make] = {
    "adamw": lambda: Transformer(optimizer="AdamW"),
    "adamw with groups and schedules": lambda: Transformer(groups=True, schedule=True),
    "sgd with momentum": lambda: Perceptron(
        optimizer="SGD", momentum=0.9, weight_decay=0.1, groups=True, schedule=True
    ),
    "adamw on small sizes": lambda: Perceptron(optimizer="AdamW", groups=True),
}
TRAIN, VALIDATE = 29, 10  # samples: ten batches at one rank, five at two, where one is dealt twice


def fit(
    rank: int, world_size: int, name: str, make: Make, shuffle: bool = False, **settings: Any
) -> Outcome:
    """Train for two epochs, with validation before, after and in between."""
    model = make()
    torch.manual_seed(1000 + rank)
    trainer = quiet_trainer(name, world_size, **{"max_epochs": 2, **settings})
    trainer.fit(model, batches(model, TRAIN, 1, shuffle), batches(model, VALIDATE, 2))
    return outcome(model, trainer)


@functools.cache
def reference(world_size: int, model: str, **settings: Any) -> list[Outcome]:
    """What ddp makes of it, once per world and setting."""
    runs = run_ranks(fit, world_size, "ddp", MODELS[model], init=False, **settings)
    assert_data_differs(runs)
    return runs


@functools.cache
def under_ddp(body: Callable[..., T], world_size: int, *args: Any) -> list[T]:
    """What ddp makes of a body, once per body and arguments."""
    return run_ranks(body, world_size, "ddp", *args, init=False)


# Fit


CASES = [
    *((name, model, 2) for name in STAGES for model in MODELS),
    *((name, model, 1) for name in STAGES for model in ("adamw", "sgd with momentum")),
    *((name, model, 2) for name in ("zero1 small", "zero3 layers") for model in list(MODELS)[1:3]),
]


@pytest.mark.parametrize(("name", "model", "world_size"), CASES)
def test_fit_and_its_logs_are_bit_equal_to_ddp(name: str, model: str, world_size: int) -> None:
    runs = run_ranks(fit, world_size, name, MODELS[model], init=False)
    expected = reference(world_size, model)
    assert_same_outcomes(runs, expected)
    assert {"train_step", "train_epoch", "val", "metric"} <= set(runs[0].metrics)
    assert len(runs[0].losses) == 20 // world_size
    if "schedules" in model:
        assert len({tuple(rates) for rates in runs[0].rates}) == len(runs[0].rates)


@pytest.mark.parametrize("name", STAGES)
def test_64_bit_training_is_bit_equal_to_ddp(name: str) -> None:
    model = "sgd with momentum"
    runs = run_ranks(fit, 2, name, MODELS[model], init=False, precision="64-true")
    assert runs[0].state["enter.weight"].dtype is torch.float64
    assert_same_outcomes(runs, reference(2, model, precision="64-true"))


@pytest.mark.parametrize("name", STAGES)
def test_bf16_mixed_training_is_bit_equal_to_ddp(name: str) -> None:
    runs = run_ranks(fit, 2, name, MODELS["adamw"], init=False, precision="bf16-mixed")
    assert runs[0].state["head.weight"].dtype is torch.float32
    expected = reference(2, "adamw", precision="bf16-mixed")
    assert expected[0].losses != reference(2, "adamw")[0].losses
    assert_same_outcomes(runs, expected)


def fit_by_object(rank: int, world_size: int, name: str, how: str, precision: Any) -> Outcome:
    """Train with a strategy object and a precision beside it."""
    strategy = DDPStrategy() if name == "ddp" else lightning_zero.ZeroStrategy(stage=3)
    plugins: dict[str, Precision] = {
        "64-true": DoublePrecision(),
        "bf16-mixed": MixedPrecision("bf16-mixed", "cpu"),
    }
    model = Perceptron()
    settings: dict[str, Any] = {"argument": dict(precision=precision)}.get(
        how, dict(plugins=[plugins[precision]])
    )
    trainer = quiet_trainer(strategy, world_size, **settings)
    trainer.fit(model, batches(model, TRAIN, 1))
    return outcome(model, trainer)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
@pytest.mark.parametrize("how", ["argument", "plugin"])
def test_precision_holds_beside_a_strategy_object_too(how: str, precision: str) -> None:
    runs = run_ranks(fit_by_object, 2, "zero3", how, precision, init=False)
    assert_same_outcomes(runs, under_ddp(fit_by_object, 2, how, precision))


def test_accumulation_with_a_short_last_window_adds_up_as_under_ddp() -> None:
    # Five batches an epoch: windows of four and of one. SGD, since AdamW blows rounding up where a
    # gradient is as good as zero.
    model = "sgd with momentum"
    settings: dict[str, Any] = dict(accumulate_grad_batches=4)
    names = (*STAGES, "zero3 layers")
    runs = {n: run_ranks(fit, 2, n, MODELS[model], init=False, **settings) for n in names}
    expected = reference(2, model, **settings)
    assert len({tuple(rates) for rates in expected[0].rates}) == 1 + 4  # one more than steps
    assert_same_outcomes(runs["zero1"], expected)
    assert_same_outcomes(runs["zero3"], runs["zero2"])
    assert_same_outcomes(runs["zero3 layers"], runs["zero2"])
    assert_same_outcomes(runs["zero2"], expected, exact=False)


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_reducing_only_the_last_micro_batch_is_bit_equal_to_ddp(name: str) -> None:
    def deferred(rank: int, world_size: int) -> Outcome:
        strategy = lightning_zero.ZeroStrategy(stage=int(name[-1]), reduce_every_backward=False)
        model = MODELS["adamw"]()
        torch.manual_seed(1000 + rank)
        trainer = quiet_trainer(strategy, world_size, max_epochs=2, accumulate_grad_batches=4)
        trainer.fit(model, batches(model, TRAIN, 1), batches(model, VALIDATE, 2))
        return outcome(model, trainer)

    expected = reference(2, "adamw", accumulate_grad_batches=4)
    assert_same_outcomes(run_ranks(deferred, 2, init=False), expected)


def test_clipping_by_norm_takes_the_norm_over_all_ranks() -> None:
    # SGD, since Adam forgets by how much its gradients were scaled.
    model = "sgd with momentum"
    settings: dict[str, Any] = dict(gradient_clip_val=0.05)
    runs = {n: run_ranks(fit, 2, n, MODELS[model], init=False, **settings) for n in STAGES}
    expected = reference(2, model, **settings)
    assert expected[0].losses != reference(2, model)[0].losses
    for stage in STAGES:
        assert_same_outcomes(runs[stage], runs["zero1"])
        assert_same_outcomes(runs[stage], expected, exact=False)


@pytest.mark.parametrize("name", STAGES)
def test_clipping_by_value_is_bit_equal_to_ddp(name: str) -> None:
    model = "sgd with momentum"
    settings: dict[str, Any] = dict(gradient_clip_val=0.01, gradient_clip_algorithm="value")
    runs = run_ranks(fit, 2, name, MODELS[model], init=False, **settings)
    expected = reference(2, model, **settings)
    assert expected[0].losses != reference(2, model)[0].losses
    assert_same_outcomes(runs, expected)


@pytest.mark.parametrize("name", STAGES)
def test_all_ranks_train_the_initial_weights_of_rank_0(name: str) -> None:
    def differing(rank: int, world_size: int, name: str) -> tuple[Tensor, Outcome]:
        torch.manual_seed(rank)
        model = Perceptron()
        model.norm.running_mean += rank  # type: ignore[operator]
        before = model.enter.weight.detach().clone()
        trainer = quiet_trainer(name, world_size)
        trainer.fit(model, batches(model, TRAIN))
        return before, outcome(model, trainer)

    ours, theirs = (
        run_ranks(differing, 2, name, init=False),
        run_ranks(differing, 2, "ddp", init=False),
    )
    assert not torch.equal(ours[0][0], ours[1][0])
    assert_same_outcomes([run for _, run in ours], [run for _, run in theirs])
    weights = [{n: v for n, v in run.state.items() if "norm.r" not in n} for _, run in ours]
    assert_same_tensors(weights[0], weights[1])


def fit_buffers(rank: int, world_size: int, name: str, when: str) -> dict[str, Tensor]:
    """Train with validation at the end, in between or never; return all buffers."""
    model = Perceptron()
    settings: dict[str, Any] = {"in between": dict(val_check_interval=2)}.get(when, {})
    trainer = quiet_trainer(name, world_size, max_epochs=2, **settings)
    validation = None if when == "never" else batches(model, VALIDATE, 2)
    trainer.fit(model, batches(model, TRAIN), validation)
    return {key: value.clone() for key, value in model.named_buffers()}


@pytest.mark.parametrize("when", ["last", "in between", "never"])
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3 layers"])
def test_batch_norm_statistics_are_those_of_ddp_on_every_rank(name: str, when: str) -> None:
    theirs = under_ddp(fit_buffers, 2, when)
    for mine, expected in zip(
        run_ranks(fit_buffers, 2, name, when, init=False), theirs, strict=True
    ):
        assert_same_tensors(mine, expected)
    # A rank has statistics of its own until the next broadcast, so the test can tell them apart.
    first, second = (buffers["norm.running_mean"] for buffers in theirs)
    assert torch.equal(first, second) == (when == "last")


class Encoder(Transformer):
    """Torch's own blocks, which take another way in evaluation mode: the fast path."""

    @staticmethod
    def block(width: int, dropout: float) -> nn.Module:
        return nn.TransformerEncoderLayer(width, 4, 3 * width, dropout, batch_first=True)


@pytest.mark.parametrize("name", [*STAGES, "zero1 small"])
def test_torchs_own_transformer_layers_train_bit_equal_and_evaluate_as_under_ddp(name: str) -> None:
    ours = run_ranks(fit, 2, name, Encoder, init=False)
    for mine, expected in zip(ours, under_ddp(fit, 2, Encoder), strict=True):
        assert mine.losses == expected.losses
        assert_same_tensors(mine.state, expected.state)
        # Hooks on the layers of stage 3 keep torch off its fast path, which rounds differently.
        assert_same_tensors(mine.metrics, expected.metrics, exact="zero3" not in name)


# Evaluation


def evaluate(rank: int, world_size: int, name: str, make: Make, order: str) -> dict[str, Any]:
    """Call validate, test and predict on one Trainer, around a fit or without one."""
    model = make()
    trainer = quiet_trainer(name, world_size)
    loader = batches(model, VALIDATE, 2)
    found: dict[str, Any] = {}
    for moment in order.split():
        if moment == "fit":
            trainer.fit(model, batches(model, TRAIN, 1))
            continue
        found[f"{moment} validate"] = trainer.validate(model, loader, verbose=False)
        found[f"{moment} test"] = trainer.test(model, loader, verbose=False)
        found[f"{moment} predict"] = trainer.predict(model, loader)
        found[f"{moment} training"] = model.training
    found["rank"] = rank
    return found


@pytest.mark.parametrize(
    ("order", "model", "world_size"),
    [
        ("without", "adamw", 2),
        ("before fit after", "sgd with momentum", 2),
        ("before fit after", "adamw", 1),
    ],
)
def test_validate_test_and_predict_give_what_they_give_under_ddp(
    order: str, model: str, world_size: int
) -> None:
    expected = under_ddp(evaluate, world_size, MODELS[model], order)
    for name in STAGES:
        found = run_ranks(evaluate, world_size, name, MODELS[model], order, init=False)
        for ours, theirs in zip(found, expected, strict=True):
            assert list(ours) == list(theirs)
            for key, value in theirs.items():
                if key.endswith("predict"):
                    assert len(ours[key]) == len(value)
                    assert all(map(torch.equal, ours[key], value)), (name, key)
                else:
                    assert ours[key] == value, (name, key)
        if "after" in order:
            assert found[0]["before validate"] != found[0]["after validate"]


@pytest.mark.parametrize("name", STAGES)
def test_evaluation_leaves_the_module_as_it_was(name: str) -> None:
    def body(rank: int, world_size: int) -> None:
        model = Transformer()
        objects, before = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
        trainer = quiet_trainer(name, world_size)
        trainer.validate(model, batches(model, VALIDATE), verbose=False)
        assert_same_tensors(dict(model.state_dict()), before)
        assert all(objects[key] is param for key, param in model.named_parameters())
        assert all(type(param) is nn.Parameter for param in model.parameters())

    run_ranks(body, 2, init=False)


class Uneven(Perceptron):
    """Runs more forward passes on one rank than on the other, in evaluation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(1 + 2 * self.global_rank):
            super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        passes = [super(Uneven, self).predict_step(batch, 0) for _ in range(3 - self.global_rank)]
        return torch.stack(passes).sum(dim=0)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_may_evaluate_unevenly_while_the_weights_are_gathered(stage: int) -> None:
    def body(rank: int, world_size: int, name: str) -> tuple[Outcome, Any]:
        strategy = lightning_zero.ZeroStrategy(
            stage=stage, auto_wrap_policy="layers", eval_weights="gathered", stall_timeout=10
        )
        model = Uneven()
        # Logs talk through Lightning's own group, and so they must be even.
        model.log = lambda *args, **settings: None  # type: ignore[method-assign]
        trainer = quiet_trainer("ddp" if name == "ddp" else strategy, world_size, max_epochs=2)
        trainer.fit(model, batches(model, TRAIN, 1), batches(model, VALIDATE, 2))
        return outcome(model, trainer), trainer.predict(model, batches(model, VALIDATE, 3))

    ours, theirs = (run_ranks(body, 2, name, init=False) for name in ("zero", "ddp"))
    assert_same_outcomes([run for run, _ in ours], [run for run, _ in theirs])
    for (_, mine), (_, expected) in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, expected))


# After fit


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", STAGES)
def test_after_fit_the_module_is_ordinary_on_every_rank(name: str, world_size: int) -> None:
    def body(rank: int, world_size: int, name: str) -> dict[str, Tensor]:
        model = Transformer()
        objects = dict(model.named_parameters())
        plain = set(vars(nn.Parameter(torch.ones(1))))
        trainer = quiet_trainer(name, world_size)
        trainer.fit(model, batches(model, TRAIN))
        model.eval()

        for key, param in model.named_parameters():
            assert param is objects[key]
            assert type(param) is nn.Parameter
            assert param.device.type == "cpu"
            assert param.requires_grad and param.is_leaf
            assert set(vars(param)) == plain
            size = param.untyped_storage().nbytes()
            assert size == param.numel() * param.element_size()
        assert model.head.weight is model.embedding.weight
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

        tokens = samples(model, 3, seed=9)[:3][0]
        with torch.no_grad():
            expected = model(tokens)
        copies = {
            "deepcopy": copy.deepcopy(model),
            "pickle": pickle.loads(pickle.dumps(model)),
            "torch.save": _saved_and_loaded(model),
        }
        for twin in copies.values():
            assert twin.head.weight is twin.embedding.weight
            assert_same_tensors(dict(twin.state_dict()), dict(model.state_dict()))
            with torch.no_grad():
                assert torch.equal(twin(tokens), expected)

        # It trains on by hand, alone: no hook of ours is left to wait for the other ranks.
        if rank == 0:
            loss = model(tokens).square().mean()
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            assert all(param.grad is not None for param in model.parameters())
        return {"out": expected, **copies["pickle"].state_dict()}

    runs = run_ranks(body, world_size, name, init=False)
    for run in runs[1:]:
        assert_same_tensors(run, runs[0])


def _saved_and_loaded(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def fit_twice(rank: int, world_size: int, name: str, renewed: bool) -> Outcome:
    """Train, change a weight, and train on."""
    model = Perceptron(optimizer="SGD", momentum=0.9)
    trainer = quiet_trainer(name, world_size)
    trainer.fit(model, batches(model, TRAIN))
    with torch.no_grad():
        model.scale.mul_(1.5)  # seen by the second fit, since the module is ordinary
    if renewed:
        trainer = quiet_trainer(name, world_size, max_epochs=2)
    else:
        trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches(model, TRAIN, 5))
    return outcome(model, trainer)


@pytest.mark.parametrize("renewed", [False, True], ids=["same trainer", "new trainer"])
@pytest.mark.parametrize("name", STAGES)
def test_a_second_fit_goes_on_as_under_ddp(name: str, renewed: bool) -> None:
    runs = run_ranks(fit_twice, 2, name, renewed, init=False)
    assert_same_outcomes(runs, under_ddp(fit_twice, 2, renewed))


def test_one_module_can_be_trained_by_one_strategy_after_the_other() -> None:
    def body(rank: int, world_size: int, *names: str) -> Outcome:
        model = Perceptron(optimizer="SGD", momentum=0.9)
        for seed, name in enumerate(names):
            trainer = quiet_trainer(name, world_size)
            trainer.fit(model, batches(model, TRAIN, seed))
        return outcome(model, trainer)

    runs = run_ranks(body, 2, "zero3", "zero1", "ddp", "zero2", init=False)
    assert_same_outcomes(runs, run_ranks(body, 2, *["ddp"] * 4, init=False))


# Weights that stay sharded


def never(stage: int = 3) -> lightning_zero.ZeroStrategy:
    """Make a strategy that leaves weights sharded."""
    return lightning_zero.ZeroStrategy(
        stage=stage, restore_weights="never", auto_wrap_policy="layers"
    )


def test_weights_that_are_never_restored_stay_sharded_with_a_warning(tmp_path: Any) -> None:
    def body(rank: int, world_size: int) -> tuple[list[str], Tensor]:
        model = Perceptron()
        trainer = quiet_trainer(never(), world_size, max_epochs=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, batches(model, TRAIN, 1), batches(model, VALIDATE, 2))
        with torch._C.DisableTorchFunctionSubclass():  # else looking gathers
            assert not any(p.untyped_storage().nbytes() for p in model.parameters())
        trainer.save_checkpoint(tmp_path / "after.ckpt")
        weight = model.enter.weight.detach().clone()  # gathered, since every rank reads it
        return [str(w.message) for w in caught if "sharded" in str(w.message)], weight

    runs = run_ranks(body, 2, init=False)
    plain = under_ddp(fit, 2, Perceptron)
    assert [len(messages) for messages, _ in runs] == [1, 0]
    assert "save_checkpoint" in runs[0][0][0]
    saved = torch.load(tmp_path / "after.ckpt", weights_only=False)
    assert_same_tensors(dict(saved["state_dict"]), plain[0].state)
    for _, weight in runs:
        assert torch.equal(weight, plain[0].state["enter.weight"])


def test_a_module_left_sharded_can_be_tested_and_trained_on_by_its_trainer() -> None:
    def twice(rank: int, world_size: int, name: str) -> tuple[Any, Outcome]:
        model = Perceptron(optimizer="SGD", momentum=0.9)
        strategy = never() if name == "zero3" else name
        trainer = quiet_trainer(strategy, world_size, gradient_clip_val=0.05)
        trainer.fit(model, batches(model, TRAIN))
        tested = trainer.test(model, batches(model, VALIDATE), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, batches(model, TRAIN, 5))
        state = {key: value.detach().clone() for key, value in model.state_dict().items()}
        return tested, Outcome(state=state, losses=model.losses, rates=model.rates)

    ours, theirs = run_ranks(twice, 2, "zero3", init=False), run_ranks(twice, 2, "ddp", init=False)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine[0][0]["test"] == pytest.approx(expected[0][0]["test"], rel=1e-5)
    assert_same_outcomes([run for _, run in ours], [run for _, run in theirs], exact=False)


# What Lightning does around it


@pytest.mark.parametrize("name", STAGES)
def test_a_distributed_sampler_is_injected(name: str) -> None:
    class Watching(Perceptron):
        def on_train_start(self) -> None:
            loader = self.trainer.train_dataloader
            self.seen: set[int] = set()
            assert isinstance(loader.sampler, DistributedSampler)
            assert (loader.sampler.rank, loader.sampler.num_replicas) == (self.global_rank, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen |= {hash(tuple(row.tolist())) for row in batch[0]}
            return super().training_step(batch, batch_idx)

    def body(rank: int, world_size: int) -> set[int]:
        model = Watching()
        quiet_trainer(name, world_size).fit(model, batches(model, TRAIN, shuffle=True))
        return model.seen

    first, second = run_ranks(body, 2, init=False)
    assert len(first) == len(second) == 15
    assert len(first | second) == TRAIN


class Unsynchronised(Perceptron):
    """Notes the class of its batch norm, which must not run: torch synchronises on GPUs only."""

    def on_train_epoch_start(self) -> None:
        self.norm.eval()
        self.kind = type(self.norm)


def fit_synchronised(rank: int, world_size: int, name: str) -> Outcome:
    """Train with ``sync_batchnorm``, which ddp refuses on the CPU."""
    model = Unsynchronised()
    synchronise = name != "ddp"
    trainer = quiet_trainer(name, world_size, sync_batchnorm=synchronise)
    trainer.fit(model, batches(model, TRAIN))
    assert model.kind is (nn.SyncBatchNorm if synchronise else nn.BatchNorm1d)
    assert isinstance(model.norm, nn.modules.batchnorm._BatchNorm)
    assert not isinstance(model.norm, nn.SyncBatchNorm)
    assert type(model.norm.weight) is nn.Parameter
    return outcome(model, trainer)


@pytest.mark.parametrize("name", STAGES)
def test_sync_batchnorm_is_applied_for_fit_and_taken_back(name: str) -> None:
    runs = run_ranks(fit_synchronised, 2, name, init=False)
    assert_same_outcomes(runs, under_ddp(fit_synchronised, 2))


class Example(Transformer):
    """Has an example input, with which the summary runs the module before training."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = samples(self, 2)[:2][0]


def summarise(rank: int, world_size: int, name: str) -> list[str]:
    """Return what the model summary would print."""
    lines: list[str] = []

    class Summary(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, total_parameters: int, *rest: Any, **more: Any) -> None:
            lines.extend(f"{title}: {list(column)}" for title, column in summary_data)
            lines.append(str(total_parameters))

    model = Example()
    trainer = quiet_trainer(
        name, world_size, enable_model_summary=True, callbacks=[Summary(max_depth=2)]
    )
    trainer.fit(model, batches(model, TRAIN))
    return lines


@pytest.mark.parametrize("name", STAGES)
def test_the_model_summary_counts_full_parameters(name: str) -> None:
    theirs = under_ddp(summarise, 2)
    assert len(theirs[0]) > 3
    assert run_ranks(summarise, 2, name, init=False) == theirs


class Reading(Perceptron):
    """Logs the norm of all gradients, as users do."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [param.grad.norm().item() for param in self.parameters()]  # type: ignore[union-attr]
        self.log("norm", math.sqrt(sum(norm**2 for norm in norms)))


@pytest.mark.parametrize("name", STAGES)
def test_user_code_sees_full_averaged_gradients_before_the_step(name: str) -> None:
    ours = run_ranks(fit, 2, name, Reading, init=False)
    assert ours[0].metrics["norm"] > 0
    assert_same_outcomes(ours, under_ddp(fit, 2, Reading))


class Unoptimized(Perceptron):
    """Runs its training steps for what they compute."""

    def configure_optimizers(self) -> None:
        return None

    def on_train_batch_end(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("name", STAGES)
def test_a_module_without_optimizers_runs_as_under_ddp(name: str) -> None:
    runs = run_ranks(fit, 2, name, Unoptimized, init=False)
    assert_same_outcomes(runs, under_ddp(fit, 2, Unoptimized))


def test_a_loader_of_uneven_length_per_rank_is_trained_like_under_ddp() -> None:
    # The sampler pads: each of three ranks gets ten of 29 samples, in batches of 4, 4 and 2.
    def body(rank: int, world_size: int, name: str) -> Outcome:
        model = Perceptron(optimizer="SGD", momentum=0.9)
        trainer = quiet_trainer(name, world_size)
        trainer.fit(model, DataLoader(samples(model, TRAIN), batch_size=4))
        return outcome(model, trainer)

    expected = run_ranks(body, 3, "ddp", init=False)
    runs = {name: run_ranks(body, 3, name, init=False) for name in STAGES}
    for name in STAGES:
        assert_same_outcomes(runs[name], runs["zero1"])
        assert_same_outcomes(runs[name], expected, exact=False)
