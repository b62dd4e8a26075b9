"""Optimizers that step on whole parameters, under the Trainer in mixed precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optimizers
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import assert_same_tensors
from test_precision import DDP, STAGES, Overflowing, Transformer, fit, scaled
from torch import Tensor, optim

from ranks import run_ranks


class Adafactor(Transformer):
    def configure_optimizers(self) -> Any:
        return optim.Adafactor(self.parameters(), lr=1e-2)


class Lamb(Transformer):
    def configure_optimizers(self) -> Any:
        return optimizers.Lamb(self.parameters())


class Shampoo(Transformer):
    def configure_optimizers(self) -> Any:
        return optimizers.Shampoo(self.parameters())


class MuonAndAdamW(Transformer):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() == 2]
        others = [p for p in self.parameters() if p.dim() != 2]
        return [optim.Muon(matrices, lr=1e-2), optim.AdamW(others, lr=1e-2)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        loss = self.loss(batch)
        self.losses.append(loss.item())
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


NETS = {net.__name__: net for net in (Adafactor, Lamb, Shampoo, MuonAndAdamW)}


def settings_of(precision: Any) -> dict[str, Any]:
    return dict(plugins=scaled()) if precision == "16-mixed" else dict(precision=precision)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("net", NETS)
def test_whole_optimizers_are_bit_equal_to_ddp(net: str, precision: str) -> None:
    def body(rank: int, world_size: int) -> None:
        expected, losses, *_ = fit(
            rank, world_size, DDP, NETS[net], max_steps=6, **settings_of(precision)
        )
        for stage in STAGES:
            weights, mine, *_ = fit(
                rank, world_size, stage, NETS[net], max_steps=6, **settings_of(precision)
            )
            assert mine == losses
            assert_same_tensors(weights, expected)

    run_ranks(body, 2, init=False)


@pytest.mark.parametrize("net", ["Adafactor", "Lamb", "Shampoo"])
@pytest.mark.parametrize("clip", ["value", "norm"])
def test_with_accumulation_and_clipping_they_are_within_rounding(net: str, clip: str) -> None:
    def body(rank: int, world_size: int) -> None:
        settings: dict[str, Any] = dict(
            precision="bf16-mixed",
            max_steps=4,
            accumulate_grad_batches=2,
            gradient_clip_val=0.01,
            gradient_clip_algorithm=clip,
        )
        expected, *_ = fit(rank, world_size, DDP, NETS[net], **settings)
        for stage in STAGES:
            weights, *_ = fit(rank, world_size, stage, NETS[net], **settings)
            exact = clip == "value" and stage == 1
            if exact:
                assert_same_tensors(weights, expected)
            for name, value in weights.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)

    run_ranks(body, 2, init=False)


@pytest.mark.parametrize("net", NETS)
def test_they_resume_bit_exactly_in_mixed_precision(net: str, tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        for source, target in ((3, 1), (1, 2), (2, 3)):

            def run(stage: int, ckpt_path: Any = None) -> Any:
                name = "resumed" if ckpt_path else "whole"
                return fit(
                    rank,
                    world_size,
                    stage,
                    NETS[net],
                    precision="bf16-mixed",
                    max_epochs=2,
                    limit_train_batches=3,
                    ckpt_path=ckpt_path,
                    callbacks=[
                        ModelCheckpoint(tmp_path, f"{stage}-{name}-{{epoch}}", save_top_k=-1)
                    ],
                    enable_checkpointing=True,
                )

            expected, losses, *_ = run(source)
            weights, rest, *_ = run(target, tmp_path / f"{source}-whole-epoch=0.ckpt")
            assert rest == losses[3:]
            assert_same_tensors(weights, expected)

    run_ranks(body, 2, init=False, timeout=120)


class OverflowingLamb(Overflowing):
    def configure_optimizers(self) -> Any:
        return optimizers.Lamb(self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append((self.trainer.precision_plugin.scaler.get_scale(), 0))


def test_an_overflow_skips_the_step_of_every_owner() -> None:
    def body(rank: int, world_size: int) -> None:
        expected, _, _, reference = fit(
            rank, world_size, DDP, OverflowingLamb, plugins=scaled(), max_steps=6
        )
        for stage in STAGES:
            weights, _, _, model = fit(
                rank, world_size, stage, OverflowingLamb, plugins=scaled(), max_steps=6
            )
            assert_same_tensors(weights, expected)
            assert model.scales == reference.scales

    run_ranks(body, 2, init=False)
