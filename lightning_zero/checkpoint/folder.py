"""Checkpoints on a local file system: written beside their place, and put there in one step."""

from __future__ import annotations

import ctypes
import glob
import hashlib
import itertools
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lightning_zero.checkpoint.read_sharded import META_FILE, METADATA_FILE

_PREFIX = ".unfinished-"
_OLD = "-:replaced:-"
_RENAMING = 5.0  # seconds that two renames in a row may take
_STALE = 3600  # seconds without a write after which a save counts as abandoned
_LONGEST = 255  # bytes that a name may have
_DIGEST = ":sha256:"  # stands before what replaces a name that is too long
_PROCESS = r"(\d+)-([0-9a-f]{8})(?:\.\d+)?-"
_counter = itertools.count()
_TOKEN = secrets.token_hex(4)  # a restarted container may give this process an old one's number


def begin(path: Path) -> Path:
    """Choose a hidden name beside ``path`` to write to; remove what killed saves have left.

    Raises:
        IsADirectoryError: If ``path`` is a folder of something else than a checkpoint.
    """
    if path.is_dir() and not path.is_symlink() and not _is_replaceable(path):
        raise IsADirectoryError(
            f"{path} is a folder and no checkpoint, so it is not replaced: choose another name, or "
            "remove it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    clean(path.parent)
    return _hidden(path)


def put(unfinished: Path, path: Path) -> None:
    """Put what was written, and is synced, into its place; delete what was there.

    Files of others that somebody has put into a replaced folder stay in it.

    Links are replaced and not followed. Where the system can swap two names (Linux), one of the two
    is there at any moment; elsewhere ``recover`` mends what a kill leaves.
    """
    if unfinished.is_dir():
        sync(unfinished)
    if not os.path.lexists(path):
        unfinished.rename(path)
    elif not unfinished.is_dir() and (path.is_symlink() or not path.is_dir()):
        os.replace(unfinished, path)
    elif _exchange(unfinished, path):
        sync(path.parent)
        _finish_with(unfinished, path)
    else:
        old = _hidden(path, _OLD)
        path.rename(old)
        try:
            unfinished.rename(path)
        except BaseException:
            old.rename(path)
            raise
        sync(path.parent)
        _finish_with(old, path)
    sync(path.parent)


def _finish_with(old: Path, path: Path) -> None:
    """Delete what was replaced, but for what somebody else has put into its folder."""
    if old.is_dir() and not old.is_symlink() and path.is_dir():
        for name in filter(_is_foreign, os.listdir(old)):
            if not os.path.lexists(path / name):
                (old / name).rename(path / name)
    _delete(old)


def remove(path: Path) -> None:
    """Delete a checkpoint so that no part of one can be taken for one; a link, not its target."""
    if path.is_dir() and not path.is_symlink():
        hidden = _hidden(path)
        path.rename(hidden)
        _delete(hidden)
    else:
        path.unlink(missing_ok=True)


def discard(unfinished: Path) -> None:
    """Delete what a failed save has written."""
    _delete(unfinished)


def unfinished_saves(parent: Path) -> list[Path]:
    """List the hidden files and folders in ``parent`` of saves that nobody will finish any more."""
    return [path for path in sorted(parent.glob(f"{_PREFIX}*")) if _is_abandoned(path)]


def clean(parent: Path) -> None:
    """Remove what killed saves have left."""
    for path in unfinished_saves(parent):
        _, old, name = path.name.partition(_OLD)
        if name.startswith(_DIGEST) and name not in map(_digest, os.listdir(parent)):
            continue  # it may be aside, and ``recover`` knows its name
        if old and not name.startswith(_DIGEST) and not os.path.lexists(parent / name):
            with suppress(FileNotFoundError):  # another rank was faster
                path.rename(parent / name)  # it was killed while it replaced this one
        else:
            _delete(path)


def recover(path: Path) -> None:
    """Put a checkpoint back that was aside when the save that was to replace it was killed."""
    asides = [f"{_PREFIX}*{_OLD}{glob.escape(n)}" for n in (path.name, _digest(path.name))]
    deadline = time.monotonic() + _RENAMING
    while not os.path.lexists(path):
        left = [old for aside in asides for old in path.parent.glob(aside)]
        if not left:
            return
        # A host whose processes cannot be seen puts the new one there at once, unless it is dead.
        late = time.monotonic() > deadline
        for old in left:
            if late or _is_abandoned(old):
                with suppress(OSError):  # another rank was faster
                    old.rename(path)
                    return
        if late:
            return
        time.sleep(0.05)


def sync(path: Path) -> None:
    """Write a folder's names to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(file: IO[Any]) -> None:
    """Write what was written to an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def _hidden(path: Path, mark: str = "-") -> Path:
    """Make a name beside ``path`` that nobody else has, not even this process."""
    owner = f"{_PREFIX}{_host()}-{os.getpid()}-{_TOKEN}.{next(_counter)}{mark}"
    fits = len(os.fsencode(owner + path.name)) <= _LONGEST
    return path.parent / (owner + (path.name if fits else _digest(path.name)))


def _digest(name: str) -> str:
    return _DIGEST + hashlib.sha256(os.fsencode(name)).hexdigest()[:32]


def _host() -> str:
    """Name what numbers processes: a host, or one of the containers that share its name."""
    with suppress(OSError):
        return f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def _is_replaceable(folder: Path) -> bool:
    names = os.listdir(folder)
    return not names or not all(map(_is_foreign, names))


def _is_foreign(name: str) -> bool:
    return name not in (METADATA_FILE, META_FILE) and not name.endswith(".distcp")


def _is_abandoned(path: Path) -> bool:
    found = re.match(re.escape(f"{_PREFIX}{_host()}-") + _PROCESS, path.name)
    if found is None and not re.match(rf"{re.escape(_PREFIX)}.+-{_PROCESS}", path.name):
        return False  # the user has called a checkpoint so
    if found is not None:
        number, token = int(found[1]), found[2]
        if number == os.getpid():
            return token != _TOKEN
        if not _is_running(number):
            return True
    with suppress(OSError):
        files = path.iterdir() if path.is_dir() else []
        newest = max(file.stat().st_mtime for file in (path, *files))
        return time.time() - newest > _STALE
    return False


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _delete(path: Path) -> None:
    """Delete a file, link or folder as far as that is possible; what stays is hidden."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step, where the system can (Linux)."""
    rename: Callable[..., int] | None = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
