"""One worker process: judges one item at a time, over a socket that no other process shares.

Messages are JSON after a length of four bytes. The server never unpickles data from a worker, which handles text from a model.
"""

import asyncio
import json
import multiprocessing
import os
import resource
import signal
import socket
import struct
import time
from collections import deque
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, BinaryIO, cast

from remote_rm.verifier import Item, Score, Verifier

WORKER_NAME = "verifier worker"
PRELOADED_MODULES = ("sympy", "math_verify", "remote_rm.service.worker", "remote_rm.service.warm_start")
"""Imported once, in the process that workers are forked from, so that a killed worker is replaced in milliseconds."""
START_TIMEOUT_SECONDS = 300.0
END_TIMEOUT_SECONDS = 5.0
LEAST_SHARE = 0.01
"""A worker that gets less of a core than this does not compute: the machine is too busy, or the verifier waits."""
RETIRING_SHARE = 0.5
"""A worker that has held this share of its memory limit is replaced, since what it freed may not return to the system."""
OUTSIDE_SIGNALS = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""What people and the system end a process with; no expression does."""
UNKNOWN_EXIT_CODE = 255
"""The exit code that multiprocessing reports for a worker whose fork server was killed."""

_LENGTH = struct.Struct("!I")

Message = dict[str, Any]
"""An item, or its score, as JSON."""


class VerifierFailed(Exception):
    """The verifier raised, or the item made its worker crash."""


class WorkerLost(Exception):
    """The worker was killed from outside or could not be started; the item is not to blame."""


class Starved(TimeoutError):
    """The worker has got no processor time for as long as an item may compute."""


@dataclass(frozen=True, kw_only=True)
class WorkerLimits:
    """What one worker may use."""

    item_seconds: float
    """Of processor time, so that a busy machine makes no verdict late."""
    memory_bytes: int


class WorkerProcess:
    """A worker as the server sees it; made by `start`."""

    def __init__(self, process: BaseProcess, *, channel: "_Channel") -> None:
        self._process = process
        self._channel = channel
        self._is_retiring = False

    @classmethod
    async def start(
        cls, verifier: Verifier, *, limits: WorkerLimits, context: ForkServerContext | SpawnContext
    ) -> "WorkerProcess":
        """Return a worker that is ready for items; raises WorkerLost if it does not come up."""
        ours, theirs = socket.socketpair()
        process = context.Process(target=work, args=(theirs, verifier, limits), name=WORKER_NAME, daemon=True)
        try:
            await asyncio.to_thread(process.start)
        except (OSError, EOFError) as error:
            ours.close()
            raise WorkerLost(f"no worker process could be started ({error!r})") from error
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(_Channel, sock=ours)
        worker = cls(process, channel=channel)
        try:
            await channel.receive(timeout_seconds=START_TIMEOUT_SECONDS)
        except OSError as error:
            worker.kill()
            raise WorkerLost(f"a worker process did not come up ({error!r})") from error
        return worker

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it may be given another item."""
        return not self._is_retiring and self._channel.is_open

    @property
    def is_running(self) -> bool:
        """Whether the process is there, as a killed one may still be for a moment."""
        return self._process.is_alive()

    async def judge(self, item: Item, *, patience_seconds: float) -> Score:
        """Return the score; raises TimeoutError if the item took its processor time, Starved, VerifierFailed or WorkerLost.

        Not to be used again after it was cancelled or starved: the reply would be taken for that of the next item.

        Args:
            patience_seconds: wall time in which it must at least compute.
        """
        try:
            self._channel.send(asdict(item))
            reply = await self._computed(patience_seconds)
        except (ConnectionError, ProcessLookupError) as error:
            raise await self._cause_of_death() from error
        self._is_retiring |= reply.pop("retires")
        if "error" in reply:
            raise VerifierFailed(reply["error"])
        return Score(**reply)

    async def _computed(self, patience_seconds: float) -> Message:
        while True:
            before = self._processor_seconds()
            try:
                return await self._channel.receive(timeout_seconds=patience_seconds)
            except TimeoutError as error:
                if self._processor_seconds() - before < LEAST_SHARE * patience_seconds:
                    raise Starved(f"worker {self.pid} got no processor time for {patience_seconds:g} s") from error

    def _processor_seconds(self) -> float:
        # The kernel's clock of another process (clock_getcpuclockid).
        try:
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError as error:
            raise ProcessLookupError(self.pid) from error

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self._process.kill()
        self._channel.close()

    async def ended(self) -> None:
        """Wait until a killed process is gone."""
        await asyncio.to_thread(self._process.join, END_TIMEOUT_SECONDS)

    async def _cause_of_death(self) -> Exception:
        await self.ended()
        code = self._process.exitcode
        if code == -signal.SIGPROF:
            return TimeoutError()
        if code in (None, UNKNOWN_EXIT_CODE) or -code in OUTSIDE_SIGNALS:
            return WorkerLost(f"worker {self.pid} was killed from outside (exit code {code})")
        return VerifierFailed(f"worker {self.pid} crashed with exit code {code}")


