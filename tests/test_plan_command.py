"""``lightning-zero plan`` says what ``lightning_zero.plan`` says, and what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero import plan
from lightning_zero.cli import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module to plan, as the current one."""
    (tmp_path / "planned.py").write_text(
        "import torch, lightning as L\n"
        "class Net(L.LightningModule):\n"
        "    def __init__(self, width: int = 8, layers: int = 2):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.Sequential(\n"
        "            *(torch.nn.Linear(width, width) for _ in range(layers)))\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        return self.layers(batch).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planned", raising=False)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run the command and read its JSON."""
    assert main(["plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_plans_a_model_of_the_current_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--model planned.Net --model.width 512 --num_nodes 4 --precision bf16-mixed"
    assert (
        main(["plan", *arguments.split(), "--strategy", "zero1,zero3", "--plot", "plan.png"]) == 0
    )
    out = capsys.readouterr().out
    assert "Net: 525k parameters, SGD, bf16-mixed, 4 x 8 ranks" in out
    assert "zero1" in out
    assert "zero2" not in out
    assert (folder / "plan.png").exists()


def test_the_command_reads_the_settings_of_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.yaml").write_text(
        "trainer:\n"
        "  devices: 2\n"
        "  num_nodes: 3\n"
        "  accelerator: auto\n"
        "  precision: bf16-mixed\n"
        "  accumulate_grad_batches: 4\n"
        "  strategy:\n"
        "    class_path: lightning_zero.ZeroStrategy\n"
        "    init_args: {stage: 2, auto_wrap_policy: [Linear], reduce_every_backward: false}\n"
        "model:\n"
        "  class_path: planned.Net\n"
        "  init_args: {width: 256, layers: 3}\n"
    )
    found = told(capsys, "--config", "run.yaml", "--devices=4", "--model.layers", "5")
    expected = plan(
        lambda: sys.modules["planned"].Net(256, 5),
        devices=4,
        num_nodes=3,
        precision="bf16-mixed",
        accumulate_grad_batches=4,
        auto_wrap_policy=["Linear"],
        reduce_every_backward=False,
    )
    assert found == json.loads(expected.to_json())


def test_the_command_counts_activations_of_given_shapes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, "--model=planned.Net", "--batch=64x8")
    net = sys.modules["planned"].Net
    expected = plan(lambda: net(), batch=torch.zeros(64, 8))["zero3"]
    assert found["rows"][-1]["activations"] == expected.activations


def test_the_command_takes_another_optimizer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--model planned.Net --optimizer torch.optim.AdamW --optimizer.amsgrad true"
    assert told(capsys, *words.split())["optimizers"] == ["AdamW"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("", 2, "give --model"),
        ("--model planned.Nope", 2, "no attribute 'Nope'"),
        ("--model planned.Net --model.widht 4", 2, "widht"),
        ("--model planned.Net --cast some", 2, "'auto', 'all', 'none'"),
        ("--model planned.Net --precision bf17", 1, "precision='bf17'"),
        ("--model planned.Net --batch 4xy", 1, "'4xy'"),
        ("--config no.yaml", 1, "no.yaml"),
        ("--params 1e9 --strategy fsdp", 1, "'fsdp'"),
    ],
)
def test_the_command_names_what_is_wrong(
    arguments: str,
    status: int,
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        found = main(["plan", *arguments.split()])
    except SystemExit as exit_:
        found = exit_.code  # type: ignore[assignment]
    error = capsys.readouterr().err
    assert found == status
    assert message in error
    assert error.startswith("lightning-zero plan: ")
    assert len(error.splitlines()) <= 5
