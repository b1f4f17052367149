"""What a link costs: CPU seconds per GB beside plain asyncio TLS streams of the same bytes.

    python tools/frame_cost.py [--megabytes 1024] [--part-kib 1024] [--rounds 3] [--json FILE]

Sender and receiver are separate processes on loopback; each reports its own CPU time (user and
system, `time.process_time`) between its first and its last byte. Rounds of the two kinds take
turns, so that a change of the machine's speed hits both. The plain side sends the parts as they
are, `writer.write` and `drain` on one end, `reader.readexactly` on the other.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from p2ptrain.errors import PeerError
from p2ptrain.net.compression import ChooserSettings
from p2ptrain.net.endpoint import Door, Listener, dial
from p2ptrain.net.header import Header
from p2ptrain.net.link import Link, LinkSettings
from p2ptrain.net.message import Message, PartKind, Priority
from p2ptrain.net.tls import (
    Credentials,
    certificate_id,
    client_context,
    pem_to_der,
    server_context,
)

HOST = "127.0.0.1"
KINDS = ("plain", "link")


@dataclass(frozen=True, slots=True)
class Load:
    """What one round sends: `parts` parts of `part_bytes` bytes."""

    parts: int
    part_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts."""
        return self.parts * self.part_bytes


@dataclass(frozen=True, slots=True)
class Round:
    """One measured round; CPU times in seconds, of the two processes apart."""

    kind: str
    send_cpu_seconds: float
    receive_cpu_seconds: float
    wall_seconds: float


