"""How well a link is used: filled, and urgent things first. Needs root (network namespaces).

    python -m tools.wire_speed [--rates 100mbit 1gbit] [--seconds 6] [--only fill lanes]

Two devices, each a process in a network namespace of its own, both cables limited by `tc tbf`:

    fill      tensors of 0.1 to 4 MB both ways, several in flight, beside asyncio's TCP streams
    lanes     how long a 100 kB tensor and a heartbeat take while all-reduce and weights stream,
              and how much of the link the lower lanes still use

The nominal rate counts every byte of the Ethernet frames; a full frame of 1514 bytes carries 1448
bytes of TCP payload, so at most 95.6 % of it is payload. Of that TLS and our frames take 0.2 %.
Clocks are the machine's own (`time.monotonic` is the same for all its processes), so a delay is a
difference of two readings.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from p2ptrain.errors import PeerError
from p2ptrain.mesh.identity.identity import Identity, load_or_create
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.model.wire.tensor_codec import Unpacking, pack
from p2ptrain.net.frame import Header
from p2ptrain.net.link.compression import ChooserSettings
from p2ptrain.net.link.flow_control import LinkSettings
from p2ptrain.net.link.link import Link
from p2ptrain.net.message import Message, PartKind, Priority
from p2ptrain.net.transport.dial import dial
from p2ptrain.net.transport.listener import Listener, ListenerHooks
from p2ptrain.net.transport.tls import certificate_id, client_context, server_context
from tools.testbed import quantities
from tools.testbed.network import Network

ROOT = Path(__file__).resolve().parent.parent
PAYLOAD_OF_FRAME = 1448 / 1514
READ_LIMIT_BYTES = 4 * 2**20
"""Buffer of the plain streams: large, or they stop and start reading all the time."""
WARM_SECONDS = 1.0
LANE_NAMES = {0: "heartbeat", 1: "tensor", 2: "collective", 3: "bulk"}


@dataclass(frozen=True, slots=True)
class Stream:
    """Messages sent one after the other.

    Attributes:
        part_bytes: sizes, taken in turn.
        in_flight: how many of them wait to be sent at a time.
        every_seconds: one message each so long, instead of as many as there is room for.
    """

    lane: int
    part_bytes: tuple[int, ...]
    in_flight: int = 1
    every_seconds: float = 0.0


TENSORS = Stream(lane=1, part_bytes=(100_000, 1_000_000, 400_000, 4_000_000), in_flight=4)
STREAMS = {
    "fill": (TENSORS,),
    "lanes": (
        Stream(lane=0, part_bytes=(0,), every_seconds=0.05),
        Stream(lane=1, part_bytes=(100_000,), every_seconds=0.1),
        Stream(lane=2, part_bytes=(1_000_000,), every_seconds=0.4),
        Stream(lane=3, part_bytes=(4_000_000,), in_flight=2),
    ),
}


@dataclass(frozen=True, slots=True)
class Duty:
    """What one device does.

    Attributes:
        kind: of `STREAMS`, or "tcp": what "fill" is compared with.
        own, peer: names of the devices' keys in `folder`.
        host: own address (listening), or the peer's (dialling).
        port: of the peer; 0 = listen.
    """

    kind: str
    folder: str
    own: str
    peer: str
    host: str
    port: int
    seconds: float


@dataclass(slots=True)
class Window:
    """What arrived in the measured time.

    Attributes:
        lane_bytes: lane -> bytes of parts.
        delays_seconds: lane -> of each message, from before `send` to its delivery.
    """

    begun: float
    ends: float
    lane_bytes: Counter[int] = field(default_factory=Counter)
    delays_seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    first: float = 0.0
    last: float = 0.0

    def count(self, lane: int, count: int, sent: float | None = None) -> None:
        """A message of `count` bytes is whole just now; the first one only starts the clock."""
        now = time.monotonic()
        if not self.begun <= now < self.ends:
            return
        if self.first:
            self.lane_bytes[lane] += count
        self.first = self.first or now
        self.last = now
        if sent is not None and self.begun <= sent:
            self.delays_seconds[lane].append(now - sent)

    def report(self) -> dict[str, Any]:
        """As JSON takes it; bytes a second are between the first message's end and the last's."""
        return {
            "bytes_per_s": self.lane_bytes.total() / max(self.last - self.first, 1e-9),
            "seconds": self.ends - self.begun,
            "lane_bytes": dict(self.lane_bytes),
            "delays_seconds": self.delays_seconds,
        }


def identity(folder: Path, name: str) -> Identity:
    """A device's, made where there is none yet."""
    return load_or_create(StateFolder(folder / name))


