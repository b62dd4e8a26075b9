"""What is refused before a module is sharded, on every rank alike."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_zero.engine.parameter import ZeroParameter


@contextmanager
def same_on_all_ranks(module: nn.Module, group: ProcessGroup | None) -> Generator[None, None, None]:
    """Let what is refused on one rank be refused on all, and modules that differ be refused."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as reason:
        error = reason
    layout = [
        (name, tuple(param.shape), str(param.dtype), param.requires_grad)
        for name, param in module.named_parameters()
        if not is_lazy(param)
    ]
    digest = hashlib.sha256(repr(layout).encode()).hexdigest()
    cards: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(cards, (None if error is None else str(error), digest), group=group)
    if error is not None:
        raise error
    for rank, (text, other) in enumerate(cards):
        if text is not None:
            raise RuntimeError(f"Rank {rank} cannot shard its module: {text}")
        if other != cards[0][1]:
            raise RuntimeError(
                f"The parameters of rank {rank} differ from those of rank 0 in names, shapes, "
                "dtypes or requires_grad: build the same module on every rank."
            )


def check_module(module: nn.Module, device: torch.device) -> None:
    """Refuse a module that cannot be sharded.

    Raises:
        ValueError: If a parameter has no values yet, lies on another device or is sharded already.
    """
    for name, param in module.named_parameters():
        if is_lazy(param):
            raise ValueError(
                f"{name} is not initialised yet (a lazy layer): run a batch through the module "
                "before training starts, for example in setup()."
            )
        if isinstance(param, DTensor):
            raise ValueError(
                f"{name} is a DTensor, sharded already: take fully_shard and parallelize_module "
                "out of the module, for example out of configure_model()."
            )
        if param.device.type == "meta":
            raise ValueError(
                f"{name} is on the meta device and has no values: give it some in "
                "LightningModule.configure_model()."
            )
        if param.device.type != "cpu" and param.device != device:
            raise ValueError(
                f"{name} is on {param.device}, but this rank trains on {device}: leave the module "
                "on the CPU, from where it is moved unit by unit."
            )
        if isinstance(param, ZeroParameter):
            raise ValueError(
                f"{name} is still sharded by an earlier run, which ended with an error or left the "
                "weights sharded (restore_weights): build the module anew."
            )
        if param.layout is not torch.strided:
            raise ValueError(f"{name} has the layout {param.layout}: only dense ones are sharded.")
