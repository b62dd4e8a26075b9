"""The loss scale of fp16 training, on which all ranks agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine.engine import ZeroEngine


class ZeroGradScaler(GradScaler):
    """Torch's ``GradScaler`` over sharded gradients: an overflow on one rank is one on all.

    Growth, backoff and the names in ``state_dict`` are torch's.

    Args:
        like: A scaler whose settings are taken over.
        device: ``"cuda"`` or ``"cpu"``.

    Attributes:
        engine: Holds the gradients; without one this is torch's scaler.
    """

    def __init__(self, like: GradScaler, device: str) -> None:
        super().__init__(
            device=device,
            init_scale=like.get_scale(),
            growth_factor=like.get_growth_factor(),
            backoff_factor=like.get_backoff_factor(),
            growth_interval=like.get_growth_interval(),
            enabled=like.is_enabled(),
        )
        self.engine: ZeroEngine | None = None

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if self.engine is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.engine.unscale(params, inv_scale, found_inf)
        return {found_inf.device: found_inf}

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if self.engine is None or not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        # A fused optimizer that skips by itself makes state for a step that did not happen.
        if any(found.item() for found in state["found_inf_per_device"].values()):
            state["stage"] = OptState.STEPPED
            return None
        return super().step(optimizer, *args, **kwargs)
