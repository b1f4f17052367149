"""A pairing window with real exchanges: what closes it, what costs a try, what is tried again."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TypeAlias

import pytest

from p2ptrain.errors import LinkClosed, PairingError, VersionMismatch
from p2ptrain.events import Event, PairingClosed, PairingFailed
from p2ptrain.mesh.discovery.addresses import DiscoveredDevice
from p2ptrain.mesh.identity.identity import Identity, load_or_create
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.mesh.trust import pairing_service
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
from p2ptrain.mesh.trust.pairing_dialer import PairingDialer
from p2ptrain.mesh.trust.pairing_service import HELLOS, HELLOS_EACH, RETRIES, PairingService
from p2ptrain.mesh.trust.pairing_window import WINDOW_SECONDS, WRONG_TRIES_LIMIT, PairingWindow
from p2ptrain.net.link.stream import Address
from p2ptrain.net.transport.pace import Rate

CODE = "12345678"
WRONG = "87654321"

Step: TypeAlias = Callable[[bytes], bytes | Awaitable[bytes]]
"""What the other device answers to the last message that it got."""


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    root: Path = tmp_path_factory.mktemp("devices")
    return [load_or_create(StateFolder(root / name)) for name in ("anna", "bert", "carl")]


class Anna:
    """A device with an open window, what its person hears and whom it trusts."""

    def __init__(self, identity: Identity, hellos: Rate = HELLOS) -> None:
        self.now = 100.0
        self.heard: list[Event] = []
        self.stored: list[PairedDevice] = []
        self.identity = identity
        self.service = PairingService(
            identity,
            SimpleNamespace(name="anna"),
            SimpleNamespace(is_removed=lambda _device: False),
            WarnOnce(self.heard.append, lambda device: device),
            self.stored.append,
            self.is_paired,
            lambda: self.now,
            HELLOS_EACH,
            hellos,
        )
        self.service.open(CODE)

    @property
    def window(self) -> PairingWindow:
        assert self.service.window is not None
        return self.service.window

    @property
    def failures(self) -> list[PairingFailed]:
        return [event for event in self.heard if isinstance(event, PairingFailed)]

    @property
    def ends(self) -> list[str]:
        return [event.reason for event in self.heard if isinstance(event, PairingClosed)]

    def is_paired(self, device: str) -> bool:
        return device in {d.id for d in self.stored}

    def use_up_tries(self) -> None:
        """But for the last."""
        for _ in range(WRONG_TRIES_LIMIT - 1):
            self.service.window = self.window.after_wrong_try()

    def dialer(self, device: Identity, addresses: tuple[Address, ...]) -> PairingDialer:
        found = DiscoveredDevice(device.id, addresses, 1)
        quiet = Random(1)
        return PairingDialer(
            self.service, lambda: [found], self.is_paired, lambda _line: None, quiet
        )


@pytest.fixture
def anna(identities: list[Identity]) -> Anna:
    return Anna(identities[0])


class Channel:
    """To a device that answers by these steps, and then hangs up."""

    def __init__(self, steps: Sequence[Step], address: str = "here") -> None:
        self.address = address
        self.limits: list[float] = []
        self.got: list[bytes] = []
        self.ended = asyncio.Event()
        self.aborts: list[str] = []
        self._steps = deque(steps)

    def expire_after(self, seconds: float) -> None:
        self.limits.append(seconds)

    def close(self) -> None:
        self.ended.set()

    def abort(self, reason: str) -> None:
        self.aborts.append(reason)
        self.ended.set()

    async def send(self, content: bytes) -> None:
        self.got.append(content)

    async def receive(self) -> bytes:
        await asyncio.sleep(0)
        if not self._steps:
            raise LinkClosed("the connection was cut")
        answer = self._steps.popleft()(self.got[-1] if self.got else b"")
        return await answer if inspect.isawaitable(answer) else answer


class Caller(Channel):
    """From a device that dials anna, and says so many messages."""

    def __init__(
        self,
        anna: Anna,
        identity: Identity,
        code: str = CODE,
        messages: int = 3,
        address: str = "here",
    ) -> None:
        self._client = PairingClient(identity, "bert", code, anna.identity.certificate_der)
        steps = (lambda _: self._client.hello(), self._client.confirm, self._client.done)
        super().__init__(steps[:messages], address)

    def finished(self) -> PairedDevice:
        return self._client.finished(self.got[-1])


def answering(identity: Identity, code: str = CODE, messages: int = 3) -> Channel:
    """To a device that anna dials; it breaks off after so many messages of its own."""
    server = PairingServer(identity, "bert")

    def confirm(message: bytes) -> bytes:
        try:
            return server.confirm(message)
        except WrongCode as error:
            return refusal(error, 4)

    steps = (lambda m: server.hello(m, code), confirm, lambda m: server.done(m)[1])
    return Channel(steps[:messages])


class Dialled:
    """Whom anna reaches: each address is an identity's, `channel` makes the way there."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        identities: Sequence[Identity],
        channel: Callable[[Identity], Channel],
    ) -> None:
        self._identities = {identity.id: identity for identity in identities}
        self._channel = channel
        self.channels: list[Channel] = []
        self.another = asyncio.Event()
        monkeypatch.setattr(pairing_service, "dial_unpaired", self._connect)

    async def _connect(self, addresses: Sequence[Address]) -> tuple[Channel, bytes]:
        await asyncio.sleep(0)
        some = next(iter(self._identities.values()))
        identity = self._identities.get(addresses[0][0], some)
        self.channels.append(self._channel(identity))
        self.another.set()
        return self.channels[-1], identity.certificate_der


