"""Loads a checkpoint of any kind so that each rank reads what it needs, when it needs it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_zero.checkpoint.entries import TensorEntry, from_tensor, map_leaves
from lightning_zero.checkpoint.folder import unfinished_saves
from lightning_zero.checkpoint.formats import open_checkpoint
from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.checkpoint.optimizers import by_number


def load_lazily(path: Path, trust: bool) -> dict[str, Any]:
    """Open a checkpoint as the dict that ``torch.load`` would return, of tensors not read yet.

    Args:
        path: A Lightning file or a sharded folder.
        trust: Whether pickles in it may run code.

    Raises:
        FileNotFoundError: If it, or a file of it, is missing.
        ValueError: If it is damaged, or asks for trust.
    """
    view = open_checkpoint(path, trust)
    if view.broken:
        raise view.broken[0]
    lazies: dict[Any, LazyTensor] = {}

    def lazy(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, TensorEntry):
            return leaf
        return lazies.setdefault((leaf.identity, leaf.shape, leaf.dtype), LazyTensor(leaf))

    optimizers = [by_number(optimizer, str(path)) for optimizer in view.optimizers]
    checkpoint: dict[str, Any] = map_leaves(view.rest, _read)
    checkpoint["state_dict"] = map_leaves(view.weights, lazy)
    if optimizers:
        checkpoint["optimizer_states"] = map_leaves(optimizers, lazy)
    return checkpoint


def _read(_: str, leaf: Any) -> Any:
    return leaf.read() if isinstance(leaf, TensorEntry) else leaf


@contextmanager
def skipping(state: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Hand out a state dict that is as good as this one for names and shapes, and reads nothing."""
    made = []
    skipped: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            entry = value.entry if isinstance(value, LazyTensor) else from_tensor(value, repr(name))
            made.append(LazyTensor(entry))
            skipped[name] = made[-1]
        else:
            skipped[name] = value
    for lazy in made:
        lazy.skips = True
    try:
        yield skipped
    finally:
        for lazy in made:
            lazy.skips = False


def abandoned(path: Path) -> list[Path]:
    """List what killed saves have left beside a checkpoint."""
    return unfinished_saves(path.parent)
