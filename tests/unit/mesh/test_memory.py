"""The in-memory household keeps the promises of `Mesh` that jobs are built on."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.errors import (
    DeviceLost,
    InternalError,
    LinkClosed,
    PeerError,
    PlanError,
    ProtocolError,
)
from p2ptrain.mesh.interface import (
    CoordinatorChanged,
    LinkLost,
    LinkSpeed,
    LinkUp,
    MemberChanged,
    MemberState,
    Mesh,
    MeshEvent,
)
from p2ptrain.net.message import Message, PartKind, Priority
from tests.support.memory_household import MemoryHousehold, memory_id


def _is_a_mesh(mesh: Mesh) -> Mesh:
    return mesh


async def test_a_call_is_answered_with_parts_in_the_callers_buffers() -> None:
    landed = bytearray(3)

    async def double(_peer: str, message: Message) -> Message:
        doubled = bytes(2 * b for b in message.parts[0])
        return Message("doubled", {"n": len(doubled)}, (memoryview(doubled),), (PartKind.WEIGHT,))

    async with MemoryHousehold(["a", "b"]) as house:
        buffer = bytearray(3)
        house["b"].route("double", double, lambda _p, _f, _sizes: [memoryview(buffer)])
        reply = await _is_a_mesh(house["a"]).call(
            house["b"].self_id,
            Message("double", {}, (memoryview(b"\1\2\3"),)),
            timeout_seconds=1,
            reply_parts=lambda _p, _f, _sizes: [memoryview(landed)],
        )
    assert (bytes(buffer), bytes(landed)) == (b"\1\2\3", b"\2\4\6")
    assert (reply.kind, dict(reply.fields)) == ("doubled", {"n": 3})
    assert reply.part_kinds == (PartKind.WEIGHT,)


async def test_order_is_kept_within_a_peer_and_kind() -> None:
    seen: list[int] = []
    done = asyncio.Event()

    async def note(_peer: str, message: Message) -> None:
        await asyncio.sleep(0)
        seen.append(message.fields["n"])
        if len(seen) == 50:
            done.set()

    async with MemoryHousehold(["a", "b"]) as house:
        house["b"].route("note", note)
        sends = [house["a"].send(house["b"].self_id, Message("note", {"n": n})) for n in range(50)]
        await asyncio.gather(*sends)
        await done.wait()
    assert seen == list(range(50))


async def test_a_message_to_oneself_is_not_copied() -> None:
    part = memoryview(bytearray(4))
    got: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()

    async def take(_peer: str, message: Message) -> None:
        got.set_result(message.parts[0])

    async with MemoryHousehold(["a"]) as house:
        house["a"].route("take", take)
        await house["a"].send(house["a"].self_id, Message("take", {}, (part,)))
        assert await got is part


@pytest.mark.parametrize("error", [PlanError("no plan"), DeviceLost("gone", name="c")])
async def test_a_handlers_error_becomes_the_callers(error: Exception) -> None:
    async def fail(_peer: str, _message: Message) -> None:
        raise error

    async with MemoryHousehold(["a", "b"]) as house:
        house["b"].route("fail", fail)
        with pytest.raises(type(error), match=str(error)):
            await house["a"].call(house["b"].self_id, Message("fail"), timeout_seconds=1)


async def test_a_bug_in_a_handler_is_an_internal_error_there_and_the_lane_goes_on() -> None:
    async def fail(_peer: str, message: Message) -> Message:
        return Message("ok") if message.fields["ok"] else Message(str(1 // 0))

    async with MemoryHousehold(["a", "b"]) as house:
        house["b"].route("fail", fail)
        peer = house["b"].self_id
        with pytest.raises(InternalError, match="b failed to handle"):
            await house["a"].call(peer, Message("fail", {"ok": False}), timeout_seconds=1)
        reply = await house["a"].call(peer, Message("fail", {"ok": True}), timeout_seconds=1)
        assert reply.kind == "ok"


async def test_an_unrouted_kind_is_refused_and_counted() -> None:
    async with MemoryHousehold(["a", "b"]) as house:
        with pytest.raises(PeerError, match="does not handle 'nothing'"):
            await house["a"].call(house["b"].self_id, Message("nothing"), timeout_seconds=1)
        assert house["b"].router.refused == {"nothing": 1}


async def test_parts_of_another_size_than_expected_close_the_link() -> None:
    def open_parts(*_: object) -> list[memoryview]:
        raise ProtocolError("not those")

    async def never(_peer: str, _message: Message) -> None:
        raise AssertionError

    async with MemoryHousehold(["a", "b"]) as house:
        house["b"].route("kind", never, open_parts)
        with pytest.raises(LinkClosed, match="not those"):
            await house["a"].send(house["b"].self_id, Message("kind", {}, (memoryview(b"1"),)))


async def test_killing_a_device_ends_pending_calls_and_tells_the_others() -> None:
    reached = asyncio.Event()

    async def hang(_peer: str, _message: Message) -> None:
        reached.set()
        await asyncio.Event().wait()

    events: list[MeshEvent] = []
    async with MemoryHousehold(["a", "b", "c"]) as house:
        house["a"].route("hang", hang)
        house["b"].subscribe(events.append)
        call = asyncio.create_task(
            house["b"].call(house["a"].self_id, Message("hang"), timeout_seconds=5)
        )
        await reached.wait()
        await house.kill("a")
        with pytest.raises(LinkClosed, match="a is dead"):
            await call
        with pytest.raises(LinkClosed):
            await house["b"].send(memory_id("a"), Message("hang"))
        with pytest.raises(LinkClosed):
            await house["a"].send(house["b"].self_id, Message("hang"))
        assert house["b"].members[memory_id("a")].state is MemberState.DEAD
        lost, dead, elected = events
        assert lost == LinkLost(memory_id("a"), "a is dead")
        assert isinstance(dead, MemberChanged)
        assert dead.certain
        assert house["b"].connected == {memory_id("c")}
        assert isinstance(elected, CoordinatorChanged)
        assert elected.coordinator is not None
        assert (elected.coordinator.name, elected.coordinator.term) == ("b", 2)


async def test_a_device_that_comes_back_keeps_its_id() -> None:
    async with MemoryHousehold(["a", "b"]) as house:
        await house.leave("b")
        assert house["a"].members[memory_id("b")].state is MemberState.LEFT
        again = await house.join("b")
        assert again.self_id == memory_id("b")
        assert house["a"].members[memory_id("b")].state is MemberState.ALIVE


async def test_a_full_lane_slows_the_sender_and_its_death_sets_the_sender_free() -> None:
    async def hang(_peer: str, _message: Message) -> None:
        await asyncio.Event().wait()

    async with MemoryHousehold(["a", "b"]) as house:
        house["b"].route("hang", hang)
        peer = house["b"].self_id

        async def flood() -> None:
            while True:
                await house["a"].send(peer, Message("hang"))

        flooding = asyncio.create_task(flood())
        for _ in range(3000):
            await asyncio.sleep(0)
        assert not flooding.done()
        await house.kill("b")
        with pytest.raises(LinkClosed):
            await flooding


async def test_calls_time_out() -> None:
    async def hang(_peer: str, _message: Message) -> None:
        await asyncio.Event().wait()

    async with MemoryHousehold(["a", "b"]) as house:
        house["b"].route("hang", hang)
        with pytest.raises(TimeoutError):
            await house["a"].call(house["b"].self_id, Message("hang"), timeout_seconds=0.001)


async def test_links_are_measured_with_real_bytes() -> None:
    async with MemoryHousehold(["a", "b"]) as house:
        speed = await house["a"].measure_link(house["b"].self_id, 0.005)
        statistics = house["a"].link_statistics(house["b"].self_id)
    assert statistics is not None
    assert statistics.sent_parts_bytes >= 256 * 1024
    assert speed.bytes_per_s > 0
    assert 0 < speed.latency_s < 1


async def test_a_given_link_speed_is_answered() -> None:
    speed = LinkSpeed(1e6, 0.002)
    async with MemoryHousehold(["a", "b"], link_speed=speed) as house:
        assert await house["a"].measure_link(house["b"].self_id) == speed


async def test_lower_priorities_are_lanes_of_their_own() -> None:
    async def take(_peer: str, _message: Message) -> Message:
        return Message("ok")

    async with MemoryHousehold(["a", "b"]) as house:
        house["b"].route("take", take)
        for priority in Priority:
            reply = await house["a"].call(
                house["b"].self_id, Message("take"), timeout_seconds=1, priority=priority
            )
            assert reply.kind == "ok"


async def test_a_cut_link_is_reported_on_both_sides() -> None:
    async with MemoryHousehold(["a", "b", "c"]) as household:
        told: list[tuple[str, MeshEvent]] = []
        for name in "abc":
            household[name].subscribe(lambda event, name=name: told.append((name, event)))
        household.cut(household["a"], household["b"], "the cable is loose")
        assert told == [
            ("a", LinkLost(household["b"].self_id, "the cable is loose")),
            ("b", LinkLost(household["a"].self_id, "the cable is loose")),
            ("a", LinkUp(household["b"].self_id)),
            ("b", LinkUp(household["a"].self_id)),
        ]


async def test_what_is_taken_at_once_needs_no_task_and_keeps_its_order() -> None:
    seen: list[int] = []

    def take(_peer: str, message: Message) -> None:
        if message.fields["n"] == 2:
            raise ProtocolError("not this one")
        seen.append(message.fields["n"])

    async with MemoryHousehold(["a", "b"]) as house:
        house["b"].route_now("note", take)
        peer = house["b"].self_id
        for n in range(5):
            await house["a"].send(peer, Message("note", {"n": n}))
            assert n == 2 or seen[-1] == n  # no turn of the loop was needed
        assert seen == [0, 1, 3, 4]
        reply = await house["a"].call(peer, Message("note", {"n": 5}), timeout_seconds=1)
        assert (reply.kind, seen[-1]) == ("", 5)
        with pytest.raises(ProtocolError, match="not this one"):
            await house["a"].call(peer, Message("note", {"n": 2}), timeout_seconds=1)
        await house["b"].router.close()
        house["b"].router.put(house["a"].self_id, Message("note", {"n": 6}))
    assert seen[-1] == 5
