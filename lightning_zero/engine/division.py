"""How a module is divided at a stage: decisions that engine and planner share.

Nothing here needs values of parameters or a process group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_zero.engine.autocast import lowered_parameters, watched_parameters
from lightning_zero.engine.numerics import Numerics
from lightning_zero.engine.placement import Placement, StagePlacement, placement_of
from lightning_zero.engine.units import UnitPlan, WrapPolicy, plan_buckets, plan_units


@dataclass(frozen=True)
class Division:
    """What becomes of a module.

    Attributes:
        placement: The stage's row of the table, or what is left of it on one rank.
        plans: The units, in the order of registration.
        root: The module itself. Its own unit is used between the others, so it stays gathered.
    """

    placement: StagePlacement
    plans: list[UnitPlan]
    root: nn.Module

    @property
    def pinned(self) -> list[int]:
        """Which units stay gathered from first use until their backward is done."""
        return [index for index, plan in enumerate(self.plans) if plan.module is self.root]


def divide(
    module: nn.Module,
    stage: int,
    world_size: int,
    device: torch.device,
    auto_wrap_policy: WrapPolicy,
    bucket_mb: float,
    numerics: Numerics,
) -> Division:
    """Divide a module into units.

    Args:
        module: The module.
        stage: 1, 2 or 3.
        world_size: Number of ranks, N.
        device: Where it will run.
        auto_wrap_policy: The units of stage 3, see ``plan_units``.
        bucket_mb: Megabytes (2**20 bytes) of parameters per unit at stages 1 and 2.
        numerics: The dtypes of the run.

    Raises:
        ValueError: If the policy or the stage cannot be used.
    """
    placement = placement_of(stage)
    halves: set[int] = set()
    if world_size == 1:  # its share is the whole
        placement = replace(placement, parameters=Placement.REPLICATED)
    else:
        halves = _halves(module, device, numerics)
    if placement.parameters is Placement.REPLICATED:
        return Division(placement, plan_buckets(module, bucket_mb, halves), module)
    return Division(placement, plan_units(module, auto_wrap_policy, halves), module)


def reductions_in_flight(device: torch.device) -> int:
    """Say how many reductions may hold their buffers at a time."""
    return 2 if device.type == "cuda" else 1


def defers_reductions(placement: StagePlacement, reduce_every_backward: bool) -> bool:
    """Say whether micro-batches other than the last keep their gradients instead of reducing."""
    return placement.gradients is Placement.REPLICATED or not reduce_every_backward


def _halves(module: nn.Module, device: torch.device, numerics: Numerics) -> set[int]:
    """Choose the parameters that get working values in half precision, by identity."""
    if numerics.autocast is None or numerics.cast == "none":
        return set()
    if numerics.cast == "all":
        chosen = watched_parameters(module)
    else:
        chosen = lowered_parameters(module, device, numerics.autocast)
    return chosen & {id(p) for p in module.parameters() if p.dtype is torch.float32}
