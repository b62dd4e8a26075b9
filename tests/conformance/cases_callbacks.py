"""Stock callbacks and metrics."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning as L
import torch
import torchmetrics
from harness import WIDTH, Case, case
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn

LOGGER = CSVLogger(tempfile.gettempdir(), name="lightning_zero_test")


class Smooth(Case):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4))


@case
class MovingAverage(Case):
    def callbacks(self) -> list[L.Callback]:
        class Ema(WeightAveraging):
            def __init__(self) -> None:
                super().__init__(avg_fn=get_ema_avg_fn(0.9))

        self.ema = Ema()
        return [self.ema]

    validates = True


@case
class HandMadeEma(Case):
    """As people write it: a deep copy whose parameters follow those of the module."""

    def on_train_start(self) -> None:
        import copy

        self.shadow = [copy.deepcopy(self.net).requires_grad_(False)]

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.shadow[0].parameters(), self.net.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
                self.seen.append(slow.clone())


@case
class Swa(Smooth):
    settings = dict(max_epochs=4)
    exact = (1, 2, 3)

    def callbacks(self) -> list[L.Callback]:
        return [StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2, annealing_epochs=1)]


@case
class AccumulationSchedule(Smooth):
    settings = dict(max_epochs=3)
    exact = (1,)

    def callbacks(self) -> list[L.Callback]:
        return [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})]


@case
class Finetuning(Case):
    """The backbone is frozen at set-up, so ddp never averages it: one rank's data is compared."""

    settings = dict(max_epochs=3, use_distributed_sampler=False)

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.head = nn.Linear(16, 2)

    def loss(self, batch: Tensor) -> Tensor:
        return self.head(self.backbone(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def callbacks(self) -> list[L.Callback]:
        return [BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)]


@case
class Summary(Case):
    def callbacks(self) -> list[L.Callback]:
        case = self

        class Look(ModelSummary):
            def summarize(self, summary_data: Any, *args: Any, **kwargs: Any) -> None:
                case.seen += [str(row) for row in summary_data]
                case.seen.append(args[0])

        return [Look(max_depth=3)]


@case
class RateMonitor(Case):
    settings = dict(
        logger=CSVLogger(tempfile.gettempdir(), name="lightning_zero_test"), log_every_n_steps=1
    )

    def callbacks(self) -> list[L.Callback]:
        self.monitor = LearningRateMonitor(logging_interval="step")
        return [self.monitor]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}
        ]

    def on_train_end(self) -> None:
        self.seen += [str(self.monitor.lrs), self.monitor.last_momentum_values]


@case
class StopsEarly(Case):
    settings = dict(max_epochs=6, num_sanity_val_steps=0)
    validates = True

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("stop_on", self.loss(batch), on_epoch=True, sync_dist=True)

    def callbacks(self) -> list[L.Callback]:
        return [EarlyStopping("stop_on", 0.2, 1, check_on_train_epoch_end=False)]

    def on_train_end(self) -> None:
        self.seen.append(self.trainer.current_epoch)


@case
class Metrics(Case):
    validates = True
    settings = dict(max_epochs=2)

    def build(self) -> None:
        super().build()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4)
        self.average = torchmetrics.MeanMetric()

    def loss(self, batch: Tensor) -> Tensor:
        out = self.net(batch)
        target = (batch[:, 0] > 0).long()
        self.accuracy(out, target)
        loss = nn.functional.cross_entropy(out, target)
        self.log("accuracy", self.accuracy, on_epoch=True)
        if self.training:
            self.average.update(loss.detach())
            self.log("average", self.average, on_step=False, on_epoch=True)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.accuracy.compute().item())

    def on_train_end(self) -> None:
        self.seen += [(k, v.item()) for k, v in sorted(self.trainer.callback_metrics.items())]


@case
class RateFinder(Smooth):
    """Saves, trains, and restores in the middle of a run."""

    lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def callbacks(self) -> list[L.Callback]:
        return [LearningRateFinder(num_training_steps=4, early_stop_threshold=None)]

    def on_train_end(self) -> None:
        self.seen.append(self.lr)


@case
class Monitors(Case):
    settings = dict(
        logger=CSVLogger(tempfile.gettempdir(), name="lightning_zero_test"), log_every_n_steps=1
    )

    def callbacks(self) -> list[L.Callback]:
        return [DeviceStatsMonitor(), ThroughputMonitor(batch_size_fn=len, window_size=4)]
