"""Shapes of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from harness import WIDTH, Case, case
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Experts(Case):
    def build(self) -> None:
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.unused = nn.Linear(WIDTH, 2)
        self.head = nn.Linear(WIDTH, 1)


@case
class UnusedLayers(Experts):
    def loss(self, batch: Tensor) -> Tensor:
        return self.head(self.experts[1](batch)).square().mean()

    def on_after_backward(self) -> None:
        self.seen += [p.grad is None for p in self.parameters()]


@case
class RoutedInsideABlock(Experts):
    strategy = dict(auto_wrap_policy="auto")

    def loss(self, batch: Tensor) -> Tensor:
        choice = self.gate(batch).argmax(-1)
        out = torch.zeros_like(batch)
        for index, expert in enumerate(self.experts):
            mask = choice == index
            if mask.any():
                out[mask] = expert(batch[mask]).to(out.dtype)
        return self.head(out).square().mean()


@case
class RanksUseDifferentLayers(Experts):
    strategy = dict(auto_wrap_policy="auto")

    def loss(self, batch: Tensor) -> Tensor:
        return self.head(self.experts[self.global_rank](batch)).square().mean()

    def on_after_backward(self) -> None:
        self.seen += [p.grad is None for p in self.parameters()]


@case
class CalledSeveralTimes(Case):
    def build(self) -> None:
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Tensor) -> Tensor:
        h = self.other(self.shared(self.shared(batch).tanh()).tanh())
        return self.shared(h).square().mean()


@case
class AuxiliaryLoss(Case):
    def loss(self, batch: Tensor) -> Tensor:
        self.auxiliary = self.net[0](batch).abs().mean()
        return super().loss(batch) + self.auxiliary


@dataclass
class Output:
    value: Tensor
    extra: dict[str, list[Tensor]]


class Dressed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Output:
        h = self.a(x)
        return Output(self.b(h), {"h": [h, h + 1]})


@case
class DressedOutputs(Case):
    def build(self) -> None:
        self.net = Dressed()
        self.tail = nn.Linear(WIDTH, 1)

    def loss(self, batch: Tensor) -> Tensor:
        out = self.net(batch)
        view = out.extra["h"][1][:, :4]
        view.add_(out.value)
        return self.tail(out.extra["h"][1]).square().mean() + out.extra["h"][0].mean()


class Checkpointed(Case):
    reentrant = False

    def build(self) -> None:
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, WIDTH))] * 1
            + [nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in "ab"]
        )

    def loss(self, batch: Tensor) -> Tensor:
        h = self.inlet(batch)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return h.square().mean()


@case
class CheckpointedPlainly(Checkpointed):
    pass


@case
class CheckpointedReentrant(Checkpointed):
    reentrant = True
    finds_unused = False


@case
class FrozenBaseWithAdapters(Checkpointed):
    def build(self) -> None:
        super().build()
        for p in self.blocks.parameters():
            p.requires_grad_(False)
        self.adapters = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def loss(self, batch: Tensor) -> Tensor:
        h = self.inlet(batch)
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            h = checkpoint(lambda x, b=block, a=adapter: b(x) + a(x), h, use_reentrant=False)
        return h.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@case
class UnfrozenInMidRun(Case):
    """ddp averages what was trainable at its set-up, so freezing starts after that."""

    def on_train_start(self) -> None:
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net[0].requires_grad_(True)
            self.net[3].requires_grad_(False)


@case
class AddedParamGroup(Case):
    def on_train_start(self) -> None:
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net[3].parameters(), lr=1e-2)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net[0].requires_grad_(True)
            optimizer = self.optimizers().optimizer
            optimizer.add_param_group({"params": list(self.net[0].parameters()), "lr": 1e-3})


@case
class Convolutional(Case):
    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        ).to(memory_format=torch.channels_last)  # fmt: skip

    def loss(self, batch: Tensor) -> Tensor:
        image = batch.view(-1, 1, 3, 4).to(memory_format=torch.channels_last)
        return self.net(image).square().mean()


@case
class OddShapes(Case):
    def build(self) -> None:
        super().build()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.whole = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("big", torch.tensor(2**40 + 1))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("wide", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("local", torch.zeros(2), persistent=False)

    def loss(self, batch: Tensor) -> Tensor:
        self.big += 1
        return super().loss(batch) * self.scalar + self.single.sum() * self.whole.sum()

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.net.parameters())}, {"params": []}]
        own = {"params": [self.scalar, self.single, self.empty], "lr": 1e-3}
        return torch.optim.SGD([*groups, own], lr=1e-2, momentum=0.9)


@case
class SparseEmbedding(Case):
    """ddp keeps these gradients sparse; plain SGD makes the same of them."""

    def build(self) -> None:
        self.emb = nn.Embedding(40, 6, sparse=True)
        self.head = nn.Linear(6, 2)

    def loss(self, batch: Tensor) -> Tensor:
        return self.head(self.emb((batch.abs() * 10).long().clamp(max=39))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
