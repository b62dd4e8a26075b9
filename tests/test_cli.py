"""Training by command, with ``lightning-zero`` and with a ``LightningCLI`` of one's own."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import docstring_parser
import pytest
import torch
import yaml
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_zero
from lightning_zero import ZeroPrecision, ZeroStrategy
from lightning_zero.cli import main
from ranks import expect_failures, run_ranks

OWN = '''
"""What a user has in a folder of their own."""

import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

class Module(BoringModel):
    """A toy.

    Args:
        rate: The learning rate.
        fails: Whether the constructor has an error of its own.
        width: Not used.
    """

    def __init__(self, rate: float = 0.1, fails: bool = False, width: int = 32) -> None:
        super().__init__()
        self.rate = rate
        if fails:
            raise ValueError("an error of the model's own")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)

class Needy(BoringModel):
    def __init__(self, width: int) -> None:
        super().__init__()

class Data(BoringDataModule):
    def __init__(self, batch_size: int = 1) -> None:
        super().__init__()

def every(module, recurse, nonwrapped_numel):
    return True
'''
QUIET = (
    "--trainer.accelerator=cpu --trainer.devices=2 --trainer.max_steps=3 --seed_everything=7 "
    "--trainer.enable_progress_bar=false --trainer.enable_model_summary=false"
).split()
FIT = ["fit", "--model=own.Module", "--data=own.Data", *QUIET]
SILENT = ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]
CLASS = "--trainer.strategy=lightning_zero.ZeroStrategy"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, in which the ranks of a test start."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-zero"])
    return tmp_path


def command(*words: str, ranks: int = 2) -> None:
    """Run ``lightning-zero`` on every rank."""

    def body(rank: int, world_size: int) -> None:
        assert main(words) == 0

    run_ranks(body, ranks, init=False)


def refusal(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what ``lightning-zero`` prints of wrong arguments, without the logs before it."""
    capfd.readouterr()
    errors = expect_failures(lambda rank, world_size: main(words), 1, init=False)
    assert errors == {0: ("SystemExit", "2")}
    printed = capfd.readouterr().err
    assert printed.count("lightning-zero: error:") == 1
    message = printed.partition("lightning-zero: error: ")[2]
    assert "Traceback" not in message
    return message


def weights(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=False)["state_dict"]
    return found


# --- The commands ---


def test_help_names_every_command_and_its_examples_work(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as info:
        main(["--help"])
    assert info.value.code == 0
    page = capfd.readouterr().out
    for name in ("fit", "validate", "test", "predict", "convert", "inspect"):
        assert re.search(rf"^    {name}  +\w+", page, re.MULTILINE), name
    assert max(map(len, page.splitlines())) <= 100

    examples = re.findall(r"^    lightning-zero (fit .*)", page, re.MULTILINE)
    assert len(examples) >= 4
    check_commands(folder, capfd, examples)


def test_what_the_page_about_commands_shows_is_accepted(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "cli.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    commands = re.findall(r"^lightning-zero (fit .*)", "".join(blocks).replace("\\\n", ""), re.M)
    assert len(commands) >= 4
    check_commands(folder, capfd, commands)
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (folder / "page.yaml").write_text(block)
    check_commands(folder, capfd, ["fit --config page.yaml --print_config > all.yaml"])
    everything = yaml.safe_load((folder / "all.yaml").read_text())
    assert everything["trainer"]["strategy"]["init_args"]["auto_wrap_policy"] == ["my.Block"]
    (command,) = re.findall(r"^\$ lightning-zero (.*)", page, re.MULTILINE)
    shown = page.partition("lightning-zero: error: ")[2].partition("```")[0]
    assert refusal(capfd, *shlex.split(command)).startswith(shown)


def check_commands(folder: Path, capfd: pytest.CaptureFixture[str], commands: list[str]) -> None:
    """Parse commands, without training; write what they redirect into a file."""
    (folder / "my.py").write_text(OWN)
    for text in commands:
        words, _, file = text.partition(" > ")
        capfd.readouterr()
        wanted = shlex.split(words) if file else [*shlex.split(words), "--print_config"]
        assert _exit_of(wanted) == 0, text
        if file:
            (folder / file).write_text(capfd.readouterr().out)


def _exit_of(words: list[str]) -> Any:
    def body(rank: int, world_size: int) -> Any:
        with pytest.raises(SystemExit) as info:
            main(words)
        return info.value.code

    return run_ranks(body, 1, init=False)[0]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "default"])
