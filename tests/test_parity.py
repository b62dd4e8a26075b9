"""Every stage trains the same bits, and at one and two ranks they are DDP's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import parity
import pytest
import torch
from parity import (
    ADAMW,
    TRANSPORTS,
    Bank,
    Mode,
    Model,
    Recipe,
    Trained,
    Training,
    assert_same_bits,
    talk_over,
    train,
)
from torch import Tensor, optim

from lightning_zero.engine.engine import ZeroEngine
from ranks import run_ranks

FOUR: Mapping[str, Recipe] = {
    "sgd": Recipe(optimizer=optim.SGD, options={"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": Recipe(optimizer=optim.Adam, options={"lr": 1e-2}),
    "adamw": ADAMW,
    "rmsprop": Recipe(optimizer=optim.RMSprop, options={"lr": 1e-2}),
}

OTHERS: Mapping[str, Recipe] = {
    "sgd_nesterov": Recipe(
        optimizer=optim.SGD, options={"lr": 0.05, "momentum": 0.9, "nesterov": True}
    ),
    "sgd_foreach": Recipe(
        optimizer=optim.SGD, options={"lr": 0.05, "momentum": 0.9, "foreach": True}
    ),
    "sgd_fused": Recipe(optimizer=optim.SGD, options={"lr": 0.05, "momentum": 0.9, "fused": True}),
    "adam_amsgrad": Recipe(optimizer=optim.Adam, options={"lr": 1e-2, "amsgrad": True}),
    "adam_foreach": Recipe(optimizer=optim.Adam, options={"lr": 1e-2, "foreach": True}),
    "adam_fused": Recipe(optimizer=optim.Adam, options={"lr": 1e-2, "fused": True}),
    "adamw_foreach": Recipe(optimizer=optim.AdamW, options={"lr": 1e-2, "foreach": True}),
    "adamw_fused": Recipe(optimizer=optim.AdamW, options={"lr": 1e-2, "fused": True}),
    "rmsprop_foreach": Recipe(
        optimizer=optim.RMSprop,
        options={"lr": 1e-2, "momentum": 0.5, "centered": True, "foreach": True},
    ),
    "adagrad": Recipe(
        optimizer=optim.Adagrad, options={"lr": 1e-2, "initial_accumulator_value": 0.1}
    ),
    "adagrad_fused": Recipe(optimizer=optim.Adagrad, options={"lr": 1e-2, "fused": True}),
    "adadelta": Recipe(optimizer=optim.Adadelta, options={"lr": 1.0}),
    "adamax": Recipe(optimizer=optim.Adamax, options={"lr": 1e-2}),
    "nadam": Recipe(optimizer=optim.NAdam, options={"lr": 1e-2}),
    "nadam_foreach": Recipe(optimizer=optim.NAdam, options={"lr": 1e-2, "foreach": True}),
    "radam": Recipe(optimizer=optim.RAdam, options={"lr": 1e-2}),
    "asgd": Recipe(optimizer=optim.ASGD, options={"lr": 1e-2, "t0": 5.0}),
    "rprop": Recipe(optimizer=optim.Rprop, options={"lr": 1e-2}),
}

ACCUMULATION = (4, 4, 2)
"""Micro-batches per step; the last window is short."""

EPS = torch.finfo(torch.float32).eps


def same_on_all_ranks(by_rank: list[Trained], what: str) -> Trained:
    """Assert that the weights do not depend on the rank; return rank 0's."""
    for rank, trained in enumerate(by_rank):
        assert_same_bits(trained.weights, by_rank[0].weights, f"{what}, rank {rank}")
    return by_rank[0]


def columns(results: list[dict[Any, Trained]]) -> dict[Any, list[Trained]]:
    """Turn the results of each rank into results of each run."""
    return {key: [result[key] for result in results] for key in results[0]}


