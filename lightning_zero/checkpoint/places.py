"""Where a checkpoint lies, held open so that what replaces it while it is read is not seen."""

from __future__ import annotations

import fnmatch
import io
import os
import stat
import weakref
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

_SIGNS = ("size", "created", "mtime", "LastModified", "last_modified", "updated", "ETag", "etag")


class Place(ABC):
    """A file or folder of a checkpoint. ``str`` gives what messages call it.

    Places under one folder, and copies of one place, share what is held; it goes with the last.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the path."""

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    @abstractmethod
    def parent(self) -> Place:
        """The folder that it is in."""

    @abstractmethod
    def __truediv__(self, name: str) -> Place: ...

    @abstractmethod
    def is_dir(self) -> bool: ...

    @abstractmethod
    def is_file(self) -> bool: ...

    @abstractmethod
    def nbytes(self) -> int:
        """The length of a file."""

    @abstractmethod
    def open(self) -> BinaryIO:
        """Open a file for reading, from its start and independent of others that are open."""

    @abstractmethod
    def names(self) -> list[str]:
        """List what is in a folder."""

    def matching(self, pattern: str) -> list[Place]:
        """List the places in a folder whose names match a pattern, sorted."""
        return [self / name for name in sorted(fnmatch.filter(self.names(), pattern))]

    def read_bytes(self) -> bytes:
        with self.open() as file:
            return file.read()


def place_of(path: str | Path | Place) -> Place:
    """Hold what a path or a URL names.

    Raises:
        FileNotFoundError: If nothing is there.
    """
    if isinstance(path, Place):
        return path
    if isinstance(path, str) and "://" in path:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        system, stripped = url_to_fs(path)
        protocols = [system.protocol] if isinstance(system.protocol, str) else system.protocol
        if not {"file", "local"} & set(protocols):
            return _remote(system, stripped, path)
        return _local(Path(stripped))
    return _local(Path(path))


class _Held:
    """A file descriptor that is closed with the last place that uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)
        self.is_folder = stat.S_ISDIR(os.fstat(self.number).st_mode)

    def is_still_there(self) -> bool:
        """Whether the path still names what is held."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self.number))


class _LocalPlace(Place):
    def __init__(self, path: Path, held: _Held, inside: str = "") -> None:
        self._path = path
        self._held = held
        self._inside = inside  # the path from what is held, empty for itself

    def __str__(self) -> str:
        return str(self._path)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _LocalPlace) and self._held is other._held
        return same and self._inside == cast(_LocalPlace, other)._inside

    def __hash__(self) -> int:
        return hash((id(self._held), self._inside))

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def parent(self) -> Place:
        if not self._inside:
            return _local(self._path.parent)
        inside = os.path.dirname(self._inside)
        return _LocalPlace(self._path.parent, self._held, inside)

    def __truediv__(self, name: str) -> Place:
        return _LocalPlace(self._path / name, self._held, os.path.join(self._inside, name))

    def is_dir(self) -> bool:
        return self._is(stat.S_ISDIR)

    def is_file(self) -> bool:
        return self._is(stat.S_ISREG)

    def nbytes(self) -> int:
        return self._stat().st_size

    def open(self) -> BinaryIO:
        if not self._inside:
            return io.BufferedReader(_Reader(self._held))
        try:
            return os.fdopen(os.open(self._inside, os.O_RDONLY, dir_fd=self._held.number), "rb")
        except FileNotFoundError:
            if self._held.is_still_there():
                raise
            raise FileNotFoundError(
                f"{self._held.path} was replaced or removed while it was read: load it again"
            ) from None

    def names(self) -> list[str]:
        if not self._inside:
            return os.listdir(self._held.number)
        folder = os.open(self._inside, os.O_RDONLY, dir_fd=self._held.number)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    def _stat(self) -> os.stat_result:
        if not self._inside:
            return os.fstat(self._held.number)
        return os.stat(self._inside, dir_fd=self._held.number)

    def _is(self, kind: Any) -> bool:
        try:
            return bool(kind(self._stat().st_mode))
        except OSError:
            return False


class _Reader(io.RawIOBase):
    """Reads a file that is held, at a position of its own."""

    def __init__(self, held: _Held) -> None:
        self._held = held
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        end = os.fstat(self._held.number).st_size if whence == os.SEEK_END else 0
        self._at = offset + (0, self._at, end)[whence]
        return self._at

    def readinto(self, out: Any) -> int:
        n = os.preadv(self._held.number, [out], self._at)
        self._at += n
        return n


class _RemotePlace(Place):
    """Nothing can be held there: a file that is opened again is compared with what it was."""

    def __init__(self, system: Any, path: str, url: str, was: Any = None) -> None:
        self._system = system
        self._path = path
        self._url = url
        self._was = was

    def __str__(self) -> str:
        return self._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RemotePlace) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    @property
    def name(self) -> str:
        return PurePosixPath(self._path).name

    @property
    def parent(self) -> Place:
        path, url = (text.rpartition("/")[0] for text in (self._path, self._url))
        return _RemotePlace(self._system, path, url)

    def __truediv__(self, name: str) -> Place:
        return _RemotePlace(self._system, f"{self._path}/{name}", f"{self._url}/{name}")

    def is_dir(self) -> bool:
        return bool(self._system.isdir(self._path))

    def is_file(self) -> bool:
        return bool(self._system.isfile(self._path))

    def nbytes(self) -> int:
        return int(self._system.size(self._path))

    def open(self) -> BinaryIO:
        if self._was is not None and _signs(self._system, self._path) != self._was:
            raise ValueError(f"{self._url} was replaced while it was read: load it again")
        return cast(BinaryIO, self._system.open(self._path, "rb"))

    def names(self) -> list[str]:
        return [PurePosixPath(name).name for name in self._system.ls(self._path, detail=False)]


def _local(path: Path) -> _LocalPlace:
    try:
        return _LocalPlace(path, _Held(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None


def _remote(system: Any, path: str, url: str) -> _RemotePlace:
    system.invalidate_cache(path)  # other processes write there too
    if not system.exists(path):
        raise FileNotFoundError(f"{url} does not exist")
    was = _signs(system, path) if system.isfile(path) else None
    return _RemotePlace(system, path.rstrip("/"), url.rstrip("/"), was)


def _signs(system: Any, path: str) -> list[Any]:
    """List what tells a file from one that replaces it, as far as a file system knows it."""
    info = system.info(path)
    return [info.get(key) for key in _SIGNS]