def test_fit_trains_what_ddp_trains(folder: Path, strategy: str) -> None:
    for name in ("ddp", strategy):
        given = [] if name == "default" else [f"--trainer.strategy={name}"]
        command(*FIT, *given, f"--trainer.default_root_dir={name}")
    (ours,) = (folder / strategy).rglob("*.ckpt")
    (theirs,) = (folder / "ddp").rglob("*.ckpt")
    expected = weights(theirs)
    assert weights(ours).keys() == expected.keys()
    for name, value in weights(ours).items():
        assert torch.equal(value, expected[name])


def test_all_four_commands_run_and_read_a_checkpoint_of_fit(folder: Path) -> None:
    command(*FIT, "--trainer.strategy.state_dict_type=sharded")
    (checkpoint,) = folder.rglob("*.ckpt")
    assert checkpoint.is_dir()
    for name in ("validate", "test", "predict"):
        command(name, *FIT[1:], "--trainer.logger=false", f"--ckpt_path={checkpoint}")


def test_a_printed_configuration_runs_and_takes_overrides(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert _exit_of([*FIT, "--trainer.strategy.stage=2", "--print_config"]) == 0
    (folder / "run.yaml").write_text(capfd.readouterr().out)
    assert yaml.safe_load((folder / "run.yaml").read_text())["trainer"]["max_steps"] == 3
    command("fit", "--config=run.yaml", "--model.rate=0.01", "--trainer.strategy.bucket_mb=1")
    (saved,) = folder.rglob("config.yaml")  # by the callback that saves configurations
    settings = yaml.safe_load(saved.read_text())
    assert settings["model"]["init_args"]["rate"] == 0.01
    strategy = settings["trainer"]["strategy"]["init_args"]
    assert (strategy["stage"], strategy["bucket_mb"]) == (2, 1.0)
    command("validate", f"--config={saved}", ranks=2)


def test_a_second_run_keeps_the_configuration_of_the_first(folder: Path) -> None:
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"]
    for rate in ("0.1", "0.2"):
        command(*FIT, *logger, "--trainer.logger.version=0", f"--model.rate={rate}")
    for name, rate in {"config.yaml": 0.1, "config-1.yaml": 0.2}.items():
        (saved,) = folder.rglob(name)
        assert yaml.safe_load(saved.read_text())["model"]["init_args"]["rate"] == rate


def test_without_a_logger_no_configuration_is_left_in_the_folder(folder: Path) -> None:
    for _ in range(2):
        command(*FIT, *SILENT)
    assert not list(folder.rglob("config*"))


def test_an_optimizer_can_be_chosen_by_command(folder: Path) -> None:
    words = "--model=lightning.pytorch.demos.boring_classes.BoringModel --optimizer=AdamW".split()
    command(
        *FIT,
        *words,
        "--optimizer.lr=0.01",
        "--lr_scheduler=ExponentialLR",
        *["--lr_scheduler.gamma=0.5"],
    )
    (path,) = folder.rglob("*.ckpt")
    checkpoint = torch.load(path, weights_only=False)
    assert "exp_avg" in checkpoint["optimizer_states"][0]["state"][0]
    assert checkpoint["lr_schedulers"][0]["gamma"] == 0.5


# --- Mistakes ---


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["required: --model"]),
        (["--model=own.Modul"], ["'own.Modul'", "has no attribute"]),
        (["--model=absent.Module"], ["No module named 'absent'"]),
        (["--model=own.Data"], ["own.Data"]),
        (["--model=own.Needy"], ["own.Needy", "required: width"]),
        (["--model=own.Module", "--model.rte=1"], ["'rte' is not accepted"]),
        (
            ["--model=own.Module", "--trainer.strategy=zero4"],
            ["strategy='zero4'", "zero1, zero2 and zero3"],
        ),
        (["--model=own.Module", "--trainer.strategy.stage=4"], ["stage", "[1, 2, 3]"]),
        (["--model=own.Module", "--trainer.strategy.bucket_mb=-1"], ["bucket_mb=-1.0", "positive"]),
        (
            ["--model=own.Module", "--trainer.strategy=zero3", "--trainer.strategy.stage=2"],
            ["A name takes no arguments", "ZeroStrategy"],
        ),
        (["--model=own.Module", "--config=absent.yaml"], ["absent.yaml"]),
        (["--model=own.Module", "--trainer.precision=fp8"], ["fp8"]),
    ],
)
def test_a_mistake_is_one_message(
    folder: Path, capfd: pytest.CaptureFixture[str], words: list[str], expected: list[str]
) -> None:
    message = refusal(capfd, "fit", *words)
    for text in expected:
        assert text in message
    assert len(message.splitlines()) < 15


def test_an_error_of_the_models_own_stays_what_it_is(folder: Path) -> None:
    errors = expect_failures(
        lambda rank, world_size: main([*FIT, "--model.fails=true"]), 2, init=False
    )
    assert set(errors.values()) == {("ValueError", "an error of the model's own")}


