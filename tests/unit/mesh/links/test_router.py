"""What a member sends that this device refuses is held against it, by what it was."""

from __future__ import annotations

import asyncio
import importlib

import pytest

from p2ptrain.errors import DeviceLost, Error, NotItsPart, PeerError, PlanError
from p2ptrain.mesh.conduct import Offence
from p2ptrain.mesh.links import router
from p2ptrain.mesh.links.router import Router
from p2ptrain.net.message import Message, Priority

EVE = "e" * 64


async def _send(_peer: str, _message: Message, _priority: Priority) -> None:
    raise AssertionError("nothing is answered")


@pytest.mark.parametrize(
    ("error", "offence"),
    [
        (NotItsPart("that is another's"), Offence.NOT_ITS_PART),
        (PeerError("not now"), Offence.REFUSED),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_reply_from_another_device_differs_from_one_that_comes_too_late(
    error: Error, offence: Offence, at_once: bool
) -> None:
    noted, has_noted = list[tuple[str, Offence, str, str]](), asyncio.Event()

    def note(*what: str) -> None:
        peer, offence, about, why = what
        noted.append((peer, Offence(offence), about, why))
        has_noted.set()

    def take(_peer: str, _message: Message) -> None:
        raise error

    async def handle(peer: str, message: Message) -> None:
        take(peer, message)

    router = Router("me", _send, note=note)
    if at_once:
        router.route_now("order", take)
    else:
        router.route("order", handle)
    router.put(EVE, Message("order"))
    await has_noted.wait()
    await router.close()
    assert noted == [(EVE, offence, "", f"order: {error}")]


class NeedsTwo(PeerError):
    """Of some room of the house, made from more than a text."""

    def __init__(self, device: str, why: str) -> None:
        super().__init__(f"{device}: {why}")


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (PlanError("too little memory"), PlanError),
        (DeviceLost("b is gone", name="b"), DeviceLost),
        (NeedsTwo("b", "damaged"), PeerError),
    ],
)
def test_what_arrives_says_the_same(sent: Error, arrives: type[Error]) -> None:
    fresh = importlib.reload(router)  # whatever was imported before
    found = fresh.from_fields(fresh.to_fields(sent))
    assert type(found) is arrives
    assert str(found) == str(sent)
