"""Folders that ranks wrote with ``torch.distributed.checkpoint``: ours and Lightning's."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.entries import Segment, TensorEntry, View, open_holding
from lightning_zero.checkpoint.mappings import with_mappings
from lightning_zero.checkpoint.pickles import (
    BytesMetadata,
    Chunk,
    Index,
    Metadata,
    StorageInfo,
    TensorMetadata,
    place_slice,
    read_archive,
    read_metadata,
    read_slice,
)
from lightning_zero.checkpoint.places import Place

FORMAT = 1
"""The newest folder format of this package that is understood."""

RECORD = "lightning_zero"
"""The key in ``meta.pt`` under which the writer says what it is."""

METADATA_FILE = ".metadata"
META_FILE = "meta.pt"


def read_sharded(path: Place, trust: bool = False) -> View:
    """Open a folder of ``.distcp`` files."""
    metadata = read_metadata(path / METADATA_FILE)
    if int((metadata.version or "1").split(".")[0]) > 1:
        raise ValueError(
            f"{path / METADATA_FILE}: written in version {metadata.version} of torch's format, and "
            "only 1 is known: update lightning_zero"
        )
    meta, missing = _meta(path, trust)
    folder = _Folder(path, metadata, trust)
    record = dict(meta.get(RECORD) or {})
    tree = with_mappings(folder.tree(), record.pop("mappings", {}))
    if RECORD in meta:
        meta[RECORD] = record  # the mappings are of the folder's way of writing only
    key = next((key for key in ("state_dict", "model") if key in tree), None)
    if key is None:
        raise ValueError(
            f"{path / METADATA_FILE}: neither 'state_dict' nor 'model' is among its keys "
            f"({', '.join(sorted(map(str, tree))[:8])}): it holds no weights that can be converted"
        )
    weights = tree.pop(key)
    if "format" not in record:  # others may nest it; what is nested in ours is a module's own value
        weights = _flat(weights)
    for alias, name in record.get("aliases", {}).items():
        if name in weights:
            weights[alias] = weights[name]
    optimizers = _optimizers(path, tree, missing)
    rest = {**tree, **meta}
    return View(path, "sharded", weights, optimizers, rest, record, missing, folder.broken)


def _optimizers(path: Place, tree: dict[Any, Any], missing: list[str]) -> list[dict[str, Any]]:
    """Take ``optimizer_0`` and so on out of a tree."""
    keys = [k for k in tree if isinstance(k, str) and re.fullmatch(r"optimizer_\d+", k)]
    optimizers = []
    for number, key in enumerate(sorted(keys, key=lambda k: int(k.split("_")[1]))):
        if key != f"optimizer_{number}":
            missing.append(f"{path}: key 'optimizer_{number}'")
        state_dict = tree.pop(key)
        # Nested dicts lose a level that is empty when they are flattened.
        optimizers.append({"state": {}, "param_groups": [], **state_dict})
    return optimizers


def _meta(path: Place, trust: bool) -> tuple[dict[str, Any], list[str]]:
    """Read ``meta.pt``, in which everything lies that is neither weights nor optimizer state."""
    file = path / META_FILE
    if not file.is_file():
        return {}, [f"{file} (loops, callbacks, hyper-parameters)"]
    meta = read_archive(file, trust)
    if not isinstance(meta, dict):
        raise ValueError(f"{file}: expected a dict, found {type(meta).__name__}")
    check_format(meta, file)
    return meta, []


def check_format(saved: dict[str, Any], file: Place) -> None:
    """Refuse what a newer version of this package has written."""
    record = saved.get(RECORD) or {}
    if record.get("format", 1) > FORMAT:
        raise ValueError(
            f"{file}: '{RECORD}' says format {record['format']}, and formats up to {FORMAT} are "
            "known: update lightning_zero"
        )


def check_parts(path: Place) -> None:
    """Look whether all files are there, as long as they must be, without opening any.

    Raises:
        FileNotFoundError: If one is missing.
        ValueError: If one is truncated.
    """
    places = read_metadata(path / METADATA_FILE).storage_data
    last: dict[str, tuple[int, str]] = {}
    for index, info in places.items():
        mine = (info.offset + info.length, index.fqn)
        last[info.relative_path] = max(mine, last.get(info.relative_path, mine))
    for name, (end, key) in last.items():
        open_part(Segment(path / name, 0, end), f"{path / name}: '{key}'").close()


def _flat(tree: dict[Any, Any]) -> dict[str, Any]:
    """Join the keys of a state dict that was itself nested; modules' extra state stays whole."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value and not str(key).endswith("_extra_state"):
            flat.update({f"{key}.{name}": inner for name, inner in _flat(value).items()})
        else:
            flat[str(key)] = value
    return flat


