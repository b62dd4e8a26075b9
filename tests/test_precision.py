"""Lightning's precision strings under zero1, zero2 and zero3: ddp's numbers, in less memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from modules import assert_same_tensors, quiet_trainer
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_zero import ZeroPrecision, ZeroStrategy
from ranks import run_ranks

DDP = "ddp_find_unused_parameters_true"
STAGES = (1, 2, 3)
STEPS = 20
BATCH = 4


class Rows(Dataset[Any]):
    """As many rows as steps need at two ranks, each another."""

    def __init__(self, shape: tuple[int, ...], steps: int = STEPS) -> None:
        self.rows = torch.randn(
            2 * BATCH * steps, *shape, generator=torch.Generator().manual_seed(3)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Net(L.LightningModule):
    """What the nets below share."""

    shape: tuple[int, ...] = (6, 16)
    fused = False

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.build()

    def build(self) -> None:
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])

    def loss(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(self.shape), batch_size=BATCH)


class Transformer(Net):
    def build(self) -> None:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.embedding = nn.Embedding(13, 16)
        self.position = nn.Parameter(torch.randn(6, 16) / 10)
        self.head = nn.Linear(16, 13)

    def loss(self, batch: Tensor) -> Tensor:
        tokens = (batch[..., 0].abs() * 10).long() % 13
        hidden = self.encoder(self.embedding(tokens) + self.position)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.roll(1, 1).flatten())


class Convolutional(Net):
    shape = (3, 8, 8)

    def build(self) -> None:
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3, stride=2, groups=2).to(memory_format=torch.channels_last)
        self.back = nn.ConvTranspose2d(4, 3, 3)
        self.head = nn.Linear(3, 5)

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.norm(self.first(batch))))
        return self.head(self.back(hidden).mean((2, 3))).square().mean()


class Odd(Net):
    """Weights that are read in ways that autocast does not lower, or lowers elsewhere."""

    def build(self) -> None:
        self.lstm = nn.LSTM(16, 16, 2, batch_first=True)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, add_bias_kv=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.twice = nn.Linear(16, 16)
        self.exact = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.table = nn.Embedding(16, 16)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.table.weight

    def loss(self, batch: Tensor) -> Tensor:
        hidden, _ = self.gru(self.lstm(batch)[0])
        hidden, _ = self.attention(hidden, hidden, hidden)
        hidden = self.normed(checkpoint(self.twice, self.twice(hidden), use_reentrant=False))
        hidden = hidden @ self.twice.weight + hidden.float() * self.twice.weight[0]
        with torch.autocast("cpu", enabled=False):
            hidden = self.exact(hidden.float())
        hidden = self.tied(self.frozen(hidden)) + self.table(torch.arange(6))
        used = [p for name, p in self.named_parameters() if "unused" not in name]
        return hidden.square().mean() + 1e-3 * sum(p.float().abs().sum() for p in used)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.exact.weight.clamp_(-0.2, 0.2)
            self.twice.bias.data.mul_(0.99)


NETS: dict[str, type[Net]] = {"transformer": Transformer, "conv": Convolutional, "odd": Odd}


def strategy_of(stage: int | str, **settings: Any) -> Any:
    if isinstance(stage, str):
        return stage
    return ZeroStrategy(stage=stage, stall_timeout=20, auto_wrap_policy="layers", **settings)


def fit(
    rank: int,
    world_size: int,
    stage: int | str,
    make: Callable[[], Net],
    strategy: dict[str, Any] | None = None,
    ckpt_path: Any = None,
    **settings: Any,
) -> tuple[dict[str, Tensor], list[float], L.Trainer, Net]:
    torch.manual_seed(1)
    model = make()
    torch.manual_seed(100 + rank)
    trainer = quiet_trainer(strategy_of(stage, **(strategy or {})), world_size, **settings)
    trainer.fit(model, ckpt_path=ckpt_path)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return weights, model.losses, trainer, model


@pytest.mark.parametrize("net", NETS)
def test_bf16_mixed_is_bit_equal_to_ddp_after_20_steps(net: str) -> None:
    def body(rank: int, world_size: int) -> None:
        settings = dict(precision="bf16-mixed")
        expected, losses, *_ = fit(rank, world_size, DDP, NETS[net], **settings)
        assert len(losses) == STEPS
        for stage in STAGES:
            weights, mine, trainer, _ = fit(rank, world_size, stage, NETS[net], **settings)
            assert mine == losses
            assert_same_tensors(weights, expected)
            assert weights[next(iter(weights))].dtype == torch.float32
            engine = trainer.strategy._trained
            assert any(unit.reads_half for unit in engine.units)

    run_ranks(body, 2, init=False)


def test_bf16_mixed_has_half_the_gather_traffic_of_fp32() -> None:
    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            gathers, reductions = [], []
            for precision in ("32-true", "bf16-mixed"):
                *_, trainer, _ = fit(rank, world_size, stage, Net, precision=precision)
                engine = trainer.strategy._trained
                once = sum(unit.shard_nbytes for unit in engine.units) * (world_size - 1)
                whole = stage == 3 or precision == "bf16-mixed"
                # At the end of the run the full fp32 weights are gathered once, if absent.
                gathers.append(engine.collectives.traffic.gather - (once if whole else 0))
                reductions.append(engine.collectives.traffic.reduce)
            if stage < 3:  # the initial values come by broadcast in fp32, by a gather in half
                gathers[1] -= once // 2
            assert gathers[1] * 2 == gathers[0], stage
            assert reductions[0] == reductions[1]

    run_ranks(body, 2, init=False)


def test_more_or_less_can_be_held_in_half_precision() -> None:
    def body(rank: int, world_size: int) -> None:
        expected, losses, *_ = fit(rank, world_size, DDP, Transformer, precision="bf16-mixed")
        for stage in STAGES:
            none, *_ = fit(
                rank, world_size, stage, Transformer, dict(cast="none"), precision="bf16-mixed"
            )
            assert_same_tensors(none, expected)
        runs = [
            fit(rank, world_size, stage, Transformer, dict(cast="all"), precision="bf16-mixed")
            for stage in STAGES
        ]
        for weights, mine, trainer, _ in runs:
            assert all(unit.reads_half for unit in trainer.strategy._trained.units)
            assert_same_tensors(weights, runs[0][0])  # one stage's numbers are every stage's
            assert mine[-1] == pytest.approx(losses[-1], rel=0.01)
        # The same by a plugin, which then says the precision as well.
        for plugin in (ZeroPrecision(cast="all"), ZeroPrecision("bf16-mixed", cast="all")):
            weights, *_ = fit(rank, world_size, 2, Transformer, plugins=[plugin])
            assert_same_tensors(weights, runs[0][0])
        plugin = ZeroPrecision(cast="all")
        weights, *_ = fit(
            rank, world_size, 2, Transformer, dict(precision_plugin=plugin), precision="bf16-mixed"
        )
        assert_same_tensors(weights, runs[0][0])

    run_ranks(body, 2, init=False)


class Written(Net):
    """Writes to weights inside the training step, in ways that leave no trace on the object."""

    def build(self) -> None:
        super().build()
        self.table = nn.Embedding(16, 16)
        self.bounded = nn.Embedding(16, 16, max_norm=0.5)

    def loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            self.table.weight[0].zero_()
            self.table.weight.T[1].fill_(0.5)
            self.layers[0].weight.view(-1)[:3] = 0.25
            self.layers[1].weight.data.mul_(0.9)
            self.layers[2].bias.detach().clamp_(-0.1, 0.1)
            torch.clamp(self.layers[3].bias, -0.1, 0.1, out=self.layers[3].bias)
        index = torch.arange(6)
        return super().loss(batch + self.table(index) + self.bounded(index))


@pytest.mark.parametrize("cast", ["auto", "all"])
def test_writes_inside_the_training_step_are_kept(cast: str) -> None:
    def body(rank: int, world_size: int) -> None:
        settings = dict(precision="bf16-mixed", max_steps=4)
        expected, losses, *_ = fit(rank, world_size, DDP, Written, **settings)
        for stage in STAGES:
            weights, mine, *_ = fit(rank, world_size, stage, Written, dict(cast=cast), **settings)
            if cast == "auto":
                assert mine == losses
                assert_same_tensors(weights, expected)
            for name, value in weights.items():  # AdamW moves by at most 0.04 in four steps
                torch.testing.assert_close(value, expected[name], rtol=0, atol=0.085)

    run_ranks(body, 2, init=False)


class ReadAfterWriting(Net):
    """Halves a weight and uses it in the same step."""

    def loss(self, batch: Tensor) -> Tensor:
        self.layers(batch)
        with torch.no_grad():
            self.layers[0].weight.mul_(0.5)
            self.layers[1].weight.view(-1)[::2].zero_()
            self.layers[2].weight.data.add_(0.1)
        return super().loss(batch)


@pytest.mark.parametrize("cast", ["auto", "all"])
def test_a_write_is_seen_by_what_comes_after_it_in_the_same_step(cast: str) -> None:
    def body(rank: int, world_size: int) -> None:
        settings = dict(precision="bf16-mixed", max_steps=1)
        expected, losses, *_ = fit(rank, world_size, DDP, ReadAfterWriting, **settings)
        for stage in STAGES:
            weights, mine, *_ = fit(
                rank, world_size, stage, ReadAfterWriting, dict(cast=cast), **settings
            )
            assert mine == losses
            if cast == "auto":
                assert_same_tensors(weights, expected)

    run_ranks(body, 2, init=False)


class CompiledPart(Net):
    """A compiled function that takes weights, and a compiled layer tied to a plain one."""

    def build(self) -> None:
        super().build()
        self.plain = nn.Linear(16, 16)
        part = nn.Linear(16, 16)
        part.weight = self.plain.weight
        self.part = torch.compile(part, backend="aot_eager")
        self.function = torch.compile(F.linear, backend="aot_eager")

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.plain(self.part(self.layers(batch)))
        return self.function(hidden, self.layers[0].weight, self.layers[0].bias).square().mean()


@pytest.mark.parametrize("cast", ["auto", "all"])
def test_compiled_parts_are_left_to_autocast(cast: str) -> None:
    def body(rank: int, world_size: int) -> None:
        settings = dict(precision="bf16-mixed", max_steps=3)
        expected, losses, *_ = fit(rank, world_size, DDP, CompiledPart, **settings)
        for stage in STAGES:
            weights, mine, *_ = fit(
                rank, world_size, stage, CompiledPart, dict(cast=cast), **settings
            )
            if cast == "auto":
                assert mine == losses
                assert_same_tensors(weights, expected)
            assert mine == pytest.approx(losses, rel=0.01)

    run_ranks(body, 2, init=False, timeout=120)


def test_buffers_are_never_cast() -> None:
    class Buffers(Net):
        def build(self) -> None:
            super().build()
            self.norm = nn.BatchNorm1d(6)
            self.register_buffer("count", torch.tensor(2**40 + 1))
            self.register_buffer("fine", torch.tensor(1 / 3, dtype=torch.float64))
            self.register_buffer("coarse", torch.tensor([1.5], dtype=torch.float16))
            self.register_buffer("flags", torch.tensor([True, False]))

        def loss(self, batch: Tensor) -> Tensor:
            self.seen = {name: value.dtype for name, value in self.named_buffers()}
            return super().loss(self.norm(batch))

    def body(rank: int, world_size: int) -> None:
        dtypes = {name: value.dtype for name, value in Buffers().named_buffers()}
        for stage in STAGES:
            for cast in ("auto", "all"):
                weights, _, _, model = fit(
                    rank, world_size, stage, Buffers, dict(cast=cast), precision="bf16-mixed"
                )
                assert model.seen == dtypes
                assert weights["count"] == 2**40 + 1

    run_ranks(body, 2, init=False)


# The loss scale


class Overflowing(Net):
    """In its third step, one element of a gradient is infinite, on rank 1 alone.

    So it lies in the shard of one rank, and the other one has nothing but good gradients.
    """

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.layers[0](batch)
        if self.global_step_seen == 2 and self.global_rank == 1:
            hidden.register_hook(self.overflow)
        return self.layers[1:](hidden).square().mean()

    @staticmethod
    def overflow(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[..., 0] = float("inf")  # of the first row of the weight and of its bias
        return grad

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.global_step_seen = batch_idx

    def on_train_batch_end(self, *_: Any) -> None:
        plugin = self.trainer.precision_plugin
        scaler = plugin.scaler
        state = next(iter(self.trainer.optimizers[0].state.values()), {"step": 0})
        self.scales.append((scaler.get_scale(), int(state["step"])))

    def build(self) -> None:
        super().build()
        self.scales: list[tuple[float, int]] = []


class OverflowingFused(Overflowing):
    fused = True


def scaled(**settings: Any) -> list[Precision]:
    """Make the plugin of 16-mixed, since Trainer turns the string into bf16-mixed on the CPU."""
    scaler = GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 4, **settings})
    return [MixedPrecision("16-mixed", "cpu", scaler)]


@pytest.mark.parametrize("make", [Overflowing, OverflowingFused])
def test_an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all(
    make: type[Overflowing],
) -> None:
    def body(rank: int, world_size: int) -> None:
        settings = dict(max_steps=12)
        expected, _, _, reference = fit(rank, world_size, DDP, make, plugins=scaled(), **settings)
        for stage in STAGES:
            weights, _, _, model = fit(rank, world_size, stage, make, plugins=scaled(), **settings)
            assert_same_tensors(weights, expected)
            assert model.scales == reference.scales
            assert model.scales[1] == (2.0**10, 2)
            assert model.scales[2] == (2.0**9, 2)
            assert model.scales[6] == (2.0**10, 6)  # grown after four good steps

    run_ranks(body, 2, init=False)


def test_an_overflow_in_the_first_step_makes_no_optimizer_state() -> None:
    class First(OverflowingFused):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.global_step_seen = 2

        def on_train_batch_end(self, *_: Any) -> None:
            assert not self.trainer.optimizers[0].state

    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            torch.manual_seed(1)
            before = First().state_dict()
            weights, *_, trainer, _ = fit(
                rank, world_size, stage, First, plugins=scaled(), max_steps=2
            )
            assert_same_tensors(weights, before)
            assert trainer.precision_plugin.scaler.get_scale() == 2.0**8

    run_ranks(body, 2, init=False)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_unscaled_before_they_are_clipped(algorithm: str) -> None:
    def body(rank: int, world_size: int) -> None:
        settings: dict[str, Any] = dict(
            gradient_clip_val=1e-3,
            gradient_clip_algorithm=algorithm,
            accumulate_grad_batches=2,
            max_steps=6,
        )
        expected, losses, *_ = fit(rank, world_size, DDP, Net, plugins=scaled(), **settings)
        for stage in STAGES:
            weights, mine, *_ = fit(rank, world_size, stage, Net, plugins=scaled(), **settings)
            assert mine == pytest.approx(losses, rel=1e-5)
            assert_same_tensors(weights, expected, exact=False)

    run_ranks(body, 2, init=False)


def test_the_scale_is_saved_as_the_stock_plugin_saves_it(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        def run(stage: Any, name: str, **settings: Any) -> Any:
            return fit(
                rank,
                world_size,
                stage,
                Overflowing,
                plugins=scaled(),
                callbacks=[ModelCheckpoint(tmp_path, f"{name}-{{epoch}}", save_top_k=-1)],
                enable_checkpointing=True,
                limit_train_batches=5,
                max_epochs=2,
                **settings,
            )

        expected, losses, *_ = run(DDP, "ddp")
        saved = torch.load(tmp_path / "ddp-epoch=0.ckpt", weights_only=False)["MixedPrecision"]
        assert saved["scale"] == 2.0**9
        assert set(saved) >= {"growth_factor", "backoff_factor", "growth_interval"}
        for stage in STAGES:
            run(stage, f"zero{stage}")
            mine = torch.load(tmp_path / f"zero{stage}-epoch=0.ckpt", weights_only=False)
            assert mine["MixedPrecision"] == saved
            assert "ZeroPrecision" not in mine
        for source, target in (("zero3", 3), ("zero1", 2), ("ddp", 3), ("zero2", DDP)):
            path = tmp_path / f"{source}-epoch=0.ckpt"
            weights, rest, *_ = run(target, f"{source}-{target}", ckpt_path=path)
            assert rest == losses[5:]
            assert_same_tensors(weights, expected)

    run_ranks(body, 2, init=False, timeout=120)


# True half precision, and resuming


class Descending(Net):
    def configure_optimizers(self) -> Any:  # the squares that Adam keeps are too small for fp16
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Slow(Net):
    """Steps that are too small for half precision to hold."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_true_half_precision_is_that_of_ddp(precision: Any) -> None:
    def body(rank: int, world_size: int) -> None:
        expected, losses, *_ = fit(rank, world_size, DDP, Descending, precision=precision)
        runs = [fit(rank, world_size, stage, Descending, precision=precision) for stage in STAGES]
        for weights, mine, *_ in runs:
            assert {value.dtype for value in weights.values()} == {expected["layers.0.bias"].dtype}
            # Torch's CPU kernels round half precision otherwise at the ends of a tensor, and shards
            # end elsewhere.
            for name, value in weights.items():
                torch.testing.assert_close(value, expected[name], rtol=0.05, atol=2e-3)
            assert mine[-1] == pytest.approx(losses[-1], rel=0.05)

    run_ranks(body, 2, init=False)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_fp32_masters_keep_steps_that_half_precision_loses(precision: Any, tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        reference, *_ = fit(rank, world_size, DDP, Slow, precision="32-true")
        torch.manual_seed(1)
        before = Slow().state_dict()["layers.0.weight"]
        for stage in STAGES:
            weights, *_ = fit(
                rank,
                world_size,
                stage,
                Slow,
                dict(fp32_master=True),
                precision=precision,
                callbacks=[ModelCheckpoint(tmp_path, f"at{stage}", every_n_train_steps=STEPS)],
                enable_checkpointing=True,
            )
            half = weights["layers.0.weight"]
            assert half.dtype.itemsize == 2
            saved = torch.load(tmp_path / f"at{stage}.ckpt", weights_only=False)["state_dict"]
            moved = saved["layers.0.weight"] - before.to(half.dtype)
            assert saved["layers.0.weight"].dtype == torch.float32
            assert torch.equal(saved["layers.0.weight"].to(half.dtype), half)
            wanted = (reference["layers.0.weight"] - before).abs().mean()
            assert moved.abs().mean() == pytest.approx(float(wanted), rel=0.1)

    run_ranks(body, 2, init=False)


RESUMED: dict[str, dict[str, Any]] = {
    "bf16-mixed": dict(precision="bf16-mixed"),
    "bf16-mixed, all in half": dict(precision="bf16-mixed", strategy=dict(cast="all")),
    "bf16-true with masters": dict(precision="bf16-true", strategy=dict(fp32_master=True)),
    "bf16-true": dict(precision="bf16-true", make=Descending),
}


@pytest.mark.parametrize("name_of", RESUMED)
def test_resuming_is_bit_exact(name_of: str, tmp_path: Path) -> None:
    """Masters that were rebuilt from half-precision values would lose what these steps made."""

    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:

            def run(epochs: int, ckpt_path: Any = None, stage: int = stage) -> Any:
                name = "resumed" if ckpt_path else "whole"
                callback = ModelCheckpoint(tmp_path, f"{stage}-{name}-{{epoch}}", save_top_k=-1)
                return fit(
                    rank,
                    world_size,
                    stage,
                    max_epochs=epochs,
                    limit_train_batches=6,
                    ckpt_path=ckpt_path,
                    callbacks=[callback],
                    enable_checkpointing=True,
                    **{"make": Slow, **RESUMED[name_of]},
                )

            def saved(name: str, stage: int = stage) -> dict[str, Tensor]:
                path = tmp_path / f"{stage}-{name}.ckpt"
                state: dict[str, Tensor] = torch.load(path, weights_only=False)["state_dict"]
                return state

            expected, losses, *_ = run(2)
            weights, rest, *_ = run(2, tmp_path / f"{stage}-whole-epoch=0.ckpt")
            assert len(rest) == 6
            assert rest == losses[-len(rest) :]
            assert_same_tensors(weights, expected)
            first, whole = saved("whole-epoch=0"), saved("whole-epoch=1")
            assert_same_tensors(saved("resumed-epoch=1"), whole)
            assert any(not torch.equal(first[key], whole[key]) for key in first)

    run_ranks(body, 2, init=False, timeout=120)


def test_gradients_can_travel_in_half_precision() -> None:
    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            sent = []
            for dtype in (None, "bf16"):
                _, losses, trainer, _ = fit(
                    rank, world_size, stage, Net, dict(reduce_dtype=dtype), max_steps=5
                )
                sent.append((trainer.strategy._trained.collectives.traffic.reduce, losses[-1]))
            assert sent[0][0] == 2 * sent[1][0]
            assert sent[0][1] == pytest.approx(sent[1][1], rel=0.02)
            assert sent[0][1] != sent[1][1]

    run_ranks(body, 2, init=False)


# Norms


class Logged(Net):
    def build(self) -> None:
        super().build()
        self.again = nn.Linear(16, 16)
        self.again.weight = self.layers[0].weight  # tied: counted once
        self.norms: list[Tensor] = []

    def loss(self, batch: Tensor) -> Tensor:
        return self.again(self.layers(batch)).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.expected = torch.nn.utils.get_total_norm([g.clone() for g in grads])

    def on_train_batch_end(self, *_: Any) -> None:
        norm = self.trainer.strategy.grad_norm()
        torch.testing.assert_close(norm, self.expected)
        self.norms.append(norm)


@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_the_norm_before_clipping_can_be_asked_for_and_logged(
    clip: str | None, precision: Any, tmp_path: Path
) -> None:
    def body(rank: int, world_size: int) -> None:
        mixed = dict(plugins=scaled()) if precision == "16-mixed" else dict(precision=precision)
        for stage in STAGES:
            for logs in (False, True):
                logger = CSVLogger(tmp_path, f"{stage}{logs}", "")
                *_, trainer, model = fit(
                    rank,
                    world_size,
                    stage,
                    Logged,
                    dict(log_grad_norm=logs),
                    gradient_clip_val=1e-3 if clip else None,
                    gradient_clip_algorithm=clip,
                    max_steps=3,
                    logger=logger,
                    log_every_n_steps=1,
                    **mixed,
                )
                assert len(model.norms) == 3
                assert model.norms[-1] > 1e-3
                logged = trainer.logged_metrics.get("grad_norm")
                assert (logged is not None) == logs
                if logged is not None:
                    assert logged == model.norms[-1]

    run_ranks(body, 2, init=False, timeout=120)


class TwoOptimizers(Logged):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        self.first = list(self.layers[0].parameters())
        self.second = list(self.layers[1].parameters())
        return [torch.optim.SGD(params, lr=0.1) for params in (self.first, self.second)]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
        self.expected = torch.nn.utils.get_total_norm(grads)


def test_each_of_several_optimizers_has_a_norm() -> None:
    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            for logs in (True, False):
                *_, trainer, model = fit(
                    rank, world_size, stage, TwoOptimizers, dict(log_grad_norm=logs), max_steps=4
                )
                if logs:
                    assert {"grad_norm/0", "grad_norm/1"} <= set(trainer.logged_metrics)
                    assert trainer.logged_metrics["grad_norm/1"] == model.norms[-1]

    run_ranks(body, 2, init=False)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_behaves_as_torchs(value: float) -> None:
    class Broken(Net):
        def loss(self, batch: Tensor) -> Tensor:
            hidden = self.layers[0](batch)
            hidden.register_hook(lambda grad: torch.where(grad == grad.max(), value, grad))
            return self.layers[1:](hidden).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def body(rank: int, world_size: int) -> None:
        settings = dict(gradient_clip_val=1.0, max_steps=1)
        expected, *_ = fit(rank, world_size, DDP, Broken, **settings)
        for stage in STAGES:
            weights, *_ = fit(rank, world_size, stage, Broken, **settings)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[name], equal_nan=True)

    run_ranks(body, 2, init=False)