class _Channel(asyncio.Protocol):
    """The server's end of a worker's socket, one message at a time.

    Streams would wake a task for each part of a message: each is a pass through an event loop that is busy with requests.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._messages: deque[Message] = deque()
        self._awaited: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether both ends are."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Message) -> None:
        """Send a message; raises ConnectionError if the worker is gone."""
        if self._transport is None or not self.is_open:
            raise ConnectionResetError("the worker's socket is closed")
        body = json.dumps(message).encode()
        self._transport.write(_LENGTH.pack(len(body)) + body)

    async def receive(self, *, timeout_seconds: float) -> Message:
        """Return the next message; raises ConnectionError if the worker is gone, and TimeoutError."""
        if not self._messages:
            if not self.is_open:
                raise ConnectionResetError("the worker's socket is closed")
            loop = asyncio.get_running_loop()
            awaited = self._awaited = loop.create_future()
            timer = loop.call_later(timeout_seconds, _settle, awaited, TimeoutError())
            try:
                await awaited
            finally:
                timer.cancel()
        return self._messages.popleft()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not a subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if len(self._received) < _LENGTH.size + length:
                return
            self._messages.append(json.loads(self._received[_LENGTH.size : _LENGTH.size + length]))
            del self._received[: _LENGTH.size + length]
            _settle(self._awaited, None)

    def connection_lost(self, error: Exception | None) -> None:
        _settle(self._awaited, ConnectionResetError(f"the worker closed its socket ({error!r})"))


def _settle(future: "asyncio.Future[None] | None", error: Exception | None) -> None:
    if future is None or future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def start_context() -> ForkServerContext | SpawnContext:
    """How workers are started: never by forking this process, which runs threads."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED_MODULES))
    return context


def work(channel: socket.socket, verifier: Verifier, limits: WorkerLimits) -> None:
    """Judge what comes over the channel until it closes; the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with channel, channel.makefile("rb") as requests:
        _send(channel, {"pid": os.getpid()})
        while (request := _read(requests)) is not None:
            # The kernel ends a worker that computes too long: no Python code has to run for that, and no server.
            signal.setitimer(signal.ITIMER_PROF, limits.item_seconds)
            reply = _verdict(verifier, Item(**request))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            retires = _peak_memory_bytes() > RETIRING_SHARE * limits.memory_bytes
            _send(channel, reply | {"retires": retires})


def _verdict(verifier: Verifier, item: Item) -> Message:
    try:
        return asdict(verifier.score(item))
    except Exception as error:
        # The text comes from a model: if a rule fails on it, the server decides its score.
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _send(channel: socket.socket, message: Message) -> None:
    body = json.dumps(message).encode()
    channel.sendall(_LENGTH.pack(len(body)) + body)


def _read(requests: BinaryIO) -> Message | None:
    """The next message, or None when the server has closed the channel, also in the midst of one."""
    header = requests.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    body = requests.read(length)
    return json.loads(body) if len(body) == length else None
