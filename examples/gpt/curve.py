"""The loss curve: what the CSV log holds, drawn."""

import csv
from pathlib import Path

from matplotlib.figure import Figure


def read(log: Path, column: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a CSV log has a value in a column, and the values."""
    with log.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(column)]
    return [int(row["step"]) for row in rows], [float(row[column]) for row in rows]


def draw(log: Path, bigram_loss: float, path: Path) -> None:
    """Draws both losses against the step, with the baseline as a level line.

    Args:
        log: The file that Lightning's CSV logger wrote.
        bigram_loss: The baseline's validation loss.
        path: The PNG file to write.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*read(log, "train_loss"), color="tab:blue", alpha=0.5, label="GPT, training")
    axes.plot(*read(log, "val_loss"), color="tab:orange", marker="o", label="GPT, validation")
    axes.axhline(bigram_loss, color="black", linestyle="--", label="bigrams, validation")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats per character)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
