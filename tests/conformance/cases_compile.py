"""Compiled submodules and compiled LightningModules. The backend does not matter to the engine."""

from __future__ import annotations

import torch
from harness import WIDTH, Case, case
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 32),
            nn.Linear(32, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(Case):
    strategy = dict(auto_wrap_policy=["Block"])

    def build(self) -> None:
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)

    def loss(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.append(loss.detach())
        return loss


@case
class CompiledInPlace(Stack):
    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.compile(backend="aot_eager")


@case
class CompiledWrapped(Stack):
    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(
            [torch.compile(block, backend="aot_eager") for block in self.blocks]
        )


@case
class CompiledWhole(Stack):
    compiles = True
