"""Who owns what, which optimizers need it, and which are refused, all without processes."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import optimizers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.kinds import needs_whole
from lightning_zero.engine.layout import FlatLayout
from lightning_zero.engine.ownership import assign
from lightning_zero.engine.probe import Findings, examine
from ranks import run_ranks

sizes_of_a_group = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 10**9)), max_size=30)


# Balance


@given(st.lists(sizes_of_a_group, max_size=5), st.integers(1, 64))
@settings(deadline=None)
def test_no_rank_owns_more_than_the_mean_and_one_parameter(
    groups: list[list[int]], world_size: int
) -> None:
    loads = [0] * world_size
    owned = [0] * world_size
    for sizes in groups:  # as optimizers and param groups come one after the other
        for size, owner in zip(sizes, assign(sizes, loads), strict=True):
            owned[owner] += size
    assert owned == loads
    everything = [size for sizes in groups for size in sizes]
    assert sum(loads) == sum(everything)
    largest = max(everything, default=0)
    assert max(loads) <= 1.1 * sum(loads) / world_size + largest


@given(sizes_of_a_group, st.integers(1, 9))
@settings(deadline=None)
def test_owners_depend_on_sizes_only_and_ties_go_by_index(
    sizes: list[int], world_size: int
) -> None:
    first = assign(sizes, [0] * world_size)
    assert first == assign(sizes, [0] * world_size)
    assert assign([7] * world_size, [0] * world_size) == list(range(world_size))


# Which optimizers


def params() -> list[nn.Parameter]:
    """Make a few parameters."""
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (5, 3), (5,), ())]


class Plain(optim.SGD):
    """Steps as its parent does."""


class Different(optim.SGD):
    """Has a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def in_module(module: str, name: str, **options: Any) -> optim.Optimizer:
    """Make an optimizer that seems to be from another library."""

    def step(self: Any, closure: Any = None) -> None:
        pass

    step.__module__, step.__qualname__ = f"{module}.optim.some", f"{name}.step"
    made: Any = type(name, (optim.Optimizer,), {"step": step})
    optimizer: optim.Optimizer = made(params(), {"lr": 0.1, **options})
    return optimizer


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (lambda: optim.AdamW(params()), False),
        (lambda: optim.NAdam(params()), False),
        (lambda: Plain(params(), lr=0.1), False),
        (lambda: Different(params(), lr=0.1), True),
        (lambda: optim.Adafactor(params()), True),
        (lambda: optimizers.torch_muon(params()), True),
        (lambda: optimizers.Lamb(params()), True),
        (lambda: in_module("timm", "Lion"), False),
        (lambda: in_module("timm", "Lion", caution=True), True),
        (lambda: in_module("timm", "Lamb"), True),
        (lambda: in_module("mine", "Lion"), True),
    ],
)
def test_what_is_not_known_to_be_elementwise_needs_whole_parameters(
    make: Callable[[], optim.Optimizer], whole: bool
) -> None:
    optimizer = make()
    assert needs_whole(optimizer, "auto") is whole
    assert needs_whole(optimizer, "whole") is True
    assert needs_whole(optimizer, "elementwise") is False


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: optim.LBFGS(params()), "LBFGS"),
        (lambda: optimizers.Greedy(params()), "more than once"),
        (lambda: optimizers.ScheduleFree(params()), "outside"),
        (lambda: in_module("prodigyopt", "Prodigy"), "combines all parameters"),
        (lambda: in_module("mine", "SAM"), "more than once"),
    ],
)
@pytest.mark.parametrize("sharding", ["auto", "whole", "elementwise"])
def test_what_is_known_to_be_impossible_is_refused_whatever_is_asked_for(
    make: Callable[[], optim.Optimizer], word: str, sharding: Any
) -> None:
    with pytest.raises(NotImplementedError, match=word) as info:
        needs_whole(make(), sharding)
    assert "strategy='ddp'" in str(info.value)


# The trial


