"""Watches one rank's engine and module for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.flat import FlatBuffer, FlatState
from lightning_zero.engine.ledger import Holder, Holdings
from lightning_zero.engine.observer import Event
from lightning_zero.engine.unit import Unit
from lightning_zero.engine.units import plan_units
from lightning_zero.timeline.record import Presence, RankRecord, Row, Sample, Span

_GAP = 3e-5  # seconds between two waits for the same thing that are drawn as one

_PASSES: dict[Event, tuple[str, str]] = {
    Event.FORWARD: ("forward pass", "begin"),
    Event.FORWARD_END: ("forward pass", "end"),
    Event.BACKWARD: ("backward pass", "begin"),
    Event.BACKWARD_END: ("backward pass", "end"),
    Event.STEP: ("optimizer", "begin"),
    Event.STEP_END: ("optimizer", "end"),
}


class Recorder:
    """An observer of the engine that also puts hooks on modules, from ``start`` to ``stop``.

    While it records it only appends to lists. On a GPU every moment is an event on the compute
    stream, so times are those of the device and not of the host that runs ahead of it.

    Args:
        engine: The engine to watch.
        rank: The global rank of this process.
    """

    def __init__(self, engine: ZeroEngine, rank: int) -> None:
        self._engine = engine
        self._rank = rank
        self._device = engine.collectives.device
        self._moments: list[tuple[Any, Event, FlatBuffer | None, str | None]] = []
        self._held: list[tuple[Any, Holder | None, int, Holdings]] = []
        self._modules: list[tuple[Any, str, str, bool]] = []  # time, kind, name, begins
        self._moves: dict[str, deque[tuple[Any, Any]]] = {}
        self._handles: list[Any] = []
        self._units = {id(buffer): unit for unit in engine.units for buffer in unit.buffers}
        self._record = RankRecord(rank)
        self._peak_before = 0, Holdings()

    # The observer

    def happened(
        self, event: Event, buffer: FlatBuffer | None = None, label: str | None = None
    ) -> None:
        """Note an event of the engine."""
        self._moments.append((self._now(), event, buffer, label))

    def held(self, holder: Holder | None, total: Holdings) -> None:
        """Note what the rank holds."""
        nbytes = 0 if holder is None else holder.noted.gradients
        self._held.append((self._now(), holder, nbytes, total))

    def moved(self, label: str, started: Any, done: Any) -> None:
        """Note a transfer on a stream of its own."""
        self._moves.setdefault(label, deque()).append((started, done))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    # Start and stop

    def start(self) -> None:
        """Begin to record."""
        self._synchronize()
        self._base = self._now()
        self._record.start = perf_counter()
        self._traffic = replace(self._engine.collectives.traffic)
        self._open_gathers = {
            id(buffer): self._record.start
            for unit in self._engine.units
            for buffer in unit.buffers
            if buffer.state is FlatState.GATHERING
        }
        self._open_whole = {
            id(buffer): self._record.start
            for unit in self._engine.units
            for buffer in unit.buffers
            if buffer.shards_parameters and buffer.state is FlatState.WORKING
        }
        ledger = self._engine.ledger
        self._peak_before = ledger.peak, ledger.at_peak  # of the whole run, which goes on
        ledger.reset_peak()
        for unit in self._engine.units:
            self.held(unit, ledger.held)
        ledger.observer = self
        for name, module in _modules(self._engine):
            self._watch(name, module)

    def stop(self) -> RankRecord:
        """Stop recording, also what it did to modules; return what happened."""
        record, ledger = self._record, self._engine.ledger
        record.peak = ledger.peak
        self.give_up()
        self._synchronize()
        record.end = perf_counter()
        now, before = self._engine.collectives.traffic, self._traffic
        record.gathered = now.gather - before.gather
        record.reduced = now.reduce - before.reduce
        record.exchanged = now.exchange - before.exchange
        record.spans = sorted(
            [*self._passes(), *self._module_spans(), *self._collectives(), *self._waits()],
            key=lambda span: (span.row, span.start, -span.end),
        )
        record.waited = sum(span.end - span.start for span in record.spans if span.row == "wait")
        record.gradients = self._gradients()
        record.held = [Sample(self._time(at), *total) for at, _, _, total in self._held]
        return record

    def give_up(self) -> None:
        """Stop watching, whatever has been recorded."""
        self._engine.ledger.observer = None
        self._engine.ledger.recall_peak(*self._peak_before)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _time(self, moment: Any) -> float:
        """Return a moment in seconds of the host's clock."""
        if isinstance(moment, float):
            return moment
        return self._record.start + float(self._base.elapsed_time(moment)) / 1e3

    # Modules

    def _watch(self, name: str, module: nn.Module) -> None:
        def note(kind: str, begins: bool) -> Callable[..., None]:
            return lambda *_: self._modules.append((self._now(), kind, name, begins))

        begin, end = note("backward", True), note("backward", False)

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            note("recompute" if _in_backward() else "forward", True)()
            self._hook(tree_leaves((args, kwargs)), end)

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            note("recompute" if _in_backward() else "forward", False)()
            self._hook(tree_leaves(output), begin)

        # After the engine has gathered, before it releases: its work is no computing.
        self._handles += [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, prepend=True, always_call=True),
        ]

    def _hook(self, values: list[Any], call: Callable[..., None]) -> None:
        if not torch.is_grad_enabled():
            return
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                register: Any = value.register_hook
                self._handles.append(register(call))

    # What happened

    def _passes(self) -> list[Span]:
        spans, opened = [], dict[str, float]()
        for at, event, _, _ in self._moments:
            if event not in _PASSES:
                continue
            kind, end = _PASSES[event]
            time = self._time(at)
            if end == "begin":
                opened.setdefault(kind, time)
            elif kind in opened:
                spans.append(Span("compute", kind, opened.pop(kind), time))
        return spans

    def _module_spans(self) -> list[Span]:
        """Pair the moments of modules.

        A module's backward ends when the gradients of its inputs are there; if it gives none, when
        that of another module begins that is none of its own.
        """
        spans: list[Span] = []
        opened: dict[tuple[str, str], float] = {}

        def close(kind: str, name: str, time: float) -> None:
            begun = opened.pop((kind, name), None)
            if begun is not None:
                spans.append(Span("compute", kind, begun, time, label=name))

        for at, kind, name, begins in self._modules:
            time = self._time(at)
            if not begins:
                close(kind, name, time)
                continue
            for other_kind, other in list(opened):
                if kind == other_kind == "backward" and not name.startswith(f"{other}."):
                    close(other_kind, other, time)
            opened.setdefault((kind, name), time)
        ends = [span.end for span in self._passes() if span.kind == "backward pass"]
        for kind, name in list(opened):
            begun = opened[kind, name]
            close(kind, name, min([end for end in ends if end >= begun], default=self._record.end))
        return spans

    def _collectives(self) -> list[Span]:
        """Pair gathers and reductions, and note when full values were present."""
        spans: list[Span] = []
        reducing: dict[int, float] = {}
        for at, event, buffer, _ in self._moments:
            if buffer is None:
                continue
            time, key = self._time(at), id(buffer)
            if event is Event.GATHER:
                self._open_gathers[key] = time
            elif event is Event.GATHER_END:
                start = self._open_gathers.pop(key, self._record.start)
                spans.append(self._transfer("gather", buffer, start, time))
                if buffer.shards_parameters:
                    self._open_whole[key] = time
            elif event is Event.FREE and key in self._open_whole:
                self._note_whole(key, time)
            elif event is Event.REDUCE:
                reducing[key] = time
            elif event is Event.REDUCE_END:
                start = reducing.pop(key, self._record.start)
                spans.append(self._transfer("reduce", buffer, start, time))
        for key, start in self._open_gathers.items():
            buffer = self._buffer(key)
            spans.append(self._transfer("gather", buffer, start, self._record.end))
        for key in list(self._open_whole):
            self._note_whole(key, self._record.end)
        return spans

    def _note_whole(self, key: int, end: float) -> None:
        buffer = self._buffer(key)
        start = self._open_whole.pop(key)
        unit = self._units[key].index
        self._record.whole.append(Presence(unit, start, end, buffer.flat_nbytes))

    def _transfer(self, row: Row, buffer: FlatBuffer, start: float, end: float) -> Span:
        unit = self._units[id(buffer)]
        label = "" if buffer is unit.working else "fp32 values"
        moves = self._moves.get(f"{row} of {buffer.label}")
        if moves and start > self._record.start:  # the times on the stream are the true ones
            started, done = moves.popleft()
            start, end = self._time(started), self._time(done)
        return Span(row, row, start, end, unit.index, label)

    def _buffer(self, key: int) -> FlatBuffer:
        return next(buffer for buffer in self._units[key].buffers if id(buffer) == key)

    def _waits(self) -> list[Span]:
        spans: list[Span] = []
        begun: tuple[float, str] | None = None
        for at, event, _, label in self._moments:
            if event is Event.WAIT:
                begun = self._time(at), label or ""
            elif event is Event.WAIT_END and begun is not None:
                start, what = begun
                end, begun = self._time(at), None
                if spans and spans[-1].label == what and start - spans[-1].end < _GAP:
                    start = spans.pop().start
                spans.append(Span("wait", "wait", start, end, label=what))
        return spans

    def _gradients(self) -> list[Presence]:
        found: list[Presence] = []
        opened: dict[int, tuple[float, int]] = {}
        for at, holder, nbytes, _ in [*self._held, *self._closing()]:
            if not isinstance(holder, Unit):
                continue
            time = at if isinstance(at, float) else self._time(at)
            start, before = opened.get(holder.index, (time, 0))
            if nbytes != before:
                if before:
                    found.append(Presence(holder.index, start, time, before))
                opened[holder.index] = time, nbytes
        return found

    def _closing(self) -> list[tuple[Any, Holder | None, int, Holdings]]:
        nothing = Holdings()
        return [(self._record.end, unit, 0, nothing) for unit in self._engine.units]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _modules(engine: ZeroEngine) -> list[tuple[str, nn.Module]]:
    """List the modules whose computing is shown: those of the units, or what would be units."""
    if any(unit.shards_parameters for unit in engine.units):
        names = dict.fromkeys(unit.name.split(" (")[0] for unit in engine.units)
    else:
        names = dict.fromkeys(
            plan.name.split(" (")[0] for plan in plan_units(engine.module, "auto")
        )
    return [(name, engine.module.get_submodule(name)) for name in names if name != "root"]
