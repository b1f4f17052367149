"""S14, S17: what a blob may take is decided before memory is taken, by its kind and its sender."""

from __future__ import annotations

import tracemalloc

import pytest

from p2ptrain.api.device_services import DeviceServices
from p2ptrain.errors import NotInCharge, PeerError, ProtocolError
from p2ptrain.messages.kinds import PREPARE
from p2ptrain.messages.requesters import Due
from p2ptrain.net import cbor
from p2ptrain.net.fields import SMALL, Blob, limited
from p2ptrain.net.message import Fields, Message
from p2ptrain.recovery.state_report import StateReport
from tests.support.memory_household import MemoryHousehold, memory_id


def no_business(peer: str, _fields: Fields) -> None:
    if peer != "a":
        raise NotInCharge("not for you")


def test_s17_a_blob_of_a_device_without_business_here_takes_no_memory() -> None:
    """S17: the message comes without its part, and its handler says why."""
    allocate = limited(SMALL.most_bytes, due=no_business)
    tracemalloc.start()
    try:
        assert allocate("b", {}, [SMALL.most_bytes]) is None
        assert tracemalloc.get_traced_memory()[1] < 4096
    finally:
        tracemalloc.stop()
    assert [len(part) for part in allocate("a", {}, [7]) or ()] == [7]
    for sizes in ([SMALL.most_bytes + 1], [1, 1], []):
        with pytest.raises(ProtocolError):
            allocate("a", {}, sizes)


async def test_s6_only_who_is_in_charge_prepares_a_device() -> None:
    """S6: c sends an assignment; a holds the job, and c coordinates."""
    async with MemoryHousehold(["a", "b", "c"], coordinator="c") as mesh:
        member = DeviceServices(mesh["b"])
        member.service.due = Due(mesh["b"], holder=lambda: memory_id("a"))
        for kind, route in member.routes.items():
            mesh["b"].route(kind, route.handler, route.parts)
        blob = memoryview(cbor.dumps([[]] * 1000))
        asked = Message(PREPARE, {"needed": {"compute_bytes": 0}}, (blob, blob))
        try:
            with pytest.raises(NotInCharge, match="c holds the data of no job here"):
                await mesh["c"].call(memory_id("b"), asked, timeout_seconds=5)
            with pytest.raises(PeerError, match=r"expected an object|was not asked"):
                await mesh["a"].call(memory_id("b"), asked, timeout_seconds=5)
        finally:
            await member.close()


@pytest.mark.parametrize("item", [b"\x80", b"\x60"])
def test_s13_a_blob_of_tiny_items_is_refused_without_making_them(item: bytes) -> None:
    """S13: also where its kind may be large."""
    count = StateReport.LIMIT.most_bytes - 5
    data = b"\x9a" + count.to_bytes(4, "big") + item * count
    tracemalloc.start()
    try:
        for kind in (StateReport, _Small):
            with pytest.raises(ProtocolError, match=r"items|bytes"):
                kind.from_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


class _Small(Blob):
    """Of the usual size."""
