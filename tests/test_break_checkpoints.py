"""Modules, callbacks and optimizers that do odd things to checkpoints: kept whole or refused."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from modules import Perceptron, batches, quiet_trainer
from torch import Tensor, nn

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import folder
from lightning_zero.checkpoint.convert import convert
from lightning_zero.checkpoint.load import load_lazily
from lightning_zero.checkpoint.places import place_of
from lightning_zero.checkpoint.writers import write_file
from ranks import expect_failures, run_ranks

KINDS = ("full", "sharded")


def trainer_of(kind: str, world_size: int, **settings: Any) -> L.Trainer:
    """Make a Trainer of stage 3 that takes three steps."""
    engine = {key: settings.pop(key) for key in ("fp32_master",) if key in settings}
    strategy = ZeroStrategy(stage=3, state_dict_type=kind, stall_timeout=20.0, **engine)
    return quiet_trainer(strategy, world_size, **{"max_steps": 3, **settings})


class Saving(L.Callback):
    """Saves at the end of training, while the module is sharded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def save(rank: int, world_size: int, make: Callable[[], Any], kind: str, path: Path) -> Any:
    """Train, save; return the state and what the module tells."""
    return fit(rank, world_size, make, kind, path, None)


def fit(
    rank: int,
    world_size: int,
    make: Callable[[], Any],
    kind: str,
    path: Path,
    resumes_from: Path | None,
    **settings: Any,
) -> Any:
    model = make()
    trainer = trainer_of(kind, world_size, callbacks=[Saving(path)], **settings)
    trainer.fit(model, batches(model, 24), ckpt_path=resumes_from)
    state = {name: v.clone() for name, v in model.state_dict().items() if isinstance(v, Tensor)}
    return state, getattr(model, "told", None)


def opened(path: Path, trust: bool = False) -> dict[str, Any]:
    return load_lazily(place_of(path), trust).checkpoint


# What modules put into their state dicts


