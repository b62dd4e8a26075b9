"""Trains a small convolutional network on scikit-learn's handwritten digits.

Run from the root of the repository:

    python examples/digits/train.py --strategy zero3
"""

import argparse
import time
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_zero  # noqa: F401  # Registers the names of the strategies.

CLASSES = 10


class Digits(L.LightningDataModule):
    """1797 images of 8 x 8 pixels, a fifth of them for the test."""

    def __init__(self, batch_size: int, seed: int) -> None:
        """Keeps the settings.

        Args:
            batch_size: The number of images in a rank's batch.
            seed: What the choice of test images depends on.
        """
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Reads the images that scikit-learn ships and divides them."""
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(
            torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16,
            torch.tensor(labels),
            test_size=0.2,
            stratify=labels,
            random_state=self.seed,
        )
        self.train, self.test = TensorDataset(*parts[::2]), TensorDataset(*parts[1::2])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns shuffled batches."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns the images that were kept back."""
        return DataLoader(self.test, self.batch_size)


class Classifier(L.LightningModule):
    """Two convolutions, then a perceptron; batch norm keeps its statistics per rank."""

    def __init__(self, width: int, learning_rate: float) -> None:
        """Builds the network.

        Args:
            width: Channels of the first convolution.
            learning_rate: Of AdamW.
        """
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * width, 4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, CLASSES),
        )
        # Metrics add up over the ranks by themselves.
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of one batch."""
        images, labels = batch
        logits = self.network(images)
        self.train_accuracy(logits, labels)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return F.cross_entropy(logits, labels)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Counts the images that are named right."""
        images, labels = batch
        self.test_accuracy(self.network(images), labels)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


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
    add("--precision", default="32-true", help="Lightning's name for the number format")
    add("--epochs", type=int, default=8, help="passes over the images")
    add("--batch-size", type=int, default=32, help="images in a rank's batch")
    add("--width", type=int, default=16, help="channels of the first convolution")
    add("--lr", type=float, default=2e-3, help="learning rate")
    add("--seed", type=int, default=0, help="what the weights and the data depend on")
    return parser.parse_args()


def main() -> None:
    """Trains, then counts the test images that are named right."""
    began = time.perf_counter()
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*recommended to use `Trainer.devices=1.*")
    L.seed_everything(arguments.seed)
    model = Classifier(arguments.width, arguments.lr)
    trainer = L.Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        strategy=arguments.strategy,
        precision=arguments.precision,
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    digits = Digits(arguments.batch_size, arguments.seed)
    trainer.fit(model, digits)
    train_accuracy = trainer.callback_metrics["train_accuracy"].item()
    trainer.test(model, digits, verbose=False)
    if trainer.is_global_zero:
        print(f"strategy           {arguments.strategy}, {arguments.devices} ranks")
        print(f"training accuracy  {train_accuracy:.4f}")
        print(f"test accuracy      {trainer.callback_metrics['test_accuracy'].item():.4f}")
        print(f"wall time          {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
