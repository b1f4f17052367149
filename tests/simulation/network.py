"""A simulated LAN of reliable, ordered links that can be cut without anybody being informed.

Links behave as TCP does. What is sent arrives late rather than never; while a path is cut,
messages wait in the sender's kernel and arrive once it heals, or, after `TIMEOUT_SECONDS`
unacknowledged, the sender's end of the link dies. The end of a process reaches the other side
at once (FIN or RST), that of a machine is not. Where this is unrealistic: no bandwidth limit and
no loss, but for cables that `slow_down` makes slow; no window that fills up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random
from typing import Protocol

import cbor2

from p2ptrain.mesh.membership.core_events import Payload
from tests.simulation.cable import WORD_BYTES, Direction, Slowdown
from tests.simulation.kernel import Kernel
from tests.simulation.lossy import Carrier, Flow

TIMEOUT_SECONDS = 10.0
MESSAGE_LIMIT_BYTES = 4096

Path = tuple[str, str]


class Endpoint(Protocol):
    """What the network asks and tells of a device."""

    id: str
    process_runs: bool
    """A process that may be frozen; its machine's kernel accepts and refuses for it."""
    machine_runs: bool
    is_frozen: bool

    def on_message(self, peer: str, channel: str, payload: Payload) -> None: ...

    def on_traffic(self, peer: str) -> None: ...

    def on_sign(self, peer: str) -> None: ...

    def on_link_up(self, peer: str) -> None: ...

    def on_link_lost(self, peer: str, *, refused: bool) -> None: ...


@dataclass(slots=True, eq=False)
class _Connection:
    """One link; `held` and `arrives` are by sender."""

    held: dict[str, list[bytes | None]] = field(default_factory=dict)  # None = the link ends
    arrives: dict[str, float] = field(default_factory=dict)  # latest arrival so far: keeps order
    flows: dict[str, Flow] = field(default_factory=dict)  # by sender, over a cable that loses


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """Delay = least + exponential with mean `mean - least`; some messages arrive twice."""

    least_seconds: float = 0.0005
    mean_seconds: float = 0.002
    duplicate_share: float = 0.0


