"""``lightning_zero.plan``: what every strategy holds and sends, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from lightning_zero.engine.division import Division, divide
from lightning_zero.engine.kinds import OptimizerSharding
from lightning_zero.engine.numerics import Cast
from lightning_zero.engine.units import WrapPolicy
from lightning_zero.planner.activations import Activations, count_activations
from lightning_zero.planner.advice import mark, recommend
from lightning_zero.planner.blueprint import Blueprint, MakeOptimizer, draw
from lightning_zero.planner.formulas import paper_bytes
from lightning_zero.planner.rehearsal import Conditions, rehearse, whole_steppers
from lightning_zero.planner.report import Plan, StrategyPlan
from lightning_zero.planner.sizes import parse_size
from lightning_zero.planner.transports import transport_for
from lightning_zero.precision import DtypeName, ZeroPrecision

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
"""What can be planned, in the order of the table."""

_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def plan(
    module: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    params: float | None = None,
    strategies: str | Sequence[str] = STRATEGIES,
    devices: int = 8,
    num_nodes: int = 1,
    precision: str | int = "32-true",
    device_memory: str | float | None = None,
    batch: Any = None,
    optimizer: MakeOptimizer | None = None,
    accelerator: Literal["gpu", "cpu"] = "gpu",
    accumulate_grad_batches: int = 1,
    auto_wrap_policy: WrapPolicy = "auto",
    bucket_mb: float = 25.0,
    prefetch: bool = True,
    reduce_every_backward: bool = True,
    optimizer_sharding: OptimizerSharding = "auto",
    cast: Cast = "auto",
    reduce_dtype: DtypeName | None = None,
    fp32_master: bool = False,
) -> Plan:
    """Say what each strategy would hold and send per rank, which fit, and which to take.

    The module is divided, gathered and reduced by the engine's own code on the meta device, for a
    few steps; nothing is computed, and no weights are allocated. Needs no GPU and no other rank.

    ```python
    print(lightning_zero.plan(lambda: MyModule(width=8192), devices=8, num_nodes=4,
                              precision="bf16-mixed", device_memory="80GB"))
    ```

    Args:
        module: A module, which stays as it is, or a function that builds it, which is called on the
            meta device. ``setup("fit")``, ``configure_model`` and ``configure_optimizers`` of a
            LightningModule are called.
        params: Instead of a module, a number of parameters Ψ: the formulas of the ZeRO paper
            (arXiv 1910.02054, section 3.1) for mixed precision with Adam, without anything
            transient.
        strategies: Which of ``"ddp"``, ``"zero1"``, ``"zero2"``, ``"zero3"``; also as one string
            with commas.
        devices: Ranks per node.
        num_nodes: Nodes.
        precision: As ``Trainer(precision=...)`` takes it.
        device_memory: Of one device, in bytes or as ``"80GB"`` (10**9) or ``"24GiB"`` (2**30).
            A tenth of it is left aside.
        batch: One micro-batch of one rank, as ``training_step`` gets it; only shapes and dtypes
            matter. With it, activations are counted.
        optimizer: Makes the optimizer, or several, from the module, in place of
            ``configure_optimizers``. A module that is no LightningModule gets AdamW by default.
        accelerator: Where the run will be, which decides what communication takes.
        accumulate_grad_batches: Micro-batches per step.
        auto_wrap_policy: As for ``ZeroStrategy``, and so are the others below.
        bucket_mb: Megabytes of parameters that are reduced together at stages 1 and 2.
        prefetch: Whether to gather the next unit early.
        reduce_every_backward: Whether stages 2 and 3 reduce every micro-batch.
        optimizer_sharding: Which optimizers step on shards.
        cast: What is held in half precision under mixed precision.
        reduce_dtype: In which dtype gradients are summed.
        fp32_master: Whether true half precisions keep fp32 masters.

    Returns:
        The plan: ``print`` shows it as a table, ``plan["zero3"]`` is a row with sizes in bytes,
        ``to_json()`` and ``plot(path)`` write it.

    Raises:
        ValueError: If an argument is out of its range, or neither or both of ``module`` and
            ``params`` are given.
        TypeError: If ``module`` cannot be copied.
        RuntimeError: If the module needs values or a running Trainer; the message says what to do.
        NotImplementedError: If an optimizer cannot be sharded.
    """
    names = _strategies(strategies)
    _check_counts(
        devices=devices, num_nodes=num_nodes, accumulate_grad_batches=accumulate_grad_batches
    )
    if accelerator not in ("gpu", "cpu"):
        raise ValueError(f"accelerator={accelerator!r} must be one of 'gpu', 'cpu'.")
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb!r} must be a positive number.")
    memory = None if device_memory is None else parse_size(device_memory)
    if (module is None) == (params is None):
        raise ValueError("plan() needs a module, or params=... for the paper's formulas; not both.")
    ranks = devices * num_nodes
    if params is not None:
        return _plan_of_paper(names, params, devices, num_nodes, memory)
    assert module is not None
    plugin = ZeroPrecision(
        _ALIASES.get(str(precision), str(precision)),  # type: ignore[arg-type]
        cast=cast,
        reduce_dtype=reduce_dtype,
        fp32_master=fp32_master,
    )
    blueprint = draw(module, plugin, optimizer)
    planned = blueprint.module
    numerics = plugin.numerics(compiled=blueprint.compiled)
    device = torch.device("cuda" if accelerator == "gpu" else "cpu")
    sharded = [name for name in names if name != "ddp"]
    conditions = Conditions(
        world_size=ranks,
        device=device,
        transport=transport_for(device, num_nodes),
        numerics=numerics,
        prefetch=prefetch,
        whole=whole_steppers(blueprint.optimizers if sharded else (), optimizer_sharding),
        reduce_every_backward=reduce_every_backward,
        micro_batches=accumulate_grad_batches,
    )
    divisions = {
        f"zero{stage}": divide(planned, stage, ranks, device, auto_wrap_policy, bucket_mb, numerics)
        for stage in (1, 2, 3)
    }
    activations = None
    if batch is not None:
        units = divisions["zero1"].plans
        halves = {id(param) for unit in units if unit.half for _, param in unit.params}
        activations = count_activations(planned, batch, plugin, halves)
    rows = [
        _ddp(blueprint, ranks, activations)
        if name == "ddp"
        else _zero(name, blueprint, divisions[name], conditions, activations)
        for name in names
    ]
    marked = mark(rows, memory)
    recommended, reason = recommend(marked, memory, ranks)
    return Plan(
        model=type(planned).__name__,
        numel=sum(param.numel() for param in planned.parameters()),
        trainable=sum(p.numel() for p in planned.parameters() if p.requires_grad),
        optimizers=tuple(type(made).__name__ for made in blueprint.optimizers),
        devices=devices,
        num_nodes=num_nodes,
        precision=plugin.precision,
        device_memory=memory,
        rows=tuple(marked),
        recommended=recommended,
        reason=reason,
        notes=(*blueprint.notes, *_notes(activations)),
    )


def _strategies(strategies: str | Sequence[str]) -> list[str]:
    names = strategies.split(",") if isinstance(strategies, str) else list(strategies)
    names = [name.strip() for name in names]
    wrong = [name for name in names if name not in STRATEGIES]
    if wrong or not names:
        raise ValueError(
            f"strategies={strategies!r}: choose from {', '.join(map(repr, STRATEGIES))}."
        )
    return [name for name in STRATEGIES if name in names]


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count!r} must be a whole number from 1.")


def _notes(activations: Activations | None) -> list[str]:
    if activations is not None:
        return []
    return ["Activations are not counted: give a batch to count them."]


def _buffers(module: nn.Module, saved: bool = False) -> int:
    """Count the bytes of a module's buffers, or of those that checkpoints hold."""
    found = {id(buffer): buffer for buffer in module.buffers()}
    if saved:
        names = module.state_dict(keep_vars=True)
        found = {id(value): value for value in names.values() if id(value) in found}
    return sum(buffer.numel() * buffer.element_size() for buffer in found.values())


