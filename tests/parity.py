"""Models and one training loop, run by DDP and by the engine alike, for tests that compare bits.

Every model here is a module whose forward takes a batch and returns the loss, and whose ``batch``
draws one from a generator. No two ranks ever see the same batch, and no two ranks build the same
initial weights: rank 0's have to replace the others', as they do under DDP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from lightning_zero.engine.engine import ZeroEngine

Mode = Literal["ddp", 1, 2, 3]
"""Who trains: DDP, or the engine at a stage."""

# --- Models ---


class Model(nn.Module):
    """A module that knows its own batches and its own loss."""

    def batch(self, generator: torch.Generator) -> Tensor:
        """Draw one batch."""
        return torch.randn(3, 5, generator=generator)

    def forward(self, batch: Tensor) -> Tensor:
        """Compute the loss of a batch."""
        raise NotImplementedError


class Odd(Model):
    """Sizes that no number of ranks divides, and the shapes ``()``, ``(1,)`` and ``(0, 4)``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first = nn.Linear(5, 7)
        self.shift = nn.Parameter(torch.randn(1))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.second = nn.Linear(7, 3)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(batch.to(self.scale.dtype))) * self.scale
        return (self.second(hidden) + self.shift).square().mean() + self.nothing.sum()


class Tiny(Model):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.randn(2))
        self.offset = nn.Parameter(torch.randn(1))

    def forward(self, batch: Tensor) -> Tensor:
        batch = batch.to(self.slope.dtype)
        return (batch[:, :2] * self.slope + self.offset - batch[:, 2:4]).square().mean()


class Tied(Model):
    """One weight, big enough for a unit of its own, read by the first and by the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2048, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2048, bias=False)
        self.head.weight = self.embedding.weight

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randint(2048, (2, 4), generator=generator)

    def forward(self, batch: Tensor) -> Tensor:
        logits = self.head(torch.relu(self.middle(self.embedding(batch))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


class Recurrent(Model):
    """An LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 2)

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(2, 4, 5, generator=generator)

    def forward(self, batch: Tensor) -> Tensor:
        hidden, _ = self.lstm(batch)
        return self.head(hidden).square().mean()


class Attentive(Model):
    """Self-attention, whose ``out_proj`` is never called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(2, 4, 8, generator=generator)

    def forward(self, batch: Tensor) -> Tensor:
        hidden, _ = self.attention(batch, batch, batch)
        return self.head(hidden).square().mean()


class Reparametrized(Model):
    """A weight that is computed from two parameters each time it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Linear(5, 6))
        self.second = weight_norm(nn.Linear(6, 2))

    def forward(self, batch: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(batch))).square().mean()


class Normalized(Model):
    """BatchNorm: statistics in buffers, which rank 0 decides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 2)
        with torch.no_grad():  # as other ranks would have it, had they loaded something else
            self.norm.running_mean.copy_(torch.randn(6))

    def forward(self, batch: Tensor) -> Tensor:
        return self.second(self.norm(self.first(batch))).square().mean()


class Convolutional(Model):
    """Convolution weights that lie in memory as channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)
        self.second = nn.Conv2d(5, 2, 2)
        self.to(memory_format=torch.channels_last)

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(2, 3, 6, 6, generator=generator)

    def forward(self, batch: Tensor) -> Tensor:
        batch = batch.to(memory_format=torch.channels_last)
        return self.second(torch.relu(self.first(batch))).square().mean()


class Functional(Model):
    """Weights that are read outside the forward pass of the module that holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 5)
        self.third = nn.Linear(5, 6)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = F.linear(batch, self.first.weight, self.second.weight.mean(1).repeat(2)[:6])
        hidden = hidden @ self.first.weight + self.second(hidden)
        penalty = sum((param.abs().sum() for param in self.parameters()), torch.zeros(()))
        joined = torch.stack([self.first.weight, self.second.weight.t(), self.third.weight])
        return hidden.square().mean() + 1e-3 * penalty + 1e-2 * joined.std()


class Looped(Model):
    """Layers that run several times in one forward pass, and in another order each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.passes = 0

    def forward(self, batch: Tensor) -> Tensor:
        orders = ((0, 1, 0, 2, 1, 3), (3, 2, 1, 0), (0, 0, 0, 1, 2, 3), (3, 2, 1, 0))
        self.passes += 1
        for number in orders[self.passes % len(orders)]:
            batch = torch.tanh(self.layers[number](batch))
        return batch.square().mean()


