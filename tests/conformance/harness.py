"""Runs one LightningModule under ddp and under every stage and compares everything that it did."""

from __future__ import annotations

import contextlib
import logging
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_zero
from ranks import run_ranks

WIDTH = 12


class Rows(Dataset[Tensor]):
    """Random rows; the distributed sampler gives every rank others."""

    def __init__(self, length: int = 32, width: int = WIDTH) -> None:
        self.rows = torch.randn(length, width, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Case(L.LightningModule):
    """A behaviour under test: subclasses say what differs from the plainest training.

    Attributes:
        settings: Arguments for the Trainer.
        exact: Stages whose weights must equal ddp's to the bit at two ranks.
        validates: Whether to run a validation loop.
        strategy: Arguments for ZeroStrategy.
        finds_unused: Whether ddp must look for unused parameters.
        compiles: Whether the whole LightningModule is compiled.
        batches: Batches per rank.
    """

    settings: dict[str, Any] = {}
    exact: tuple[int, ...] = (1, 2, 3)
    validates = False
    strategy: dict[str, Any] = {}
    finds_unused = True
    compiles = False
    batches = 4

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.seen: list[Any] = []  # whatever else must be equal
        self.build()

    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
        )

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), sync_dist=True)
        self.seen.append(self.loss(batch).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def callbacks(self) -> list[L.Callback]:
        """Make callbacks for the Trainer."""
        return []

    def val_loaders(self) -> Any:
        return DataLoader(Rows(16), batch_size=4) if self.validates else None


@dataclass
class Outcome:
    """What a run left behind on one rank."""

    weights: dict[str, Tensor]
    losses: list[float]
    seen: list[Any]
    error: str | None = None


def _run(case: type[Case], strategy: Any, world_size: int, precision: Any) -> Outcome:
    L.seed_everything(1, verbose=False)
    module = case()
    settings: dict[str, Any] = dict(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        limit_train_batches=case.batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=module.callbacks(),
    )
    trainer = L.Trainer(**{**settings, **case.settings})
    loader = DataLoader(Rows(), batch_size=4)
    fitted = torch.compile(module, backend="aot_eager") if case.compiles else module
    trainer.fit(fitted, loader, module.val_loaders())
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return Outcome(weights, module.losses, module.seen)


def _ranks(rank: int, world_size: int, case: type[Case], precision: Any) -> dict[str, Outcome]:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    ddp = DDPStrategy(find_unused_parameters=case.finds_unused)
    outcomes = {"ddp": _run(case, ddp, world_size, precision)}
    for stage in (1, 2, 3):
        strategy = lightning_zero.ZeroStrategy(
            stage=stage, stall_timeout=20, **{"auto_wrap_policy": "layers", **case.strategy}
        )
        try:
            outcomes[f"zero{stage}"] = _run(case, strategy, world_size, precision)
        except Exception:  # the verdict shows it
            outcomes[f"zero{stage}"] = Outcome({}, [], [], traceback.format_exc())
    return outcomes


@dataclass
class Verdict:
    """How far a stage is from ddp."""

    worst: float = 0.0
    differences: list[str] = field(default_factory=list)


def compare(
    case: type[Case], world_size: int = 2, precision: str = "32-true"
) -> dict[str, Verdict]:
    """Run a case everywhere and say where it differs from ddp."""
    everything = run_ranks(_ranks, world_size, case, precision, init=False, timeout=120)
    verdicts = {f"zero{stage}": Verdict() for stage in (1, 2, 3)}
    for rank, outcomes in enumerate(everything):
        wanted = outcomes["ddp"]
        for stage, verdict in verdicts.items():
            _compare(outcomes[stage], wanted, f"rank {rank}: ", verdict)
    return verdicts


def _compare(got: Outcome, wanted: Outcome, where: str, verdict: Verdict) -> None:
    def differ(what: str, one: Any, other: Any) -> None:
        distance = float("inf")
        with contextlib.suppress(Exception):
            one, other = torch.as_tensor(one), torch.as_tensor(other)
            if one.shape == other.shape and one.dtype == other.dtype:
                if torch.equal(one, other):
                    return
                distance = float((one.double() - other.double()).abs().max())
        if distance == float("inf") and one is other:
            return
        verdict.worst = max(verdict.worst, distance)
        verdict.differences.append(f"{where}{what} differs by {distance}")

    if got.error is not None:
        verdict.worst = float("inf")
        verdict.differences.append(where + got.error)
        return
    if list(got.weights) != list(wanted.weights):
        differ("names of state_dict", list(got.weights), list(wanted.weights))
        return
    for name, value in wanted.weights.items():
        differ(name, got.weights[name], value)
    differ("losses", got.losses, wanted.losses)
    if len(got.seen) != len(wanted.seen):
        differ("count of seen", len(got.seen), len(wanted.seen))
    for index, (one, other) in enumerate(zip(got.seen, wanted.seen, strict=False)):
        if isinstance(one, (Tensor, float, int)):
            differ(f"seen[{index}]", one, other)
        elif one != other:
            differ(f"seen[{index}] {one!r} != {other!r}", 0, 1)


CASES: dict[str, type[Case]] = {}
RESULTS: dict[str, dict[str, Verdict]] = {}
"""What has been compared at two ranks so far, for the table."""


def case(cls: type[Case]) -> type[Case]:
    """Register a case under its class name."""
    CASES[cls.__name__] = cls
    return cls