class Cautious(optimizers.Clipping):
    """Combines the parameters of one group only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        for group in groups:
            self.param_groups = [group]
            super().step(closure)
        self.param_groups = groups


class Late(optimizers.Clipping):
    """Combines parameters from its fifth step on."""

    def update(self, param: nn.Parameter, grad: torch.Tensor, *rest: Any) -> None:
        steps = self.state[param].setdefault("steps", 0)
        self.state[param]["steps"] += 1
        param.sub_(1e-2 * grad / (self.norm if steps > 4 else grad.norm()))


class Broken(optimizers.PerParameter):
    """Fails on anything small."""

    def update(self, param: nn.Parameter, *rest: Any) -> None:
        raise RuntimeError("too small")


def grouped(make: Callable[..., optim.Optimizer]) -> optim.Optimizer:
    """Make an optimizer with two groups."""
    matrices, rest = params()[:2], params()[2:]
    return make([{"params": matrices}, {"params": rest, "lr": 1e-3}])


@pytest.mark.parametrize("make", [optimizers.Clipping, Cautious, Late])
def test_an_optimizer_that_combines_parameters_is_found_out(
    make: Callable[..., optim.Optimizer],
) -> None:
    assert examine(make(params())).combines
    assert examine(grouped(make)).combines
    warming = make(params(), lr=0.0)
    optim.lr_scheduler.LambdaLR(warming, lambda step: step / 10)
    assert examine(warming).combines


@pytest.mark.parametrize(
    "make",
    [
        optimizers.Lamb,
        optimizers.Shampoo,
        optimizers.Nested,
        optimizers.torch_muon,
        optim.Adafactor,
        optim.AdamW,
        optim.SGD,
        lambda params: optimizers.MuonAndAdam(params, orthogonal=False),
    ],
)
def test_one_that_does_not_passes(make: Callable[..., optim.Optimizer]) -> None:
    assert examine(make(params())) == Findings()


@pytest.mark.parametrize(
    "make", [optimizers.Remembering, optimizers.Noisy, optimizers.Stubborn, Broken]
)
def test_one_that_cannot_be_tried_is_said_to_be(make: Callable[..., optim.Optimizer]) -> None:
    assert examine(make(params())) == Findings(tried=False)


def test_what_could_not_be_tried_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Linear(3, 3)
    engine = ZeroEngine(module)
    with caplog.at_level("WARNING", "lightning_zero"):
        engine.attach(optimizers.Noisy(list(module.parameters())))
    assert "Noisy could not be tried" in caplog.text
    engine.restore()


def test_one_that_takes_gradients_for_granted_is_found_out() -> None:
    assert examine(optimizers.Trusting(params())) == Findings(needs_grads=True)


def test_the_trial_leaves_everything_as_it_was() -> None:
    class Counting(optimizers.Noisy):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.seen: list[float] = []
            self.twice = self.double

        def double(self, number: float) -> float:
            self.seen.append(number)
            return 2 * number

        def update(self, param: nn.Parameter, *rest: Any) -> None:
            self.twice(random.random() + float(np.random.rand()))
            super().update(param, *rest)

    held = params()
    optimizer = Counting(held)
    called: list[Any] = []
    optimizer.register_step_pre_hook(lambda *args: called.append(args))
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    before = [param.clone() for param in held]
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    assert examine(optimizer) == Findings(tried=False)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    assert all(map(torch.equal, held, before))
    assert not called
    assert not optimizer.seen
    assert not optimizer.state
    assert [param.grad for param in held] == [None] * 4
    assert optimizer.param_groups[0]["params"] == held


class Holding(optimizers.Clipping):
    """Holds its parameters in a list of its own, and a lock."""

    def __init__(self, given: Any, **settings: Any) -> None:
        super().__init__(given, **settings)
        self.held = [param for group in self.param_groups for param in group["params"]]
        self.names = {param: str(number) for number, param in enumerate(self.held)}
        self.lock = threading.Lock()


class LateClipping(optimizers.Lamb):
    """Divides by a norm over all gradients, after a warm-up."""

    def __init__(self, given: Any, **settings: Any) -> None:
        super().__init__(given, **settings)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        held = [param for group in self.param_groups for param in group["params"]]
        grads = [param.grad for param in held if param.grad is not None]
        if self.steps > 7:
            norm = torch.nn.utils.get_total_norm(grads)
            for grad in grads:
                grad.div_(norm)
        return super().step(closure)


@pytest.mark.parametrize("make", [Holding, LateClipping])
def test_one_that_hides_its_combining_is_found_out(make: Callable[..., optim.Optimizer]) -> None:
    assert examine(make(params())).combines


class Stacking(optim.Optimizer):
    """Fails where nothing has a gradient."""

    def __init__(self, given: Any) -> None:
        super().__init__(given, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            held = [param for param in group["params"] if param.grad is not None]
            lengths = torch.stack([param.grad.norm() for param in held])
            for param, length in zip(held, lengths, strict=True):
                param.sub_(param.grad / (length + 1e-6), alpha=group["lr"])
        return loss


def test_a_rank_that_owns_nothing_does_not_trouble_the_optimizer() -> None:
    assert examine(Stacking(params())) == Findings(needs_grads=True)

    def body(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        module = nn.Linear(3, 3, bias=False)
        alone = copy.deepcopy(module)
        for stage in (1, 2, 3):
            net = copy.deepcopy(module)
            engine = ZeroEngine(net, stage=stage, stall_timeout=10.0)
            optimizer = Stacking(net.parameters())
            engine.attach(optimizer)
            reference = Stacking(alone.parameters())
            for _ in range(2):
                with engine.forward():
                    loss = net(torch.ones(3)).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            engine.restore()
            if stage == 1:
                for _ in range(2):
                    reference.zero_grad()
                    alone(torch.ones(3)).sum().backward()
                    reference.step()
            assert torch.equal(net.weight, alone.weight)

    run_ranks(body, 2)


def test_a_loan_among_many_ranks_looks_at_its_own_parts_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(rank: int, world_size: int) -> int:
        module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(50)])
        engine = ZeroEngine(module, stage=2, optimizer_sharding="whole")
        engine.attach(optim.SGD(module.parameters(), lr=0.1))
        looked = [0]
        slice_of = FlatLayout.slice_of

        def counting(layout: FlatLayout, index: int, rank: int) -> Any:
            looked[0] += 1
            return slice_of(layout, index, rank)

        monkeypatch.setattr(FlatLayout, "slice_of", counting)
        optimizer = engine.optimizers[0].optimizer
        for _ in range(2):
            with engine.forward():
                loss = module(torch.ones(8)).sum()
            loss.backward()
            optimizer.step()
        engine.restore()
        return looked[0]

    # Each parameter is cut once, by its owner, into as many parts as there are.
    assert sum(run_ranks(body, 4)) <= 100 + 4
