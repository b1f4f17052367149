"""Whose questions a device answers, and for how long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.api.device_services import DeviceServices
from p2ptrain.errors import NotInCharge, PeerError, ProtocolError
from p2ptrain.mesh.interface import MemberState, Mesh, MeshMember
from p2ptrain.messages.kinds import MEASURE_LINKS, MEASURE_PROFILE, STATE_REPORT
from p2ptrain.messages.requesters import AskedTime, Booking, Due
from p2ptrain.net.message import Message
from tests.support.memory_household import MemoryHousehold, memory_id

MEASURE = {"job": "j", "digest": "m", "batch_sizes": []}
STOCK = {"job": "j", "digest": "m", "term": 1, "generation": 1, "alive": []}


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 30)), max_size=40))
def test_nobody_has_more_than_its_time_in_any_stretch(asked: list[tuple[float, float]]) -> None:
    asked_time, now, worked = AskedTime(60, 200), 0.0, []
    for pause, seconds in asked:
        now += pause
        if asked_time.wait_seconds("a", now) == 0:
            asked_time.spend("a", now, now + seconds)
            worked.append((now, seconds))
            now += seconds
    for begin, _ in worked:
        within = sum(s for at, s in worked if begin <= at and at + s <= begin + 190)
        assert within <= 60 + 30, "the last one may end late"


def test_who_has_had_its_time_waits_and_others_do_not() -> None:
    asked = AskedTime(60, 200)
    asked.spend("a", 0, 60)
    assert asked.wait_seconds("a", 100) == 160
    assert asked.wait_seconds("b", 100) == 0
    assert asked.wait_seconds("a", 261) == 0


def test_a_booking_that_never_begins_expires() -> None:
    booking = Booking(0, quiet_seconds=10, most_seconds=100)
    assert not booking.has_expired(9, is_preparing=False)
    assert booking.has_expired(10, is_preparing=False)
    assert not booking.has_expired(99, is_preparing=True)
    assert booking.has_expired(100, is_preparing=True)
    booking.asked(95)
    assert booking.has_expired(100, is_preparing=False), "asking on does not lengthen it for ever"
    booking.begun()
    assert not booking.has_expired(1e9, is_preparing=False)


@pytest.fixture
async def mesh() -> AsyncIterator[MemoryHousehold]:
    async with MemoryHousehold(["a", "b", "c"], coordinator="a") as household:
        yield household


async def test_a_device_computes_only_for_whom_its_person_names(mesh: MemoryHousehold) -> None:
    due = Due(mesh["b"], only_for=["c"])
    due.check_job_of(memory_id("c"))
    due.check_job_of(memory_id("b"))
    with pytest.raises(PeerError, match="b computes only for trainings of c"):
        due.check_job_of(memory_id("a"))
    Due(mesh["b"]).check_job_of(memory_id("a"))


def test_a_name_goes_on_meaning_the_device_that_bore_it() -> None:
    members = {
        one: MeshMember(one, name, MemberState.ALIVE, {}) for one, name in (("1", "c"), ("2", "d"))
    }
    due = Due(cast(Mesh, SimpleNamespace(self_id="0", name="b", members=members)), only_for=["c"])
    due.check_job_of("1")
    members["2"] = MeshMember("2", "c", MemberState.ALIVE, {})
    with pytest.raises(PeerError):
        due.check_job_of("2")


async def member_b(mesh: MemoryHousehold, *only_for: str) -> DeviceServices:
    member = DeviceServices(mesh["b"], only_for=only_for)
    for kind, route in member.routes.items():
        mesh["b"].route(kind, route.handler, route.parts)
    return member


@pytest.mark.parametrize("kind", [MEASURE_PROFILE, MEASURE_LINKS, STATE_REPORT])
async def test_others_are_refused_in_plain_words(mesh: MemoryHousehold, kind: str) -> None:
    member = await member_b(mesh, "a")
    fields = {**MEASURE, **STOCK, "holder": memory_id("c"), "peers": []}
    try:
        with pytest.raises(PeerError, match="b computes only for trainings of a"):
            await mesh["c"].call(memory_id("b"), Message(kind, fields), timeout_seconds=5)
    finally:
        await member.close()


async def test_s6_nobody_asks_in_the_name_of_another(mesh: MemoryHousehold) -> None:
    """S6: a coordinates, and b's own job is d's."""
    due = Due(mesh["b"], holder=lambda: "d")
    due.check_in_charge("d")
    for name in "ac":
        with pytest.raises(NotInCharge, match=f"{name} holds the data of no job here"):
            due.check_in_charge(memory_id(name))
    member = await member_b(mesh)
    asked = Message(MEASURE_PROFILE, {**MEASURE, "holder": memory_id("c")})
    try:
        with pytest.raises(ProtocolError, match="in the name of another"):
            await mesh["a"].call(memory_id("b"), asked, timeout_seconds=5)
    finally:
        await member.close()
