"""Dicts of any keys come back from a sharded checkpoint as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from modules import assert_same_tensors
from test_sharded_checkpoint import Saving, assert_same, fit, read, saves, sharded
from torch import Tensor, nn

from lightning_zero.checkpoint.convert import convert
from lightning_zero.checkpoint.mappings import merged, odd_mappings, with_mappings
from ranks import run_ranks


def as_written(value: Any) -> Any:
    """Do to a tree what torch's checkpoints do to it."""
    if isinstance(value, dict):
        kept = {str(key): as_written(inner) for key, inner in value.items()}
        return {key: inner for key, inner in kept.items() if inner != {}}
    if isinstance(value, list):
        made = [as_written(inner) for inner in value]
        while made and made[-1] == {}:
            made.pop()
        return [None if inner == {} else inner for inner in made]
    return value


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {1: 2, "x": 3}},
        {"a": {}, "b": 1},
        {"a": {"b": {"c": {}}}},
        {"a": {1: {2: {}, (3, "four"): {None: 5, True: 6}}}},
        {"a": [{"x": 1}, {}, {2: 3}]},
        {"a": [{"x": 1}, {}]},
    ],
)
def test_keys_and_what_is_empty_come_back(tree: dict[str, Any]) -> None:
    assert as_written(tree) != tree
    assert with_mappings(as_written(tree), odd_mappings(tree)) == tree


def test_keys_that_only_code_can_make_stay_strings() -> None:
    tree = {"a": {torch.float32: 1}}
    assert odd_mappings(tree) == {}


def test_ranks_may_hold_different_parts_of_a_dict() -> None:
    parts: list[dict[str, Any]] = [
        {"a": {}, "b": {1: 5}, "c": [{}], "d": {"x": 1}},
        {"a": {"x": 1}, "b": {2: 6}, "c": [{"x": 1}], "d": {}},
        {"a": {}, "b": {"x": 7}, "c": [{}], "d": {}},
    ]
    read = {"a": {"x": 1}, "b": {"1": 5, "2": 6, "x": 7}, "c": [{"x": 1}], "d": {"x": 1}}
    whole = {**read, "b": {1: 5, 2: 6, "x": 7}}
    assert with_mappings(read, merged(map(odd_mappings, parts))) == whole


def test_state_survives_where_some_ranks_own_none(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        def make(params: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD([next(iter(params))], lr=0.1, momentum=0.9)

        for kind in ("full", "sharded"):
            strategy = sharded(state_dict_type=kind, optimizer_sharding="whole")
            fit(strategy, saves(tmp_path / kind), make=make)

    run_ranks(body, 2)
    convert(tmp_path / "sharded", tmp_path / "converted.ckpt", progress=False)
    full, converted = (
        torch.load(tmp_path / name)["optimizer_states"] for name in ("full", "converted.ckpt")
    )
    assert full[0]["state"]
    assert_same(in_order(converted), in_order(full))


class Nested(torch.optim.Optimizer):
    """Averages gradients in a state of many forms, some of which belong to no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, dict(lr=0.1, table={1: 0.5}, nothing={}))

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        own = self.state["calls"]
        own["count"] = own.get("count", torch.zeros(())) + 1
        for group in self.param_groups:
            for param in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[param]
                averages = state.setdefault("averages", {0: torch.zeros_like(param), 1: {}})
                state["pair"] = (param.grad.sum(), "text")
                averages[0].lerp_(param.grad, 0.5)
                param.data.sub_(averages[0], alpha=group["lr"])
        return loss


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizer_state_of_any_form_survives(stage: int, tmp_path: Path) -> None:
    def train(kind: str, resume: Path | None = None) -> tuple[Saving, dict[str, Any]]:
        last: dict[str, Any] = {}

        def after(model: Saving) -> None:
            if resume is None:
                saves(tmp_path / kind, step=4)(model)
            if model.trainer.global_step == 8:
                last.update(model.trainer.strategy.optimizers[0].state["calls"])

        strategy = sharded(stage, state_dict_type=kind, optimizer_sharding="whole")
        model = fit(strategy, after, make=Nested, ckpt_path=resume, max_epochs=2)
        return model, last

    def body(rank: int, world_size: int) -> None:
        for kind in ("full", "sharded"):
            model, last = train(kind)
            again, resumed = train(kind, tmp_path / kind)
            assert_same_tensors(dict(again.state_dict()), dict(model.state_dict()))
            assert last["count"] == resumed["count"] == 8

    run_ranks(body, 2)
    convert(tmp_path / "sharded", tmp_path / "converted.ckpt", progress=False)
    convert(tmp_path / "full", tmp_path / "back", progress=False)
    convert(tmp_path / "back", tmp_path / "again.ckpt", progress=False)
    full = torch.load(tmp_path / "full", weights_only=True)["optimizer_states"]
    averages = full[0]["state"][0]["averages"]
    assert isinstance(averages[0], Tensor) and averages[1] == {}
    assert full[0]["state"]["calls"]["count"] == 4
    for name in ("converted", "again"):
        state = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["optimizer_states"]
        assert_same(in_order(state), in_order(full))


def in_order(tree: Any) -> Any:
    """Sort dicts, since checkpoints of folders have no order."""
    if isinstance(tree, dict):
        return {key: in_order(tree[key]) for key in sorted(tree, key=repr)}
    return [in_order(inner) for inner in tree] if isinstance(tree, list) else tree


def backwards(params: Any) -> torch.optim.Optimizer:
    """Take the parameters in two groups and in an order that is not the module's."""
    held = list(params)[::-1]
    return torch.optim.AdamW([{"params": held[:3]}, {"params": held[3:], "lr": 1e-2}])


def test_a_full_file_of_ours_says_which_parameter_has_which_number(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> None:
        for kind in ("full", "sharded"):
            fit(sharded(2, state_dict_type=kind), saves(tmp_path / kind), make=backwards)

    run_ranks(body, 2)
    summary = convert(tmp_path / "full", tmp_path / "converted", progress=False)
    assert summary.notes == []
    assert_same(
        in_order(read(tmp_path / "converted")["optimizer_0"]),
        in_order(read(tmp_path / "sharded")["optimizer_0"]),
    )
    convert(tmp_path / "sharded", tmp_path / "again.ckpt", progress=False)
    convert(tmp_path / "again.ckpt", tmp_path / "back", progress=False)
    assert_same(
        in_order(read(tmp_path / "back")["optimizer_0"]),
        in_order(read(tmp_path / "sharded")["optimizer_0"]),
    )


class Remembers(nn.Module):
    """Has a state beside its tensors, under keys that are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Any] = {3: torch.ones(2), 4: {}}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Extra(Saving):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.memory = Remembers()


def test_extra_state_of_modules_survives(tmp_path: Path) -> None:
    def body(rank: int, world_size: int) -> Any:
        fit(sharded(), saves(tmp_path / "folder"), kind=Extra)
        model = Extra()
        model.memory.seen = {}
        return fit(sharded(), kind=Extra, ckpt_path=tmp_path / "folder").memory.seen

    for seen in run_ranks(body, 2):
        assert_same(seen, {3: torch.ones(2), 4: {}})
