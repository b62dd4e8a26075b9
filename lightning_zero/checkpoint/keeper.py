"""What one strategy saves and loads: full or sharded, with a record of who wrote it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _load, get_filesystem
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.agreement import together, told_by_first
from lightning_zero.checkpoint.folder import recover, remove, unfinished_saves
from lightning_zero.checkpoint.full import module_state, optimizer_state
from lightning_zero.checkpoint.lazy import read_left
from lightning_zero.checkpoint.load import load_lazily, skipping
from lightning_zero.checkpoint.optimizers import reordered
from lightning_zero.checkpoint.places import Place, place_of
from lightning_zero.checkpoint.read_sharded import FORMAT, RECORD
from lightning_zero.checkpoint.rng import rng_state, set_rng_state
from lightning_zero.checkpoint.saver import ShardedSaver
from lightning_zero.checkpoint.sharded import (
    aliases,
    sharded_module_state,
    sharded_optimizer_state,
)
from lightning_zero.checkpoint.shards import TensorShard
from lightning_zero.checkpoint.writers import write_file
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.objects import gather
from lightning_zero.engine.optimizer import ShardedOptimizer

_LOADERS = "combined_loader"

Writer = Callable[[], None]
StateDictType = Literal["full", "sharded"]


class Checkpoints:
    """Saves in one way and loads all.

    Args:
        kind: ``"full"`` or ``"sharded"``.
        asynchronous: Whether sharded ones are written in the background.
        timeout: Seconds that ranks wait for each other.

    Attributes:
        sharded: Whether folders are written.
    """

    def __init__(self, kind: StateDictType, asynchronous: bool, timeout: float) -> None:
        self.sharded = kind == "sharded"
        self._saver = ShardedSaver(asynchronous, timeout)
        self._timeout = timeout
        self._path = ""
        self._names: list[list[list[str]] | None] = []
        self._rng: dict[str, Any] | None = None
        self._rng_in_epoch: dict[str, Any] | None = None

    # Saving

    def module_state(self, engine: ZeroEngine, module: nn.Module) -> dict[str, Any]:
        """Return the module's state as it is to be saved."""
        return (sharded_module_state if self.sharded else module_state)(engine, module)

    def optimizer_state(self, engine: ZeroEngine, optimizer: ShardedOptimizer) -> dict[str, Any]:
        """Return an optimizer's state as it is to be saved."""
        collect = sharded_optimizer_state if self.sharded else optimizer_state
        return collect(engine, optimizer)

    def add_record(
        self,
        checkpoint: dict[str, Any],
        engine: ZeroEngine | None,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Note in a checkpoint who writes it, and the random states if it is of a run to resume."""
        from lightning_zero import __version__

        if engine is None:
            return
        record: dict[str, Any] = {
            "format": FORMAT,
            "version": __version__,
            "stage": engine.stage,
            "world_size": engine.collectives.world_size,
            "aliases": _tied(checkpoint.get("state_dict", {}), aliases(module)),
        }
        if "optimizer_states" in checkpoint and not self.sharded:  # which has only numbers
            attached = [engine.sharded(optimizer) for optimizer in optimizers]
            record["names"] = [sharded and _names_by_group(sharded) for sharded in attached]
        if "loops" in checkpoint and not engine.abandoned:
            mine = [rng_state(engine.collectives.device), _loaders(checkpoint).get(_LOADERS)]
            states = gather(engine.collectives, mine, "random states and loaders")
            record["rng"] = [state for state, _ in states]
            if any(loaders for _, loaders in states):
                record["loaders"] = [loaders for _, loaders in states]
        checkpoint[RECORD] = record

    def save(self, checkpoint: dict[str, Any], path: Any, engine: ZeroEngine | None) -> None:
        """Write a folder; every rank must call it."""
        live = engine is not None and engine.live
        if engine is not None and live:
            engine.agree(True)  # a rank that does not come is reported as for every other wait
        self._saver.save(checkpoint, _place(path))
        if not live:  # nothing will wait later
            self._saver.close()

    def save_file(self, checkpoint: dict[str, Any], path: Any, write: Writer | None) -> None:
        """Write a file on rank 0; every rank must call it.

        Args:
            checkpoint: What the Trainer dumped.
            path: The file to make.
            write: What writes, if the user has chosen something.
        """
        together = self._saver.together(path)
        place = _place(path)
        with together:
            if together.is_first and write is None and isinstance(place, Path):
                write_file(place, checkpoint)
            elif write is not None:
                write()

    def remove(self, path: Any) -> None:
        """Remove a checkpoint once the save under way, if there is one, has succeeded."""
        place = _place(path)

        def act() -> None:
            try:
                if isinstance(place, Path):
                    remove(place)
                else:
                    TorchCheckpointIO().remove_checkpoint(place)
            except Exception as error:  # of whatever file system
                rank_zero_warn(f"The checkpoint {path} could not be removed: {error}")

        self._saver.after(act)

    def wait(self) -> None:
        """Wait for the save under way."""
        self._saver.wait()

    def forget_rng(self) -> None:
        """Leave the random numbers of what was loaded to the run that has ended."""
        self._rng = self._rng_in_epoch = None

    def close(self) -> None:
        """Wait, and give up what saving holds."""
        self._saver.close()

    # Loading

    def load(
        self,
        path: Any,
        trust: bool,
        plugin: Callable[[Any], dict[str, Any]] | None,
        looks: bool = True,
    ) -> dict[str, Any]:
        """Open a checkpoint of any kind. Every rank must call it.

        Args:
            path: The file or folder.
            trust: Whether pickles in it may run code.
            plugin: What loads files instead, if the user has chosen something.
            looks: Whether this rank looks for all files of a folder; one of each host must.
        """
        self._path, self._names = str(path), []
        with self._errors("opening it"):
            place = _found(path, plugin is not None)
            if place is not None:
                checkpoint, self._names = load_lazily(place, trust, looks)
            else:
                load = plugin or functools.partial(
                    _load, map_location="cpu", weights_only=not trust
                )
                checkpoint = load(path)
            self._take_record(checkpoint)
        self._compare_with_first(checkpoint)
        return checkpoint

    def _compare_with_first(self, checkpoint: Mapping[str, Any]) -> None:
        """Make sure that no rank has opened what replaced the checkpoint of another."""
        mine = f"step {checkpoint.get('global_step')} of epoch {checkpoint.get('epoch')}"
        first = told_by_first(mine, f"loading {self._path}", self._timeout)
        with self._errors("comparing it"):
            if mine != first:
                raise ValueError(
                    f"rank 0 has opened {first} and another rank {mine}: it was replaced "
                    "meanwhile, or the nodes have different files there. Load it again"
                )

    def load_module_state(
        self,
        engine: ZeroEngine | None,
        module: nn.Module,
        state: Mapping[str, Any],
        strict: bool,
        skips: bool,
    ) -> None:
        """Load the module's state. Every rank must call it.

        Args:
            engine: The engine, once it shards the module.
            module: The module.
            state: The state dict of a checkpoint.
            strict: Whether missing and unexpected keys are errors.
            skips: Whether this rank gets its values from rank 0 later.
        """
        with self._errors("loading the weights"):
            read_left(module)  # of on_load_checkpoint
            skips = skips and not _has_code_after_loading(module)
            with skipping(state) if skips else nullcontext(state) as values:
                module.load_state_dict(values, strict=strict)
            read_left(module)
            if engine is not None:
                engine.schedule.rest()
                engine.load_masters(state)

    def load_masters(self, engine: ZeroEngine, state: Mapping[str, Any]) -> None:
        """Give masters the values of a state that was loaded before. Every rank must call it."""
        with self._errors("loading the master weights"):
            engine.load_masters(state)

    def load_optimizer_states(
        self, engine: ZeroEngine, optimizers: Sequence[Optimizer], states: Sequence[Any]
    ) -> None:
        """Load the optimizers' states. Every rank must call it."""
        if len(states) != len(optimizers):
            raise ValueError(
                f"{self._path}: it has the states of {len(states)} optimizers, and "
                f"configure_optimizers returned {len(optimizers)}."
            )
        names = [*self._names, *[None] * len(states)]
        with self._errors("loading the optimizer's state"):
            for optimizer, state, saved in zip(optimizers, states, names, strict=False):
                sharded = engine.attach(optimizer)
                if saved is not None:
                    now = _names_by_group(sharded)
                    state = reordered(state, _first_names(saved, engine.module), now, self._path)
                sharded.load_state_dict(state)

    @contextmanager
    def _errors(self, doing: str) -> Generator[None, None, None]:
        """Raise errors on every rank, with the checkpoint's name in them."""
        with together(f"loading {self._path} ({doing})", self._timeout):
            try:
                yield
            except (ValueError, RuntimeError) as error:
                if self._path in str(error) or type(error) not in (ValueError, RuntimeError):
                    raise
                raise type(error)(f"{self._path}: {error}") from error

    def _take_record(self, checkpoint: dict[str, Any]) -> None:
        self._rng = self._rng_in_epoch = None
        record = checkpoint.get(RECORD, {})
        states, loaders = record.get("rng"), record.get("loaders")
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if states is None or len(states) != size:
            return
        self._rng = states[rank]
        if loaders is not None:  # Lightning saves those of rank 0 alone
            _loaders(checkpoint)[_LOADERS] = loaders[rank]
        if _ends_in_epoch(checkpoint):
            self._rng_in_epoch = self._rng

    def restore_rng(self, device: torch.device) -> None:
        """Go on with the random numbers of the run that was loaded."""
        state, self._rng = self._rng, None
        if state is not None:
            set_rng_state(state, device)

    def restore_rng_in_epoch(self, device: torch.device) -> None:
        """Do so again once the data loaders of a broken epoch have drawn theirs."""
        state, self._rng_in_epoch = self._rng_in_epoch, None
        if state is not None:
            set_rng_state(state, device)


def _has_code_after_loading(module: nn.Module) -> bool:
    """Whether somebody's code may look at weights once they are loaded, to derive other values."""
    for child in module.modules():
        if child._load_state_dict_post_hooks:
            return True
        for method in (type(child).load_state_dict, type(child)._load_from_state_dict):
            if method.__module__.split(".")[0] not in ("torch", "torchmetrics"):
                return True
    return False


def _loaders(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the states of stateful data loaders are, if there are any."""
    found: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return found


def _ends_in_epoch(checkpoint: Mapping[str, Any]) -> bool:
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return not progress.get("is_last_batch", True)


def _found(path: Any, has_plugin: bool) -> Place | None:
    """Hold a checkpoint that is to be read here; None for what only others understand."""
    if str(path).startswith(("http://", "https://")):  # Lightning lets torch.hub fetch it
        return None
    try:
        local = _place(path)
    except (ValueError, ImportError):
        if has_plugin:
            return None
        raise
    if isinstance(local, Path):
        recover(local)
    try:
        place = place_of(local)
    except FileNotFoundError:
        if has_plugin:
            return None
        raise FileNotFoundError(f"There is no checkpoint {path}.") from None
    if has_plugin and not place.is_dir():
        return None
    if isinstance(local, Path):
        _warn_of_unfinished(local)
    return place


def _warn_of_unfinished(path: Path) -> None:
    left = unfinished_saves(path.parent)
    if left:
        rank_zero_warn(
            f"{len(left)} save(s) beside {path} were killed before they were finished, and "
            f"are ignored: {', '.join(folder.name for folder in left)}. The next save into the "
            "same folder removes them."
        )


def _tied(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """Leave out names that are not saved, or with another value."""
    return {
        alias: name
        for alias, name in names.items()
        if alias in state and name in state and _is_same(state[alias], state[name])
    }


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, TensorShard) and isinstance(other, TensorShard):
        return one.local.is_set_to(other.local)
    return one is other


def _names_by_group(sharded: ShardedOptimizer) -> list[list[str]]:
    names = iter([slot.name for slot in sharded.slots()])
    groups = sharded.optimizer.param_groups
    return [list(itertools.islice(names, len(group["params"]))) for group in groups]


def _first_names(saved: list[list[str]], module: nn.Module) -> list[list[str]]:
    """Call tied parameters by the name that the engine uses."""
    first = aliases(module)
    return [[first.get(name, name) for name in names] for names in saved]


def _place(path: Any) -> Path | str:
    """Return a path on a local file system, or the URL of one elsewhere."""
    system = get_filesystem(path)
    protocols = [system.protocol] if isinstance(system.protocol, str) else system.protocol
    if {"file", "local"} & set(protocols):
        return Path(system._strip_protocol(str(path)))
    return str(path)
