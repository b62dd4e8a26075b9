"""Writes a timeline as a Chrome trace, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

from typing import Any

from lightning_zero.timeline.record import ROWS, Timeline


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace in the JSON object format of trace events; times in microseconds.

    Each rank is a process. Gathers and reductions, which may overlap, are asynchronous events;
    compute and waits are complete ones; what is held is a counter.
    """
    events: list[dict[str, Any]] = []
    for record in timeline.ranks:
        pid = record.rank
        events.append(_meta("process_name", pid, 0, f"rank {pid}"))
        for tid, row in enumerate(ROWS):
            events.append(_meta("thread_name", pid, tid, row))
        for number, span in enumerate(record.spans):
            unit = timeline.units[span.unit] if span.unit >= 0 else None
            common: dict[str, Any] = {
                "name": _name(span.kind, unit.name if unit else span.label),
                "cat": span.row,
                "pid": pid,
                "tid": ROWS.index(span.row),
                "ts": round(span.start * 1e6, 3),
                "args": {"bytes": unit.nbytes, "unit": unit.name} if unit else {},
            }
            if span.row in ("gather", "reduce"):
                end = {"ph": "e", "ts": round(span.end * 1e6, 3), "args": {}}
                identity = {"id": f"{pid}.{number}"}
                events.append({**common, "ph": "b", **identity})
                events.append({**common, **end, **identity})
            else:
                length = round((span.end - span.start) * 1e6, 3)
                events.append({**common, "ph": "X", "dur": length})
        for sample in record.held:
            kinds = {key: value for key, value in sample._asdict().items() if key != "time"}
            moment = round(sample.time * 1e6, 3)
            events.append({"name": "bytes", "ph": "C", "pid": pid, "ts": moment, "args": kinds})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, what: str) -> str:
    return f"{kind} {what}".strip()


def _meta(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": value}}
