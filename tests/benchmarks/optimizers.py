"""Prints how far each optimizer is from one process after three steps, for every stage.

Two ranks see halves of the batches that the one process sees whole.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from optimizers import Lamb, Shampoo

from lightning_zero import ZeroEngine
from ranks import run_ranks

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "LAMB-like": Lamb,
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
    "Shampoo-like": Shampoo,
}
STEPS, BATCH, WIDTH = 3, 16, 64


def model() -> nn.Module:
    torch.manual_seed(0)
    sizes = (WIDTH, 96, 80, 10)
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def train(rank: int, world_size: int, who: str | int, name: str) -> list[Tensor]:
    """Train under ``"alone"``, ``"ddp"`` or a stage; return the weights."""
    net = model()
    engine = ZeroEngine(net, stage=who, auto_wrap_policy="layers") if isinstance(who, int) else None
    run: Any = DistributedDataParallel(net) if who == "ddp" else net
    optimizer = OPTIMIZERS[name](net.parameters(), lr=1e-2)
    if engine is not None:
        engine.attach(optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, generator=generator)
        if who != "alone":
            batch = batch.chunk(world_size)[rank]
        if engine is None:
            loss = run(batch).square().mean()
        else:
            with engine.forward():
                loss = run(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if engine is not None:
        engine.restore()
    return [param.detach().clone() for param in net.parameters()]


def main() -> None:
    """Print a table in Markdown."""
    torch.set_num_threads(1)
    print("| | " + " | ".join(OPTIMIZERS) + " |")
    print("|---" * (len(OPTIMIZERS) + 1) + "|")
    for who in ("ddp", 1, 2, 3):
        cells = []
        for name in OPTIMIZERS:
            alone = train(0, 1, "alone", name)
            runs = run_ranks(train, 2, who, name)
            worst = max(
                float((one - other).abs().max())
                for weights in runs
                for one, other in zip(alone, weights, strict=True)
            )
            cells.append(f"{worst:.0e}")
        print(f"| {who if who == 'ddp' else f'zero{who}'} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
