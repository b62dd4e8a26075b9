"""Which parameters form a unit, for every form of the policy, without processes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.nn.utils.parametrizations import weight_norm

from lightning_zero.engine.units import UnitPlan, plan_buckets, plan_units

LARGE = 128
"""A square matrix of this width is as large as a unit of its own has to be."""


def block() -> nn.Module:
    """A repeated layer with several large parts."""
    return nn.TransformerEncoderLayer(LARGE, 4, LARGE, batch_first=True)


class Language(nn.Module):
    """What transformers look like, with a tied head."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, LARGE)
        self.position = nn.Parameter(torch.zeros(8, LARGE))
        self.blocks = nn.ModuleList([block() for _ in range(depth)])
        self.norm = nn.LayerNorm(LARGE)
        self.head = nn.Linear(LARGE, 256, bias=False)
        self.head.weight = self.embedding.weight


def plans_of(module: nn.Module, policy: Any) -> dict[str, list[str]]:
    """Plan; return parameter names by unit."""
    plans = plan_units(module, policy)
    assert_every_parameter_is_in_one_unit(module, plans)
    assert len({plan.name for plan in plans}) == len(plans)
    return {plan.name: [name for name, _ in plan.params] for plan in plans}


def assert_every_parameter_is_in_one_unit(module: nn.Module, plans: list[UnitPlan]) -> None:
    """Assert that plans hold each parameter once, under its first name, one kind a unit."""
    entries = [(name, id(param)) for plan in plans for name, param in plan.params]
    assert sorted(entries) == sorted((name, id(param)) for name, param in module.named_parameters())
    for plan in plans:
        assert len({(param.dtype, param.requires_grad) for _, param in plan.params}) == 1
        names = [name for name, _ in plan.params]
        order = [name for name, _ in module.named_parameters()]
        assert names == sorted(names, key=order.index)


# --- The automatic policy ---


def test_auto_makes_units_of_repeated_blocks_and_large_layers() -> None:
    plans = plans_of(Language(), "auto")
    assert list(plans) == ["root", "embedding", "blocks.0", "blocks.1"]
    assert plans["root"] == ["position", "norm.weight", "norm.bias"]
    assert plans["embedding"] == ["embedding.weight"]
    assert plans["blocks.1"] == [f"blocks.1.{name}" for name, _ in block().named_parameters()]


def test_auto_leaves_small_modules_to_the_root() -> None:
    small = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert list(plans_of(small, "auto")) == ["root"]


def test_auto_looks_into_a_block_that_occurs_once() -> None:
    plans = plans_of(nn.ModuleDict({"encoder": block()}), "auto")
    assert list(plans) == ["root", "encoder.self_attn", "encoder.linear1", "encoder.linear2"]


def test_auto_never_makes_a_container_a_unit() -> None:
    inner = nn.Sequential(*[nn.Linear(LARGE, LARGE) for _ in range(2)])
    nested = nn.ModuleList([inner, nn.Sequential(nn.Linear(LARGE, LARGE))])
    assert list(plans_of(nested, "auto")) == ["0.0", "0.1", "1.0"]


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.MultiheadAttention(LARGE, 4),
        lambda: nn.LSTM(LARGE, LARGE, num_layers=2),
        lambda: weight_norm(nn.Linear(LARGE, LARGE)),
    ],
)
def test_auto_never_splits_layers_that_read_their_childrens_parameters(
    layer: Callable[[], nn.Module],
) -> None:
    plans = plans_of(nn.ModuleDict({"layer": layer(), "other": nn.Linear(2, 2)}), "auto")
    assert list(plans) == ["root", "layer"]
    assert plans["root"] == ["other.weight", "other.bias"]


def test_auto_divides_the_model_that_parity_tests_settings_with() -> None:
    assert len(plans_of(parity.Blocks(), "auto")) >= 5


# --- Words ---


def test_none_makes_one_unit() -> None:
    module = Language()
    assert plans_of(module, "none") == {"root": [name for name, _ in module.named_parameters()]}


def test_layers_makes_a_unit_of_every_module_that_holds_parameters() -> None:
    plans = plans_of(Language(depth=1), "layers")
    assert list(plans) == [
        "root",
        "embedding",
        "blocks.0.self_attn",
        "blocks.0.linear1",
        "blocks.0.linear2",
        "blocks.0.norm1",
        "blocks.0.norm2",
        "norm",
    ]
    assert plans["root"] == ["position"]
    assert plans["norm"] == ["norm.weight", "norm.bias"]


