"""Folders that DeepSpeed's ZeRO wrote, stages 1 to 3, as of DeepSpeed 0.19.

Masters and optimizer state lie in flat fp32 vectors, one for each group of parameters, cut over the
ranks. At stages 1 and 2 a group's vector is the ranks' parts end to end; at stage 3 each parameter
is cut over the ranks by itself. What is not in a vector, frozen weights and buffers, is taken from
the model files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from lightning_zero.checkpoint.entries import Segment, TensorEntry, View
from lightning_zero.checkpoint.pickles import Inert, read_archive
from lightning_zero.checkpoint.places import Place
from lightning_zero.engine.placement import Placement, placement_of

_OWN_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params "
    "frozen_param_fragments lr_scheduler data_sampler random_ltd sparse_tensor_module_names "
    "skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config ds_version "
    "checkpoint_parallel_dimensions autoep_layers".split()
)
_PREFIX = "_forward_module."  # What Lightning older than 2.1 wrapped modules in.


def deepspeed_folder(path: Place) -> Place | None:
    """Find the folder with DeepSpeed's files: ``path``, or the one that its ``latest`` names."""
    folders = [path]
    latest = path / "latest"
    if latest.is_file():
        tag = latest.read_bytes().decode().strip()
        if PurePosixPath(tag).name != tag:
            raise ValueError(f"{latest}: names a folder elsewhere: {tag!r}")
        if (path / tag).is_dir():
            folders.append(path / tag)
    return next((f for f in folders if f.matching("*_model_states.pt")), None)


def read_deepspeed(path: Place, trust: bool = False) -> View:
    """Open a folder that DeepSpeed wrote."""
    folder = deepspeed_folder(path)
    assert folder is not None
    if folder.matching("*expert*_model_states.pt") or folder.matching("*mp_rank_01_*"):
        raise NotImplementedError(
            f"{folder}: checkpoints of expert or tensor parallel models cannot be converted; "
            "DeepSpeed's ds_to_universal.py may"
        )
    ranks = [read_archive(file, trust, "deepspeed") for file in _files(folder, "optim")]
    models = [read_archive(file, trust, "deepspeed") for file in _files(folder, "model")]
    return _Reader(path, folder, ranks, models).view()


def _files(folder: Place, kind: str) -> list[Place]:
    """List the files of all ranks in order."""
    found: dict[int, Place] = {}
    for file in folder.matching(f"*_{kind}_states.pt"):
        rank = re.search(r"pp_rank_(\d+)_", file.name)
        found[int(rank[1]) if rank else 0] = file
    if not found:
        raise FileNotFoundError(f"{folder}: no '*_{kind}_states.pt' is in it: copy them all")
    for rank_number in range(max(found) + 1):
        if rank_number not in found:
            example = found[max(found)].name
            raise FileNotFoundError(
                f"{folder}: the '*_{kind}_states.pt' of rank {rank_number} is missing, next to "
                f"{example}: copy the files of all ranks"
            )
    return [found[rank_number] for rank_number in range(len(found))]


