"""A data loader that can be broken off in an epoch and goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class StatefulLoader:
    """Deals the batches of all ranks' common order to one of them, and saves how far it is.

    Args:
        tensors: The columns, each with a row for every sample.
        batch_size: Of all ranks together; what is left over is dropped.
        rank: Which rank this is.
        world_size: How many there are.
        shuffle: Whether each epoch has an order of its own, drawn from torch's generator of the
            rank, which differs by rank.
    """

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        batch_size: int,
        rank: int,
        world_size: int,
        shuffle: bool = False,
    ) -> None:
        self.columns = [column[rank::world_size] for column in tensors]
        self.size = batch_size // world_size
        self.shuffle = shuffle
        self.position = 0
        self.order: list[int] = []

    def __len__(self) -> int:
        return len(self.columns[0]) // self.size

    def __iter__(self) -> Iterator[Any]:
        count = len(self.columns[0])
        if self.position >= len(self):  # it was saved between two epochs
            self.position = 0
        if not self.shuffle:
            self.order = list(range(count))
        elif not self.position:
            self.order = torch.randperm(count).tolist()
        while self.position < len(self):
            rows = self.order[self.position * self.size : (self.position + 1) * self.size]
            self.position += 1
            yield [column[rows] for column in self.columns]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` needs to go on with the next batch."""
        return {"position": self.position, "order": self.order if self.shuffle else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on elsewhere."""
        self.position, self.order = state["position"], state["order"]
