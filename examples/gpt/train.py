"""Trains a small GPT on the source of Python's standard library.

Run from the root of the repository:

    python examples/gpt/train.py --strategy zero3
"""

import argparse
import os
import time
import warnings
from pathlib import Path

import curve
import lightning as L
import torch
from bigram import Bigram
from data import VOCABULARY, Corpus, decode, encode
from lightning.pytorch.loggers import CSVLogger
from model import LanguageModel

import lightning_zero  # noqa: F401  # Registers the names of the strategies.

EVALUATIONS = 8


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
    add("--steps", type=int, default=1000, help="optimizer steps")
    add("--batch-size", type=int, default=32, help="windows in a rank's batch")
    add("--context", type=int, default=64, help="characters in a window")
    add("--width", type=int, default=64, help="size of the model, a multiple of 32")
    add("--layers", type=int, default=3, help="number of transformer blocks")
    add("--lr", type=float, default=5e-3, help="highest learning rate")
    add("--seed", type=int, default=0, help="what the weights and the data depend on")
    add("--out", type=Path, default=Path("runs/gpt"), help="folder for logs and checkpoints")
    return parser.parse_args()


def use_one_thread() -> None:
    """Leaves one core to each rank; Lightning keeps to the variable where it is set."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def main() -> None:
    """Trains, then compares with the baseline and writes a text."""
    began = time.perf_counter()
    arguments = parse_arguments()
    use_one_thread()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    L.seed_everything(arguments.seed)

    context = arguments.context
    corpus = Corpus(arguments.steps, arguments.batch_size, context, arguments.seed)
    model = LanguageModel(len(VOCABULARY), arguments.width, arguments.layers, context, arguments.lr)
    logger = CSVLogger(arguments.out, name=arguments.strategy)
    evaluations = max(n for n in range(1, EVALUATIONS + 1) if arguments.steps % n == 0)
    trainer = L.Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        strategy=arguments.strategy,
        precision=arguments.precision,
        logger=logger,
        max_epochs=1,
        val_check_interval=arguments.steps // evaluations,
        log_every_n_steps=10,
    )
    trainer.fit(model, corpus)

    # From here on the model is a whole one again, on the CPU, and no rank waits for another.
    if not trainer.is_global_zero:
        return
    bigram_loss = Bigram(corpus.train_tokens, len(VOCABULARY)).loss(corpus.val_windows)
    log = Path(logger.log_dir) / "metrics.csv"
    plot = log.with_name("loss.png")
    curve.draw(log, bigram_loss, plot)
    sample = model.gpt.generate(encode("def "), 400, temperature=0.8, seed=arguments.seed)
    print(f"\n--- a sample ---\n{decode(sample)}\n--- end ---\n")
    print(f"strategy                 {arguments.strategy}, {arguments.devices} ranks")
    print(f"validation loss, bigram  {bigram_loss:.4f}")
    print(f"validation loss, GPT     {trainer.callback_metrics['val_loss'].item():.4f}")
    print(f"wall time                {time.perf_counter() - began:.0f} s")
    print(f"log                      {log}")
    print(f"loss curve               {plot}")


if __name__ == "__main__":
    main()
