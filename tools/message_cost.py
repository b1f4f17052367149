"""What a message costs at either end: processor time and Python calls, over TLS on this machine.

    python tools/message_cost.py [--messages 400] [--cold] [--profile KIND] [--json FILE]

Each end is a thread with its own event loop, and what it spends is the time of that thread. The
way is the real one, from the switchboard of one device to a receiver at the switchboard of the
other. `--cold` holds the process to one core and lets a thread beside it walk through 64 MiB, as a
model that trains there would: warm figures say less than half of what a message costs a household.

    started      a credit, without parts         paced    a pause after each message
    values       64 KiB, as activations          burst    the next as soon as the link takes it
    chunk        200 KB, as a part of a sum
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from p2ptrain import event_loop
from p2ptrain.errors import PeerError
from p2ptrain.mesh.hello import Hello
from p2ptrain.mesh.interface import Mesh, Take
from p2ptrain.mesh.peer_link import PeerLink
from p2ptrain.mesh.router import Router
from p2ptrain.net.endpoint import Door, Listener, dial
from p2ptrain.net.message import Fields, Message, PartsAllocator, Priority
from p2ptrain.net.tls import certificate_id, client_context, server_context
from p2ptrain.training.protocol import EpochKey
from p2ptrain.training.switchboard import Line, Switchboard
from tools.frame_cost import HOST, certificate, credentials, make_credentials

KINDS = {"started": 0, "values": 64 * 1024, "chunk": 200_000}
"""Part bytes of each kind of message."""
PAUSE_SECONDS = 0.004
_LINE = Line(EpochKey("cost", 1), 1, "ring")
_FIELDS: Fields = {"round": 3, "bucket": 2, "step": 1, "present": b"\xff\xff\xff"}
_CACHES_BYTES = 64 * 2**20
_HELLO = Hello("cost", "cost", 0.0, 1)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one message at the two ends: microseconds of processor time, and calls of functions."""

    kind: str
    pace: str
    send_us: float
    receive_us: float
    send_calls: float
    receive_calls: float


class End:
    """One device, as far as its messages need it: a `peer_link.LinkOwner` and a small `Mesh`."""

    def __init__(self, self_id: str, peer_id: str) -> None:
        self.self_id = self_id
        self.router = Router(self_id[:8], self.send)
        self.switchboard = Switchboard(cast(Mesh, self))
        self.executor = ThreadPoolExecutor(1)
        self.peer = PeerLink(peer_id, self, self.router, None, self.executor)
        self.peer.come_up(_HELLO)

    def route_now(self, kind: str, take: Take, parts: PartsAllocator | None = None) -> None:
        """See `Mesh.route_now`."""
        self.router.route_now(kind, take, parts)

    async def send(
        self, peer_id: str, message: Message, priority: Priority = Priority.CONTROL
    ) -> None:
        """See `Mesh.send`."""
        await self.peer.link.send(message, priority)

    def said_hello(self, link: PeerLink, hello: Hello) -> None:
        """None is said here."""

    def answered(self, link: PeerLink, hello: Hello) -> None:
        """None is said here."""

    def ended(self, link: PeerLink, error: PeerError) -> None:
        """The other end has hung up."""


class Sink:
    """Takes what comes on the line, into one buffer, and gives a credit for each frame."""

    def __init__(self, messages: int) -> None:
        self._buffer = memoryview(bytearray(max(KINDS.values())))
        self._left = messages
        self.done = asyncio.Event()

    def open(self, peer: str, fields: Fields, part_bytes: Sequence[int]) -> list[memoryview]:
        """The buffer."""
        return [self._buffer[:size] for size in part_bytes]

    def deliver(self, peer: str, fields: Fields) -> None:
        """Count it."""
        self.release()

    def release(self) -> None:
        """The same for credits."""
        self._left -= 1
        if not self._left:
            self.done.set()


