"""FTPipeHD's copies of the whole model: which versions, and never while one is gone back to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from p2ptrain.errors import PeerError
from p2ptrain.holder.snapshots import full_snapshots
from p2ptrain.holder.snapshots.full_snapshots import FullSnapshots, whole_copies
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.asynchrony import FtpipehdOptions
from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.recovery.snapshot_schedule import SnapshotCost, SnapshotSchedule
from p2ptrain.recovery.state_report import StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.state.transfer_server import TransferServer

FIRST = Version(0, 0)


@pytest.mark.parametrize("round_seconds", [0.6, 7.0, 50.0])
def test_the_first_weights_count_until_the_first_copies_should_be_there(
    round_seconds: float,
) -> None:
    """However dear copies are: ordered after the cadence's limit, and as long on their way."""
    (first,) = whole_copies("a", {FIRST}, FIRST, round_seconds)
    assert first.kind is StateKind.INITIAL
    assert first.most_replayed is not None
    cadence = SnapshotSchedule(SnapshotCost(1e6, (), round_seconds), 0, 0.0)
    on_its_way = HOME.replay_limit_seconds / round_seconds
    assert first.most_replayed >= cadence.interval_rounds + on_its_way


def test_first_weights_that_are_not_here_any_more_do_not_count() -> None:
    assert whole_copies("a", (), FIRST, 0.6) == ()


class Offered:
    """In the place of what others read from."""

    def __init__(self) -> None:
        self.held: list[Version] = []

    def hold(self, _job: str, version: Version, _tensors: object) -> None:
        self.held.append(version)

    def let_go(self, _job: str, version: Version) -> None:
        self.held.remove(version)


EACH_TENTH = FtpipehdOptions(whole=10).copies_whole


class Making:
    """Whole copies that are there when a test says so."""

    def __init__(
        self,
        wants: Callable[[int, int], bool] | None = EACH_TENTH,
    ) -> None:
        self.offered, self.warned, self.is_elsewhere = Offered(), list[str](), True
        self.asked: list[tuple[Version, asyncio.Future[Mapping[str, Tensor]]]] = []
        captured = SimpleNamespace(description=None)
        prepared = SimpleNamespace(captured=captured, first_step=0, whole_bytes=1000)
        self.copies = FullSnapshots(
            cast("TransferServer", self.offered),
            "job",
            cast("PreparedJob", prepared),
            self._gather,
            wants,
            lambda: self.is_elsewhere,
            self.warned.append,
        )

    async def _gather(self, version: Version) -> Mapping[str, Tensor]:
        found = asyncio.get_running_loop().create_future()
        self.asked.append((version, found))
        return await found

    async def stable(self, *steps: int) -> None:
        for step in steps:
            self.copies.stable(Version(step, 1))
            await asyncio.sleep(0)

    async def arrives(self, error: Exception | None = None) -> None:
        _, found = self.asked[-1]
        if error is None:
            found.set_result({"model:w": torch.zeros(1)})
        else:
            found.set_exception(error)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_the_first_stable_version_from_each_tenth_on_takes_the_place_of_the_one_before() -> (
    None
):
    made = Making()
    await made.stable(4, 9)
    assert made.asked == []
    await made.stable(12, 15)
    assert made.copies.reading == Version(12, 1)
    assert made.offered.held == []
    await made.arrives()
    assert made.offered.held == [Version(12, 1)]
    await made.stable(19, 20)
    await made.arrives()
    assert [version.step for version, _ in made.asked] == [12, 20]
    assert made.offered.held == [Version(20, 1)]
    await made.copies.close()


async def test_what_is_held_when_an_generation_ends_stays_until_the_next_has_begun() -> None:
    """Else it would go while others are asked to read it."""
    made = Making()
    await made.stable(10)
    await made.arrives()
    await made.stable(20)
    made.asked[-1][1].set_result({})  # all of it is here, and a generation ends in the same moment
    made.copies.pause()
    await made.stable(20)
    assert made.offered.held == [Version(10, 1)]
    assert made.copies.reading is None
    await made.stable(30)
    assert len(made.asked) == 2
    made.copies.begin()
    await made.stable(40)
    assert len(made.asked) == 3
    await made.copies.close()


async def test_it_goes_once_several_devices_have_copies_of_each_other_s_stages() -> None:
    made = Making(None)
    await made.stable(10)
    await made.arrives()
    made.is_elsewhere = False
    made.copies.pause()
    await made.stable(12)
    assert made.offered.held == [Version(10, 1)], "the generation that ends may need it"
    made.copies.begin()
    await made.stable(13, 20)
    assert made.offered.held == []
    assert made.copies.held is None
    assert len(made.asked) == 1
    await made.copies.close()


async def test_one_that_cannot_be_read_is_left_out() -> None:
    made = Making()
    await made.stable(10)
    await made.arrives(PeerError("gone"))
    assert (made.offered.held, made.copies.reading, made.warned) == ([], None, [])
    await made.stable(20)
    await made.arrives(MemoryError())
    assert made.offered.held == []
    assert len(made.warned) == 1
    await made.copies.close()


async def test_it_is_not_begun_without_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_snapshots, "usable_memory_bytes", lambda: 1999)
    made = Making()
    await made.stable(10, 20)
    assert made.asked == []
    assert len(made.warned) == 1, "people hear of it once"
