"""Trains a GAN with two optimizers on points in the plane.

Run from the root of the repository:

    python examples/gan/train.py --strategy zero3
"""

import argparse
import math
import time
import warnings
from itertools import pairwise
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401  # Registers the names of the strategies.

MODES = 8
SPREAD = 0.1
"""The standard deviation of the points around each mode."""


def centres() -> Tensor:
    """Returns the modes, evenly on a circle of radius 1: (modes, 2)."""
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def draw_real(count: int, seed: int) -> Tensor:
    """Draws points around modes chosen at random: (count, 2)."""
    generator = torch.Generator().manual_seed(seed)
    mode = torch.randint(MODES, (count,), generator=generator)
    return centres()[mode] + SPREAD * torch.randn(count, 2, generator=generator)


def perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Builds a network of three hidden layers."""
    sizes = [inputs, width, width, width]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class GAN(L.LightningModule):
    """A generator and a discriminator, each with an optimizer, stepped by hand."""

    def __init__(self, width: int, noise: int, learning_rate: float) -> None:
        """Builds both networks.

        Args:
            width: The size of their hidden layers.
            noise: The numbers that the generator makes a point of.
            learning_rate: Of both optimizers.
        """
        super().__init__()
        self.automatic_optimization = False
        self.noise = noise
        self.learning_rate = learning_rate
        self.generator = perceptron(noise, width, 2)
        self.discriminator = perceptron(2, width, 1)

    def forward(self, count: int) -> Tensor:
        """Generates points: (count, 2)."""
        points: Tensor = self.generator(torch.randn(count, self.noise, device=self.device))
        return points

    def _loss(self, points: Tensor, real: bool) -> Tensor:
        """Scores how far the discriminator is from calling the points real, or generated."""
        verdict = self.discriminator(points)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(real)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Takes one step with each optimizer, the discriminator's first."""
        (real,) = batch
        generator, discriminator = self.optimizers()

        self.toggle_optimizer(discriminator)
        loss = self._loss(real, real=True) + self._loss(self(len(real)).detach(), real=False)
        discriminator.zero_grad()
        self.manual_backward(loss)
        discriminator.step()
        self.untoggle_optimizer(discriminator)

        self.toggle_optimizer(generator)  # no gradients for the discriminator
        fooled = self._loss(self(len(real)), real=True)
        generator.zero_grad()
        self.manual_backward(fooled)
        generator.step()
        self.untoggle_optimizer(generator)
        self.log_dict({"discriminator": loss, "generator": fooled}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns an Adam for each network."""
        return [
            torch.optim.Adam(network.parameters(), lr=self.learning_rate, betas=(0.5, 0.99))
            for network in (self.generator, self.discriminator)
        ]


def judge(points: Tensor) -> tuple[float, int]:
    """Says how well points fit the data.

    Args:
        points: (count, 2).

    Returns:
        The share within three standard deviations of a mode, and the number of modes that got at
        least a quarter of their due.
    """
    distance, nearest = torch.cdist(points, centres()).min(dim=1)
    close = distance < 3 * SPREAD
    share = torch.bincount(nearest[close], minlength=MODES) / len(points)
    return close.float().mean().item(), int((share > 1 / MODES / 4).sum())


def draw(real: Tensor, generated: Tensor, path: Path) -> None:
    """Draws both sets of points over each other into a PNG file."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.scatter(*real.T, s=4, alpha=0.4, color="tab:gray", label="data")
    axes.scatter(*generated.T, s=4, alpha=0.6, color="tab:blue", label="generated")
    axes.set_aspect("equal")
    axes.legend(loc="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--strategy", default="zero3", help="ddp, zero1, zero2, zero3, or any Lightning knows")
    add("--accelerator", default="cpu", help="what to train on")
    add("--devices", type=int, default=2, help="number of ranks")
    add("--steps", type=int, default=1500, help="steps of each optimizer")
    add("--batch-size", type=int, default=128, help="points in a rank's batch")
    add("--width", type=int, default=128, help="size of the hidden layers")
    add("--noise", type=int, default=16, help="numbers that a point is made of")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--seed", type=int, default=0, help="what the weights and the data depend on")
    add("--out", type=Path, default=Path("runs/gan"), help="folder for the picture")
    return parser.parse_args()


def main() -> None:
    """Trains, then compares what is generated with the data."""
    began = time.perf_counter()
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    L.seed_everything(arguments.seed)
    model = GAN(arguments.width, arguments.noise, arguments.lr)
    with torch.no_grad():
        before = judge(model(4000))
    trainer = L.Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        strategy=arguments.strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    # Ranks seed alike; their noise has to differ.
    torch.manual_seed(arguments.seed + 1 + trainer.global_rank)
    count = arguments.steps * arguments.batch_size * arguments.devices
    points = TensorDataset(draw_real(count, arguments.seed))
    trainer.fit(model, DataLoader(points, arguments.batch_size))

    # From here on the model is a whole one again, on the CPU, and no rank waits for another.
    if not trainer.is_global_zero:
        return
    with torch.no_grad():
        generated = model(4000)
    after, picture = judge(generated), arguments.out / f"{arguments.strategy}.png"
    draw(draw_real(4000, arguments.seed), generated, picture)
    print(f"strategy          {arguments.strategy}, {arguments.devices} ranks")
    for when, (close, modes) in {"before": before, "after": after}.items():
        print(
            f"{when:6} training   {close:4.0%} of the points near a mode, {modes} modes of {MODES}"
        )
    print(f"wall time         {time.perf_counter() - began:.0f} s")
    print(f"picture           {picture}")


if __name__ == "__main__":
    main()