def floats(part_bytes: int) -> memoryview:
    """Pseudo-random float32 values, as a gradient would be: they do not compress."""
    generator = random.Random(1)
    values = [generator.gauss(0.0, 1.0) for _ in range(4096)]
    block = struct.pack(f"{len(values)}f", *values)
    return memoryview((block * (part_bytes // len(block) + 1))[:part_bytes])


class Counter:
    """Receives parts into one reused buffer, as a stage receives into its own tensors."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._buffer = memoryview(bytearray(load.part_bytes))
        self._left = load.parts
        self.begun = 0.0
        self.done = asyncio.Event()

    def open_parts(self, link: Link, header: Header) -> Sequence[memoryview]:
        """The buffer, for every message."""
        self.begun = self.begun or time.process_time()
        return (self._buffer,)

    def deliver(self, link: Link, message: Message) -> None:
        """Count a message."""
        self._left -= 1
        if not self._left:
            self.done.set()

    def lost(self, link: Link, error: PeerError) -> None:
        """The link ended; the sender waits for that."""
        self.done.set()


def settings() -> LinkSettings:
    """A link that never compresses: the plain side does not either."""
    return LinkSettings(compression=ChooserSettings(enabled=False))


async def receive_link(own: Credentials, peer_der: bytes, load: Load) -> float:
    """Accept one link, take the load, and give the CPU seconds it took."""
    counter = Counter(load)
    links: list[Link] = []
    door = Door(
        context=lambda: server_context(own, [peer_der]),
        make_link=lambda peer_id: Link(peer_id, counter, settings()),
        on_link=links.append,
    )
    listener = Listener(door)
    await listener.start([HOST])
    print(listener.port, flush=True)
    await counter.done.wait()
    cpu_seconds = time.process_time() - counter.begun
    await links[0].send(Message("done"))
    links[0].close("done")
    await links[0].closed
    await listener.close()
    return cpu_seconds


async def send_link(own: Credentials, peer_der: bytes, load: Load, port: int) -> float:
    """Dial, send the load, and give the CPU seconds until the other side had all of it."""
    part = floats(load.part_bytes)
    counter = Counter(load)
    link = await dial(
        [(HOST, port)],
        client_context(own, [peer_der]),
        certificate_id(peer_der),
        lambda peer_id: Link(peer_id, counter, settings()),
    )
    begun = time.process_time()
    for number in range(load.parts):
        message = Message("cost", {"number": number}, (part,), (PartKind.GRADIENT,))
        await link.send(message, Priority.TENSOR)
    await counter.done.wait()
    return time.process_time() - begun


async def receive_plain(own: Credentials, peer_der: bytes, load: Load) -> float:
    """The same with `asyncio.start_server`."""
    done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readexactly(1)
        begun = time.process_time()
        for _ in range(load.parts):
            await reader.readexactly(load.part_bytes)
        done.set_result(time.process_time() - begun)
        writer.write(first)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(take, HOST, 0, ssl=server_context(own, [peer_der]))
    print(server.sockets[0].getsockname()[1], flush=True)
    cpu_seconds = await done
    server.close()
    return cpu_seconds


async def send_plain(own: Credentials, peer_der: bytes, load: Load, port: int) -> float:
    """The same with `asyncio.open_connection`."""
    part = floats(load.part_bytes)
    reader, writer = await asyncio.open_connection(
        HOST, port, ssl=client_context(own, [peer_der]), server_hostname=""
    )
    writer.write(b"!")
    begun = time.process_time()
    for _ in range(load.parts):
        writer.write(part)
        await writer.drain()
    await reader.readexactly(1)
    cpu_seconds = time.process_time() - begun
    writer.close()
    return cpu_seconds


def make_credentials(folder: Path, name: str) -> None:
    """A throw-away key and self-signed certificate as NAME.crt and NAME.key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(start).not_valid_after(start + datetime.timedelta(days=9))
    constraints = x509.BasicConstraints(ca=False, path_length=None)
    certificate = builder.add_extension(constraints, critical=True).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    key_pem = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(pem))
    (folder / f"{name}.key").write_bytes(key_pem)


def credentials(folder: Path, name: str) -> Credentials:
    """Where `make_credentials` put them."""
    return Credentials(folder / f"{name}.crt", folder / f"{name}.key")


def certificate(folder: Path, name: str) -> bytes:
    """The certificate in DER."""
    return pem_to_der((folder / f"{name}.crt").read_text())


def child(arguments: argparse.Namespace) -> None:
    """One end of a round: prints its port (receiver) and its CPU seconds."""
    folder: Path = arguments.folder
    load = Load(arguments.parts, arguments.part_bytes)
    if arguments.child == "receive":
        receive = receive_link if arguments.kind == "link" else receive_plain
        run = receive(credentials(folder, "receiver"), certificate(folder, "sender"), load)
    else:
        send = send_link if arguments.kind == "link" else send_plain
        peer = certificate(folder, "receiver")
        run = send(credentials(folder, "sender"), peer, load, arguments.port)
    print(asyncio.run(run), flush=True)


def measure(kind: str, load: Load, folder: Path) -> Round:
    """One round: two fresh processes."""
    command = [sys.executable, __file__, "--kind", kind, "--folder", str(folder)]
    command += ["--parts", str(load.parts), "--part-bytes", str(load.part_bytes)]
    with subprocess.Popen(
        [*command, "--child", "receive"], stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        begun = time.perf_counter()
        sender = subprocess.run(
            [*command, "--child", "send", "--port", port],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        wall_seconds = time.perf_counter() - begun
        receive_cpu_seconds = float(receiver.stdout.readline())
    return Round(kind, float(sender.stdout), receive_cpu_seconds, wall_seconds)


def summary(rounds: list[Round], load: Load) -> dict[str, object]:
    """Medians per GB (10^9 bytes) and their ratio."""
    gigabytes = load.total_bytes / 1e9
    result: dict[str, object] = {"part_bytes": load.part_bytes, "total_bytes": load.total_bytes}
    totals: dict[str, float] = {}
    for kind in KINDS:
        mine = [item for item in rounds if item.kind == kind]
        send = statistics.median(item.send_cpu_seconds for item in mine) / gigabytes
        receive = statistics.median(item.receive_cpu_seconds for item in mine) / gigabytes
        totals[kind] = send + receive
        result[kind] = {
            "send_cpu_s_per_gb": round(send, 3),
            "receive_cpu_s_per_gb": round(receive, 3),
            "total_cpu_s_per_gb": round(send + receive, 3),
        }
    result["ratio"] = round(totals["link"] / totals["plain"], 3)
    result["rounds"] = [asdict(item) for item in rounds]
    return result


def table(result: dict[str, object]) -> str:
    """The summary for people."""
    lines = [f"{'CPU s per GB':14}{'send':>9}{'receive':>9}{'total':>9}"]
    for kind in KINDS:
        row = result[kind]
        assert isinstance(row, dict)
        cells = "".join(f"{value:9.3f}" for value in row.values())
        lines.append(f"{kind:14}{cells}")
    lines.append(f"link / plain: {result['ratio']}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Command line; the hidden options are for the child processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024, help="MiB sent in each round")
    parser.add_argument("--part-kib", type=int, default=1024, help="size of a part in KiB")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each kind")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--child", choices=("send", "receive"), help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--part-bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the JSON."""
    arguments = parse()
    if arguments.child:
        child(arguments)
        return
    part_bytes = arguments.part_kib * 1024
    load = Load(max(1, arguments.megabytes * 2**20 // part_bytes), part_bytes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_credentials(folder, "sender")
        make_credentials(folder, "receiver")
        rounds = [measure(kind, load, folder) for _ in range(arguments.rounds) for kind in KINDS]
    result = summary(rounds, load)
    print(table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
