"""What each ZeRO stage replicates and what it shards: the one table that the engine reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Stage = Literal[1, 2, 3]


class Placement(Enum):
    """Where a kind of tensor lives between uses."""

    REPLICATED = "replicated"
    """Every rank holds it whole."""
    SHARDED = "sharded"
    """Every rank holds one of N contiguous slices."""


@dataclass(frozen=True, kw_only=True)
class StagePlacement:
    """The row of the table for one stage.

    The master and the optimizer state are sharded in every stage (that is what makes it ZeRO), so
    they have no column.

    Attributes:
        parameters: The working parameters, between uses.
        gradients: The gradients, between backward and the optimizer step.
    """

    parameters: Placement
    gradients: Placement


_TABLE = {
    1: StagePlacement(parameters=Placement.REPLICATED, gradients=Placement.REPLICATED),
    2: StagePlacement(parameters=Placement.REPLICATED, gradients=Placement.SHARDED),
    3: StagePlacement(parameters=Placement.SHARDED, gradients=Placement.SHARDED),
}


def placement_of(stage: int) -> StagePlacement:
    """Look a stage up in the table.

    Args:
        stage: 1, 2 or 3, as in the ZeRO paper (arXiv 1910.02054, section 5).

    Raises:
        ValueError: For any other stage.
    """
    if isinstance(stage, bool) or stage not in _TABLE:
        raise ValueError(f"stage={stage!r} is not a ZeRO stage: choose 1, 2 or 3.")
    return _TABLE[stage]
