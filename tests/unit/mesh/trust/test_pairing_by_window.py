"""What closes a pairing window, and that its person hears of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from p2ptrain.errors import LinkClosed
from p2ptrain.events import Event, PairingClosed, PairingFailed
from p2ptrain.mesh.discovery.addresses import Address, DiscoveredDevice
from p2ptrain.mesh.identity.identity import Identity, load_or_create
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.mesh.trust import pairing_service
from p2ptrain.mesh.trust.pairing import (
    PairedDevice,
    PairingBusy,
    PairingClient,
    PairingServer,
    PairingWindowClosed,
    WrongCode,
    refusal,
)
from p2ptrain.mesh.trust.pairing_dialer import PairingDialer
from p2ptrain.mesh.trust.pairing_service import HELLOS, HELLOS_EACH, PairingService
from p2ptrain.mesh.trust.pairing_window import WINDOW_SECONDS, WRONG_TRIES_LIMIT
from p2ptrain.net.transport.pace import Rate

CODE = "12345678"
WRONG = "87654321"


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    root: Path = tmp_path_factory.mktemp("devices")
    return [load_or_create(StateFolder(root / name)) for name in ("anna", "bert")]


class Anna:
    """A device with an open window, and what its person hears."""

    def __init__(self, identity: Identity, hellos: Rate = HELLOS) -> None:
        self.now = 100.0
        self.told: list[Event] = []
        self.stored: list[PairedDevice] = []
        self.identity = identity
        self.service = PairingService(
            identity,
            SimpleNamespace(name="anna"),
            SimpleNamespace(is_removed=lambda _device: False),
            WarnOnce(self.told.append, lambda device: device),
            self.stored.append,
            lambda device: device in {d.id for d in self.stored},
            lambda: self.now,
            HELLOS_EACH,
            hellos,
        )
        self.service.open(CODE)

    def heard(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.told if isinstance(event, kind)]


class Caller:
    """The channel from a device that dials and answers what the service says."""

    def __init__(self, anna: Anna, identity: Identity, code: str, address: str = "here") -> None:
        self.address = address
        self.limits: list[float] = []
        self.answers: list[bytes] = []
        self.ended = ""
        self.device: PairedDevice | None = None
        self._client = PairingClient(identity, "bert", code, anna.identity.certificate_der)
        self.answering: deque[Callable[[bytes], bytes]] = deque(
            [lambda _: self._client.hello(), self._client.confirm, self._client.done]
        )

    def expire_after(self, seconds: float) -> None:
        self.limits.append(seconds)

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self, reason: str) -> None:
        self.ended = self.ended or reason

    async def send(self, content: bytes) -> None:
        self.answers.append(content)

    async def receive(self) -> bytes:
        if not self.answering:
            raise LinkClosed("it hangs up")
        return self.answering.popleft()(self.answers[-1] if self.answers else b"")

    def hangs_up_after(self, messages: int) -> Caller:
        """Says no more than that."""
        while len(self.answering) > messages:
            self.answering.pop()
        return self

    def finished(self) -> PairedDevice:
        return self._client.finished(self.answers[-1])


async def test_the_right_code_pairs(identities: list[Identity]) -> None:
    anna = Anna(identities[0])
    caller = Caller(anna, identities[1], CODE)
    await anna.service.serve(caller)
    assert [device.name for device in anna.stored] == ["bert"]
    assert caller.finished().name == "anna"
    assert max(caller.limits) <= 5.0  # a silent one has no longer


@pytest.mark.parametrize("messages", range(4))
async def test_whatever_is_cut_both_are_paired_after_another_try(
    identities: list[Identity], messages: int
) -> None:
    """S10: the first attempt ends after that many of its messages; the last answer may be lost."""
    anna = Anna(identities[0])
    await anna.service.serve(Caller(anna, identities[1], CODE).hangs_up_after(messages))
    assert len(anna.stored) == (messages == 3)
    again = Caller(anna, identities[1], CODE)
    await anna.service.serve(again)
    assert anna.stored[-1].certificate_der == identities[1].certificate_der
    assert again.finished().certificate_der == identities[0].certificate_der
    assert anna.service.window is not None
    assert anna.service.window.wrong_tries == 0


async def test_five_wrong_codes_close_it_for_the_right_one_too(
    identities: list[Identity],
) -> None:
    """S7: and no failure moves its end."""
    anna = Anna(identities[0])
    assert anna.service.window is not None
    ends = anna.service.window.closes_at
    for _ in range(WRONG_TRIES_LIMIT):
        anna.now += 60.0
        await anna.service.serve(Caller(anna, identities[1], WRONG))
    assert anna.service.window.closes_at == ends
    assert anna.heard(PairingClosed) == [PairingClosed("5 wrong codes were tried")]
    caller = Caller(anna, identities[1], CODE)
    await anna.service.serve(caller)
    assert caller.answers == [refusal(PairingWindowClosed(""), 0)]
    assert anna.stored == []


async def test_hellos_without_a_guess_close_nothing(identities: list[Identity]) -> None:
    """Hundreds cost a stranger nothing; the person at the other end must still get in."""
    anna = Anna(identities[0], Rate(per_second=1.0, burst=5.0))
    hello = PairingClient(identities[1], "bert", CODE, identities[0].certificate_der).hello()
    answered, busy = 0, refusal(PairingBusy(""), WRONG_TRIES_LIMIT)
    for number in range(300):
        caller = Caller(anna, identities[1], CODE, address=f"10.0.0.{number % 200}")
        caller.answering = deque([lambda _: hello])
        anna.now += 0.02
        await anna.service.serve(caller)
        answered += caller.answers[0] != busy
    assert answered <= 5 + 6 + 1  # what is beyond the pace costs no computing
    assert anna.service.is_open
    assert anna.heard(PairingClosed) == []
    anna.now += 20.0
    await anna.service.serve(Caller(anna, identities[1], CODE))
    assert len(anna.stored) == 1


async def test_hellos_of_one_address_leave_turns_to_others(identities: list[Identity]) -> None:
    anna = Anna(identities[0])
    hello = PairingClient(identities[1], "bert", CODE, identities[0].certificate_der).hello()
    for _ in range(int(HELLOS_EACH.burst) * 2):
        caller = Caller(anna, identities[1], CODE, address="10.0.0.66")
        caller.answering = deque([lambda _: hello])
        await anna.service.serve(caller)
    await anna.service.serve(Caller(anna, identities[1], CODE))
    assert len(anna.stored) == 1


async def test_where_no_window_is_open_nothing_is_waited_for(identities: list[Identity]) -> None:
    anna = Anna(identities[0])
    anna.service.close()
    caller = Caller(anna, identities[1], CODE).hangs_up_after(0)
    await anna.service.serve(caller)
    assert caller.answers == [refusal(PairingWindowClosed(""), 0)]
    assert caller.ended == "closed"


async def test_a_device_that_is_refused_before_its_hello_receives_the_reason(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side takes no codes, says so at once and hangs up."""

    class Refusing(Caller):
        async def send(self, content: bytes) -> None:
            raise LinkClosed("the other device closed the pairing channel")

        async def receive(self) -> bytes:
            return refusal(PairingWindowClosed("closed"))

    anna = Anna(identities[0])

    async def connect(addresses: Sequence[Address]) -> tuple[Caller, bytes]:
        return Refusing(anna, identities[1], CODE), identities[1].certificate_der

    monkeypatch.setattr(pairing_service, "dial_unpaired", connect)
    with pytest.raises(PairingWindowClosed, match="p2ptrain invite"):
        await anna.service.dial([("bert", 1)])


