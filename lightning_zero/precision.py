"""The precision plugin of ``ZeroStrategy``: the stock one, with clipping that knows of shards."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine.engine import ZeroEngine

_SUPPORTED = ("32-true", "64-true", "bf16-mixed")


class ZeroPrecision(Precision):
    """Wraps the plugin that Lightning chose for ``Trainer(precision=...)``.

    Dtypes and autocast stay that plugin's business. Clipping is done here, since a norm must be
    taken over all ranks. ``ZeroStrategy`` wraps by itself.

    Args:
        inner: The stock plugin, of precision ``32-true``, ``64-true`` or ``bf16-mixed``.

    Attributes:
        engine: Set by the strategy while a module is sharded.

    Raises:
        NotImplementedError: For any other precision.
    """

    def __init__(self, inner: Precision | None = None) -> None:
        self.inner = inner if inner is not None else Precision()
        if self.inner.precision not in _SUPPORTED:
            raise NotImplementedError(
                f"precision={self.inner.precision!r} is not supported by the zero strategies yet: "
                f"use one of {', '.join(map(repr, _SUPPORTED))}."
            )
        self.precision = self.inner.precision
        self.engine: ZeroEngine | None = None

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

    @override
    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        with nullcontext() if self.engine is None else self.engine.backward():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.engine is None:
            return super().clip_grad_by_value(optimizer, clip_val)
        self.engine.clip_by_value(self.main_params(optimizer), clip_val)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.engine is None:
            return super().clip_grad_by_norm(optimizer, clip_val)
        self.engine.clip_by_norm(self.main_params(optimizer), clip_val)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
