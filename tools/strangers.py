"""What strangers cost a member: memory that stays, and processor time, by what they say.

    python -m tools.strangers [--connections 20000] [--addresses 200]
    python -m tools.strangers --steps 100 [--half 500]

An idle `join` on loopback, its garbage collector off, with its pairing window open. With `--steps`,
two devices that train instead: the median of so many steps before, under and after half handshakes
from all addresses, so many of them held open or dialled again at any time at each device; five
times. Exit code 1: under them a step takes 10% longer than the slower of the others, mostly.
Linux: it reads /proc, and takes the strangers' addresses from 127.0.0.0/8.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.system.household import Household

_MEMBER = "import gc, sys; gc.disable(); from p2ptrain.__main__ import main; sys.exit(main())"
_OPEN_AT_ONCE = 100
_CUT_SECONDS = 5.0
"""After which a device cuts a handshake that does not go on."""
_WARM_STEPS = 30
_ROUNDS = 5
_LARGEST_GROWTH = 0.1
_CLIENT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_CLIENT.check_hostname = False
_CLIENT.verify_mode = ssl.CERT_NONE


def client_hello() -> bytes:
    """A TLS client's first flight."""
    outgoing = ssl.MemoryBIO()
    tls = _CLIENT.wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def silent(_connection: socket.socket) -> None:
    """Says nothing."""


def noise(connection: socket.socket) -> None:
    """What no TLS client says."""
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")


def damaged(connection: socket.socket) -> None:
    """A TLS hello of which half is noise."""
    hello = client_hello()
    connection.sendall(hello[: len(hello) // 2] + os.urandom(len(hello) - len(hello) // 2))


def half(connection: socket.socket) -> None:
    """A TLS hello, and nothing after the server's answer."""
    connection.sendall(client_hello())


def handshake(connection: socket.socket) -> ssl.SSLSocket:
    """The whole handshake, then silence."""
    connection.settimeout(0.02)  # most are not given a turn
    return _CLIENT.wrap_socket(connection)


def hello(connection: socket.socket) -> None:
    """The handshake, a pairing message, and the end."""
    with handshake(connection) as tls:
        tls.sendall(b"\x00\x05hello")


KINDS: dict[str, Callable[[socket.socket], object]] = {
    "silent": silent,
    "noise": noise,
    "damaged hello": damaged,
    "half handshake": half,
    "handshake, then silence": handshake,
    "pairing message, then end": hello,
}


def knock(port: int, kind: str, count: int, addresses: int) -> None:
    """`count` strangers from that many addresses; the last of them stay connected for a while."""
    here: deque[object] = deque(maxlen=_OPEN_AT_ONCE)
    for number in range(count):
        connection = socket.socket()
        address = number % addresses
        connection.bind((f"127.0.{1 + address // 250}.{1 + address % 250}", 0))
        connection.settimeout(1.0)
        with contextlib.suppress(OSError):  # refused or cut: what was to be shown
            connection.connect(("127.0.0.1", port))
            here.append((connection, KINDS[kind](connection)))


def rss_bytes(pid: int) -> int:
    """Of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """Of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def member(folder: str) -> Iterator[tuple[int, int]]:
    """Pid and port of an idle `join`."""
    options = ["join", "--name", "member", "--interface", "127.0.0.1", "--port", "0"]
    command = [sys.executable, "-c", _MEMBER, *options, "--state-dir", folder, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = next(e["port"] for e in map(json.loads, process.stdout) if e["event"] == "ready")
            time.sleep(3.0)  # it still settles
            yield process.pid, port
        finally:
            process.terminate()


def press(ports: Sequence[int], half_open: int, addresses: int) -> None:
    """Half handshakes without end, each dialled again some seconds later, when it has been cut."""
    os.nice(19)  # the strangers have processors of their own
    here: dict[int, deque[socket.socket]] = {port: deque(maxlen=half_open) for port in ports}
    said, pause = client_hello(), _CUT_SECONDS / half_open
    for number in itertools.count():
        for port in ports:
            connection = socket.socket()
            at = number % addresses
            with contextlib.suppress(OSError):  # refused or cut: what was to be shown
                connection.bind((f"127.0.{1 + at // 250}.{1 + at % 250}", 0))
                connection.settimeout(1.0)
                connection.connect(("127.0.0.1", port))
                connection.sendall(said)
            here[port].append(connection)
        time.sleep(pause)


async def steps_under(count: int, half_open: int, addresses: int) -> bool:
    """Print the medians; whether the bar is kept."""
    own = ("--code", "48151623", "--interface", "127.0.0.1", "--port", "0")
    job = str(Path(__file__).parent / "recovery_times_job.py")
    size = ("-o", "width=256", "-o", "layers=12")
    growths: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with Household(Path(folder)) as household:
            devices = [await household.start("b", "join", *own)]
            train = ("train", job, *size, "--wait-for", "2", "--planner", "pp", "--no-replan")
            devices.append(await household.start("a", *train, *own))
            ports = [(await device.expect("ready"))["port"] for device in devices]

            async def median() -> float:
                """Of the next steps, in seconds."""
                since = len(devices[1].events("step"))
                await devices[1].expect("step", 600.0, step=since + count)
                return statistics.median(
                    event["seconds"] for event in devices[1].events("step")[since:]
                )

            await devices[1].expect("step", step=_WARM_STEPS)
            for _ in range(_ROUNDS):
                before = await median()
                strangers = multiprocessing.get_context("spawn").Process(
                    target=press, args=(ports, half_open, addresses), daemon=True
                )
                strangers.start()
                try:
                    await asyncio.sleep(_CUT_SECONDS)  # until all of them are there
                    under = await median()
                finally:
                    strangers.kill()
                    strangers.join()
                await asyncio.sleep(_CUT_SECONDS)
                after = await median()
                growths.append(under / max(before, after) - 1)
                print(
                    f"step before, under and after: {before * 1e3:.1f}, {under * 1e3:.1f}, "
                    f"{after * 1e3:.1f} ms: {growths[-1]:+.1%}",
                    flush=True,
                )
    return statistics.median(growths) <= _LARGEST_GROWTH


def main() -> int:
    """Show a line for each kind, and one for all."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--connections", type=int, default=20_000)
    parser.add_argument("--addresses", type=int, default=200)
    parser.add_argument("--steps", type=int, default=0, help="of a job, before, under and after")
    parser.add_argument("--half", type=int, default=500, help="half handshakes at a time")
    options = parser.parse_args()
    if options.steps:
        return 0 if asyncio.run(steps_under(options.steps, options.half, options.addresses)) else 1
    count = options.connections // len(KINDS)
    with tempfile.TemporaryDirectory() as folder, member(folder) as (pid, port):
        first = rss_bytes(pid)
        for kind in KINDS:
            before, cpu, begun = rss_bytes(pid), cpu_seconds(pid), time.monotonic()
            knock(port, kind, count, options.addresses)
            seconds = time.monotonic() - begun
            cpu = cpu_seconds(pid) - cpu
            time.sleep(6.0)  # the last of them are cut
            grown = (rss_bytes(pid) - before) / 2**20
            print(
                f"{count} x {kind}: {seconds:.1f} s, {1e3 * cpu / count:.2f} ms of processor each, "
                f"{100 * cpu / seconds:.0f}% of a core, {grown:+.1f} MiB",
                flush=True,
            )
        print(f"in all {(rss_bytes(pid) - first) / 2**20:+.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
