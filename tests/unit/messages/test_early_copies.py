"""Without a barrier a copy may be whole before its version counts: nobody goes back to it yet."""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.kinds import SNAPSHOT_KEPT
from p2ptrain.messages.round_orders import GenerationKey, RoundOrder
from p2ptrain.messages.snapshots import SnapshotKept
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.net.message import Message
from p2ptrain.recovery.state_report import StageCopy
from p2ptrain.recovery.version import Version
from tests.support.memory_household import MemoryHousehold

KEY = GenerationKey("j", 3)
FIRST, KEPT = Version(4, 2), Version(10, 3)


def assignment() -> Assignment:
    """Two stages; each device keeps the other's copies."""
    return Assignment(
        key=KEY,
        holder="a",
        digest="d",
        stages=(
            StageAssignment(0, 2, 2, ("a",), (1,), copies_to="b"),
            StageAssignment(2, 4, 1, ("b",), (1,), copies_to="a"),
        ),
        batch_size=8,
        micro_batch=8,
        optimizer=SGD(),
        seed=0,
        clip=False,
        version=FIRST,
        asynchrony=AsyncOptions(),
    )


def order(step: int) -> RoundOrder:
    return RoundOrder(Round(step, RoundMode.TRAIN, step, 8, 8, step))


class Holder:
    """Its account of copies, and what became stable."""

    def __init__(self, household: MemoryHousehold) -> None:
        self.stable: list[Version] = []
        self.copies = SnapshotManager(household["h"], "j", self.stable.append, print)
        self.copies.begin(assignment(), None, FIRST)

    async def hears(self, backup_peer: str, units: tuple[int, int], version: Version) -> None:
        kept = SnapshotKept(KEY.job, StageCopy(KEY.generation, *units, version))
        message = Message(SNAPSHOT_KEPT, kept.fields())
        await self.copies._kept(backup_peer, message)


async def test_a_version_is_stable_once_it_is_whole_and_counts() -> None:
    async with MemoryHousehold(["h"]) as household:
        holder = Holder(household)
        asked = holder.copies.ordered(order(KEPT.step - 1))
        assert asked.offer
        await holder.hears("b", (0, 2), KEPT)
        await holder.hears("a", (2, 4), KEPT)
        holder.copies.round_done(KEPT.step - 1)
        assert holder.stable == []
        later = holder.copies.ordered(order(KEPT.step + 5))
        assert set(later.stay) >= {FIRST, KEPT}, "neither may go meanwhile"
        holder.copies.round_done(KEPT.step)
        assert holder.stable == [KEPT]
        assert holder.copies.stable == KEPT
        await holder.copies.close()


async def test_words_of_an_generation_that_has_ended_count_for_nothing() -> None:
    async with MemoryHousehold(["h"]) as household:
        holder = Holder(household)
        holder.copies.ordered(order(KEPT.step - 1))
        await holder.hears("b", (0, 2), KEPT)
        await holder.hears("a", (2, 4), KEPT)
        holder.copies.end_generation()
        began = replace(assignment(), key=GenerationKey("j", 4), version=FIRST)
        holder.copies.begin(began, None, FIRST)
        holder.copies.round_done(KEPT.step)
        assert holder.stable == []
        await holder.copies.close()
