"""What goes wrong in a household in one process: as devices on a network would hear of it."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.errors import LinkClosed
from p2ptrain.mesh.interface import (
    CoordinatorChanged,
    LinkLost,
    LinkUp,
    MemberChanged,
    MemberState,
    MeshEvent,
)
from p2ptrain.net.message import Message
from tests.support.memory_household import ARRIVALS_LIMIT, MemoryHousehold, MemoryMesh, memory_id

ALIVE, DEAD = MemberState.ALIVE, MemberState.DEAD
A, B, C, D = (memory_id(name) for name in "abcd")


class Heard:
    """The numbers of the notes that a device got, and the events it got."""

    def __init__(self, mesh: MemoryMesh) -> None:
        self.notes: list[int] = []
        self.events: list[MeshEvent] = []
        self.changed = asyncio.Event()
        mesh.route("note", self._take)
        mesh.subscribe(self.events.append)

    async def _take(self, _peer: str, message: Message) -> None:
        self.notes.append(message.fields["n"])
        self.changed.set()

    async def until(self, *notes: int) -> None:
        """Wait until exactly these have come."""
        while len(self.notes) < len(notes):
            self.changed.clear()
            await self.changed.wait()
        assert self.notes == list(notes)

    def changes(self, device: str) -> list[tuple[MemberState, bool]]:
        """State and certainty, in order, of what was said of the device."""
        told = [event for event in self.events if isinstance(event, MemberChanged)]
        return [(event.member.state, event.certain) for event in told if event.member.id == device]


def note(n: int) -> Message:
    return Message("note", {"n": n})


async def test_a_restarted_device_is_dead_for_certain_and_then_here() -> None:
    async with MemoryHousehold("abc") as house:
        heard = Heard(house["b"])
        old = house["c"]
        new = await house.restart("c")
        assert new is house["c"] is not old
        assert heard.changes(C) == [(DEAD, True), (ALIVE, False)]
        assert [e for e in heard.events if isinstance(e, LinkLost | LinkUp)] == [
            LinkLost(C, "c is dead"),
            LinkUp(C),
        ]
        with pytest.raises(LinkClosed, match="c has stopped"):
            await old.send(B, note(1))
        await new.send(B, note(2))
        await heard.until(2)
        assert new.connected == {A, B}
        assert old.connected == frozenset()


async def test_a_cut_link_stays_cut_until_it_is_healed() -> None:
    async with MemoryHousehold("abc") as house:
        a, b = Heard(house["a"]), Heard(house["b"])
        house.cut_link("a", "b")
        assert house["a"].connected == {C}
        assert house["c"].connected == {A, B}
        assert (a.events, b.events) == ([LinkLost(B, "unplugged")], [LinkLost(A, "unplugged")])
        with pytest.raises(LinkClosed):
            await house["a"].send(B, note(1))
        await house["c"].send(B, note(2))
        await b.until(2)
        house.heal_link("a", "b")
        house.heal_link("a", "b")
        assert (a.events[1:], b.events[1:]) == ([LinkUp(B)], [LinkUp(A)])
        await house["a"].send(B, note(3))
        await b.until(2, 3)


async def test_a_call_over_a_cut_link_ends() -> None:
    called = asyncio.Event()

    async def hang(_peer: str, _message: Message) -> None:
        called.set()
        await asyncio.Event().wait()

    async with MemoryHousehold("ab") as house:
        house["b"].route("hang", hang)
        call = asyncio.create_task(house["a"].call(B, Message("hang"), timeout_seconds=5))
        await called.wait()
        house.cut_link("a", "b")
        with pytest.raises(LinkClosed, match="unplugged"):
            await call


async def test_both_sides_of_a_split_go_on_with_a_coordinator_of_their_own() -> None:
    async with MemoryHousehold("abcd") as house:
        heard = {name: Heard(house[name]) for name in "abcd"}
        house.partition("ab")
        for name, mine, others in (("a", "ab", "cd"), ("c", "cd", "ab")):
            states = {m.name: m.state for m in house[name].members.values()}
            assert states == dict.fromkeys(mine, ALIVE) | dict.fromkeys(others, DEAD)
            assert house[name].connected == {memory_id(n) for n in mine if n != name}
        assert heard["a"].changes(C) == [(DEAD, False)]
        offices = {name: house[name].coordinator for name in "abcd"}
        assert {n: (o.name, o.term) for n, o in offices.items() if o is not None} == {
            "a": ("a", 1),
            "b": ("a", 1),
            "c": ("c", 2),
            "d": ("c", 2),
        }
        house.heal()
        for name in "abcd":
            assert {m.state for m in house[name].members.values()} == {ALIVE}
            assert len(house[name].connected) == 3
            assert house[name].coordinator == house.coordinator == offices["c"]
        assert heard["a"].changes(C) == [(DEAD, False), (ALIVE, False)]


async def test_who_dies_on_the_other_side_of_a_split_dies_unseen() -> None:
    async with MemoryHousehold("abcd") as house:
        heard = {name: Heard(house[name]) for name in "ac"}
        house.partition("ab", "cd")
        await house.kill("d")
        assert heard["a"].changes(D) == [(DEAD, False)]
        assert heard["c"].changes(D) == [(DEAD, True)]
        house.heal()
        assert house["a"].connected == {B, C}
        assert heard["a"].changes(D) == [(DEAD, False)]


async def test_a_frozen_device_receives_later_what_was_sent_to_it_meanwhile() -> None:
    async with MemoryHousehold("abc") as house:
        a, b = Heard(house["a"]), Heard(house["b"])
        house.freeze("b")
        for n in range(ARRIVALS_LIMIT):
            await house["a"].send(B, note(n))
        one_more = asyncio.create_task(house["a"].send(B, note(ARRIVALS_LIMIT)))
        saying = asyncio.create_task(house["b"].send(A, note(-1)))
        house.suspect("b")
        for _ in range(100):
            await asyncio.sleep(0)
        assert not one_more.done()
        assert not saying.done()
        assert (a.notes, b.notes, b.events) == ([], [], [])
        await house.thaw("b")
        await b.until(*range(ARRIVALS_LIMIT + 1))
        await a.until(-1)
        assert b.changes(B) == a.changes(B)
        assert a.changes(B) == [(MemberState.SUSPECT, False), (ALIVE, False)]


async def test_a_frozen_device_that_was_declared_dead_comes_back_over_new_links() -> None:
    async with MemoryHousehold("abc") as house:
        a, b = Heard(house["a"]), Heard(house["b"])
        house.elect("b")
        house.freeze("b")
        await house["a"].send(B, note(1))
        stale = asyncio.create_task(house["b"].send(A, note(2)))
        house.declare_dead("b")
        assert a.changes(B) == [(DEAD, False)]
        assert house["a"].connected == {C}
        assert house.coordinator.name == "a"
        with pytest.raises(LinkClosed):
            await house["a"].send(B, note(3))
        await house.thaw("b", informed=False)
        await stale  # it speaks over a new link, as the coordinator it believes to be
        await a.until(2)
        assert house["b"].coordinator is not None
        assert house["b"].coordinator.name == "b"
        assert house["a"].connected == {B, C}
        assert a.changes(B) == [(DEAD, False), (ALIVE, False)]
        assert b.notes == []  # what waited in the sockets went with their links
        assert [type(e) for e in b.events] == [
            CoordinatorChanged,
            LinkLost,
            LinkLost,
            LinkUp,
            LinkUp,
        ]
        house.tell_coordinator("b")
        assert house["b"].coordinator == house.coordinator


async def test_killing_a_frozen_device_sets_its_senders_free() -> None:
    async with MemoryHousehold("ab") as house:
        house.freeze("b")
        for n in range(ARRIVALS_LIMIT):
            await house["a"].send(B, note(n))
        waiting = asyncio.create_task(house["a"].send(B, note(-1)))
        for _ in range(10):
            await asyncio.sleep(0)
        await house.kill("b")
        with pytest.raises(LinkClosed):
            await waiting
