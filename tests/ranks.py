"""Run the ranks of a distributed test as forked children of the pytest process.

The parent has imported torch and Lightning already, so a rank costs a fork instead of an
interpreter start and two heavy imports, and is ready for work within hundredths of a second::

    def body(rank: int, world_size: int) -> float:
        tensor = torch.tensor(float(rank))
        torch.distributed.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(body, 2) == [1.0, 1.0]

Since the children are forked, ``fn`` may be a closure and its arguments need not be picklable; only
what it returns must be. Three more things follow from forking:

* The parent must not start threads that a child would miss. Importing this module limits torch to
  one thread; beyond that, tests must not create a process group or use a GPU outside a rank, nor,
  where torch sees a GPU, call ``backward`` there (``run_ranks(body, 1)`` is the place for it).
* Every rank starts with the same fixed seed, whatever ran before it.
* pytest sees of a rank its result, its failure and what it wrote to file descriptors 1 and 2.
  Whatever else a rank changes stays in the rank, records kept by ``caplog`` or ``recwarn`` too.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import io
import os
import random
import resource
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

__all__ = ["RankFailure", "expect_failures", "run_ranks"]

T = TypeVar("T")

# An OpenMP pool started before a fork does not exist in the child, which hangs on first using it.
torch.set_num_threads(1)

SEED = 2026
"""What every random generator of every rank is seeded with."""

GRACE = 2.0
"""Seconds that the other ranks have to end by themselves once one has failed."""

LINGER = 0.5
"""Seconds that a failed rank stays, so that ranks about to end do not fail for its absence."""

_HEADER = struct.Struct("!Q")  # How many bytes of report follow.
_POLL = 0.02  # Seconds between two looks at which children have ended.
_DUMP_WAIT = 0.3  # Seconds that a hanging rank has to write its stack.
_PR_SET_PDEATHSIG = 1  # From linux/prctl.h.


class RankFailure(Exception):
    """At least one rank failed, died or did not finish.

    Attributes:
        rank: The rank whose failure was seen first, or the lowest that did not finish in time.
        failures: What went wrong on each rank that failed: its traceback or, if it left none, what
            ended it.
        errors: The type name and the message of the error of each rank that failed. In place of the
            type name stand the signal's name for a rank killed by a signal, ``"Exit"`` for one that
            exited without a result, and ``"Timeout"`` for one that did not finish in time.
        killed: The ranks that were killed because another had failed.
    """

    def __init__(
        self,
        rank: int,
        failures: dict[int, str],
        errors: dict[int, tuple[str, str]],
        killed: list[int],
    ) -> None:
        name, message = errors[rank]
        lines = [f"rank {rank} failed with {name}: {message}"]
        if unfinished := sorted(r for r, (kind, _) in errors.items() if kind == "Timeout"):
            lines.append(f"ranks that had not finished: {unfinished}")
        if killed:
            lines.append(f"ranks killed because of that: {killed}")
        for other in sorted(failures):
            lines.append(f"\n--- rank {other} ---\n{failures[other].rstrip()}")
        super().__init__("\n".join(lines))
        self.rank = rank
        self.failures = failures
        self.errors = errors
        self.killed = killed


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    env: Mapping[str, str | None] | None = None,
    **kwargs: Any,
) -> list[T]:
    """Run ``fn`` on every rank of a new world, each rank a forked child of this process.

    Each child has the environment that torchrun would give it, so Lightning takes the world as it
    is and launches nothing. No rank leaves before all have returned, hence none can lose the peer
    that serves its store.

    Args:
        fn: Called as ``fn(rank, world_size, *args, **kwargs)`` in each child.
        world_size: How many ranks to run.
        *args: Further positional arguments of ``fn``.
        timeout: Seconds after which the ranks that have not returned are asked for a stack dump,
            which goes to standard error, and killed.
        init: Whether to create the default process group (gloo) before calling ``fn``. Without it,
            ``MASTER_ADDR`` and ``MASTER_PORT`` serve ``env://``, which Lightning uses.
        env: Environment variables to set in each child, over those of the launcher; None as a value
            removes the variable.
        **kwargs: Further keyword arguments of ``fn``.

    Returns:
        What ``fn`` returned, by rank. Tensors arrive on the CPU.

    Raises:
        RankFailure: A rank raised, died or did not return in time. Those still running have had
            `GRACE` seconds to end by themselves and have then been killed.
    """
    __tracebackhide__ = True  # By pytest: the failure tells of the rank's own traceback.
    with _forked(fn, world_size, args, kwargs, timeout, init, env) as ranks:
        failure = _wait(ranks, timeout, GRACE)
        if failure is not None:
            raise failure
        return [rank.report[1] for rank in ranks if rank.report is not None]


def expect_failures(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    env: Mapping[str, str | None] | None = None,
    **kwargs: Any,
) -> dict[int, tuple[str, str]]:
    """Run ``fn`` like `run_ranks` and let every rank end by itself, be it by an error.

    Args:
        fn: As for `run_ranks`.
        world_size: As for `run_ranks`.
        *args: As for `run_ranks`.
        timeout: As for `run_ranks`.
        init: As for `run_ranks`.
        env: As for `run_ranks`.
        **kwargs: As for `run_ranks`.

    Returns:
        By rank, the type name and the message of the error, in the terms of `RankFailure.errors`. A
        rank that returned is missing.

    Raises:
        RankFailure: A rank did not end in time.
    """
    __tracebackhide__ = True  # By pytest: the failure tells of the rank's own traceback.
    with _forked(fn, world_size, args, kwargs, timeout, init, env) as ranks:
        failure = _wait(ranks, timeout, None)
        if failure is None:
            return {}
        if any(kind == "Timeout" for kind, _ in failure.errors.values()):
            raise failure
        return dict(sorted(failure.errors.items()))


# --- The parent's side ---


@dataclass
class _Rank:
    """What the parent knows of one rank."""

    rank: int
    pid: int
    link: socket.socket
    received: bytearray = field(default_factory=bytearray)
    report: tuple[str, Any] | None = None
    status: int | None = None

    @property
    def running(self) -> bool:
        """Whether the rank has neither reported nor ended."""
        return self.report is None and self.status is None

    @property
    def failure(self) -> tuple[str, str, str] | None:
        """What went wrong, as type name, message and full text; None if nothing has so far."""
        if self.report is not None:
            kind, content = self.report
            return content if kind == "error" else None
        if self.status is None:
            return None
        if os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            name = next((s.name for s in signal.Signals if s == number), "Signal")
            message = f"killed by signal {number} ({name})"
        else:
            name = "Exit"
            message = f"exited with code {os.WEXITSTATUS(self.status)} without a result"
        return name, message, message

    def read(self) -> bool:
        """Take in what the child has sent so far.

        Returns:
            Whether more is to come.
        """
        while self.report is None:
            try:
                chunk = self.link.recv(1 << 20)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not chunk:
                return False
            self.received += chunk
            self._parse()
        return False

    def _parse(self) -> None:
        if len(self.received) < _HEADER.size:
            return
        (size,) = _HEADER.unpack_from(self.received)
        if len(self.received) == _HEADER.size + size:
            self.report = _decode(bytes(self.received[_HEADER.size :]))
            self.received.clear()

    def reap(self) -> bool:
        """Collect the child's exit status if it has ended.

        Returns:
            Whether it has.
        """
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.read()  # It may have reported and ended since the last look.
                self.status = status
                self._kill_group()
        return self.status is not None

    def release(self) -> None:
        """Let the child leave, which waits for that after its report."""
        with contextlib.suppress(OSError):
            self.link.send(b"\0")

    def close(self) -> None:
        """End the child, and everything that it started, if that is still running."""
        if self.status is None:
            self._kill_group()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)
        self.link.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def _forked(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    init: bool,
    env: Mapping[str, str | None] | None,
) -> Iterator[list[_Rank]]:
    """Fork the ranks. Nothing of them is left when the context ends, however it ends."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if dist.is_initialized():
        raise RuntimeError("the parent of the ranks must not have a process group of its own")
    ranks: list[_Rank] = []
    scratch = tempfile.mkdtemp(prefix="ranks-")
    try:
        with _reserved_port() as port:
            # What is still buffered here would be written by each child as well.
            sys.stdout.flush()
            sys.stderr.flush()
            for rank in range(world_size):
                ours, theirs = socket.socketpair()
                pid = os.fork()
                if pid == 0:
                    for link in (ours, *(other.link for other in ranks)):
                        link.close()
                    setup = _Setup(
                        rank=rank,
                        world_size=world_size,
                        environment={**_launcher(rank, world_size, port), **(env or {})},
                        store=os.path.join(scratch, "store") if init else None,
                        timeout=timeout,
                    )
                    _live(theirs, setup, lambda: fn(rank, world_size, *args, **kwargs))  # noqa: B023
                ranks.append(_Rank(rank, pid, ours))
                theirs.close()
                ours.setblocking(False)
                with contextlib.suppress(OSError):  # The child does it too, whichever is first.
                    os.setpgid(pid, pid)
            yield ranks
    finally:
        for child in ranks:
            child.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _wait(ranks: list[_Rank], timeout: float, grace: float | None) -> RankFailure | None:
    """Wait until all ranks have reported or ended.

    Args:
        ranks: The ranks.
        timeout: Seconds to wait at most.
        grace: Seconds to wait at most once a rank has failed; None for no such limit.

    Returns:
        What to raise, None if every rank has returned a result.
    """
    limit = time.monotonic() + timeout
    failed: list[int] = []
    with selectors.DefaultSelector() as selector:
        for child in ranks:
            selector.register(child.link, selectors.EVENT_READ, child)
        while True:
            for child in ranks:
                child.reap()
                if child.failure is not None and child.rank not in failed:
                    failed.append(child.rank)
                    if grace is not None:
                        limit = min(limit, time.monotonic() + grace)
            left = limit - time.monotonic()
            running = [child for child in ranks if child.running]
            if not running or left <= 0:
                break
            # A child can end without closing its link, if something that it started holds it.
            for key, _ in selector.select(min(_POLL, left)):
                if not key.data.read():
                    selector.unregister(key.fileobj)

    late = running if grace is None or not failed else []
    if late:
        _dump_stacks(late)
    if not running:
        _part(ranks)

    errors: dict[int, tuple[str, str]] = {}
    failures: dict[int, str] = {}
    for child in ranks:
        if child.failure is not None:
            name, message, text = child.failure
            errors[child.rank], failures[child.rank] = (name, message), text
    for child in late:
        message = f"had not finished after {timeout:g} s"
        errors[child.rank], failures[child.rank] = ("Timeout", message), message
    if not errors:
        return None
    first = failed[0] if failed else late[0].rank
    killed = [child.rank for child in running if child.rank not in errors]
    return RankFailure(first, failures, errors, killed)