async def test_its_end_by_time_is_said_once(identities: list[Identity]) -> None:
    anna = Anna(identities[0])
    anna.now += WINDOW_SECONDS - 1.0
    anna.service.time_passed()
    assert anna.heard(PairingClosed) == []
    anna.now += 1.0
    for _ in range(2):
        anna.service.time_passed()
    assert anna.heard(PairingClosed) == [PairingClosed("10 minutes are over")]


async def test_a_removal_is_said_where_it_closes_the_window(identities: list[Identity]) -> None:
    anna = Anna(identities[0])
    for _ in range(2):
        anna.service.close()
    assert anna.heard(PairingClosed) == [PairingClosed("a removed device knows the code")]


async def test_one_try_over_two_protocols_is_one_try(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S7: bert is found at an IPv4 and an IPv6 address, and both were given with --peer."""
    anna = Anna(identities[0])
    ended = asyncio.Event()

    class Bert:
        address = "bert"

        def __init__(self) -> None:
            server = PairingServer(identities[1], "bert")
            self._steps = deque([lambda m: server.hello(m, WRONG), server.confirm])
            self._answers: deque[bytes] = deque()

        def expire_after(self, seconds: float) -> None: ...

        def close(self) -> None:
            ended.set()

        async def send(self, content: bytes) -> None:
            try:
                self._answers.append(self._steps.popleft()(content))
            except WrongCode as error:
                self._answers.append(refusal(error, 4))

        async def receive(self) -> bytes:
            await asyncio.sleep(0)
            return self._answers.popleft()

    async def connect(addresses: Sequence[Address]) -> tuple[Bert, bytes]:
        await asyncio.sleep(0)
        return Bert(), identities[1].certificate_der

    monkeypatch.setattr(pairing_service, "dial_unpaired", connect)
    both = (("192.168.1.7", 47300), ("fd00::7", 47300))
    dialer = PairingDialer(
        anna.service,
        lambda: [DiscoveredDevice(identities[1].id, both, 1)],
        lambda _device: False,
        lambda _line: None,
        Random(1),
    )
    dialer.give(both)
    dialling = asyncio.create_task(dialer.run())
    await ended.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    dialling.cancel()
    await asyncio.gather(dialling, return_exceptions=True)
    assert len(anna.heard(PairingFailed)) == 1
    assert anna.service.window is not None
    assert anna.service.window.wrong_tries == 1