# Errors and refusals


def test_a_step_between_forward_and_backward_is_an_error_and_not_a_wrong_gradient() -> None:
    class Early(Net):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            first, second = self.loss(batch), self.loss(batch)
            self.manual_backward(first)
            optimizer.step()
            with pytest.raises(RuntimeError, match=r"modified by an inplace[\s\S]*layers\.\d"):
                self.manual_backward(second)
            raise KeyboardInterrupt

    def body(rank: int, world_size: int, stage: int) -> None:
        with pytest.raises(SystemExit):
            fit(rank, world_size, stage, Early, precision="bf16-mixed")

    for stage in STAGES:
        run_ranks(body, 2, stage, init=False)


def test_every_rank_and_every_bucket_counts_once() -> None:
    class Slopes(Net):
        shape = (1,)

        def build(self) -> None:
            self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(3)])

        def loss(self, batch: Tensor) -> Tensor:
            return sum((self.global_rank + 1) * layer.weight.sum() for layer in self.layers)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen = [p.grad.clone() for p in self.parameters()]

    def body(rank: int, world_size: int) -> None:
        mean = (world_size + 1) / 2
        for stage in STAGES:
            for precision in ("32-true", "bf16-mixed"):
                *_, model = fit(
                    rank,
                    world_size,
                    stage,
                    Slopes,
                    dict(bucket_mb=0.01),
                    precision=precision,
                    max_steps=2,
                    accumulate_grad_batches=2,
                )
                for grad in model.seen:
                    assert torch.equal(grad, torch.full_like(grad, mean))

    for world_size in (2, 3):
        run_ranks(body, world_size, init=False)


