"""What every device of an emulated household gets when all of them compute. Needs root, Linux.

    python tools/full_load.py B [--seconds 5] [--traffic]

Every device hashes for the given time; with `--traffic` it also sends to the next one as fast as
its cable carries. One line a device: its share of a core, the processor time that it was given as a
part of that share (1.000 is exact), the hashes for each second of the hashing process's processor
time beside those of a device alone (below 1: the processor was busy for others on its account), and
what its cable carried in each direction.
"""

from __future__ import annotations

import argparse
import hashlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.testbed import EmulatedDevice, Household, Testbed  # noqa: E402

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


def report(rows: Sequence[Row], pace_alone: float) -> str:
    """The table, with the household's sums in its last line."""
    lines = [f"{'device':12} {'cores':>6} {'given':>7} {'pace':>6} {'sent':>12} {'received':>12}"]
    lines += [
        f"{row.name:12} {row.cores:6.3f} {row.given / row.cores:7.3f} {row.pace / pace_alone:6.3f} "
        f"{row.sent_mbit:7.1f} Mbit {row.received_mbit:7.1f} Mbit"
        for row in rows
    ]
    cores, given = sum(row.cores for row in rows), sum(row.given for row in rows)
    return "\n".join([*lines, f"{'all':12} {cores:6.3f} {given / cores:7.3f}"])


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
        [sys.executable, __file__, "--inside", *arguments],
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


def compute() -> None:
    """Hash until told for how long, then count."""
    told: list[float] = []
    threading.Thread(target=lambda: told.append(float(input())), daemon=True).start()
    print("ready", flush=True)
    while not told:
        hashlib.sha256(_BYTES).digest()
    began, used, hashes = time.monotonic(), time.thread_time(), 0
    while time.monotonic() - began < told[0]:
        hashlib.sha256(_BYTES).digest()
        hashes += 1
    print(hashes / (time.thread_time() - used), flush=True)


def receive() -> None:
    """Take what one sender sends."""
    with socket.create_server(("", PORT)) as server:
        print("ready", flush=True)
        link, _ = server.accept()
        buffer = bytearray(len(_PIECE))
        while link.recv_into(buffer):
            pass


def send(address: str) -> None:
    """Send for ever."""
    link = socket.create_connection((address, PORT))
    print("ready", flush=True)
    while True:
        link.sendall(_PIECE)


def main() -> None:
    """Measure and print, or do a device's part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("household", help="its name or file")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--traffic", action="store_true")
    arguments = parser.parse_args()
    with Testbed.of_shares((0.5,)) as alone:
        (row,) = measure(alone, 2.0, traffic=False)
    with Testbed(Household.load(arguments.household)) as testbed:
        print(report(measure(testbed, arguments.seconds, arguments.traffic), row.pace))


INSIDE: dict[str, Callable[..., None]] = {"compute": compute, "receive": receive, "send": send}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        INSIDE[sys.argv[2]](*sys.argv[3:])
    else:
        main()