# --- Stages, optimizers, dtypes, sizes ---


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_stages_train_the_same_bits_and_up_to_two_ranks_they_are_ddps(world_size: int) -> None:
    def body(rank: int, world_size: int) -> dict[Any, Trained]:
        runs = {}
        for dtype, buckets, units in (
            (torch.float32, 0.0005, ["Odd"]),
            (torch.float64, 25.0, "none"),
        ):
            training = Training(build=lambda: Bank(parity.Odd, FOUR), recipes=FOUR, dtype=dtype)
            if world_size <= 2:
                runs[dtype, "ddp"] = train(rank, world_size, "ddp", training)
            for stage in (1, 2, 3):
                runs[dtype, stage] = train(
                    rank, world_size, stage, training, bucket_mb=buckets, auto_wrap_policy=units
                )
        return runs

    runs = columns(run_ranks(body, world_size))
    for dtype in (torch.float32, torch.float64):
        for mode in ("ddp", 2, 3):
            if (dtype, mode) in runs:
                ours = same_on_all_ranks(runs[dtype, mode], f"{dtype}, {mode}")
                assert_same_bits(ours.weights, runs[dtype, 1][0].weights, f"{dtype}, {mode} and 1")
                for rank, trained in enumerate(runs[dtype, mode]):
                    assert torch.equal(trained.losses, runs[dtype, 1][rank].losses)
        if world_size > 1:  # else the comparison would not notice ranks that do not talk
            assert not torch.equal(runs[dtype, 1][0].losses, runs[dtype, 1][1].losses)


def test_every_elementwise_optimizer_trains_ddps_bits() -> None:
    def body(rank: int, world_size: int) -> dict[Any, Trained]:
        training = Training(
            build=lambda: Bank(parity.Odd, OTHERS), recipes=OTHERS, windows=(1,) * 8
        )
        modes: tuple[Mode, ...] = ("ddp", 1, 2, 3)
        return {
            mode: train(rank, world_size, mode, training, auto_wrap_policy="none") for mode in modes
        }

    runs = columns(run_ranks(body, 2))
    for stage in (1, 2, 3):
        ours = same_on_all_ranks(runs[stage], f"stage {stage}")
        assert_same_bits(ours.weights, runs["ddp"][0].weights, f"stage {stage} and ddp")
    before = Training(build=lambda: Bank(parity.Odd, OTHERS)).model(rank=0)
    for name, param in before.named_parameters():  # else an optimizer that does nothing would pass
        assert not param.numel() or not torch.equal(param, runs["ddp"][0].weights[name]), name


def test_more_ranks_than_elements_train_the_same_bits() -> None:
    def body(rank: int, world_size: int) -> dict[Any, Trained]:
        training = Training(build=lambda: Bank(parity.Tiny, FOUR), recipes=FOUR)
        return {
            (stage, policy): train(rank, world_size, stage, training, auto_wrap_policy=policy)
            for stage, policy in ((1, "none"), (2, "none"), (3, "none"), (3, "layers"))
        }

    runs = columns(run_ranks(body, 4))
    for key, by_rank in runs.items():
        ours = same_on_all_ranks(by_rank, str(key))
        assert_same_bits(ours.weights, runs[1, "none"][0].weights, str(key))


