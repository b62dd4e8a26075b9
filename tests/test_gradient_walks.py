"""Random walks over everything that may happen to gradients, beside averages computed by hand.

Each walk draws what every rank does (passes over some of the layers, with and without reducing,
zeroing, edits, clipping, steps) and keeps in fp64 what the gradients and weights must be.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.engine.engine import ZeroEngine
from ranks import run_ranks

LAYERS = 6
LENGTH = 25
PASSES = ("reduce", "no_sync", "twice")
EDITS = ("zero", "zero", "fill with zeros", "drop some", "read", "change", "clip", "step")
BUCKETS_MB = (100 / 2**20, 500 / 2**20, 25.0)


class Layers(nn.Module):
    """Residual layers, of which a pass may use some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(LAYERS))

    def forward(self, x: Tensor, used: set[int]) -> Tensor:
        for index in sorted(used):
            x = x + torch.tanh(self.layers[index](x))
        return x.pow(2).sum()


class Walk:
    """One walk on one rank.

    Args:
        seed: Of what is drawn; the ranks draw the same steps.
        rank: This rank, which draws its own data and, below stage 3, its own layers.
        world_size: Number of ranks.
    """

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self.shared, self.own = random.Random(seed), random.Random(seed * 1000 + rank)
        self.world_size = world_size
        self.stage = (1, 1, 2, 3)[seed % 4]
        torch.manual_seed(seed)
        self.net = Layers()
        if self.shared.random() < 0.3:
            self.net.layers[2].weight.requires_grad_(False)
        self.reference = copy.deepcopy(self.net)
        self.engine = ZeroEngine(
            self.net,
            stage=self.stage,
            auto_wrap_policy="layers",
            bucket_mb=BUCKETS_MB[seed % 3],
            optimizer_sharding="whole" if seed % 5 == 0 else "auto",
            reduce_every_backward=self.shared.random() < 0.5,
        )
        self.params = list(self.net.parameters())
        self.expected = list(self.reference.parameters())
        self.optimizers = [
            torch.optim.SGD(params, lr=0.05, momentum=0.9)
            for params in (self.params, self.expected)
        ]
        self.engine.attach(self.optimizers[0])
        self.averages: list[Tensor | None] = [None] * len(self.params)
        self.local: list[Tensor | None] = [None] * len(self.params)  # not averaged yet
        self.taken: list[str] = []

    def go(self) -> None:
        """Take all steps."""
        for _ in range(LENGTH):
            act = self.shared.choice([*PASSES, "reduce", *EDITS])
            self.taken.append(act)
            if act in PASSES:
                self.run(act)
            elif act == "zero":
                self.optimizers[0].zero_grad()
                self.averages = [None] * len(self.params)
                self.local = [None] * len(self.params)
            elif not any(self.which_ranks_have(self.local)):  # edits are of averages
                self.edit(act)

    def run(self, act: str) -> None:
        """Run forward and backward passes."""
        draws = self.shared if self.stage == 3 else self.own
        used = {index for index in range(LAYERS) if draws.random() < 0.7} | {0}
        x = torch.tensor([[self.own.gauss(0, 1) for _ in range(5)] for _ in range(3)]).double()
        times = 2 if act == "twice" else 1
        for _ in range(times):
            self.reference.zero_grad()
            self.reference(x, used).backward()
            for index, param in enumerate(self.expected):
                if param.grad is not None:
                    before = self.local[index]
                    self.local[index] = param.grad if before is None else before + param.grad
        if act == "no_sync":
            with self.engine.no_sync():
                self.backward(x, used, times)
            if self.engine._defers:
                return
        else:
            self.backward(x, used, times)
        for index, used_somewhere in enumerate(self.which_ranks_have(self.local)):
            if used_somewhere:
                mine, before = self.local[index], self.averages[index]
                total = torch.zeros_like(self.expected[index]) if mine is None else mine.clone()
                dist.all_reduce(total)
                total /= self.world_size
                self.averages[index] = total if before is None else before + total
                self.local[index] = None

    def backward(self, x: Tensor, used: set[int], times: int) -> None:
        """Run the engine's passes."""
        with self.engine.forward():
            loss = self.net(x, used)
        for left in range(times - 1, -1, -1):
            with self.engine.backward():
                loss.backward(retain_graph=left > 0)

    def edit(self, act: str) -> None:
        """Do what user code does between a backward pass and a step."""
        if act == "fill with zeros":
            self.optimizers[0].zero_grad(set_to_none=False)
            self.averages = [None if a is None else torch.zeros_like(a) for a in self.averages]
        elif act == "drop some":
            count = self.shared.choice([1, 4, len(self.params)])
            for index in self.shared.sample(range(len(self.params)), count):
                self.params[index].grad = self.averages[index] = None
        elif act == "read":
            self.check_grads()
        elif act == "change":
            for index in self.shared.sample(range(len(self.params)), 3):
                self.change(index)
        elif act == "clip" and any(average is not None for average in self.averages):
            self.engine.clip_by_norm(self.params, 1.0)
            held = [average for average in self.averages if average is not None]
            norm = torch.stack([average.norm() for average in held]).norm()
            factor = min(1.0, float(1.0 / (norm + 1e-6)))
            self.averages = [None if a is None else a * factor for a in self.averages]
        elif act == "step":
            self.step()

    def change(self, index: int) -> None:
        """Double a gradient in place or by assignment, or make one."""
        param, average = self.params[index], self.averages[index]
        if average is not None:
            if self.shared.random() < 0.5:
                param.grad = param.grad * 2  # type: ignore[operator]
            else:
                param.grad.mul_(2)  # type: ignore[union-attr]
            self.averages[index] = average * 2
        elif self.expected[index].requires_grad and self.shared.random() < 0.5:
            param.grad = torch.ones(param.shape, dtype=torch.float64)
            self.averages[index] = torch.ones_like(self.expected[index])

    def step(self) -> None:
        """Step both, and compare the weights."""
        self.optimizers[0].step()
        for param, average in zip(self.expected, self.averages, strict=True):
            param.grad = average
        self.optimizers[1].step()
        self.reference.zero_grad()
        for param, expected in zip(self.params, self.expected, strict=True):
            self.assert_close(param.detach().clone(), expected.detach())
        if self.shared.random() < 0.5:
            self.check_grads()

    def check_grads(self) -> None:
        """Compare what user code sees."""
        for param, average in zip(self.params, self.averages, strict=True):
            assert (param.grad is None) == (average is None), self.taken
            if average is not None:
                self.assert_close(param.grad.clone(), average)  # type: ignore[union-attr]

    def which_ranks_have(self, grads: list[Tensor | None]) -> list[bool]:
        """Say for each gradient whether any rank has it."""
        mine = torch.tensor([grad is not None for grad in grads], dtype=torch.int32)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in mine.tolist()]

    def assert_close(self, actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(
            actual, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{self.taken}: {text}"
        )


@pytest.mark.parametrize("seed", range(24))
def test_gradients_and_weights_are_what_they_are_by_hand(seed: int) -> None:
    def body(rank: int, world_size: int) -> Any:
        Walk(seed, rank, world_size).go()

    run_ranks(body, 3 if seed % 7 == 0 else 2, timeout=60)
