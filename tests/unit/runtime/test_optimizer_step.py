"""The second half of a round: one update at a time, and the copy that is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import pytest
from torch import Tensor

from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.messages.round_orders import Commit
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.stage.optimizer_form import PlainColumns
from p2ptrain.recovery.state_report import StateEntry, StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.live_stage import LiveStage
from p2ptrain.runtime.optimizer_step import OptimizerStep
from p2ptrain.state.snapshot_store import SnapshotStore
from tests.support.stored_tensors import discard, stored
from tests.unit.runtime.test_live_stage import (
    GENERATION,
    assert_equal,
    captured,
    compute_round,
    make_live,
    make_order,
)

__all__ = ["captured"]

T = TypeVar("T")


async def run_here(function: Callable[[], T]) -> T:
    """As the compute thread would."""
    return function()


class Kept:
    """A stage whose copies are watched."""

    def __init__(self, captured: Captured, *, keeps: bool = True, goes_ahead: bool = False) -> None:
        self.live: LiveStage = make_live(captured)
        self.units = (self.live.stage.first, self.live.stage.end)
        self.store = SnapshotStore(captured.description)
        self.update = OptimizerStep(
            *(self.live, run_here, self.store),
            device="a",
            stage=3,
            keeps=keeps,
            goes_ahead=goes_ahead,
        )
        self.told: list[tuple[int, Version, str | None]] = []
        self.update.on_kept = lambda *what: self.told.append(what)

    async def round(self, step: int, *, keep: bool = False) -> None:
        """A whole round; the commit comes at once."""
        compute_round(self.live)
        await self.update.make(replace(make_order(step), keep=keep), self.commit_at_once)

    async def commit_at_once(self) -> None:
        assert self.live.ready is not None
        self.update.commit(Commit(0, self.live.ready.step - 1))


async def test_ready_when_done_is_said_and_not_before_it_counts(captured: Captured) -> None:
    kept = Kept(captured)
    compute_round(kept.live)
    said = asyncio.Event()

    async def say_done() -> None:
        assert kept.live.ready == Version(1, GENERATION)
        said.set()

    making = asyncio.create_task(kept.update.make(make_order(), say_done))
    await said.wait()
    settled = asyncio.create_task(kept.update.settled())
    await asyncio.sleep(0)
    assert kept.live.version == Version(0, 0)
    assert not settled.done()
    kept.update.commit(Commit(0, 0))
    await asyncio.gather(making, settled)
    assert kept.live.version == Version(1, GENERATION)
    with pytest.raises(ProtocolError, match="none is awaited"):
        kept.update.commit(Commit(0, 0))


async def test_a_copy_is_kept_where_the_order_says_so(captured: Captured) -> None:
    kept = Kept(captured)
    await kept.round(0)
    assert kept.store.entries() == ()
    await kept.round(1, keep=True)
    version = Version(2, GENERATION)
    assert kept.told == [(3, version, None)]
    assert kept.store.entries() == (StateEntry(*kept.units, version, StateKind.KEPT),)
    copy = stored(kept.store, *kept.units, version)
    assert copy is not None
    assert_equal(copy, kept.live.named())
    await kept.round(2)
    assert not any(
        (copy[name] == tensor).all() for name, tensor in kept.live.named().items() if "head" in name
    ), "the copy stays as it was"


async def test_the_third_copy_takes_the_memory_of_the_first(captured: Captured) -> None:
    kept = Kept(captured)
    kept.store.reserve([(StateKind.KEPT, *kept.units)])

    def places(version: Version) -> dict[str, int]:
        found: dict[str, Tensor] = stored(kept.store, *kept.units, version) or {}
        return {name: tensor.data_ptr() for name, tensor in found.items()}

    for step in range(2):
        await kept.round(step, keep=True)
    first, second = places(Version(1, GENERATION)), places(Version(2, GENERATION))
    shared = {name for name, place in first.items() if place in second.values()}
    assert shared == {"model:constant"}, "what training never changes is there once"
    discard(kept.store, StateKind.KEPT, but=[Version(2, GENERATION)])
    await kept.round(2, keep=True)
    assert places(Version(3, GENERATION)) == first
    assert places(Version(2, GENERATION)) == second


async def test_a_device_that_is_not_asked_keeps_nothing(captured: Captured) -> None:
    kept = Kept(captured, keeps=False)
    await kept.round(0, keep=True)
    assert kept.store.entries() == ()
    assert kept.told == []


async def test_no_memory_for_a_copy_is_no_reason_to_stop(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(captured)

    def no_memory(slot: object) -> None:
        raise MemoryError

    monkeypatch.setattr(kept.live, "copied", no_memory)
    await kept.round(0, keep=True)
    assert kept.told == [(3, Version(1, GENERATION), "no memory")]
    assert kept.live.version == Version(1, GENERATION)
    assert not kept.live.torn
    monkeypatch.undo()
    await kept.round(1, keep=True)
    assert kept.told[-1] == (3, Version(2, GENERATION), None)


async def test_a_failed_update_is_nothing_to_wait_for(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(captured)

    def no_memory(numbers: PlainColumns) -> None:
        raise MemoryError

    monkeypatch.setattr(kept.live.optimizer, "step", no_memory)
    with pytest.raises(MemoryError):
        await kept.round(0, keep=True)
    assert kept.live.torn
    assert kept.store.entries() == ()
    with pytest.raises(PeerError, match="update 0 was not made here"):
        await kept.update.settled()


async def said() -> None:
    """Done is said, and nobody answers yet."""


@asynccontextmanager
async def counting(update: OptimizerStep) -> AsyncIterator[None]:
    """What the stage's runner does."""
    running = asyncio.create_task(update.run())
    yield
    running.cancel()
    await asyncio.wait([running])


