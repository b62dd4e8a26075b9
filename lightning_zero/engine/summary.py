"""The lines that say what a run shards and what it took, and how they write numbers."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine


def in_bytes(nbytes: float) -> str:
    """Write a number of bytes in B, kB, MB, GB or TB (powers of 1000), as ``27.4 MB``."""
    return _scaled(nbytes, (" B", " kB", " MB", " GB", " TB"))


def in_count(count: float) -> str:
    """Write a number of things, as ``512``, ``13.7M`` or ``7.5B``."""
    return _scaled(count, ("", "k", "M", "B", "T"))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    place = 0
    while number >= 999.5 and place < len(units) - 1:
        number, place = number / 1000, place + 1
    return f"{number:.{0 if place == 0 or number >= 99.95 else 1}f}{units[place]}"


def many(count: int, what: str) -> str:
    """Write a number with a noun, as ``1 rank`` or ``2 ranks``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def first_line(engine: ZeroEngine) -> str:
    """Say what was sharded: parameters, the bytes of them that each rank keeps, the largest unit.

    Bytes are those of all values that stay between uses, masters too.
    """
    numel = sum(slot.numel for slot in engine.slots)
    largest = max((unit.working.flat_nbytes for unit in engine.units), default=0)
    held = sum(buffer.resting_nbytes for unit in engine.units for buffer in unit.buffers)
    return (
        f"stage {engine.stage} on {many(engine.collectives.world_size, 'rank')}: "
        f"{in_count(numel)} parameters in {many(len(engine.units), 'unit')}, "
        f"{in_bytes(held)} per rank, largest unit {in_bytes(largest)}"
    )


class Stretch:
    """What an engine does from now on, for a line at the end.

    Args:
        engine: The engine; its peak begins anew.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        ledger = engine.ledger
        ledger.reset_peak()
        self._before = perf_counter(), ledger.waited, ledger.gathers, ledger.reductions

    def line(self) -> str:
        """Say what it took: the peak of what the engine held, collectives, the share of waiting."""
        engine, ledger = self._engine, self._engine.ledger
        began, waited, gathers, reductions = self._before
        talk = engine.collectives
        parts = [f"stage {engine.stage} held at most {in_bytes(ledger.peak)} on rank {talk.rank}"]
        if talk.world_size > 1:
            parts.append(many(ledger.gathers - gathers, "gather"))
            parts.append(many(ledger.reductions - reductions, "reduction"))
            if talk.device.type == "cpu":  # elsewhere the host never waits
                share = (ledger.waited - waited) / max(perf_counter() - began, 1e-9)
                parts.append(f"{100 * share:.0f}% of the time waiting and copying between ranks")
        return f"{parts[0]}, without activations" + "".join(f", {part}" for part in parts[1:])
