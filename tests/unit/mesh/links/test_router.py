"""What a member sends that this device refuses is held against it, by what it was."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.errors import Error, NotItsPart, PeerError
from p2ptrain.mesh.conduct import Offence
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
