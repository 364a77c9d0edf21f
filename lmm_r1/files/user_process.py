"""A process of its own for a user's functions: its main thread runs them, with one event loop for the whole run.

So limits by SIGALRM work, an async client may be shared by all calls, and a function that hangs can be killed.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import itertools
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

from lmm_r1.errors import UserError

Steps: TypeAlias = Generator[Awaitable[Any], Any, Any]
"""The calls that answer one request: it yields what it awaits, and returns the answer."""
_Outcome: TypeAlias = tuple[Any, "BaseException | None"]
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from lmm_r1.files.user_process import serve; "
    "serve(int(sys.argv[2]), int(sys.argv[3]))"
)


_NUMBER_BYTES = 8


class FunctionFailed(UserError):
    """A user's function raised; its traceback is on stderr."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A user's code after it was loaded."""

    answer: Callable[[Any], Steps]
    """Answers a request; raises UserError if that fails."""
    told: object = None
    """What the starting process is told of the code; it is pickled."""
    threads: int = 0
    """How many requests threads answer at a time; with 0 the main thread answers all."""


def called(function: Callable[..., Any], *arguments: object, **named: object) -> Steps:
    """Return a function's result; an async one is awaited in the event loop of the process."""
    reply = function(*arguments, **named)
    return (yield reply) if inspect.isawaitable(reply) else reply


@dataclass(frozen=True)
class SentRequest:
    """A request; both fail with UserError if the process ends."""

    begun: Future[None] = field(default_factory=Future)
    """Done when the code begins with it."""
    answer: Future[Any] = field(default_factory=Future)


class UserProcess:
    """The process as others see it; any thread may ask it. It ends with this object, or with the starting process."""

    def __init__(self, load: Callable[[], Served], *, what: str) -> None:
        """Start the process and load the code; raises UserError if that fails.

        Args:
            load: called in the process; it is pickled.
            what: what the process runs, for messages.
        """
        ours, theirs = Pipe()
        until, alive = os.pipe()
        command = [sys.executable, "-u", "-X", "faulthandler", "-c", _START, json.dumps(sys.path)]
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(until)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), until),
            start_new_session=True,
        )
        theirs.close()
        os.close(until)
        self._link = link = _Link(process, connection=ours, what=what)
        self.kill = weakref.finalize(self, link.kill, alive)
        """Ends the process at once, whatever it does."""
        try:
            ours.send(load)
            _, outcome, self.told = ours.recv()
        except (EOFError, OSError) as error:
            raise link.cause_of_death() from error
        if outcome == "failed":
            self.kill()
            raise self.told
        for work in (link.read, link.write):
            threading.Thread(target=work, name=what, daemon=True).start()

    def ask(self, request: object) -> SentRequest:
        """Send a request, which is pickled; requests are begun in their order."""
        return self._link.ask(request)

    def stop(self, reason: str) -> None:
        """Kill the process; open and later requests fail with this reason."""
        self._link.reason = reason
        self.kill()


class _Link:
    """The connection to a process, for two threads: one reads, one writes, so that nobody waits for a busy process."""

    def __init__(self, process: subprocess.Popen[bytes], *, connection: Connection, what: str) -> None:
        self.reason: str | None = None
        self._process, self._connection, self._what = process, connection, what
        self._numbers = itertools.count()
        self._asked: dict[int, SentRequest] = {}
        self._ended: UserError | None = None
        self._lock = threading.Lock()
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def ask(self, request: object) -> SentRequest:
        number, asked = next(self._numbers), SentRequest()
        message = number.to_bytes(_NUMBER_BYTES, "big") + pickle.dumps(request)
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._asked[number] = asked
        self._unsent.put(message)
        return asked

    def write(self) -> None:
        with suppress(OSError):
            while (message := self._unsent.get()) is not None:
                self._connection.send_bytes(message)

    def read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, outcome, value = self._connection.recv()
                if outcome == "begun":
                    _settle(self._asked[number].begun, value)
                else:
                    _settle(self._asked.pop(number).answer, value)
        error = self.cause_of_death()
        with self._lock:
            self._ended = error
        for asked in self._asked.values():
            for future in (asked.begun, asked.answer):
                if not future.done():
                    _settle(future, error)
        self._unsent.put(None)

    def kill(self, alive: int) -> None:
        if self._process.poll() is None:
            # With what the code has started; it may have ended by now.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(alive)

    def cause_of_death(self) -> UserError:
        code = self._process.wait()
        if self.reason is not None:
            return UserError(self.reason)
        if code >= 0:
            return UserError(
                f"{self._what}: its process ended with exit code {code}; a function must return, not exit"
            )
        advice = "the machine may be out of memory" if -code == signal.SIGKILL else "stderr says where"
        return UserError(
            f"{self._what}: its process was killed by signal {-code} ({signal.strsignal(-code)}); {advice}"
        )


