"""Makes checkpoints for the tests of converting: as ranks, DeepSpeed and Lightning write them."""

from __future__ import annotations

import contextlib
import enum
import math
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from boxes import Boxes, part_of
from torch import Tensor

from ranks import run_ranks

PARAMETERS = ("embed.weight", "layer.weight", "layer.bias", "conv.weight", "alone")
"""The parameters among :func:`weights`, in the order of the optimizer's groups."""


def weights() -> dict[str, Tensor]:
    """Tensors of many shapes and dtypes; ``head.weight`` is tied to ``embed.weight``."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    made = {
        "embed.weight": random(11, 7),
        "layer.weight": random(5, 13),
        "layer.bias": random(5),
        "conv.weight": random(2, 3, 2, 3),
        "alone": random(1)[0],
        "half": random(9).bfloat16(),
        "count": torch.tensor(2**40 + 1),
        "mask": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 3),
        "small": torch.arange(3, dtype=torch.uint8),
    }
    made["head.weight"] = made["embed.weight"]
    return made


def optimizer() -> dict[str, Any]:
    """An optimizer's state by name: parameter-shaped, scalar, odd and no tensors at all."""
    full = weights()
    state: dict[str, Any] = {}
    for number, name in enumerate(PARAMETERS):
        state[name] = {
            "step": torch.tensor(float(number + 3)),
            "exp_avg": full[name] * 2,
            "exp_avg_sq": full[name] ** 2,
        }
    state["layer.weight"] |= {"rows": torch.arange(5.0), "kind": "odd", "seen": 7}
    return {"state": state, "param_groups": groups()}


def groups() -> list[dict[str, Any]]:
    """Two param groups of names."""
    common = {"betas": (0.9, 0.99), "foreach": None}
    return [
        {"lr": 0.1, "weight_decay": 0.1, **common, "params": list(PARAMETERS[:2])},
        {"lr": 0.2, "weight_decay": 0.0, **common, "params": list(PARAMETERS[2:])},
    ]


def rest() -> dict[str, Any]:
    """Everything else that Lightning saves."""
    return {
        "epoch": 3,
        "global_step": 42,
        "pytorch-lightning_version": "2.6.6",
        "loops": {"fit_loop": {"state_dict": {}, "progress": {"total": {"ready": 4}}}},
        "callbacks": {"Stop{'monitor': 'loss'}": {"best": torch.tensor(0.25), "wait": 2}},
        "lr_schedulers": [{"last_epoch": 42, "_last_lr": [0.1, 0.2]}],
        "hyper_parameters": OrderedDict(width=7, name="é"),
    }


def write_sharded(
    folder: Path, world_size: int = 3, key: str = "model", record: dict[str, Any] | None = None
) -> Path:
    """Let ranks write a sharded folder, each its flat slice of every tensor."""

    def write(rank: int, world_size: int) -> None:
        state = {key: weights(), "optimizer_0": optimizer()}
        state[key].pop("head.weight")
        parts = _parts(state, rank, world_size)
        warnings.simplefilter("ignore")
        dcp.save(parts, checkpoint_id=folder)
        if rank == 0:
            about = {"format": 1, "stage": 3, "world_size": world_size, "version": "0.1.0"}
            about |= {"aliases": {"head.weight": "embed.weight"}, **(record or {})}
            torch.save({**rest(), "lightning_zero": about}, folder / "meta.pt")

    run_ranks(write, world_size)
    return folder


def _parts(tree: Any, rank: int, world_size: int) -> Any:
    if isinstance(tree, dict):
        return {key: _parts(value, rank, world_size) for key, value in tree.items()}
    return part_of(tree, rank, world_size) if isinstance(tree, Tensor) else tree


