"""Says what is in a checkpoint without reading its tensors."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.entries import TensorEntry, View, entries
from lightning_zero.checkpoint.formats import open_checkpoint
from lightning_zero.checkpoint.places import Place

_FORMATS = {
    "sharded": "sharded folder (torch.distributed.checkpoint)",
    "deepspeed": "DeepSpeed ZeRO folder",
    "lightning": "full Lightning checkpoint",
    "weights": "weights (torch.save)",
    "safetensors": "weights (safetensors)",
}

_SHOWN = 5  # problems in the table: a file that is missing is one for each of its tensors


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        name: Its name, in optimizer state with the parameter's name or number before the dot.
        shape: Full shape.
        dtype: Such as ``float32``.
        nbytes: Bytes of its elements.
        tied_to: The name before it that is the same tensor, if there is one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    tied_to: str | None = None


@dataclass(frozen=True)
class Report:
    """What a checkpoint holds.

    Attributes:
        path: The checkpoint.
        format: What kind of checkpoint it is.
        whole: Whether every part of every tensor is there.
        problems: What is damaged or missing, if it is not whole.
        step: The global step, if recorded.
        epoch: The epoch, if recorded.
        world_size: How many ranks wrote it, if recorded.
        stage: The ZeRO stage that wrote it, if recorded.
        version: The version that wrote it, if recorded.
        weights: The weights and buffers.
        optimizers: For each optimizer the tensors of its state.
        other: The other keys at its top level.
    """

    path: str
    format: str
    whole: bool
    problems: list[str]
    step: int | None
    epoch: int | None
    world_size: int | None
    stage: int | None
    version: str | None
    weights: list[TensorInfo]
    optimizers: list[list[TensorInfo]] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps({**asdict(self), "nbytes": self.nbytes}, indent=2)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, tied ones once."""
        tensors = [*self.weights, *(t for state in self.optimizers for t in state)]
        return sum(tensor.nbytes for tensor in tensors if tensor.tied_to is None)

    def __str__(self) -> str:
        unknown = "not recorded"
        heads = {
            "path": self.path,
            "format": _FORMATS[self.format],
            "whole": "yes" if self.whole else "NO",
            "step": unknown if self.step is None else self.step,
            "epoch": unknown if self.epoch is None else self.epoch,
            "ranks": unknown if self.world_size is None else self.world_size,
            "stage": unknown if self.stage is None else self.stage,
            "written by": unknown if self.version is None else _author(self.version),
            "weights": _total(self.weights),
        }
        for number, state in enumerate(self.optimizers):
            heads[f"optimizer {number}"] = _total(state)
        heads["also in it"] = ", ".join(self.other) or "nothing"
        width = max(map(len, heads))
        lines = [f"{name:{width}}  {value}" for name, value in heads.items()]
        lines += [f"problem: {problem}" for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"and {len(self.problems) - _SHOWN} problems more: --json lists all")
        lines += ["", *_table(self.weights)]
        for number, state in enumerate(self.optimizers):
            lines += ["", f"optimizer {number}", *_table(state)]
        return "\n".join(lines)


def inspect(source: str | Path, trust: bool = False) -> Report:
    """Report what a checkpoint holds and whether it is whole.

    Args:
        source: Any checkpoint that ``convert`` takes.
        trust: Let pickles in it run code.

    Returns:
        The report; its ``str`` is a table, and ``to_json`` the same for programs.

    Raises:
        FileNotFoundError: If there is nothing, or nothing that says what the parts are.
        ValueError: If it is no checkpoint, or too damaged to be opened.
    """
    view = open_checkpoint(source, trust)
    problems = _problems(view)
    version = view.record.get("version")
    return Report(
        path=str(source),
        format=view.format,
        whole=not problems,
        problems=problems,
        step=_number(view.rest.get("global_step")),
        epoch=_number(view.rest.get("epoch")),
        world_size=_number(view.record.get("world_size")),
        stage=_number(view.record.get("stage")),
        version=None if version is None else str(version),
        weights=_infos(view.tensors),
        optimizers=[_infos(entries(optimizer["state"])) for optimizer in view.optimizers],
        other=sorted(str(key) for key in view.rest),
    )


def _problems(view: View) -> list[str]:
    """Look for every part of every tensor."""
    problems = []
    if view.format in ("sharded", "deepspeed"):
        problems += [f"missing {what}" for what in view.missing]
    problems += [str(error) for error in view.broken]
    sizes: dict[Place, int] = {}
    for entry in entries([view.weights, view.optimizers, view.rest]).values():
        try:
            segments = entry.locate() or []
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        for segment in segments:
            if segment.file not in sizes:
                with contextlib.suppress(FileNotFoundError):
                    sizes[segment.file] = segment.file.nbytes()
            if sizes.get(segment.file, -1) < segment.start + segment.nbytes:
                problems.append(f"{segment.file} is missing or truncated: {entry.where}")
    return list(dict.fromkeys(problems))


def _author(version: str) -> str:
    """Name what wrote the checkpoint; DeepSpeed's versions come with its name."""
    return f"lightning_zero {version}" if version[:1].isdigit() else version


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def _infos(found: dict[str, TensorEntry]) -> list[TensorInfo]:
    first: dict[Any, str] = {}
    infos = []
    for name, entry in found.items():
        tied_to = first.setdefault(entry.identity, name) if entry.numel else name
        dtype = str(entry.dtype).removeprefix("torch.")
        infos.append(
            TensorInfo(name, entry.shape, dtype, entry.nbytes, None if tied_to == name else tied_to)
        )
    return infos


def _total(tensors: list[TensorInfo]) -> str:
    held = [tensor for tensor in tensors if tensor.tied_to is None]
    return f"{len(tensors)} tensors, {_bytes(sum(tensor.nbytes for tensor in held))}"


def _table(tensors: list[TensorInfo]) -> list[str]:
    rows = [("tensor", "shape", "dtype", "bytes")]
    for tensor in tensors:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        size = f"as {tensor.tied_to}" if tensor.tied_to else _bytes(tensor.nbytes)
        rows.append((tensor.name, shape, tensor.dtype, size))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"{name:{widths[0]}}  {shape:>{widths[1]}}  {dtype:{widths[2]}}  {size}"
        for name, shape, dtype, size in rows
    ]


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
