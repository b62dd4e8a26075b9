"""Every way to start ranks, and to name the strategy, trains what ddp trains."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from modules import Perceptron, batches, checksum_of, quiet_trainer, train_briefly
from torch.utils.data import DataLoader

import lightning_zero
from ranks import run_ranks

SCRIPT = """
import sys

from modules import train_briefly

if __name__ == "__main__":
    for name in sys.argv[1:]:
        rank, checksum = train_briefly(name)
        # In one call, so that the lines of two ranks cannot mix.
        sys.stdout.write(f"<{name} rank {rank} has {checksum}>\\n")
        sys.stdout.flush()
"""
CLI_SCRIPT = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

if __name__ == "__main__":
    LightningCLI(BoringModel)
"""
REPORT = re.compile(r"<(\w+) rank (\d) has (\w+)>")


@pytest.fixture(scope="module")
def expected() -> dict[int, str]:
    """The checksums under ddp, by rank."""

    def body(rank: int, world_size: int) -> tuple[int, str]:
        return train_briefly("ddp")

    found = dict(run_ranks(body, 2, init=False))
    assert found[0] != found[1]  # statistics of batch norm
    return found


def run(folder: Path, source: str, *command: str) -> str:
    """Run a script as a user would, and return what it printed."""
    script = folder / "script.py"
    script.write_text(source)
    paths = [Path(__file__).parent, Path(lightning_zero.__file__).parents[1]]
    known = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([known] if known else [])]),
        "OMP_NUM_THREADS": "1",
    }
    arguments = [str(script) if part == "SCRIPT" else part for part in command]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


# Start methods


@pytest.mark.launcher
@pytest.mark.slow
def test_a_script_starts_its_own_ranks(tmp_path: Path, expected: dict[int, str]) -> None:
    printed = run(tmp_path, SCRIPT, "SCRIPT", "zero1", "zero2", "zero3")
    found = sorted(REPORT.findall(printed))
    assert found == [(f"zero{s}", str(r), expected[r]) for s in (1, 2, 3) for r in (0, 1)]


@pytest.mark.launcher
@pytest.mark.slow
def test_torchrun_starts_ranks(tmp_path: Path, expected: dict[int, str]) -> None:
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    printed = run(tmp_path, SCRIPT, *torchrun, "SCRIPT", "zero1", "zero2", "zero3")
    found = sorted(REPORT.findall(printed))
    assert found == [(f"zero{s}", str(r), expected[r]) for s in (1, 2, 3) for r in (0, 1)]


@pytest.mark.launcher
@pytest.mark.slow
def test_a_process_forks_and_spawns_ranks_and_gets_the_weights_back(
    tmp_path: Path, expected: dict[int, str]
) -> None:
    names = ("zero1_fork", "zero3_fork", "zero3_spawn")
    printed = run(tmp_path, SCRIPT, "SCRIPT", *names)
    assert REPORT.findall(printed) == [(name, "0", expected[0]) for name in names]


def test_all_names_are_registered_with_what_they_mean() -> None:
    methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    for stage in (1, 2, 3):
        for suffix, method in methods.items():
            strategy = StrategyRegistry.get(f"zero{stage}{suffix}")
            assert isinstance(strategy, lightning_zero.ZeroStrategy)
            assert strategy._start_method == method
            assert strategy.strategy_name.startswith(f"zero{stage}")
            assert str(stage) in StrategyRegistry[f"zero{stage}{suffix}"]["description"]
    assert len([name for name in StrategyRegistry if name.startswith("zero")]) == 12


def test_names_do_not_depend_on_case() -> None:
    assert isinstance(quiet_trainer("ZeRO3", 1).strategy, lightning_zero.ZeroStrategy)


# The command line


class Tool(Perceptron):
    """A model that a command line can train."""

    def __init__(self) -> None:
        super().__init__(optimizer="SGD", momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(self, 24)


QUIET = (
    "fit --trainer.accelerator=cpu --trainer.devices=2 --trainer.logger=false --seed_everything=7 "
    "--trainer.max_steps=3 --trainer.enable_checkpointing=false "
    "--trainer.enable_progress_bar=false --trainer.enable_model_summary=false"
).split()


def train_by_command(rank: int, world_size: int, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Train through ``LightningCLI``; return the checksum and the engine's settings."""
    cli = LightningCLI(Tool, args=[*QUIET, *arguments], save_config_callback=None)
    return checksum_of(cli.model), getattr(cli.trainer.strategy, "_engine_settings", {})


@pytest.fixture(scope="module")
def commanded() -> list[str]:
    """The checksums of ddp by the command line."""
    found = run_ranks(train_by_command, 2, "--trainer.strategy=ddp", init=False)
    return [checksum for checksum, _ in found]


def test_the_command_line_takes_the_name(commanded: list[str]) -> None:
    found = run_ranks(train_by_command, 2, "--trainer.strategy=zero3", init=False)
    assert [checksum for checksum, _ in found] == commanded
    assert found[0][1]["stage"] == 3


def test_the_command_line_takes_a_class_path_with_arguments(
    tmp_path: Path, commanded: list[str]
) -> None:
    settings = dict(stage=2, bucket_mb=0.5, prefetch=False, stall_timeout=20.0)
    policy = dict(stage=3, auto_wrap_policy=["Linear", "torch.nn.modules.batchnorm.BatchNorm1d"])
    for arguments in (settings, policy):
        strategy = {"class_path": "lightning_zero.ZeroStrategy", "init_args": arguments}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
        found = run_ranks(train_by_command, 2, f"--config={path}", init=False)
        assert [checksum for checksum, _ in found] == commanded
        assert arguments.items() <= found[0][1].items()


def test_the_command_line_refuses_a_wrong_type_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int, world_size: int) -> Any:
        wrong = "--trainer.strategy.init_args.bucket_mb=much"
        with pytest.raises(SystemExit) as info:
            train_by_command(rank, 1, "--trainer.strategy=lightning_zero.ZeroStrategy", wrong)
        return info.value.code

    assert run_ranks(body, 1, init=False) == [2]
    assert "bucket_mb" in capfd.readouterr().err


@pytest.mark.launcher
@pytest.mark.slow
def test_the_class_path_imports_the_package_and_all_arguments_are_printed(
    tmp_path: Path, commanded: list[str]
) -> None:
    strategy = {"class_path": "lightning_zero.ZeroStrategy", "init_args": {"stage": 2}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    arguments = ["SCRIPT", "fit", "--config", "config.yaml", "--print_config"]
    printed = yaml.safe_load(run(tmp_path, CLI_SCRIPT, *arguments))["trainer"]["strategy"]
    assert printed["class_path"] == "lightning_zero.ZeroStrategy"
    signature = inspect.signature(lightning_zero.ZeroStrategy).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in signature}
    assert printed["init_args"] == {**defaults, "stage": 2, "timeout": "0:30:00"}

    # What was printed is a config again.
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": printed}}))
    again = run_ranks(train_by_command, 2, f"--config={tmp_path / 'config.yaml'}", init=False)
    assert [checksum for checksum, _ in again] == commanded
