"""What an optimizer keeps of each parameter, found by letting it step."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves

from lightning_zero.engine.probe import copy_of, undisturbed

_SIZES = (11, 13, 5, 7, 3)
"""Of the dimensions of a tiny parameter: different, so that a size tells its dimension."""


class Piece(NamedTuple):
    """One tensor of an optimizer's state.

    Attributes:
        numel: Its elements for the whole parameter.
        dtype: Its dtype.
        shaped: Whether it has the parameter's shape, so that it is sharded like it.
    """

    numel: int
    dtype: torch.dtype
    shaped: bool

    @property
    def nbytes(self) -> int:
        """Bytes for the whole parameter."""
        return self.numel * self.dtype.itemsize


Pieces = Mapping[str, Piece]


def pieces_of(optimizer: optim.Optimizer) -> tuple[dict[int, Pieces], str | None]:
    """Find out what an optimizer keeps, by a step on parameters without values.

    Args:
        optimizer: The optimizer; its parameters are on the meta device. It is left without state.

    Returns:
        The pieces of each trainable parameter, by its identity; and a remark if they are not
        exact, because the step needs values and so was made on tiny parameters instead.
    """
    with undisturbed(), torch.no_grad(), _one_of_each(optimizer) as alike:
        name = type(optimizer).__name__
        note: str | None = None
        try:
            found = _on_meta(optimizer)
        except Exception:  # whatever code of others may raise
            try:
                found = _on_tiny(optimizer)
            except Exception as error:
                return {}, (
                    f"The state of {name} is left out: it could not be tried, neither without "
                    f"values nor on tiny parameters ({type(error).__name__}: {error})."
                )
            note = (
                f"The state of {name} was found by trying it on tiny parameters, since its step "
                "needs values."
            )
        return {id(p): found[first] for first, params in alike.items() for p in params}, note


@contextmanager
def _one_of_each(
    optimizer: optim.Optimizer,
) -> Generator[dict[int, list[nn.Parameter]], None, None]:
    """Leave one trainable parameter of each group, shape and dtype in the groups for a while.

    Yields:
        The parameters that each stands for, by its identity.
    """
    before = [(group, group["params"]) for group in optimizer.param_groups]
    alike: dict[int, list[nn.Parameter]] = {}
    for group, params in before:
        kinds: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for param in params:
            if param.requires_grad:
                kinds.setdefault((tuple(param.shape), param.dtype), []).append(param)
        group["params"] = [same[0] for same in kinds.values()]
        alike.update({id(same[0]): same for same in kinds.values()})
    try:
        yield alike
    finally:
        for group, params in before:
            group["params"] = params


def _on_meta(optimizer: optim.Optimizer) -> dict[int, Pieces]:
    before = [dict(group) for group in optimizer.param_groups]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    try:
        for group in optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = False  # it keeps the same, and does not run without values
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
        return {id(p): _pieces(optimizer.state.get(p, {}), p.shape, p.shape) for p in params}
    finally:
        optimizer.state.clear()
        for group, settings in zip(optimizer.param_groups, before, strict=True):
            group.update(settings)
        for param in params:
            param.grad = None


def _on_tiny(optimizer: optim.Optimizer) -> dict[int, Pieces]:
    tiny: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    groups = []
    for group in optimizer.param_groups:
        copies = []
        for param in group["params"]:
            copy = nn.Parameter(torch.ones(_tiny(param.shape), dtype=param.dtype))
            copy.grad = torch.ones_like(copy)
            tiny[id(param)] = copy, param
            copies.append(copy)
        groups.append({**group, "params": copies})
    copied, step = copy_of(optimizer, groups)
    step()
    return {
        key: _pieces(copied.state.get(copy, {}), copy.shape, param.shape)
        for key, (copy, param) in tiny.items()
    }


def _tiny(shape: torch.Size) -> tuple[int, ...]:
    limits = [*_SIZES, *[2] * len(shape)]
    return tuple(min(size, limit) for size, limit in zip(shape, limits, strict=False))


def _pieces(state: Mapping[str, Any], tried: torch.Size, real: torch.Size) -> Pieces:
    """Describe the state of a parameter of shape ``real`` that was tried at another shape."""
    found = {}
    for key, value in state.items():
        for number, leaf in enumerate(tree_leaves(value)):
            if isinstance(leaf, Tensor):
                shaped = leaf.shape == tried and bool(tried)
                name = f"{key}/{number}" if number else str(key)
                found[name] = Piece(_scaled(leaf.shape, tried, real), leaf.dtype, shaped)
    return found


def _scaled(shape: torch.Size, tried: torch.Size, real: torch.Size) -> int:
    if shape.numel() == tried.numel():
        return real.numel()
    sizes = dict(zip(reversed(tried), reversed(real), strict=True))
    return math.prod(sizes.get(size, size) for size in shape)
