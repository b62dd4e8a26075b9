"""The random number generators of one rank."""

from __future__ import annotations

import random
from typing import Any

import torch


def rng_state(device: torch.device) -> dict[str, Any]:
    """Read the states of Python's, NumPy's, torch's and the device's generators.

    Returns:
        Plain values and tensors only, so that a checkpoint with it can be loaded without trust.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": _listed(random.getstate())}
    try:
        import numpy as np
    except ImportError:
        pass
    else:
        arrays: Any = np.random.get_state(legacy=True)
        kind, keys, position, has_gauss, gauss = arrays
        state["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(gauss)]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators that a state has something of."""
    torch.set_rng_state(state["torch"].cpu())
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in state:
        import numpy as np

        kind, keys, position, has_gauss, cached = state["numpy"]
        array = np.array(keys, dtype=np.uint32)
        np.random.set_state((kind, array, position, has_gauss, cached))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def _listed(state: Any) -> list[Any]:
    version, numbers, gauss = state
    return [version, list(numbers), gauss]
