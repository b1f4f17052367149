"""Answers questions in a process of their own, which may crash, hang or use up its memory.

    box = shared_box()
    answer = await box.ask(Question("p2ptrain.profiling.boxed_measure:measure", content, ...))

Each question gets a fresh process (`zygote` says how it begins, `confinement` what it may do), and
one is answered at a time. How that process ends is an answer too: `Ended`.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from p2ptrain.aio.tasks import outlast
from p2ptrain.process import zygote
from p2ptrain.process.zygote import ANSWER, ASK, HEAD, KILL, NOWHERE, PLACE, READY

LOOK_SECONDS = 0.1
"""Between two looks at how much memory a child has taken, where the system sets no limit."""

STARTED_BYTES = 400 << 20
"""Of which so much is what it begins with: it looks small while it loads torch."""

START_SECONDS = 120.0
"""For a process to load torch, on a small board; a question's time begins after it."""

END_SECONDS = 2.0
"""A side that closes without an answer has ended, or soon has."""


class How(Enum):
    """How a child ended that did not answer."""

    CRASH = "crash"
    MEMORY = "memory"
    TIME = "time"


class Ended(Exception):
    """A question's process has ended without an answer.

    Attributes:
        how: why.
        place: the last that was marked there, or None.
        by: name of a signal, or an exit code; for users.
    """

    def __init__(self, how: How, place: int | None, by: str) -> None:
        super().__init__(f"{how.value} at {place} ({by})")
        self.how, self.place, self.by = how, place, by


class NoBox(Exception):
    """No process can be had here."""


@dataclass(frozen=True, slots=True)
class BoxTask:
    """What a child is to do.

    Attributes:
        function: "module:name" of a `zygote.Function`.
        memory_bytes: that it may take, beside what it begins with.
        seconds: it may take.
        answer_limit_bytes: a longer answer is none.
    """

    function: str
    content: bytes
    memory_bytes: int
    seconds: float
    answer_limit_bytes: int = 4 << 20


class Child(Protocol):
    """A process that answers one question."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def kill(self) -> None:
        """End it, whatever it does; it may have ended."""

    async def ended(self) -> int:
        """Its exit status, a signal's below 0; once it has ended and its memory is free."""

    def used_bytes(self) -> int | None:
        """What it has taken; None where the system itself keeps the limit."""

    def place(self) -> int | None:
        """The last that it has marked."""


class Nursery(Protocol):
    """Where children come from."""

    async def child(self) -> Child:
        """A new one. Raises NoBox."""

    def close(self) -> None:
        """No more of them."""


class Box:
    """Asks one question at a time."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._one_at_a_time = asyncio.Lock()

    async def ask(self, question: BoxTask) -> bytes:
        """The answer, of which nothing is known but its length.

        Where the caller is cancelled the child ends, and with it what it has taken.

        Raises:
            Ended: it has ended without one.
            NoBox: no process can be had.
        """
        async with self._one_at_a_time:
            child = await self._nursery.child()
            settled = asyncio.ensure_future(self._settle(child, question))
            try:
                return await asyncio.shield(settled)
            except asyncio.CancelledError:
                child.kill()
                await outlast(settled)  # the next question would read this one's status
                raise

    async def _settle(self, child: Child, question: BoxTask) -> bytes:
        answering = asyncio.ensure_future(_exchange(child, question))
        how, answer, ending = None, None, asyncio.ensure_future(child.ended())
        try:
            how = await _until_over(child, question, answering)
            answer = answering.result() if answering.done() else None
            if how is None and answer is None:  # it ends by itself, or does no more
                await asyncio.wait([ending], timeout=END_SECONDS)
        finally:
            was_over = ending.done()
            answering.cancel()
            child.kill()
            status = await ending
            child.writer.close()
        if answer is not None:
            return answer
        raise _verdict(how, status if was_over else None, child.place())

    def close(self) -> None:
        """No question comes any more."""
        self._nursery.close()


async def _until_over(
    child: Child, question: BoxTask, answering: asyncio.Future[bytes | None]
) -> How | None:
    """Wait for the answer, or the connection's end; why it is too much, where it is."""
    loop = asyncio.get_running_loop()
    until = loop.time() + question.seconds
    step = question.seconds if child.used_bytes() is None else LOOK_SECONDS
    while not answering.done():
        await asyncio.wait([answering], timeout=min(step, max(until - loop.time(), 0)))
        used = child.used_bytes()
        if answering.done():
            break
        if used is not None and used > question.memory_bytes:
            return How.MEMORY
        if loop.time() >= until:
            return How.TIME
    return None


async def _exchange(child: Child, question: BoxTask) -> bytes | None:
    """None where it closes its side without an answer. Raises Ended: it is too long."""
    name = question.function.encode()
    try:
        head = HEAD.pack(question.memory_bytes, len(name), len(question.content))
        child.writer.write(head + name + question.content)
        await child.writer.drain()
        (length,) = ANSWER.unpack(await child.reader.readexactly(ANSWER.size))
        if length > question.answer_limit_bytes:
            raise Ended(How.CRASH, child.place(), "an answer that is too long")
        return await child.reader.readexactly(length)
    except (OSError, asyncio.IncompleteReadError):
        return None