@pytest.mark.parametrize("policy", ["layers", "NonDynamicallyQuantizableLinear", {nn.Linear}])
def test_multihead_attention_is_never_split(policy: Any) -> None:
    plans = plans_of(Language(depth=1), policy)
    assert not any(name.endswith("out_proj") for name in plans)
    (owner,) = [unit for unit, names in plans.items() if any("out_proj" in n for n in names)]
    assert any("in_proj" in name for name in plans[owner])


# --- Classes ---


@pytest.mark.parametrize(
    "policy",
    [
        "TransformerEncoderLayer",
        ["TransformerEncoderLayer"],
        ("torch.nn.modules.transformer.TransformerEncoderLayer",),
        {nn.TransformerEncoderLayer},
        frozenset({nn.TransformerEncoderLayer}),
        ModuleWrapPolicy({nn.TransformerEncoderLayer}),
    ],
)
def test_classes_are_named_in_every_form(policy: Any) -> None:
    assert list(plans_of(Language(), policy)) == ["root", "blocks.0", "blocks.1"]


def test_several_classes_may_nest_and_the_inner_takes_what_is_its_own() -> None:
    plans = plans_of(Language(depth=1), ["TransformerEncoderLayer", "LayerNorm"])
    assert list(plans) == ["root", "blocks.0", "blocks.0.norm1", "blocks.0.norm2", "norm"]
    assert plans["blocks.0.norm1"] == ["blocks.0.norm1.weight", "blocks.0.norm1.bias"]
    assert not any("norm" in name for name in plans["blocks.0"])


def test_a_class_stands_for_its_subclasses() -> None:
    class Special(nn.Linear):
        pass

    module = nn.Sequential(Special(2, 2), nn.Linear(2, 2), nn.Tanh())
    assert list(plans_of(module, {nn.Linear})) == ["0", "1"]
    assert list(plans_of(module, {Special})) == ["root", "0"]


# --- Functions, as FSDP takes them ---


@pytest.mark.parametrize(
    "policy",
    [
        functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
        ),
        functools.partial(
            lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.TransformerEncoderLayer)
        ),
    ],
)
def test_fsdps_own_functions_choose_the_modules(policy: Any) -> None:
    assert list(plans_of(Language(), policy)) == ["root", "blocks.0", "blocks.1"]


def test_a_function_by_size_counts_what_inner_units_have_left() -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=LARGE * LARGE)
    plans = plans_of(Language(depth=1), policy)
    assert "blocks.0.self_attn" in plans  # FSDP never splits it either
    assert "blocks.0" not in plans  # its two norms are all that is left
    assert "blocks" not in plans


def test_a_function_that_takes_everything_makes_a_unit_of_every_module_with_parameters() -> None:
    plans = plans_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), always_wrap_policy)
    assert list(plans) == ["0", "2"]


def test_a_function_may_keep_the_planner_out_of_a_module() -> None:
    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return not isinstance(module, nn.ModuleList) if recurse else nonwrapped_numel > 0

    plans = plans_of(Language(), policy)
    assert not any(name.startswith("blocks.") for name in plans)
    assert "blocks" in plans


# --- Import paths, as YAML gives them ---


@pytest.mark.parametrize("policy", ["torch.nn.Linear", ["torch.nn.Linear"], "Linear", {nn.Linear}])
def test_a_class_may_be_named_by_any_path_it_is_imported_from(policy: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    assert list(plans_of(module, policy)) == ["0", "2"]


def test_a_path_includes_subclasses_as_the_class_does() -> None:
    class Special(nn.Linear):
        pass

    module = nn.Sequential(Special(2, 2), nn.LayerNorm(2))
    assert list(plans_of(module, "torch.nn.Linear")) == ["root", "0"]
    assert plans_of(module, "torch.nn.Linear") == plans_of(module, {nn.Linear})


def test_a_function_may_be_named_by_its_path() -> None:
    path = "torch.distributed.fsdp.wrap.always_wrap_policy"
    assert plans_of(Language(), path) == plans_of(Language(), always_wrap_policy)


@pytest.mark.parametrize("path", ["absent.Linear", "torch.nn.Absent", ".Linear", "torch.nn.Conv2d"])
def test_a_path_of_nothing_in_the_module_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=f"names {re.escape(repr(path))}, but the module has no"):
        plan_units(Language(), path)


# --- What shares no flat buffer, and what is one entry ---


@pytest.mark.parametrize("policy", ["auto", "none", "layers", {nn.Linear}])
def test_a_tied_parameter_is_one_entry_under_its_first_name(policy: Any) -> None:
    plans = plans_of(Language(), policy)
    names = [name for names in plans.values() for name in names]
    assert names.count("embedding.weight") == 1
    assert "head.weight" not in names


