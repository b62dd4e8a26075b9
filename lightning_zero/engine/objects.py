"""Python objects between ranks, as what ``exchange`` carries."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.collectives import Collectives


def deliver(collectives: Collectives, value: Any, source: int, label: str) -> Any:
    """Bring an object from one rank to rank 0. Every rank must call it.

    Args:
        collectives: How the ranks talk.
        value: The object, its tensors on the CPU; looked at on rank ``source`` only.
        source: The rank that has it.
        label: What it is, for error messages.

    Returns:
        The object on rank 0, None on others.
    """
    if source == 0:
        return value if collectives.rank == 0 else None
    blobs: list[Tensor | None] = [None] * collectives.world_size
    if collectives.rank == source:
        blobs[0] = _pack(value)
    takes = [collectives.rank == 0 and rank == source for rank in range(collectives.world_size)]
    blob = _swap(collectives, blobs, takes, label)[source]
    return None if blob is None else _unpack(blob)


def gather(collectives: Collectives, value: Any, label: str) -> list[Any]:
    """Return the objects of all ranks, by rank, on rank 0, and only this one's on others."""
    rank, size = collectives.rank, collectives.world_size
    blobs: list[Tensor | None] = [_pack(value), *[None] * (size - 1)]
    received = _swap(collectives, blobs, [rank == 0] * size, label)
    return [None if blob is None else _unpack(blob) for blob in received] if rank == 0 else [value]


def share(collectives: Collectives, value: Any, label: str) -> list[Any]:
    """Return the objects of all ranks on every rank, by rank. Every rank must call it."""
    blob = _pack(value)
    everyone = [True] * collectives.world_size
    blobs = _swap(collectives, [blob] * collectives.world_size, everyone, label)
    return [None if blob is None else _unpack(blob) for blob in blobs]


def _swap(
    collectives: Collectives, blobs: list[Tensor | None], takes: list[bool], label: str
) -> list[Tensor | None]:
    """Send each rank its blob and take one from each rank that has one for this one."""
    device = collectives.device
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    send = [empty if blob is None else blob.to(device) for blob in blobs]
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    lengths = [nothing if b is None else torch.tensor([b.numel()], device=device) for b in blobs]
    expected = [nothing.new_empty(int(take)) for take in takes]
    collectives.exchange(lengths, expected, f"size of {label}").wait()
    receive = [empty.new_empty(int(length)) if length.numel() else empty for length in expected]
    collectives.exchange(send, receive, label).wait()
    return [blob.cpu() if take else None for blob, take in zip(receive, takes, strict=True)]


def _pack(value: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpack(blob: Tensor) -> Any:
    # What our own ranks sent may hold classes of any library.
    return torch.load(io.BytesIO(blob.numpy().tobytes()), weights_only=False)