class Network:
    """All links. A device's end of its link to a peer is `_ends[device, peer]`."""

    def __init__(self, kernel: Kernel, rng: Random) -> None:
        self._kernel = kernel
        self._rng = rng
        self._devices: dict[str, Endpoint] = {}
        self._ends: dict[Path, _Connection] = {}
        self._unrefused: set[Path] = set()  # losses of which no refused redial was reported yet
        self._cut: dict[Path, int] = {}  # how many faults cut the path
        self._up: dict[str, Direction] = {}  # of slow cables: what a device sends
        self._down: dict[str, Direction] = {}  # and what it receives
        self.quality: dict[Path, LinkQuality] = {}
        self.default_quality = LinkQuality()
        self.sent_messages: dict[str, int] = {}
        self.largest_message_bytes = 0

    def add(self, device: Endpoint) -> None:
        """Plug a device in."""
        self._devices[device.id] = device

    # -- faults ----------------------------------------------------------------------------

    def cut(self, paths: Iterable[Path]) -> None:
        """Let nothing pass along `paths` (sender, receiver)."""
        for path in paths:
            self._cut[path] = self._cut.get(path, 0) + 1

    def heal(self, paths: Iterable[Path]) -> None:
        """Undo one `cut` of each of `paths`; what waited there arrives."""
        for path in paths:
            self._cut[path] -= 1
            if not self._cut[path]:
                del self._cut[path]
                self._flush(path)

    def heal_all(self) -> None:
        """Undo every cut."""
        for path in list(self._cut):
            self._cut[path] = 1
            self.heal([path])

    def process_ended(self, device: str) -> None:
        """The kernel of `device` closes its links."""
        for peer in self._devices:
            self.close(device, peer)

    def machine_ended(self, device: str) -> None:
        """Power off: its ends vanish, nobody is informed."""
        for peer in self._devices:
            self._ends.pop((device, peer), None)

    def is_cut(self, path: Path) -> bool:
        """Whether nothing passes along it now."""
        return path in self._cut

    def slow_down(self, device: str, how: Slowdown, before: str, after: str) -> None:
        """A device's cable becomes slow, full of data that `before` sends and `after` gets."""
        self.slow_down_row([device], how, before, after)

    def slow_down_row(self, devices: Sequence[str], how: Slowdown, before: str, after: str) -> None:
        """The cables of such as send to one another, each to the next, become slow at once.

        The first gets data from `before`, the last sends some to `after`.
        """
        to = partial(self._data_arrived, before, devices[0])
        self._down[devices[0]] = Direction(how, self._kernel, to)
        for sender, receiver in pairwise(devices):
            self._down[receiver] = onto = Direction(how, self._kernel, None)
            between = partial(self._data_arrived, sender, receiver)
            self._up[sender] = Direction(how, self._kernel, between, onto)
        fro = partial(self._data_arrived, devices[-1], after)
        self._up[devices[-1]] = Direction(how, self._kernel, fro)

    def _data_arrived(self, sender: str, receiver: str) -> None:
        if self._ends.get((receiver, sender)) is not None:
            self._devices[receiver].on_traffic(sender)

    def end_data(self, device: str) -> None:
        """The device's process sends no more data; what waits at its slow cable goes on."""
        self._up[device].is_full = False

    def speed_up(self) -> None:
        """All cables are fast again; what is on its way arrives as it would have."""
        for direction in (*self._up.values(), *self._down.values()):
            direction.is_full = False
        self._up, self._down = {}, {}

    # -- links -----------------------------------------------------------------------------

    def end(self, path: Path) -> object | None:
        """The link whose end `path[0]` has, the same object at both ends; None: it has none."""
        return self._ends.get(path)

    def break_link(self, one: str, other: str) -> None:
        """The link between two devices ends, and both are informed."""
        for path in ((one, other), (other, one)):
            if path in self._ends:
                self._lose(path)

    def close(self, device: str, peer: str) -> None:
        """`device` closes its link to `peer`, who is informed."""
        connection = self._ends.pop((device, peer), None)
        if connection is not None:
            self._transmit(connection, (device, peer), None)

    def send(self, path: Path, channel: str, payload: Payload) -> None:
        """Send a message along `path`; dropped where its sender has no link."""
        connection = self._ends.get(path)
        if connection is None:
            return
        data = cbor2.dumps([channel, payload])
        self.sent_messages[path[0]] = self.sent_messages.get(path[0], 0) + 1
        self.largest_message_bytes = max(self.largest_message_bytes, len(data))
        assert len(data) <= MESSAGE_LIMIT_BYTES, f"message of {len(data)} bytes"
        self._transmit(connection, path, data)

    def redial(self, device: str) -> None:
        """`device` tries to link to everyone it has no link to."""
        for peer, endpoint in self._devices.items():
            if peer != device and (device, peer) not in self._ends:
                self._dial(self._devices[device], endpoint)

    def _dial(self, caller: Endpoint, callee: Endpoint) -> None:
        path, back = (caller.id, callee.id), (callee.id, caller.id)
        if path in self._cut or back in self._cut or not callee.machine_runs:
            return
        if not callee.process_runs:
            if path in self._unrefused:
                self._unrefused.discard(path)
                caller.on_link_lost(callee.id, refused=True)
        elif not callee.is_frozen:
            if self._ends.pop(back, None) is not None:  # only the caller knew that it had ended
                callee.on_link_lost(caller.id, refused=False)
            self._ends[path] = self._ends[back] = _Connection()
            self._unrefused -= {path, back}
            caller.on_link_up(callee.id)
            callee.on_link_up(caller.id)

    # -- delivery --------------------------------------------------------------------------

    def _delay(self, path: Path) -> float:
        quality = self.quality.get(path, self.default_quality)
        spread = quality.mean_seconds - quality.least_seconds
        return quality.least_seconds + self._rng.expovariate(1 / spread)

    def _transmit(self, connection: _Connection, path: Path, data: bytes | None) -> None:
        sender = path[0]
        held = connection.held.get(sender)
        if held is not None or path in self._cut or not self._devices[path[1]].machine_runs:
            self._hold(connection, path, data)
            return
        flow = connection.flows.get(sender)
        slow = (self._up.get(sender), self._down.get(path[1]))
        loses = any(direction is not None and direction.may_lose for direction in slow)
        if loses or (flow is not None and flow.is_busy):
            if flow is None:
                flow = connection.flows[sender] = self._flow(connection, path)
            flow.send(data)
            return
        arrival = max(connection.arrives.get(sender, 0.0), self._kernel.now + self._delay(path))
        for slow in (self._up.get(sender), self._down.get(path[1])):
            arrival = max(arrival, slow.carry(WORD_BYTES)) if slow is not None else arrival
        connection.arrives[sender] = arrival
        copies = 1
        quality = self.quality.get(path, self.default_quality)
        if data is not None and self._rng.random() < quality.duplicate_share:
            copies = 2
        label = b"%s>%s %s" % (sender.encode(), path[1].encode(), data or b"end")
        for _ in range(copies):
            self._kernel.at(arrival, label, lambda: self._arrive(connection, path, data))

    def _flow(self, connection: _Connection, path: Path) -> Flow:
        sender, receiver = path

        def carry() -> float | None:
            arrival = max(connection.arrives.get(sender, 0.0), self._kernel.now + self._delay(path))
            for slow in (self._up.get(sender), self._down.get(receiver)):
                if slow is not None:
                    if slow.loses(self._rng):
                        return None
                    arrival = max(arrival, slow.carry(WORD_BYTES))
            return arrival

        def sign() -> None:
            if self._ends.get((receiver, sender)) is connection:
                self._devices[receiver].on_sign(sender)

        around = Carrier(
            carry,
            lambda data: self._arrive(connection, path, data),
            sign,
            lambda: self._ends.get(path) is connection,
        )
        return Flow(self._kernel, b"%s>%s" % (sender.encode(), receiver.encode()), around)

    def _hold(self, connection: _Connection, path: Path, data: bytes | None) -> None:
        held = connection.held.setdefault(path[0], [])
        if not held:
            label = b"timeout %s>%s" % (path[0].encode(), path[1].encode())
            self._kernel.after(TIMEOUT_SECONDS, label, lambda: self._time_out(connection, path))
        held.append(data)

    def _flush(self, path: Path) -> None:
        """Send what waited, over the sender's present link; older links died by themselves."""
        connection = self._ends.get(path)
        if connection is None or path in self._cut or not self._devices[path[1]].machine_runs:
            return
        for data in connection.held.pop(path[0], []):
            self._transmit(connection, path, data)

    def machine_started(self, device: str) -> None:
        """What waits for `device` reaches a kernel that knows nothing of those links."""
        for peer in self._devices:
            self._flush((peer, device))

    def _time_out(self, connection: _Connection, path: Path) -> None:
        if connection.held.get(path[0]) and self._ends.get(path) is connection:
            self._lose(path)

    def _arrive(self, connection: _Connection, path: Path, data: bytes | None) -> None:
        sender, receiver = path
        device = self._devices[receiver]
        if not device.machine_runs:
            return
        back = (receiver, sender)
        if self._ends.get(back) is not connection:
            if data is not None and self._ends.get(path) is connection:
                self._transmit(connection, back, None)  # RST: nobody here has that link
        elif data is None:
            self._lose(back)
        else:
            channel, payload = cbor2.loads(data)
            device.on_message(sender, channel, payload)

    def _lose(self, path: Path) -> None:
        """The link ends for `path[0]`, which is informed and redials at once."""
        device, peer = path
        del self._ends[path]
        self._unrefused.add(path)
        endpoint = self._devices[device]
        if endpoint.process_runs:
            endpoint.on_link_lost(peer, refused=False)
            label = b"redial %s>%s" % (device.encode(), peer.encode())
            self._kernel.after(2 * self._delay(path), label, lambda: self._redial_one(path))

    def _redial_one(self, path: Path) -> None:
        caller, callee = self._devices[path[0]], self._devices[path[1]]
        if caller.process_runs and not caller.is_frozen and path not in self._ends:
            self._dial(caller, callee)
