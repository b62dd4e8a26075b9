"""What the host has to offer."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch


def device_memory(device: torch.device) -> int:
    """Return the free bytes of a device; the host's for the CPU."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory()


def available_memory() -> int:
    """Return the bytes of host memory that can be had without swapping."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return 0
