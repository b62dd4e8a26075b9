"""Trainers and Lightning's sharded strategies go on from what was converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same, load
from modules import Perceptron, assert_same_outcomes, batches, outcome, quiet_trainer
from torch import Tensor, nn

from lightning_zero.checkpoint.convert import convert
from lightning_zero.checkpoint.formats import open_checkpoint
from ranks import run_ranks

# Optimizers by number


def test_parameters_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save(saved, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"a.ckpt: which of the optimizer's numbers.*named"):
        convert(tmp_path / "a.ckpt", tmp_path / "folder")
    convert(tmp_path / "a.ckpt", tmp_path / "folder", weights_only=True)


def test_buffers_between_parameters_are_told_by_shape(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2].register_buffer("center", torch.zeros(6))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    saved = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save(saved, tmp_path / "a.ckpt")
    convert(tmp_path / "a.ckpt", tmp_path / "folder")
    (state,) = open_checkpoint(tmp_path / "folder").optimizers
    assert list(state["state"]) == [name for name, _ in model.named_parameters()]
    saved["state_dict"]["2.center"] = torch.zeros(2)  # now like the bias before it
    torch.save(saved, tmp_path / "b.ckpt")
    with pytest.raises(ValueError, match="not certain"):
        convert(tmp_path / "b.ckpt", tmp_path / "other")


# Trainers and real sharded checkpoints


def train(rank: int, world_size: int, path: Path | None, epochs: int, save: Path | None) -> Any:
    torch.manual_seed(3 + (path is not None))
    model = Perceptron(schedule=True)
    trainer = quiet_trainer("ddp", world_size, max_epochs=epochs)
    trainer.fit(model, batches(model, 24, 1), ckpt_path=path, weights_only=False)
    if save is not None:
        trainer.save_checkpoint(save)
    return outcome(model, trainer)


def test_a_ddp_trainer_resumes_from_a_converted_checkpoint(tmp_path: Path) -> None:
    run_ranks(train, 2, None, 1, tmp_path / "full.ckpt")
    convert(tmp_path / "full.ckpt", tmp_path / "folder")
    convert(tmp_path / "folder", tmp_path / "back.ckpt")
    expected = run_ranks(train, 2, tmp_path / "full.ckpt", 2, None)
    assert_same_outcomes(run_ranks(train, 2, tmp_path / "back.ckpt", 2, None), expected)


def make_network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def shard_network() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = make_network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step_network(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(9)
    for _ in range(2):
        model(torch.randn(4, 7, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_folders_of_lightnings_model_parallel_strategy_convert(tmp_path: Path) -> None:
    from lightning.fabric.strategies.model_parallel import _save_checkpoint

    def save(rank: int, world_size: int) -> None:
        model, optimizer = shard_network()
        step_network(model, optimizer)
        state = {"state_dict": model, "optimizer_0": optimizer, "epoch": 2}
        _save_checkpoint(tmp_path / "folder", state, full_state_dict=False, rank=rank)

    run_ranks(save, 2)
    convert(tmp_path / "folder", tmp_path / "full.ckpt")
    model, optimizer = make_network()
    step_network(model, optimizer)
    full = load(tmp_path / "full.ckpt")
    assert full["epoch"] == 2
    torch.testing.assert_close(full["state_dict"], dict(model.state_dict()))
    fresh, resumed = make_network()
    fresh.load_state_dict(full["state_dict"])
    resumed.load_state_dict(full["optimizer_states"][0])
    expected = optimizer.state_dict()["state"]
    torch.testing.assert_close(resumed.state_dict()["state"], expected)


def test_lightnings_model_parallel_strategy_loads_a_converted_folder(tmp_path: Path) -> None:
    from lightning.fabric.strategies.model_parallel import _load_checkpoint

    model, optimizer = make_network()
    step_network(model, optimizer)
    saved = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save({**saved, "epoch": 2}, tmp_path / "full.ckpt")
    convert(tmp_path / "full.ckpt", tmp_path / "folder", layout="model_parallel")

    def resume(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[Tensor], int]:
        model, optimizer = shard_network()
        state: dict[str, Any] = {"state_dict": model, "optimizer_0": optimizer, "epoch": 0}
        _load_checkpoint(tmp_path / "folder", state, weights_only=True)
        found = {name: value.full_tensor() for name, value in model.state_dict().items()}
        averages = [optimizer.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
        return found, averages, state["epoch"]

    for found, averages, epoch in run_ranks(resume, 2):
        assert_same(found, dict(model.state_dict()))
        assert_same(averages, [optimizer.state[p]["exp_avg"] for p in model.parameters()])
        assert epoch == 2


def fsdp_network() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, _ = make_network()
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def sharded_state(model: nn.Module) -> Any:
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    return FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    )


@pytest.mark.filterwarnings("ignore")
def test_folders_as_lightnings_fsdp_strategy_writes_them_convert_both_ways(tmp_path: Path) -> None:
    """With the calls of FSDPStrategy, which itself takes no CPU."""
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    def save(rank: int, world_size: int) -> None:
        model, optimizer = fsdp_network()
        step_network(model, optimizer)
        with sharded_state(model):
            state = {"model": model.state_dict()}
            state["optimizer_0"] = FSDP.optim_state_dict(model, optimizer)
            dcp.save(state, checkpoint_id=tmp_path / "folder")
        if rank == 0:
            torch.save({"epoch": 1}, tmp_path / "folder" / "meta.pt")

    def resume(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, optimizer = fsdp_network()
        with sharded_state(model):
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path / "back")
            model.load_state_dict(state["model"])
            reader = dcp.FileSystemReader(tmp_path / "back")
            found = load_sharded_optimizer_state_dict(state["model"], "optimizer_0", reader)
            loaded = found["optimizer_0"]
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, loaded))
        with FSDP.summon_full_params(model):
            full = {name: value.clone() for name, value in model.module.state_dict().items()}
        averages = {
            name: [shard.tensor.clone() for shard in values["exp_avg"].local_shards()]
            for name, values in loaded["state"].items()
        }
        return full, averages

    run_ranks(save, 2)
    convert(tmp_path / "folder", tmp_path / "full.ckpt")
    full = load(tmp_path / "full.ckpt")
    model, optimizer = make_network()
    step_network(model, optimizer)
    torch.testing.assert_close(full["state_dict"], dict(model.state_dict()))
    state = full["optimizer_states"][0]["state"]
    torch.testing.assert_close(state, optimizer.state_dict()["state"])
    convert(tmp_path / "full.ckpt", tmp_path / "back")
    ranks = run_ranks(resume, 2)
    for weights, _ in ranks:
        assert_same(weights, full["state_dict"])
    for number, (name, _) in enumerate(model.named_parameters()):
        average = torch.cat([shard for _, averages in ranks for shard in averages[name]])
        assert_same(average, state[number]["exp_avg"])