def _settle(future: Future[Any], value: object) -> None:
    if future.set_running_or_notify_cancel():
        if isinstance(value, UserError):
            future.set_exception(value)
        else:
            future.set_result(value)


def serve(connection: int, lifeline: int) -> None:
    """Load a user's code and answer requests until the other end is closed; the main function of the process.

    Args:
        connection: the file descriptor of a socket.
        lifeline: that of a pipe which stays open while the starting process lives.
    """
    # The kernel kills this process when the starting one is gone, even if C code holds Python's lock.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    calls = _Serving(Connection(connection))
    with suppress(EOFError, BrokenPipeError):
        calls.run()


class _Serving:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._due: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        self._open_loop()

    def run(self) -> None:
        try:
            self._served = served = self._connection.recv()()
        except BaseException as error:  # the user's own code, which may raise anything
            self._send(-1, "failed", _passable(error))
            return
        self._send(-1, "loaded", served.told)
        self._threads = ThreadPoolExecutor(served.threads) if served.threads else None
        while True:
            # No event loop runs while a function is called, so that a plain one may use the loop itself.
            work = self._loop.run_until_complete(self._due.get())
            asyncio.set_event_loop(self._loop)
            work()
            if self._loop.is_closed():
                self._open_loop()

    def _open_loop(self) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        kept, self._due = self._due, asyncio.Queue()
        while not kept.empty():
            self._due.put_nowait(kept.get_nowait())
        self._loop.add_reader(self._connection.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            message = self._connection.recv_bytes()
        except EOFError as error:
            raise SystemExit from error
        number = int.from_bytes(message[:_NUMBER_BYTES], "big")
        steps = self._steps(message[_NUMBER_BYTES:])
        if self._threads is None:
            self._due.put_nowait(partial(self._begin, number, steps))
        else:
            self._threads.submit(self._answer_in_thread, number, steps)

    def _steps(self, request: bytes) -> Steps:
        return (yield from self._served.answer(pickle.loads(request)))

    def _begin(self, number: int, steps: Steps) -> None:
        self._send(number, "begun", None)
        self._go_on(number, steps, (None, None))

    def _go_on(self, number: int, steps: Steps, awaited: _Outcome) -> None:
        work = self._awaited_next(number, steps, awaited)
        if work is not None:
            task = self._loop.create_task(_outcome(work))
            task.add_done_callback(
                lambda done: self._due.put_nowait(partial(self._go_on, number, steps, done.result()))
            )

    def _answer_in_thread(self, number: int, steps: Steps) -> None:
        self._send(number, "begun", None)
        awaited: _Outcome = (None, None)
        while (work := self._awaited_next(number, steps, awaited)) is not None:
            awaited = asyncio.run_coroutine_threadsafe(_outcome(work), self._loop).result()

    def _awaited_next(self, number: int, steps: Steps, awaited: _Outcome) -> Awaitable[Any] | None:
        """Go on with a request by what it has awaited; return what it awaits next, None if it is answered."""
        value, raised = awaited
        try:
            return steps.send(value) if raised is None else steps.throw(raised)
        except StopIteration as ended:
            self._send(number, "answer", ended.value)
        except BaseException as error:  # the user's own code, which may raise anything
            self._send(number, "failed", _passable(error))
        return None

    def _send(self, number: int, outcome: Literal["loaded", "begun", "answer", "failed"], value: object) -> None:
        with self._sending:
            self._connection.send((number, outcome, value))


async def _outcome(work: Awaitable[Any]) -> _Outcome:
    try:
        return await work, None
    except BaseException as error:  # in a task, SystemExit would end the event loop
        return None, error


def _passable(error: BaseException) -> UserError:
    """Return an error that can be sent, after printing its traceback if it comes from the user's code."""
    if isinstance(error, UserError) and not isinstance(error, FunctionFailed):
        return UserError(str(error))
    traceback.print_exception(error)
    return error if isinstance(error, FunctionFailed) else UserError(f"{type(error).__name__}: {error}")
