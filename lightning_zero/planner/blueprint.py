"""The module that is planned: built on the meta device, with its optimizers."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer
from torch import nn, optim
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parameter import is_lazy

from lightning_zero.planner.states import Pieces, pieces_of
from lightning_zero.precision import ZeroPrecision

MakeOptimizer = Callable[[nn.Module], optim.Optimizer | Sequence[optim.Optimizer]]

_STEPS = 10_000  # of the Trainer that configure_optimizers sees: schedules ask for their number


@dataclass
class Blueprint:
    """A module on the meta device, and what its optimizers keep.

    Attributes:
        module: The module; it holds no values.
        optimizers: Its optimizers, without state.
        states: What they keep of each trainable parameter, by the parameter's identity.
        notes: What a reader of the plan should know.
        compiled: Whether the whole module is compiled.
    """

    module: nn.Module
    optimizers: list[optim.Optimizer]
    states: dict[int, Pieces] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    compiled: bool = False


def draw(
    source: nn.Module | Callable[[], nn.Module],
    precision: ZeroPrecision,
    optimizer: MakeOptimizer | None = None,
) -> Blueprint:
    """Bring a module into the shape that it has when training starts, without values.

    Like a Trainer, it calls ``setup("fit")`` and ``configure_model`` of a LightningModule, converts
    the module to the precision, and calls ``configure_optimizers``.

    Args:
        source: The module, which stays as it is, or a function that builds it.
        precision: What converts the module.
        optimizer: Makes the optimizers instead of the module's own ``configure_optimizers``.

    Raises:
        TypeError: If ``source`` is neither, or cannot be copied.
        RuntimeError: If the user's code needs values or a running Trainer; the message says what
            to do instead.
    """
    with _quiet():
        module = _copied(source) if isinstance(source, nn.Module) else _built(source)
        compiled = getattr(module, "_compiler_ctx", None) is not None
        if isinstance(module, OptimizedModule):
            compiled, module = True, module._orig_mod
        _prepare(module, precision)
        module = precision.convert_module(module)
        _check(module)
        blueprint = Blueprint(module, [], compiled=compiled)
        with torch.device("meta"):
            blueprint.optimizers = _optimizers(module, optimizer, blueprint.notes)
    for made in blueprint.optimizers:
        states, note = pieces_of(made)
        blueprint.states.update(states)
        if note is not None:
            blueprint.notes.append(note)
    return blueprint


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    if not callable(build):
        raise TypeError(
            f"plan() takes a module or a function that builds one, not {type(build).__name__}."
        )
    name = getattr(build, "__qualname__", repr(build))
    try:
        with torch.device("meta"):
            module = build()
    except Exception as error:
        if not _needs_values(error):
            raise
        raise RuntimeError(
            f"{name} cannot be built on the meta device, since it computes with values: {error}\n"
            "Build it on the CPU and give the object, as in plan(MyModule(...)); on the command "
            "line: --on-cpu."
        ) from error
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} returned a {type(module).__name__}, not a module.")
    # What loads or makes values regardless of the device context, as a pretrained part does.
    return module if _is_meta(module) else _copied(module)


def _needs_values(error: Exception) -> bool:
    return re.search(r"\bmeta\b", str(error)) is not None


def _is_meta(module: nn.Module) -> bool:
    return all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def _copied(module: nn.Module) -> nn.Module:
    """Copy a module without its values."""
    memo: dict[int, Any] = {}
    for name, param in module.named_parameters():
        _refuse_lazy(name, param)
        memo[id(param)] = nn.Parameter(_empty(param), requires_grad=param.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = _empty(buffer) if buffer.layout is torch.strided else buffer
    for child in module.modules():  # a finished run is nothing to copy
        for name in ("_trainer", "_fabric"):
            run = child.__dict__.get(name)
            if run is not None:
                memo[id(run)] = None
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise TypeError(
            f"{type(module).__name__} cannot be copied ({error}): give a function that builds it, "
            "as in plan(lambda: MyModule(...))."
        ) from error


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta"
    )


def _refuse_lazy(name: str, param: nn.Parameter) -> None:
    if is_lazy(param):
        raise ValueError(
            f"{name} is not initialised yet (a lazy layer), so its size is not known: run a batch "
            "through the module first."
        )


def _check(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        _refuse_lazy(name, param)
        if param.layout is not torch.strided:
            raise ValueError(f"{name} has the layout {param.layout}: only dense ones are sharded.")
    if next(module.parameters(), None) is None:
        raise ValueError(f"{type(module).__name__} has no parameters, so there is nothing to plan.")


def _prepare(module: nn.Module, precision: ZeroPrecision) -> None:
    """Call what a Trainer calls before it looks at parameters."""
    if not isinstance(module, L.LightningModule):
        return
    module.trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        max_steps=_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    name = type(module).__name__
    with torch.device("meta"):
        _call(f"{name}.setup('fit')", lambda: module.setup("fit"))
        with precision.module_init_context():
            _call(f"{name}.configure_model()", module.configure_model)
    _to_meta(module)


def _to_meta(module: nn.Module) -> None:
    """Drop values that a hook has made in spite of the device context."""
    if not _is_meta(module):
        module.to("meta")


def _call(what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise RuntimeError(
            f"{what} does not work while planning, on the meta device and without data: "
            f"{type(error).__name__}: {error}\n"
            "Give plan() a module that does not need it, for example a function that builds only "
            "the layers, with optimizer=... for its optimizer."
        ) from error


def _optimizers(
    module: nn.Module, make: MakeOptimizer | None, notes: list[str]
) -> list[optim.Optimizer]:
    if make is not None:
        made = make(module)
        return [made] if isinstance(made, optim.Optimizer) else list(made)
    if not isinstance(module, L.LightningModule):
        trained = [param for param in module.parameters() if param.requires_grad]
        if not trained:
            notes.append("No parameter is trained, so there is no optimizer.")
            return []
        notes.append("The optimizer is AdamW, since the module does not say which.")
        return [optim.AdamW(trained)]
    name = f"{type(module).__name__}.configure_optimizers()"
    try:
        found, _ = _init_optimizers_and_lr_schedulers(module)
    except Exception as error:
        raise RuntimeError(
            f"{name} does not work while planning, on the meta device and without data: "
            f"{type(error).__name__}: {error}\n"
            "Say which optimizer to plan for: optimizer=lambda module: AdamW(module.parameters()); "
            "on the command line: --optimizer torch.optim.AdamW."
        ) from error
    optimizers = [optimizer for optimizer in found if not isinstance(optimizer, _MockOptimizer)]
    if not optimizers:
        notes.append(f"{name} returns no optimizer, so there is no optimizer state.")
    return optimizers


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Keep a Trainer that never runs from telling what it has found."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
