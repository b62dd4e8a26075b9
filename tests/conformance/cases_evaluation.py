"""Evaluation between and after training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from harness import WIDTH, Case, Rows, case
from torch import Tensor, nn
from torch.utils.data import DataLoader


@case
class TwoLoadersAndASanityCheck(Case):
    validates = True
    settings = dict(max_epochs=2, num_sanity_val_steps=2, val_check_interval=2)

    def val_loaders(self) -> Any:
        return [DataLoader(Rows(8), batch_size=4), DataLoader(Rows(12), batch_size=4)]


@case
class WeightsReadInValidation(Case):
    validates = True
    settings = dict(max_epochs=2)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen += [p.norm().item() for p in self.net.parameters()]
        h = F.linear(batch, self.net[0].weight)
        self.seen.append(h.mean().item())


@case
class InferenceMode(Case):
    """gloo evaluates under no_grad; NCCL under inference_mode, which is entered here by hand."""

    validates = True
    settings = dict(max_epochs=3, val_check_interval=2)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.inference_mode():
            self.seen.append(self.loss(batch).item())
            self.seen.append(self.net[0].weight.sum().item())


@case
class EvaluationModelledByHand(Case):
    """A training step that evaluates in the middle, and calls a method other than forward."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.eval()
        with torch.no_grad():
            self.seen.append(self.net(batch).mean().item())
        self.train()
        with torch.inference_mode():
            self.seen.append(self.net(batch).mean().item())
        return super().training_step(batch, batch_idx)


@case
class Generation(Case):
    """Every rank evaluates for as long as it likes: the weights are whole meanwhile."""

    validates = True
    settings = dict(max_epochs=2)
    strategy = dict(eval_weights="gathered")

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for _ in range(2 + 3 * self.global_rank):
            batch = self.net(batch)
        self.seen.append(batch.sum().item())