class Mixed(Model):
    """Parameters of several dtypes in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 6).bfloat16()
        self.third = nn.Linear(6, 2).double()
        self.third.phase = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(batch)).bfloat16())
        return (self.third(hidden.double()) * self.third.phase).abs().square().mean()


class Frozen(Model):
    """A layer in the middle that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.second = nn.Linear(6, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return self.second(torch.tanh(self.frozen(self.first(batch)))).square().mean()


class Unused(Model):
    """A layer that no rank ever calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.unused = nn.Linear(6, 6)
        self.second = nn.Linear(6, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(batch))).square().mean()


class Diverse(Model):
    """Small layers of which each rank calls another; one of them is called by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 2) for _ in range(5)])

    def forward(self, batch: Tensor) -> Tensor:
        branch = self.branches[dist.get_rank() if dist.is_initialized() else 0]
        return branch(torch.tanh(self.first(batch))).square().mean()


class Blocks(Model):
    """A small transformer that the automatic policy divides into several units."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 40)
        self.position = nn.Parameter(torch.randn(4, 40))
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(40, 2, 160, 0.0, batch_first=True) for _ in range(3)]
        )
        self.norm = nn.LayerNorm(40)
        self.head = nn.Linear(40, 512, bias=False)

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randint(512, (2, 4), generator=generator)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.embedding(batch) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


class Bank(Model):
    """Models side by side, so that one run trains each with an optimizer of its own.

    Args:
        build: Makes one model.
        names: One per model.
    """

    def __init__(self, build: Callable[[], Model], names: Iterable[str]) -> None:
        super().__init__()
        self.models = nn.ModuleDict({name: build() for name in names})

    def batch(self, generator: torch.Generator) -> Tensor:
        first: Model = next(iter(self.models.values()))  # type: ignore[assignment]
        return first.batch(generator)

    def forward(self, batch: Tensor) -> Tensor:
        return torch.stack([model(batch) for model in self.models.values()]).sum()


# --- Training ---


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to make an optimizer.

    Attributes:
        optimizer: Its class.
        options: Its arguments.
    """

    optimizer: type[optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, params: Iterable[nn.Parameter]) -> optim.Optimizer:
        """Make it over two param groups, matrices and the rest, with two learning rates."""
        params = list(params)
        matrices = [param for param in params if param.ndim >= 2]
        rest = [param for param in params if param.ndim < 2]
        first = {"params": matrices}
        second = {"params": rest, "lr": self.options.get("lr", 1e-2) / 2}
        groups = [group for group in (first, second) if group["params"]]
        return self.optimizer(groups, **self.options)

    def schedule(self, optimizer: optim.Optimizer) -> optim.lr_scheduler.LRScheduler:
        """Make a scheduler that changes the two learning rates differently."""
        factors = [lambda step: 0.9**step, lambda step: 1 / (1 + step)]
        factors = factors[: len(optimizer.param_groups)]
        return optim.lr_scheduler.LambdaLR(optimizer, factors)


ADAMW = Recipe(optimizer=optim.AdamW, options={"lr": 1e-2, "weight_decay": 0.1})


@dataclass(frozen=True, kw_only=True)
class Training:
    """What to train and how, whoever does it.

    Attributes:
        build: Makes the model.
        recipes: The optimizers. The keys of several are those of a `Bank`.
        dtype: What the model is converted to, if that is not what it is built in.
        windows: How many micro-batches each optimizer step takes.
        unused: Whether DDP has to look for parameters without gradient.
        seed: Of weights and batches.
    """

    build: Callable[[], Model]
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: {"": ADAMW})
    dtype: torch.dtype = torch.float32
    windows: Sequence[int] = (1,) * 20
    unused: bool = False
    seed: int = 0

    def model(self, rank: int) -> Model:
        """Build the model as a rank has it before rank 0's weights replace its own."""
        torch.manual_seed(self.seed + 100 * rank)
        model = self.build()
        return model if self.dtype is torch.float32 else model.to(self.dtype)

    def batch(self, model: Model, rank: int, number: int) -> Tensor:
        """Draw the batch that a rank sees as its ``number``-th."""
        generator = torch.Generator().manual_seed(self.seed + 1000 * (number + 1) + rank)
        return model.batch(generator)

    def optimizers(self, model: nn.Module) -> list[optim.Optimizer]:
        """Make the optimizers over a model."""
        parts = model.models if isinstance(model, Bank) else {"": model}
        assert parts.keys() == self.recipes.keys()
        return [recipe.build(parts[name].parameters()) for name, recipe in self.recipes.items()]

    def schedules(
        self, optimizers: Sequence[optim.Optimizer]
    ) -> list[optim.lr_scheduler.LRScheduler]:
        """Make the schedulers of the optimizers."""
        recipes = self.recipes.values()
        return [recipe.schedule(opt) for recipe, opt in zip(recipes, optimizers, strict=True)]


