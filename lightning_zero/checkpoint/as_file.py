"""Any checkpoint as an open file, for code that reads what ``torch.save`` wrote."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import BinaryIO, cast

from lightning_zero.checkpoint.convert import full_checkpoint
from lightning_zero.checkpoint.formats import open_checkpoint as view_of
from lightning_zero.checkpoint.write_file import write_archive


def open_checkpoint(
    path: str | Path, *, weights_only: bool = False, trust: bool = False
) -> BinaryIO:
    """Open a checkpoint, a sharded folder too, as the file that ``ddp`` would have written.

    For ``MyModule.load_from_checkpoint(lightning_zero.open_checkpoint(path))`` and ``torch.load``.
    It needs no process group. The tensors stream into a temporary file, which goes when it is
    closed.

    Args:
        path: What ``lightning-zero convert`` takes.
        weights_only: Leave optimizers, schedulers and callbacks out.
        trust: Whether pickles in the source may run code.

    Returns:
        The file, open for reading at its start, on disk at the size of the checkpoint.

    Raises:
        FileNotFoundError: If it, or one of its files, is not there.
        ValueError: If it is damaged, of a newer format, or needs trust.
    """
    view = view_of(path, trust)
    file = cast(BinaryIO, tempfile.TemporaryFile(prefix="lightning_zero-"))  # noqa: SIM115
    try:
        checkpoint = full_checkpoint(view, view.weights, weights_only)
        write_archive(checkpoint, file, lambda nbytes: None)
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return file
