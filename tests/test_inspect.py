"""Inspecting says what a checkpoint holds, and whether all of it is there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import checkpoints
import pytest
import torch

from lightning_zero.checkpoint.convert import convert
from lightning_zero.checkpoint.inspect import inspect
from lightning_zero.cli import main


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_sharded(tmp_path_factory.mktemp("ranks") / "sharded")


def test_a_sharded_folder_is_described(sharded: Path) -> None:
    report = inspect(sharded)
    assert report.whole and not report.problems
    assert (report.step, report.epoch) == (42, 3)
    assert (report.stage, report.world_size, report.version) == (3, 3, "0.1.0")
    weights = {tensor.name: tensor for tensor in report.weights}
    assert set(weights) == set(checkpoints.weights())
    for name, tensor in checkpoints.weights().items():
        assert weights[name].shape == tensor.shape
        assert weights[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert weights[name].nbytes == tensor.nbytes
    assert weights["head.weight"].tied_to == "embed.weight"
    (state,) = report.optimizers
    assert {"layer.weight.exp_avg", "alone.step", "layer.weight.rows"} <= {t.name for t in state}
    assert "callbacks" in report.other


def test_the_table_shows_all_of_it(sharded: Path) -> None:
    text = str(inspect(sharded))
    for line in (
        "format       sharded folder",
        "whole        yes",
        "step         42",
        "ranks        3",
        "stage        3",
        "optimizer 0  16 tensors",
    ):
        assert line in text
    rows = {tuple(line.split()) for line in text.splitlines()}
    assert ("conv.weight", "2x3x2x3", "float32", "144", "B") in rows
    assert ("head.weight", "11x7", "float32", "as", "embed.weight") in rows
    assert ("count", "scalar", "int64", "8", "B") in rows


def test_json_holds_the_same(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(sharded), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 42 and found["whole"] is True and found["stage"] == 3
    (bias,) = (tensor for tensor in found["weights"] if tensor["name"] == "layer.bias")
    expected = {"name": "layer.bias", "shape": [5], "dtype": "float32", "nbytes": 20}
    assert bias == {**expected, "tied_to": None}
    full = checkpoints.weights()
    del full["head.weight"]
    assert found["nbytes"] > sum(tensor.nbytes for tensor in full.values())


@pytest.mark.parametrize("name", ["a.ckpt", "a.pt", "a.safetensors", "folder"])
def test_every_format_is_described(sharded: Path, tmp_path: Path, name: str) -> None:
    convert(sharded, tmp_path / name)
    report = inspect(tmp_path / name)
    assert report.whole
    full = name in ("a.ckpt", "folder")
    assert report.step == (42 if full else None)
    assert len(report.optimizers) == full
    assert len(report.weights) == len(checkpoints.weights())
    assert "tensor" in str(report)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deepspeed_folder_is_described(tmp_path: Path, stage: int) -> None:
    report = inspect(checkpoints.write_deepspeed(tmp_path / "folder", stage))
    assert report.whole
    assert (report.stage, report.world_size, report.version) == (stage, 2, "DeepSpeed 0.19.8")
    assert (report.step, report.epoch) == (42, 3)


def test_damage_is_found_without_reading_tensors(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = Path(shutil.copytree(sharded, tmp_path / "torn"))
    (torn / "__1_0.distcp").unlink()
    (torn / "meta.pt").unlink()
    report = inspect(torn)
    assert not report.whole
    assert any("meta.pt" in problem for problem in report.problems)
    assert any("__1_0.distcp is missing" in problem for problem in report.problems)
    assert len(report.problems) > 5 and str(report).count("problem: ") == 5
    assert f"and {len(report.problems) - 5} problems more" in str(report)
    assert main(["inspect", str(torn)]) == 1
    assert "whole        NO" in capsys.readouterr().out
    (torn / ".metadata").unlink()
    assert main(["inspect", str(torn)]) == 1
    assert "torn" in capsys.readouterr().err


def test_a_truncated_file_is_not_whole(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "folder")
    file = tmp_path / "folder" / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1000)
    report = inspect(tmp_path / "folder")
    assert not report.whole and "truncated" in report.problems[0]
