"""Loads a checkpoint of any kind so that each rank reads what it needs, when it needs it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from lightning_zero.checkpoint.entries import TensorEntry, from_tensor, map_leaves
from lightning_zero.checkpoint.formats import open_checkpoint
from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.checkpoint.optimizers import by_number
from lightning_zero.checkpoint.places import Place
from lightning_zero.checkpoint.read_file import read_file
from lightning_zero.checkpoint.read_sharded import check_parts


class Loaded(NamedTuple):
    """A checkpoint as ``torch.load`` would return it, of tensors that are not read yet.

    Attributes:
        checkpoint: The dict.
        names: For each optimizer the parameters' names by group; None where it has only numbers.
    """

    checkpoint: dict[str, Any]
    names: list[list[list[str]] | None]


def load_lazily(path: Place, trust: bool, looks: bool = True) -> Loaded:
    """Open a checkpoint of any kind, and look whether it is whole.

    Args:
        path: A Lightning file or a sharded folder.
        trust: Whether pickles in it may run code.
        looks: Whether to look for the files of all ranks, which one rank of a host does for all.

    Raises:
        FileNotFoundError: If it, or a file of it, is missing.
        ValueError: If it is damaged, or asks for trust.
    """
    plain = path.is_file() and path.suffix not in (".safetensors", ".json")
    view = read_file(path, trust) if plain else open_checkpoint(path, trust)
    if view.format == "sharded":
        if looks:
            check_parts(path)
        if view.missing:
            raise FileNotFoundError(
                f"{path} is not whole, missing {'; '.join(view.missing)}: copy the whole folder, "
                "or take an older checkpoint"
            )
    if view.broken:
        raise view.broken[0]
    lazies: dict[Any, LazyTensor] = {}

    def lazy(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, TensorEntry):
            return leaf
        return lazies.setdefault((leaf.identity, leaf.shape, leaf.dtype), LazyTensor(leaf))

    optimizers = [by_number(optimizer) for optimizer in view.optimizers]
    checkpoint: dict[str, Any] = map_leaves(view.rest, _read)
    checkpoint["state_dict"] = map_leaves(view.weights, lazy)
    if optimizers or "lr_schedulers" in view.rest:
        checkpoint["optimizer_states"] = [
            {
                **map_leaves({k: v for k, v in optimizer.items() if k != "state"}, _read),
                "state": map_leaves(optimizer["state"], lazy),
            }
            for optimizer in optimizers
        ]
    return Loaded(checkpoint, [_names(optimizer) for optimizer in view.optimizers])


def _names(optimizer: Mapping[str, Any]) -> list[list[str]] | None:
    groups = [list(group["params"]) for group in optimizer["param_groups"]]
    named = all(isinstance(name, str) for group in groups for name in group)
    return groups if named else None


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
