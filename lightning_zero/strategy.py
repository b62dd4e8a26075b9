"""Lightning's hooks, mapped onto the engine."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.optimizer import _optimizer_to_device, _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, MPSAccelerator, XLAAccelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint.keeper import Checkpoints, StateDictType
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.kinds import OptimizerSharding
from lightning_zero.engine.numerics import Cast
from lightning_zero.engine.parameter import ZeroParameter
from lightning_zero.engine.placement import Placement, Stage, placement_of
from lightning_zero.engine.summary import Stretch
from lightning_zero.engine.units import WrapPolicy
from lightning_zero.host import available_memory, device_memory
from lightning_zero.precision import DtypeName, ZeroPrecision

REPLICATED = Placement.REPLICATED
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ZeroStrategy(DDPStrategy):
    """Trains any LightningModule sharded in one of the three ZeRO stages.

    Launchers, samplers, ``sync_batchnorm``, ``process_group_backend`` and ``timeout`` are those of
    ``DDPStrategy``.

    Args:
        stage: 1 shards optimizer state, 2 gradients as well, 3 parameters as well
            (arXiv 1910.02054).
        auto_wrap_policy: What is gathered and released together at stage 3. ``"auto"``: repeated
            blocks and large layers; ``"layers"``: every layer; ``"none"``: the whole module; one or
            several classes or their names (``Block``, ``my.Block``); or a function as
            ``FSDPStrategy`` takes it, or its import path.
        bucket_mb: Megabytes of parameters that are reduced together at stages 1 and 2.
        prefetch: Whether to gather the next unit while the one before it computes.
        broadcast_buffers: Whether rank 0's buffers replace the others' before forward passes.
        reduce_every_backward: Under gradient accumulation, whether stages 2 and 3 reduce every
            micro-batch (less memory) or only the last one (less traffic).
        optimizer_sharding: ``"auto"`` lets optimizers that are known to update each element by
            itself step on shards, and every other one on whole parameters, each on one rank;
            ``"elementwise"`` and ``"whole"`` choose one of the two for all.
        eval_weights: ``"gathered"`` keeps the weights whole during validation, test and prediction
            if they fit in half of the free memory, so that ranks may run different numbers of
            forward passes; ``"sharded"`` gathers them for each.
        restore_weights: Whether the module gets its full weights back on the CPU of every rank at
            the end. ``"auto"``: if they fit in half of the host's free memory.
        cast: Under ``bf16-mixed`` and ``16-mixed``, what is held in half precision. ``"auto"``:
            what autocast would cast anyway, so the numbers are those of ``ddp``; ``"all"``: all,
            the memory of the paper; ``"none"``: nothing. See ``ZeroPrecision``.
        reduce_dtype: In which dtype gradients travel and are summed. Default: fp32, or their own
            if that is wider.
        fp32_master: Whether ``bf16-true`` and ``16-true`` update, and save, sharded fp32 masters.
        log_grad_norm: Whether to log the global norm of the gradients before clipping, in every
            step, as ``grad_norm``, or ``grad_norm/0`` and so on if there are several optimizers.
        state_dict_type: What ``trainer.save_checkpoint`` and ``ModelCheckpoint`` write. ``"full"``:
            one file as ``ddp`` writes it, collected by rank 0. ``"sharded"``: a folder into which
            every rank writes its part.
        async_save: Whether saving a sharded checkpoint only waits for a copy on the CPU, and
            writes in the background.
        stall_timeout: Seconds that a wait for other ranks may last before it becomes an error that
            says what each rank waits for.
        accelerator: The kind of device. The Trainer sets it from its own argument of that name, as
            it does the next three.
        parallel_devices: The devices of this node, for example ``["cuda:0", "cuda:2"]``.
        cluster_environment: How ranks find each other, for example ``SLURMEnvironment``.
        checkpoint_io: How full checkpoint files are written and read.
        precision_plugin: A ``ZeroPrecision``, or a stock plugin, which gets wrapped in one.
        process_group_backend: Of ``torch.distributed``. Default: ``"gloo"`` on CPU, ``"nccl"`` on
            GPU.
        timeout: Of Lightning's own process group, in YAML as ``"0:30:00"``. The waits of the
            strategy have ``stall_timeout``.
        start_method: How to start the ranks of this node: ``"popen"`` runs the script once more for
            each; ``"spawn"``, ``"fork"`` and ``"forkserver"`` as in Python's ``multiprocessing``.

    Raises:
        ValueError: If an argument is out of its range, or the accelerator cannot be used.
        RuntimeError: If a name in ``parallel_devices`` is no device.
    """

    def __init__(
        self,
        stage: Stage = 3,
        auto_wrap_policy: WrapPolicy = "auto",
        bucket_mb: float = 25.0,
        prefetch: bool = True,
        broadcast_buffers: bool = True,
        reduce_every_backward: bool = True,
        optimizer_sharding: OptimizerSharding = "auto",
        eval_weights: Literal["sharded", "gathered"] = "sharded",
        restore_weights: Literal["auto", "always", "never"] = "auto",
        cast: Cast = "auto",
        reduce_dtype: DtypeName | None = None,
        fp32_master: bool = False,
        log_grad_norm: bool = False,
        state_dict_type: StateDictType = "full",
        async_save: bool = False,
        stall_timeout: float = 300.0,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device | str] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
    ) -> None:
        self._check_arguments(
            bucket_mb=bucket_mb,
            stall_timeout=stall_timeout,
            optimizer_sharding=optimizer_sharding,
            eval_weights=eval_weights,
            restore_weights=restore_weights,
            state_dict_type=state_dict_type,
        )
        if async_save and state_dict_type != "sharded":
            raise ValueError("async_save=True needs state_dict_type='sharded'.")
        self._checkpoints = Checkpoints(state_dict_type, async_save, stall_timeout)
        self._placement = placement_of(stage)
        self._check_accelerator(accelerator)
        self._settings = ZeroPrecision(
            cast=cast, reduce_dtype=reduce_dtype, fp32_master=fp32_master
        )
        self._logs_grad_norm = log_grad_norm
        if isinstance(precision_plugin, ZeroPrecision):
            self._check_settings(precision_plugin)
            if precision_plugin.is_default:  # Trainer(precision=...) has the word
                self._settings, precision_plugin = precision_plugin, None
        devices = None if parallel_devices is None else [torch.device(d) for d in parallel_devices]
        super().__init__(
            accelerator=accelerator,
            parallel_devices=devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.strategy_name = f"zero{stage}"
        self._eval_weights = eval_weights
        self._restore_weights = restore_weights
        self._engine: ZeroEngine | None = None
        self._trained: ZeroEngine | None = None  # the one that knows the optimizers
        self._loaded: Mapping[str, Tensor] = {}  # values for masters, until there is an engine
        self._engine_settings: dict[str, Any] = dict(
            stage=stage,
            auto_wrap_policy=auto_wrap_policy,
            bucket_mb=bucket_mb,
            prefetch=prefetch,
            broadcast_buffers=broadcast_buffers,
            reduce_every_backward=reduce_every_backward,
            optimizer_sharding=optimizer_sharding,
            stall_timeout=stall_timeout,
        )
        self._failed = False
        self._fit: Stretch | None = None

    @staticmethod
    def _check_arguments(
        bucket_mb: float,
        stall_timeout: float,
        optimizer_sharding: str,
        eval_weights: str,
        restore_weights: str,
        state_dict_type: str,
    ) -> None:
        for name, number in dict(bucket_mb=bucket_mb, stall_timeout=stall_timeout).items():
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
                raise ValueError(f"{name}={number!r} must be a positive number.")
        for name, word, words in (
            ("optimizer_sharding", optimizer_sharding, ("auto", "elementwise", "whole")),
            ("eval_weights", eval_weights, ("sharded", "gathered")),
            ("restore_weights", restore_weights, ("auto", "always", "never")),
            ("state_dict_type", state_dict_type, ("full", "sharded")),
        ):
            if word not in words:
                raise ValueError(f"{name}={word!r} must be one of {', '.join(map(repr, words))}.")

    def _check_settings(self, plugin: ZeroPrecision) -> None:
        """Refuse settings of precision that stand in the strategy beside a plugin of the user's."""
        for name in ("cast", "reduce_dtype", "fp32_master"):
            mine, theirs = getattr(self._settings, name), getattr(plugin, name)
            if plugin is not self._settings and mine not in (theirs, "auto", None, False):
                raise ValueError(
                    f"{name}={mine!r} of the strategy and {name}={theirs!r} of ZeroPrecision: "
                    "set it in the plugin, since there is one."
                )

    @staticmethod
    def _check_accelerator(accelerator: Accelerator | None) -> None:
        if isinstance(accelerator, (MPSAccelerator, XLAAccelerator)):
            raise ValueError(
                f"The zero strategies cannot run on {type(accelerator).__name__}, which several "
                "processes cannot share: use accelerator='cpu', or accelerator='gpu' with CUDA."
            )

    @property
    def engine(self) -> ZeroEngine:
        """The engine of the module that is set up.

        Raises:
            RuntimeError: Before set-up.
        """
        if self._engine is None:
            raise RuntimeError("There is no engine before Trainer.fit, validate, test or predict.")
        return self._engine

    # Parts that Lightning plugs in

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        self._check_accelerator(accelerator)
        self._accelerator = accelerator

    @property
    @override
    def precision_plugin(self) -> ZeroPrecision:
        return self._zero_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, ZeroPrecision):
            self._check_settings(plugin)
            self._zero_precision = plugin
        else:
            self._zero_precision = (
                ZeroPrecision() if plugin is None else self._settings.wrapping(plugin)
            )
        # Trainer takes a plugin that stands here for the user's, and then ignores `precision`.
        self._precision_plugin = None if plugin is None else self._zero_precision

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        if self._engine is not None and self._engine is self._trained:
            for optimizer in optimizers:
                self._engine.attach(optimizer)
        self._optimizers = optimizers
        self._lightning_optimizers = [
            LightningOptimizer._to_lightning_optimizer(optimizer, self) for optimizer in optimizers
        ]

    # Set-up and teardown

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self._failed = False
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._takes_io and self._checkpoints.sharded:
            raise ValueError(
                f"{type(self.checkpoint_io).__name__} writes files and state_dict_type='sharded' "
                "folders, so it would never be asked: leave it out, or use "
                "state_dict_type='full'. In the background folders are written by async_save=True."
            )
        self.accelerator.setup(trainer)
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.precision_plugin.convert_module(self.model)
        self._start_engine(fitting)
        self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _start_engine(self, fitting: bool) -> None:
        assert self.model is not None
        engine = self._engine
        if engine is None or engine.module is not self.model or not engine.live:
            self._close_engines(fitting)
            engine = ZeroEngine(
                self.model,
                device=self.root_device,
                numerics=self.precision_plugin.numerics(
                    compiled=getattr(self.model, "_compiler_ctx", None) is not None
                ),
                **self._engine_settings,
            )
            if self._loaded:
                self._checkpoints.load_masters(engine, self._loaded)
            rank_zero_info(engine.summary())
        self._engine = engine
        self._loaded = {}
        self.precision_plugin.attach(engine, self.root_device)
        self.precision_plugin.logs_grad_norm = self._logs_grad_norm
        if fitting:
            self._trained = engine

    def _close_engines(self, fitting: bool) -> None:
        """Close what nobody needs: a checkpoint may ask for optimizer state until a new fit."""
        if self._engine is not None and self._engine is not self._trained:
            self._engine.close()
        if fitting and self._trained is not None:
            self._trained.close()
            self._trained = None
        self._engine = None

    @override
    def model_to_device(self) -> None:
        # The parameters are there already; buffers and metric states follow. `module.to` would ask
        # every sharded parameter for its values.
        assert self.model is not None
        device = self.root_device

        def move(tensor: Tensor) -> Tensor:
            return tensor if isinstance(tensor, ZeroParameter) else tensor.to(device)

        self.model._apply(move)  # type: ignore[no-untyped-call]

    @override
    def teardown(self) -> None:
        error = self._finish_saving()
        stays = self._failed
        if self._engine is None or not self._engine.live:
            pass
        elif self._failed:  # the other ranks may be anywhere: no collectives
            self._engine.abandon()
        elif self._restores():
            self._engine.restore()
        else:
            stays = True
            rank_zero_warn(
                "The full weights may not fit in the host's memory on every rank, so the module "
                "stays sharded. trainer.save_checkpoint() writes them to a file; reading a "
                "parameter gathers it, if every rank does; "
                "ZeroStrategy(restore_weights='always') restores them regardless."
            )
        self.precision_plugin.attach(None, self.root_device)
        if stays:
            # Strategy.teardown moves the module to the CPU, which would gather all of it, or, after
            # an error, fail in its own way.
            module, self._lightning_module = self._lightning_module, None
            super().teardown()
            self._lightning_module = module
        else:
            super().teardown()
        if error is not None:
            raise error

    def _finish_saving(self) -> Exception | None:
        """Wait for the save under way; return its error unless there is one that came before."""
        self._checkpoints.forget_rng()
        try:
            self._checkpoints.close()
        except Exception as error:  # another rank may have gone
            if not self._failed:
                return error
            rank_zero_warn(str(error))
        return None

    def _restores(self) -> bool:
        if self._restore_weights != "auto":
            return self._restore_weights == "always"
        engine = self.engine
        here = not any(unit.shards_parameters for unit in self.engine.units)
        if here and self.root_device.type == "cpu":
            return True
        needed = engine.full_nbytes() * self.num_processes
        return engine.agree(needed <= available_memory() / 2)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    @override
    def on_train_start(self) -> None:
        self._fit = Stretch(self.engine)

    @override
    def on_train_end(self) -> None:
        if self._fit is not None:
            rank_zero_info(self._fit.line())
            self._fit = None

    # Steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        # Under manual optimization DDPStrategy broadcasts buffers before the first step only.
        syncs = self.lightning_module.automatic_optimization
        with self.engine.forward(syncs_buffers=syncs):
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.engine.forward():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.engine.forward():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.engine.forward():
            return super().predict_step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        self._hold_for_evaluation()

    @override
    def on_validation_end(self) -> None:
        self.engine.let_go()

    @override
    def on_test_start(self) -> None:
        self._hold_for_evaluation()

    @override
    def on_test_end(self) -> None:
        self.engine.let_go()

    @override
    def on_predict_start(self) -> None:
        self._hold_for_evaluation()

    @override
    def on_predict_end(self) -> None:
        self.engine.let_go()

    def _hold_for_evaluation(self) -> None:
        if self._eval_weights == "sharded" or self.engine.placement.parameters is REPLICATED:
            return
        ranks = self.num_processes if self.root_device.type == "cpu" else 1
        needed = self.engine.held_nbytes() * ranks
        if self.engine.agree(needed <= device_memory(self.root_device) / 2):
            self.engine.hold()
        else:
            rank_zero_warn(
                "eval_weights='gathered': the full weights do not fit in half of the free memory, "
                "so they stay sharded."
            )

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.engine.no_sync():
            yield

    def grad_norm(self) -> Tensor:
        """Return the global norm of the gradients in the last optimizer step, before clipping.

        If nothing clips and ``log_grad_norm`` is off, it is taken now, of the gradients as they
        are, over all ranks, so every rank has to call this.

        Returns:
            A scalar, fp32 at least: the 2-norm over the parameters of the optimizer that stepped
            last (before the first step: of the module), tied ones counted once.

        Raises:
            RuntimeError: Before and after a run.
        """
        if self.precision_plugin.engine is None:
            raise RuntimeError("There are no gradients before and after Trainer.fit.")
        return self.precision_plugin.global_norm()

    # State

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._engine is None or not self._engine.live:
            return super().lightning_module_state_dict()
        return self._checkpoints.module_state(self._engine, self.lightning_module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        sharded = None if self._trained is None else self._trained.sharded(optimizer)
        if self._trained is None or sharded is None:
            return super().optimizer_state(optimizer)
        return self._checkpoints.optimizer_state(self._trained, sharded)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        assert self.lightning_module is not None
        engine = self._trained or self._engine
        self._checkpoints.add_record(checkpoint, engine, self.lightning_module, self.optimizers)
        path = self.broadcast(filepath)
        if self._checkpoints.sharded:
            if storage_options is not None:
                raise TypeError(
                    "storage_options are for one file, which a CheckpointIO writes: leave them "
                    "out, or use state_dict_type='full'."
                )
            self._checkpoints.save(checkpoint, path, engine)
            callbacks = self.lightning_module.trainer.checkpoint_callbacks
            if any(getattr(callback, "save_last", None) == "link" for callback in callbacks):
                self._checkpoints.wait()  # the callback makes the link as soon as this returns
            return
        write = None
        if self._takes_io or storage_options is not None or not _is_local_file_protocol(path):
            write = partial(super().save_checkpoint, checkpoint, path, storage_options)
        self._checkpoints.save_file(checkpoint, path, write)

    @property
    def _takes_io(self) -> bool:
        return type(self.checkpoint_io) is not TorchCheckpointIO

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._takes_io and not self._checkpoints.sharded:
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._checkpoints.remove(filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._checkpoints.wait()
        path = self.broadcast(checkpoint_path)
        trust = weights_only is False
        load = None
        if self._takes_io:
            load = partial(super().load_checkpoint, weights_only=weights_only)
        return self._checkpoints.load(path, trust, load, looks=self.local_rank == 0)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        state = checkpoint["state_dict"]
        engine = self._engine if self._engine is not None and self._engine.live else None
        # Before set-up, rank 0's values are the ones that count.
        skips = engine is None and self.global_rank != 0
        masters = engine if self.precision_plugin.fp32_master else None
        module = self.lightning_module
        self._checkpoints.load_module_state(masters, module, state, strict, skips)
        if engine is None and self.precision_plugin.fp32_master:
            self._loaded = state

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        self._checkpoints.load_optimizer_states(self.engine, self.optimizers, states)
        for optimizer in self.optimizers:
            _optimizer_to_device(optimizer, self.root_device)
        # From here to the first epoch an uninterrupted run draws nothing either.
        self._checkpoints.restore_rng(self.root_device)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._checkpoints.restore_rng_in_epoch(self.root_device)

    # Names

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        methods: dict[str, StartMethod] = {
            "": "popen",
            "_spawn": "spawn",
            "_fork": "fork",
            "_notebook": "fork",
        }
        for stage in (1, 2, 3):
            for suffix, start_method in methods.items():
                strategy_registry.register(
                    f"zero{stage}{suffix}",
                    cls,
                    description=f"ZeRO stage {stage}, processes started by {start_method!r}",
                    override=True,
                    stage=stage,
                    start_method=start_method,
                )


def register() -> None:
    """Make the names known to ``Trainer(strategy=...)``."""
    ZeroStrategy.register_strategies(StrategyRegistry)
