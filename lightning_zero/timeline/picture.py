"""Draws a timeline with matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from lightning_zero.engine.summary import in_bytes
from lightning_zero.timeline.record import ROWS, RankRecord, Row, Timeline, UnitRecord
from lightning_zero.timeline.words import explanation, headline

COLORS = {
    "forward": "#3f7ad6",
    "recompute": "#9dbdf0",
    "backward": "#e58233",
    "optimizer": "#8a5cc7",
    "gather": "#12a08a",
    "reduce": "#d2437a",
    "wait": "#8d97a5",
    "parameters": "#3f7ad6",
    "masters": "#2b4a80",
    "gradients": "#e58233",
    "transient": "#12a08a",
}
_INK, _SOFT, _LINE, _PALE = "#1d2530", "#687384", "#dfe3e8", "#cfdef5"
_NAMES: dict[Row, str] = {
    "compute": "compute",
    "gather": "gathers",
    "reduce": "reductions",
    "wait": "waiting",
}
_HEIGHTS: dict[Row, float] = {"compute": 1.3, "gather": 1.0, "reduce": 1.0, "wait": 0.6}
_MEMORY = ("parameters", "masters", "optimizer", "gradients", "transient")
Bar = tuple[float, float, float, float]
_RANKS = 4  # that are drawn; the page shows all that were recorded
_UNITS = 40  # whose names can be read


def draw(timeline: Timeline, path: Path) -> None:
    """Write the picture as a PNG: what ranks do, what is whole when, what it costs, who has what.

    Args:
        timeline: What was recorded; the first ranks are drawn.
        path: The file.
    """
    ranks = timeline.ranks[:_RANKS]
    units = len(timeline.units)
    heights = [0.62 * len(ranks) + 0.5, min(0.115 * units, 6) + 0.6, 1.5, 0.16 * len(ranks) + 0.35]
    with rc_context({"font.family": "DejaVu Sans", "font.size": 8, "axes.edgecolor": _LINE}):
        figure = Figure(
            figsize=(11, sum(heights) + 1.9),
            facecolor="white",
            layout=ConstrainedLayoutEngine(h_pad=0.06),
        )
        FigureCanvasAgg(figure)
        words = "\n".join(textwrap.wrap(explanation(timeline), 150))
        figure.suptitle(headline(timeline), x=0.01, ha="left", size=14, weight="bold", color=_INK)
        axes = figure.subplots(5, 1, height_ratios=[0.35, *heights])
        axes[0].axis("off")
        axes[0].text(
            0, 1, words, va="top", size=9, color=_SOFT, transform=axes[0].transAxes, wrap=False
        )
        _draw_lanes(axes[1], timeline, ranks)
        _draw_whole(axes[2], timeline, ranks[0])
        _draw_memory(axes[3], timeline, ranks[0])
        for axis in axes[1:4]:
            axis.set_xlim(0, timeline.duration * 1e3)
            axis.tick_params(colors=_SOFT, length=0)
            axis.grid(axis="x", color=_LINE, linewidth=0.6)
            axis.set_axisbelow(True)
            for side in ("top", "right", "left"):
                axis.spines[side].set_visible(False)
        axes[3].set_xlabel("milliseconds", color=_SOFT)
        _draw_keeps(axes[4], timeline)
        figure.savefig(path, dpi=130)


def _title(axis: Any, words: str) -> None:
    axis.set_title(words, loc="left", size=10, weight="bold", color=_INK)


def _legend(axis: Any, items: list[tuple[str, str]]) -> None:
    axis.legend(
        handles=[Patch(color=color, label=word) for word, color in items],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(items),
        frameon=False,
        borderaxespad=0.1,
        handlelength=1,
        labelcolor=_SOFT,
    )


def _bars(axis: Any, bars: list[Bar], color: str, **more: Any) -> None:
    """Draw many rectangles of one colour: start and end in seconds, bottom and top."""
    corners = [
        [(a * 1e3, low), (a * 1e3, high), (b * 1e3, high), (b * 1e3, low)]
        for a, b, low, high in bars
    ]
    axis.add_collection(PolyCollection(corners, facecolor=color, **{"linewidth": 0, **more}))


def _draw_lanes(axis: Any, timeline: Timeline, ranks: list[RankRecord]) -> None:
    _title(axis, "What each rank does")
    rows = [row for row in ROWS if timeline.world_size > 1 or row == "compute"]
    y, ticks, names = 0.0, [], []
    for record in ranks:
        for row in rows:
            top, y = y, y - _HEIGHTS[row]
            ticks.append((top + y) / 2)
            names.append(f"rank {record.rank}   compute" if row == "compute" else _NAMES[row])
            _draw_row(axis, record, row, y + 0.12, top)
        y -= 0.5
    axis.set_yticks(ticks, names)
    axis.set_ylim(y, 0.3)
    kinds = {span.kind for record in ranks for span in record.spans}
    order = ("forward", "recompute", "backward", "optimizer", "gather", "reduce", "wait")
    _legend(axis, [(kind, COLORS[kind]) for kind in order if kind in kinds])


def _draw_row(axis: Any, record: RankRecord, row: Row, low: float, high: float) -> None:
    by_kind: dict[str, list[Bar]] = {}
    spans = [span for span in record.spans if span.row == row]
    lanes, ends = [], list[float]()
    for span in spans:  # side by side where they overlap
        lane = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [span.end]
        lanes.append(lane)
    each = (high - low) / max(len(ends), 1)
    for span, lane in zip(spans, lanes, strict=True):
        if row == "compute":
            by_kind.setdefault(span.kind, []).append((span.start, span.end, low, high))
        else:
            top = high - lane * each
            by_kind.setdefault(span.kind, []).append((span.start, span.end, top - each, top))
    for kind in sorted(by_kind, key=lambda kind: not kind.endswith(" pass")):
        color = COLORS[kind.removesuffix(" pass")]
        # Without an edge one cannot tell neighbours; with one, those too thin could not be seen.
        edge = {} if row == "wait" or len(ends) > 4 else {"edgecolor": "white", "linewidth": 0.4}
        alpha = 0.25 if kind.endswith(" pass") else 1.0
        _bars(axis, by_kind[kind], color, alpha=alpha, **edge)


def _draw_whole(axis: Any, timeline: Timeline, record: RankRecord) -> None:
    _title(axis, f"What is whole when, on rank {record.rank}")
    units = timeline.units
    always = [-i for i, unit in enumerate(units) if not unit.sharded]
    replicated: list[Bar] = [(0.0, timeline.duration, low, low + 0.5) for low in always]
    _bars(axis, replicated, _PALE)
    full: list[Bar] = [(p.start, p.end, -p.unit, -p.unit + 0.5) for p in record.whole]
    _bars(axis, full, COLORS["transient"])
    share = 1.01 / timeline.world_size if timeline.world_size > 1 else 0
    for small, alpha in ((True, 0.4), (False, 1.0)):
        bars = []
        for p in record.gradients:
            part = min(p.nbytes / units[p.unit].nbytes, 1.0)
            if (part < share) == small:
                low = -p.unit - 0.38
                bars.append((p.start, p.end, low, low + 0.32 * part))
        _bars(axis, bars, COLORS["gradients"], alpha=alpha)
    index = {unit.name: i for i, unit in enumerate(units)}
    busy = [
        (span.start, span.end, -index[span.label] + 0.36, -index[span.label] + 0.5)
        for span in record.spans
        if span.row == "compute" and span.label in index
    ]
    _bars(axis, busy, _INK)
    axis.set_ylim(-len(units) + 0.4, 0.7)
    if len(units) <= _UNITS:
        axis.set_yticks([-i for i in range(len(units))], [unit.name for unit in units], size=6.5)
    else:
        axis.set_yticks([])
    items = [("gradients (pale: only this rank's slice)", COLORS["gradients"])]
    if any(unit.sharded for unit in units):
        items.insert(0, ("the unit computes", _INK))
        items.insert(0, ("full values, gathered", COLORS["transient"]))
    if replicated:
        items.insert(0, ("full parameters, all the time", _PALE))
    _legend(axis, items)


def _draw_memory(axis: Any, timeline: Timeline, record: RankRecord) -> None:
    _title(axis, f"What it costs: bytes held on rank {record.rank}, without activations")
    times = [sample.time * 1e3 for sample in record.held] + [record.end * 1e3]
    times[0] = 0.0
    below = [0.0] * len(times)
    items = []
    for kind in _MEMORY:
        values = [float(getattr(sample, kind)) for sample in record.held]
        if any(values):
            above = [a + b for a, b in zip(below, [*values, values[-1]], strict=True)]
            axis.fill_between(times, below, above, step="post", color=COLORS[kind], linewidth=0)
            below = above
            word = {"optimizer": "optimizer state", "transient": "gathered and exchanged"}
            items.append((word.get(kind, kind), COLORS[kind]))
    whole = timeline.whole_nbytes
    axis.axhline(whole, color=_INK, linewidth=0.9, linestyle=(0, (6, 4)))
    axis.annotate(
        f"unsharded, at rest: {in_bytes(whole)}",
        (1, whole),
        xycoords=("axes fraction", "data"),
        xytext=(-4, -10),
        textcoords="offset points",
        ha="right",
        color=_INK,
    )
    axis.annotate(
        f"peak: {in_bytes(record.peak)}",
        (0, record.peak),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3 if record.peak < 0.8 * whole else -10),
        textcoords="offset points",
        color=_INK,
    )
    axis.set_ylim(0, max(whole, record.peak) * 1.05)
    axis.yaxis.set_major_locator(MaxNLocator(4))
    axis.yaxis.set_major_formatter(lambda value, _: in_bytes(value))
    _legend(axis, items)


def _draw_keeps(axis: Any, timeline: Timeline) -> None:
    """Draw figure 1 of the ZeRO paper (arXiv 1910.02054) for this very model."""
    several = timeline.world_size > 1
    _title(axis, "Who keeps what between steps: each strip is the whole model, unit after unit")
    total = sum(unit.flat_numel for unit in timeline.units)
    columns = [
        ("parameters", timeline.stage == 3 and several, COLORS["parameters"]),
        ("gradients", timeline.stage >= 2 and several, COLORS["gradients"]),
        ("optimizer state", several, COLORS["optimizer"]),
    ]
    shown = [record.rank for record in timeline.ranks[:_RANKS]]
    for column, (name, sharded, color) in enumerate(columns):
        left = column * 1.06
        part = f"1/{timeline.world_size}" if sharded else "all"
        axis.text(left, 0.55, f"{name}: {part} on each rank", color=_SOFT, va="bottom")
        for place, rank in enumerate(shown):
            axis.add_patch(_box(left, -place - 0.4, 1, 0.8, "#f0f2f5"))
            before = 0
            for unit in timeline.units:
                kept = _kept(unit, rank, name) if sharded else [(0, unit.flat_numel)]
                for first, numel in kept:
                    start = left + (before + first) / total
                    axis.add_patch(_box(start, -place - 0.4, numel / total, 0.8, color))
                before += unit.flat_numel
    axis.set_yticks([-place for place in range(len(shown))], [f"rank {rank}" for rank in shown])
    axis.set_xticks([])
    axis.set_xlim(0, 3.12)
    axis.set_ylim(-len(shown) + 0.5, 1.2)
    axis.tick_params(colors=_SOFT, length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _kept(unit: UnitRecord, rank: int, what: str) -> list[tuple[int, int]]:
    """List what a rank keeps of a unit: first element and number of elements of each part."""
    if what == "optimizer state" and any(owner >= 0 for *_, owner in unit.params):
        return [(first, numel) for _, first, numel, owner in unit.params if owner == rank]
    return [(rank * unit.shard_numel, unit.shard_numel)]


def _box(x: float, y: float, width: float, height: float, color: str) -> Any:
    return Rectangle((x, y), width, height, facecolor=color, edgecolor="white", linewidth=0.3)
