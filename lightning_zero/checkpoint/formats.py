"""Recognises what a checkpoint is and opens it."""

from __future__ import annotations

import zipfile
from pathlib import Path

from lightning_zero.checkpoint.entries import View
from lightning_zero.checkpoint.places import Place, place_of
from lightning_zero.checkpoint.read_deepspeed import deepspeed_folder, read_deepspeed
from lightning_zero.checkpoint.read_file import read_file, read_safetensors
from lightning_zero.checkpoint.read_sharded import METADATA_FILE, read_sharded

_READABLE = (
    "a folder written by ranks, a DeepSpeed ZeRO folder, a Lightning .ckpt, .pt weights, "
    ".safetensors or its index"
)


def open_checkpoint(path: str | Path | Place, trust: bool = False) -> View:
    """Open a checkpoint of any known format without reading its tensors.

    Args:
        path: A file or folder, or the URL of one that ``fsspec`` knows.
        trust: Whether pickles in it may run code.

    Raises:
        FileNotFoundError: If it, or one of its files, is not there.
        ValueError: If it is damaged, incomplete, of a newer or unknown format, or needs trust.
    """
    place = place_of(path)
    if place.is_dir():
        return _open_folder(place, trust)
    if place.suffix == ".safetensors" or place.name.endswith(".safetensors.index.json"):
        return read_safetensors(place)
    if place.suffix in (".ckpt", ".pt", ".pth", ".bin") or _is_archive(place):
        return read_file(place, trust)
    raise ValueError(f"{path}: not {_READABLE}")


def _is_archive(place: Place) -> bool:
    with place.open() as file:
        return zipfile.is_zipfile(file)


def _open_folder(path: Place, trust: bool) -> View:
    if (path / METADATA_FILE).is_file():
        return read_sharded(path, trust)
    if deepspeed_folder(path) is not None:
        return read_deepspeed(path, trust)
    if path.matching("*.distcp") or (path / "meta.pt").is_file():
        raise FileNotFoundError(
            f"{path / METADATA_FILE} is missing: the folder is torn, its save was not finished. "
            "Take an older checkpoint"
        )
    indexes = path.matching("*.safetensors.index.json") or path.matching("*.safetensors")
    if len(indexes) == 1:
        return read_safetensors(indexes[0])
    inside = [name for name in sorted(path.names()) if _may_be_one(path / name)]
    more = f"; name one of those in it: {', '.join(inside[:8])}" if inside else ""
    raise ValueError(f"{path}: not {_READABLE}{more}")


def _may_be_one(place: Place) -> bool:
    return place.suffix in (".ckpt", ".safetensors") or (place / METADATA_FILE).is_file()
