"""ZeroTimeline shows what the engine did, in a page that works, and leaves nothing behind."""

from __future__ import annotations

import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from browser import Browser, find_chromium
from lightning.fabric.utilities.exceptions import MisconfigurationException
from modules import Supervised, Transformer, batches, quiet_trainer
from torch import Tensor

from lightning_zero import ZeroStrategy, ZeroTimeline
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.ledger import Holdings
from lightning_zero.engine.observer import Event
from lightning_zero.engine.summary import in_bytes, in_count, many
from lightning_zero.timeline import clocks
from lightning_zero.timeline.record import UnitRecord
from lightning_zero.timeline.recorder import Recorder
from ranks import run_ranks

STEP = 2
Page = dict[str, Any]


def fit(
    rank: int,
    world_size: int,
    folder: Path,
    stage: int = 3,
    timeline: dict[str, Any] | None = None,
    model: Supervised | None = None,
    strategy: dict[str, Any] | None = None,
    **settings: Any,
) -> list[str]:
    """Train a few steps with a timeline; return this rank's warnings."""
    torch.manual_seed(rank)
    model = model or Transformer()
    callback = ZeroTimeline(**{"step": STEP, "dirpath": folder, **(timeline or {})})
    zero = ZeroStrategy(stage=stage, bucket_mb=0.02, **(strategy or {}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(zero, world_size, callbacks=[callback], **settings)
        trainer.fit(model, batches(model, 5 * 3 * world_size), batches(model, 3 * world_size))
        assert zero.engine.ledger.observer is None
        for module in model.modules():
            assert not module._forward_pre_hooks
            assert not module._forward_hooks
    return [str(warning.message) for warning in caught]


def record(world_size: int, folder: Path, **settings: Any) -> Page:
    """Train, and return the values of the page that was written."""
    run_ranks(fit, world_size, folder, init=False, **settings)
    step = settings.get("timeline", {}).get("step", STEP)
    return read(folder / f"timeline-step{step}.html")


def read(page: Path) -> Page:
    """Return what a page has to show."""
    found = re.search(r'type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    data: Page = json.loads(found[1])
    return data


def spans(rank: Page, row: str, *kinds: str) -> list[list[Any]]:
    """List the spans of a rank in one row, of some kinds only if there are any."""
    return [span for span in rank["spans"] if span[0] == row and (not kinds or span[1] in kinds)]


# What is recorded


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The page of each stage on two ranks, recorded once."""
    found = {}
    for stage in (1, 2, 3):
        folder = tmp_path_factory.mktemp(f"stage{stage}")
        record(2, folder, stage=stage)
        found[stage] = folder / f"timeline-step{STEP}.html"
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_rank_shows_every_block_and_every_collective(
    stage: int, pages: dict[int, Path]
) -> None:
    data = read(pages[stage])
    blocks = [f"blocks.{number}" for number in range(3)]
    assert (data["stage"], data["worldSize"], data["step"]) == (stage, 2, STEP)
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    names = [unit["name"] for unit in data["units"]]
    for rank in data["ranks"]:
        forward = [span[5] for span in spans(rank, "compute", "forward")]
        backward = [span[5] for span in spans(rank, "compute", "backward")]
        assert [name for name in forward if name in blocks] == blocks
        assert [name for name in backward if name in blocks] == blocks[::-1]
        for kind in ("forward pass", "backward pass", "optimizer"):
            assert len(spans(rank, "compute", kind)) == 1
        assert sorted(span[4] for span in spans(rank, "reduce")) == list(range(len(names)))
        assert {span[4] for span in spans(rank, "gather")} == set(range(len(names)))
        for span in rank["spans"]:
            assert 0 <= span[2] <= span[3] <= data["duration"]
        assert rank["waited"] == pytest.approx(
            sum(span[3] - span[2] for span in spans(rank, "wait")) / 1e6, abs=1e-4
        )
    for first, second in zip(*(spans(rank, "reduce") for rank in data["ranks"]), strict=True):
        assert first[4] == second[4]


def test_at_stage_3_a_block_is_whole_while_it_computes_and_not_all_are_at_once(
    pages: dict[int, Path],
) -> None:
    data = read(pages[3])
    names = [unit["name"] for unit in data["units"]]
    for rank in data["ranks"]:
        for _, kind, start, end, _, name in spans(rank, "compute", "forward"):
            index = names.index(name)
            assert any(
                unit == index and since <= start and end <= until
                for unit, since, until, _ in rank["whole"]
            ), (kind, name)
        moments = [since for _, since, _, _ in rank["whole"]]
        at_once = [sum(s <= at < e for _, s, e, _ in rank["whole"]) for at in moments]
        assert max(at_once) < len(names)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_held_over_time_ends_where_the_table_of_placements_says(
    stage: int, pages: dict[int, Path]
) -> None:
    data = read(pages[stage])
    whole = sum(unit["flat_numel"] for unit in data["units"]) * 4
    for rank in data["ranks"]:
        _, params, masters, grads, optimizer, _ = rank["held"][-1]
        assert params == (whole / 2 if stage == 3 else whole)
        assert masters == 0
        assert grads == (whole if stage == 1 else whole / 2)
        assert optimizer == pytest.approx(whole, rel=0.02)
        assert rank["peak"] >= max(sum(sample[1:]) for sample in rank["held"])
        assert rank["reduced"] == whole / 2
        assert rank["gathered"] >= whole / 2
    numel = sum(unit["numel"] for unit in data["units"])
    assert data["wholeBytes"] == pytest.approx(16 * numel, rel=0.02)


def test_units_say_where_their_parameters_lie(pages: dict[int, Path]) -> None:
    model = Transformer()
    expected = {name: param.numel() for name, param in model.named_parameters()}
    for stage in (1, 3):
        found = {}
        for unit in read(pages[stage])["units"]:
            assert unit["flat_numel"] == 2 * unit["shard_numel"]
            for name, offset, numel, owner in unit["params"]:
                assert offset + numel <= unit["flat_numel"]
                assert owner == -1
                found[name] = numel
        assert found == expected


def test_owners_of_whole_parameters_are_named(tmp_path: Path) -> None:
    data = record(2, tmp_path, strategy={"optimizer_sharding": "whole"})
    owners = {owner for unit in data["units"] for *_, owner in unit["params"]}
    assert owners == {0, 1}
    assert all(rank["exchanged"] > 0 for rank in data["ranks"])


def test_what_would_be_held_unsharded_is_the_same_whoever_owns_how_much() -> None:
    def body(rank: int, world_size: int) -> int | None:
        large, small = torch.nn.Linear(8, 1024, bias=False), torch.nn.Linear(1024, 1, bias=False)
        engine = ZeroEngine(torch.nn.Sequential(large, small), stage=2, optimizer_sharding="whole")
        optimizer = torch.optim.Adam(engine.module.parameters())
        engine.attach(optimizer)
        recorder = Recorder(engine, rank)
        recorder.start()
        engine.module(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        timeline = ZeroTimeline()._collect(engine, recorder.stop())
        return None if timeline is None else timeline.whole_nbytes

    counters = 2 * 4
    assert run_ranks(body, 2) == [16 * 9 * 1024 + counters, None]


def test_the_picture_shows_what_owners_keep() -> None:
    picture = pytest.importorskip("lightning_zero.timeline.picture")
    unit = UnitRecord("a", "float32", 64, 14, 16, 8, True, (("a.x", 0, 10, 1), ("a.y", 10, 4, 0)))
    assert picture._kept(unit, 0, "parameters") == picture._kept(unit, 0, "gradients") == [(0, 8)]
    assert [picture._kept(unit, rank, "optimizer state") for rank in (0, 1)] == [
        [(10, 4)],
        [(0, 10)],
    ]


def test_recording_leaves_the_peak_of_the_run_as_it_is() -> None:
    engine = ZeroEngine(torch.nn.Linear(2, 2))
    engine.ledger.passing(Holdings(gradients=10**9))
    before = engine.ledger.peak
    recorder = Recorder(engine, 0)
    recorder.start()
    assert recorder.stop().peak < 10**9
    assert engine.ledger.peak == before
    assert engine.ledger.at_peak.gradients >= 10**9


def test_half_precision_recomputation_and_accumulation(tmp_path: Path) -> None:
    data = record(
        2,
        tmp_path,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        model=Checkpointed(),
        timeline={"step": 1},
    )
    for rank in data["ranks"]:
        assert len(spans(rank, "compute", "forward pass")) == 2
        assert len(spans(rank, "compute", "optimizer")) == 1
        assert len(spans(rank, "compute", "recompute")) == 2 * 3
        assert rank["held"][-1][2] > 0  # masters
    assert {unit["dtype"] for unit in data["units"]} == {"bfloat16", "float32"}


class Checkpointed(Transformer):
    """A transformer whose blocks run again in backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position
        for block in self.blocks:
            hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
        return self.head(self.norm(hidden))


class TwoSteps(Transformer):
    """Manual optimization with two optimizer steps per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


def test_manual_optimization_records_the_whole_batch(tmp_path: Path) -> None:
    data = record(2, tmp_path, model=TwoSteps())
    for rank in data["ranks"]:
        assert len(spans(rank, "compute", "optimizer")) == 2


def test_one_rank_has_a_page_too(tmp_path: Path) -> None:
    data = record(1, tmp_path)
    assert len(spans(data["ranks"][0], "compute", "forward")) >= 3
    assert not spans(data["ranks"][0], "wait")


def test_only_the_ranks_that_were_asked_for_are_kept(tmp_path: Path) -> None:
    assert [r["rank"] for r in record(2, tmp_path, timeline={"ranks": [1, 7]})["ranks"]] == [1]
    assert [r["rank"] for r in record(2, tmp_path, timeline={"ranks": 1})["ranks"]] == [0]


def test_recording_changes_no_number(tmp_path: Path) -> None:
    def body(rank: int, world_size: int, watched: bool) -> dict[str, Tensor]:
        model = Transformer()
        callbacks = [ZeroTimeline(step=1, dirpath=tmp_path, formats=["html"])] if watched else []
        trainer = quiet_trainer("zero3", world_size, callbacks=callbacks)
        trainer.fit(model, batches(model, 24))
        return {key: value.clone() for key, value in model.state_dict().items()}

    plain = run_ranks(body, 2, False, init=False)
    watched = run_ranks(body, 2, True, init=False)
    for before, after in zip(plain, watched, strict=True):
        for key, value in before.items():
            assert torch.equal(value, after[key]), key


# Files


def test_the_three_files_are_written_by_default(pages: dict[int, Path]) -> None:
    for page in pages.values():
        names = sorted(path.name for path in page.parent.iterdir())
        assert names == [f"timeline-step{STEP}.{end}" for end in ("html", "json", "png")]
        picture = page.with_suffix(".png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 20_000


def test_the_trace_is_one_that_chrome_and_perfetto_read(pages: dict[int, Path]) -> None:
    events = json.loads(pages[3].with_suffix(".json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "b", "e", "C"}
    assert {event["pid"] for event in events} == {0, 1}
    for event in events:
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    begun = sorted(event["id"] for event in events if event["ph"] == "b")
    assert begun == sorted(event["id"] for event in events if event["ph"] == "e")
    assert "gather blocks.1" in {event["name"] for event in events}


def test_a_page_needs_nothing_from_outside(pages: dict[int, Path]) -> None:
    text = pages[3].read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert "://" not in text
    assert "__" not in re.sub(r'type="application/json">.*?</script>', "", text, flags=re.DOTALL)


def test_formats_and_a_missing_matplotlib(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> list[str]:
        import lightning_zero.timeline.callback as module

        module.find_spec = lambda name: None  # type: ignore[assignment]
        return fit(rank, world_size, tmp_path, timeline={"formats": ["html", "png"]})

    messages = run_ranks(body, 1, init=False)[0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".html"]
    assert any("matplotlib is not installed" in message for message in messages)


def test_a_folder_that_cannot_be_written_to_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    messages = run_ranks(fit, 2, tmp_path / "file", init=False)
    assert any("could not write" in message for message in messages[0])


# Arguments and other runs


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": -1}, "step=-1"),
        ({"step": True}, "step=True"),
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": [-1]}, r"ranks=\[-1\]"),
        ({"formats": ["svg"]}, "'svg' is none of"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ZeroTimeline(**arguments)


def test_other_strategies_are_refused() -> None:
    model = Transformer()
    trainer = L.Trainer(accelerator="cpu", callbacks=[ZeroTimeline()], logger=False, max_steps=1)
    with pytest.raises(MisconfigurationException, match=r"SingleDeviceStrategy: use .*zero3"):
        trainer.fit(model, batches(model, 3), batches(model, 3))


def test_a_run_that_ends_too_early_says_so(tmp_path: Path) -> None:
    messages = run_ranks(fit, 2, tmp_path, init=False, timeline={"step": 50})
    assert any("training ended after 5 steps" in message for message in messages[0])
    assert not any("training ended" in message for message in messages[1])
    assert not list(tmp_path.iterdir())


def test_a_run_that_goes_on_behind_the_step_says_so(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> list[str]:
        model = Transformer()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for steps in (3, 5):
                callback = ZeroTimeline(step=1, dirpath=tmp_path / "x", formats=["trace"])
                limits = {"max_steps": steps, "max_epochs": 2}
                trainer = quiet_trainer("zero2", world_size, callbacks=[callback], **limits)
                checkpoint = tmp_path / "last.ckpt"
                path = checkpoint if checkpoint.exists() else None
                trainer.fit(model, batches(model, 15), ckpt_path=path)
                trainer.save_checkpoint(checkpoint)
        return [str(warning.message) for warning in caught]

    messages = run_ranks(body, 1, init=False)[0]
    assert sum("goes on from step 3" in message for message in messages) == 1
    assert not any("training ended" in message for message in messages)


def test_an_error_in_the_recorded_step_leaves_no_hook(tmp_path: Path) -> None:
    class Failing(Transformer):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.trainer.global_step == STEP:
                raise ArithmeticError("on purpose")
            return loss

    def body(rank: int, world_size: int) -> None:
        model, strategy = Failing(), ZeroStrategy(stage=3)
        callback = ZeroTimeline(step=STEP, dirpath=tmp_path)
        trainer = quiet_trainer(strategy, world_size, callbacks=[callback])
        with pytest.raises(ArithmeticError):
            trainer.fit(model, batches(model, 24))
        assert strategy.engine.ledger.observer is None
        assert not any(module._forward_hooks for module in model.modules())

    run_ranks(body, 2, init=False)
    assert not list(tmp_path.iterdir())


class Tick:
    """What stands for a CUDA event: it knows when the device got there, in milliseconds."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, later: Tick) -> float:
        """Return the milliseconds until a later one."""
        return later.at - self.at


def test_on_a_gpu_transfers_have_the_times_of_their_stream() -> None:
    engine = ZeroEngine(torch.nn.Linear(4, 4), stage=3)
    recorder, unit = Recorder(engine, 0), engine.units[0]
    ticks = iter(range(100))
    recorder._now = lambda: Tick(float(next(ticks)))  # type: ignore[method-assign]
    recorder.start()
    for _ in range(2):
        recorder.happened(Event.GATHER, unit)
        recorder.moved(f"gather of {unit.label}", Tick(20.0), Tick(30.0))
        recorder.happened(Event.WAIT, label="something")
        recorder.happened(Event.WAIT_END)
        recorder.happened(Event.GATHER_END, unit)
    record = recorder.stop()
    gathers = [span for span in record.spans if span.row == "gather"]
    times = [(span.start - record.start, span.end - record.start) for span in gathers]
    assert times == [pytest.approx((0.020, 0.030))] * 2
    waits = [span.end - span.start for span in record.spans if span.row == "wait"]
    assert waits == pytest.approx([0.001, 0.001])
    assert engine.ledger.observer is None
    engine.restore()


def test_clocks_of_other_hosts_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, world_size: int) -> list[float] | None:
        monkeypatch.setattr(clocks, "_host", lambda: f"host {rank}")
        monkeypatch.setattr(clocks, "perf_counter", lambda: time.perf_counter() + 100 * rank)
        engine = ZeroEngine(torch.nn.Linear(4, 4), stage=1)
        return clocks.clock_offsets(engine.collectives)

    first, *others = run_ranks(body, 3)
    assert others == [None, None]
    assert first is not None
    assert first == pytest.approx([0, -100, -200], abs=0.05)


# The page in a browser

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium")

_FIND = """(() => {{
  const shape = {plot}.shapes.find(s => s[4]().startsWith({words}) && s[2] > 0);
  const area = {plot}.canvas.getBoundingClientRect();
  return shape && [area.left + shape[0] + shape[2] / 2, area.top + shape[1] + shape[3] / 2];
}})()"""


def hover(browser: Browser, plot: str, words: str) -> str:
    """Move the mouse to the first shape whose words begin so; return what the page then says."""
    browser.evaluate(f"{plot}.canvas.scrollIntoView({{block: 'center'}})")
    place = browser.evaluate(_FIND.format(plot=plot, words=json.dumps(words)))
    assert place is not None, f"nothing in {plot} is called {words}"
    browser.mouse("mouseMoved", *place)
    assert browser.evaluate("document.getElementById('tip').style.display") == "block"
    return str(browser.evaluate("document.getElementById('tip').textContent"))


@needs_chromium
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_page_loads_and_tells_names_and_bytes(stage: int, pages: dict[int, Path]) -> None:
    data = read(pages[stage])
    unit = data["units"][-1]
    share = in_bytes(unit["nbytes"] / 2)
    with Browser(dark=stage == 2) as browser:
        browser.open(pages[stage])
        assert browser.evaluate("document.querySelector('h1').textContent") == (
            f"ZeRO stage {stage} on 2 ranks, step {STEP}"
        )
        tip = hover(browser, "lanes", f"gather of {unit['name']}")
        assert f"{in_bytes(unit['nbytes'])} whole, {share} from each rank" in tip
        assert unit["params"][0][0] in tip
        assert "forward blocks.1 · rank 0" in hover(browser, "lanes", "forward blocks.1")
        assert "each rank keeps" in hover(browser, "lanes", f"reduce of {unit['name']}")
        what = "full values" if stage == 3 else "full parameters"
        assert unit["name"] in hover(browser, "whole", f"{what} of {unit['name']}")
        assert "optimizer state:" in hover(browser, "memory", "")
        assert "keeps optimizer state of" in hover(browser, "keeps", "rank 1 keeps optimizer")
        assert share in hover(browser, "slices", f"rank 1 owns this slice of {unit['name']}")
        assert browser.complaints == []


@needs_chromium
def test_dragging_zooms_in_and_a_button_shows_another_rank(pages: dict[int, Path]) -> None:
    with Browser() as browser:
        browser.open(pages[3])
        top = browser.evaluate("lanes.canvas.getBoundingClientRect().top") + 40
        button: dict[str, Any] = dict(button="left", clickCount=1)
        browser.mouse("mousePressed", 400, top, **button)
        browser.mouse("mouseMoved", 600, top, buttons=1)
        browser.mouse("mouseReleased", 600, top, **button)
        start, end = browser.evaluate("view")
        duration = read(pages[3])["duration"]
        assert 0 < start < end < duration
        assert (end - start) / duration == pytest.approx(
            200 / browser.evaluate("lanes.width - GUTTER - RIGHT"), rel=0.01
        )
        browser.evaluate("document.querySelectorAll('#pick button')[1].click()")
        assert browser.evaluate("shown") == 1
        assert "on rank 1" in browser.evaluate("memory.shapes[0][4]()")
        assert browser.complaints == []


# The summary lines


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1.0 kB"), (27.4e6, "27.4 MB"), (219e6, "219 MB")],
)
def test_bytes_are_written_with_a_fitting_unit(nbytes: float, words: str) -> None:
    assert in_bytes(nbytes) == words


def test_counts_are_written_as_people_say_them() -> None:
    assert [in_count(n) for n in (7, 13_700_000, 7.5e9)] == ["7", "13.7M", "7.5B"]
    assert [many(n, "rank") for n in (1, 2, 4096)] == ["1 rank", "2 ranks", "4,096 ranks"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fit_says_one_line_at_its_start_and_one_at_its_end(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int, world_size: int) -> tuple[list[str], int, int]:
        said: list[str] = []
        monkeypatch.setattr("lightning_zero.strategy.rank_zero_info", said.append)
        model = Transformer()
        trainer = quiet_trainer("zero3", world_size)
        trainer.fit(model, batches(model, 12), batches(model, 6))
        strategy = trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        numel = sum(param.numel() for param in model.parameters())
        return said, numel, strategy.engine.ledger.peak

    said, numel, peak = run_ranks(body, world_size, init=False)[0]
    ranks = many(world_size, "rank")
    assert len(said) == 2
    assert re.fullmatch(
        rf"stage 3 on {ranks}: {in_count(numel)} parameters in \d+ units?, "
        r"\d+(\.\d)? kB per rank, largest unit \d+(\.\d)? kB",
        said[0],
    ), said[0]
    counts = r", \d+ gathers, \d+ reductions, \d+% of the time waiting and copying between ranks"
    assert re.fullmatch(
        rf"stage 3 held at most {re.escape(in_bytes(peak))} on rank 0, without activations"
        + (counts if world_size > 1 else ""),
        said[1],
    ), said[1]
