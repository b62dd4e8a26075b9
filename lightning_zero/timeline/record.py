"""What a timeline consists of, in plain values that can be sent, drawn and written as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.optimizer import OwningOptimizer
from lightning_zero.engine.unit import Unit

Row = Literal["compute", "gather", "reduce", "wait"]
ROWS: tuple[Row, ...] = ("compute", "gather", "reduce", "wait")


class Span(NamedTuple):
    """Something that took a while on one rank.

    Attributes:
        row: Where it is drawn.
        kind: ``forward``, ``recompute``, ``backward``, ``optimizer``, ``gather``, ``reduce``,
            ``wait``; ``forward pass`` and ``backward pass`` surround those of single modules.
        start: Seconds.
        end: Seconds.
        unit: Index of the unit, -1 if it is about none.
        label: A module's name or what is waited for.
    """

    row: Row
    kind: str
    start: float
    end: float
    unit: int = -1
    label: str = ""


class Presence(NamedTuple):
    """A time during which a rank has something of a unit beyond what it always has.

    Attributes:
        unit: Index of the unit.
        start: Seconds.
        end: Seconds.
        nbytes: Bytes of it.
    """

    unit: int
    start: float
    end: float
    nbytes: int


class Sample(NamedTuple):
    """Bytes that a rank holds from a moment on; the kinds are those of ``Holdings``."""

    time: float
    parameters: int
    masters: int
    gradients: int
    optimizer: int
    transient: int


@dataclass
class RankRecord:
    """What one rank did during the step. Times are seconds of its own clock until aligned.

    Attributes:
        rank: The global rank.
        start: When the recording began.
        end: When it ended.
        spans: In the order of their starts, by row.
        whole: When the full values of sharded units were present.
        gradients: When units had gradients, with their bytes.
        held: Bytes over time.
        peak: The most bytes during the step.
        gathered: Bytes that the rank has received in gathers.
        reduced: Bytes that it has sent in reductions.
        exchanged: Bytes that it has sent for optimizers that need whole parameters.
        waited: Seconds of the row ``wait``.
    """

    rank: int
    start: float = 0.0
    end: float = 0.0
    spans: list[Span] = field(default_factory=list)
    whole: list[Presence] = field(default_factory=list)
    gradients: list[Presence] = field(default_factory=list)
    held: list[Sample] = field(default_factory=list)
    peak: int = 0
    gathered: int = 0
    reduced: int = 0
    exchanged: int = 0
    waited: float = 0.0

    def shifted(self, seconds: float) -> RankRecord:
        """Return the same on a clock that shows ``seconds`` more."""
        return RankRecord(
            rank=self.rank,
            start=self.start + seconds,
            end=self.end + seconds,
            spans=[s._replace(start=s.start + seconds, end=s.end + seconds) for s in self.spans],
            whole=[s._replace(start=s.start + seconds, end=s.end + seconds) for s in self.whole],
            gradients=[
                s._replace(start=s.start + seconds, end=s.end + seconds) for s in self.gradients
            ],
            held=[s._replace(time=s.time + seconds) for s in self.held],
            peak=self.peak,
            gathered=self.gathered,
            reduced=self.reduced,
            exchanged=self.exchanged,
            waited=self.waited,
        )


@dataclass(frozen=True)
class UnitRecord:
    """One unit, as all ranks see it.

    Attributes:
        name: The module's name, or the bucket's.
        dtype: Of the working values.
        nbytes: Bytes of the full working values, with padding.
        numel: Elements of its parameters.
        flat_numel: Elements of its flat buffer, with padding.
        shard_numel: Elements that each rank owns.
        sharded: Whether full values are absent between uses.
        params: Name, first element in the flat buffer, elements, and the rank that owns the whole
            parameter for optimizer steps, or -1 if each steps on its own slice.
    """

    name: str
    dtype: str
    nbytes: int
    numel: int
    flat_numel: int
    shard_numel: int
    sharded: bool
    params: tuple[tuple[str, int, int, int], ...]


@dataclass
class Timeline:
    """One step on several ranks, on one clock that starts at 0.

    Attributes:
        stage: 1, 2 or 3.
        world_size: Number of ranks that train, N.
        step: The optimizer step that was recorded.
        device: Its type.
        units: In the order of registration.
        ranks: The records, by rank; of some ranks only, if there are many.
        duration: Seconds.
        whole_nbytes: Bytes that each rank would hold at rest, before the step, if nothing were
            sharded: parameters, gradients and the optimizers' state.
    """

    stage: int
    world_size: int
    step: int
    device: str
    units: list[UnitRecord]
    ranks: list[RankRecord]
    duration: float
    whole_nbytes: int

    def as_json(self) -> dict[str, Any]:
        """Return plain dictionaries, lists and numbers; times in microseconds."""

        def rounded(spans: Sequence[Any]) -> list[list[Any]]:
            return [[round(v * 1e6, 1) if isinstance(v, float) else v for v in s] for s in spans]

        ranks = [
            {
                **{key: value for key, value in asdict(rank).items() if key not in _TIMED},
                **{key: rounded(getattr(rank, key)) for key in _TIMED},
            }
            for rank in self.ranks
        ]
        return {
            "stage": self.stage,
            "worldSize": self.world_size,
            "step": self.step,
            "device": self.device,
            "duration": round(self.duration * 1e6, 1),
            "wholeBytes": self.whole_nbytes,
            "units": [asdict(unit) for unit in self.units],
            "ranks": ranks,
        }


_TIMED = ("spans", "whole", "gradients", "held")


def describe_units(engine: ZeroEngine) -> list[UnitRecord]:
    """Describe the units of an engine."""
    owners: dict[int, int] = {}
    for optimizer in engine.optimizers:
        if isinstance(optimizer, OwningOptimizer):
            for slot in optimizer.slots():
                owners[id(slot)] = optimizer.owners.of(slot)
    return [_describe(unit, owners) for unit in engine.units]


def _describe(unit: Unit, owners: dict[int, int]) -> UnitRecord:
    working = unit.working
    return UnitRecord(
        name=unit.name,
        dtype=str(working.dtype).removeprefix("torch."),
        nbytes=working.flat_nbytes,
        numel=sum(slot.numel for slot in unit.slots),
        flat_numel=unit.layout.flat_numel,
        shard_numel=unit.layout.shard_numel,
        sharded=working.shards_parameters,
        params=tuple(
            (slot.name, slot.offset, slot.numel, owners.get(id(slot), -1)) for slot in unit.slots
        ),
    )


def whole_nbytes(engine: ZeroEngine, state_nbytes: int) -> int:
    """Count what each rank would hold at rest if nothing were sharded.

    Args:
        engine: Of any rank.
        state_nbytes: Bytes of the optimizers' state on all ranks together.
    """
    params = grads = 0
    for unit in engine.units:
        nbytes = sum(slot.numel for slot in unit.slots) * unit.dtype.itemsize
        params += nbytes
        grads += nbytes if unit.is_trainable else 0
    return params + grads + state_nbytes


def assemble(
    engine: ZeroEngine,
    step: int,
    records: Sequence[RankRecord],
    units: list[UnitRecord],
    state_nbytes: int,
) -> Timeline:
    """Put the records of several ranks, whose clocks agree, on one clock that starts at 0."""
    start = min(record.start for record in records)
    ranks = [record.shifted(-start) for record in sorted(records, key=lambda r: r.rank)]
    return Timeline(
        stage=engine.stage,
        world_size=engine.collectives.world_size,
        step=step,
        device=engine.collectives.device.type,
        units=units,
        ranks=ranks,
        duration=max(record.end for record in ranks),
        whole_nbytes=whole_nbytes(engine, state_nbytes),
    )
