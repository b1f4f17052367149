"""Attempts that break off once our guess is there: made again a few times, each a try less."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from p2ptrain.errors import LinkClosed
from p2ptrain.events import Event, PairingFailed
from p2ptrain.mesh.discovery.addresses import Address, DiscoveredDevice
from p2ptrain.mesh.identity.identity import Identity, load_or_create
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.mesh.trust import pairing_service
from p2ptrain.mesh.trust.pairing import PairedDevice, PairingBrokenOff, PairingServer, WrongCode
from p2ptrain.mesh.trust.pairing_dialer import PairingDialer
from p2ptrain.mesh.trust.pairing_service import RETRIES, PairingService
from p2ptrain.mesh.trust.pairing_window import WRONG_TRIES_LIMIT

CODE = "12345678"


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    root: Path = tmp_path_factory.mktemp("devices")
    return [load_or_create(StateFolder(root / name)) for name in ("anna", "bert")]


class Channel:
    """To a device that knows the code; cut after our second message where it `breaks`."""

    address = "bert"

    def __init__(self, server: PairingServer, *, breaks: bool) -> None:
        self._server = server
        self._breaks = breaks
        self._answers: deque[bytes] = deque()
        self._steps: deque[Callable[[bytes], bytes]] = deque(
            [lambda m: server.hello(m, CODE), server.confirm, lambda m: server.done(m)[1]]
        )

    def expire_after(self, seconds: float) -> None: ...

    def close(self) -> None: ...

    async def send(self, content: bytes) -> None:
        self._answers.append(self._steps.popleft()(content))

    async def receive(self) -> bytes:
        if self._breaks and len(self._steps) == 1:
            raise LinkClosed("the connection was cut")
        return self._answers.popleft()


class Household:
    """Anna, who dials; what she told, and whom she trusts."""

    def __init__(self, identities: Sequence[Identity], breaks: Sequence[bool]) -> None:
        self.anna, self.bert = identities
        self.told: list[Event] = []
        self.stored: list[PairedDevice] = []
        self.dialled = 0
        self.paired = asyncio.Event()
        self._breaks = deque(breaks)
        self.service = PairingService(
            self.anna,
            SimpleNamespace(name="anna"),
            SimpleNamespace(is_removed=lambda _device: False),
            WarnOnce(self.told.append, lambda device: device),
            self._store,
            lambda device: device in {d.id for d in self.stored},
            lambda: 0.0,
        )
        self.service.open(CODE)

    def _store(self, device: PairedDevice) -> None:
        self.stored.append(device)
        self.paired.set()

    async def connect(self, addresses: Sequence[Address]) -> tuple[Channel, bytes]:
        self.dialled += 1
        breaks = self._breaks.popleft() if self._breaks else False
        return Channel(PairingServer(self.bert, "bert"), breaks=breaks), self.bert.certificate_der

    @property
    def failures(self) -> list[PairingFailed]:
        return [event for event in self.told if isinstance(event, PairingFailed)]


async def _dial(household: Household) -> PairedDevice | None:
    return await household.service.dial([("bert", 1)])


async def test_an_attempt_that_breaks_off_is_made_again_and_costs_a_try(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    household = Household(identities, [True] * RETRIES)
    monkeypatch.setattr(pairing_service, "dial_unpaired", household.connect)
    for _ in range(RETRIES):
        with pytest.raises(PairingBrokenOff):
            await _dial(household)
        assert household.service.may_try(household.bert.id)
    paired = await _dial(household)
    assert paired is not None
    assert household.stored == [paired]
    assert household.failures == []
    window = household.service.window
    assert window is not None
    assert window.tries_left == WRONG_TRIES_LIMIT - RETRIES


async def test_it_is_not_made_again_for_ever_and_people_hear_why(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    household = Household(identities, [True] * (RETRIES + 1))
    monkeypatch.setattr(pairing_service, "dial_unpaired", household.connect)
    for _ in range(RETRIES):
        with pytest.raises(PairingBrokenOff):
            await _dial(household)
    with pytest.raises(WrongCode, match=r"stopped the pairing: .* \(3 times\)"):
        await _dial(household)
    assert not household.service.may_try(household.bert.id)
    [failure] = household.failures
    assert failure.attempts_left == WRONG_TRIES_LIMIT - RETRIES - 1


async def test_the_last_try_of_a_window_is_not_silent(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    household = Household(identities, [True])
    monkeypatch.setattr(pairing_service, "dial_unpaired", household.connect)
    window = household.service.window
    for _ in range(WRONG_TRIES_LIMIT - 1):
        assert window is not None
        window = household.service.window = window.after_wrong_try()
    with pytest.raises(WrongCode):
        await _dial(household)
    [failure] = household.failures
    assert "p2ptrain invite" in failure.message


async def test_the_dialer_goes_on_by_itself(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    household = Household(identities, [True])
    monkeypatch.setattr(pairing_service, "dial_unpaired", household.connect)
    monkeypatch.setattr("p2ptrain.mesh.trust.pairing_dialer.FIRST_RETRY_SECONDS", 0.001)
    found = DiscoveredDevice(household.bert.id, (("bert", 1),), 1)
    dialer = PairingDialer(
        household.service,
        lambda: [found],
        lambda device: device in {d.id for d in household.stored},
        lambda _line: None,
        Random(1),
    )
    dialling = asyncio.create_task(dialer.run())
    async with asyncio.timeout(10):
        await household.paired.wait()
    dialling.cancel()
    await asyncio.gather(dialling, return_exceptions=True)
    assert household.dialled == 2
