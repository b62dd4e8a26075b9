"""Every example runs, prints what its README says, and does what it is there to show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))


def environment() -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    paths = [str(ROOT), *([known] if known else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run(folder: Path, *words: str, timeout: float = 240) -> str:
    """Run Python in a folder that is laid out as the repository; return what it printed."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(EXAMPLES)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def example(folder: Path, name: str, *words: str) -> dict[str, str]:
    """Run a script; return its last lines by their labels, which must be those of its README."""
    printed = run(folder, f"examples/{name}/train.py", *words)
    page = (EXAMPLES / name / "README.md").read_text()
    (block,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    labels = [re.split(r"  +", line)[0] for line in block.splitlines()]
    lines = printed.splitlines()[-len(labels) :]
    found = dict(re.split(r"  +", line, maxsplit=1) for line in lines)
    assert list(found) == labels
    return found


# --- Without running them ---


def test_every_example_has_a_readme_and_is_listed() -> None:
    folders = sorted(path.name for path in EXAMPLES.iterdir() if list(path.glob("*.py")))
    assert folders == NAMES
    page = (EXAMPLES / "README.md").read_text()
    assert sorted(re.findall(r"\]\((\w+)/README\.md\)", page)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_readme_name_files_that_exist(name: str) -> None:
    page = (EXAMPLES / name / "README.md").read_text()
    commands = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    files = re.findall(r"\bexamples/[\w./]+", commands)
    assert files
    for file in files:
        assert (ROOT / file).is_file(), file


# --- Running them, at short settings ---


@pytest.mark.launcher
@pytest.mark.slow
def test_the_gpt_is_better_than_nothing_after_a_few_steps(tmp_path: Path) -> None:
    found = example(tmp_path, "gpt", "--steps=40", "--layers=1", "--context=32")
    bigram, ours = (float(found[f"validation loss, {name}"]) for name in ("bigram", "GPT"))
    assert 2 < bigram < ours < 4.0  # ln(100) = 4.6 is a guess
    assert (tmp_path / found["loss curve"]).stat().st_size > 10_000


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_zero3_names_as_many_digits_right_as_ddp(tmp_path: Path) -> None:
    ours, theirs = (example(tmp_path, "digits", f"--strategy={s}") for s in ("zero3", "ddp"))
    for measure in ("training accuracy", "test accuracy"):
        assert ours[measure] == theirs[measure]
        assert float(ours[measure]) > 0.95


@pytest.mark.launcher
@pytest.mark.slow
def test_the_gan_finds_the_modes(tmp_path: Path) -> None:
    found = example(tmp_path, "gan", "--steps=600", "--width=64")
    pattern = re.compile(r"training +(\d+)% of the points near a mode, (\d) modes of 8")
    shares, modes = {}, {}
    for when in ("before", "after"):
        line = next(f"{a}  {b}" for a, b in found.items() if a.startswith(when))
        match = pattern.search(line)
        assert match is not None
        shares[when], modes[when] = map(int, match.groups())
    assert shares["before"] < 20
    assert shares["after"] > 50
    assert modes["after"] >= 6
    assert (tmp_path / found["picture"]).stat().st_size > 10_000


@pytest.mark.launcher
@pytest.mark.slow
def test_lora_trains_the_adapters_only(tmp_path: Path) -> None:
    found = example(tmp_path, "lora", "--steps=30")
    first, last = map(float, re.findall(r"\d\.\d+", found["loss"]))
    assert last < first - 1
    assert found["base"] == "unchanged"
    assert found["loaded again"] == "the same outputs"
    names = {path.name for path in (tmp_path / "runs" / "lora").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names


@contextmanager
def served(folder: Path, weights: str) -> Iterator[tuple[str, str]]:
    """Serve on a free port; yield the address and the lines printed before it."""
    command = [sys.executable, "examples/serve/serve.py", weights, "--port=0"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            lines = ""
            for line in server.stdout:
                lines += line
                if match := re.search(r"serving at (http://[\d.:]+)/", line):
                    yield match[1], lines
                    return
            pytest.fail(f"the server ended: {lines}")
        finally:
            server.terminate()


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:
        text: str = json.load(answer)["text"]
    return text


@pytest.mark.launcher
@pytest.mark.slow
def test_a_sharded_run_by_yaml_is_converted_and_served(tmp_path: Path) -> None:
    short = ["--data.steps=40", "--trainer.val_check_interval=40", "--model.layers=2"]
    run(tmp_path, *"-m lightning_zero fit --config examples/gpt/zero3.yaml".split(), *short)
    page = (EXAMPLES / "serve" / "README.md").read_text()
    (convert,) = re.findall(r"^lightning-zero (convert .*)$", page, re.MULTILINE)
    checkpoint, weights = convert.split()[1:3]
    assert (tmp_path / checkpoint).is_dir()
    run(tmp_path, "-m", "lightning_zero", *convert.split())
    with served(tmp_path, weights) as (address, printed):
        assert re.match(rf"\d+,\d+ parameters from {re.escape(weights)}\n", printed)
        texts = [fetch(f"{address}/?prompt=def%20&length=50&seed={seed}") for seed in (0, 0, 1)]
    assert all(text.startswith("def ") and len(text) == 54 for text in texts)
    assert texts[0] == texts[1] != texts[2]