def _verdict(how: How | None, status: int | None, place: int | None) -> Ended:
    """`status` is None where it was ended by this process."""
    if how is not None:
        return Ended(how, place, how.value)
    if status is None:
        return Ended(How.CRASH, place, "no answer")
    if status == zygote.OUT_OF_MEMORY_EXIT:
        return Ended(How.MEMORY, place, "out of memory")
    if status == -getattr(signal, "SIGKILL", 0):  # not by us: by the kernel, short of memory
        return Ended(How.MEMORY, place, "SIGKILL")
    return Ended(How.CRASH, place, _name(status))


def _name(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
    return f"exit code {status}"


class _Fork:
    """A child of the zygote. To kill it, ask the zygote: its number may be another's soon."""

    def __init__(
        self,
        control: socket.socket,
        page: mmap.mmap,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.reader, self.writer = streams
        self._control, self._page = control, page
        self._status: int | None = None
        self._killed = False

    def kill(self) -> None:
        if not self._killed and self._status is None:
            self._killed = True
            with contextlib.suppress(OSError):
                self._control.send(KILL)

    async def ended(self) -> int:
        if self._status is None:
            loop = asyncio.get_running_loop()
            word = await loop.sock_recv(self._control, 16)
            self._status = int(word) if word else -int(signal.SIGKILL)
        return self._status

    def used_bytes(self) -> int | None:
        return None

    def place(self) -> int | None:
        (found,) = PLACE.unpack_from(self._page)
        return None if found == NOWHERE else int(found)


class Zygote:
    """Forks its children from one process that has loaded what they need; Linux alone.

    Where that has ended, or was not begun when this process was fit for it, another is started.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """`preload`: modules that a started process imports."""
        self._preload = tuple(preload)
        self._control: socket.socket | None = None
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._pid: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded = False

    def fork(self) -> None:
        """From this process, in which torch is loaded and nothing has been computed."""
        control, its_control = _pair()
        self._pid = zygote.fork(its_control, self._page)
        its_control.close()
        self._control = control

    @property
    def pid(self) -> int | None:
        """The zygote's process."""
        return self._pid if self._process is None else self._process.pid

    async def child(self) -> Child:
        for _ in range(2):  # it may have been ended from outside
            if self._control is None:
                await asyncio.to_thread(self._start)
            assert self._control is not None
            if not await self._is_ready(self._control):
                self.close()
                continue
            PLACE.pack_into(self._page, 0, NOWHERE)
            ours, its = socket.socketpair()
            with its:
                streams = await asyncio.open_unix_connection(sock=ours)
                # no await from here on: each ASK has a caller that reads its status
                try:
                    socket.send_fds(self._control, [ASK], [its.fileno()])
                except OSError:
                    streams[1].close()
                    self.close()
                    continue
            return _Fork(self._control, self._page, streams)
        raise NoBox("the process that forks others has ended twice")

    async def _is_ready(self, control: socket.socket) -> bool:
        """Once it has loaded what it forks."""
        if not self._loaded:
            try:
                async with asyncio.timeout(START_SECONDS):
                    word = await asyncio.get_running_loop().sock_recv(control, len(READY))
            except (OSError, TimeoutError):
                word = b""
            self._loaded = word == READY
        return self._loaded

    def _start(self) -> None:
        control, its_control = _pair()
        with its_control, tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            passed = (its_control.fileno(), file.fileno())
            serve = f"--serve={passed[0]},{passed[1]}"
            self._process = subprocess.Popen(
                _command(serve, *self._preload),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=passed,
                env=_environment(),
            )
        self._control = control

    def close(self) -> None:
        """It ends, and a child that it has, as it can get no questions any more."""
        self._loaded = False
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()  # it may still load
            self._process.wait()
            self._process = None
        if self._pid is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = None


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, its


class _StartedProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self.reader, self.writer = process.stdout, process.stdin
        self._process = process

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self) -> int:
        return await self._process.wait()

    def used_bytes(self) -> int | None:
        import psutil  # here: it loads for 0.01 s, which --help need not

        try:
            used = int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0
        return max(used - STARTED_BYTES, 0)

    def place(self) -> int | None:
        return None


class Starter:
    """Starts a process a question: seconds, as each loads torch. For macOS and Windows."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """`preload`: modules that each imports first."""
        self._preload = tuple(preload)

    async def child(self) -> Child:
        process = await asyncio.create_subprocess_exec(
            *_command(*self._preload),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=_environment(),
        )
        child = _StartedProcess(process)
        try:
            async with asyncio.timeout(START_SECONDS):
                await child.reader.readexactly(len(READY))
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            child.kill()
            await child.ended()
            raise NoBox("a process for models of others does not start") from error
        return child

    def close(self) -> None:
        """Each has ended with its question."""


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", zygote.__name__, *arguments]


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