# --- Processes ---


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    known = os.environ.get("PYTHONPATH")
    paths = [str(Path(lightning_zero.__file__).parents[1]), *([known] if known else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


SCRIPT = "from lightning_zero.cli import script\nif __name__ == '__main__':\n    script()\n"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "strategy"),
    [
        (["lightning-zero"], "zero3"),
        (["-m", "lightning_zero"], "zero3_spawn"),
        ([*TORCHRUN, "-m", "lightning_zero"], "zero3"),
    ],
    ids=["script", "module, spawn", "torchrun"],
)
def test_the_command_starts_its_ranks(folder: Path, start: list[str], strategy: str) -> None:
    bin_folder = folder / "bin"  # as installed: elsewhere than what is to be imported
    bin_folder.mkdir()
    (bin_folder / "lightning-zero").write_text(SCRIPT)
    start = [str(bin_folder / word) if word == "lightning-zero" else word for word in start]
    done = run(folder, *start, *FIT, f"--trainer.strategy={strategy}")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "stage 3 on 2 rank" in done.stderr
    (checkpoint,) = folder.rglob("*.ckpt")
    assert torch.load(checkpoint, weights_only=False)["global_step"] == 3


@pytest.mark.launcher
@pytest.mark.slow
def test_a_mistake_is_heard_under_torchrun(folder: Path) -> None:
    done = run(folder, *TORCHRUN, "-m", "lightning_zero", "fit", "--model=own.Absent")
    assert done.returncode != 0
    assert done.stderr.count("lightning-zero: error:") >= 1
    assert "has no attribute 'Absent'" in done.stderr


# --- A LightningCLI of one's own, and the arguments ---

SETTINGS: dict[str, Any] = {
    "stage": 2,
    "auto_wrap_policy": ["Linear", "torch.nn.LayerNorm"],
    "bucket_mb": 0.5,
    "prefetch": False,
    "broadcast_buffers": False,
    "reduce_every_backward": False,
    "optimizer_sharding": "whole",
    "eval_weights": "gathered",
    "restore_weights": "never",
    "cast": "none",
    "reduce_dtype": "bf16",
    "fp32_master": True,
    "log_grad_norm": True,
    "state_dict_type": "sharded",
    "async_save": True,
    "stall_timeout": 20.0,
    "accelerator": {"class_path": "lightning.pytorch.accelerators.CPUAccelerator"},
    "parallel_devices": ["cpu", "cpu"],
    "cluster_environment": {
        "class_path": "lightning.fabric.plugins.environments.TorchElasticEnvironment"
    },
    "checkpoint_io": {"class_path": "lightning.fabric.plugins.TorchCheckpointIO"},
    "precision_plugin": {
        "class_path": "lightning_zero.ZeroPrecision",
        "init_args": {
            "precision": "bf16-true",
            "cast": "none",
            "reduce_dtype": "bf16",
            "fp32_master": True,
        },
    },
    "process_group_backend": "gloo",
    "timeout": "0:10:00",
    "start_method": "fork",
}


def strategy_of(*words: str) -> ZeroStrategy:
    """Make a user's own ``LightningCLI`` without running anything; return its strategy."""
    cli = LightningCLI(BoringModel, args=["--seed_everything=7", *words], run=False)
    assert isinstance(cli.trainer.strategy, ZeroStrategy)
    return cli.trainer.strategy


