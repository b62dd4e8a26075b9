"""A plan: what each strategy holds and sends, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_zero.engine.summary import in_bytes, in_count, many

RESERVE = 0.1
"""Share of a device that is left aside: for the driver's context, the workspaces of libraries, the
communication library's buffers and what the allocator cannot use for fragmentation."""


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """What one strategy needs, in bytes of the rank that needs most.

    Attributes:
        strategy: ``"ddp"``, ``"zero1"``, ``"zero2"`` or ``"zero3"``.
        parameters: Working values that are there all the time.
        masters: Masters that are more than working values.
        gradients: Gradients and what their reduction needs while it is under way.
        optimizer: The optimizers' state.
        transient: Values gathered for a while, and buffers for exchange between the ranks.
        buffers: The module's buffers.
        activations: What forward and backward keep beside these; None without a batch.
        sent_gather: Sent in one step for parameters.
        sent_reduce: Sent in one step for gradients.
        sent_exchange: Sent in one step between owners of whole parameters.
        full_checkpoint: A full checkpoint, one file.
        sharded_checkpoint: A rank's part of a sharded one; None where there is no such thing.
        units: Units, or buckets.
        largest_unit: Working values of the largest.
        fits: Whether it fits the device; None if that is not known.
    """

    strategy: str
    parameters: int
    masters: int
    gradients: int
    optimizer: int
    transient: int
    buffers: int
    activations: int | None
    sent_gather: int
    sent_reduce: int
    sent_exchange: int
    full_checkpoint: int
    sharded_checkpoint: int | None
    units: int
    largest_unit: int
    fits: bool | None = None

    @property
    def engine(self) -> int:
        """Bytes of what the strategy itself holds, at the worst moment of a step."""
        kept = self.parameters + self.masters + self.gradients
        return kept + self.optimizer + self.transient

    @property
    def total(self) -> int:
        """Bytes of everything that was counted."""
        return self.engine + self.buffers + (self.activations or 0)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in one step."""
        return self.sent_gather + self.sent_reduce + self.sent_exchange


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What ``lightning_zero.plan`` found.

    Attributes:
        model: What was planned.
        numel: Its parameters, tied ones once.
        trainable: Those of them that are trained.
        optimizers: The classes of the optimizers.
        devices: Ranks per node.
        num_nodes: Nodes.
        precision: Lightning's string.
        device_memory: Bytes of a device, if given.
        rows: One per strategy.
        recommended: The strategy to take, if one fits.
        reason: Why.
        notes: What else to know.
    """

    model: str
    numel: int
    trainable: int
    optimizers: tuple[str, ...]
    devices: int
    num_nodes: int
    precision: str
    device_memory: int | None
    rows: tuple[StrategyPlan, ...]
    recommended: str | None
    reason: str
    notes: tuple[str, ...] = field(default=())

    @property
    def ranks(self) -> int:
        """Number of ranks, N."""
        return self.devices * self.num_nodes

    def __getitem__(self, strategy: str) -> StrategyPlan:
        for row in self.rows:
            if row.strategy == strategy:
                return row
        planned = ", ".join(row.strategy for row in self.rows)
        raise KeyError(f"{strategy!r} was not planned; there are {planned}.")

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, all sizes in bytes."""
        rows = [
            {**asdict(row), "engine": row.engine, "total": row.total, "sent": row.sent}
            for row in self.rows
        ]
        return {**asdict(self), "ranks": self.ranks, "rows": rows}

    def to_json(self) -> str:
        """The plan as JSON, all sizes in bytes."""
        return json.dumps(self.to_dict(), indent=2)

    def plot(self, path: str | Path) -> None:
        """Draw what each strategy holds as stacked bars, with the device's memory as a line.

        Args:
            path: Where to write the picture; its suffix says the format.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        from lightning_zero.planner.picture import draw_plan

        draw_plan(self, Path(path))

    def __str__(self) -> str:
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([*self._head(), "", *self._table(), "", *notes, self._verdict()])

    def _head(self) -> list[str]:
        numel = f"{in_count(self.numel)} parameters"
        if self.trainable != self.numel:
            numel += f", {in_count(self.trainable)} of them trained"
        nodes = f"{self.num_nodes} x " if self.num_nodes > 1 else ""
        of = ", ".join(dict.fromkeys(self.optimizers)) or "no optimizer"
        return [
            f"{self.model}: {numel}, {of}, {self.precision}, {nodes}{many(self.devices, 'rank')}",
            "What one rank holds at the worst moment of a step:",
        ]

    def _table(self) -> list[str]:
        head = ["", *(row.strategy for row in self.rows), ""]
        held, rest = self._lines(KINDS), [self._total(), *self._fits(), *self._lines(_FACTS)]
        rows = [head, *held, *rest]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [_line(row, widths) for row in rows]
        rule = "-" * (sum(widths[:-1]) + 2 * len(widths) - 4)
        ruler = len(held) + 1
        return [lines[0], rule, *lines[1:ruler], rule, *lines[ruler:]]

    def _lines(self, facts: Mapping[str, tuple[str, str]]) -> list[list[str]]:
        lines = []
        for attribute, (name, meaning) in facts.items():
            values = [getattr(row, attribute) for row in self.rows]
            if any(values):
                lines.append([name, *map(_cell, values), meaning])
        return lines

    def _total(self) -> list[str]:
        return ["total", *(in_bytes(row.total) for row in self.rows), ""]

    def _fits(self) -> list[list[str]]:
        if self.device_memory is None:
            return []
        meaning = f"of {in_bytes(self.device_memory)} a tenth is left aside"
        if all(row.activations is None for row in self.rows):
            meaning += "; activations come on top"
        return [["fits", *("yes" if row.fits else "NO" for row in self.rows), meaning]]

    def _verdict(self) -> str:
        if self.recommended is None:
            return f"None of them fits: {self.reason}"
        return f"Take {self.recommended}. {self.reason}"


KINDS = {
    "parameters": ("weights", "there all the time, as forward and backward read them"),
    "masters": ("masters", "fp32 weights that the optimizer updates"),
    "gradients": ("gradients", "until the optimizer steps, and while they are reduced"),
    "optimizer": ("optimizer state", "such as Adam's two averages"),
    "transient": ("transient", "weights gathered for a moment, and buffers for talking"),
    "buffers": ("module's buffers", "whole on every rank"),
    "activations": ("activations", "what forward keeps for backward, for the batch given"),
}
"""The kinds of memory in a row, each with its name and what it is."""

_FACTS = {
    "sent": ("sent per step", "from one rank to the others"),
    "full_checkpoint": ("full checkpoint", "one file, with optimizer state"),
    "sharded_checkpoint": ("sharded one", "what each rank writes of it"),
    "largest_unit": ("largest unit", "weights that are gathered, or reduced, at once"),
}


def _cell(nbytes: int | None) -> str:
    return "-" if not nbytes else in_bytes(nbytes)


def _line(row: list[str], widths: list[int]) -> str:
    name, *cells, meaning = row
    padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:-1], strict=True)]
    return "  ".join([f"{name:<{widths[0]}}", *padded, meaning]).rstrip()