class Describing(Perceptron):
    """Has more than tensors in its state dict."""

    told: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.describe)
        self.register_load_state_dict_pre_hook(self.understand)

    @staticmethod
    def describe(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["config"] = {"width": 3, "inner": {"scale": torch.ones(2)}, "none": {}}

    @staticmethod
    def understand(module: Any, state: dict[str, Any], *_: Any) -> None:
        config = state.pop("config")
        module.told = (config["width"], config["inner"]["scale"].tolist(), config["none"])


@pytest.mark.parametrize("kind", KINDS)
def test_dicts_in_a_state_dict_stay_dicts(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run_ranks(save, 2, Describing, kind, path, init=False)
    for _, told in run_ranks(fit, 2, Describing, kind, tmp_path / "again.ckpt", path, init=False):
        assert told == (3, [1.0, 1.0], {})


class Conjugate(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        numbers = torch.arange(6, dtype=torch.float32).view(3, 2)
        self.register_buffer("phases", torch.view_as_complex(numbers).conj())
        self.register_buffer("minus", torch.view_as_complex(numbers.clone()).conj().imag)


@pytest.mark.parametrize("kind", KINDS)
def test_conjugated_and_negated_buffers_keep_their_values(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    expected = Conjugate()
    run_ranks(save, 2, Conjugate, kind, path, init=False)
    convert(path, tmp_path / "b.pt", progress=False)
    for state in (opened(path)["state_dict"], torch.load(tmp_path / "b.pt")):
        assert state["phases"].tolist() == expected.phases.tolist()
        assert state["minus"].tolist() == expected.minus.tolist()


class TwoParts(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Extra(number) for number in range(3))


class Extra(nn.Linear):
    def __init__(self, number: int) -> None:
        super().__init__(3, 3)
        self.number = number

    def get_extra_state(self) -> dict[str, int]:
        return {"number": self.number}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"number": self.number}


def test_names_come_out_of_a_folder_in_the_order_of_the_module(tmp_path: Path) -> None:
    run_ranks(save, 2, TwoParts, "sharded", tmp_path / "a.ckpt", init=False)
    assert list(opened(tmp_path / "a.ckpt")["state_dict"]) == list(TwoParts().state_dict())


# What happens when weights are loaded


class Deriving(Perceptron):
    """Computes a number from its weights once they are loaded."""

    told: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(self.derive)

    @staticmethod
    def derive(module: Any, keys: Any) -> None:
        module.told = sum(p.detach().abs().sum().item() for p in module.state_dict().values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_after_loading_sees_the_weights_on_every_rank(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    state, _ = run_ranks(save, 2, Deriving, kind, path, init=False)[0]
    expected = sum(value.abs().sum().item() for value in state.values())
    for _, told in run_ranks(fit, 2, Deriving, kind, tmp_path / "again.ckpt", path, init=False):
        assert told == pytest.approx(expected)


class Doubling(Perceptron):
    """Saves its weights doubled and halves what it loads; its steps change nothing."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.register_state_dict_post_hook(self.doubled)
        self.register_load_state_dict_pre_hook(self.halved)

    @staticmethod
    def doubled(module: Any, state: dict[str, Any], *_: Any) -> None:
        for name in state:
            state[name] = state[name].detach() * 2

    @staticmethod
    def halved(module: Any, state: dict[str, Any], *_: Any) -> None:
        for name in state:
            state[name] = state[name] / 2


@pytest.mark.parametrize("kind", KINDS)
def test_masters_get_what_hooks_make_of_a_checkpoint(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    half = {"precision": "bf16-true", "fp32_master": True}
    run_ranks(fit, 2, Doubling, kind, path, None, init=False, **half)
    again = tmp_path / "again.ckpt"
    more = {"max_epochs": 3, "max_steps": 5, **half}
    run_ranks(fit, 2, Doubling, kind, again, path, init=False, **more)
    before, after = (opened(path)["state_dict"], opened(again)["state_dict"])
    for name, _ in Doubling().named_parameters():
        assert torch.equal(after[name], before[name]), name


class Taking(Perceptron):
    """Makes parameters out of a checkpoint's tensors before it is loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name, child in self.named_modules():
            if isinstance(child, nn.Linear):
                child.weight = nn.Parameter(checkpoint["state_dict"][f"{name}.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_may_be_made_of_a_checkpoints_tensors(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    saved = run_ranks(save, 2, Taking, kind, path, init=False)[0][0]
    resumed = run_ranks(fit, 2, Taking, kind, tmp_path / "again.ckpt", path, init=False)[0][0]
    for name, value in saved.items():
        assert torch.equal(resumed[name], value), name


class Hollow(Perceptron):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        name, param = next(iter(self.named_parameters()))
        param.data = checkpoint["state_dict"][name]


def test_data_taken_from_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run_ranks(save, 2, Hollow, "full", path, init=False)
    errors = expect_failures(fit, 2, Hollow, "full", tmp_path / "again.ckpt", path, init=False)
    first = next(iter(dict(Hollow().named_parameters())))
    assert set(errors) == {0, 1}
    assert all(f"'{first}' was given values" in text for _, text in errors.values())


@pytest.mark.parametrize(
    "values",
    [
        lambda lazy: np.from_dlpack(lazy).tolist(),
        lambda lazy: torch.empty(0).set_(lazy.untyped_storage()),
        lambda lazy: lazy.share_memory_().tolist(),
    ],
    ids=["dlpack", "storage", "share_memory_"],
)
def test_code_that_asks_a_tensor_of_a_checkpoint_for_its_memory_gets_values(
    values: Callable[[Tensor], Any], tmp_path: Path
) -> None:
    torch.save({"state_dict": {"w": torch.arange(4.0)}}, tmp_path / "a.ckpt")
    lazy = opened(tmp_path / "a.ckpt")["state_dict"]["w"]
    assert lazy.data_ptr() != 0
    assert torch.as_tensor(values(lazy)).tolist() == [0.0, 1.0, 2.0, 3.0]


# What on_save_checkpoint and callbacks add


@dataclasses.dataclass
class Statistics:
    mean: Tensor
    again: Any


def test_tensors_inside_objects_of_a_trusted_file_have_values(tmp_path: Path) -> None:
    mean = nn.Parameter(torch.arange(3.0))
    layer = nn.Linear(2, 2)
    kept = {"statistics": Statistics(mean, [mean]), "layer": layer}
    torch.save({"state_dict": {"w": torch.ones(1)}, **kept}, tmp_path / "a.ckpt")
    found = opened(tmp_path / "a.ckpt", trust=True)
    assert found["statistics"].mean.tolist() == [0.0, 1.0, 2.0]
    assert found["statistics"].again[0] is found["statistics"].mean
    assert isinstance(found["statistics"].mean, nn.Parameter)
    assert torch.equal(found["layer"].weight, layer.weight)


class Adding(Perceptron):
    """Adds weights under a key in some container."""

    key = "mine"
    wrap: Any = staticmethod(lambda value: value)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        value = checkpoint["state_dict"][next(name for name, _ in self.named_parameters())]
        checkpoint[self.key] = self.wrap(value)


def dict_of(value: Any) -> Any:
    return {"w": value}


def tuple_of(value: Any) -> Any:
    return (value, 1)


def object_of(value: Any) -> Any:
    return Statistics(value, None)


@pytest.mark.parametrize(
    ("key", "wrap", "words"),
    [
        ("model", dict_of, "has put weights under 'model'"),
        ("optimizer_0", dict_of, "has put weights under 'optimizer_0'"),
        ("mine", tuple_of, "is inside a tuple or an object"),
        ("mine", object_of, "is inside a tuple or an object"),
    ],
)
def test_weights_where_a_folder_cannot_hold_them_are_refused(
    key: str, wrap: Any, words: str, tmp_path: Path
) -> None:
    made = type("Made", (Adding,), {"key": key, "wrap": staticmethod(wrap)})
    errors = expect_failures(save, 2, made, "sharded", tmp_path / "a.ckpt", init=False)
    assert set(errors) == {0, 1}
    assert all(words in text for _, text in errors.values())
    assert not (tmp_path / "a.ckpt").exists()


def test_a_key_of_the_users_that_looks_like_an_optimizers_stays(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(1)}, "optimizer_0": {"x": 1}}, tmp_path / "a.ckpt")
    found = opened(tmp_path / "a.ckpt")
    assert found["optimizer_0"] == {"x": 1}
    assert "optimizer_states" not in found


# Optimizers


class Renaming(Perceptron):
    """Has an optimizer whose state dict is keyed by other names than torch's."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        optimizer.register_state_dict_post_hook(
            lambda _, saved: {**saved, "state": {f"p{k}": v for k, v in saved["state"].items()}}
        )
        return optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_state_that_a_hook_renames_is_refused(kind: str, tmp_path: Path) -> None:
    errors = expect_failures(save, 2, Renaming, kind, tmp_path / "a.ckpt", init=False)
    assert set(errors) == {0, 1}
    assert all("hook of Adam renames the state of" in text for _, text in errors.values())


@pytest.mark.parametrize("named", [True, False])
def test_that_the_order_of_an_optimizers_parameters_is_assumed_is_told(
    named: bool, tmp_path: Path
) -> None:
    model = Perceptron()
    given = list(model.named_parameters()) if named else list(model.parameters())
    optimizer = torch.optim.Adam(given)
    content = {"state_dict": dict(model.named_parameters())}
    torch.save({**content, "optimizer_states": [optimizer.state_dict()]}, tmp_path / "a.ckpt")
    notes = convert(tmp_path / "a.ckpt", tmp_path / "a", progress=False).notes
    assert [("order of model.parameters()" in note) for note in notes] == ([] if named else [True])


# Names


def test_a_folder_whose_name_begins_with_http_is_no_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("http_runs/a.ckpt")
    saved = run_ranks(save, 2, Perceptron, "full", path, init=False)[0][0]
    resumed = run_ranks(fit, 2, Perceptron, "full", Path("b.ckpt"), path, init=False)[0][0]
    assert all(torch.equal(resumed[name], value) for name, value in saved.items())


@pytest.mark.parametrize("swaps", [True, False])
def test_names_may_be_as_long_as_the_file_system_allows(
    swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr("lightning_zero.checkpoint.folder._exchange", lambda *_: False)
    path = tmp_path / ("é" * 125 + ".ckpt")
    for number in (1, 2):
        made = folder.begin(path)
        made.mkdir()
        (made / ".metadata").write_text(str(number))
        folder.put(made, path)
        assert (path / ".metadata").read_text() == str(number)
    assert os.listdir(tmp_path) == [path.name]


def test_a_checkpoint_with_a_long_name_that_was_put_aside_comes_back(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 250)
    aside = folder._PREFIX + f"another-7-77-0123abcd{folder._OLD}{folder._digest(path.name)}"
    (tmp_path / aside).mkdir()
    os.utime(tmp_path / aside, (1, 1))
    folder.clean(tmp_path)
    folder.recover(path)
    assert os.listdir(tmp_path) == [path.name]


def test_a_checkpoint_that_is_called_like_an_unfinished_one_stays(tmp_path: Path) -> None:
    path = tmp_path / ".unfinished-symphony.ckpt"
    write_file(path, {"a": 1})
    os.utime(path, (1, 1))
    folder.clean(tmp_path)
    assert path.exists()


def test_two_saves_of_one_process_to_one_place_do_not_meet(tmp_path: Path) -> None:
    assert folder.begin(tmp_path / "a") != folder.begin(tmp_path / "a")


# Damage


@pytest.mark.parametrize("word", ["offsets", "chunks", "relative_path", "state_dict_metadata"])
def test_a_metadata_file_whose_names_are_damaged_is_said_to_be(word: str, tmp_path: Path) -> None:
    run_ranks(save, 2, Perceptron, "sharded", tmp_path / "a.ckpt", init=False)
    file = tmp_path / "a.ckpt" / ".metadata"
    content = file.read_bytes()
    assert word.encode() in content
    file.write_bytes(content.replace(word.encode(), word[:-1].encode() + b"_"))
    with pytest.raises(ValueError, match=r"\.metadata: refused, truncated or damaged.* has no"):
        opened(tmp_path / "a.ckpt")