class _Reader:
    """Puts the parameters of one checkpoint together."""

    def __init__(self, path: Place, folder: Place, ranks: list[Any], models: list[Any]) -> None:
        self.path, self.folder, self.models = path, folder, models
        self.states = [_get(rank, "optimizer_state_dict", folder) for rank in ranks]
        stage = _get(self.states[0], "zero_stage", folder)
        self.stage = int(stage.args[0]) if isinstance(stage, Inert) else int(stage)
        count = _get(self.states[0], "partition_count", folder)
        self.world_size = max(count) if isinstance(count, list) else int(count)
        if self.world_size != len(ranks):
            raise FileNotFoundError(
                f"{folder}: {self.world_size} ranks wrote it, and there are '*_optim_states.pt' of "
                f"{len(ranks)}: copy the files of all ranks"
            )
        # Where parameters are sharded too, each is cut by itself; elsewhere a group's vector is.
        self.cuts_each = placement_of(self.stage).parameters is Placement.SHARDED
        if self.cuts_each and len(models) != len(ranks):
            raise FileNotFoundError(f"{folder}: '*_model_states.pt' of some ranks are missing")
        key = "fp32_flat_groups" if self.cuts_each else "single_partition_of_fp32_groups"
        self.masters = [list(_get(state, key, folder)) for state in self.states]
        self.shapes = [dict(group) for group in _get(models[0], "param_shapes", folder)]
        self.places = self._place()

    def view(self) -> View:
        weights = self._weights()
        rest = {k: v for k, v in self.models[0].items() if k not in _OWN_KEYS}
        record = {"stage": self.stage, "world_size": self.world_size}
        record["version"] = f"DeepSpeed {self.models[0].get('ds_version', '?')}"
        view = View(self.path, "deepspeed", weights, [], rest, record)
        try:
            optimizer = self._optimizer()
        except ValueError as error:
            view.broken.append(error)
            return view
        if optimizer is None:
            view.missing.append(f"{self.folder}: optimizer state")
        else:
            view.optimizers.append(optimizer)
        return view

    def _place(self) -> dict[str, tuple[int, int]]:
        """Say for each parameter its vector, and where in that it starts.

        The vector of a group at stages 1 and 2; 0, for all vectors of a rank, at stage 3.
        """
        places: dict[str, tuple[int, int]] = {}
        at = 0
        paddings = self.states[0].get("param_alignment_paddings")
        for number, group in enumerate(self.shapes):
            if not self.cuts_each:
                at = 0
            for position, (name, shape) in enumerate(group.items()):
                places[name] = (0 if self.cuts_each else number, at)
                numel = math.prod(shape)
                at += -(-numel // self.world_size) if self.cuts_each else numel
                if paddings and not self.cuts_each:
                    at += paddings[number][position]
        return places

    def _gather(self, name: str, vectors: Sequence[Sequence[TensorEntry]]) -> TensorEntry:
        """Make the entry of a parameter, or of its state, from the vectors of all ranks."""
        number, start = self.places[name]
        shape = next(tuple(group[name]) for group in self.shapes if name in group)
        where = f"{self.folder}: '{name}'"
        numel = math.prod(shape)
        if not self.cuts_each:
            parts = _cut([rank[number] for rank in vectors], start, start + numel, where)
        else:
            share = -(-numel // self.world_size)
            parts = []
            for rank, flats in enumerate(vectors):
                count = max(min(share, numel - rank * share), 0)
                parts += _cut(flats, start, start + count, where)
        dtype = vectors[0][number].dtype
        return TensorEntry(where, shape, dtype, (tuple(parts) or where, shape), lambda: parts)

    def _weights(self) -> dict[str, Any]:
        module: dict[str, Any] = _get(self.models[0], "module", self.folder)
        ties = dict(self.models[0].get("shared_params") or {})
        weights: dict[str, Any] = {}
        for name in dict.fromkeys([*module, *self.places, *ties]):
            source = name
            while source in ties and source not in self.places:
                source = ties[source]
            if source in self.places:
                value: Any = self._gather(source, self.masters)
            elif source in (self.models[0].get("frozen_param_shapes") or {}):
                value = self._frozen(source)
            elif source in module:
                value = module[source]
            else:
                raise ValueError(f"{self.folder}: key '{name}' is tied to '{source}', not in it")
            weights[name.removeprefix(_PREFIX)] = value
        return weights

    def _frozen(self, name: str) -> TensorEntry:
        shape = tuple(self.models[0]["frozen_param_shapes"][name])
        models = self.models if self.cuts_each else self.models[:1]
        parts = [model["frozen_param_fragments"][name] for model in models]
        where = f"{self.folder}: '{name}'"
        ranges = _cut(parts, 0, math.prod(shape), where)
        identity = (tuple(ranges) or where, shape)
        return TensorEntry(where, shape, parts[0].dtype, identity, lambda: ranges)

    def _optimizer(self) -> dict[str, Any] | None:
        """Rebuild the optimizer's state dict, keyed by name."""
        key = "optimizer_state_dict" if self.cuts_each else "base_optimizer_state"
        inner = [state.get(key) for state in self.states]
        if not all(isinstance(state, dict) and "state" in state for state in inner):
            return None
        groups = [
            {**group, "params": [name.removeprefix(_PREFIX) for name in names]}
            for group, names in zip(inner[0]["param_groups"], self.shapes, strict=False)
        ]
        states: dict[str, dict[str, Any]] = {}
        for name in self.places:
            number = self._vector_of(name)
            mine = inner[0]["state"].get(number, {})
            made = {}
            for kind, value in mine.items():
                made[kind] = value
                if not isinstance(value, TensorEntry):
                    continue
                if value.shape and value.numel == self.masters[0][number].numel:
                    made[kind] = self._gather(name, self._state_vectors(inner, kind))
                else:
                    # One for the whole vector; steps that shared memory would count twice.
                    made[kind] = replace(value, identity=(name, kind))
            states[name.removeprefix(_PREFIX)] = made
        return {"state": states, "param_groups": groups}

    def _state_vectors(self, inner: list[Any], kind: str) -> list[list[TensorEntry]]:
        try:
            numbers = range(len(self.masters[0]))
            return [[state["state"][n][kind] for n in numbers] for state in inner]
        except KeyError as error:
            raise ValueError(
                f"{self.folder}: key {error} is missing in the optimizer state '{kind}' of a rank: "
                "pass --weights-only to leave it out"
            ) from error

    def _vector_of(self, name: str) -> int:
        number, start = self.places[name]
        if not self.cuts_each:
            return number
        for vector, flat in enumerate(self.masters[0]):
            if start < flat.numel:
                return vector
            start -= flat.numel
        return len(self.masters[0]) - 1


def _get(holder: Any, key: str, folder: Place) -> Any:
    if not isinstance(holder, dict) or key not in holder:
        raise ValueError(f"{folder}: key '{key}' is missing in its files: not a ZeRO checkpoint")
    return holder[key]


def _cut(vectors: Sequence[TensorEntry], start: int, stop: int, where: str) -> list[Segment]:
    """Find the ranges of elements ``start`` to ``stop`` of vectors that lie end to end."""
    parts: list[Segment] = []
    for vector in vectors:
        first, last = max(start, 0), min(stop, vector.numel)
        if first < last:
            whole = vector.locate()
            assert whole is not None and len(whole) == 1
            size = vector.dtype.itemsize
            at = whole[0].start + first * size
            parts.append(Segment(whole[0].file, at, (last - first) * size))
        start, stop = start - vector.numel, stop - vector.numel
    if stop > 0:
        raise ValueError(f"{where}: the ranks' files end {stop} elements before it does")
    return parts
