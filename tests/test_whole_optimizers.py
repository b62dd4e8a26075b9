"""Optimizers that look at more than one element at a time train DDP's bits."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optimizers
import parity
import pytest
import torch
import torch.nn.functional as F
from parity import Mode, Model, Trained, Training, assert_same_bits, train
from test_parity import columns, same_on_all_ranks
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.full import optimizer_state
from lightning_zero.engine.engine import ZeroEngine
from ranks import expect_failures, run_ranks

Make = Callable[[list[nn.Parameter]], list[optim.Optimizer]]


class Varied(Model):
    """Matrices, single elements, an empty, a turned, a tied, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first = nn.Linear(5, 7)
        self.again = nn.Linear(5, 7, bias=False)
        self.again.weight = self.first.weight
        self.shift = nn.Parameter(torch.randn(1))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.randn(6, 7).t())
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, batch: Tensor) -> Tensor:
        batch = batch.to(self.scale.dtype)
        hidden = torch.tanh(self.first(batch) + self.again(batch.flip(0))) * self.scale
        hidden = self.frozen(torch.tanh(hidden @ self.turned))
        image = F.pad(batch, (0, 11)).reshape(1, 3, 4, 4)
        extra = self.image(image).square().mean() + self.nothing.sum()
        return (self.last(hidden) + self.shift).square().mean() + extra