def _part(ranks: list[_Rank]) -> None:
    """Let ranks that have all reported leave in order."""
    for child in ranks:
        child.release()
    limit = time.monotonic() + GRACE
    while not all([child.reap() for child in ranks]) and time.monotonic() < limit:
        time.sleep(0.001)


def _dump_stacks(ranks: list[_Rank]) -> None:
    """Have ranks write where they are to standard error."""
    for child in ranks:
        os.write(2, f"\n--- rank {child.rank} had not finished; its threads were at ---\n".encode())
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGUSR1)
        time.sleep(_DUMP_WAIT)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Yield a TCP port that only a process that asks for it by number can get.

    On Linux a port is kept from being handed out while any socket is bound to it, but can be bound
    once more, and listened on, if both sockets allow reuse, as torch's store does. Elsewhere the
    port is just one that was free.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        if sys.platform != "linux":
            holder.close()
        yield holder.getsockname()[1]


def _launcher(rank: int, world_size: int, port: int) -> dict[str, str | None]:
    """The environment of a rank as torchrun would set it on one node."""
    environment: dict[str, str | None] = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "ranks",  # By this Lightning knows that it has been launched.
        "OMP_NUM_THREADS": "1",
        # What may be left from where the tests were started, or from Lightning in the parent.
        "TORCHELASTIC_USE_AGENT_STORE": None,
        "TORCHELASTIC_ERROR_FILE": None,
        "PL_GLOBAL_SEED": None,
        "PL_SEED_WORKERS": None,
    }
    loopback = "lo" if sys.platform == "linux" else "lo0"
    if any(name == loopback for _, name in socket.if_nameindex()):
        environment["GLOO_SOCKET_IFNAME"] = loopback  # Else gloo has to resolve the host's name.
    return environment


