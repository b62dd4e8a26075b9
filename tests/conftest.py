"""What holds for all tests: one import of torch and Lightning, and no process left behind."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

# Read when the libraries are imported: OpenBLAS starts its threads then, and ranks are forked from
# this process; torch must not create a CUDA context here just to see whether there is a GPU.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("POSSIBLE_USER_WARNINGS", "off")

import lightning  # noqa: F401
import psutil
import pytest
import torch.distributed as dist

import ranks  # noqa: F401 - it limits torch to one thread

for _name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(_name).setLevel(logging.WARNING)


def _children() -> dict[int, psutil.Process]:
    """The running children of this process, without those that Python keeps until it exits."""
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if "resource_tracker" not in command and "forkserver" not in command:
                found[child.pid] = child
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which this process has a process group or more children than before.

    Remove what is found, so that only the test at fault fails.
    """
    before = _children()
    yield
    leaks = []
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        leaks.append("the default process group")
    left = [child for pid, child in _children().items() if pid not in before]
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            leaks.append(f"child process {child.pid}: {' '.join(child.cmdline())}")
            child.kill()
    psutil.wait_procs(left, timeout=5)
    if leaks:
        pytest.fail("the test left behind " + "; ".join(leaks), pytrace=False)