@pytest.mark.parametrize(
    ("policy", "owner"),
    [("auto", "embedding"), ("layers", "embedding"), ({nn.Linear}, "root"), ("none", "root")],
)
def test_a_tied_parameter_belongs_to_the_unit_of_its_first_user(policy: Any, owner: str) -> None:
    assert "embedding.weight" in plans_of(Language(), policy)[owner]


@pytest.mark.parametrize("policy", ["auto", "layers", {nn.Linear}, always_wrap_policy])
def test_a_module_that_occurs_twice_is_one_unit(policy: Any) -> None:
    shared = nn.Linear(LARGE, LARGE)
    module = nn.ModuleDict({"first": shared, "again": nn.Sequential(shared), "last": shared})
    assert plans_of(module, policy) == {"first": ["first.weight", "first.bias"]}


def test_units_are_divided_by_dtype_and_trainability() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4))
    module[2].weight.requires_grad_(False)
    assert plans_of(module, "none") == {
        "root (float32)": ["0.weight", "0.bias", "2.bias"],
        "root (float64)": ["1.weight", "1.bias"],
        "root (float32, frozen)": ["2.weight"],
    }
    assert plans_of(module, "layers") == {
        "0": ["0.weight", "0.bias"],
        "1": ["1.weight", "1.bias"],
        "2 (float32, frozen)": ["2.weight"],
        "2 (float32)": ["2.bias"],
    }


# --- Mistakes ---


@pytest.mark.parametrize("policy", ["Transfomer", ["Transfomer"], ["LayerNorm", "Transfomer"]])
def test_an_unknown_class_name_is_refused_with_the_names_there_are(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"'Transfomer', but the module has no layer") as info:
        plan_units(Language(), policy)
    message = str(info.value)
    assert "Embedding, LayerNorm, Linear" in message
    assert "TransformerEncoderLayer" in message
    assert "give 'auto', 'none' or 'layers'" in message


def test_a_class_that_the_module_does_not_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'Conv2d', but the module has no layer of that class"):
        plan_units(Language(), {nn.Conv2d})


def test_the_class_of_the_root_is_not_a_class_of_a_layer() -> None:
    with pytest.raises(ValueError, match=r"'Language', but the module has no layer"):
        plan_units(Language(), "Language")


@pytest.mark.parametrize("policy", [5, 2.5, None, True])
def test_a_policy_of_another_type_is_refused(policy: Any) -> None:
    expected = f"auto_wrap_policy={policy!r} is a {type(policy).__name__}: give 'auto'"
    with pytest.raises(TypeError, match=re.escape(expected)):
        plan_units(Language(), policy)


@pytest.mark.parametrize("policy", [[5], {dict}, [nn.Linear(1, 1)]])
def test_a_list_of_something_else_is_refused(policy: Any) -> None:
    with pytest.raises(TypeError, match="neither a class name nor a class of modules"):
        plan_units(Language(), policy)


# --- Buckets ---


@pytest.mark.parametrize("bucket_mb", [0.001, 0.1, 25.0, 10000.0])
def test_buckets_hold_every_parameter_once_in_the_order_of_registration(bucket_mb: float) -> None:
    module = Language()
    plans = plan_buckets(module, bucket_mb)
    assert_every_parameter_is_in_one_unit(module, plans)
    names = [name for plan in plans for name, _ in plan.params]
    assert names == [name for name, _ in module.named_parameters()]
    assert len({plan.name for plan in plans}) == len(plans)


def test_buckets_are_filled_from_the_end_up_to_their_size() -> None:
    module = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(5)])  # 0.25 MB each
    sizes = [len(plan.params) for plan in plan_buckets(module, 0.5)]
    assert sizes == [1, 2, 2]
    assert [len(plan.params) for plan in plan_buckets(module, 0.001)] == [1] * 5
    assert [len(plan.params) for plan in plan_buckets(module, 25.0)] == [5]


def test_buckets_are_divided_by_dtype_and_trainability() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4))
    module[2].requires_grad_(False)
    plans = plan_buckets(module, 25.0)
    assert_every_parameter_is_in_one_unit(module, plans)
    assert len(plans) == 3


def test_a_module_without_parameters_has_no_units() -> None:
    assert plan_units(nn.Sequential(nn.Tanh()), "auto") == []
    assert plan_buckets(nn.Sequential(nn.Tanh()), 25.0) == []


def test_scripts_are_left_to_what_surrounds_them() -> None:
    script = torch.jit.script(nn.Sequential(nn.Linear(256, 256), nn.Tanh()))
    module = nn.Sequential(nn.Linear(256, 256), script, nn.Linear(256, 256))
    for policy in ("auto", "layers"):
        plans = plan_units(module, policy)
        owner = {name: plan.name for plan in plans for name, _ in plan.params}
        assert owner["1.0.weight"] == "root"
        assert owner["0.weight"] == "0"