# -- devices that dial ---------------------------------------------------------------------


async def test_the_right_code_pairs(anna: Anna, identities: list[Identity]) -> None:
    caller = Caller(anna, identities[1])
    await anna.service.serve(caller)
    assert [device.name for device in anna.stored] == ["bert"]
    assert caller.finished().name == "anna"
    assert max(caller.limits) <= 5.0  # a silent one has no longer


@pytest.mark.parametrize("messages", range(4))
async def test_whatever_is_cut_both_are_paired_after_another_try(
    anna: Anna, identities: list[Identity], messages: int
) -> None:
    """S10: the first attempt ends after that many of its messages; the last answer may be lost."""
    await anna.service.serve(Caller(anna, identities[1], messages=messages))
    assert len(anna.stored) == (messages == 3)
    again = Caller(anna, identities[1])
    await anna.service.serve(again)
    assert anna.stored[-1].certificate_der == identities[1].certificate_der
    assert again.finished().certificate_der == identities[0].certificate_der
    assert anna.window.wrong_tries == 0


async def test_five_wrong_codes_close_it_for_the_right_one_too(
    anna: Anna, identities: list[Identity]
) -> None:
    """S7: and no failure moves its end."""
    closes_at = anna.window.closes_at
    for _ in range(WRONG_TRIES_LIMIT):
        anna.now += 60.0
        await anna.service.serve(Caller(anna, identities[1], WRONG))
    assert anna.window.closes_at == closes_at
    assert anna.ends == ["5 wrong codes were tried"]
    caller = Caller(anna, identities[1])
    await anna.service.serve(caller)
    assert caller.got == [refusal(PairingWindowClosed(""), 0)]
    assert anna.stored == []


async def test_hellos_without_a_guess_close_nothing(identities: list[Identity]) -> None:
    """Hundreds cost a stranger nothing; the person at the other end must still get in."""
    anna = Anna(identities[0], Rate(per_second=1.0, burst=5.0))
    hello = PairingClient(identities[1], "bert", CODE, identities[0].certificate_der).hello()
    answered, busy = 0, refusal(PairingBusy(""), WRONG_TRIES_LIMIT)
    for number in range(300):
        caller = Channel([lambda _: hello], f"10.0.0.{number % 200}")
        anna.now += 0.02
        await anna.service.serve(caller)
        answered += caller.got[0] != busy
    assert answered <= 5 + 6 + 1  # what is beyond the pace costs no computing
    assert anna.service.is_open
    assert anna.ends == []
    anna.now += 20.0
    await anna.service.serve(Caller(anna, identities[1]))
    assert len(anna.stored) == 1