async def test_ahead_an_update_is_made_at_once_and_counts_when_it_is_asked_to(
    captured: Captured,
) -> None:
    kept = Kept(captured, goes_ahead=True)
    version = Version(1, GENERATION)
    async with counting(kept.update):
        compute_round(kept.live)
        await kept.update.make(replace(make_order(0), keep=True), said)
        assert kept.live.is_ahead
        assert (kept.live.version, kept.live.ready) == (Version(0, 0), version)
        assert kept.told == []
        after = kept.live.copied({})
        settled = asyncio.create_task(kept.update.settled())
        compute_round(kept.live)
        early = asyncio.create_task(kept.update.make(make_order(1), said))
        await asyncio.sleep(0)
        assert not settled.done()
        assert kept.live.ready == version, "the next update waits for the word on this one"
        kept.update.commit(Commit(0, 0))
        await settled
        assert kept.told == [(3, version, None)]
        await early
        assert kept.live.ready == Version(2, GENERATION)
        copy = stored(kept.store, *kept.units, version)
        assert copy is not None
        assert_equal(copy, after)
        assert_equal(kept.live.named(), after)


async def test_the_word_may_come_while_the_update_is_made(captured: Captured) -> None:
    kept = Kept(captured, goes_ahead=True)
    plain = Kept(captured)
    async with counting(kept.update):
        for step in range(3):
            await plain.round(step)
            await kept.round(step)
            await kept.update.settled()
            assert_equal(kept.live.named(), plain.live.named())
    assert kept.live.version == Version(3, GENERATION)


async def test_who_stops_before_the_word_leaves_nobody_waiting(captured: Captured) -> None:
    kept = Kept(captured, goes_ahead=True)
    before = kept.live.copied({})
    async with counting(kept.update):
        compute_round(kept.live)
        await kept.update.make(replace(make_order(0), keep=True), said)
        settled = asyncio.create_task(kept.update.settled())
        await asyncio.sleep(0)
    with pytest.raises(PeerError, match="update 0 was not made here"):
        await settled
    assert kept.store.entries() == ()
    assert_equal(kept.live.named(), before)


