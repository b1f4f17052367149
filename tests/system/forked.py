"""A `p2ptrain` command as a process that was forked where everything is loaded.

Loading takes seconds of a core, and the tests start a hundred devices. So one process loads for
all (`preloaded`), and each device is a fork of it: a process with its own number, streams, session,
environment and network place, that signals end or stop like any other. What differs is that
nothing is loaded any more, and that the memory of what was loaded is shared.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from p2ptrain.cli import startup
from p2ptrain.demo.household import LINE_LIMIT_BYTES, DeviceProcess
from tools.testbed import EmulatedDevice

_ENTER = "--net="

os.environ.setdefault(startup.VARIABLE, startup.SETTING)  # forks do not start over
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.system.preloaded"])


def can_enter(prefix: Sequence[str]) -> bool:
    """Whether a fork can take the network place that `prefix` stands for (`Network.prefix`)."""
    return not prefix or (prefix[0] == "nsenter" and len(prefix) == 2)


async def start(
    name: str,
    arguments: Sequence[str],
    *,
    prefix: Sequence[str],
    environment: Mapping[str, str],
    emulated: EmulatedDevice | None = None,
) -> DeviceProcess:
    """As `DeviceProcess.start`; `emulated`: whose share it has."""
    namespace = prefix[1].removeprefix(_ENTER) if prefix else ""
    out, its_out = _context.Pipe(duplex=False)
    err, its_err = _context.Pipe(duplex=False)
    words = (namespace, emulated, [*arguments, "--json"], dict(environment), its_out, its_err)
    process = _context.Process(target=_be_device, args=words, name=name, daemon=True)
    try:
        await asyncio.to_thread(process.start)  # the first waits until everything is loaded
    finally:
        its_out.close()
        its_err.close()
    return DeviceProcess(name, _Forked(process, await _reader(out), await _reader(err)))


class _Forked:
    """What `DeviceProcess` uses of an `asyncio.subprocess.Process`."""

    def __init__(
        self,
        process: ForkServerProcess,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
    ) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self.stdout, self.stderr = stdout, stderr
        self._process = process
        self._ended = asyncio.Event()
        self._sentinel = process.sentinel
        asyncio.get_running_loop().add_reader(self._sentinel, self._end)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode if self._ended.is_set() else None

    async def wait(self) -> int:
        await self._ended.wait()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._ended.is_set():
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._sentinel)
        self._process.join()
        self._ended.set()


async def _reader(pipe: Connection) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
    file = os.fdopen(os.dup(pipe.fileno()), "rb")
    pipe.close()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, file)
    return reader


def _be_device(
    namespace: str,
    emulated: EmulatedDevice | None,
    arguments: list[str],
    environment: dict[str, str],
    out: Connection,
    err: Connection,
) -> None:
    """In the fork: take the place of a process that was started with this command line."""
    os.setsid()
    for stream, pipe in ((1, out), (2, err)):
        os.dup2(pipe.fileno(), stream)
        pipe.close()
    if namespace:
        _enter(namespace)
    if emulated is not None:
        emulated.adopt_this_process()
    os.environ.update(environment)
    sys.argv = ["p2ptrain", *arguments]
    from p2ptrain.__main__ import main

    sys.exit(main())


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace, "rb") as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
