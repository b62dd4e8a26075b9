"""The precision plugin of ``ZeroStrategy``: what Lightning's strings mean for sharded training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.numerics import Cast, Numerics
from lightning_zero.scaling import ZeroGradScaler

PrecisionName = Literal["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
DtypeName = Literal["fp32", "bf16", "fp16"]

_NAMES = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
_CASTS = ("auto", "all", "none")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class ZeroPrecision(Precision):
    """Wraps the plugin that Lightning chose for ``Trainer(precision=...)``.

    Autocast and the conversion of modules and inputs stay that plugin's business. Which parameters
    are held in half precision, the reduction of gradients, clipping and the loss scale are this
    one's, since they concern all ranks. ``ZeroStrategy`` wraps by itself.

    Args:
        precision: A stock plugin, or one of Lightning's strings. Default: what
            ``Trainer(precision=...)`` says; as ``Trainer(plugins=...)``, what the other arguments
            are for: ``"bf16-mixed"`` with ``cast="all"``, ``"bf16-true"`` with ``fp32_master``,
            and else ``"32-true"``.
        cast: Under ``bf16-mixed`` and ``16-mixed``, which parameters forward and backward passes
            hold in half precision, beside a sharded fp32 master. ``"auto"``: those that autocast
            would cast at each use anyway, so the numbers are those of ``ddp``. ``"all"``: all, and
            gradients too until the step: the memory of the ZeRO paper (arXiv 1910.02054, section
            3.1), other numbers. ``"none"``: none.
        reduce_dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``: in which gradients travel and are
            summed. Default: fp32, or their own dtype if that is wider.
        fp32_master: Under ``bf16-true`` and ``16-true``, whether the optimizer updates sharded fp32
            masters, which are also what checkpoints hold.

    Attributes:
        engine: Set by the strategy while a module is sharded.
        grad_norm: The norm of an optimizer's gradients in its last step, before clipping, if it was
            taken.
        logs_grad_norm: Whether to take and log it in every step.

    Raises:
        ValueError: If an argument is none of the words above.
        NotImplementedError: For a plugin of any other precision.
    """

    def __init__(
        self,
        precision: Precision | PrecisionName | None = None,
        *,
        cast: Cast = "auto",
        reduce_dtype: DtypeName | None = None,
        fp32_master: bool = False,
    ) -> None:
        _check_word("cast", cast, _CASTS)
        if reduce_dtype is not None:
            _check_word("reduce_dtype", reduce_dtype, tuple(_DTYPES))
        self.cast: Cast = cast
        self.reduce_dtype = reduce_dtype
        self.fp32_master = fp32_master
        self.is_default = precision is None
        if precision is None:
            meant = "bf16-mixed" if cast == "all" else "bf16-true" if fp32_master else "32-true"
            precision = _plugin_of(meant)
        self._wrap(_plugin_of(precision) if isinstance(precision, str) else precision)

    def _wrap(self, inner: Precision) -> None:
        if inner.precision not in _NAMES:
            raise NotImplementedError(
                f"precision={inner.precision!r} ({type(inner).__name__}) is not supported by the "
                f"zero strategies: use one of {', '.join(map(repr, _NAMES))}."
            )
        if not self.is_default:  # else Trainer(precision=...) has the word
            self._check_meaning(inner.precision)
        self.inner = inner
        self.precision = inner.precision
        self.scaler: ZeroGradScaler | None = None
        if isinstance(inner, MixedPrecision) and inner.scaler is not None:
            self.scaler = ZeroGradScaler(inner.scaler, inner.device)
        self.engine: ZeroEngine | None = None
        self.grad_norm: Tensor | None = None
        self._stepped: Any = None
        self.logs_grad_norm = False

    def _check_meaning(self, precision: str) -> None:
        """Refuse settings that mean nothing for a precision."""
        if self.cast == "all" and precision not in _AUTOCAST:
            raise ValueError(
                f"cast='all' has no meaning for precision={precision!r}: use "
                "precision='bf16-mixed' or '16-mixed', or leave cast at 'auto'."
            )
        if self.reduce_dtype == "fp16" and not precision.startswith("16-"):
            raise ValueError(
                f"reduce_dtype='fp16' with precision={precision!r} might overflow unnoticed, as "
                "there is no loss scale: use 'bf16' or 'fp32'."
            )
        if self.fp32_master and precision not in ("bf16-true", "16-true"):
            raise ValueError(
                f"fp32_master=True has no meaning for precision={precision!r}, whose masters "
                "are fp32 or wider: use precision='bf16-true' or '16-true', or leave it out."
            )

    def wrapping(self, inner: Precision) -> ZeroPrecision:
        """Return a plugin with these settings around another stock plugin.

        Raises:
            ValueError: If the settings mean nothing for its precision.
        """
        return ZeroPrecision(
            inner,
            cast=self.cast,
            reduce_dtype=self.reduce_dtype,
            fp32_master=self.fp32_master,
        )

    def numerics(self, compiled: bool) -> Numerics:
        """Say what the engine has to know.

        Args:
            compiled: Whether the whole module is compiled, so that autocast has to do all casts.
        """
        return Numerics(
            autocast=_AUTOCAST.get(self.precision),
            cast="none" if compiled else self.cast,
            reduce=None if self.reduce_dtype is None else _DTYPES[self.reduce_dtype],
            master=torch.float32 if self.fp32_master else None,
        )

    def attach(self, engine: ZeroEngine | None, device: torch.device) -> None:
        """Work with the gradients of an engine from now on, or with ordinary ones again."""
        self._check_meaning(self.precision)
        self.engine = engine
        if isinstance(self.inner, MixedPrecision) and self.inner.device != device.type:
            self.inner.device = device.type  # made from a string, before the device was known
            if self.scaler is not None:
                state, self.scaler = self.scaler, ZeroGradScaler(self.scaler, device.type)
                self.scaler.load_state_dict(state.state_dict())
        if self.scaler is not None:
            self.scaler.engine = engine

    # What stays the stock plugin's

    @override
    def convert_module(self, module: Module) -> Module:
        return self.inner.convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        return self.inner.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        return self.inner.convert_output(data)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.module_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return self.inner.forward_context()

    @override
    def teardown(self) -> None:
        self.inner.teardown()

    # Backward and step

    @override
    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    @override
    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        with nullcontext() if self.engine is None else self.engine.backward():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # the training step was skipped
            self._after_closure(model, optimizer)
            return result
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        step_output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return step_output

    # Clipping

    def global_norm(self) -> Tensor:
        """Return ``grad_norm``, or take it now, of the optimizer that stepped last."""
        assert self.engine is not None
        if self.grad_norm is not None:
            return self.grad_norm
        if self._stepped is not None:
            return self.engine.grad_norm(self.main_params(self._stepped))
        return self.engine.grad_norm(self.engine.module.parameters())

    @override
    def _after_closure(self, model: Any, optimizer: Any) -> None:
        self.grad_norm, self._stepped = None, optimizer
        super()._after_closure(model, optimizer)

    @override
    def _clip_gradients(
        self,
        model: Any,
        optimizer: Any,
        clip_val: int | float | None = None,
        gradient_clip_algorithm: GradClipAlgorithmType | None = None,
    ) -> None:
        if self.logs_grad_norm and self.engine is not None:
            self.grad_norm = self.engine.grad_norm(self.main_params(optimizer))
            optimizers = model.trainer.optimizers
            number = f"/{optimizers.index(optimizer)}" if len(optimizers) > 1 else ""
            model.log(f"grad_norm{number}", self.grad_norm)
        super()._clip_gradients(model, optimizer, clip_val, gradient_clip_algorithm)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.engine is None:
            return super().clip_grad_by_value(optimizer, clip_val)
        params = list(self.main_params(optimizer))
        if self.grad_norm is None:
            self.grad_norm = self.engine.grad_norm(params)
        self.engine.clip_by_value(params, clip_val)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.engine is None:
            return super().clip_grad_by_norm(optimizer, clip_val)
        norm = self.engine.clip_by_norm(self.main_params(optimizer), clip_val)
        if self.grad_norm is None:
            self.grad_norm = norm

    # State

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict() if self.scaler is None else self.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is None:
            self.inner.load_state_dict(state_dict)
        else:
            self.scaler.load_state_dict(state_dict)

    # Trainer names the state after the class; under the stock plugin's name others find it as well.

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.pop(type(self).__qualname__, None)
        if state is not None:
            checkpoint[type(self.inner).__qualname__] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get(type(self.inner).__qualname__)
        if state:
            self.load_state_dict(state)


def _check_word(name: str, word: object, words: tuple[str, ...]) -> None:
    if word not in words:
        raise ValueError(f"{name}={word!r} must be one of {', '.join(map(repr, words))}.")


def _plugin_of(name: str) -> Precision:
    """Make the stock plugin of a precision string."""
    _check_word("precision", name, _NAMES)
    if name == "64-true":
        return DoublePrecision()
    if name in ("bf16-true", "16-true"):
        return HalfPrecision(name)  # type: ignore[arg-type]
    if name in ("bf16-mixed", "16-mixed"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return MixedPrecision(name, device)  # type: ignore[arg-type]
    return Precision()