def write_alone(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Write a sharded folder of weights from this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    torch.save(rest(), folder / "meta.pt")
    return folder


def across(full: Tensor) -> Boxes:
    """Cut a matrix between its columns, so that its parts are not runs of its elements."""
    rows, columns = full.shape
    half = columns // 2
    return Boxes(full, [((0, 0), (rows, half)), ((0, half), (rows, columns - half))])


def write_full(path: Path) -> Path:
    """Write a full checkpoint as a ddp Trainer does, with numbered optimizer state."""
    state = optimizer()
    numbers = {name: number for number, name in enumerate(PARAMETERS)}
    numbered = {
        "state": {numbers[name]: value for name, value in state["state"].items()},
        "param_groups": [
            {
                **group,
                "params": [numbers[name] for name in group["params"]],
                "param_names": group["params"],
            }
            for group in state["param_groups"]
        ],
    }
    torch.save({**rest(), "state_dict": weights(), "optimizer_states": [numbered]}, path)
    return path


@contextlib.contextmanager
def _deepspeed_classes() -> Iterator[Any]:
    """Put the classes of DeepSpeed that its pickles name where pickle looks for them."""
    config = types.ModuleType("deepspeed.runtime.zero.config")
    scaler = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    stage = enum.IntEnum("ZeroStageEnum", {"s1": 1, "s2": 2, "s3": 3}, module=config.__name__)
    loss_scaler = type("LossScaler", (), {"__module__": scaler.__name__})
    vars(config)["ZeroStageEnum"] = stage
    vars(scaler)["LossScaler"] = loss_scaler
    found = {module.__name__: module for module in (config, scaler)}
    for name in list(found):
        for end, letter in enumerate(name):
            if letter == ".":
                found[name[:end]] = types.ModuleType(name[:end])
    sys.modules.update(found)
    try:
        yield types.SimpleNamespace(stage=stage, loss_scaler=loss_scaler)
    finally:
        for name in found:
            del sys.modules[name]


def write_deepspeed(folder: Path, stage: int, world_size: int = 2) -> Path:
    """Write weights and optimizer as DeepSpeed 0.19 lays them out at a ZeRO stage.

    The weights of :func:`weights` that are parameters are in two groups; ``half`` is frozen.
    """
    tag = folder / "checkpoint"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("checkpoint")
    with _deepspeed_classes() as classes:
        for rank in range(world_size):
            prefix = f"zero_pp_rank_{rank}_mp_rank_00"
            saved = {"optimizer_state_dict": _deepspeed_optimizer(stage, rank, world_size, classes)}
            saved["ds_version"] = "0.19.8"
            torch.save(saved, tag / f"bf16_{prefix}_optim_states.pt")
            if stage == 3 or rank == 0:
                name = f"{prefix if stage == 3 else 'mp_rank_00'}_model_states.pt"
                torch.save(_deepspeed_model(stage, rank, world_size), tag / name)
    return folder


def _deepspeed_model(stage: int, rank: int, world_size: int) -> dict[str, Any]:
    full = weights()
    shapes = [
        OrderedDict((name, full[name].shape) for name in group["params"]) for group in groups()
    ]
    module = {}
    for name, tensor in full.items():
        is_parameter = name in (*PARAMETERS, "head.weight", "half")
        here = torch.empty(0) if stage == 3 and is_parameter else tensor
        module[name] = here.bfloat16() if is_parameter else here
    frozen = _slice(full["half"], rank, world_size) if stage == 3 else full["half"]
    return {
        "module": module,
        "buffer_names": ["count", "mask", "nothing", "small"],
        "param_shapes": shapes,
        # Stage 1 does not say which are frozen; their values are among the module's.
        "frozen_param_shapes": {"half": full["half"].shape} if stage > 1 else None,
        "frozen_param_fragments": {"half": frozen} if stage > 1 else None,
        "shared_params": {"head.weight": "embed.weight"},
        "ds_version": "0.19.8",
        "global_steps": 42,
        **rest(),
    }


def _deepspeed_optimizer(stage: int, rank: int, world_size: int, classes: Any) -> dict[str, Any]:
    full, state = weights(), optimizer()["state"]
    flats, states = [], {}
    for number, group in enumerate(groups()):
        names = group["params"]
        flats.append(_flat([full[name] for name in names], stage, rank, world_size))
        states[number] = {
            kind: _flat([state[name][kind] for name in names], stage, rank, world_size)
            for kind in ("exp_avg", "exp_avg_sq")
        }
        states[number]["step"] = torch.tensor(3.0)
    inner = {
        "state": states,
        "param_groups": [{**g, "params": [n]} for n, g in enumerate(groups())],
    }
    made = {"zero_stage": classes.stage(stage), "loss_scaler": classes.loss_scaler()}
    if stage == 3:
        made |= {"partition_count": world_size, "fp32_flat_groups": flats}
        return {**made, "optimizer_state_dict": inner}
    made |= {"partition_count": [world_size] * 2, "single_partition_of_fp32_groups": flats}
    return {**made, "base_optimizer_state": inner}


def _flat(tensors: list[Tensor], stage: int, rank: int, world_size: int) -> Tensor:
    """One rank's part of a group's vector."""
    if stage == 3:
        return torch.cat([_slice(tensor, rank, world_size) for tensor in tensors])
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    share = math.ceil(whole.numel() / (2 * world_size)) * 2
    return whole[rank * share : (rank + 1) * share].clone()  # the last rank's is not padded


def _slice(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    share = -(-tensor.numel() // world_size)
    padded = torch.zeros(share * world_size, dtype=tensor.dtype)
    padded[: tensor.numel()] = tensor.flatten()
    return padded[rank * share : (rank + 1) * share].clone()


def assert_same(found: Any, expected: Any, key: str = "") -> None:
    """Compare trees: the same keys, shapes, dtypes and bits."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), key
        assert set(found) == set(expected), key
        for name, value in expected.items():
            assert_same(found[name], value, f"{key}.{name}")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected), key
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{key}.{number}")
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, key
        assert torch.equal(found, expected), key
    else:
        assert found == expected and type(found) is type(expected), key


def load(path: Path) -> Any:
    """Load what was converted as a careful user does."""
    return torch.load(path, weights_only=True, mmap=True)


def no_leftovers(folder: Path) -> bool:
    """Whether no temporary file is in a folder."""
    return not [path for path in folder.iterdir() if path.name.startswith(".unfinished-")]
