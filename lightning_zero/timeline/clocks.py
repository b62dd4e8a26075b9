"""How far the clocks of other ranks are from rank 0's."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from lightning_zero.engine import objects
from lightning_zero.engine.collectives import Collectives

_ROUNDS = 9


def clock_offsets(collectives: Collectives) -> list[float] | None:
    """Return what has to be added to each rank's ``time.perf_counter`` to get rank 0's.

    Ranks of one host share a clock. For others, all ranks look at their clocks when an all-reduce
    lets them go, several times; the median difference is good to about the time that a message
    takes.

    Args:
        collectives: How the ranks talk; every rank must call this.

    Returns:
        Seconds, by rank, on rank 0, and None on the others.
    """
    looks = []
    device = collectives.device
    for _ in range(_ROUNDS):
        word = torch.zeros(1, device=device)
        collectives.maximum(word, "comparison of clocks").wait()
        word.item()  # on a GPU only this waits
        looks.append(perf_counter())
    clocks = objects.gather(collectives, (_host(), looks), "clocks")
    if collectives.rank != 0:
        return None
    host, mine = clocks[0]
    return [
        0.0 if theirs == host else median(a - b for a, b in zip(mine, at, strict=True))
        for theirs, at in clocks
    ]


def _host() -> str:
    """Return something that ranks have in common only if they share a clock."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"rank {id(object())} {perf_counter()}"
