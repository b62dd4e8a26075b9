"""The dtypes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Cast = Literal["auto", "all", "none"]
"""Which fp32 parameters have half-precision working values under autocast."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Dtypes beside those of the parameters themselves.

    Attributes:
        autocast: The half dtype that forward passes run under autocast with, if they do.
        cast: Which fp32 parameters are kept in that dtype for forward and backward, beside a
            sharded fp32 master. ``"auto"``: those that autocast would cast anyway (the results are
            the same); ``"all"``: every one, and their gradients too until the step; ``"none"``:
            none, so autocast casts at each use.
        reduce: In which gradients travel and are summed, if they are not wider than fp32. Default:
            their own, but fp32 at least.
        master: Of the masters of half-precision parameters. Default: the parameters' own.
    """

    autocast: torch.dtype | None = None
    cast: Cast = "auto"
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None

    def reduce_dtype(self, grads: torch.dtype) -> torch.dtype:
        """Say in which dtype gradients are summed over the ranks."""
        wide = wide_dtype(grads)
        return self.reduce if self.reduce is not None and wide is torch.float32 else wide

    def master_dtype(self, params: torch.dtype) -> torch.dtype:
        """Say in which dtype the optimizer updates parameters of dtype ``params``."""
        if self.master is not None and is_half(params):
            return self.master
        return params


def is_half(dtype: torch.dtype) -> bool:
    """Say whether a dtype is one of the two of 16 bits that models compute with."""
    return dtype in (torch.float16, torch.bfloat16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp32 in place of a half dtype, and any other dtype itself."""
    return torch.float32 if is_half(dtype) else dtype
