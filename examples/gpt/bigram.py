"""The baseline: how often each character follows each other one."""

import torch
from data import Windows
from torch import Tensor


class Bigram:
    """A model that predicts a character from the one before it, by counting."""

    def __init__(self, tokens: Tensor, vocabulary: int, smoothing: float = 0.1) -> None:
        """Counts the pairs of neighbours in a text.

        Args:
            tokens: The encoded training text.
            vocabulary: The number of different characters.
            smoothing: What every pair's count starts from, so that no pair is impossible.
        """
        pairs = tokens[:-1] * vocabulary + tokens[1:]
        counts = torch.bincount(pairs, minlength=vocabulary**2).view(vocabulary, vocabulary)
        counts = counts.double() + smoothing
        self.log_probabilities = (counts / counts.sum(dim=1, keepdim=True)).log()

    def loss(self, windows: Windows) -> float:
        """Returns the mean cross-entropy, in nats, over the characters of the windows."""
        pairs = [windows[i] for i in range(len(windows))]
        inputs, targets = (torch.stack(part) for part in zip(*pairs, strict=True))
        return -self.log_probabilities[inputs, targets].mean().item()
