"""Which optimizers step on shards, which on whole parameters, and which cannot be sharded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import optim

OptimizerSharding = Literal["auto", "elementwise", "whole"]

_ELEMENTWISE = tuple(
    getattr(optim, name)
    for name in "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)
_ELSEWHERE: dict[tuple[str, str], tuple[str, ...]] = {
    ("apex", "FusedAdam"): ("master_weights",),
    ("apex", "FusedSGD"): ("materialize_master_grads",),
    ("deepspeed", "DeepSpeedCPUAdam"): (),
    ("deepspeed", "FusedAdam"): (),
    ("lion_pytorch", "Lion"): ("use_triton",),
    ("pytorch_optimizer", "Lion"): ("use_gc", "adanorm", "cautious"),
    ("timm", "AdaBelief"): (),
    ("timm", "AdamWLegacy"): ("caution",),
    ("timm", "Adopt"): ("caution",),
    ("timm", "LaProp"): ("caution",),
    ("timm", "Lion"): ("caution",),
    ("timm", "NAdamW"): ("caution",),
    ("timm", "RMSpropTF"): ("caution",),
    ("timm", "SGDW"): ("caution",),
}
"""Elementwise optimizers of other libraries, by top-level module and name of the class that defines
``step``, as long as these options are off: what the option does takes a mean or a norm."""

_COMBINES = "combines all parameters in each step, but a rank has only some of them at a time"
_TWICE = "needs the loss or its gradients more than once per step"
_OUTSIDE = "rewrites the parameters outside of its step, with state that only one rank has"
_REFUSED = {
    **dict.fromkeys("AvaGrad DoG LDoG Prodigy ProdigyPlusScheduleFree".split(), _COMBINES),
    **dict.fromkeys("DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD".split(), _COMBINES),
    **dict.fromkeys("BSAM FriendlySAM GCSAM GSAM LBFGS LookSAM SAM WSAM".split(), _TWICE),
    **dict.fromkeys("AdaHessian Adahessian AdaLOMO AliG LOMO SophiaH".split(), _TWICE),
}


def needs_whole(optimizer: optim.Optimizer, sharding: OptimizerSharding) -> bool:
    """Say whether an optimizer has to see whole parameters, and refuse one that cannot be sharded.

    Args:
        optimizer: The optimizer.
        sharding: ``"auto"`` looks at its class; the other two say what it is to be.

    Raises:
        NotImplementedError: If it is known to need all parameters at a time, or its closure again.
    """
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _REFUSED:
            raise refusal(optimizer, _REFUSED[cls.__name__])
    if _has_modes(optimizer):
        raise refusal(optimizer, _OUTSIDE)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise refusal(optimizer, _TWICE)
    if sharding == "auto":
        return not (_steps_as_torchs(optimizer) or _is_known_elsewhere(optimizer))
    return sharding == "whole"


def combining(optimizer: optim.Optimizer) -> NotImplementedError:
    """Make the error for an optimizer that was found to combine parameters."""
    return refusal(optimizer, f"{_COMBINES} (found by trying it on a few small tensors)")


def refusal(optimizer: optim.Optimizer, reason: str) -> NotImplementedError:
    """Make the error for an optimizer that cannot be sharded."""
    return NotImplementedError(
        f"{type(optimizer).__name__} {reason}, so it cannot be sharded: use an optimizer that "
        "updates each parameter by itself, or strategy='ddp'."
    )


def _has_modes(optimizer: optim.Optimizer) -> bool:
    """Say whether it is switched between training and evaluation, as schedule-free ones are."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


def _steps_as_torchs(optimizer: optim.Optimizer) -> bool:
    # A subclass counts as long as it steps as its parent does.
    known = {inspect.unwrap(cls.step) for cls in _ELEMENTWISE}
    return inspect.unwrap(type(optimizer).step) in known


def _is_known_elsewhere(optimizer: optim.Optimizer) -> bool:
    steps: Callable[..., Any] = inspect.unwrap(type(optimizer).step)
    owner = steps.__qualname__.split(".")[0]
    options = _ELSEWHERE.get((steps.__module__.split(".")[0], owner))
    return options is not None and not any(_is_on(optimizer, options))


def _is_on(optimizer: optim.Optimizer, options: Iterable[str]) -> Iterable[bool]:
    for option in options:
        yield bool(getattr(optimizer, option, False))
        yield from (bool(group.get(option)) for group in optimizer.param_groups)
