"""The corpus: the source of Python's standard library, read as characters."""

import string
import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

VOCABULARY = string.printable
"""Every character the model knows; any other character reads as a question mark."""


def encode(text: str) -> Tensor:
    """Turns text into a tensor of positions in the vocabulary."""
    index = {character: i for i, character in enumerate(VOCABULARY)}
    return torch.tensor([index.get(character, index["?"]) for character in text])


def decode(tokens: Tensor) -> str:
    """Turns positions in the vocabulary back into text."""
    return "".join(VOCABULARY[i] for i in tokens.tolist())


def read_corpus(size: int = 1_500_000) -> str:
    """Returns the first characters of the standard library, its files in sorted order.

    Args:
        size: The most characters to return.
    """
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) >= size:
            break
        try:
            text += path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return text[:size]


def split(tokens: Tensor, validation_share: float = 0.08) -> tuple[Tensor, Tensor]:
    """Cuts the corpus in two: training on the front, validation on the back."""
    cut = int(len(tokens) * (1 - validation_share))
    return tokens[:cut], tokens[cut:]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of a text, each with the characters that follow it one step on."""

    def __init__(self, tokens: Tensor, starts: Tensor, context: int) -> None:
        """Keeps the text and where its windows start.

        Args:
            tokens: The encoded text.
            starts: The position of the first character of each window.
            context: The number of characters in a window.
        """
        self.tokens = tokens
        self.starts = starts
        self.context = context

    @classmethod
    def drawn(cls, tokens: Tensor, context: int, count: int, seed: int) -> "Windows":
        """Draws windows anywhere in the text, the same ones for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(tokens) - context, (count,), generator=generator)
        return cls(tokens, starts, context)

    @classmethod
    def tiled(cls, tokens: Tensor, context: int, multiple: int) -> "Windows":
        """Lays windows end to end, as many as fit in a multiple of the given number.

        With as many windows for every rank, no sampler has to repeat any, and the mean
        over the ranks is the mean over the windows.
        """
        count = (len(tokens) - 1) // context // multiple * multiple
        return cls(tokens, torch.arange(count) * context, context)

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns a window and its targets, the window that starts one character later."""
        start = int(self.starts[index])
        window = self.tokens[start : start + self.context + 1]
        return window[:-1], window[1:]


class Corpus(L.LightningDataModule):
    """The training and validation windows of one run."""

    def __init__(self, steps: int, batch_size: int, context: int, seed: int = 0) -> None:
        """Keeps the sizes; the text is read in ``setup``.

        Args:
            steps: The number of batches in an epoch.
            batch_size: The number of windows in a rank's batch.
            context: The number of characters in a window.
            seed: What the choice of training windows depends on.
        """
        super().__init__()
        self.steps = steps
        self.batch_size = batch_size
        self.context = context
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Reads the text and chooses the windows, for as many ranks as there are."""
        ranks = 1 if self.trainer is None else self.trainer.world_size
        self.train_tokens, val_tokens = split(encode(read_corpus()))
        count = self.steps * self.batch_size * ranks
        self.train_windows = Windows.drawn(self.train_tokens, self.context, count, self.seed)
        self.val_windows = Windows.tiled(val_tokens, self.context, multiple=ranks)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Returns batches of drawn windows."""
        return DataLoader(self.train_windows, self.batch_size)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Returns batches of windows that cover the validation split."""
        return DataLoader(self.val_windows, self.batch_size)