class Meter:
    """Processor time and calls of the thread it is used in."""

    def __init__(self, profiled: bool) -> None:
        self.profile = cProfile.Profile() if profiled else None
        self._begun = 0.0
        self.seconds = 0.0

    def begin(self) -> None:
        """From now on."""
        self._begun = time.thread_time()
        if self.profile:
            self.profile.enable()

    def end(self) -> None:
        """Until now."""
        if self.profile:
            self.profile.disable()
        self.seconds = time.thread_time() - self._begun

    @property
    def calls(self) -> int:
        """How many there were; 0 without a profile."""
        return cast(Any, pstats.Stats(self.profile)).total_calls if self.profile else 0


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement."""

    kind: str
    paced: bool
    messages: int
    profiled: bool
    folder: Path


class Ends:
    """Two threads, each with one end of one link."""

    def __init__(self, plan: Round) -> None:
        self._plan = plan
        self._port = 0
        self._listening = threading.Event()
        self.sender, self.receiver = Meter(plan.profiled), Meter(plan.profiled)
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Measure."""
        threads = [
            threading.Thread(target=self._loop, args=(run,)) for run in (self._receive, self._send)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _loop(self, run: Callable[[], Awaitable[None]]) -> None:
        try:
            event_loop.run(cast(Any, run()))
        except BaseException as error:
            self._errors.append(error)
            self._listening.set()

    async def _receive(self) -> None:
        own = credentials(self._plan.folder, "receiver")
        peer = certificate(self._plan.folder, "sender")
        end = End(certificate_id(certificate(self._plan.folder, "receiver")), certificate_id(peer))
        sink = Sink(self._plan.messages)
        end.switchboard.connect_receiver(_LINE, sink, {certificate_id(peer)})
        end.switchboard.connect_credits(_LINE, cast(Any, sink), certificate_id(peer))
        door = Door(
            context=lambda: server_context(own, [peer]),
            make_link=lambda _peer: end.peer.link,
            on_link=lambda _link: self.receiver.begin(),
        )
        listener = Listener(door)
        await listener.start([HOST])
        self._port = listener.port
        self._listening.set()
        await sink.done.wait()
        self.receiver.end()
        end.peer.link.close("done")
        await end.peer.link.closed
        await listener.close()

    async def _send(self) -> None:
        self._listening.wait()
        own = credentials(self._plan.folder, "sender")
        peer = certificate(self._plan.folder, "receiver")
        end = End(certificate_id(certificate(self._plan.folder, "sender")), certificate_id(peer))
        context = client_context(own, [peer])
        address = [(HOST, self._port)]
        await dial(address, context, certificate_id(peer), lambda _peer: end.peer.link)
        part = memoryview(np.random.default_rng(0).bytes(KINDS[self._plan.kind]))
        self.sender.begin()
        for _ in range(self._plan.messages):
            if part:
                await end.switchboard.send_frame(end.peer.peer_id, _LINE, _FIELDS, [part])
            else:
                await end.switchboard.send_started(end.peer.peer_id, _LINE)
            await asyncio.sleep(PAUSE_SECONDS if self._plan.paced else 0)
        await end.peer.link.closed
        self.sender.end()


def measure(plan: Round) -> Ends:
    """One measurement."""
    ends = Ends(plan)
    ends.run()
    return ends


def cost(kind: str, paced: bool, messages: int, folder: Path, profile: bool) -> Cost:
    """Time without a profile, calls with one."""
    timed = measure(Round(kind, paced, messages, False, folder))
    counted = measure(Round(kind, paced, messages, True, folder))
    if profile:
        for name, meter in (("sender", counted.sender), ("receiver", counted.receiver)):
            print(f"== {name} of {kind}")
            pstats.Stats(meter.profile).sort_stats("tottime").print_stats(60)
    return Cost(
        kind,
        "paced" if paced else "burst",
        round(timed.sender.seconds / messages * 1e6, 1),
        round(timed.receiver.seconds / messages * 1e6, 1),
        round(counted.sender.calls / messages, 1),
        round(counted.receiver.calls / messages, 1),
    )


def thrash(stop: threading.Event) -> None:
    """Keep the caches full of other things."""
    one, other = (np.ones(_CACHES_BYTES // 8, dtype=np.float32) for _ in range(2))
    while not stop.is_set():
        np.add(one, other, out=one)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=400, help="of each measurement")
    parser.add_argument("--cold", action="store_true", help="one core, its caches used by others")
    parser.add_argument("--profile", choices=KINDS, help="show where this kind's time goes")
    parser.add_argument("--json", type=Path, help="write the result there")
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the JSON."""
    arguments = parse()
    stop = threading.Event()
    beside = threading.Thread(target=thrash, args=(stop,))
    if arguments.cold:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        beside.start()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_credentials(folder, "sender")
            make_credentials(folder, "receiver")
            kinds = [arguments.profile] if arguments.profile else list(KINDS)
            costs = [
                cost(kind, paced, arguments.messages, folder, bool(arguments.profile))
                for kind in kinds
                for paced in (True, False)
            ]
    finally:
        stop.set()
    for item in costs:
        print(
            f"{item.kind:9}{item.pace:7} send {item.send_us:8.1f} us {item.send_calls:7.1f} calls"
            f"   receive {item.receive_us:8.1f} us {item.receive_calls:7.1f} calls"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(item) for item in costs], indent=2) + "\n")


if __name__ == "__main__":
    main()