def matrices(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """List those that Muon takes."""
    return [param for param in params if param.dim() == 2 and param.numel()]


def others(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """List the rest."""
    return [param for param in params if not (param.dim() == 2 and param.numel())]


CASES: dict[str, Make] = {
    "Adafactor": lambda p: [optim.Adafactor([q for q in p if q.numel()], lr=1e-2)],
    "Muon and AdamW": lambda p: [optim.Muon(matrices(p), lr=1e-2), optim.AdamW(others(p), lr=1e-2)],
    "one for both": lambda p: [
        optimizers.MuonAndAdam(
            [{"params": matrices(p), "orthogonal": True}, {"params": others(p), "lr": 1e-3}],
            orthogonal=False,
        )
    ],
    "Lamb": lambda p: [optimizers.Lamb(p)],
    "Shampoo": lambda p: [optimizers.Shampoo(p)],
    "Remembering": lambda p: [optimizers.Remembering(p)],
    "Nested": lambda p: [optimizers.Nested(p)],
}
FORCED: dict[str, Make] = {
    "AdamW": lambda p: [optim.AdamW(p, lr=1e-2, amsgrad=True)],
    "foreach": lambda p: [optim.Adam(p, lr=1e-2, foreach=True, decoupled_weight_decay=True)],
    "fused": lambda p: [optim.AdamW([q for q in p if q.numel()], lr=1e-2, fused=True)],
    "maximize": lambda p: [optim.AdamW(p, lr=1e-2, maximize=True, weight_decay=0.1)],
    "Adagrad": lambda p: [optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1)],
}
POLICIES: dict[Mode, dict[str, Any]] = {
    1: {"bucket_mb": 0.0002},
    2: {"bucket_mb": 0.0002},
    3: {"auto_wrap_policy": "layers"},
}


@dataclass(frozen=True, kw_only=True)
class Whole(Training):
    """A training with optimizers of any kind and without schedulers."""

    make: Make

    def optimizers(self, model: nn.Module) -> list[optim.Optimizer]:
        """Make the optimizers over a model."""
        return self.make(list(model.parameters()))

    def schedules(self, optimizers: Any) -> list[Any]:
        """Make none."""
        return []


def assert_ddps_bits(cases: Mapping[str, Make], **options: Any) -> None:
    """Train every case under DDP and at every stage, with two ranks."""

    def body(rank: int, world_size: int) -> dict[Any, Trained]:
        runs = {}
        for name, make in cases.items():
            training = Whole(build=Varied, make=make, unused=True, windows=(1,) * 5)
            runs[name, "ddp"] = train(rank, world_size, "ddp", training)
            for stage, policy in POLICIES.items():
                runs[name, stage] = train(rank, world_size, stage, training, **policy, **options)
        return runs

    runs = columns(run_ranks(body, 2))
    before = dict(Whole(build=Varied, make=CASES["Lamb"]).model(rank=0).named_parameters())
    for (name, mode), by_rank in runs.items():
        ours = same_on_all_ranks(by_rank, f"{name}, {mode}")
        theirs = runs[name, "ddp"][0]
        assert_same_bits(ours.weights, theirs.weights, f"{name}, {mode} and ddp")
        assert ours.without_grad == theirs.without_grad
        moved = {key for key, value in ours.weights.items() if not torch.equal(value, before[key])}
        still = {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias", "nothing"}
        assert moved == before.keys() - still, name
        for key, weight in ours.weights.items():
            assert weight.stride() == theirs.weights[key].stride(), key


def test_optimizers_that_need_whole_parameters_train_ddps_bits() -> None:
    assert_ddps_bits(CASES)


def test_elementwise_ones_may_step_on_whole_parameters_too() -> None:
    assert_ddps_bits(FORCED, optimizer_sharding="whole")


def test_one_that_takes_gradients_for_granted_trains_ddps_bits() -> None:
    training = Whole(build=parity.Odd, make=lambda p: [optimizers.Trusting(p)], windows=(1,) * 4)

    def body(rank: int, world_size: int) -> dict[Any, Trained]:
        modes: tuple[Mode, ...] = ("ddp", 1, 2, 3)
        return {mode: train(rank, world_size, mode, training) for mode in modes}

    runs = columns(run_ranks(body, 2))
    for stage in (1, 2, 3):
        ours = same_on_all_ranks(runs[stage], str(stage))
        assert_same_bits(ours.weights, runs["ddp"][0].weights, f"{stage} and ddp")


def test_models_of_several_dtypes_or_with_gradients_on_one_rank_only_train_ddps_bits() -> None:
    def body(rank: int, world_size: int) -> dict[Any, Trained]:
        modes: tuple[Mode, ...] = ("ddp", 1, 2, 3)
        runs = {}
        for build in (parity.Diverse, parity.Mixed):
            training = Whole(build=build, make=CASES["Lamb"], windows=(1,) * 4, unused=True)
            for mode in modes:
                options = {} if mode == "ddp" else {"auto_wrap_policy": "none"}
                runs[build, mode] = train(rank, world_size, mode, training, **options)
        return runs

    runs = columns(run_ranks(body, 2))
    for (build, mode), by_rank in runs.items():
        ours = same_on_all_ranks(by_rank, f"{build}, {mode}")
        assert_same_bits(ours.weights, runs[build, "ddp"][0].weights, f"{build}, {mode} and ddp")


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_train_what_one_process_trains_but_for_rounding(world_size: int) -> None:
    """Models of three parameters too, fewer than ranks."""
    kinds = {"Lamb": CASES["Lamb"], "Adafactor": CASES["Adafactor"], "Muon": CASES["one for both"]}

    def alone(training: Training) -> dict[str, Tensor]:
        model = training.model(rank=0).double()
        made = training.optimizers(model)
        for step in range(len(training.windows)):
            for optimizer in made:
                optimizer.zero_grad()
            for rank in range(world_size):
                (model(training.batch(model, rank, step)) / world_size).backward()
            for optimizer in made:
                optimizer.step()
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    def body(rank: int, world_size: int) -> tuple[dict[Any, Trained], dict[Any, Any]]:
        runs, expected = {}, {}
        for name, make in kinds.items():
            for build in (Varied, parity.Tiny):
                training = Whole(build=build, make=make, windows=(1,) * 4, dtype=torch.float64)
                expected[name, build] = alone(training)
                for stage, policy in POLICIES.items():
                    runs[name, build, stage] = train(rank, world_size, stage, training, **policy)
        return runs, expected

    results = run_ranks(body, world_size)
    for (name, build, stage), by_rank in columns([runs for runs, _ in results]).items():
        ours = same_on_all_ranks(by_rank, f"{name}, {stage}")
        for key, value in results[0][1][name, build].items():
            torch.testing.assert_close(ours.weights[key], value, rtol=1e-9, atol=1e-9)


# Clipping, accumulation, whatever else happens around a step


def batch_of(model: Model, rank: int, number: int) -> Tensor:
    """Draw a batch of this rank's own."""
    return model.batch(torch.Generator().manual_seed(1000 * number + rank))


def test_clipping_and_accumulation_come_before_the_step() -> None:
    def ddp(rank: int, make: Make, clip: str) -> dict[str, Tensor]:
        model = Whole(build=Varied, make=make).model(rank)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        made = make(list(model.parameters()))
        for step in range(4):
            for optimizer in made:
                optimizer.zero_grad()
            with wrapped.no_sync():
                wrapped(batch_of(model, rank, 2 * step)).backward()
            wrapped(batch_of(model, rank, 2 * step + 1)).backward()
            if clip == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            elif clip == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in made:
                optimizer.step()
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    def ours(rank: int, make: Make, clip: str, stage: int) -> dict[str, Tensor]:
        model = Whole(build=Varied, make=make).model(rank)
        options = POLICIES[stage]  # type: ignore[index]
        engine = ZeroEngine(
            model, stage=stage, reduce_every_backward=False, stall_timeout=20.0, **options
        )
        made = make(list(model.parameters()))
        for optimizer in made:
            engine.attach(optimizer)
        for step in range(4):
            for optimizer in made:
                optimizer.zero_grad()
            with engine.no_sync(), engine.forward():
                loss = model(batch_of(model, rank, 2 * step))
            with engine.no_sync():
                loss.backward()
            with engine.forward():
                loss = model(batch_of(model, rank, 2 * step + 1))
            loss.backward()
            if clip == "value":
                engine.clip_by_value(model.parameters(), 0.01)
            elif clip == "norm":
                engine.clip_by_norm(model.parameters(), 0.1)
            for optimizer in made:
                optimizer.step()
        engine.restore()
        engine.close()
        return {name: param.detach() for name, param in model.named_parameters()}

    def body(rank: int, world_size: int) -> dict[Any, dict[str, Tensor]]:
        runs = {}
        for name in ("Lamb", "Shampoo"):
            for clip in ("none", "value", "norm"):
                runs[name, clip, "ddp"] = ddp(rank, CASES[name], clip)
                for stage in (1, 2, 3):
                    runs[name, clip, stage] = ours(rank, CASES[name], clip, stage)
        return runs

    for runs in run_ranks(body, 2):
        for (name, clip, stage), weights in runs.items():
            expected = runs[name, clip, "ddp"]
            if clip != "norm":
                assert_same_bits(weights, expected, f"{name}, {clip}, {stage}")
            for key in weights:
                torch.testing.assert_close(weights[key], expected[key], rtol=1e-3, atol=1e-3)
        assert not torch.equal(
            runs["Lamb", "value", 1]["first.weight"], runs["Lamb", "none", 1]["first.weight"]
        )


def one_step(engine: ZeroEngine, model: Model, optimizer: optim.Optimizer, number: int) -> None:
    """Train on one batch."""
    optimizer.zero_grad()
    with engine.forward():
        loss = model(batch_of(model, engine.collectives.rank, number))
    loss.backward()
    optimizer.step()


def test_after_a_step_that_raised_parameters_are_whole_and_training_goes_on() -> None:
    def body(rank: int, world_size: int) -> dict[Any, dict[str, Tensor]]:
        runs = {}
        for stage in (1, 2, 3):
            for make in (optimizers.Lamb, optimizers.Stubborn):
                model = Whole(build=Varied, make=CASES["Lamb"]).model(rank)
                engine = ZeroEngine(model, stage=stage, stall_timeout=20.0)
                optimizer = make(model.parameters())
                engine.attach(optimizer)
                for number in range(4):
                    if number != 1:
                        one_step(engine, model, optimizer, number)
                    elif make is optimizers.Stubborn:
                        with pytest.raises(KeyError, match="the optimizer's own"):
                            one_step(engine, model, optimizer, number)
                engine.restore()
                engine.close()
                weights = {name: param.detach() for name, param in model.named_parameters()}
                runs[stage, make.__name__] = weights
        return runs

    for runs in run_ranks(body, 2):
        for (stage, _), weights in runs.items():
            assert_same_bits(weights, runs[1, "Lamb"], f"stage {stage}")


def test_a_param_group_that_is_added_gets_owners() -> None:
    def body(rank: int, world_size: int) -> dict[Any, dict[str, Tensor]]:
        runs = {}
        for stage in ("ddp", 1, 3):
            model = Whole(build=parity.Odd, make=CASES["Lamb"]).model(rank)
            optimizer = optimizers.Lamb(model.first.parameters())
            if stage == "ddp":
                wrapped = DistributedDataParallel(model)
            else:
                engine = ZeroEngine(model, stage=stage, stall_timeout=20.0)
                engine.attach(optimizer)
            for number in range(4):
                if number == 2:
                    optimizer.add_param_group({"params": model.second.parameters()})
                if stage == "ddp":
                    optimizer.zero_grad()
                    wrapped(batch_of(model, rank, number)).backward()
                    optimizer.step()
                else:
                    one_step(engine, model, optimizer, number)
            if stage != "ddp":
                engine.restore()
                engine.close()
            runs[stage] = {n: param.detach().clone() for n, param in model.named_parameters()}
        return runs

    for runs in run_ranks(body, 2):
        assert_same_bits(runs[1], runs["ddp"], "stage 1")
        assert_same_bits(runs[3], runs["ddp"], "stage 3")


# State


def same(ours: Any, theirs: Any) -> bool:
    """Say whether two pieces of state are equal in structure and bits."""
    if isinstance(theirs, Tensor):
        return (
            type(ours) is type(theirs) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        )
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


def outline(value: Any) -> Any:
    """Describe state without its values."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.is_meta
    if isinstance(value, dict):
        return {key: outline(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [outline(item) for item in value]
    return value


def copied(state: Any) -> Any:
    """Copy state that may not know how to copy itself."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


STATES: dict[str, tuple[Callable[..., optim.Optimizer], str, str]] = {
    # How to make it, and how it is sharded before it is saved and after it is loaded.
    "Shampoo": (optimizers.Shampoo, "auto", "auto"),
    "Remembering": (optimizers.Remembering, "auto", "auto"),
    "AdamW, from elementwise": (optim.AdamW, "auto", "whole"),
    "AdamW, from whole": (optim.AdamW, "whole", "auto"),
}


def test_state_is_saved_as_one_process_has_it_and_loaded_by_any_other() -> None:
    def trained(
        rank: int, name: str, stage: Any, sharding: str, state: Any, weights: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Train two steps, from a state if there is one; return state and weights."""
        model = Whole(build=Varied, make=CASES["Lamb"]).model(rank)
        if weights is not None:
            model.load_state_dict(weights)
        first = 0 if state is None else 2
        if stage == "ddp":
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
            optimizer = STATES[name][0](model.parameters())
            if state is not None:
                optimizer.load_state_dict(copied(state))
            for number in (first, first + 1):
                optimizer.zero_grad()
                wrapped(batch_of(model, rank, number)).backward()
                optimizer.step()
            return optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        engine = ZeroEngine(model, stage=stage, stall_timeout=20.0, optimizer_sharding=sharding)
        optimizer = STATES[name][0](model.parameters())
        sharded = engine.attach(optimizer)
        if state is not None:
            sharded.load_state_dict(copied(state))  # both load what they then change
        for number in (first, first + 1):
            one_step(engine, model, optimizer, number)
        saved = optimizer_state(engine, sharded)
        engine.restore()
        engine.close()
        return saved, dict(model.state_dict())

    def body(rank: int, world_size: int) -> dict[Any, Any]:
        results = {}
        for name, (_, before, after) in STATES.items():
            reference = trained(rank, name, "ddp", "", None, None)
            end = trained(rank, name, "ddp", "", *reference)
            results[name, "ddp"] = (reference[0], end)
            for stage in (1, 3):
                saved, weights = trained(rank, name, stage, before, None, None)
                broadcast = [saved]
                torch.distributed.broadcast_object_list(broadcast, src=0)
                resumed = trained(rank, name, stage, after, broadcast[0], weights)
                back = trained(rank, name, "ddp", "", broadcast[0], weights)
                results[name, stage] = (saved, resumed, back)
        return results

    first, second = run_ranks(body, 2)
    for name in STATES:
        expected, (last, weights) = first[name, "ddp"]
        assert len(expected["state"]) > 5
        for stage in (1, 3):
            saved, resumed, back = first[name, stage]
            assert same(saved, expected), (name, stage)
            for state, ours in (resumed, back):
                assert same(state, last), (name, stage)
                assert_same_bits(ours, weights, f"{name}, {stage}")
            seen, complete = outline(second[name, stage][0]), outline(saved)
            assert seen.keys() == complete.keys()
            assert list(seen["state"]) == list(complete["state"])
            for number, state in complete["state"].items():
                for key, value in state.items():
                    mine = seen["state"][number][key]
                    if isinstance(value, tuple) and value[0] != ():
                        assert mine == (*value[:2], True), (name, number, key)


class Long(Model):
    """A matrix that is big enough for a state of 8 bits, and what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 3)

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(3, 64, generator=generator)

    def forward(self, batch: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(batch))).square().mean()


def test_state_may_be_of_8_bits_in_blocks() -> None:
    make = pytest.importorskip("torchao.optim").AdamW8bit

    def body(rank: int, world_size: int) -> dict[Any, Any]:
        results: dict[Any, Any] = {}
        with torch.compiler.set_stance("force_eager"):  # else it compiles for seconds
            for stage in ("ddp", 1, 2, 3):
                for saved in (None, results.get((stage, 0))):
                    model = Whole(build=Long, make=CASES["Lamb"]).model(rank)
                    if saved is not None:
                        model.load_state_dict(saved[1])
                    optimizer = make(model.parameters(), lr=1e-2)
                    engine = None if stage == "ddp" else ZeroEngine(model, stage=stage)
                    whole = DistributedDataParallel(model) if engine is None else None
                    load: Any = engine.attach(optimizer) if engine else optimizer
                    if saved is not None:
                        load.load_state_dict(copied(saved[0]))
                    for number in range(3):
                        if engine:
                            one_step(engine, model, optimizer, number)
                        else:
                            optimizer.zero_grad()
                            whole(batch_of(model, rank, number)).backward()
                            optimizer.step()
                    state = optimizer_state(engine, load) if engine else optimizer.state_dict()
                    packed = [state]
                    torch.distributed.broadcast_object_list(packed, src=0)
                    if engine:
                        engine.restore()
                        engine.close()
                    weights = {key: value.clone() for key, value in model.state_dict().items()}
                    results[stage, int(saved is not None)] = (copied(packed[0]), weights)
        return {
            key: ({n: unpacked(s) for n, s in state["state"].items()}, weights)
            for key, (state, weights) in results.items()
        }

    def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(state)
        for key, value in state.items():
            if type(value) is not Tensor:
                found |= {f"{key} codes": value.codes, f"{key} scale": value.scale, key: None}
        return found

    for results in run_ranks(body, 2):
        assert "exp_avg codes" in results["ddp", 0][0][0]
        for (stage, turn), (state, weights) in results.items():
            assert same(state, results["ddp", turn][0]), (stage, turn)
            assert_same_bits(weights, results["ddp", turn][1], f"{stage}, {turn}")


def test_state_lives_on_the_owner_alone() -> None:
    def body(rank: int, world_size: int) -> set[str]:
        model = Whole(build=Varied, make=CASES["Lamb"]).model(rank)
        engine = ZeroEngine(model, stage=3, stall_timeout=20.0)
        optimizer = optimizers.Remembering(model.parameters())
        engine.attach(optimizer)
        names = {param: name for name, param in model.named_parameters()}
        held = {names[param] for param, state in optimizer.state.items() if state}
        one_step(engine, model, optimizer, 0)
        assert held == {names[param] for param, state in optimizer.state.items() if state}
        engine.restore()
        engine.close()
        return held

    parts = run_ranks(body, 3)
    names = [name for name, _ in Varied().named_parameters()]
    assert sorted(name for part in parts for name in part) == sorted(names)


# What it costs


class Wide(Model):
    """Matrices of one size, as many for each owner."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(48, 48, bias=False) for _ in range(12)])

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(3, 48, generator=generator)

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.square().mean()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_exchanges_three_shares_of_the_model_whatever_the_number_of_ranks(
    world_size: int,
) -> None:
    def body(rank: int, world_size: int) -> dict[int, int]:
        sent = {}
        for stage in (1, 2, 3):
            model = Whole(build=Wide, make=CASES["Lamb"]).model(rank)
            engine = ZeroEngine(model, stage=stage, stall_timeout=20.0, auto_wrap_policy="none")
            optimizer = optimizers.Lamb(model.parameters())
            engine.attach(optimizer)
            for number in range(2):
                before = engine.collectives.traffic.exchange
                one_step(engine, model, optimizer, number)
                sent[stage] = engine.collectives.traffic.exchange - before
            engine.restore()
            engine.close()
        return sent

    share = sum(4 * param.numel() for param in Wide().parameters()) / world_size
    shares = {1: 2, 2: 2, 3: 3}  # gradients, new values, and where they are not whole old ones
    totals = dict.fromkeys(shares, 0)
    for sent in run_ranks(body, world_size):
        for stage, count in shares.items():
            assert sent[stage] <= count * share
            totals[stage] += sent[stage]
    for stage, count in shares.items():
        most = count * share * (world_size - 1)
        assert most / 2 < totals[stage] <= most  # less where an owner's own shard has a part


# What is refused


def test_what_combines_parameters_is_refused_on_every_rank_and_the_rest_is_announced() -> None:
    def body(rank: int, world_size: int) -> list[str]:
        class Keep(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                said.append(record.getMessage())

        said: list[str] = []
        logger = logging.getLogger("lightning_zero")
        logger.addHandler(Keep())
        logger.setLevel(logging.INFO)
        model = parity.Odd()
        engine = ZeroEngine(model, stage=3, stall_timeout=20.0)
        engine.attach(optimizers.Lamb(model.first.parameters()))
        engine.attach(optim.AdamW(model.second.parameters()))
        for make, word in (
            (optimizers.Clipping, "combines all parameters"),
            (optimizers.Greedy, "more than once"),
            (optim.LBFGS, "LBFGS"),
        ):
            with pytest.raises(NotImplementedError, match=word):
                engine.attach(make(model.parameters()))
        engine.restore()
        engine.close()
        return said

    first, second = run_ranks(body, 2)
    assert not second
    (message,) = first
    assert "Lamb" in message
    assert "whole" in message


def test_looking_at_parameters_without_gradient_is_an_error_not_a_crash() -> None:
    class Peeking(optimizers.Lamb):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.total = sum(p.sum() for group in self.param_groups for p in group["params"])
            return super().step(closure)

    def body(rank: int, world_size: int, stage: int) -> None:
        model = Varied()
        engine = ZeroEngine(model, stage=stage, stall_timeout=20.0)
        optimizer = Peeking(model.parameters())
        engine.attach(optimizer)
        one_step(engine, model, optimizer, 0)

    for stage in (1, 3):
        errors = expect_failures(body, 2, stage)
        assert sorted(errors) == [0, 1]
        for kind, message in errors.values():
            assert kind == "RuntimeError"
            assert "does not own" in message


def test_the_strategy_takes_the_word() -> None:
    assert ZeroStrategy(optimizer_sharding="whole")
    with pytest.raises(ValueError, match="'auto', 'elementwise', 'whole'"):
        ZeroStrategy(optimizer_sharding="owned")  # type: ignore[arg-type]
