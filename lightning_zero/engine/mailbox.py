"""Small messages between the ranks of one host, without a thread in between."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque

_PACKET = struct.Struct("=4sqq")


class Mailbox:
    """Sends words to other ranks and keeps what arrives until somebody asks for it.

    A word has a kind, a tag and a value. Words of one kind and tag arrive in the order in which
    they were sent; others may be asked for in any order. Linux only (abstract addresses).

    Args:
        rank: This rank.

    Attributes:
        address: Where the others connect.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("")  # Linux chooses an abstract address that nobody has
        self._listener.listen(128)
        self.address: bytes = self._listener.getsockname()
        self._sockets: dict[int, socket.socket] = {}
        self._arrived: dict[tuple[int, bytes, int], deque[int]] = {}
        self._gone: set[int] = set()

    def connect(self, addresses: list[bytes], timeout: float) -> None:
        """Connect to every other rank.

        Args:
            addresses: The address of every rank's mailbox, by rank.
            timeout: Seconds to wait for each.

        Raises:
            OSError: If one cannot be reached.
        """
        self._listener.settimeout(timeout)
        for rank, address in enumerate(addresses[: self._rank]):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._sockets[rank] = line
            line.settimeout(timeout)
            line.connect(address)
            line.send(_PACKET.pack(b"helo", self._rank, 0))
        for _ in addresses[self._rank + 1 :]:
            line, _address = self._listener.accept()
            line.settimeout(timeout)
            _kind, rank, _value = _PACKET.unpack(line.recv(_PACKET.size))
            self._sockets[rank] = line
        self._listener.close()
        for line in self._sockets.values():
            line.setblocking(False)

    def send(self, rank: int, kind: bytes, tag: int, value: int = 0) -> None:
        """Send a word. If the line is full, takes in what has arrived, so that nobody waits on it.

        A rank that has gone away needs no words; asking it for some is what fails.
        """
        line = self._sockets[rank]
        packet = _PACKET.pack(kind, tag, value)
        while True:
            try:
                line.send(packet)
                return
            except ConnectionError:
                return
            except BlockingIOError:
                self._take_in(rank)
                _poll(line, select.POLLIN | select.POLLOUT, 0.1)

    def receive(self, rank: int, kind: bytes, tag: int, timeout: float) -> int:
        """Return the value of the next word of this kind and tag from ``rank``.

        Raises:
            TimeoutError: If it has not come after ``timeout`` seconds.
            ConnectionError: If that rank has gone away without sending it.
        """
        key = (rank, kind, tag)
        deadline = None
        while not self._arrived.get(key):
            if not self._take_in(rank):
                if rank in self._gone:
                    raise ConnectionError(f"rank {rank} hung up")
                deadline = deadline or time.monotonic() + timeout
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                _poll(self._sockets[rank], select.POLLIN, left)
        words = self._arrived[key]
        value = words.popleft()
        if not words:
            del self._arrived[key]
        return value

    def close(self) -> None:
        """Hang up."""
        self._listener.close()
        for line in self._sockets.values():
            line.close()

    def _take_in(self, rank: int) -> bool:
        """Take in everything that has arrived from ``rank``; say whether there was anything."""
        line, found = self._sockets[rank], False
        while True:
            try:
                packet = line.recv(_PACKET.size)
            except BlockingIOError:
                return found
            except ConnectionError:
                packet = b""
            if not packet:
                self._gone.add(rank)
                return found
            kind, tag, value = _PACKET.unpack(packet)
            self._arrived.setdefault((rank, kind, tag), deque()).append(value)
            found = True


def _poll(line: socket.socket, events: int, seconds: float) -> None:
    poll = select.poll()  # `select.select` refuses file descriptors from 1024 on
    poll.register(line, events)
    poll.poll(max(1, int(seconds * 1000)))
