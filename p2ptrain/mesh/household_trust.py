"""Membership of the household: pairs new devices, spreads introductions, cuts off removed devices.

a code is entered ───► pairing ──► trust ──┬──► spread to the others (trust_exchange.py)
the user removes a device ───────► trust ──┘    contexts, connections, membership follow
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from p2ptrain.aio.tasks import TaskScope
from p2ptrain.errors import UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.discovery.addresses import DiscoveredDevices
from p2ptrain.mesh.guard import Guard
from p2ptrain.mesh.identity.device_record import DeviceRecord
from p2ptrain.mesh.identity.identity import Identity
from p2ptrain.mesh.links.connections import Connections
from p2ptrain.mesh.membership.core_events import TrustChanged
from p2ptrain.mesh.membership_driver import MembershipDriver
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.mesh.trust.pairing import PairedDevice
from p2ptrain.mesh.trust.pairing_dialer import PairingDialer
from p2ptrain.mesh.trust.pairing_service import PairingService
from p2ptrain.mesh.trust.pairing_window import KnownCodes, PairingWindow, new_code
from p2ptrain.mesh.trust.trust import TrustedDevice
from p2ptrain.mesh.trust.trust_store import TrustStore
from p2ptrain.mesh.trust_exchange import TrustExchange
from p2ptrain.net.fields import as_written
from p2ptrain.net.link.stream import Address
from p2ptrain.net.transport.pairing_channel import PairingChannel

log = get_logger(__name__)

TIMERS_EARLY_SECONDS = 0.01
"""Some event loops count whole milliseconds, and wake up before their time."""


@dataclass(frozen=True, slots=True)
class HouseholdParts:
    """The parts that change when a device is trusted, or is not any more.

    Attributes:
        file: has this device's name.
        guard: of members gone bad.
    """

    identity: Identity
    file: DeviceRecord
    codes: KnownCodes
    trust: TrustStore
    candidates: DiscoveredDevices
    connections: Connections
    membership_driver: MembershipDriver
    notices: WarnOnce
    guard: Guard
    tasks: TaskScope


class HouseholdTrust:
    """See the module.

    Attributes:
        exchange: sends trust records to the others, and receives theirs.
    """

    def __init__(self, parts: HouseholdParts, rng: Random) -> None:
        self._parts = parts
        self._given: Sequence[Address] = ()  # from --peer
        self._not_paired: set[str] = set()  # trusted here, but they refused us as strangers
        self._now = asyncio.get_running_loop().time
        self.exchange = TrustExchange(
            parts.trust, parts.connections, parts.guard, parts.notices, self._on_trust_changed
        )
        self._pairing = PairingService(
            parts.identity,
            parts.file,
            parts.trust,
            parts.notices,
            self._on_paired,
            self._is_paired,
            self._now,
        )
        self._watch: asyncio.Task[None] | None = None  # for the end of the window
        self._dialer = PairingDialer(
            self._pairing, parts.candidates.values, self._is_paired, parts.notices.warn, rng
        )

    @property
    def window(self) -> PairingWindow | None:
        """The pairing window, while it is open."""
        return self._pairing.window if self._pairing.is_open else None

    def start(self, code: str | None, window: PairingWindow | None) -> None:
        """Keep links to all that are trusted; open the window for a code, or the very first time.

        Args:
            code: that the user typed.
            window: one to go on with where no code was typed, if it is open still.
        """
        for device_id in self._parts.trust.trusted:
            self._parts.connections.keep(device_id)
        if code is not None and self._parts.codes.is_spent(code):
            self._parts.notices.warn(
                "a removed device may know this code, so it does not count any more: leave out "
                "--code, or run `p2ptrain invite` for a new one"
            )
            code = None
        if code is not None:
            self._pairing.open(code)
            self._start_dialling()
        elif window is not None and window.is_open(self._now()):
            self._pairing.go_on(window)
            self._start_dialling()
        elif not self._parts.trust.trusted:
            self._pairing.open(new_code())
        self._opened()

    def _opened(self) -> None:
        """A window has opened: store its code, and notify the user when it ends."""
        if self._watch is not None:
            self._watch.cancel()
        window = self.window
        if window is not None:
            self._safely(lambda: self._parts.codes.take(window.code))
            watching = self._report_end(window)
            self._watch = self._parts.tasks.spawn(watching, "end of the pairing window")

    def _safely(self, write: Callable[[], None]) -> None:
        try:
            write()
        except UserError as error:  # a full disk
            self._parts.notices.warn(
                f"{error}: after the next start a removed device may be able to pair with an old "
                "code"
            )

    async def _report_end(self, window: PairingWindow) -> None:
        await asyncio.sleep(window.closes_at - self._now() + TIMERS_EARLY_SECONDS)
        self._pairing.time_passed()

    def _start_dialling(self) -> None:
        self._parts.tasks.spawn(self._dialer.run(), "pairing dialer")

    # What the user asks

    def invite(self) -> str:
        """Open the pairing window again; the code to type on the new device.

        It is the last one, unless a device was removed since: that one knows it.
        """
        window = self._pairing.window
        self._pairing.open(window.code if window is not None else new_code(), invited=True)
        self._opened()
        assert self._pairing.window is not None
        return self._pairing.window.code

    def devices(self) -> list[DeviceSummary]:
        """The trusted devices, this one not among them."""
        parts = self._parts
        connected, cut_off = parts.connections.connected(), parts.guard.cut_off
        return list_devices(parts.trust.book, parts.file.name, connected, cut_off)

    def remove(self, name: str) -> DeviceSummary:
        """Trust the device `name` (or of an id beginning so) no more, everywhere and at once.

        Raises:
            UserError: there is no such device, or several.
        """
        device = find_device(name, self.devices())
        entry = self._parts.trust.revoke(device.id)
        self._on_trust_changed(entry, ())
        self.exchange.spread(entry.id)
        return device

    # What the mesh reports

    def give(self, given: Sequence[Address]) -> None:
        """Any device may be at these addresses, which the user gave."""
        self._given = given
        for device_id in self._parts.trust.trusted:
            self._parts.connections.hint(device_id, given)
        self._dialer.give(given)

    def found(self) -> None:
        """A new device may be there."""
        self._dialer.wake()

    def link_up(self, peer_id: str) -> None:
        """A trusted device takes us for one."""
        self._not_paired.discard(peer_id)
        self.exchange.link_up(peer_id)

    def refused_us(self, peer_id: str) -> None:
        """A trusted device takes us for a stranger."""
        self._not_paired.add(peer_id)
        if self._parts.connections.addresses(peer_id).proven:  # else it may not know of us yet
            self._parts.notices.distrusted(peer_id)
        self._dialer.wake()

    def serve(self, channel: PairingChannel) -> None:
        """A stranger has dialled us to pair."""
        self._parts.tasks.spawn(self._pairing.serve(channel), "pairing")

    def end_links(self, device_id: str) -> None:
        """The device was cut off: this device receives nothing more from it, nor about it."""
        self._parts.connections.drop(device_id, "the device was cut off")
        self._notify_membership()

    @property
    def cut_off(self) -> Mapping[str, str]:
        """Why devices were cut off, by their ids."""
        return self._parts.guard.cut_off

    # What changes

    def _is_paired(self, device_id: str) -> bool:
        return self._parts.trust.is_trusted(device_id) and device_id not in self._not_paired

    def _on_paired(self, device: PairedDevice) -> None:
        entry, gone = self._parts.trust.add_paired(device.certificate_der, device.name)
        if gone is not None:
            self._parts.connections.drop(gone, "a device that was paired took its place")
        self._parts.guard.forgive(device.id)
        self._not_paired.discard(device.id)
        log.info("paired", name=device.name, id=device.id[:16])
        self._on_trust_changed(entry, ())
        self.exchange.spread(entry.id)

    def _on_trust_changed(self, entry: TrustedDevice, addresses: Sequence[Address]) -> None:
        parts = self._parts
        if entry.revoked:
            self._pairing.close()
            self._safely(parts.codes.spend)
            parts.connections.drop(entry.id, "the device was removed")
        elif parts.guard.is_listened_to(entry.id):
            candidate = parts.candidates.get(entry.id)
            parts.connections.keep(entry.id)
            found = candidate.addresses if candidate is not None else ()
            parts.connections.hint(entry.id, [*found, *addresses, *self._given])
        self._notify_membership()

    def _notify_membership(self) -> None:
        parts = self._parts
        ids = household_ids(parts.trust, parts.identity.id)
        parts.membership_driver.handle(TrustChanged(ids - parts.guard.cut_off.keys()))


def household_ids(trust: TrustStore, own: str) -> frozenset[str]:
    """Whom members may speak of: the trusted devices and this one."""
    return frozenset({own, *trust.trusted})


MIN_ID_DIGITS = 8
"""A device may be named by this many leading digits of its id."""


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """A trusted device, as the user sees it.

    Attributes:
        id, name: as known here.
        introduced_by: name of the device that vouched for it; this device's where they paired.
        connected: whether there is a link now.
        cut_off: why this device listens to it no more; None where it does.
    """

    id: str
    name: str
    introduced_by: str
    connected: bool
    cut_off: str | None = None


def list_devices(
    book: Mapping[str, TrustedDevice],
    own_name: str,
    connected: Collection[str],
    cut_off: Mapping[str, str],
) -> list[DeviceSummary]:
    """The trusted devices of `book`.

    Args:
        own_name: of this device.
        connected: ids with a link.
        cut_off: why devices were cut off, by id.
    """

    def device(entry: TrustedDevice) -> DeviceSummary:
        introducer = book.get(entry.introduced_by)
        by = introducer.name if introducer is not None else own_name
        is_connected = entry.id in connected
        return DeviceSummary(entry.id, entry.name, by, is_connected, cut_off.get(entry.id))

    return [device(entry) for entry in book.values() if not entry.revoked]


def find_device(name: str, devices: Sequence[DeviceSummary]) -> DeviceSummary:
    """The device called `name`, or whose id begins so.

    Raises:
        UserError: there is no such device, or several.
    """
    found = [device for device in devices if device.name in (name, as_written(name))]
    if not found and len(name) >= MIN_ID_DIGITS:
        found = [device for device in devices if device.id.startswith(name)]
    if not devices:
        raise UserError(f"no paired device is called {name!r}: no other device is paired")
    if len(found) != 1:
        known = ", ".join(f"{d.name} ({d.id[:MIN_ID_DIGITS]})" for d in devices)
        many = "several paired devices are" if found else "no paired device is"
        raise UserError(f"{many} called {name!r}: give a name or the digits of an id of {known}")
    return found[0]