class TensorReceiver:
    """Receives tensors as a stage does: into memory of their own, made when the header came."""

    def __init__(self, duty: Duty) -> None:
        begun = time.monotonic() + WARM_SECONDS
        self.window = Window(begun, begun + duty.seconds)
        self._opened: dict[tuple[int, int], Unpacking] = {}

    def open_parts(self, link: Link, header: Header) -> Sequence[memoryview]:
        """Memory for one tensor."""
        meta = header.fields["meta"]
        unpacking = Unpacking(meta, (torch.float32, tuple(meta[1])))
        self._opened[header.fields["lane"], header.fields["number"]] = unpacking
        return [unpacking.buffer]

    def deliver(self, link: Link, message: Message) -> None:
        """Note how long it took."""
        lane = message.fields["lane"]
        if message.parts:
            self._opened.pop((lane, message.fields["number"])).tensor()
        self.window.count(lane, message.parts_bytes, message.fields["sent"])

    def lost(self, link: Link, error: PeerError) -> None:
        """The link has ended."""


def values(size_bytes: int) -> torch.Tensor:
    """Float32 values that do not compress."""
    return torch.randn(size_bytes // 4, generator=torch.Generator().manual_seed(1))


async def feed(link: Link, stream: Stream, until: float) -> None:
    """Send one stream's messages until `until`."""
    tensors = {size: values(size) for size in stream.part_bytes if size}
    numbers, sizes = itertools.count(), itertools.cycle(stream.part_bytes)

    async def worker() -> None:
        while (now := time.monotonic()) < until:
            size, number = next(sizes), next(numbers)
            packed = pack(tensors[size]) if size else None
            meta = None if packed is None else packed.meta
            fields = {"lane": stream.lane, "number": number, "sent": now, "meta": meta}
            parts = () if packed is None else (packed.part,)
            kinds = (PartKind.ACTIVATION,) * len(parts)
            await link.send(Message("speed", fields, parts, kinds), Priority(stream.lane))
            if stream.every_seconds:
                await asyncio.sleep(stream.every_seconds)

    await asyncio.gather(*(worker() for _ in range(stream.in_flight)))


async def run_link(duty: Duty) -> Window:
    """The real link."""
    up: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    receivers: list[TensorReceiver] = []
    settings = LinkSettings(compression=ChooserSettings(enabled=False))

    def make_link(peer_id: str) -> Link:
        receivers.append(TensorReceiver(duty))
        link = Link(peer_id, receivers[0], settings)
        if not duty.port:
            up.set_result(link)
        return link

    mine, theirs = (identity(Path(duty.folder), name) for name in (duty.own, duty.peer))
    own, peer = mine.pem_file, theirs.certificate_der
    listener: Listener | None = None
    if duty.port:
        context = client_context(own, [peer])
        link = await dial([(duty.host, duty.port)], context, certificate_id(peer), make_link)
    else:
        listener = Listener(ListenerHooks(lambda: server_context(own, [peer]), make_link))
        await listener.start([duty.host])
        print(listener.port, flush=True)
        link = await up
    window = receivers[0].window
    feeding = [
        asyncio.create_task(feed(link, stream, window.ends)) for stream in STREAMS[duty.kind]
    ]
    await _over(window, feeding)
    link.abort("measured")
    if listener is not None:
        await listener.close()
    return window


async def run_tcp(duty: Duty) -> Window:
    """asyncio's streams: the same blocks, read whole."""
    opened: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    opened = asyncio.get_running_loop().create_future()
    if duty.port:
        reader, writer = await asyncio.open_connection(duty.host, duty.port, limit=READ_LIMIT_BYTES)
    else:

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.set_result((reader, writer))

        server = await asyncio.start_server(take, duty.host, 0, limit=READ_LIMIT_BYTES)
        print(server.sockets[0].getsockname()[1], flush=True)
        reader, writer = await opened
    begun = time.monotonic() + WARM_SECONDS
    window = Window(begun, begun + duty.seconds)

    async def write() -> None:
        blocks = {size: pack(values(size)).part for size in TENSORS.part_bytes}
        for size in itertools.cycle(TENSORS.part_bytes):
            if time.monotonic() >= window.ends:
                return
            writer.write(blocks[size])
            await writer.drain()

    async def read() -> None:
        for size in itertools.cycle(TENSORS.part_bytes):
            await reader.readexactly(size)
            window.count(TENSORS.lane, size)

    await _over(window, [asyncio.create_task(write()), asyncio.create_task(read())])
    writer.transport.abort()
    return window


async def _over(window: Window, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Returns when the time is over, on both devices: the other's ends a little later."""
    await asyncio.sleep(window.ends - time.monotonic() + 1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Bench:
    """Two devices on cables of `rate`, with their keys, "left" and "right", in `folder`."""

    network: Network
    folder: Path
    rate: str
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """The nominal rate."""
        return quantities.mbit(self.rate) * 1e6 / 8

    def run(self, kind: str) -> list[dict[str, Any]]:
        """The reports of both."""
        host, folder = self.network.address(0), str(self.folder)
        duty = Duty(kind, folder, "left", "right", host, 0, self.seconds)
        listening = self._start(0, duty)
        assert listening.stdout is not None
        port = int(listening.stdout.readline())
        dialling = self._start(1, replace(duty, own="right", peer="left", port=port))
        return [_report(process) for process in (listening, dialling)]

    def _start(self, device: int, duty: Duty) -> subprocess.Popen[str]:
        command = [*self.network.prefix(device), sys.executable, "-m", "tools.wire_speed"]
        command += ["--duty", json.dumps(asdict(duty))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _report(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=200)
    if process.returncode:
        raise SystemExit(f"a device failed with exit code {process.returncode}")
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


def filled(bench: Bench) -> str:
    """Share of what can be carried; the worse direction counts."""
    tcp, link = (
        min(report["bytes_per_s"] for report in bench.run(kind))
        / bench.bytes_per_s
        / PAYLOAD_OF_FRAME
        for kind in ("tcp", "fill")
    )
    return f"link {link:.1%} of the payload rate, TCP {tcp:.1%}: link/TCP {link / tcp:.1%}"


def lanes(bench: Bench) -> str:
    """Delays of urgent messages on a link that less urgent ones fill."""
    reports = bench.run("lanes")
    total = min(sum(report["lane_bytes"].values()) / report["seconds"] for report in reports)
    lines = [f"{total / bench.bytes_per_s / PAYLOAD_OF_FRAME:.1%} of the payload rate used in all"]
    for lane, name in LANE_NAMES.items():
        every = sorted(s for report in reports for s in report["delays_seconds"].get(str(lane), []))
        if every:
            shown = (statistics.median(every), every[int(len(every) * 0.99)], every[-1])
            median, tail, most = (f"{seconds * 1e3:7.1f} ms" for seconds in shown)
            lines.append(
                f"{'':18}{name:11} median {median}, 99 % {tail}, most {most} "
                f"({len(every)} messages)"
            )
    return "\n".join(lines)


SCENARIOS = {"fill": filled, "lanes": lanes}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=6.0, help="measured time of each run")
    parser.add_argument("--duty", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.duty:
        duty = Duty(**json.loads(arguments.duty))
        torch.set_num_threads(1)
        window = asyncio.run(run_tcp(duty) if duty.kind == "tcp" else run_link(duty))
        print(json.dumps(window.report()), flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        for device in ("left", "right"):
            identity(Path(name), device)
        for rate in arguments.rates:
            with Network(2, rate) as network:
                bench = Bench(network, Path(name), rate, arguments.seconds)
                for scenario in arguments.only:
                    print(f"{scenario:8} {rate:8} {SCENARIOS[scenario](bench)}", flush=True)


if __name__ == "__main__":
    main()
