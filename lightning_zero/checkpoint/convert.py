"""Converts checkpoints between formats, streaming, without a process group or the user's module."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint import folder
from lightning_zero.checkpoint.entries import TensorEntry, View, entries
from lightning_zero.checkpoint.formats import open_checkpoint
from lightning_zero.checkpoint.mappings import odd_mappings
from lightning_zero.checkpoint.optimizers import by_name, by_number, names_of
from lightning_zero.checkpoint.read_sharded import FORMAT, RECORD
from lightning_zero.checkpoint.write_file import Advance, write_archive, write_safetensors
from lightning_zero.checkpoint.write_sharded import write_sharded

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""Short names for the dtypes that weights can be converted to."""

TARGETS = ("ckpt", "safetensors", "pt", "sharded")
"""What can be written."""

_LAYOUTS = {"fsdp": "model", "model_parallel": "state_dict"}
_TRAINING_KEYS = ("optimizer_states", "lr_schedulers", "callbacks")
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


@dataclass(frozen=True)
class Summary:
    """What a conversion did.

    Attributes:
        files: What was written.
        tensors: How many tensors, tied ones once.
        nbytes: Their bytes.
        seconds: How long it took.
        peak_memory: The most memory that this process has held, in bytes.
        notes: What was left out and why.
    """

    files: list[Path]
    tensors: int
    nbytes: int
    seconds: float
    peak_memory: int
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = (
            f"{', '.join(str(file) for file in self.files)}: {self.tensors} tensors, "
            f"{self.nbytes / 1e6:,.1f} MB in {self.seconds:.1f} s, "
            f"peak memory {self.peak_memory / 1e6:,.0f} MB"
        )
        return "\n".join([text, *(f"note: {note}" for note in self.notes)])


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    weights_only: bool = False,
    prefix: str | None = None,
    strip: bool = False,
    max_shard_size: int | str | None = None,
    to: str | None = None,
    layout: str = "fsdp",
    force: bool = False,
    trust: bool = False,
    progress: bool = True,
) -> Summary:
    """Convert a checkpoint.

    Args:
        source: A folder (sharded, or DeepSpeed's), a ``.ckpt``, ``.pt`` or ``.safetensors`` file,
            or the index of several.
        destination: A local path. Its suffix says what to write: ``.ckpt`` a full checkpoint of
            Lightning, ``.safetensors`` or ``.pt`` weights, none a sharded folder.
        dtype: Convert floating-point weights to it, such as ``"bf16"``. Optimizer state stays.
        weights_only: Leave optimizers, schedulers and callbacks out.
        prefix: Take only the weights whose names start with it.
        strip: Remove the prefix from their names.
        max_shard_size: Split ``.safetensors`` into files of at most so many bytes, or ``"5GB"``,
            with an index as Hugging Face's.
        to: Write ``ckpt``, ``safetensors``, ``pt`` or ``sharded`` whatever the suffix says.
        layout: Whose loader a sharded folder is for: ``fsdp`` or ``model_parallel``.
        force: Overwrite the destination.
        trust: Let pickles in the source run code.
        progress: Show a progress bar on stderr, if that is a terminal.

    Returns:
        What was written: files, tensors, bytes, seconds, peak memory in bytes, remarks.

    Raises:
        ValueError: If the source is damaged or the settings do not go together.
        FileExistsError: If the destination exists, without ``force``.
    """
    began = time.perf_counter()
    if "://" in str(destination):
        raise ValueError(f"{destination}: write to a local path, and copy it there: DST is no URL")
    destination = Path(destination)
    target = _target(destination, to)
    _check(target, weights_only, prefix, strip, max_shard_size, layout)
    job = _Job(
        open_checkpoint(source, trust),
        destination,
        weights_only or target in ("safetensors", "pt"),
        force,
        trust,
    )
    job.select(prefix, strip, _dtype(dtype))
    limit = _size(max_shard_size)
    with _progress(progress, job) as advance:
        if target == "safetensors":
            files = job.to_safetensors(limit, advance)
        elif target == "sharded":
            files = job.to_sharded(_LAYOUTS[layout], advance)
        else:
            files = job.to_archive(target == "pt", advance)
    seconds = time.perf_counter() - began
    return Summary(files, *job.size(), seconds, peak_memory(), job.notes)


