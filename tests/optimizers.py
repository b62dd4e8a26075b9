"""Optimizers that look at more than one element at a time, for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim


class PerParameter(optim.Optimizer):
    """Updates one parameter after the other."""

    def __init__(self, params: Any, lr: float = 1e-2, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)
        return loss

    def update(
        self, param: nn.Parameter, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update one parameter in place."""
        raise NotImplementedError


class Lamb(PerParameter):
    """Adam whose step is as long as the parameter's norm."""

    def update(
        self, param: nn.Parameter, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state |= {"step": 0, "mean": torch.zeros_like(param), "square": torch.zeros_like(param)}
        state["step"] += 1
        state["mean"].lerp_(grad, 0.1)
        state["square"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        update = state["mean"] / (state["square"].sqrt() + 1e-6) + 0.01 * param
        long, short = param.norm(), update.norm()
        ratio = torch.where((long > 0) & (short > 0), long / short, torch.ones_like(long))
        param.sub_(group["lr"] * ratio * update)


class Shampoo(PerParameter):
    """One preconditioner per dimension, in a list; their inverse roots are renewed now and then.

    Its state has tensors of other shapes than the parameter's, numbers, lists and None, and it puts
    a new tensor into the parameter instead of writing to the old one.
    """

    def update(
        self, param: nn.Parameter, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            sides = [torch.eye(size, dtype=param.dtype) * 1e-3 for size in param.shape]
            state |= {"step": 0, "sides": sides, "roots": [None] * len(sides), "extra": None}
        update = grad.clone()
        for dim in range(param.dim()):
            size = param.shape[dim]
            rows = grad.transpose(0, dim).reshape(size, grad.numel() // max(size, 1))
            state["sides"][dim] += rows @ rows.t()
            if state["step"] % 2 == 0:
                values, vectors = torch.linalg.eigh(state["sides"][dim])
                powers = values.clamp(min=1e-8) ** (-0.5 / max(param.dim(), 1))
                state["roots"][dim] = vectors * powers @ vectors.t()
            update = torch.tensordot(update, state["roots"][dim], dims=([0], [0]))
        state["step"] += 1
        param.data = param.data - group["lr"] * update


class MuonAndAdam(PerParameter):
    """Orthogonal updates for the groups that say so and Adam for the others."""

    def update(
        self, param: nn.Parameter, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        mean = state.setdefault("mean", torch.zeros_like(param)).lerp_(grad, 0.1)
        if group["orthogonal"]:
            left, _, right = torch.linalg.svd(mean, full_matrices=False)
            param.sub_(group["lr"] * (left @ right))
        else:
            square = state.setdefault("square", torch.zeros_like(param))
            square.mul_(0.99).addcmul_(grad, grad, value=0.01)
            param.sub_(group["lr"] * mean / (square.sqrt() + 1e-6))


class Remembering(PerParameter):
    """Makes its state before the first step, and an empty one for what has no gradient."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["largest"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]
        return super().step(closure)

    def update(
        self, param: nn.Parameter, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        state["largest"].copy_(torch.maximum(state["largest"], grad.abs().sum()))
        param.sub_(group["lr"] * grad / (state["largest"] + 1e-6))


class Clipping(PerParameter):
    """Divides all gradients by their common norm if that is above 1."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.norm = torch.cat([grad.flatten() for grad in grads]).norm().clamp(min=1.0)
        return super().step(closure)

    def update(
        self, param: nn.Parameter, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        param.sub_(group["lr"] * grad / self.norm)


class Trusting(optim.Optimizer):
    """Takes for granted that there are gradients, and divides them by their norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / (param.grad.norm() + 1e-6), alpha=group["lr"])
        return loss


class Noisy(PerParameter):
    """Adds noise, from the generators that everybody uses."""

    def update(
        self, param: nn.Parameter, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        param.sub_(group["lr"] * grad.norm() * torch.randn_like(param))


class Greedy(PerParameter):
    """Needs its closure, which it calls twice."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


class Stubborn(Lamb):
    """Raises in the middle of its second step, once."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.steps += 1
        if self.steps == 2:
            raise KeyError("the optimizer's own mistake")
        return super().step(closure)


class Nested(Lamb):
    """Does something around its parent's step, which has hooks of its own."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1 - 0.1 * group["lr"])
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.clamp_(-2, 2)
        return loss


class ScheduleFree(PerParameter):
    """Swaps its parameters between training and evaluation."""

    def train(self) -> None:
        """Begin training."""

    def eval(self) -> None:
        """Begin evaluation."""


def torch_muon(params: Iterable[nn.Parameter], **settings: Any) -> optim.Optimizer:
    """Make torch's Muon over the matrices among ``params``."""
    return optim.Muon([param for param in params if param.dim() == 2], **settings)
