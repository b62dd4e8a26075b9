"""Styles of optimization."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from harness import WIDTH, Case, case
from torch import Tensor, nn


class Manual(Case):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Smooth(Case):
    """No batch norm: the gradient of a bias before one is nothing but rounding."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4))


class Gan(Manual):
    def build(self) -> None:
        self.maker = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def configure_optimizers(self) -> Any:
        makes = torch.optim.Adam(self.maker.parameters(), lr=1e-2)
        judges = torch.optim.SGD(self.judge.parameters(), lr=1e-2, momentum=0.9)
        return [makes, judges], [
            torch.optim.lr_scheduler.StepLR(makes, 1, 0.5),
            torch.optim.lr_scheduler.ExponentialLR(judges, 0.9),
        ]


@case
class GanWithToggles(Gan):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        makes, judges = self.optimizers()
        self.toggle_optimizer(makes)
        loss = F.softplus(-self.judge(self.maker(batch))).mean()
        makes.zero_grad()
        self.manual_backward(loss)
        self.seen += [p.grad is None for p in self.judge.parameters()]
        before = [p.detach().clone() for p in self.judge.parameters()]
        makes.step()
        self.seen += [
            torch.equal(a, b) for a, b in zip(before, self.judge.parameters(), strict=True)
        ]
        self.untoggle_optimizer(makes)
        self.toggle_optimizer(judges)
        other = (
            F.softplus(self.judge(self.maker(batch).detach())).mean()
            + F.softplus(-self.judge(batch)).mean()
        )
        judges.zero_grad()
        self.manual_backward(other)
        judges.step()
        self.untoggle_optimizer(judges)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.losses += [loss.item(), other.item()]


@case
class GanWithoutToggles(Gan):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        makes, judges = self.optimizers()
        made = self.maker(batch)
        judges.zero_grad()
        other = F.softplus(self.judge(made.detach())).mean() + F.softplus(-self.judge(batch)).mean()
        self.manual_backward(other)
        judges.step()
        makes.zero_grad()
        loss = F.softplus(-self.judge(made)).mean()
        self.manual_backward(loss)
        makes.step()
        self.losses += [loss.item(), other.item()]


@case
class TwoBackwardsBeforeAStep(Manual, Smooth):
    exact = (1,)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in batch.chunk(2):
            loss = self.loss(part)
            self.manual_backward(loss)
            self.losses.append(loss.item())
        optimizer.step()


@case
class TwoForwardsThenTwoBackwards(Manual, Smooth):
    exact = (1,)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        losses = [self.loss(part) for part in batch.chunk(2)]
        optimizer.zero_grad()
        for loss in losses:
            self.manual_backward(loss)
            self.losses.append(loss.item())
        optimizer.step()


@case
class RetainGraph(Manual, Smooth):
    exact = (1,)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(2 * loss)
        optimizer.step()
        self.losses.append(loss.item())


@case
class GradientPenalty(Smooth):
    def loss(self, batch: Tensor) -> Tensor:
        batch = batch.clone().requires_grad_()
        out = self.net(batch).square().mean()
        (grad,) = torch.autograd.grad(out, batch, create_graph=True)
        return out + grad.square().sum()


@case
class RawOptimizer(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())


@case
class RawClosure(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        self.losses.append(optimizer.step(closure).item())


@case
class OverriddenHooks(Case):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 2).backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


@case
class SkippedSteps(Smooth):
    """Every second step is not taken; gradients are not cleared in between."""

    exact = (1,)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


@case
class Accumulation(Smooth):
    settings = dict(accumulate_grad_batches=3)
    exact = (1,)


@case
class AccumulatedBuffers(Case):
    """Buffers that enter the loss, and differ between the ranks' micro-batches."""

    settings = dict(accumulate_grad_batches=2)
    exact = (1,)

    def build(self) -> None:
        self.net = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("center", torch.zeros(8))

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.norm(self.net(batch))
        if self.training:
            self.center.lerp_(hidden.detach().float().mean(0), 0.3)
        return (hidden - self.center - 1).square().mean()

    def configure_optimizers(self) -> Any:  # no Adam: the bias before the norm has no true gradient
        return torch.optim.SGD(self.parameters(), lr=0.1)