class _Folder:
    """Places the tensors of a folder and reads its other values."""

    def __init__(self, path: Place, metadata: Metadata, trust: bool) -> None:
        self.path = path
        self.metadata = metadata
        self.trust = trust
        self.broken: list[Exception] = []
        for name in {info.relative_path for info in metadata.storage_data.values()}:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{path / METADATA_FILE}: names a file outside its folder: {name}")

    def tree(self) -> dict[Any, Any]:
        """Nest all values by the paths that the writer recorded."""
        tree: dict[Any, Any] = {}
        paths = self.metadata.planner_data or {}
        described = self.metadata.state_dict_metadata
        # The parts of rank 0 come first in it, and paths are in the order of the module's names.
        names = [*(name for name in paths if name in described), *described]
        for name in dict.fromkeys(names):
            kind = described[name]
            if isinstance(kind, TensorMetadata):
                value: Any = self._entry(name, kind)
            elif isinstance(kind, BytesMetadata):
                value = self._value(name)
            else:
                raise ValueError(
                    f"{self.path / METADATA_FILE}: '{name}' is neither tensor nor value"
                )
            _put(tree, paths.get(name) or tuple(name.split(".", 1)), value)
        return tree

    def segment(self, name: str, offset: torch.Size | None) -> Segment:
        """Find where one box, or one pickled value, lies."""
        info: StorageInfo | None = self.metadata.storage_data.get(Index(name, offset))
        if info is None:
            raise ValueError(
                f"{self.path / METADATA_FILE}: does not say where '{name}'"
                f"{'' if offset is None else f' at {tuple(offset)}'} is stored: the save was not "
                "finished; take an older checkpoint"
            )
        if info.transform_descriptors:
            raise ValueError(
                f"{self.path / info.relative_path}: '{name}' is stored with "
                f"{', '.join(info.transform_descriptors)}, which cannot be read: save it without"
            )
        return Segment(self.path / info.relative_path, info.offset, info.length)

    def _value(self, name: str) -> Any:
        try:
            segment = self.segment(name, None)
            where = f"{segment.file}: '{name}'"
            with open_part(segment, where) as file:
                return read_slice(file, segment, where, self.trust)
        except (OSError, ValueError) as error:
            if not name.startswith("optimizer_"):
                raise
            self.broken.append(error)
            return None

    def _entry(self, name: str, kind: TensorMetadata) -> TensorEntry:
        shape, dtype = tuple(kind.size), kind.properties.dtype
        boxes = [self.segment(name, chunk.offsets) for chunk in kind.chunks]
        where = f"{self.path}: '{name}'"
        covered = sum(math.prod(chunk.sizes) for chunk in kind.chunks)
        if covered != math.prod(shape):
            raise ValueError(
                f"{self.path / METADATA_FILE}: the parts of '{name}' hold {covered} elements, and "
                f"its shape {shape} has {math.prod(shape)}: a part is missing, or two overlap"
            )
        # Where a lone box is moved or two names share their bytes, they are one tensor.
        identity = (*boxes, shape) if boxes else (where, shape)

        def placed(number: int) -> TensorEntry:
            return self._box(name, boxes[number], tuple(kind.chunks[number].sizes), dtype)

        def locate_run(start: int, stop: int) -> tuple[int, list[Segment]] | None:
            # Opens only the boxes that hold something of it: of many ranks' there are many.
            runs = _runs(shape, kind.chunks, where)
            if runs is None:
                return None
            held = [run for run in runs if run.start < stop and run.stop > start]
            parts = [placed(run.number).locate() for run in held]
            if any(part is None for part in parts):
                return None
            return (held[0].start if held else 0), [s for part in parts for s in part or []]

        def locate() -> list[Segment] | None:
            located = locate_run(0, math.prod(shape))
            return None if located is None else located[1]

        def load() -> Tensor:
            full = torch.empty(shape, dtype=dtype)
            for number, chunk in enumerate(kind.chunks):
                box = full
                for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                    box = box.narrow(dim, start, size)
                box.copy_(placed(number).read())
            return full

        return TensorEntry(where, shape, dtype, identity, locate, load, locate_run=locate_run)

    def _box(
        self, name: str, segment: Segment, shape: tuple[int, ...], dtype: torch.dtype
    ) -> TensorEntry:
        where = f"{segment.file}: '{name}'"
        with open_part(segment, where) as file:
            entry = place_slice(file, segment, where)
        if not isinstance(entry, TensorEntry) or entry.shape != shape or entry.dtype != dtype:
            raise ValueError(
                f"{where}: stored as {entry.dtype} of shape {tuple(entry.shape)}, and "
                f"{METADATA_FILE} says {dtype} of shape {shape}: the files are of two checkpoints"
            )
        return entry


def open_part(segment: Segment, where: str) -> Any:
    """Open a part's file, having checked that the part lies within it."""
    file = open_holding(segment.file, where)
    if file.seek(0, 2) < segment.start + segment.nbytes:
        file.close()
        raise ValueError(
            f"{where}: the file is truncated, it should reach to byte "
            f"{segment.start + segment.nbytes}. Copy it again, or take an older checkpoint"
        )
    return file


class _Run(NamedTuple):
    """A box that is one run of a tensor's elements."""

    start: int
    stop: int
    number: int


def _runs(shape: tuple[int, ...], chunks: list[Chunk], where: str) -> list[_Run] | None:
    """Put the boxes that are not empty in order; None where one is not a run."""
    runs = []
    for number, chunk in enumerate(chunks):
        start = run_start(shape, tuple(chunk.offsets), tuple(chunk.sizes))
        if start is None:
            return None
        runs.append(_Run(start, start + math.prod(chunk.sizes), number))
    runs = sorted(run for run in runs if run.start < run.stop)
    if any(before.stop != after.start for before, after in itertools.pairwise(runs)):
        raise ValueError(f"{where}: its parts overlap: take an older checkpoint")
    return runs


def run_start(shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> int | None:
    """Say where a box starts in the row-major tensor, or None where it is not one run of it."""
    seen_full = True
    for full, length in zip(reversed(shape), reversed(size), strict=True):
        if not seen_full and length != 1:
            return None
        seen_full = seen_full and length == full
    start = 0
    for full, first in zip(shape, offset, strict=True):
        start = start * full + first
    return start


def _put(tree: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Set a value in nested dicts and lists, growing them; whole numbers index lists."""
    container: Any = tree
    for step, (key, below) in enumerate(zip(path, (*path[1:], None), strict=True)):
        last = step == len(path) - 1
        if isinstance(container, list):
            container.extend([None] * (key + 1 - len(container)))
            missing = container[key] is None
        else:
            missing = key not in container
        if last:
            container[key] = value
        elif missing:
            container[key] = [] if type(below) is int else {}
        container = container[key]
