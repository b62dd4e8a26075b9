"""The bytes of the ZeRO paper, from the number of parameters alone.

Source: Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", arXiv 1910.02054, section 3.1 and figure 1 for memory, section 7 for traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

HALF = 2
"""Bytes of a half-precision parameter or gradient."""
MASTER = 4
"""Bytes of the fp32 master of a parameter."""
MOMENTS = 8
"""Bytes of Adam's two fp32 moments. With the master they are the paper's K = 12."""


@dataclass(frozen=True)
class PaperBytes:
    """What one rank holds and sends with mixed precision and Adam, in bytes.

    Attributes:
        parameters: Half-precision parameters.
        gradients: Half-precision gradients.
        masters: fp32 parameters.
        optimizer: Momentum and variance.
        gather: Sent in one step for parameters.
        reduce: Sent in one step for gradients.
    """

    parameters: float
    gradients: float
    masters: float
    optimizer: float
    gather: float
    reduce: float


def paper_bytes(strategy: str, params: float, ranks: int) -> PaperBytes:
    """Evaluate the paper's formulas for Ψ parameters on N ranks.

    The sums are 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N bytes. A rank sends 2Ψ elements per step, and
    3Ψ at stage 3; this counts the exact (N - 1)/N of them.

    Args:
        strategy: ``"ddp"``, ``"zero1"``, ``"zero2"`` or ``"zero3"``.
        params: Ψ.
        ranks: N.
    """
    stage = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[strategy]
    share = 1 / ranks
    sent = HALF * params * (ranks - 1) / ranks
    return PaperBytes(
        parameters=HALF * params * (share if stage >= 3 else 1),
        gradients=HALF * params * (share if stage >= 2 else 1),
        masters=MASTER * params * (share if stage >= 1 else 1),
        optimizer=MOMENTS * params * (share if stage >= 1 else 1),
        gather=sent * (2 if stage == 3 else 1 if stage else 0),
        reduce=sent if stage else 2 * sent,
    )
