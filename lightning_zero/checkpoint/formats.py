"""Recognises what a checkpoint is and opens it."""

from __future__ import annotations

import zipfile
from pathlib import Path

from lightning_zero.checkpoint.entries import View
from lightning_zero.checkpoint.read_deepspeed import deepspeed_folder, read_deepspeed
from lightning_zero.checkpoint.read_file import read_file, read_safetensors
from lightning_zero.checkpoint.read_sharded import METADATA_FILE, read_sharded

_READABLE = (
    "a folder written by ranks, a DeepSpeed ZeRO folder, a Lightning .ckpt, .pt weights, "
    ".safetensors or its index"
)


def open_checkpoint(path: str | Path, trust: bool = False) -> View:
    """Open a checkpoint of any known format without reading its tensors.

    Args:
        path: A file or folder.
        trust: Whether pickles in it may run code.

    Raises:
        FileNotFoundError: If it, or one of its files, is not there.
        ValueError: If it is damaged, incomplete, of a newer or unknown format, or needs trust.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path, trust)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        return read_safetensors(path)
    if path.suffix in (".ckpt", ".pt", ".pth", ".bin") or zipfile.is_zipfile(path):
        return read_file(path, trust)
    raise ValueError(f"{path}: not {_READABLE}")


def _open_folder(path: Path, trust: bool) -> View:
    if (path / METADATA_FILE).is_file():
        return read_sharded(path, trust)
    if deepspeed_folder(path) is not None:
        return read_deepspeed(path, trust)
    if any(path.glob("*.distcp")) or (path / "meta.pt").is_file():
        raise FileNotFoundError(
            f"{path / METADATA_FILE} is missing: the folder is torn, its save was not finished. "
            "Take an older checkpoint"
        )
    indexes = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
    if len(indexes) == 1:
        return read_safetensors(indexes[0])
    raise ValueError(f"{path}: not {_READABLE}")