async def test_without_memory_to_go_ahead_a_stage_waits_for_the_word(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(captured, goes_ahead=True)

    def no_memory() -> None:
        raise MemoryError

    monkeypatch.setattr(kept.live, "advance", no_memory)
    async with counting(kept.update):
        for step in range(2):
            compute_round(kept.live)
            making = asyncio.create_task(kept.update.make(make_order(step), said))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not making.done()
            kept.update.commit(Commit(0, step))
            await making
            monkeypatch.setattr(kept.live, "advance", pytest.fail)  # it does not ask again
    assert kept.live.version == Version(2, GENERATION)


async def test_begun_before_all_sums_are_there_an_update_is_ready_when_they_are(
    captured: Captured,
) -> None:
    kept, plain = Kept(captured, goes_ahead=True), Kept(captured)
    async with counting(kept.update):
        for step in range(3):
            await plain.round(step, keep=step == 1)
            before = kept.live.copied({})
            compute_round(kept.live)
            order = replace(make_order(step), keep=step == 1)
            assert await kept.update.begin(order)
            assert (kept.live.version.step, kept.live.ready) == (step, None)
            kept.live.update_some(["head.weight"])
            assert_equal(kept.live.named(), before)
            await kept.update.end(order, said)
            assert kept.live.ready == Version(step + 1, GENERATION)
            assert_equal(kept.live.named(), before)
            assert_equal(kept.live.present(), plain.live.named())
            kept.update.commit(Commit(0, step))
            await kept.update.settled()
            assert_equal(kept.live.named(), plain.live.named())
    assert kept.told == plain.told == [(3, Version(2, GENERATION), None)]
    copies = [stored(one.store, *one.units, Version(2, GENERATION)) for one in (kept, plain)]
    assert copies[0] is not None
    assert copies[1] is not None
    assert_equal(copies[0], copies[1])


async def test_the_next_update_is_begun_when_the_one_before_counts(captured: Captured) -> None:
    kept = Kept(captured, goes_ahead=True)
    async with counting(kept.update):
        compute_round(kept.live)
        await kept.update.make(make_order(0), said)
        compute_round(kept.live)
        beginning = asyncio.create_task(kept.update.begin(make_order(1)))
        await asyncio.sleep(0)
        assert not beginning.done()
        kept.update.commit(Commit(0, 0))
        assert await beginning
        assert kept.live.version == Version(1, GENERATION)


async def test_who_stops_before_the_sums_are_there_has_not_made_it(captured: Captured) -> None:
    kept = Kept(captured, goes_ahead=True)
    before = kept.live.copied({})
    async with counting(kept.update):
        compute_round(kept.live)
        await kept.update.begin(make_order(0))
        kept.live.update_some(["head.bias"])
        settled = asyncio.create_task(kept.update.settled())
        await asyncio.sleep(0)
    with pytest.raises(PeerError, match="update 0 was not made here"):
        await settled
    assert_equal(kept.live.named(), before)


async def test_who_reads_while_an_update_is_begun_waits_for_the_word(captured: Captured) -> None:
    """It is begun in another thread, and the loop hears of it later."""
    kept, returned = Kept(captured, goes_ahead=True), asyncio.Event()

    async def run(function: Callable[[], T]) -> T:
        result = function()
        await returned.wait()
        return result

    async with counting(kept.update):
        compute_round(kept.live)
        kept.update._run = run
        order = make_order(0)
        beginning = asyncio.create_task(kept.update.begin(order))
        await asyncio.sleep(0)
        assert kept.live.is_ahead
        settled = asyncio.create_task(kept.update.settled())
        await asyncio.sleep(0)
        assert not settled.done()
        returned.set()
        assert await beginning
        await kept.update.end(order, said)
        kept.update.commit(Commit(0, 0))
        await settled


async def test_without_memory_to_begin_it_waits_for_all_sums(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(captured, goes_ahead=True)

    def no_memory(_order: object) -> None:
        raise MemoryError

    monkeypatch.setattr(kept.live, "begin_update", no_memory)
    compute_round(kept.live)
    assert kept.update.goes_ahead
    assert not await kept.update.begin(make_order(0))
    assert not kept.update.goes_ahead, "nor does it try again"
    assert not kept.live.is_ahead
    await kept.update.settled()
    await kept.update.make(make_order(0), kept.commit_at_once)
    assert kept.live.version == Version(1, GENERATION)