# --- The child's side ---


@dataclass(frozen=True)
class _Setup:
    """What a child makes of itself before it runs the test's function."""

    rank: int
    world_size: int
    environment: Mapping[str, str | None]
    store: str | None
    timeout: float

    def apply(self) -> None:
        """Turn this process from a copy of the parent into a rank."""
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)  # To be killed along with whatever it starts.
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's, for the parent alone.
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        gc.freeze()  # What the parent left behind is not this process's to finalize.

        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # Lightning reads its rank from the environment, but only when it is imported.
        rank_zero_only.rank = self.rank  # type: ignore[attr-defined]
        torch.set_num_threads(1)
        random.seed(SEED)
        torch.manual_seed(SEED)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(SEED)

        if self.store is not None:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(self.store, self.world_size),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.world_size,
                # Longer than the parent waits, so that a hanging rank gets its stack dumped.
                timeout=timedelta(seconds=self.timeout + 60.0),
            )
        elif self.rank != 0:
            _wait_before_rendezvous(self.timeout)


def _wait_before_rendezvous(timeout: float) -> None:
    """Make `init_process_group` wait for rank 0's store instead of trying again and again.

    A client of the store that comes too early pauses for up to 0.7 s before its next attempt (torch
    2.13), and Lightning's rank 0, which does more, is late more often than not.
    """
    init = dist.init_process_group

    @functools.wraps(init)
    def init_when_rank_0_listens(*args: Any, **kwargs: Any) -> None:
        method = args[1] if len(args) > 1 else kwargs.get("init_method")
        if kwargs.get("store") is None and method in (None, "env://"):
            limit = time.monotonic() + timeout
            while not _listens(int(os.environ["MASTER_PORT"])) and time.monotonic() < limit:
                time.sleep(0.002)
            time.sleep(0.01)
        init(*args, **kwargs)

    dist.init_process_group = init_when_rank_0_listens