async def test_hellos_of_one_address_leave_turns_to_others(
    anna: Anna, identities: list[Identity]
) -> None:
    hello = PairingClient(identities[1], "bert", CODE, identities[0].certificate_der).hello()
    for _ in range(int(HELLOS_EACH.burst) * 2):
        await anna.service.serve(Channel([lambda _: hello], "10.0.0.66"))
    await anna.service.serve(Caller(anna, identities[1]))
    assert len(anna.stored) == 1


async def test_where_no_window_is_open_nothing_is_waited_for(
    anna: Anna, identities: list[Identity]
) -> None:
    anna.service.close()
    caller = Caller(anna, identities[1], messages=0)
    await anna.service.serve(caller)
    assert caller.got == [refusal(PairingWindowClosed(""), 0)]
    assert caller.ended.is_set()
    assert not caller.aborts  # which would drop the answer


async def test_its_end_by_time_is_said_once(anna: Anna) -> None:
    anna.now += WINDOW_SECONDS - 1.0
    anna.service.time_passed()
    assert anna.ends == []
    anna.now += 1.0
    for _ in range(2):
        anna.service.time_passed()
    assert anna.ends == ["10 minutes are over"]


async def test_a_removal_is_said_where_it_closes_the_window(anna: Anna) -> None:
    for _ in range(2):
        anna.service.close()
    assert anna.ends == ["a removed device knows the code"]


# -- devices that are dialled --------------------------------------------------------------


