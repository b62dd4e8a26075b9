"""A plan as stacked bars, with the device's memory as a line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_zero.engine.summary import in_bytes
from lightning_zero.planner.advice import usable
from lightning_zero.planner.report import KINDS

if TYPE_CHECKING:
    from lightning_zero.planner.report import Plan

# Okabe and Ito's colours, which people with any colour vision can tell apart.
_COLOURS = {
    "parameters": "#0072B2",
    "masters": "#56B4E9",
    "gradients": "#009E73",
    "optimizer": "#E69F00",
    "transient": "#CC79A7",
    "buffers": "#999999",
    "activations": "#F0E442",
}
_LIMIT = "#D55E00"


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw a plan.

    Args:
        plan: The plan.
        path: Where to write; the suffix says the format.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "The picture of a plan needs matplotlib: pip install matplotlib."
        ) from error
    figure = Figure(figsize=(1.6 * len(plan.rows) + 4.2, 5), layout="constrained")
    axes = figure.add_subplot()
    scale, unit = _scale(plan)
    bottoms = [0.0] * len(plan.rows)
    places = list(range(len(plan.rows)))
    for kind, (label, _) in KINDS.items():
        heights = [(getattr(row, kind) or 0) / scale for row in plan.rows]
        if any(heights):
            axes.bar(
                places,
                heights,
                0.62,
                bottoms,
                label=label,
                color=_COLOURS[kind],
                edgecolor="white",
                linewidth=0.4,
            )
            bottoms = [sum(pair) for pair in zip(bottoms, heights, strict=True)]
    for place, row, top in zip(places, plan.rows, bottoms, strict=True):
        text = in_bytes(row.total) + ("\ndoes not fit" if row.fits is False else "")
        axes.annotate(
            text,
            (place, top),
            (0, 5),
            textcoords="offset points",
            ha="center",
            va="bottom",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            zorder=5,
        )
    _mark_limit(axes, plan, scale)
    axes.set_xticks(
        places,
        [
            f"{row.strategy}\n(recommended)" if row.strategy == plan.recommended else row.strategy
            for row in plan.rows
        ],
    )
    axes.set_ylabel(f"{unit} per rank")
    axes.set_ylim(0, 1.18 * max([*bottoms, *_limit(plan, scale, max(bottoms))]))
    axes.set_title(_title(plan), loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False
    )
    figure.savefig(path, dpi=150)


def _scale(plan: Plan) -> tuple[float, str]:
    largest = max(row.total for row in plan.rows)
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if largest >= size:
            return size, unit
    return 1e3, "kB"


def _limit(plan: Plan, scale: float, tallest: float) -> list[float]:
    """Return the device's memory if it does not dwarf the bars, which could not be read then."""
    if plan.device_memory is None or plan.device_memory / scale > 4 * tallest:
        return []
    return [plan.device_memory / scale]


def _mark_limit(axes: Any, plan: Plan, scale: float) -> None:
    if plan.device_memory is None:
        return
    tallest = max(row.total for row in plan.rows) / scale
    if not _limit(plan, scale, tallest):
        text = f"the device's {in_bytes(plan.device_memory)} are far above"
        axes.plot([], [], color=_LIMIT, linewidth=2, label=text)
        return
    device, may = plan.device_memory / scale, usable(plan.device_memory) / scale
    axes.axhline(device, color=_LIMIT, linewidth=2, label=f"device: {in_bytes(device * scale)}")
    axes.axhline(
        may, color=_LIMIT, linewidth=1.2, linestyle="--", label=f"usable: {in_bytes(may * scale)}"
    )


def _title(plan: Plan) -> str:
    ranks = f"{plan.num_nodes} x {plan.devices}" if plan.num_nodes > 1 else f"{plan.devices}"
    return f"{plan.model}, {ranks} ranks, {plan.precision}: memory at the worst moment of a step"
