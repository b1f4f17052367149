"""What every device of an emulated household gets when all of them compute. Needs root, Linux.

Every device hashes for the given time; with `traffic` it also sends to the next one as fast as its
cable carries.
"""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tools.testbed import EmulatedDevice, Testbed

PORT = 5001
_BYTES = bytes(20_000)
_PIECE = bytes(256 * 1024)


@dataclass(frozen=True, slots=True)
class Row:
    """What one device got.

    Attributes:
        given: processor seconds for each second, of all its processes.
        pace: hashes for each second of processor time.
    """

    name: str
    cores: float
    given: float
    pace: float
    sent_mbit: float
    received_mbit: float


def measure(testbed: Testbed, seconds: float, traffic: bool) -> list[Row]:
    """Let all devices compute at once, and read the counters before and after."""
    devices = testbed.devices
    with ExitStack() as stack:
        if traffic:
            for device in devices:
                stack.enter_context(running(device, "receive"))
            for device, other in zip(devices, [*devices[1:], devices[0]], strict=True):
                stack.enter_context(running(device, "send", other.address))
        working = [stack.enter_context(running(device, "compute")) for device in devices]
        time.sleep(1.0)  # past the first burst, and the slow start of TCP
        counters = [_Counters(device) for device in devices]
        for process in working:
            _tell(process, str(seconds))
        paces = [float(_said(process)) for process in working]
        return [counter.row(pace) for counter, pace in zip(counters, paces, strict=True)]


class _Counters:
    """A device's counters at some moment."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._began = self._read()

    def row(self, pace: float) -> Row:
        """What has happened since."""
        before, after = self._began, self._read()
        seconds, used, sent, received = (b - a for a, b in zip(before, after, strict=True))
        return Row(
            self._device.name,
            self._device.cores,
            used / seconds,
            pace,
            8e-6 * sent / seconds,
            8e-6 * received / seconds,
        )

    def _read(self) -> tuple[float, float, int, int]:
        device = self._device
        used, now = device.cpu_seconds(), time.monotonic()
        return now, used, device.sent_bytes(), device.received_bytes()


@contextmanager
def running(device: EmulatedDevice, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One of the commands below on a device, once it is ready."""
    process: subprocess.Popen[Any] = device.popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert _said(process) == "ready\n", f"{device.name}: {arguments} did not start"
        yield process
    finally:
        process.kill()
        process.wait()


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _say(words: object) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def compute() -> None:
    """Hash until the seconds to count for come on stdin, then count."""
    seconds: list[float] = []
    threading.Thread(target=lambda: seconds.append(float(input())), daemon=True).start()
    _say("ready")
    while not seconds:
        hashlib.sha256(_BYTES).digest()
    began, used, hashes = time.monotonic(), time.thread_time(), 0
    while time.monotonic() - began < seconds[0]:
        hashlib.sha256(_BYTES).digest()
        hashes += 1
    _say(hashes / (time.thread_time() - used))


def receive() -> None:
    """Take what one sender sends."""
    with socket.create_server(("", PORT)) as server:
        _say("ready")
        link, _ = server.accept()
        buffer = bytearray(len(_PIECE))
        while link.recv_into(buffer):
            pass


def send(address: str) -> None:
    """Send for ever."""
    link = socket.create_connection((address, PORT))
    _say("ready")
    while True:
        link.sendall(_PIECE)


INSIDE: dict[str, Callable[..., None]] = {"compute": compute, "receive": receive, "send": send}

if __name__ == "__main__":
    INSIDE[sys.argv[1]](*sys.argv[2:])
