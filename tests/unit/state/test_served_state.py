"""Weights on their way along a group: each byte leaves the holder once, whatever happens.

holder --> a --> b --> c
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Self

import pytest
import torch
from torch import Tensor

from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.kinds import STATE_MANIFEST, STATE_READ
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.version import Version
from p2ptrain.state import transfer_client
from p2ptrain.state.fetch import fetch_units
from p2ptrain.state.served_state import (
    HOP_SECONDS,
    MAX_ARRIVING,
    ArrivingStates,
    Entries,
    ServedState,
)
from p2ptrain.state.snapshot_store import StoredTensors
from p2ptrain.state.transfer_server import TransferServer
from tests.support.memory_household import MemoryHousehold, memory_id

RANGE_BYTES = 4096
KEY = GenerationKey("job", 1)
STATE = {f"model:{n}": torch.arange(n * 1000, n * 1000 + 700.0) for n in range(6)}
STATE["model:across"] = torch.arange(600.0).view(20, 30).t()
STATE["model:flags"] = torch.tensor([True, False, True])
STATE_BYTES = sum(tensor.nbytes for tensor in STATE.values())
CHAIN = ("a", "b", "c")
FIRST = Version(0, 0)


async def _first_weights(_first: int, end: int) -> StoredTensors:
    return StoredTensors.whole(end, STATE)


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_client, "RANGE_BYTES", RANGE_BYTES)


def _check(name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    if name not in STATE:
        raise ProtocolError(f"unknown {name}")
    return STATE[name].dtype, tuple(STATE[name].shape)


def _assignment(names: Sequence[str], key: GenerationKey = KEY) -> Assignment:
    ids = tuple(map(memory_id, names))
    place = StageAssignment(0, 1, 1, ids, (1,) * len(ids))
    sizes = {"batch_size": len(ids), "micro_batch": len(ids), "version": Version(0, 0), "seed": 0}
    wire = WireFormat.EXACT
    holder = memory_id("holder")
    return Assignment(key, holder, "d", (place,), optimizer=SGD(), clip=False, wire=wire, **sizes)


class _Group:
    """A holder and a group of devices, each with its server of states."""

    def __init__(self, names: Sequence[str] = CHAIN) -> None:
        self.assignment = _assignment(names)
        self.mesh = MemoryHousehold(["holder", *CHAIN])
        self.states = {name: TransferServer(self.mesh[name]) for name in ("holder", *CHAIN)}
        self.states["holder"].hold(KEY.job, FIRST, _first_weights)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.mesh)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def read(self, name: str, hop_seconds: float = HOP_SECONDS) -> Mapping[str, Tensor]:
        (place,) = self.assignment.stages
        holder = memory_id("holder")
        chain = [device for device in place.devices if device != holder]
        number = chain.index(memory_id(name))
        wanted = Fetch(0, 1, chain[number - 1], True) if number else Fetch(0, 1, holder)
        mesh, states = self.mesh[name], self.states[name]
        asked = mesh, states, self.assignment, wanted, _check
        return (await fetch_units(*asked, hop_seconds=hop_seconds)).tensors

    def sent(self, sender: str, receiver: str) -> int:
        """Bytes of tensors and manifests."""
        counted = self.mesh[sender].link_statistics(memory_id(receiver))
        return counted.sent_parts_bytes if counted else 0


def _same(state: Mapping[str, Tensor]) -> bool:
    return list(state) == list(STATE) and all(
        torch.equal(state[name], tensor) and state[name].stride() == tensor.stride()
        for name, tensor in STATE.items()
    )


async def test_every_byte_leaves_the_holder_once() -> None:
    async with _Group() as group:
        states = await asyncio.gather(*map(group.read, CHAIN))
        assert all(map(_same, states))
        for one, other in zip(("holder", "a", "b"), CHAIN, strict=True):
            assert STATE_BYTES <= group.sent(one, other) < 1.3 * STATE_BYTES  # and a manifest
        assert group.sent("holder", "b") == group.sent("holder", "c") == 0


async def test_one_range_after_the_other_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last device has the first range before the first device has the last one."""
    arrivals: list[int] = []
    arrived = ServedState.arrived

    def note(self: ServedState, first: int, parts: Sequence[memoryview]) -> None:
        arrivals.append(id(self))
        arrived(self, first, parts)

    monkeypatch.setattr(ServedState, "arrived", note)
    async with _Group() as group:
        await asyncio.gather(*map(group.read, CHAIN))
    of_first = arrivals[0]
    assert arrivals.index(next(r for r in arrivals if r != of_first)) < len(arrivals) // 2


