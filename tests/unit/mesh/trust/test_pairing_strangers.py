"""Strangers who announce a device and test a code with every guess that dials them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2ptrain.errors import PairingError, VersionMismatch
from p2ptrain.mesh.discovery.addresses import Address
from p2ptrain.mesh.identity.identity import Identity, load_or_create
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.mesh.trust import pairing_service
from p2ptrain.mesh.trust.pairing import (
    PairedDevice,
    PairingBrokenOff,
    PairingBusy,
    PairingServer,
    PairingWindowClosed,
    refusal,
)
from p2ptrain.mesh.trust.pairing_service import PairingService
from p2ptrain.mesh.trust.pairing_window import WRONG_TRIES_LIMIT

CODE = "12345678"


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    root: Path = tmp_path_factory.mktemp("devices")
    return [load_or_create(StateFolder(root / name)) for name in ("anna", "mallory", "mike")]


class Strangers:
    """Devices of one stranger, and what it has learned; `refuses` what it says to a guess."""

    def __init__(self, identities: Sequence[Identity], refuses: Exception) -> None:
        self.identities = {identity.id[:16]: identity for identity in identities}
        self.refuses = refuses
        self.guesses = 0
        self.answers = asyncio.Event()  # to guesses
        self.answers.set()
        self.has_a_guess = asyncio.Event()

    async def connect(self, addresses: Sequence[Address]) -> tuple[Channel, bytes]:
        identity = self.identities[addresses[0][0]]
        return Channel(self, PairingServer(identity, "nice")), identity.certificate_der


class Channel:
    """To one of them."""

    address = "nice"

    def __init__(self, strangers: Strangers, server: PairingServer) -> None:
        self._strangers = strangers
        self._server = server
        self._received: deque[bytes] = deque()

    def expire_after(self, seconds: float) -> None: ...

    def close(self) -> None: ...

    async def send(self, content: bytes) -> None:
        self._received.append(content)

    async def receive(self) -> bytes:
        if len(self._received) == 1:
            return self._server.hello(self._received[0], "00000000")
        self._strangers.guesses += 1
        self._strangers.has_a_guess.set()
        await self._strangers.answers.wait()
        return refusal(self._strangers.refuses)


def _anna(identity: Identity) -> PairingService:
    """Whose person typed the code."""

    def store(device: PairedDevice) -> None:
        raise AssertionError(f"a stranger was paired: {device.name}")

    service = PairingService(
        identity,
        SimpleNamespace(name="anna"),
        SimpleNamespace(is_removed=lambda _device: False),
        WarnOnce(lambda _event: None, lambda device: device),
        store,
        lambda _device: False,
        lambda: 0.0,
    )
    service.open(CODE)
    return service


def _tries_left(service: PairingService) -> int:
    assert service.window is not None
    return service.window.tries_left


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
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch, refuses: Exception
) -> None:
    strangers = Strangers(identities[1:], refuses)
    monkeypatch.setattr(pairing_service, "dial_unpaired", strangers.connect)
    anna = _anna(identities[0])
    with pytest.raises(PairingBrokenOff):
        await anna.dial([(identities[1].id[:16], 1)])
    assert _tries_left(anna) == WRONG_TRIES_LIMIT - 1


async def test_a_stranger_of_many_names_gets_no_more_guesses_than_there_are_tries(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = Strangers(identities[1:], PairingWindowClosed("closed"))
    monkeypatch.setattr(pairing_service, "dial_unpaired", strangers.connect)
    anna = _anna(identities[0])
    for name in [*strangers.identities] * WRONG_TRIES_LIMIT:
        if anna.may_try(strangers.identities[name].id):
            with pytest.raises(PairingError):
                await anna.dial([(name, 1)])
    assert strangers.guesses == WRONG_TRIES_LIMIT
    assert not anna.is_open


async def test_guesses_side_by_side_are_no_more_than_there_are_tries(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = Strangers(identities[1:], PairingWindowClosed("closed"))
    monkeypatch.setattr(pairing_service, "dial_unpaired", strangers.connect)
    anna = _anna(identities[0])
    for _ in range(WRONG_TRIES_LIMIT - 1):
        assert anna.window is not None
        anna.window = anna.window.after_wrong_try()
    strangers.answers.clear()
    first, second = strangers.identities
    waiting = asyncio.create_task(anna.dial([(first, 1)]))
    async with asyncio.timeout(10):
        await strangers.has_a_guess.wait()
        with pytest.raises(PairingBusy):
            await anna.dial([(second, 1)])
    assert strangers.guesses == 1
    strangers.answers.set()
    with pytest.raises(PairingError, match="stopped the pairing"):
        await waiting
    assert not anna.is_open
