"""S19: what strangers announce is looked up a few at a time, whatever it is called."""

from __future__ import annotations

import asyncio
import getpass
import socket
from typing import Any

import pytest
from zeroconf import ServiceStateChange

from p2ptrain._version import PROTOCOL_VERSION
from p2ptrain.mesh.discovery import mdns as discovery
from p2ptrain.mesh.discovery.addresses import SERVICE, service_name
from p2ptrain.mesh.discovery.mdns import RESOLVES_LIMIT, MdnsDiscovery, service_of

TRUSTED = "ab" * 32


class _Silent:
    """A service that answers to nobody."""

    def __init__(self, _type: str, _name: str) -> None: ...

    async def async_request(self, _zeroconf: Any, _milliseconds: float) -> bool:
        await asyncio.Event().wait()
        return False


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> MdnsDiscovery:
    monkeypatch.setattr(discovery, "AsyncServiceInfo", _Silent)
    return MdnsDiscovery(["127.0.0.1"], lambda: [TRUSTED])


def _announced(mdns: MdnsDiscovery, *names: str) -> dict[str, asyncio.Task[None]]:
    """Those of them that have a turn."""
    nobody: Any = None
    for name in names:
        mdns.on_change(nobody, SERVICE, name, ServiceStateChange.Added)
    return dict(mdns.resolving)


@pytest.mark.parametrize(
    "name",
    [
        "{digits}-{number}." + SERVICE,
        "{digits}{number}." + SERVICE,
        "{digits}.{number}." + SERVICE,
        "{number}." + SERVICE,
    ],
)
async def test_names_that_begin_like_a_trusted_one_have_no_turn_of_their_own(
    heard: MdnsDiscovery, name: str
) -> None:
    numbers = range(10 * RESOLVES_LIMIT)
    names = [name.format(digits=TRUSTED[:16], number=number) for number in numbers]
    assert len(_announced(heard, *names)) == RESOLVES_LIMIT
    await heard.close()


async def test_a_trusted_device_always_has_its_turn(heard: MdnsDiscovery) -> None:
    others = [f"{number}.{SERVICE}" for number in range(10 * RESOLVES_LIMIT)]
    turns = _announced(heard, *others, service_name(TRUSTED), service_name(TRUSTED))
    assert service_name(TRUSTED) in turns
    assert len(turns) == RESOLVES_LIMIT + 1
    await heard.close()


@pytest.mark.parametrize("name", ["x._http._tcp.local.", "x", SERVICE, f"\x1b[31m.{SERVICE}"])
async def test_a_name_of_no_device_is_not_looked_up(name: str) -> None:
    """zeroconf raises for these; nobody waits for the task, so people would see a traceback."""
    mdns = MdnsDiscovery(["127.0.0.1"], lambda: [])
    await _announced(mdns, name)[name]
    await mdns.close()


def test_what_is_announced_names_neither_person_nor_host() -> None:
    """S20: a version and an id, and addresses that everybody on the network sees anyway."""
    info = service_of("ab" * 32, 47300, ["192.168.1.7"])
    assert info.properties == {b"v": str(PROTOCOL_VERSION).encode(), b"id": b"ab" * 32}
    said = f"{info.name} {info.server} {info.text!r}".lower()
    for private in (socket.gethostname(), getpass.getuser(), "torch", "model"):
        assert len(private) < 4 or private.lower() not in said