async def test_a_holder_that_is_in_the_group_sends_to_the_first_of_the_others() -> None:
    async with _Group(["a", "holder", "b"]) as group:
        assert all(map(_same, await asyncio.gather(*map(group.read, ("a", "b")))))
        assert group.sent("holder", "a") > 0
        assert group.sent("holder", "b") == 0


async def test_who_asks_before_the_relay_has_begun_gets_it_when_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, entries = asyncio.Event(), ServedState.entries

    async def note(self: ServedState) -> Entries:
        asked.set()
        return await entries(self)

    monkeypatch.setattr(ServedState, "entries", note)
    async with _Group() as group:
        early = asyncio.create_task(group.read("b"))
        await asked.wait()
        await group.read("a")
        assert _same(await early)
        assert group.sent("holder", "b") == 0


@pytest.mark.parametrize("ranges", [0, 1, 2])
async def test_the_rest_comes_from_the_holder_where_a_relay_dies(
    monkeypatch: pytest.MonkeyPatch, ranges: int
) -> None:
    async with _Group() as group:
        arrived, left = ServedState.arrived, ranges

        def stop_at_the_next(self: ServedState, first: int, parts: Sequence[memoryview]) -> None:
            nonlocal left
            if self is group.states["a"].arriving.get(KEY, 0, 1):
                left -= 1
                if left < 0:
                    reading.cancel()
                    return
            arrived(self, first, parts)

        monkeypatch.setattr(ServedState, "arrived", stop_at_the_next)
        behind = [asyncio.create_task(group.read(name)) for name in ("b", "c")]
        reading = asyncio.create_task(group.read("a"))
        with pytest.raises(asyncio.CancelledError):
            await reading
        await group.mesh.kill("a")
        assert all(map(_same, await asyncio.gather(*behind)))
        from_holder = group.sent("holder", "b")
        assert from_holder > 0
        assert from_holder < 1.3 * STATE_BYTES - ranges * RANGE_BYTES // 2
        assert group.sent("holder", "c") == 0


async def test_a_relay_that_gives_up_sends_those_behind_it_to_the_holder_at_once() -> None:
    async with _Group() as group:
        group.states["a"].arriving.give_up(group.assignment, memory_id("a"), "out of memory")
        assert all(map(_same, await asyncio.gather(group.read("b"), group.read("c"))))
        assert group.sent("holder", "b") > 0
        assert group.sent("holder", "c") == 0


async def test_a_relay_that_stalls_is_given_up() -> None:
    async with _Group() as group:
        assert _same(await group.read("b", hop_seconds=0.001))  # nobody makes a ready
        assert group.sent("holder", "b") > 0


async def test_other_versions_that_know_no_relays_are_read_around() -> None:
    async with _Group() as group:
        group.mesh["a"].unroute(STATE_MANIFEST)
        assert _same(await group.read("b"))


async def test_a_relay_with_another_manifest_is_refused() -> None:
    async with _Group() as group:
        false = group.states["a"].arriving.get(KEY, 0, 1)
        false.begin([("model:0", ["float32", [700], [1], False, 0])], {})
        group.mesh["a"].unroute(STATE_READ)
        with pytest.raises(ProtocolError, match="different tensors"):
            await group.read("b")


async def test_relays_end_with_their_generation() -> None:
    async with _Group() as group:
        await group.read("a")
        kept = group.states["a"].arriving.get(KEY, 0, 1)
        group.states["a"].arriving.end(GenerationKey("other", 5), "over")
        group.states["a"].arriving.end(GenerationKey(KEY.job, 0), "over")
        assert await kept.parts(0, 1)
        group.states["a"].arriving.end(KEY, "over")
        with pytest.raises(PeerError, match="over"):
            await kept.parts(0, 1)


async def test_waiting_for_a_relay_ends() -> None:
    with pytest.raises(PeerError, match="not reached"):
        await ServedState(wait_seconds=0.0).entries()


async def test_names_that_never_come_push_each_other_out() -> None:
    relays = ArrivingStates()
    oldest = relays.get(GenerationKey("invented", 0), 0, 1)
    for number in range(1, MAX_ARRIVING + 1):
        relays.get(GenerationKey("invented", number), 0, 1)
    with pytest.raises(PeerError):
        await oldest.entries()