# The Trainer refuses these two together.
@pytest.mark.parametrize("left_out", ["accelerator", "parallel_devices"])
def test_yaml_can_express_every_argument(folder: Path, left_out: str) -> None:
    assert SETTINGS.keys() == inspect.signature(ZeroStrategy).parameters.keys()
    defaults = {n: p.default for n, p in inspect.signature(ZeroStrategy).parameters.items()}
    assert not [name for name, value in SETTINGS.items() if value == defaults[name]]
    settings = {name: value for name, value in SETTINGS.items() if name != left_out}
    strategy = {"class_path": "lightning_zero.ZeroStrategy", "init_args": settings}
    (folder / "run.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))

    def body(rank: int, world_size: int) -> None:
        made = strategy_of("--config=run.yaml")
        for name, value in made._engine_settings.items():
            assert value == SETTINGS[name], name
        assert made.strategy_name == "zero2"
        assert isinstance(made.accelerator, CPUAccelerator)
        assert isinstance(made.cluster_environment, TorchElasticEnvironment)
        if left_out == "accelerator":
            assert made.parallel_devices == [torch.device("cpu")] * 2
        assert made.precision_plugin.precision == "bf16-true"
        assert made.precision_plugin.fp32_master
        assert made._timeout == timedelta(minutes=10)
        assert made._start_method == "fork"

    run_ranks(body, 2, init=False)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--trainer.strategy=zero2"], {"stage": 2}),
        ([CLASS, "--trainer.strategy.init_args.stage=2"], {"stage": 2}),
        ([CLASS, "--trainer.strategy.stage=1"], {"stage": 1}),
        (["--trainer.strategy=ZeroStrategy", "--trainer.strategy.stage=2"], {"stage": 2}),
        ([CLASS, "--trainer.strategy.auto_wrap_policy=layers"], {"auto_wrap_policy": "layers"}),
        ([CLASS, "--trainer.strategy.auto_wrap_policy=[Linear]"], {"auto_wrap_policy": ["Linear"]}),
        (
            [CLASS, "--trainer.strategy.auto_wrap_policy=own.every"],
            {"auto_wrap_policy": "own.every"},
        ),
    ],
)
def test_a_cli_of_ones_own_takes_names_classes_and_overrides(
    folder: Path, words: list[str], settings: dict[str, Any]
) -> None:
    def body(rank: int, world_size: int) -> dict[str, Any]:
        return strategy_of(*words)._engine_settings

    (made,) = run_ranks(body, 1, init=False)
    assert settings.items() <= made.items()


@pytest.mark.parametrize(
    ("argument", "value", "allowed"),
    [
        ("stage", "4", ["1", "2", "3"]),
        ("optimizer_sharding", "half", ["auto", "elementwise", "whole"]),
        ("eval_weights", "x", ["sharded", "gathered"]),
        ("restore_weights", "x", ["auto", "always", "never"]),
        ("cast", "x", ["auto", "all", "none"]),
        ("reduce_dtype", "fp8", ["fp32", "bf16", "fp16"]),
        ("state_dict_type", "x", ["full", "sharded"]),
        ("start_method", "x", ["popen", "spawn", "fork", "forkserver"]),
        ("bucket_mb", "much", ["float"]),
        ("prefetch", "x", ["bool"]),
        ("timeout", "x", ["timedelta"]),
    ],
)
def test_a_wrong_value_is_answered_with_the_allowed_ones(
    capfd: pytest.CaptureFixture[str], argument: str, value: str, allowed: list[str]
) -> None:
    def body(rank: int, world_size: int) -> None:
        strategy_of(CLASS, f"--trainer.strategy.{argument}={value}")

    capfd.readouterr()
    assert expect_failures(body, 1, init=False) == {0: ("SystemExit", "2")}
    message = capfd.readouterr().err.partition("error: ")[2]
    for word in (argument, *allowed):
        assert word in message


@pytest.mark.parametrize("cls", [ZeroStrategy, ZeroPrecision])
def test_every_argument_is_documented_and_shown_by_help(
    capfd: pytest.CaptureFixture[str], cls: type
) -> None:
    documented = {
        p.arg_name: p.description for p in docstring_parser.parse(cls.__doc__ or "").params
    }
    wanted = list(inspect.signature(cls).parameters)
    assert [name for name in documented if name in wanted] == wanted
    place = "strategy" if cls is ZeroStrategy else "plugins"

    def body(rank: int, world_size: int) -> None:
        strategy_of(f"--trainer.{place}.help=lightning_zero.{cls.__name__}")

    capfd.readouterr()
    assert expect_failures(body, 1, init=False) == {0: ("SystemExit", "0")}
    page = " ".join(capfd.readouterr().out.split())
    for name, description in documented.items():
        if name in wanted:
            assert f"--trainer.{place}.{name} " in page
            first = " ".join((description or "").split()[:3])
            assert first and first in page, name


def test_the_precision_is_a_plugin_in_yaml(folder: Path) -> None:
    plugin = {"class_path": "lightning_zero.ZeroPrecision", "init_args": {"cast": "all"}}
    trainer = {"plugins": plugin, "strategy": "zero3"}
    (folder / "run.yaml").write_text(yaml.safe_dump({"trainer": trainer}))

    def body(rank: int, world_size: int) -> tuple[str, str]:
        made = strategy_of("--config=run.yaml").precision_plugin
        return made.precision, made.cast

    assert run_ranks(body, 1, init=False) == [("bf16-mixed", "all")]


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_the_stock_callback_saves_the_configuration(folder: Path, stage: str) -> None:
    def body(rank: int, world_size: int) -> None:
        LightningCLI(BoringModel, args=["fit", *QUIET, f"--trainer.strategy={stage}"])

    run_ranks(body, 2, init=False)
    (saved,) = folder.rglob("config.yaml")
    assert yaml.safe_load(saved.read_text())["trainer"]["strategy"] == stage