@functools.cache
def foreign(name: str) -> Precision:
    plugin = Precision()
    plugin.precision = name  # type: ignore[assignment]
    return plugin


@pytest.mark.parametrize("name", ["transformer-engine", "transformer-engine-float16", "nf4"])
def test_other_precisions_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name) as info:
        quiet_trainer("zero3", 1, plugins=[foreign(name)])
    for word in ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"):
        assert f"'{word}'" in str(info.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(cast="half"), ("cast='half'", "'auto', 'all', 'none'")),
        (dict(reduce_dtype="bfloat16"), ("reduce_dtype='bfloat16'", "'fp32', 'bf16', 'fp16'")),
    ],
)
def test_wrong_words_are_refused_at_construction(
    settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    for make in (ZeroStrategy, ZeroPrecision):
        with pytest.raises(ValueError, match="must be one of") as info:
            make(**settings)
        assert all(word in str(info.value) for word in words)


def test_settings_without_a_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cast='all'.*precision='32-true'"):
        quiet_trainer(ZeroStrategy(cast="all"), 1)
    with pytest.raises(ValueError, match=r"fp32_master=True.*precision='bf16-mixed'"):
        quiet_trainer(ZeroStrategy(fp32_master=True), 1, precision="bf16-mixed")
    with pytest.raises(ValueError, match=r"cast='all'.*precision='32-true'"):
        ZeroPrecision("32-true", cast="all")
    with pytest.raises(ValueError, match=r"reduce_dtype='fp16'.*precision='bf16-mixed'"):
        ZeroPrecision("bf16-mixed", reduce_dtype="fp16")
    quiet_trainer(ZeroStrategy(reduce_dtype="fp16"), 1, plugins=scaled())
    with pytest.raises(ValueError, match="set it in the plugin"):
        plugin = ZeroPrecision("bf16-mixed", cast="none")
        quiet_trainer(ZeroStrategy(cast="all"), 1, plugins=[plugin])
    with pytest.raises(ValueError, match="precision='half'"):
        ZeroPrecision("half")  # type: ignore[arg-type]