@pytest.mark.parametrize("world_size", [3, 4])
def test_engine_and_ddp_are_within_rounding_of_float64(world_size: int) -> None:
    """Beyond two ranks, sums of gradients depend on their order, so bits are not comparable.

    The yardstick is plain PyTorch in float64 on one rank that sees all batches. It starts from the
    same fp32 numbers and takes few steps of SGD, in which rounding errors add up but do not grow.
    An fp32 weight that is right has an error of about one unit in the last place of the largest
    weight per step; a rank whose batches are left out costs ten thousand times more.
    """
    steps = 5
    sgd = {"": Recipe(optimizer=optim.SGD, options={"lr": 0.05, "momentum": 0.9})}
    training = Training(build=parity.Odd, recipes=sgd, windows=(1,) * steps)

    def reference(ranks: int) -> dict[str, Tensor]:
        model = training.model(rank=0).double()
        (optimizer,) = training.optimizers(model)
        (schedule,) = training.schedules([optimizer])
        for step in range(steps):
            optimizer.zero_grad()
            for rank in range(ranks):
                (model(training.batch(model, rank, step)) / ranks).backward()
            optimizer.step()
            schedule.step()
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    def body(rank: int, world_size: int) -> tuple[dict[Any, Trained], list[dict[str, Tensor]]]:
        modes: tuple[Mode, ...] = ("ddp", 1, 3)
        runs = {
            mode: train(rank, world_size, mode, training, auto_wrap_policy="layers")
            for mode in modes
        }
        return runs, [reference(world_size), reference(world_size - 1)]

    runs, (exact, wrong) = run_ranks(body, world_size)[0]

    def error(weights: Mapping[str, Tensor]) -> float:
        """The largest difference from float64, in units of the largest weight's last place."""
        return max(
            ((weights[name].double() - value).abs().max() / value.abs().max() / EPS).item()
            for name, value in exact.items()
            if value.numel()
        )

    for mode, trained in runs.items():
        assert error(trained.weights) < steps, mode
    assert error(wrong) > 1e4 * steps  # the yardstick can tell


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_accumulation_with_a_short_last_window_agrees(world_size: int) -> None:
    recipes = {"sgd": FOUR["sgd"], "adamw": ADAMW}
    training = Training(
        build=lambda: Bank(parity.Odd, recipes), recipes=recipes, windows=ACCUMULATION
    )

    def body(rank: int, world_size: int) -> dict[Any, Trained]:
        options = {"auto_wrap_policy": ["Odd"], "bucket_mb": 0.0005}
        runs = {
            mode: train(rank, world_size, mode, training, **options) for mode in ("ddp", 1, 2, 3)
        }
        for stage in (2, 3):
            runs[stage, "late"] = train(
                rank, world_size, stage, training, reduce_every_backward=False, **options
            )
        exact = dataclasses.replace(training, dtype=torch.float64)
        runs["exact"] = train(rank, world_size, "ddp", exact)
        return runs

    runs = columns(run_ranks(body, world_size))
    weights = {key: same_on_all_ranks(runs[key], str(key)).weights for key in runs}
    if world_size <= 2:
        assert_same_bits(weights[1], weights["ddp"], "stage 1 and ddp")
    assert_same_bits(weights[2], weights[3], "stages 2 and 3")
    # One reduction for the whole window is what stage 1 does.
    assert_same_bits(weights[2, "late"], weights[1], "stages 1 and 2")
    assert_same_bits(weights[3, "late"], weights[1], "stages 1 and 3")
    for key in ("ddp", 1, 2, 3):
        for name, value in weights["exact"].items():
            if name.startswith("models.sgd"):  # rounding does not grow in few steps of it
                torch.testing.assert_close(weights[key][name].double(), value, rtol=0, atol=8 * EPS)


