"""Pairing over real channels: counts tries, keeps the window, runs the state machines.

A device whose user entered a code, or that resumed a window, dials every device it finds; a device
that made its own code only listens. Each other device is tried once per opening of the window,
unless the network failed or that device took no codes at the time.

An attempt that ends after our guess has arrived, with silence or any answer but the right one, may
have been a stranger's try: it counts as one, and is repeated at most RETRIES times. No more guesses
run at once than tries are left. Where two devices dial each other, the attempt of the smaller id
continues, so one wrong code is one wrong try on either side. A hello is no guess: when hellos come
too fast, the sender is asked to come again, and the window stays open.

A removed device knows the current code, so a removal closes the window and the next code is a new
one. The removed device is let in again only after the user ran `invite`, not because a start
script repeats an old code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from p2ptrain.errors import LinkClosed, NotPaired, PairingError, PeerError, VersionMismatch
from p2ptrain.events import Pairing, PairingClosed, PairingFailed
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.device_record import DeviceRecord
from p2ptrain.mesh.identity.identity import Identity
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.mesh.trust.pairing import (
    PairedDevice,
    PairingBrokenOff,
    PairingBusy,
    PairingClient,
    PairingServer,
    PairingWindowClosed,
    WrongCode,
    refusal,
)
from p2ptrain.mesh.trust.pairing_window import PairingWindow
from p2ptrain.mesh.trust.trust_store import TrustStore
from p2ptrain.net.link.stream import Address
from p2ptrain.net.transport.dial import dial_unpaired
from p2ptrain.net.transport.pace import Pace, Rate
from p2ptrain.net.transport.pairing_channel import PairingChannel
from p2ptrain.net.transport.tls import certificate_id

log = get_logger(__name__)

ATTEMPT_SECONDS = 20.0

RETRIES = 2
"""After attempts that broke off late: where many devices start at one address, connections are cut
to make room for others."""

MESSAGE_SECONDS = 5.0
"""For each message of a stranger that dials us."""

HELLOS_EACH = Rate(per_second=2.0, burst=32.0)

HELLOS = Rate(per_second=4.0, burst=64.0)
"""Answered, of one address and of all: each costs some ten milliseconds of computing, and anybody
may send them."""


class PairingService:
    """The window of one device and all attempts in it.

    Attributes:
        window: the last opening, or None where there never was one.
    """

    def __init__(
        self,
        identity: Identity,
        file: DeviceRecord,
        trust: TrustStore,
        notices: WarnOnce,
        store: Callable[[PairedDevice], None],
        is_paired: Callable[[str], bool],
        now: Callable[[], float],
        hellos_each: Rate = HELLOS_EACH,
        hellos: Rate = HELLOS,
    ) -> None:
        """The window is closed until `open`.

        Args:
            file: has this device's name.
            store: remembers a device that has proved to know the code. Raises PairingError.
            is_paired: whether that device and this one trust one another already.
            now: monotonic seconds.
            hellos_each, hellos: answered, of one address and of all.
        """
        self.window: PairingWindow | None = None
        self._identity = identity
        self._file = file
        self._trust = trust
        self._notices = notices
        self._store = store
        self._is_paired = is_paired
        self._now = now
        self._tried: set[str] = set()  # devices with which a code was tried in this window
        self._broken_off: Counter[str] = Counter()  # how often, by device, in this window
        self._dialling: set[str] = set()  # devices that we are pairing with as client
        self._serving: dict[str, PairingServer] = {}  # the same as server
        self._hellos: Pace[str] = Pace(hellos_each, hellos)
        self._is_reported = True  # that the window is closed
        self._guesses = 0  # of ours, as client, that have no answer yet: each may cost a try

    @property
    def is_open(self) -> bool:
        """Whether a device may pair now."""
        return self.window is not None and self.window.is_open(self._now())

    def open(self, code: str, *, invited: bool = False) -> None:
        """Open the window, for the user at this device; `invited`: for removed devices too."""
        self.go_on(PairingWindow.opened(code, self._now(), invited=invited))

    def go_on(self, window: PairingWindow) -> None:
        """Let devices pair in `window`, which may have been open before: its end stays."""
        self.window = window
        self._tried.clear()
        self._broken_off.clear()
        self._is_reported = False
        self._notices.emit(Pairing(window.code))

    def close(self) -> None:
        """A device was removed: forget the code, which it knows."""
        was_open, self.window = self.is_open, None
        if was_open:
            self._report_closed("a removed device knows the code")

    def time_passed(self) -> None:
        """Say so once the window's time is over; harmless when repeated."""
        if self.window is not None and not self.is_open:
            self._report_closed(self.window.why_closed(self._now()))

    def _report_closed(self, why: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._notices.emit(PairingClosed(why))

    def may_try(self, device: str) -> bool:
        """Whether dialling that device to pair makes sense now."""
        busy = device in self._dialling or device in self._serving
        return self.is_open and not busy and device not in self._tried and self._may_come(device)

    async def serve(self, channel: PairingChannel) -> None:
        """See a device through that has dialled us to pair. Never raises a PeerError."""
        server = PairingServer(self._identity, self._file.name)
        try:
            self._open_window()  # before anything is waited for
            await self._serve(channel, server)
        except (PairingBusy, PairingWindowClosed, WrongCode, VersionMismatch) as error:
            log.info("pairing_refused", address=channel.address, why=str(error))
            if isinstance(error, VersionMismatch):
                self._notices.warn(f"{channel.address} could not pair with this device: {error}")
            await _send_last(channel, refusal(error, self._tries_left()))
        except PeerError as error:
            log.info("pairing_broken_off", address=channel.address, why=str(error))
            if isinstance(error, NotPaired):
                self._notices.warn(
                    f"pairing with a device at {channel.address} failed, because it did not prove "
                    "its key: something in the network may change what the devices send"
                )
            channel.abort("the pairing failed")
        finally:
            if self._serving.get(server.client_id) is server:
                del self._serving[server.client_id]

    async def dial(self, addresses: Sequence[Address]) -> PairedDevice | None:
        """Pair with the device at `addresses`; None where it is paired or was tried already.

        Raises:
            PairingWindowClosed, PairingBusy, LinkClosed, PairingBrokenOff: try again later.
            PairingError, VersionMismatch, ProtocolError: this device will not pair.
        """
        channel, certificate = await dial_unpaired(addresses)
        channel.expire_after(ATTEMPT_SECONDS)
        device = certificate_id(certificate)
        if self._is_paired(device) or not self.may_try(device):
            channel.close()
            return None
        self._dialling.add(device)
        try:
            return await self._dial(channel, certificate)
        except PairingBrokenOff as error:
            self._count_broken_off(device, error)
            raise
        except WrongCode as error:
            self._count_wrong(device, str(error), error.tries_left)
            raise
        finally:
            self._dialling.discard(device)
            channel.close()

    async def _serve(self, channel: PairingChannel, server: PairingServer) -> None:
        hello = await _message(channel)
        window = self._window_with_a_try()
        if not self._hellos.take(channel.address, self._now()):
            raise PairingBusy("many devices try to pair at once")
        answer = server.hello(hello, window.code)
        self._admit(server)
        await channel.send(answer)
        message = await _message(channel)
        self._window_with_a_try()  # others may have closed it meanwhile
        try:
            confirmation = server.confirm(message)
        except WrongCode as error:
            self._count_wrong(server.client_id, str(error), None)
            raise
        await channel.send(confirmation)
        device, last = server.done(await _message(channel))
        self._store(device)
        await _send_last(channel, last)

    def _admit(self, server: PairingServer) -> None:
        """Let one attempt of a pair of devices go on.

        Raises:
            PairingBusy: our own attempt continues.
        """
        client_id = server.client_id
        if client_id == self._identity.id:
            raise PairingError("a device cannot pair with itself")
        if client_id in self._serving:
            raise PairingBusy("that device is pairing already")
        if client_id in self._dialling and self._identity.id < client_id:
            raise PairingBusy("this device is pairing with it already")
        if not self._may_come(client_id):
            raise PairingWindowClosed(
                "that device was removed: run `p2ptrain invite` to let it in again"
            )
        self._serving[client_id] = server

    async def _dial(self, channel: PairingChannel, certificate: bytes) -> PairedDevice:
        code = self._open_window().code
        client = PairingClient(self._identity, self._file.name, code, certificate)
        await _say_hello(channel, client)
        guess = client.confirm(await channel.receive())
        await channel.send(await self._guess(channel, client, guess))
        device = client.finished(await channel.receive())
        self._store(device)
        return device

    async def _guess(self, channel: PairingChannel, client: PairingClient, guess: bytes) -> bytes:
        """Give our guess away; returns what follows the server's confirmation.

        Raises:
            PairingWindowClosed, PairingBusy, LinkClosed: the guess was not sent.
            WrongCode, PairingBrokenOff: it was, and costs a try.
        """
        self._window_with_a_try()  # others may have closed it meanwhile
        self._guesses += 1
        try:
            await channel.send(guess)
            return await _answer_to_guess(channel, client)
        finally:
            self._guesses -= 1

    def _may_come(self, device: str) -> bool:
        invited = self.window is not None and self.window.invited
        return invited or not self._trust.is_removed(device)

    def _open_window(self) -> PairingWindow:
        if self.window is None:
            raise PairingWindowClosed("this device does not accept a code now")
        if not self.is_open:
            raise PairingWindowClosed(
                f"this device does not accept a code now: {self.window.why_closed(self._now())}"
            )
        return self.window

    def _window_with_a_try(self) -> PairingWindow:
        """The open window, with a try for one guess more.

        Raises:
            PairingWindowClosed: it is not open.
            PairingBusy: our own guesses under way may use up the tries that are left.
        """
        window = self._open_window()
        if self._guesses >= window.tries_left:
            raise PairingBusy("other devices are trying codes now, and few tries are left")
        return window

    def _count_broken_off(self, device: str, error: PairingBrokenOff) -> None:
        """One try less, without a word as long as it is made again. Raises WrongCode: it is not."""
        self._broken_off[device] += 1
        last = self.window is None or self.window.tries_left <= 1
        if not last and self._broken_off[device] <= RETRIES:
            self._take_try()
            return
        times = self._broken_off[device]
        why = str(error) if times == 1 else f"{error} ({times} times)"
        self._count_wrong(device, why, None)
        raise WrongCode(why) from error

    def _take_try(self) -> None:
        if self.window is not None:
            self.window = self.window.after_wrong_try()

    def _count_wrong(self, device: str, message: str, theirs_left: int | None) -> None:
        """One wrong try: the window loses one, its end stays."""
        self._tried.add(device)
        self._take_try()
        left = self._tries_left()
        if theirs_left is not None:
            left = min(left, theirs_left)
        closed = "; no tries are left: run `p2ptrain invite` to begin again" if left == 0 else ""
        self._notices.emit(PairingFailed(message + closed, left))
        self.time_passed()

    def _tries_left(self) -> int:
        return self.window.tries_left if self.window is not None else 0


async def _answer_to_guess(channel: PairingChannel, client: PairingClient) -> bytes:
    """Our third message, once the server has proved to know the code.

    Raises:
        WrongCode: it says or shows that the codes differ.
        PairingBrokenOff: anything else. A refusal of another kind too: a peer that has our guess
            has tested a code with it and may answer anything.
    """
    try:
        return client.done(await channel.receive())
    except WrongCode:
        raise
    except PeerError as error:
        raise PairingBrokenOff(f"the other device stopped the pairing: {error}") from error


async def _message(channel: PairingChannel) -> bytes:
    """A stranger's next message, for which it has MESSAGE_SECONDS."""
    channel.expire_after(MESSAGE_SECONDS)
    return await channel.receive()


async def _say_hello(channel: PairingChannel, client: PairingClient) -> None:
    try:
        await channel.send(client.hello())
    except LinkClosed as error:  # a refusal may have come before, which is read next
        log.info("pairing_hello_not_sent", address=channel.address, why=str(error))


async def _send_last(channel: PairingChannel, message: bytes) -> None:
    try:
        await channel.send(message)
    except PeerError as error:
        log.info("pairing_answer_not_sent", address=channel.address, why=str(error))
    channel.close()
