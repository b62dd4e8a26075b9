"""Single files: what ``torch.save`` wrote, and safetensors."""

from __future__ import annotations

import json
import math
import re
from pathlib import PurePosixPath
from typing import Any

import torch

from lightning_zero.checkpoint.entries import Segment, TensorEntry, View
from lightning_zero.checkpoint.pickles import read_archive
from lightning_zero.checkpoint.places import Place
from lightning_zero.checkpoint.read_sharded import RECORD, check_format

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names that the safetensors format has for dtypes."""

_HEADER_LIMIT = 100_000_000  # The format's own limit.


def read_file(path: Place, trust: bool = False) -> View:
    """Open a full checkpoint of Lightning, or a file of weights."""
    saved = read_archive(path, trust)
    if not isinstance(saved, dict):
        raise ValueError(f"{path}: expected a dict of weights, found {type(saved).__name__}")
    check_format(saved, path)
    nested = next(
        (k for k in ("state_dict", "model") if isinstance(saved.get(k), dict)),
        None,
    )
    if nested is None:
        if not any(isinstance(value, TensorEntry) for value in saved.values()):
            raise ValueError(
                f"{path}: neither key 'state_dict' nor any tensor is in it; its keys are "
                f"{', '.join(map(str, list(saved)[:8]))}"
            )
        return View(path, "weights", saved, missing=["everything but weights"])
    weights = dict(saved.pop(nested))
    optimizers = list(saved.pop("optimizer_states", []))
    named = [] if optimizers else [key for key in saved if _is_optimizer(key, saved[key])]
    for key in sorted(named, key=lambda key: int(key.split("_")[1])):
        optimizers.append({"state": {}, "param_groups": [], **saved.pop(key)})
    record = dict(saved.get(RECORD) or {})
    return View(path, "lightning", weights, optimizers, saved, record)


def _is_optimizer(key: Any, value: Any) -> bool:
    """Whether an entry is one of those that Lightning's consolidation makes."""
    named = isinstance(key, str) and re.fullmatch(r"optimizer_\d+", key) is not None
    return named and isinstance(value, dict) and "param_groups" in value


def read_safetensors(path: Place) -> View:
    """Open a safetensors file, or the index of several."""
    if path.suffix != ".json":
        weights, ties = _header(path)
        return View(path, "safetensors", _tied(weights, ties), missing=["everything but weights"])
    try:
        places: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not an index of safetensors files, or truncated") from error
    files: dict[str, dict[str, TensorEntry]] = {}
    ties = {}
    folder = path.parent
    for name in dict.fromkeys(places.values()):
        if PurePosixPath(name).name != name:
            raise ValueError(f"{path}: names a file outside its folder: {name}")
        if not (folder / name).is_file():
            held = next(key for key, file in places.items() if file == name)
            raise FileNotFoundError(f"{folder / name} is missing, which holds '{held}'")
        files[name], found = _header(folder / name)
        ties.update(found)
    weights = {}
    for key, name in places.items():
        if key not in files[name]:
            raise ValueError(f"{folder / name}: key '{key}' of {path.name} is missing in it")
        weights[key] = files[name][key]
    return View(path, "safetensors", _tied(weights, ties), missing=["everything but weights"])


def _tied(weights: dict[str, TensorEntry], ties: dict[str, str]) -> dict[str, Any]:
    """Add names that are only in the metadata, where safetensors' own ``save_model`` puts them."""
    for alias, name in ties.items():
        if alias not in weights and name in weights:
            weights[alias] = weights[name]
    return dict(weights)


def _header(path: Place) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Read a safetensors header: the tensors, and the metadata."""
    with path.open() as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.nbytes()
        if length > min(size - 8, _HEADER_LIMIT):
            raise ValueError(f"{path}: not a safetensors file, or truncated in its header")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: its header is damaged: {error}") from error
    ties = header.pop("__metadata__", {})
    weights = {}
    for key, tensor in header.items():
        start, stop = tensor["data_offsets"]
        dtype = SAFETENSORS_DTYPES.get(tensor["dtype"])
        shape = tuple(tensor["shape"])
        where = f"{path}: '{key}'"
        if dtype is None:
            raise ValueError(f"{where}: its dtype {tensor['dtype']} is not known to torch")
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{where}: {stop - start} bytes do not make {shape} of {dtype}")
        if 8 + length + stop > size:
            raise ValueError(f"{where}: the file is truncated before its end. Copy it again")
        part = Segment(path, 8 + length + start, stop - start)
        weights[key] = TensorEntry(where, shape, dtype, (key, part), _always([part]))
    return weights, ties


def _always(parts: list[Segment]) -> Any:
    return lambda: parts
