"""Tensors that are still in a file behave as those that were loaded."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torchmetrics import MeanMetric

from lightning_zero.checkpoint import read_sharded
from lightning_zero.checkpoint.lazy import LazyTensor, read_left
from lightning_zero.checkpoint.load import load_lazily
from lightning_zero.checkpoint.places import place_of


@pytest.fixture
def lazy(tmp_path: Path) -> LazyTensor:
    """Open a file with one weight, the numbers from 0 to 11."""
    path = tmp_path / "weights.ckpt"
    torch.save({"state_dict": {"w": torch.arange(12.0).view(3, 4)}, "epoch": 0}, path)
    checkpoint, _ = load_lazily(place_of(path), trust=False)
    tensor = checkpoint["state_dict"]["w"]
    assert isinstance(tensor, LazyTensor)
    return tensor


def loaded(lazy: Tensor) -> Tensor:
    return torch.zeros(3, 4).copy_(lazy)


def test_what_is_written_to_it_stays(lazy: LazyTensor) -> None:
    expected = torch.arange(12.0).view(3, 4)
    for tensor in (lazy, expected):
        tensor.mul_(2)
        tensor[0] = 7
        tensor[1:][0].add_(1)
        tensor.view(-1)[-1] = -1
        tensor += 1
    assert torch.equal(loaded(lazy), expected)
    assert torch.equal(lazy.as_strided((12,), (1,))[3:7], expected.view(-1)[3:7])


def test_a_flat_slice_is_read_without_the_rest(lazy: LazyTensor) -> None:
    part = lazy.as_strided((12,), (1,))[3:7]
    assert isinstance(part, LazyTensor)
    assert torch.equal(part.clone(), torch.arange(3.0, 7.0))
    assert lazy._kept is None


def test_a_slice_opens_only_the_parts_that_hold_some_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.arange(24.0).view(6, 4)
    folder = checkpoints.write_alone(tmp_path / "folder", {"w": checkpoints.Boxes.cut(full, 6)})
    lazy = load_lazily(place_of(folder), trust=False).checkpoint["state_dict"]["w"]
    opened: list[str] = []
    place = read_sharded.place_slice

    def noted(*args: Any) -> Any:
        opened.append("")
        return place(*args)

    monkeypatch.setattr(read_sharded, "place_slice", noted)
    for start, stop, parts in ((0, 3, 1), (4, 8, 1), (11, 13, 2), (3, 9, 3), (5, 5, 0)):
        opened.clear()
        read = torch.zeros(stop - start).copy_(lazy.as_strided((24,), (1,))[start:stop])
        assert torch.equal(read, full.view(-1)[start:stop]) and len(opened) == parts
    assert torch.equal(torch.zeros(6, 4).copy_(lazy), full)


def test_copies_are_ordinary(lazy: LazyTensor) -> None:
    for made in (copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy)), lazy.clone()):
        assert type(made) is Tensor
        assert torch.equal(made, torch.arange(12.0).view(3, 4))
    assert lazy.tolist()[0] == [0, 1, 2, 3]
    assert lazy.numpy().shape == (3, 4)


def test_a_tensor_of_another_class_is_refused_by_name(tmp_path: Path) -> None:
    saved = {"state_dict": {"w": TwoTensor(torch.ones(3), torch.ones(3))}}
    torch.save(saved, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"state_dict\.w: a TwoTensor has no place"):
        load_lazily(place_of(tmp_path / "a.ckpt"), True)


def test_a_module_that_takes_it_as_it_is_gets_an_ordinary_one(tmp_path: Path) -> None:
    metric = MeanMetric()
    metric.persistent(True)
    metric.update(3.0)
    module = nn.ModuleList([metric])
    path = tmp_path / "metric.ckpt"
    torch.save({"state_dict": module.state_dict(), "epoch": 0}, path)
    again = MeanMetric()
    again.persistent(True)
    target = nn.ModuleList([again])
    target.load_state_dict(load_lazily(place_of(path), trust=False)[0]["state_dict"])
    read_left(target)
    again.update(9.0)
    assert again.compute() == 6