# --- Settings ---


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bits_do_not_depend_on_settings(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    talk_over(transport, monkeypatch)
    training = Training(build=parity.Blocks, windows=(1,) * 4)

    def body(rank: int, world_size: int) -> dict[Any, Trained]:
        runs = {"ddp": train(rank, world_size, "ddp", training)}
        settings: list[tuple[Mode, dict[str, Any]]] = []
        for bucket_mb in (0.001, 25.0, 10000.0):
            settings += [(1, {"bucket_mb": bucket_mb}), (2, {"bucket_mb": bucket_mb})]
        for policy in ("none", "layers", "auto"):
            settings += [(3, {"auto_wrap_policy": policy, "prefetch": policy != "none"})]
        settings += [(3, {"auto_wrap_policy": "layers", "prefetch": False})]
        settings += [(3, {"auto_wrap_policy": "auto", "prefetch": False})]
        nested = ["TransformerEncoderLayer", "Linear"]
        settings += [(3, {"auto_wrap_policy": nested, "broadcast_buffers": False})]
        for stage, options in settings:
            runs[f"{stage}, {options}"] = train(rank, world_size, stage, training, **options)
        return runs

    runs = columns(run_ranks(body, 2))
    for key, by_rank in runs.items():
        ours = same_on_all_ranks(by_rank, key)
        assert_same_bits(ours.weights, runs["ddp"][0].weights, f"{key} and ddp")
        for rank, trained in enumerate(by_rank):
            assert torch.equal(trained.losses, runs["ddp"][rank].losses), key


# --- Models ---


@pytest.mark.parametrize(
    "build",
    [
        parity.Tied,
        parity.Recurrent,
        parity.Attentive,
        parity.Reparametrized,
        parity.Normalized,
        parity.Convolutional,
        parity.Functional,
        parity.Looped,
        parity.Mixed,
        parity.Frozen,
        parity.Unused,
        parity.Diverse,
    ],
)
def test_models_of_all_kinds_train_ddps_bits(build: type[Model]) -> None:
    unused = build in (parity.Unused, parity.Diverse)
    training = Training(build=build, windows=(1,) * 6, unused=unused)
    # Ranks that call different modules can only share units if the policy puts them together.
    policies = ("auto", "none") if build is parity.Diverse else ("auto", "layers")

    def body(rank: int, world_size: int) -> dict[Any, Trained]:
        runs: dict[Any, Trained] = {"ddp": train(rank, world_size, "ddp", training)}
        for stage in (1, 2):
            runs[stage] = train(rank, world_size, stage, training, bucket_mb=0.0002)
        for policy in policies:
            runs[3, policy] = train(rank, world_size, 3, training, auto_wrap_policy=policy)
        return runs

    runs = columns(run_ranks(body, 2))
    for key, by_rank in runs.items():
        same_on_all_ranks(by_rank, str(key))
        for rank, (ours, theirs) in enumerate(zip(by_rank, runs["ddp"], strict=True)):
            what = f"{key} and ddp, rank {rank}"
            assert_same_bits(ours.weights, theirs.weights, what)
            assert torch.equal(ours.losses, theirs.losses), what
            assert ours.without_grad == theirs.without_grad, what
            if theirs.buffers:
                assert_same_bits(ours.buffers, theirs.buffers, what)
            for name, weight in ours.weights.items():
                assert weight.stride() == theirs.weights[name].stride(), f"{what}: {name}"


def test_statistics_of_batch_norm_are_each_ranks_own_after_the_last_forward() -> None:
    """What the comparison with DDP's buffers above rests on: they do differ between the ranks."""
    training = Training(build=parity.Normalized, windows=(1,) * 2)
    first, second = run_ranks(train, 2, 3, training)
    assert not torch.equal(first.buffers["norm.running_mean"], second.buffers["norm.running_mean"])


def test_frozen_and_unused_parameters_neither_move_nor_decay() -> None:
    def body(rank: int, world_size: int) -> dict[Any, Trained]:
        return {
            (build, stage): train(
                rank, world_size, stage, Training(build=build, windows=(1,) * 3, unused=True)
            )
            for build in (parity.Frozen, parity.Unused)
            for stage in (1, 2, 3)
        }

    for (build, stage), (trained, _) in columns(run_ranks(body, 2)).items():
        still = [f"{build.__name__.lower()}.{kind}" for kind in ("weight", "bias")]
        assert trained.without_grad == still, stage
        before = dict(Training(build=build).model(rank=0).named_parameters())
        for name, weight in trained.weights.items():
            moved = not torch.equal(weight, before[name])
            assert moved == (name not in still), f"stage {stage}: {name}"


def test_all_ranks_start_from_the_weights_of_rank_0() -> None:
    training = Training(build=parity.Blocks, windows=())

    def body(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        before = {k: p.detach().clone() for k, p in training.model(rank).named_parameters()}
        after = []
        for stage in (1, 2, 3):
            model = training.model(rank)
            engine = ZeroEngine(model, stage=stage)
            engine.restore()
            engine.close()
            after.append({name: param.detach() for name, param in model.named_parameters()})
        return before, after

    results = run_ranks(body, 3)
    assert not torch.equal(results[0][0]["head.weight"], results[1][0]["head.weight"])
    for rank, (_, after) in enumerate(results):
        for stage, weights in enumerate(after, start=1):
            assert_same_bits(weights, results[0][0], f"stage {stage}, rank {rank}")
