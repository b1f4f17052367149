"""One end of a measured connection; started by `wire_speed.py`, once for each device.

The device that listens prints its port, the other dials it; then each sends what its streams say
and counts what arrives, and at the end prints one JSON object. Clocks are the machine's own
(`time.monotonic` is the same for all its processes), so a delay is a difference of two readings.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from p2ptrain.errors import PeerError  # noqa: E402
from p2ptrain.mesh.identity.identity import Identity, load_or_create  # noqa: E402
from p2ptrain.mesh.identity.state_folder import StateFolder  # noqa: E402
from p2ptrain.model.wire.tensor_codec import Unpacking, pack  # noqa: E402
from p2ptrain.net.frame import Header  # noqa: E402
from p2ptrain.net.link.compression import ChooserSettings  # noqa: E402
from p2ptrain.net.link.link import Link  # noqa: E402
from p2ptrain.net.link.link_settings import LinkSettings  # noqa: E402
from p2ptrain.net.message import Message, PartKind, Priority  # noqa: E402
from p2ptrain.net.transport.dial import dial  # noqa: E402
from p2ptrain.net.transport.listener import Listener, ListenerHooks  # noqa: E402
from p2ptrain.net.transport.tls import Credentials, certificate_id, client_context, server_context  # noqa: E402

READ_LIMIT_BYTES = 4 * 2**20
"""Buffer of the plain streams: large, or they stop and start reading all the time."""
MATRIX = 256
TENSOR_BYTES = (100_000, 1_000_000, 400_000, 4_000_000)
"""Sizes of the tensors that fill the link; the plain streams carry nothing else."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Messages sent one after the other.

    Attributes:
        lane: of the link; the plain kinds have none.
        part_bytes: sizes, taken in turn.
        in_flight: how many of them wait to be sent at a time.
        every_seconds: one message each so long, instead of as many as there is room for.
    """

    lane: int
    part_bytes: tuple[int, ...]
    in_flight: int = 1
    every_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Duty:
    """What one device does.

    Attributes:
        kind: "link", or what it is compared with: "tls" and "tcp" (asyncio's streams).
        own, peer: names of the devices' keys in `folder`.
        host: own address (listening), or the peer's (dialling).
        port: of the peer; 0 = listen.
        warm_seconds, seconds: what is not measured, and what is.
        compute: train something in another thread meanwhile.
        compress: let the link compress where that pays.
        data: "noise" (does not compress) or "relu" (half zeros).
    """

    kind: str
    folder: str
    own: str
    peer: str
    host: str
    port: int
    streams: tuple[Stream, ...]
    warm_seconds: float = 1.0
    seconds: float = 5.0
    compute: bool = False
    compress: bool = False
    data: str = "noise"

    @staticmethod
    def read(text: str) -> Duty:
        """From JSON."""
        fields = json.loads(text)
        streams = tuple(
            Stream(**{**stream, "part_bytes": tuple(stream["part_bytes"])})
            for stream in fields.pop("streams")
        )
        return Duty(**fields, streams=streams)

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


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
    delays_seconds: dict[int, list[float]] = field(default_factory=dict)
    first: float = 0.0
    last: float = 0.0

    def count(self, lane: int, count: int) -> None:
        """A message of `count` bytes is whole just now; the first one only starts the clock."""
        now = time.monotonic()
        if not self.begun <= now < self.ends:
            return
        if self.first:
            self.lane_bytes[lane] += count
        self.first = self.first or now
        self.last = now

    @property
    def bytes_per_s(self) -> float:
        """Between the first message's end and the last one's."""
        return self.lane_bytes.total() / max(self.last - self.first, 1e-9)

    def delayed(self, lane: int, sent: float) -> None:
        """A message sent then has just come."""
        now = time.monotonic()
        if self.begun <= sent and now < self.ends:
            self.delays_seconds.setdefault(lane, []).append(now - sent)


class Meter:
    """The measured time of this device: its bytes and the processor's seconds."""

    def __init__(self, duty: Duty) -> None:
        now = time.monotonic()
        begun = now + duty.warm_seconds
        self.window = Window(begun, begun + duty.seconds)
        self.cpu_seconds = 0.0

    async def run(self) -> None:
        """Returns when the time is over."""
        await asyncio.sleep(self.window.begun - time.monotonic())
        cpu_seconds = time.process_time()
        await asyncio.sleep(self.window.ends - time.monotonic())
        self.cpu_seconds = time.process_time() - cpu_seconds


def keys(duty: Duty) -> tuple[Credentials, bytes]:
    """Own keys, and the peer's certificate."""
    own, peer = (identity(Path(duty.folder), name) for name in (duty.own, duty.peer))
    return Credentials(own.pem_file, own.pem_file), peer.certificate_der


def identity(folder: Path, name: str) -> Identity:
    """A device's, made where there is none yet."""
    return load_or_create(StateFolder(folder / name))


def values(size_bytes: int, data: str) -> torch.Tensor:
    """Float32 values as training sends them."""
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(size_bytes // 4, generator=generator)
    return tensor.relu_() if data == "relu" else tensor


class TensorReceiver:
    """Receives tensors as a stage does: into memory of their own, made when the header came."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._opened: dict[tuple[int, int, int], Unpacking] = {}
        self.lost_because: str | None = None
        self._last_bytes = 0

    def open_parts(self, link: Link, header: Header) -> Sequence[memoryview]:
        """Memory for one tensor."""
        meta = header.fields["meta"]
        unpacking = Unpacking(meta, (torch.float32, tuple(meta[1])))
        self._opened[self._key(header.fields)] = unpacking
        return [unpacking.buffer]

    def deliver(self, link: Link, message: Message) -> None:
        """Note how long it took."""
        if message.parts:
            self._opened.pop(self._key(message.fields)).tensor()
        self._window.count(message.fields["lane"], message.parts_bytes)
        self._window.delayed(message.fields["lane"], message.fields["sent"])

    def lost(self, link: Link, error: PeerError) -> None:
        """The link has ended."""
        self.lost_because = str(error)

    @staticmethod
    def _key(fields: Any) -> tuple[int, int, int]:
        return fields["lane"], fields["stream"], fields["number"]


async def feed(link: Link, index: int, stream: Stream, until: float, data: str) -> None:
    """Send one stream's messages until `until`."""
    tensors = {size: values(size, data) for size in stream.part_bytes if size}
    numbers = itertools.count()
    sizes = itertools.cycle(stream.part_bytes)

    async def worker() -> None:
        while (now := time.monotonic()) < until:
            size, number = next(sizes), next(numbers)
            packed = pack(tensors[size]) if size else None
            fields = {
                "lane": stream.lane,
                "stream": index,
                "number": number,
                "sent": now,
                "meta": None if packed is None else packed.meta,
            }
            parts = () if packed is None else (packed.part,)
            kinds = (PartKind.ACTIVATION,) * len(parts)
            await link.send(Message("speed", fields, parts, kinds), Priority(stream.lane))
            if stream.every_seconds:
                await asyncio.sleep(stream.every_seconds)

    await asyncio.gather(*(worker() for _ in range(stream.in_flight)))


async def run_link(duty: Duty) -> dict[str, Any]:
    """The real link."""
    meters: list[tuple[Meter, TensorReceiver]] = []
    up: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    settings = LinkSettings(compression=ChooserSettings(enabled=duty.compress))

    def make_link(peer_id: str) -> Link:
        meter = Meter(duty)
        meters.append((meter, TensorReceiver(meter.window)))
        link = Link(peer_id, meters[-1][1], settings, _executor(duty))
        if not duty.port:
            up.set_result(link)
        return link

    own, peer = keys(duty)
    listener: Listener | None = None
    if duty.port:
        context = client_context(own, [peer])
        address = (duty.host, duty.port)
        link = await dial([address], context, certificate_id(peer), make_link)
    else:
        listener = Listener(ListenerHooks(lambda: server_context(own, [peer]), make_link))
        await listener.start([duty.host])
        print(listener.port, flush=True)
        link = await up
    meter, receiver = meters[0]
    feeding = [
        asyncio.create_task(feed(link, index, stream, meter.window.ends, duty.data))
        for index, stream in enumerate(duty.streams)
    ]
    await meter.run()
    counters = link.statistics()
    await asyncio.sleep(1.0)  # the other one's time ends a little later
    for task in feeding:
        task.cancel()
    errors = await asyncio.gather(*feeding, return_exceptions=True)
    link.abort("measured")
    if listener is not None:
        await listener.close()
    extra = {
        "lost": receiver.lost_because if receiver.lost_because != "measured" else None,
        "sent_bytes": counters.sent_bytes,
        "sent_parts_bytes": counters.sent_parts_bytes,
        "link_bytes_per_s": counters.link_bytes_per_s,
        "errors": [str(error) for error in errors if isinstance(error, PeerError)],
    }
    return _report(meter) | extra


def _executor(duty: Duty) -> Any:
    if not duty.compress:
        return None
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1)


async def run_plain(duty: Duty) -> dict[str, Any]:
    """asyncio's streams, over TLS or plain TCP: the same blocks, read whole."""
    own, peer = keys(duty)
    context: ssl.SSLContext | None = None
    if duty.kind == "tls":
        context = client_context(own, [peer]) if duty.port else server_context(own, [peer])
    opened: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    opened = asyncio.get_running_loop().create_future()
    if duty.port:
        name = "" if context else None
        reader, writer = await asyncio.open_connection(
            duty.host, duty.port, ssl=context, server_hostname=name, limit=READ_LIMIT_BYTES
        )
    else:

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.set_result((reader, writer))

        server = await asyncio.start_server(take, duty.host, 0, ssl=context, limit=READ_LIMIT_BYTES)
        print(server.sockets[0].getsockname()[1], flush=True)
        reader, writer = await opened
    meter = Meter(duty)
    tasks = [
        asyncio.create_task(_write_plain(writer, duty, meter.window.ends)),
        asyncio.create_task(_read_plain(reader, duty, meter.window)),
    ]
    await meter.run()
    await asyncio.sleep(1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    writer.transport.abort()
    return _report(meter)


async def _write_plain(writer: asyncio.StreamWriter, duty: Duty, until: float) -> None:
    if not duty.streams:
        return
    stream = duty.streams[0]
    blocks = {size: pack(values(size, duty.data)).part for size in stream.part_bytes}
    for size in itertools.cycle(stream.part_bytes):
        if time.monotonic() >= until:
            return
        writer.write(blocks[size])
        await writer.drain()


async def _read_plain(reader: asyncio.StreamReader, duty: Duty, window: Window) -> None:
    for size in itertools.cycle(TENSOR_BYTES):
        await reader.readexactly(size)
        window.count(Priority.TENSOR, size)


def _report(meter: Meter) -> dict[str, Any]:
    window = meter.window
    return {
        "seconds": window.ends - window.begun,
        "bytes_per_s": window.bytes_per_s,
        "cpu_seconds": meter.cpu_seconds,
        "lane_bytes": dict(window.lane_bytes),
        "delays_seconds": window.delays_seconds,
    }


def compute_until(stop: threading.Event) -> None:
    """Forward and backward, again and again, as the compute thread of a stage."""
    layers = [torch.nn.Linear(MATRIX, MATRIX) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    batch = torch.randn(MATRIX, MATRIX)
    while not stop.is_set():
        model(batch).square().mean().backward()


def main() -> None:
    """Do the duty given as JSON, print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("duty", type=Duty.read)
    duty: Duty = parser.parse_args().duty
    torch.set_num_threads(1)
    run: Callable[[Duty], Awaitable[dict[str, Any]]]
    run = run_link if duty.kind == "link" else run_plain
    stop = threading.Event()
    computing = threading.Thread(target=compute_until, args=(stop,))
    if duty.compute:
        computing.start()

    async def everything() -> dict[str, Any]:
        return await run(duty)

    try:
        print(json.dumps(asyncio.run(everything())), flush=True)
    finally:
        stop.set()
        if duty.compute:
            computing.join()


if __name__ == "__main__":
    main()