def peak_memory() -> int:
    """The most memory that this process has held, in bytes."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return 0


class _Job:
    """One conversion: what of the source goes where."""

    def __init__(
        self, view: View, destination: Path, weights_only: bool, force: bool, trust: bool
    ) -> None:
        self.view, self.destination, self.force, self.trust = view, destination, force, trust
        self.weights_only = weights_only
        self.weights = dict(view.weights)
        self.notes: list[str] = []
        self.tree: Any = {}
        if view.broken and not weights_only:
            raise view.broken[0]

    def select(self, prefix: str | None, strip: bool, dtype: torch.dtype | None) -> None:
        """Choose, rename and cast the weights."""
        if prefix is not None:
            chosen = {k: v for k, v in self.weights.items() if k.startswith(prefix)}
            if not chosen:
                raise ValueError(
                    f"{self.view.path}: no name starts with '{prefix}'; the first are "
                    f"{', '.join(list(self.weights)[:4])}"
                )
            if left := len(self.weights) - len(chosen):
                self.notes.append(f"{left} weights do not start with '{prefix}' and are left out")
            self.weights = {k.removeprefix(prefix) if strip else k: v for k, v in chosen.items()}
        if dtype is not None:
            for name, value in self.weights.items():
                if isinstance(value, TensorEntry) and value.dtype.is_floating_point:
                    self.weights[name] = value.cast(dtype)

    def size(self) -> tuple[int, int]:
        """How many tensors there are to write and how many bytes, tied ones once."""
        found = list(entries([self.tree or self.weights]).values())
        distinct = {(entry.identity, entry.dtype): entry for entry in found}
        return len(distinct), sum(entry.nbytes for entry in distinct.values())

    def to_archive(self, plain: bool, advance: Advance) -> list[Path]:
        """Write one file that ``torch.load`` reads: weights alone, or a full checkpoint."""
        self.tree = (
            self.weights if plain else full_checkpoint(self.view, self.weights, self.weights_only)
        )
        with self._file(self.destination) as temporary:
            with open(temporary, "wb") as file:
                write_archive(self.tree, file, advance)
                folder.sync_file(file)
            self._verify(temporary, self.tree)
        return [self.destination]

    def to_sharded(self, key: str, advance: Advance) -> list[Path]:
        """Write a folder that Lightning's sharded strategies read."""
        where = str(self.view.path)
        state: dict[str, Any] = {key: self.weights}
        optimizers = [] if self.weights_only else self.view.optimizers
        record = dict(self.view.record)
        noted = record.pop("names", [])
        for number, optimizer in enumerate(optimizers):
            names = names_of(optimizer) or dict(enumerate(noted)).get(number)
            state[f"optimizer_{number}"] = by_name(optimizer, self.weights, where, names)
            if names is None:
                self.notes.append(
                    f"optimizer {number} has no names: its parameters were taken to be in the "
                    "order of model.parameters(). If you gave them to it in another order, pass "
                    "--weights-only"
                )
        record |= {"format": FORMAT, "mappings": odd_mappings(state)}
        meta = {**_rest(self.view, self.weights_only), RECORD: record}
        self.tree = [state, meta]
        with self._file(self.destination) as temporary:
            temporary.mkdir()
            write_sharded(state, meta, temporary, advance)
            folder.sync(temporary)
            view = open_checkpoint(temporary, self.trust)
            written = [{key: view.weights}, *view.optimizers]
            self._compare(written, [{key: state[key]}, *(state[k] for k in state if k != key)])
        return [self.destination]

    def to_safetensors(self, limit: int | None, advance: Advance) -> list[Path]:
        """Write one safetensors file, or several with an index."""
        kept, ties = self._untie()
        parts = _split(kept, limit)
        if len(parts) == 1:
            with self._file(self.destination) as temporary:
                self._safetensors(temporary, kept, ties, advance)
            return [self.destination]
        stem, files, places = self.destination.stem, [], {}
        index = self.destination.with_name(f"{stem}.safetensors.index.json")
        names = [f"{stem}-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
        total = sum(entry.nbytes for entry in kept.values())
        # All are written before the first is put in its place: the source may be these very files.
        with contextlib.ExitStack() as written:
            temporary = written.enter_context(self._file(index))  # put there last
            for name, part in zip(names, parts, strict=True):
                tied = {alias: first for alias, first in ties.items() if first in part}
                files.append(self.destination.with_name(name))
                path = written.enter_context(self._file(files[-1]))
                self._safetensors(path, part, tied, advance)
                places.update(dict.fromkeys(part, name))
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                folder.sync_file(file)
        return [*files, index]

    def _safetensors(
        self, path: Path, weights: dict[str, TensorEntry], ties: dict[str, str], advance: Advance
    ) -> None:
        with open(path, "wb") as file:
            write_safetensors(weights, {"format": "pt", **ties}, file, advance)
            folder.sync_file(file)
        self._verify(path, {**weights, **{k: weights[v] for k, v in ties.items()}})

    def _untie(self) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        """Keep the first of the names that share a tensor; note the others."""
        first: dict[Any, str] = {}
        kept: dict[str, TensorEntry] = {}
        ties: dict[str, str] = {}
        for name, value in self.weights.items():
            if not isinstance(value, TensorEntry):
                self.notes.append(f"'{name}' is no tensor and is left out")
            elif value.identity in first:
                ties[name] = first[value.identity]
            else:
                first[value.identity] = name
                kept[name] = value
        return kept, ties

    def _check_free(self, path: Path) -> None:
        if path.exists() and not self.force:
            raise FileExistsError(f"{path} exists: pass --force to overwrite it")

    @contextlib.contextmanager
    def _file(self, path: Path) -> Iterator[Path]:
        """Name a temporary sibling, and put it in the place of ``path`` once it is written."""
        self._check_free(path)
        temporary = folder.begin(path)
        try:
            yield temporary
            folder.put(temporary, path)
        except BaseException:
            folder.discard(temporary)
            raise

    def _verify(self, path: Path, tree: Any) -> None:
        """Read back what was written, and compare it with what should be there."""
        view = open_checkpoint(path, self.trust)
        if view.format == "lightning":
            optimizers = {"optimizer_states": view.optimizers} if view.optimizers else {}
            self._compare({**view.rest, "state_dict": view.weights, **optimizers}, tree)
        else:
            self._compare(view.weights, tree)

    def _compare(self, written: Any, expected: Any) -> None:
        found = {key: (e.shape, e.dtype) for key, e in entries(written).items()}
        wanted = {key: (e.shape, e.dtype) for key, e in entries(expected).items()}
        wrong = [key for key in {**wanted, **found} if found.get(key) != wanted.get(key)]
        if wrong:
            key = wrong[0]
            raise RuntimeError(
                f"{self.destination}: '{key}' should be {wanted.get(key)} and was written as "
                f"{found.get(key)} ({len(wrong)} such): nothing was kept. This is a bug, report it"
            )


def full_checkpoint(view: View, weights: dict[str, Any], weights_only: bool) -> dict[str, Any]:
    """Assemble a full checkpoint as a ddp Trainer saves it, of entries.

    Args:
        view: What was opened.
        weights: Its weights, or some of them.
        weights_only: Leave optimizers, schedulers and callbacks out.

    Raises:
        ValueError: If what is not to be left out is missing or cannot be read.
    """
    if view.broken and not weights_only:
        raise view.broken[0]
    checkpoint = {**_rest(view, weights_only), "state_dict": weights}
    if weights_only or not view.optimizers:
        return checkpoint
    states = [by_number(optimizer) for optimizer in view.optimizers]
    if RECORD in checkpoint:  # numbers do not tell
        names = [names_of(optimizer) for optimizer in view.optimizers]
        checkpoint[RECORD] = {"names": names, **checkpoint[RECORD]}
    return {"lr_schedulers": [], **checkpoint, "optimizer_states": states}


def _rest(view: View, weights_only: bool) -> dict[str, Any]:
    """Return what is neither weights nor optimizers."""
    if view.missing and view.format in ("sharded", "deepspeed") and not weights_only:
        raise ValueError(
            f"{view.path} is not whole, missing {'; '.join(view.missing)}: pass "
            "--weights-only to convert the weights alone"
        )
    drop = _TRAINING_KEYS if weights_only else ()
    return {key: value for key, value in view.rest.items() if key not in drop}


def _target(destination: Path, to: str | None) -> str:
    if to is not None:
        if to not in TARGETS:
            raise ValueError(f"to={to!r}: choose one of {', '.join(TARGETS)}")
        return to
    kinds = {".ckpt": "ckpt", ".safetensors": "safetensors", ".pt": "pt", ".pth": "pt"}
    if destination.suffix in kinds:
        return kinds[destination.suffix]
    if destination.suffix and not destination.is_dir():
        raise ValueError(
            f"{destination}: cannot tell from '{destination.suffix}' what to write: use .ckpt, "
            f".safetensors, .pt or no suffix, or pass --to {'|'.join(TARGETS)}"
        )
    return "sharded"


def _check(
    target: str,
    weights_only: bool,
    prefix: str | None,
    strip: bool,
    max_shard_size: int | str | None,
    layout: str,
) -> None:
    wrong = []
    if strip and prefix is None:
        wrong.append("--strip removes the prefix that --prefix names: pass both")
    if prefix is not None and not weights_only and target in ("ckpt", "sharded"):
        wrong.append("--prefix selects weights and would tear the optimizer: add --weights-only")
    if max_shard_size is not None and target != "safetensors":
        wrong.append(f"--max-shard-size goes with .safetensors, not with {target}")
    if layout not in _LAYOUTS:
        wrong.append(f"layout={layout!r}: choose one of {', '.join(_LAYOUTS)}")
    if wrong:
        raise ValueError("; ".join(wrong))


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = DTYPES.get(dtype, getattr(torch, dtype, None))
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    return found


def _size(size: int | str | None) -> int | None:
    if size is None or isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgG]?[iI]?[bB]?)\s*", size)
    unit = match[2].upper() if match else "?"
    if match is None or unit not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"max_shard_size={size!r}: expected a size such as 5GB or 500MiB")
    return int(float(match[1]) * _UNITS[unit])


def _split(weights: dict[str, TensorEntry], limit: int | None) -> list[dict[str, TensorEntry]]:
    """Fill parts in order, each up to the limit; a tensor above it has a part of its own."""
    parts: list[dict[str, TensorEntry]] = [{}]
    filled = 0
    for name, entry in weights.items():
        if limit is not None and parts[-1] and filled + entry.nbytes > limit:
            parts.append({})
            filled = 0
        parts[-1][name] = entry
        filled += entry.nbytes
    return parts


@contextlib.contextmanager
def _progress(wanted: bool, job: _Job) -> Iterator[Callable[[int], object]]:
    if not wanted or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(unit="B", unit_scale=True, desc=job.destination.name, file=sys.stderr) as bar:

        def advance(nbytes: int) -> None:
            if bar.total is None:
                bar.total = job.size()[1]
            bar.update(nbytes)

        yield advance
