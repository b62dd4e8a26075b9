"""Which strategy to take, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_zero.engine.summary import in_bytes
from lightning_zero.planner.report import RESERVE, StrategyPlan


def usable(device_memory: int) -> int:
    """Say how many bytes of a device a plan may use."""
    return int(device_memory * (1 - RESERVE))


def mark(rows: Sequence[StrategyPlan], device_memory: int | None) -> list[StrategyPlan]:
    """Say of each row whether it fits."""
    if device_memory is None:
        return list(rows)
    return [replace(row, fits=row.total <= usable(device_memory)) for row in rows]


def recommend(
    rows: Sequence[StrategyPlan], device_memory: int | None, ranks: int
) -> tuple[str | None, str]:
    """Choose what sends least of what fits, of equals what holds least, and of those zero2.

    Args:
        rows: The strategies, marked.
        device_memory: Bytes of a device, if known.
        ranks: Number of ranks, N.

    Returns:
        The strategy, or None if none fits, and the reason.
    """
    fitting = [row for row in rows if row.fits is not False]
    if not fitting:
        assert device_memory is not None
        return None, _why_none(rows, device_memory, ranks)
    least = min(row.sent for row in fitting)
    cheap = [row for row in fitting if row.sent <= 1.02 * least]  # padding makes no difference
    lightest = 1.01 * min(row.total for row in cheap)
    light = [row for row in cheap if row.total <= lightest]
    best = next((row for row in light if row.strategy == "zero2"), light[0])
    return best.strategy, _why(best, cheap, rows, device_memory)


def _why(
    best: StrategyPlan,
    cheap: Sequence[StrategyPlan],
    rows: Sequence[StrategyPlan],
    device_memory: int | None,
) -> str:
    why = ""
    if device_memory is not None:
        left = in_bytes(usable(device_memory) - best.total)
        room = "for activations" if best.activations is None else "free"
        refused = [row.strategy for row in rows if row.fits is False]
        others = f" ({_listed(refused)} would not)" if refused else ""
        why = f"It fits{others}, leaving {left} {room}. "
    least = "no more than any other that fits" if why else "no more than any other"
    why += f"It sends {in_bytes(best.sent)} per step, {least}"
    if len(cheap) > 1:
        why += ", and holds least of those that send as little"
    smaller = [row for row in rows if row.total < 0.98 * best.total]
    if device_memory is None and smaller:
        smallest = min(smaller, key=lambda row: row.total)
        why += f". If {in_bytes(best.total)} are too much, take {smallest.strategy}"
    return f"{why}."


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _why_none(rows: Sequence[StrategyPlan], device_memory: int, ranks: int) -> str:
    best = min(rows, key=lambda row: row.total)
    limit = usable(device_memory)
    why = (
        f"the smallest, {best.strategy}, needs {in_bytes(best.total)}, and of "
        f"{in_bytes(device_memory)} about {in_bytes(limit)} can be used"
    )
    fixed = best.transient + best.buffers + (best.activations or 0)
    whole = best.total - fixed
    if best.strategy == "zero3" and fixed < limit:
        needed = -(-whole * ranks // (limit - fixed))
        return f"{why}. About {needed} ranks would do."
    return f"{why}. Take larger devices, a smaller batch, or a half precision."