def _zero(
    name: str,
    blueprint: Blueprint,
    division: Division,
    conditions: Conditions,
    activations: Activations | None,
) -> StrategyPlan:
    seen = rehearse(blueprint, division, conditions)
    held, sent = seen.at_peak, seen.sent
    return StrategyPlan(
        strategy=name,
        parameters=held.parameters,
        masters=held.masters,
        gradients=held.gradients,
        optimizer=held.optimizer,
        transient=held.transient,
        buffers=_buffers(blueprint.module),
        activations=None if activations is None else activations.without_casts,
        sent_gather=sent.gather,
        sent_reduce=sent.reduce,
        sent_exchange=sent.exchange,
        full_checkpoint=seen.whole_checkpoint + _buffers(blueprint.module, saved=True),
        sharded_checkpoint=seen.checkpoint,
        units=seen.units,
        largest_unit=seen.largest,
    )


def _ddp(blueprint: Blueprint, ranks: int, activations: Activations | None) -> StrategyPlan:
    """Say what ``DistributedDataParallel`` holds, with its default settings.

    Beside parameters, gradients and state it keeps a bucket for each gradient, into which it copies
    them to reduce (``gradient_as_bucket_view=False``), and a ring all-reduce sends 2 (N - 1)/N of
    them.
    """
    params = list(blueprint.module.parameters())
    weights = sum(param.numel() * param.element_size() for param in params)
    grads = sum(p.numel() * p.element_size() for p in params if p.requires_grad)
    states = [piece for pieces in blueprint.states.values() for piece in pieces.values()]
    state = sum(piece.nbytes for piece in states)
    return StrategyPlan(
        strategy="ddp",
        parameters=weights,
        masters=0,
        gradients=grads,
        optimizer=state,
        transient=grads if ranks > 1 else 0,
        buffers=_buffers(blueprint.module),
        activations=None if activations is None else activations.with_casts,
        sent_gather=0,
        sent_reduce=2 * grads * (ranks - 1) // ranks,
        sent_exchange=0,
        full_checkpoint=weights + state + _buffers(blueprint.module, saved=True),
        sharded_checkpoint=None,
        units=0,
        largest_unit=0,
    )