def _listens(port: int) -> bool:
    """Say whether a process of this host listens on a TCP port; elsewhere than on Linux, yes."""
    found = sys.platform != "linux"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            next(lines)
            for line in lines:
                _, address, _, state, *_ = line.split()
                found |= state == "0A" and address.endswith(f":{port:04X}")
    return found


def _live(link: socket.socket, setup: _Setup, body: Callable[[], Any]) -> NoReturn:
    """Be a rank from its fork to its end."""
    code = 1
    try:
        try:
            setup.apply()
            report = _encode(("result", body()))
            failed = False
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            report = _encode(("error", (type(error).__name__, str(error), text)))
            failed = True
        link.sendall(_HEADER.pack(len(report)) + report)
        link.settimeout(LINGER if failed else None)
        with contextlib.suppress(OSError):
            link.recv(1)
        if not failed and dist.is_initialized():
            dist.destroy_process_group()
        code = int(failed)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _encode(report: tuple[str, Any]) -> bytes:
    # torch.save keeps tensors in the bytes; pickling for a pipe may put them into shared memory.
    buffer = io.BytesIO()
    torch.save(report, buffer)
    return buffer.getvalue()


def _decode(report: bytes) -> tuple[str, Any]:
    kind, content = torch.load(io.BytesIO(report), map_location="cpu", weights_only=False)
    return kind, content
