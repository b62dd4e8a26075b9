"""Checkpoints convert between all formats with every name, shape, dtype and value kept."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import pty
import struct
import subprocess
import sys
import termios
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import safetensors
import safetensors.torch
import torch
from checkpoints import assert_same, load, no_leftovers
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import lightning_zero
from lightning_zero.checkpoint.convert import convert
from lightning_zero.checkpoint.formats import open_checkpoint
from lightning_zero.checkpoint.read_sharded import run_start
from lightning_zero.cli import main


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_sharded(tmp_path_factory.mktemp("ranks") / "sharded")


# Every format


def numbered(optimizer: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(checkpoints.PARAMETERS)}
    return {
        "state": {numbers[name]: state for name, state in optimizer["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in optimizer["param_groups"]
        ],
    }


def test_a_sharded_folder_becomes_a_full_checkpoint(sharded: Path, tmp_path: Path) -> None:
    summary = convert(sharded, tmp_path / "full.ckpt")
    full = load(tmp_path / "full.ckpt")
    record = full.pop("lightning_zero")
    assert record["stage"] == 3 and record["world_size"] == 3
    assert_same(full.pop("state_dict"), checkpoints.weights())
    assert_same(full.pop("optimizer_states"), [numbered(checkpoints.optimizer())])
    assert_same(full, checkpoints.rest())
    assert summary.tensors == 10 + 16 + 1
    assert summary.nbytes > 0 and summary.seconds > 0 and summary.peak_memory > 2**20
    assert no_leftovers(tmp_path)


def test_a_sharded_folder_becomes_safetensors_and_weights(sharded: Path, tmp_path: Path) -> None:
    convert(sharded, tmp_path / "a.safetensors")
    convert(sharded, tmp_path / "a.pt")
    expected = checkpoints.weights()
    assert_same(load(tmp_path / "a.pt"), expected)
    del expected["head.weight"]
    assert_same(safetensors.torch.load_file(tmp_path / "a.safetensors"), expected)


def test_tied_weights_are_written_once(sharded: Path, tmp_path: Path) -> None:
    convert(sharded, tmp_path / "a.safetensors")
    convert(sharded, tmp_path / "a.pt")
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    found = load(tmp_path / "a.pt")
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert_same(load(tmp_path / "b.pt"), checkpoints.weights())


def test_safetensors_load_into_a_model_with_tied_weights(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    saved = make()
    torch.save(saved.state_dict(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    model = make()
    safetensors.torch.load_model(model, tmp_path / "a.safetensors")
    assert torch.equal(model[0].weight, saved[0].weight)


def test_a_full_checkpoint_goes_to_a_sharded_folder_and_back(tmp_path: Path) -> None:
    full = checkpoints.write_full(tmp_path / "full.ckpt")
    convert(full, tmp_path / "folder")
    convert(tmp_path / "folder", tmp_path / "back.ckpt")
    found = load(tmp_path / "back.ckpt")
    assert found.pop("lightning_zero")["format"] == 1
    assert_same(found, load(full))
    tied = found["state_dict"]
    assert tied["head.weight"].data_ptr() == tied["embed.weight"].data_ptr()


@pytest.mark.parametrize("layout, key", [("fsdp", "model"), ("model_parallel", "state_dict")])
def test_stock_tools_read_a_folder_that_was_converted(
    tmp_path: Path, layout: str, key: str
) -> None:
    full = checkpoints.write_full(tmp_path / "full.ckpt")
    convert(full, tmp_path / "folder", layout=layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "folder", tmp_path / "stock.pt")
        consolidated = _load_distributed_checkpoint(tmp_path / "folder")
    found = torch.load(tmp_path / "stock.pt")
    assert_same(found[key], checkpoints.weights())
    assert_same(found["optimizer_0"]["state"], checkpoints.optimizer()["state"])
    assert_same(consolidated[key], checkpoints.weights())
    assert consolidated["global_step"] == 42


@pytest.mark.parametrize("key", ["model", "state_dict"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_number_of_ranks_and_either_key_converts(
    tmp_path: Path, key: str, world_size: int
) -> None:
    folder = checkpoints.write_sharded(tmp_path / "folder", world_size, key)
    convert(folder, tmp_path / "a.pt")
    assert_same(load(tmp_path / "a.pt"), checkpoints.weights())


def test_parts_that_are_no_runs_of_elements_are_put_together(tmp_path: Path) -> None:
    full = {"a": torch.randn(4, 7), "b": torch.arange(12.0).view(2, 6)}
    parts: Any = {name: checkpoints.across(tensor) for name, tensor in full.items()}
    folder = checkpoints.write_alone(tmp_path / "folder", parts)
    convert(folder, tmp_path / "a.pt")
    convert(folder, tmp_path / "a.safetensors", dtype="bf16")
    assert_same(load(tmp_path / "a.pt"), full)
    halves = {name: tensor.bfloat16() for name, tensor in full.items()}
    assert_same(safetensors.torch.load_file(tmp_path / "a.safetensors"), halves)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (1, 3, 1, 2), (2, 1, 2, 2)])
def test_a_box_is_one_run_exactly_where_its_elements_follow_each_other(
    shape: tuple[int, ...],
) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    spans = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    for ends in itertools.product(*spans):
        box = numbers[tuple(slice(a, b) for a, b in ends)].flatten()
        first = int(box[0])
        is_run = torch.equal(box, torch.arange(first, first + len(box)))
        offset, size = tuple(a for a, _ in ends), tuple(b - a for a, b in ends)
        assert run_start(shape, offset, size) == (first if is_run else None)


def test_strided_and_overlapping_tensors_of_a_file_keep_their_values(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    saved = {
        "t": base.t(),
        "row": base[1],
        "every": base[:, ::2],
        "base": base,
        "p": nn.Parameter(base),
    }
    torch.save(saved, tmp_path / "a.pt")
    for suffix in (".safetensors", ".pt"):
        convert(tmp_path / "a.pt", tmp_path / f"b{suffix}", force=True)
        convert(tmp_path / f"b{suffix}", tmp_path / f"c{suffix}.pt")
        found = load(tmp_path / f"c{suffix}.pt")
        assert_same(found, {name: tensor.detach() for name, tensor in saved.items()})


def test_dtypes_without_a_storage_class_and_old_files_convert(tmp_path: Path) -> None:
    saved = {"f8": torch.ones(3).to(torch.float8_e4m3fn), "u": torch.arange(3).to(torch.uint32)}
    torch.save(saved, tmp_path / "a.pt", _use_new_zipfile_serialization=True)
    torch.save({"x": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    convert(tmp_path / "b.safetensors", tmp_path / "c.pt")
    convert(tmp_path / "old.pt", tmp_path / "d.pt")
    found = load(tmp_path / "c.pt")
    assert found["f8"].dtype == torch.float8_e4m3fn and found["u"].tolist() == [0, 1, 2]
    assert_same(load(tmp_path / "d.pt"), {"x": torch.ones(2)})


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_deepspeed_folders_convert(tmp_path: Path, stage: int, world_size: int) -> None:
    folder = checkpoints.write_deepspeed(tmp_path / "folder", stage, world_size)
    convert(folder, tmp_path / "full.ckpt")
    full = load(tmp_path / "full.ckpt")
    expected = checkpoints.weights()
    if stage == 1:
        expected["half"] = expected["half"].bfloat16()
    assert_same(full.pop("state_dict"), expected)
    optimizer = numbered(checkpoints.optimizer())
    for state in optimizer["state"].values():
        state["step"] = torch.tensor(3.0)
        for kind in ("rows", "kind", "seen"):
            state.pop(kind, None)
    assert_same(full.pop("optimizer_states"), [optimizer])
    assert_same(full, checkpoints.rest())


def test_steps_of_deepspeed_do_not_share_memory(tmp_path: Path) -> None:
    convert(checkpoints.write_deepspeed(tmp_path / "folder", 2), tmp_path / "full.ckpt")
    states = load(tmp_path / "full.ckpt")["optimizer_states"][0]["state"]
    assert len({state["step"].data_ptr() for state in states.values()}) == len(states)


# Options


def test_dtype_converts_floating_weights_only(sharded: Path, tmp_path: Path) -> None:
    convert(sharded, tmp_path / "a.ckpt", dtype="bf16")
    found = load(tmp_path / "a.ckpt")
    assert_same(
        found["state_dict"],
        {k: v.bfloat16() if v.is_floating_point() else v for k, v in checkpoints.weights().items()},
    )
    assert_same(found["optimizer_states"], [numbered(checkpoints.optimizer())])


def test_weights_only_leaves_training_state_out(sharded: Path, tmp_path: Path) -> None:
    convert(sharded, tmp_path / "a.ckpt", weights_only=True)
    found = load(tmp_path / "a.ckpt")
    assert not {"optimizer_states", "lr_schedulers", "callbacks"} & set(found)
    assert found["hyper_parameters"]["width"] == 7
    assert_same(found["state_dict"], checkpoints.weights())


def test_prefix_and_strip_select_and_rename(sharded: Path, tmp_path: Path) -> None:
    summary = convert(sharded, tmp_path / "a.safetensors", prefix="layer.", strip=True)
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(found) == {"weight", "bias"}
    assert "9 weights do not start with 'layer.'" in str(summary)
    convert(sharded, tmp_path / "a.pt", prefix="layer.")
    assert set(load(tmp_path / "a.pt")) == {"layer.weight", "layer.bias"}


def test_shards_have_an_index_as_hugging_face_writes_it(sharded: Path, tmp_path: Path) -> None:
    summary = convert(sharded, tmp_path / "model.safetensors", max_shard_size="400B")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert summary.files[-1].name == "model.safetensors.index.json"
    found: dict[str, Tensor] = {}
    for file in files:
        tensors = safetensors.torch.load_file(tmp_path / file)
        assert sum(t.nbytes for t in tensors.values()) <= 400
        assert {name for name, place in index["weight_map"].items() if place == file} == set(
            tensors
        )
        found |= tensors
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    convert(tmp_path / "model.safetensors.index.json", tmp_path / "back.pt")
    assert_same(load(tmp_path / "back.pt"), checkpoints.weights())


def test_shards_may_be_written_over_those_that_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(10), "b": torch.full((20,), 1.0), "c": torch.full((20,), 2.0)}
    torch.save(tensors, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "m.safetensors", max_shard_size=160)
    index = tmp_path / "m.safetensors.index.json"
    again = convert(index, tmp_path / "m.safetensors", max_shard_size=100, dtype="bf16", force=True)
    assert [file.name for file in again.files[:2]] == [
        "m-00001-of-00002.safetensors",
        "m-00002-of-00002.safetensors",
    ]
    convert(index, tmp_path / "b.pt")
    expected = {name: t.bfloat16() if name != "a" else t for name, t in tensors.items()}
    assert_same(load(tmp_path / "b.pt"), expected)
    assert no_leftovers(tmp_path)


def test_empty_tensors_are_not_tied(tmp_path: Path) -> None:
    tensors = {"a": torch.empty(0), "b": torch.empty(0), "c": torch.ones(2)}
    torch.save(tensors, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    assert_same(safetensors.torch.load_file(tmp_path / "a.safetensors"), tensors)


def test_one_shard_is_enough_for_a_small_model(sharded: Path, tmp_path: Path) -> None:
    summary = convert(sharded, tmp_path / "model.safetensors", max_shard_size="5GB")
    assert summary.files == [tmp_path / "model.safetensors"]


def test_to_overrides_the_suffix(sharded: Path, tmp_path: Path) -> None:
    convert(sharded, tmp_path / "model.bin", to="pt")
    convert(sharded, tmp_path / "epoch=3.ckpt", to="sharded")
    assert_same(load(tmp_path / "model.bin"), checkpoints.weights())
    assert open_checkpoint(tmp_path / "epoch=3.ckpt").format == "sharded"


def test_the_destination_is_overwritten_only_by_force(sharded: Path, tmp_path: Path) -> None:
    full = checkpoints.write_full(tmp_path / "full.ckpt")
    for destination in (tmp_path / "a.pt", tmp_path / "folder"):
        convert(full, destination)
        with pytest.raises(FileExistsError, match="--force"):
            convert(sharded, destination)
        convert(sharded, destination, force=True)
    assert open_checkpoint(tmp_path / "folder").record["stage"] == 3
    (tmp_path / "m.safetensors.index.json").touch()
    with pytest.raises(FileExistsError, match=r"index\.json exists"):
        convert(full, tmp_path / "m.safetensors", max_shard_size=400)
    assert not list(tmp_path.glob("m-*"))
    convert(tmp_path / "a.pt", tmp_path / "a.pt", dtype="bf16", force=True)
    assert load(tmp_path / "a.pt")["alone"].dtype == torch.bfloat16
    assert no_leftovers(tmp_path)


@pytest.mark.parametrize(
    "destination, settings, message",
    [
        ("a.ckpt", dict(prefix="layer."), "--weights-only"),
        ("a.pt", dict(strip=True), "--prefix"),
        ("a.pt", dict(max_shard_size="1GB"), "--max-shard-size goes with .safetensors"),
        ("a.safetensors", dict(max_shard_size="many"), "expected a size"),
        ("a.safetensors", dict(dtype="int64"), "choose one of fp64"),
        ("a.pt", dict(prefix="nowhere."), "no name starts with 'nowhere.'"),
        ("a.onnx", {}, "cannot tell from '.onnx'"),
        ("a.pt", dict(to="onnx"), "choose one of ckpt"),
        ("folder", dict(layout="deepspeed"), "choose one of fsdp"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(
    sharded: Path, tmp_path: Path, destination: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert(sharded, tmp_path / destination, **settings)
    assert not list(tmp_path.iterdir())


def test_what_a_format_cannot_hold_is_refused_or_noted(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "extra": {"x": 1}}, tmp_path / "a.pt")
    assert "'extra' is no tensor" in str(convert(tmp_path / "a.pt", tmp_path / "a.safetensors"))
    torch.save({"a": torch.ones(2, dtype=torch.complex128)}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"'?a'?: safetensors has no name for torch.complex128"):
        convert(tmp_path / "b.pt", tmp_path / "b.safetensors")
    torch.save({"a": torch.eye(2).to_sparse()}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="sparse"):
        convert(tmp_path / "c.pt", tmp_path / "c.safetensors")
    assert no_leftovers(tmp_path)


# The command


def run(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    root = Path(lightning_zero.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, **settings
    )


def test_the_command_imports_nothing_heavy(sharded: Path, tmp_path: Path) -> None:
    destination = tmp_path / "a.safetensors"
    words = ("-X", "importtime", "-m", "lightning_zero", "convert", str(sharded), str(destination))
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert "10 tensors" in done.stdout and "peak memory" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "torch" in imported
    alone = run("-X", "importtime", "-c", "import torch").stderr
    more = imported - {line.split("|")[-1].strip() for line in alone.splitlines()}
    heavy = ("lightning.", "torch.distributed.", "transformers", "tqdm", "torch._dynamo")
    assert not [name for name in more if name.startswith(heavy)]


def test_extra_state_and_dicts_of_other_classes_survive(tmp_path: Path) -> None:
    saved = {
        "state_dict": {"a.w": torch.ones(2), "a._extra_state": {"scale": {"x": 1.5}, "n": [1, 2]}},
        "callbacks": OrderedDict(b=Counter("aab"), c=torch.Size([2])),
    }
    torch.save(saved, tmp_path / "a.ckpt")
    convert(tmp_path / "a.ckpt", tmp_path / "folder")
    convert(tmp_path / "folder", tmp_path / "b.ckpt")
    found = load(tmp_path / "b.ckpt")
    assert_same(found["state_dict"], saved["state_dict"])
    assert type(found["callbacks"]) is OrderedDict and type(found["callbacks"]["b"]) is Counter
    assert_same(found["callbacks"], saved["callbacks"])


def test_the_package_registers_its_strategies_for_everything_else() -> None:
    is_command = lightning_zero._is_command
    assert is_command(["python", "-m", "lightning_zero", "convert", "a", "b"])
    assert is_command(["python", "-X", "dev", "-m", "lightning_zero", "inspect", "a"])
    assert is_command(["python", "/env/bin/lightning-zero", "convert", "a", "b"])
    assert not is_command(["python", "-m", "lightning_zero", "fit"])
    assert not is_command(["python", "-m", "lightning_zero"])
    assert not is_command(["python", "train.py", "lightning_zero", "convert"])
    assert not is_command(["python", "train.py", "lightning-zero", "convert"])
    assert not is_command(["python", "-c", "", "-m", "pytest"])
    with pytest.raises(AttributeError, match="nothing"):
        lightning_zero.nothing  # noqa: B018


def test_the_command_says_what_is_wrong(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(sharded), str(tmp_path / "a.pt"), "--dtype", "bf16"]
    assert main(words) == 0
    assert "a.pt: 10 tensors" in capsys.readouterr().out
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("lightning-zero convert: ") and "--force" in error
    assert main([*words, "--force", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert not captured.out and not captured.err
    assert main(["convert", str(sharded), "memory://x/a.pt"]) == 1
    assert "DST is no URL" in capsys.readouterr().err
    assert main(["inspect", "oci://nowhere/a.ckpt"]) == 1
    assert capsys.readouterr().err.startswith("lightning-zero inspect: ")
    with pytest.raises(SystemExit) as stopped:
        main(["transmogrify"])
    assert stopped.value.code == 2


def test_progress_is_shown_on_a_terminal_only(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    convert(sharded, tmp_path / "a.pt")
    assert not capsys.readouterr().err
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        convert(sharded, tmp_path / "b.pt")
        convert(sharded, tmp_path / "c.pt", progress=False)
        monkeypatch.undo()
        shown = os.read(leader, 10_000).decode()
    os.close(leader)
    assert "b.pt" in shown and "100%" in shown and "c.pt" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_memory_stays_within_two_tensors(tmp_path: Path, suffix: str) -> None:
    """On 1.6 GB, over `import torch`: the largest tensor twice and 100 MB."""
    largest = 60 * 10**6
    tensors: Any = {
        f"w{n}": torch.ones(3000, largest // 12000) for n in range(1600 * 10**6 // largest)
    }
    tensors = {name: checkpoints.Boxes.cut(tensor, 2) for name, tensor in tensors.items()}
    folder = checkpoints.write_alone(tmp_path / "folder", tensors)
    del tensors
    peak = (
        "\nfor l in open('/proc/self/status'):\n  if 'VmHWM' in l: print(int(l.split()[1]) * 1024)"
    )
    base = int(run("-c", f"import torch{peak}").stdout)
    destination = str(tmp_path / f"a{suffix}")
    done = run("-m", "lightning_zero", "convert", str(folder), destination)
    assert done.returncode == 0, done.stderr
    found = float(done.stdout.split("peak memory ")[1].split()[0].replace(",", "")) * 1e6
    assert found - base < 2 * largest + 100e6
    assert found - base < 60e6  # what it takes in fact, so that a change for the worse is seen
