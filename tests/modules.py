"""Small LightningModules for the tests that go through the Trainer, and how they are run.

Every model is made from torch's seeded generator and every dataset from a seed of its own. The
Trainer's DistributedSampler deals the samples out, so no two ranks ever see the same batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric

import lightning_zero

STAGES = ("zero1", "zero2", "zero3")
"""The names that every claim about numbers is checked under."""

VOCABULARY = 31
LENGTH = 6
FEATURES = 5
CLASSES = 3


class Supervised(L.LightningModule):
    """What the models below share: the loss, the logs and the optimizers.

    Args:
        optimizer: Name of the class in ``torch.optim``.
        groups: Whether parameters of fewer than two dimensions form a param group of their own.
        schedule: Whether one learning-rate scheduler steps per step and another per epoch.
        **settings: Of the optimizer.

    Attributes:
        losses: The training loss of every batch that this rank has seen.
        rates: The learning rates of every step, one per param group.
    """

    def __init__(
        self,
        optimizer: str = "AdamW",
        groups: bool = False,
        schedule: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer = optimizer
        self.groups = groups
        self.schedule = schedule
        self.settings = {"lr": 1e-2, **settings}
        self.losses: list[float] = []
        self.rates: list[list[float]] = []
        self.mean = MeanMetric()

    def loss(self, batch: Any) -> Tensor:
        """Compute the loss of a batch of inputs and targets."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, -2), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.mean(loss)
        self.log("metric", self.mean)
        self.log("val", loss, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        params: Any = list(self.parameters())
        if self.groups:
            matrices = [param for param in params if param.ndim > 1]
            rest = [param for param in params if param.ndim <= 1]
            params = [{"params": rest, "weight_decay": 0.0, "lr": 3e-3}, {"params": matrices}]
        optimizer = getattr(torch.optim, self.optimizer)(params, **self.settings)
        if not self.schedule:
            return optimizer
        each_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        each_epoch = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [
            {"scheduler": each_step, "interval": "step"},
            {"scheduler": each_epoch, "interval": "epoch"},
        ]


class Perceptron(Supervised):
    """Batch norm, and sizes that no number of ranks divides, down to a single element."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.enter = nn.Linear(FEATURES, 13)
        self.norm = nn.BatchNorm1d(13)
        self.hidden = nn.Sequential(nn.Linear(13, 11), nn.GELU(), nn.Linear(11, 13))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.leave = nn.Linear(13, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.enter(inputs)))
        hidden = hidden + self.hidden(hidden) * self.scale + self.shift
        return self.leave(hidden)


class Block(nn.Module):
    """A transformer block with causal attention and dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.mix(self.norms[0](hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(attended.transpose(1, 2).flatten(2))
        return hidden + self.perceptron(self.norms[1](hidden))


class Transformer(Supervised):
    """Blocks that are units of their own at stage 3, a head tied to the embedding, dropout."""

    def __init__(self, width: int = 48, dropout: float = 0.1, **settings: Any) -> None:
        super().__init__(**settings)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) / 10)
        self.blocks = nn.ModuleList(self.block(width, dropout) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    @staticmethod
    def block(width: int, dropout: float) -> nn.Module:
        """Make one of the repeated blocks."""
        return Block(width, dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def samples(model: L.LightningModule, count: int, seed: int = 0) -> Dataset[Any]:
    """Make inputs and targets for a model of this file."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Transformer):
        tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])
    inputs = torch.randn(count, FEATURES, generator=generator)
    targets = torch.randint(CLASSES, (count,), generator=generator)
    dtype = torch.get_default_dtype()
    return TensorDataset(inputs.to(dtype), targets)


def batches(
    model: L.LightningModule, count: int, seed: int = 0, shuffle: bool = False
) -> DataLoader[Any]:
    """Make a loader of ``count`` samples in batches of three."""
    return DataLoader(samples(model, count, seed), batch_size=3, shuffle=shuffle)


def strategy(name: str) -> str | Strategy:
    """Turn a name of these tests into what ``Trainer(strategy=...)`` takes.

    Args:
        name: A registered name, perhaps with a setting behind it: ``zero3 layers`` makes every
            layer a unit, ``zero1 small`` puts every parameter into a bucket of its own.
    """
    stage, _, setting = name.partition(" ")
    if not setting:
        return name
    settings: dict[str, dict[str, Any]] = {
        "layers": {"auto_wrap_policy": "layers"},
        "small": {"bucket_mb": 1e-6},
    }
    return lightning_zero.ZeroStrategy(stage=int(stage[-1]), **settings[setting])


def quiet_trainer(name: str | Strategy, world_size: int, **settings: Any) -> L.Trainer:
    """Make a Trainer on the CPU that shows and writes nothing unless it is told to."""
    quiet: dict[str, Any] = dict(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )
    return L.Trainer(
        strategy=strategy(name) if isinstance(name, str) else name,
        devices=world_size,
        **{**quiet, **settings},
    )


@dataclass
class Outcome:
    """What one rank can tell of a run.

    Attributes:
        state: The module's state dict after it, buffers included.
        losses: Training losses of this rank, batch by batch.
        rates: Learning rates, step by step.
        metrics: Everything that was logged.
    """

    state: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)


def outcome(model: L.LightningModule, trainer: L.Trainer) -> Outcome:
    """Collect what a run has left, in copies of its own."""
    return Outcome(
        state={name: value.detach().clone() for name, value in model.state_dict().items()},
        losses=list(getattr(model, "losses", [])),
        rates=list(getattr(model, "rates", [])),
        metrics={name: value.clone() for name, value in trainer.callback_metrics.items()},
    )


def checksum_of(module: nn.Module) -> str:
    """Digest the bits of all weights and buffers."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def train_briefly(name: str) -> tuple[int, str]:
    """Take three steps at two ranks; return this process's rank and the checksum after them."""
    torch.manual_seed(7)
    model = Perceptron(optimizer="SGD", momentum=0.9)
    trainer = quiet_trainer(name, 2, max_steps=3)
    trainer.fit(model, batches(model, 24))
    return trainer.global_rank, checksum_of(model)


def assert_same_tensors(
    actual: dict[str, Tensor], expected: dict[str, Tensor], exact: bool = True
) -> None:
    """Assert equal names, shapes, dtypes and values of two dicts of tensors.

    Args:
        actual: What came.
        expected: What should have come.
        exact: Whether to compare bit by bit; otherwise up to rounding.
    """
    assert list(actual) == list(expected)
    for name, value in expected.items():
        tolerance: dict[str, float] = dict(rtol=0, atol=0) if exact else {}
        torch.testing.assert_close(
            actual[name],
            value,
            equal_nan=False,
            msg=lambda text, name=name: f"{name}: {text}",
            **tolerance,
        )


def assert_same_outcomes(
    actual: list[Outcome], expected: list[Outcome], exact: bool = True
) -> None:
    """Assert, rank by rank, that two runs went and ended alike."""
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.rates == theirs.rates
        losses = {"losses": torch.tensor(ours.losses)}
        assert_same_tensors(losses, {"losses": torch.tensor(theirs.losses)}, exact)
        assert_same_tensors(ours.metrics, theirs.metrics, exact)
        assert_same_tensors(ours.state, theirs.state, exact)


def assert_data_differs(outcomes: list[Outcome]) -> None:
    """Assert that no two ranks saw the same losses, which equal data would give."""
    seen = [tuple(run.losses) for run in outcomes]
    assert all(seen)
    assert len(set(seen)) == len(seen)