async def test_a_device_that_is_refused_before_its_hello_receives_the_reason(
    anna: Anna, identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side takes no codes, says so at once and hangs up."""

    class Refusing(Channel):
        async def send(self, content: bytes) -> None:
            raise LinkClosed("the other device closed the pairing channel")

    no = refusal(PairingWindowClosed("closed"))
    Dialled(monkeypatch, identities[1:], lambda _: Refusing([lambda _: no]))
    with pytest.raises(PairingWindowClosed, match="p2ptrain invite"):
        await anna.service.dial([("bert", 1)])


async def test_one_try_over_two_protocols_is_one_try(
    anna: Anna, identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S7: bert is found at an IPv4 and an IPv6 address, and both were given with --peer."""
    bert = Dialled(monkeypatch, identities[1:2], lambda device: answering(device, WRONG))
    both = (("192.168.1.7", 47300), ("fd00::7", 47300))
    dialer = anna.dialer(identities[1], both)
    dialer.give(both)
    dialling = asyncio.create_task(dialer.run())
    await bert.another.wait()
    await bert.channels[0].ended.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    dialling.cancel()
    await asyncio.gather(dialling, return_exceptions=True)
    assert len(anna.failures) == 1
    assert anna.window.wrong_tries == 1


def broken_off(
    monkeypatch: pytest.MonkeyPatch, identities: Sequence[Identity], times: int
) -> Dialled:
    """Bert knows the code; the first attempts are cut once our guess is there."""
    messages = iter([1] * times)
    return Dialled(
        monkeypatch, identities[1:2], lambda device: answering(device, messages=next(messages, 3))
    )


async def test_an_attempt_that_breaks_off_is_made_again_and_costs_a_try(
    anna: Anna, identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(monkeypatch, identities, RETRIES)
    for _ in range(RETRIES):
        with pytest.raises(PairingBrokenOff):
            await anna.service.dial([("bert", 1)])
        assert anna.service.may_try(identities[1].id)
    paired = await anna.service.dial([("bert", 1)])
    assert paired is not None
    assert anna.stored == [paired]
    assert anna.failures == []
    assert anna.window.tries_left == WRONG_TRIES_LIMIT - RETRIES


async def test_it_is_not_made_again_for_ever_and_people_hear_why(
    anna: Anna, identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(monkeypatch, identities, RETRIES + 1)
    for _ in range(RETRIES):
        with pytest.raises(PairingBrokenOff):
            await anna.service.dial([("bert", 1)])
    with pytest.raises(WrongCode, match=r"stopped the pairing: .* \(3 times\)"):
        await anna.service.dial([("bert", 1)])
    assert not anna.service.may_try(identities[1].id)
    [failure] = anna.failures
    assert failure.attempts_left == WRONG_TRIES_LIMIT - RETRIES - 1


async def test_the_last_try_of_a_window_is_not_silent(
    anna: Anna, identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(monkeypatch, identities, 1)
    anna.use_up_tries()
    with pytest.raises(WrongCode):
        await anna.service.dial([("bert", 1)])
    [failure] = anna.failures
    assert "p2ptrain invite" in failure.message


async def test_the_dialer_goes_on_by_itself(
    anna: Anna, identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    bert = broken_off(monkeypatch, identities, 1)
    monkeypatch.setattr("p2ptrain.mesh.trust.pairing_dialer.FIRST_RETRY_SECONDS", 0.001)
    dialling = asyncio.create_task(anna.dialer(identities[1], (("bert", 1),)).run())
    async with asyncio.timeout(10):
        while not anna.stored:
            bert.another.clear()
            await bert.another.wait()
            await bert.channels[-1].ended.wait()
    dialling.cancel()
    await asyncio.gather(dialling, return_exceptions=True)
    assert len(bert.channels) == 2


# -- strangers that announce a device and test a code with every guess that dials them -----


class Strangers(Dialled):
    """Devices of one stranger: they refuse each guess so, once they answer."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, identities: Sequence[Identity], refuses: Exception
    ) -> None:
        super().__init__(monkeypatch, identities, self._way_to)
        self._refuses = refuses
        self.guesses = 0
        self.answers = asyncio.Event()  # to guesses
        self.answers.set()
        self.has_a_guess = asyncio.Event()

    def _way_to(self, identity: Identity) -> Channel:
        server = PairingServer(identity, "nice")
        return Channel([lambda m: server.hello(m, "00000000"), self._test])

    async def _test(self, _guess: bytes) -> bytes:
        self.guesses += 1
        self.has_a_guess.set()
        await self.answers.wait()
        return refusal(self._refuses)


@pytest.mark.parametrize(
    "refuses",
    [
        PairingWindowClosed("closed"),
        PairingBusy("busy"),
        VersionMismatch("other"),
        PairingError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_every_refusal_of_a_guess_costs_a_try(
    anna: Anna, identities: list[Identity], monkeypatch: pytest.MonkeyPatch, refuses: Exception
) -> None:
    Strangers(monkeypatch, identities[1:], refuses)
    with pytest.raises(PairingBrokenOff):
        await anna.service.dial([(identities[1].id, 1)])
    assert anna.window.tries_left == WRONG_TRIES_LIMIT - 1
    assert anna.stored == []


async def test_a_stranger_of_many_names_gets_no_more_guesses_than_there_are_tries(
    anna: Anna, identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = Strangers(monkeypatch, identities[1:], PairingWindowClosed("closed"))
    for stranger in identities[1:] * WRONG_TRIES_LIMIT:
        if anna.service.may_try(stranger.id):
            with pytest.raises(PairingError):
                await anna.service.dial([(stranger.id, 1)])
    assert strangers.guesses == WRONG_TRIES_LIMIT
    assert not anna.service.is_open
    assert anna.stored == []


async def test_guesses_side_by_side_are_no_more_than_there_are_tries(
    anna: Anna, identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = Strangers(monkeypatch, identities[1:], PairingWindowClosed("closed"))
    anna.use_up_tries()
    strangers.answers.clear()
    first, second = identities[1:]
    waiting = asyncio.create_task(anna.service.dial([(first.id, 1)]))
    async with asyncio.timeout(10):
        await strangers.has_a_guess.wait()
        with pytest.raises(PairingBusy):
            await anna.service.dial([(second.id, 1)])
    assert strangers.guesses == 1
    strangers.answers.set()
    with pytest.raises(PairingError, match="stopped the pairing"):
        await waiting
    assert not anna.service.is_open
    assert anna.stored == []