@dataclass(frozen=True)
class Trained:
    """What came of a training on one rank.

    Attributes:
        weights: The parameters by name.
        buffers: The buffers by name.
        losses: Those of the micro-batches of this rank.
        without_grad: Names of the parameters whose gradient was None before the last step.
    """

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: Tensor
    without_grad: list[str]


def train(
    rank: int, world_size: int, mode: Mode, training: Training, **engine_options: Any
) -> Trained:
    """Train under DDP or under the engine; everything else is the same for both.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        mode: Who trains.
        training: What to train and how.
        **engine_options: Arguments of `ZeroEngine`.
    """
    model = training.model(rank)
    names = {id(param): name for name, param in model.named_parameters()}
    if mode == "ddp":
        side: _Side = _DdpSide(model, training.unused, world_size)
    else:
        side = _EngineSide(model, mode, engine_options)
    optimizers = training.optimizers(model)
    side.attach(optimizers)
    schedules = training.schedules(optimizers)
    losses: list[Tensor] = []
    for window in training.windows:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(window):
            with contextlib.nullcontext() if micro == window - 1 else side.no_sync():
                batch = training.batch(model, rank, len(losses))
                loss = side.loss(batch)
                (loss / window).backward()
                losses.append(loss.detach())
        missing = [names[id(param)] for param in model.parameters() if param.grad is None]
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    side.end()
    return Trained(
        weights={name: param.detach().clone() for name, param in model.named_parameters()},
        buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
        losses=torch.stack(losses),
        without_grad=missing,
    )


class _Side:
    """What differs between DDP and the engine."""

    def attach(self, optimizers: Sequence[optim.Optimizer]) -> None:
        """Show the optimizers to whoever trains."""

    def loss(self, batch: Tensor) -> Tensor:
        """Run the forward pass."""
        raise NotImplementedError

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Surround a micro-batch that is not the last of its window."""
        raise NotImplementedError

    def end(self) -> None:
        """Give the module back."""


class _DdpSide(_Side):
    def __init__(self, model: nn.Module, unused: bool, world_size: int) -> None:
        self._model = model
        if dist.is_initialized():
            self._model = DistributedDataParallel(model, find_unused_parameters=unused)

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self._model(batch)
        return loss

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        if isinstance(self._model, DistributedDataParallel):
            context: contextlib.AbstractContextManager[None] = self._model.no_sync()
            return context
        return contextlib.nullcontext()


class _EngineSide(_Side):
    def __init__(self, model: nn.Module, stage: int, options: Mapping[str, Any]) -> None:
        self._model = model
        self._engine = ZeroEngine(model, stage=stage, **{"stall_timeout": 20.0, **options})

    def attach(self, optimizers: Sequence[optim.Optimizer]) -> None:
        for optimizer in optimizers:
            self._engine.attach(optimizer)

    def loss(self, batch: Tensor) -> Tensor:
        with self._engine.forward():
            loss: Tensor = self._model(batch)
        return loss

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._engine.no_sync()

    def end(self) -> None:
        self._engine.restore()
        self._engine.close()


# --- Ways to talk ---

TRANSPORTS = ("as found", "sockets")
"""What ranks of one host may exchange through: what the engine finds best, or gloo's sockets."""


def talk_over(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks of a test, which are forked later, talk over a transport."""
    if transport == "sockets":
        monkeypatch.setattr("lightning_zero.engine.transport.find_peers", lambda group: None)


# --- Comparing ---


def assert_same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], what: str) -> None:
    """Assert that two sets of tensors agree in names, shapes, dtypes and every bit."""
    assert ours.keys() == theirs.keys(), what
    assert ours, f"{what}: nothing to compare"
    different = {}
    for name, mine in ours.items():
        other = theirs[name]
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype), f"{what}: {name}"
        if not torch.equal(_bits(mine), _bits(other)):
            different[name] = (mine - other).abs().max().item()
    assert not different, f"{what}: largest differences {different}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
