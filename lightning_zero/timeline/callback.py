"""The callback that records a step and writes what it saw."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_zero.engine import objects
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.strategy import ZeroStrategy
from lightning_zero.timeline.clocks import clock_offsets
from lightning_zero.timeline.page import as_page
from lightning_zero.timeline.record import RankRecord, Timeline, assemble, describe_units
from lightning_zero.timeline.recorder import Recorder
from lightning_zero.timeline.trace import chrome_trace

Format = Literal["html", "png", "trace"]
_FORMATS = ("html", "png", "trace")


class ZeroTimeline(Callback):
    """Records one training step on every rank and draws it.

    Written are ``timeline-step10.html``, a page of its own with one lane per rank: what it
    computed, gathered, reduced and waited for, what was whole when, the bytes that it held, and
    which slice of each unit it owns; the same as ``timeline-step10.png`` (needs matplotlib); and
    ``timeline-step10.json``, a Chrome trace for chrome://tracing or ui.perfetto.dev.

    ```python
    trainer = Trainer(strategy="zero3", devices=4, callbacks=[ZeroTimeline(step=10)])
    ```

    Nothing is recorded, and no hook stays, before and after that step.

    Args:
        step: The optimizer step to record: the first batch that begins when ``trainer.global_step``
            has reached it, and those after it until the next optimizer step is done. The first
            steps are not typical.
        dirpath: The folder to write to. Default: the logger's folder, or the trainer's
            ``default_root_dir``.
        ranks: How many ranks to record, from rank 0 on, or a list of ranks.
        formats: Which of ``"html"``, ``"png"`` and ``"trace"`` to write.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        step: int = 10,
        dirpath: str | Path | None = None,
        ranks: int | Sequence[int] = 8,
        formats: Sequence[Format] = ("html", "png", "trace"),
    ) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r} must be a whole number from 0 on.")
        chosen = list(range(ranks)) if isinstance(ranks, int) else list(ranks)
        if not chosen or isinstance(ranks, bool) or any(rank < 0 for rank in chosen):
            raise ValueError(f"ranks={ranks!r} must be a positive number, or a list of ranks.")
        for name in formats:
            if name not in _FORMATS:
                words = ", ".join(map(repr, _FORMATS))
                raise ValueError(f"formats={list(formats)!r}: {name!r} is none of {words}.")
        self.step = step
        self.dirpath = dirpath
        self.ranks = chosen
        self.formats = list(formats)
        self._recorder: Recorder | None = None
        self._began = 0
        self._done = False

    # Lightning's hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy, ZeroStrategy):
            raise MisconfigurationException(
                "ZeroTimeline watches the engine of the zero strategies, and this run uses "
                f"{type(trainer.strategy).__name__}: use Trainer(strategy='zero1', 'zero2' or "
                "'zero3'), or leave the callback out."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._done = trainer.global_step > self.step
        if self._done:
            rank_zero_warn(
                f"ZeroTimeline(step={self.step}): training goes on from step "
                f"{trainer.global_step}, so nothing will be recorded. Choose a later step."
            )
        if not self._done and "png" in self.formats and find_spec("matplotlib") is None:
            rank_zero_warn(
                "ZeroTimeline writes no PNG, since matplotlib is not installed: install it, or "
                "leave 'png' out of formats=['html', 'trace']."
            )

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._done or self._recorder is not None or trainer.global_step < self.step:
            return
        self._began = trainer.global_step
        self._recorder = Recorder(_engine(trainer), trainer.global_rank)
        self._recorder.start()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._recorder is not None and trainer.global_step > self._began:
            recorder, self._recorder = self._recorder, None
            self._done = True
            self._write(trainer, recorder.stop())

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._give_up()
        if not self._done:
            self._done = True
            rank_zero_warn(
                f"ZeroTimeline(step={self.step}): training ended after {trainer.global_step} "
                "steps, so nothing was recorded. Choose an earlier step."
            )

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._give_up()

    def _give_up(self) -> None:
        if self._recorder is not None:
            self._recorder.give_up()
            self._recorder = None

    # Writing

    def _write(self, trainer: Trainer, record: RankRecord) -> None:
        engine = _engine(trainer)
        folder = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
        timeline = self._collect(engine, record)
        if timeline is None:
            return
        stem = folder / f"timeline-step{self._began}"
        written: list[Path] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written = write(timeline, stem, self.formats)
        except Exception as error:  # no picture is worth a run, and the other ranks go on
            rank_zero_warn(f"ZeroTimeline could not write {stem}.*: {error!r}")
        if written:
            rank_zero_info(f"Timeline of step {self._began}: {', '.join(map(str, written))}")

    def _collect(self, engine: ZeroEngine, record: RankRecord) -> Timeline | None:
        """Bring the records to rank 0; return None on the others."""
        talk = engine.collectives
        offsets = clock_offsets(talk)
        units = describe_units(engine)
        chosen = record if talk.rank in self.ranks or talk.rank == 0 else None
        told = objects.gather(talk, (chosen, engine.ledger.held.optimizer), "timelines")
        if offsets is None:
            return None
        aligned = [
            each.shifted(offset)
            for (each, _), offset in zip(told, offsets, strict=True)
            if each is not None and (each.rank in self.ranks or talk.world_size == 1)
        ]
        state_nbytes = sum(nbytes for _, nbytes in told)
        return assemble(engine, self._began, aligned or [told[0][0]], units, state_nbytes)


def write(timeline: Timeline, stem: Path, formats: Sequence[Format]) -> list[Path]:
    """Write a timeline.

    Args:
        timeline: What was recorded.
        stem: Where to, without a suffix.
        formats: Which of ``"html"``, ``"png"`` and ``"trace"``.

    Returns:
        The files that were written. A PNG is left out if matplotlib is missing.
    """
    written = []
    if "html" in formats:
        written.append(stem.with_name(f"{stem.name}.html"))
        written[-1].write_text(as_page(timeline), encoding="utf-8")
    if "png" in formats and find_spec("matplotlib") is not None:
        from lightning_zero.timeline.picture import draw

        written.append(stem.with_name(f"{stem.name}.png"))
        draw(timeline, written[-1])
    if "trace" in formats:
        written.append(stem.with_name(f"{stem.name}.json"))
        written[-1].write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
    return written


def _engine(trainer: Trainer) -> ZeroEngine:
    assert isinstance(trainer.strategy, ZeroStrategy)
    return trainer.strategy.engine