def _plan_of_paper(
    names: Sequence[str], params: float, devices: int, num_nodes: int, memory: int | None
) -> Plan:
    if not params >= 1 or params == float("inf"):
        raise ValueError(f"params={params!r} must be a number of parameters, such as 7.5e9.")
    ranks = devices * num_nodes
    rows = []
    for name in names:
        held = paper_bytes(name, params, ranks)
        checkpoint = params * 12
        rows.append(
            StrategyPlan(
                strategy=name,
                parameters=round(held.parameters),
                masters=round(held.masters),
                gradients=round(held.gradients),
                optimizer=round(held.optimizer),
                transient=0,
                buffers=0,
                activations=None,
                sent_gather=round(held.gather),
                sent_reduce=round(held.reduce),
                sent_exchange=0,
                full_checkpoint=round(checkpoint),
                sharded_checkpoint=None if name == "ddp" else round(checkpoint / ranks),
                units=0,
                largest_unit=0,
            )
        )
    marked = mark(rows, memory)
    recommended, reason = recommend(marked, memory, ranks)
    return Plan(
        model="A model",
        numel=round(params),
        trainable=round(params),
        optimizers=("Adam",),
        devices=devices,
        num_nodes=num_nodes,
        precision="the paper's mixed precision",
        device_memory=memory,
        rows=tuple(marked),
        recommended=recommended,
        reason=reason,
        notes=(
            "These are the formulas of the ZeRO paper (arXiv 1910.02054). Give a model to count "
            "what this implementation holds, with what is transient.",
        ),
    )
