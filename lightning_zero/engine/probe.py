"""Finds out how an optimizer treats parameters, by letting a copy of it step on tiny ones.

A rank sees only the gradients of parameters that it owns. So an optimizer whose update of one
parameter depends on another, as by a norm over all gradients, would compute something else. And
one that takes gradients for granted must not be shown parameters without.
"""

from __future__ import annotations

import collections
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

_KINDS = 4  # of param groups and numbers of dimensions that are tried
_SIZES = (4, 6, 3, 2)  # of the dimensions, in order; 2 beyond
_STEPS = 20  # some combine parameters only once their norms have grown
_SCALES = (0.1, 100.0)  # of the gradients, below and above what anyone clips to
_LOUDER = 7.0  # times that, for the gradients of other parameters
_LARGE = 4096  # elements; a tensor of more is not copied for a trial
_PLAIN = (bool, int, float, complex, str, bytes, type, type(None), torch.dtype, torch.device)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CODE = (*_LOCKS, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)

Groups = list[dict[str, Any]]


class _Bare(optim.Optimizer):
    """What every optimizer has, and what a copy gets anew."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(0)], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class _Unsure(Exception):
    """Something stands in the way of a trial."""


class Findings(NamedTuple):
    """What a trial has shown.

    Attributes:
        combines: The update of one parameter depends on another one.
        needs_grads: It fails where a parameter has no gradient.
        tried: The optimizer is not random and could be tried, so that the others mean something.
    """

    combines: bool = False
    needs_grads: bool = False
    tried: bool = True


def examine(optimizer: optim.Optimizer) -> Findings:
    """Let a copy of an optimizer step on a few tiny parameters."""
    with undisturbed():
        try:
            found = [_try(optimizer, scale) for scale in _SCALES]
        except Exception:  # whatever code of others may raise
            return Findings(tried=False)
        return Findings(*map(any, zip(*found, strict=True)))


def _try(optimizer: optim.Optimizer, scale: float) -> Findings:
    groups = _tiny_groups(optimizer)
    count = sum(len(group["params"]) for group in groups)
    together = _run(optimizer, groups, [scale] * count)
    again = _run(optimizer, groups, [scale] * count)
    if not all(map(torch.equal, together, again)):
        raise _Unsure
    combines = needs_grads = False
    for index in range(0, count, 2):  # of each kind there are two
        scales: list[float | None] = [_LOUDER * scale] * count
        scales[index] = scale
        combines |= _differ(_run(optimizer, groups, scales)[index], together[index])
        scales = [None] * count
        scales[index] = scale
        try:
            combines |= _differ(_run(optimizer, groups, scales)[index], together[index])
        except Exception:  # whatever it raises without gradients, with them it has run
            needs_grads = True
    try:
        _run(optimizer, groups, [None] * count)
    except Exception:
        needs_grads = True
    return Findings(combines, needs_grads)


def _differ(first: Tensor, second: Tensor) -> bool:
    tolerance = 1e-2 * torch.maximum(first.abs().max(), second.abs().max()) + 1e-5
    return bool((first - second).abs().max() > tolerance)


def _tiny_groups(optimizer: optim.Optimizer) -> Groups:
    """Take some of the param groups, with two tiny parameters per number of dimensions."""
    groups: Groups = []
    kinds: set[tuple[int, str]] = set()
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "lr")}
        shapes = []
        for dims in dict.fromkeys(param.dim() for param in group["params"]):
            kind = (dims, repr(settings))
            if kind not in kinds and len(kinds) < _KINDS:
                kinds.add(kind)
                shapes += [tuple([*_SIZES, *[2] * dims][:dims])] * 2
        if shapes:
            groups.append({**group, "params": shapes})
    return groups


def _run(
    optimizer: optim.Optimizer, groups: Groups, scales: Sequence[float | None]
) -> list[Tensor]:
    """Step a copy over fresh parameters with gradients of these sizes, or without.

    Returns:
        By how much each parameter has moved.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    copies, params = [], []
    for group in groups:
        tiny = [nn.Parameter(draw(shape)) for shape in group["params"]]
        copies.append({**group, "params": tiny})
        params += tiny
    before = [param.detach().clone() for param in params]
    _, step = copy_of(optimizer, copies)
    for _ in range(_STEPS):
        for param, scale in zip(params, scales, strict=True):
            grad = draw(tuple(param.shape))
            param.grad = None if scale is None else grad * scale
        step()
    moved = [param.detach() - old for param, old in zip(params, before, strict=True)]
    if not all(bool(move.isfinite().all()) for move in moved):
        raise _Unsure
    return moved


def copy_of(
    optimizer: optim.Optimizer, groups: Groups
) -> tuple[optim.Optimizer, Callable[[], Any]]:
    """Copy an optimizer without its state and hooks, over other groups.

    Args:
        optimizer: The optimizer, which stays as it is.
        groups: Param groups with other parameters, as many as there are or fewer.

    Returns:
        The copy, and its ``step``.
    """
    cls = type(optimizer)
    copy = object.__new__(cls)
    bare = _Bare().__dict__
    copy.__dict__.update(bare)
    plain = _Copier(optimizer, copy, groups)
    copy.defaults = plain(optimizer.defaults)
    for group in groups:
        settings = {key: plain(value) for key, value in group.items() if key != "params"}
        group.update(settings)
        if isinstance(group.get("lr"), (float, int)):
            group["lr"] = 1e-2  # a warm-up may begin with 0
        elif isinstance(group.get("lr"), Tensor):
            group["lr"].fill_(1e-2)
    copy.param_groups = groups
    copy.state = collections.defaultdict(dict)
    for key, value in optimizer.__dict__.items():
        if key not in bare and key != "step":  # which schedulers replace on the object
            copy.__dict__[key] = plain(value)
    step: Any = cls.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return copy, lambda: step(copy)


class _Copier:
    """Copies plain values and containers of them.

    Args:
        original: The optimizer that is copied.
        copy: What stands for it in the copy.
        groups: The copy's, whose parameters stand for the original's of as many dimensions.
    """

    def __init__(self, original: optim.Optimizer, copy: optim.Optimizer, groups: Groups) -> None:
        self._original = original
        self._copy = copy
        self._params = {
            id(param): number
            for number, param in enumerate(p for g in original.param_groups for p in g["params"])
        }
        self._tiny: dict[int, list[nn.Parameter]] = {}
        for group in groups:
            for param in group["params"]:
                self._tiny.setdefault(param.dim(), []).append(param)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, (*_PLAIN, *_CODE)):
            return value
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self(item) for item in value)
        if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
            copied = {self(key): self(item) for key, item in value.items()}
            if isinstance(value, collections.defaultdict):
                return collections.defaultdict(value.default_factory, copied)
            return copied
        if id(value) in self._params and value.dim() in self._tiny:
            tiny = self._tiny[value.dim()]
            return tiny[self._params[id(value)] % len(tiny)]
        if type(value) is Tensor and value.numel() <= _LARGE:
            return value.detach().clone().cpu()
        if isinstance(value, types.MethodType) and value.__self__ is self._original:
            return types.MethodType(value.__func__, self._copy)
        raise _Unsure


@contextmanager
def undisturbed() -> Generator[None, None, None]:
    """Leave random numbers and warnings as they were, and compile nothing."""
    numpy = sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    numbers = random.getstate()
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        warnings.catch_warnings(),
        torch.compiler.set_stance("force_eager"),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(numbers)
            if numpy is not None:
                numpy.random.set_state(arrays)
