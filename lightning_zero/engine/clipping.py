"""Norms and clipping of gradients that are spread over the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.engine.collectives import Collectives
from lightning_zero.engine.slot import ParameterSlot


def _grads(slots: Sequence[ParameterSlot]) -> list[Tensor]:
    grads = []
    for slot in dict.fromkeys(slots):
        if slot.has_grad:
            slot.keep_grad()
            assert slot.unit.grad_shard is not None
            grads.append(slot.in_shard(slot.unit.grad_shard))
    return grads


@torch.no_grad()
def grad_norm(
    slots: Sequence[ParameterSlot], collectives: Collectives, norm_type: float = 2.0
) -> Tensor:
    """Compute the norm of the averaged gradients of some parameters, over all ranks.

    Accumulated in fp64, so that it does not depend on where shards are cut but for its last bit.

    Args:
        slots: The parameters; one that stands there twice counts once.
        collectives: How the ranks talk.
        norm_type: 2, infinity, or any positive order.

    Returns:
        A scalar of the gradients' dtype (fp32 at least), equal on all ranks.
    """
    grads = _grads(slots)
    device = collectives.device
    dtype = torch.promote_types(grads[0].dtype if grads else torch.float32, torch.float32)
    if dtype.is_complex:
        dtype = dtype.to_real()
    parts = [
        torch.linalg.vector_norm(grad, norm_type, dtype=_wide(grad.dtype))
        for grad in grads
        if grad.numel()
    ]
    if math.isinf(norm_type):
        zero = torch.zeros((), dtype=torch.float64, device=device)
        total = torch.stack([*parts, zero]).max()
        collectives.maximum(total, "maximum of gradient norms").wait()
        return total.to(dtype)
    total = torch.zeros((), dtype=torch.float64, device=device)
    if parts:
        total += torch.stack(parts).pow(norm_type).sum()
    collectives.sum(total, "sum of gradient norms").wait()
    return total.pow(1.0 / norm_type).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


@torch.no_grad()
def clip_by_norm(
    slots: Sequence[ParameterSlot],
    collectives: Collectives,
    max_norm: float,
    norm_type: float = 2.0,
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most ``max_norm``.

    The factor is that of ``torch.nn.utils.clip_grad_norm_``: ``max_norm / (norm + 1e-6)`` or 1,
    whichever is less.

    Returns:
        The norm before clipping.
    """
    norm = grad_norm(slots, collectives, norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in _grads(slots):
        grad.mul_(factor)
    return norm


@torch.no_grad()
def unscale(
    slots: Sequence[ParameterSlot], collectives: Collectives, inv_scale: Tensor, found_inf: Tensor
) -> None:
    """Multiply gradients by ``inv_scale``; set ``found_inf`` to 1 if any rank's are not finite."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in _grads(slots):
        if grad.numel():
            by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    collectives.maximum(found_inf, "maximum of overflows").wait()


@torch.no_grad()
def clip_by_value(slots: Sequence[ParameterSlot], limit: float) -> None:
    """Clamp every element of the gradients to ``[-limit, limit]``."""
    for grad in _grads(slots):
        grad.clamp_(-limit, limit)
