"""A stage that is lost is rebuilt from what was sent to it: nobody else goes back a step."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch

from p2ptrain.errors import PeerError
from p2ptrain.events import Event, Failure, Recovered, Step
from p2ptrain.holder.input.feeder import ReplayFeed
from p2ptrain.holder.input.loader import MicroBatchLoader
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.job.job import Job
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.messages.kinds import FEED_SEND
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.messages.tensors import (
    MicroBatchKey,
    MicroBatchSlice,
    ResendSamples,
    SampleRange,
    StreamId,
)
from p2ptrain.net.message import Message
from p2ptrain.runtime.io.tensor_receiver import StreamContents, TensorReceiver
from p2ptrain.runtime.io.tensor_router import ACTIVATIONS, TensorRouter
from p2ptrain.worker import hosted_stages, rebuild
from tests.integration.training.household import NO_FIRST_WEIGHTS, Devices, devices
from tests.integration.training.jobs import (
    assert_undisturbed,
    momentum_job,
    one_stage_each,
    undisturbed,
)
from tests.integration.training.test_recovery_holder import again, killed
from tests.support.memory_household import MemoryHousehold

STEPS = 20
KEPT_AT = 3
"""The only version that is kept."""
DEATH_AT = 12


def _job() -> Job:
    return momentum_job(epochs=20)


@pytest.fixture(autouse=True)
def kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One version has copies, long before the death."""
    monkeypatch.setattr(SnapshotManager, "wants", lambda _copies, step: step == KEPT_AT)


async def _run(household: Devices, job: Job, *dying: str) -> Recovered:
    """Devices die together; returns how that was recovered from."""
    killing: list[asyncio.Task[None]] = []

    def listen(event: Event) -> None:
        household.events.append(event)
        if isinstance(event, Step) and event.step == DEATH_AT:
            killing.extend(asyncio.create_task(household.mesh.kill(name)) for name in dying)

    count = len(household.names)
    await household.holder_run(job, one_stage_each(count, STEPS), listen).run()
    await asyncio.gather(*killing)
    assert_undisturbed(household, job, undisturbed(_job(), STEPS))
    assert {e.name for e in household.events if isinstance(e, Failure)} == set(dying)
    return next(event for event in household.events if isinstance(event, Recovered))


@pytest.mark.parametrize("name", ["b", "c"])
async def test_nobody_goes_back_for_one_stage(name: str) -> None:
    """Of the last one, the holder reads the targets again."""
    async with devices(3, settings=NO_FIRST_WEIGHTS) as household:
        recovered = await _run(household, _job(), name)
        assert recovered.replayed_steps <= 1  # where nobody had heard that the last one counts


async def test_two_stages_that_are_not_neighbours_are_rebuilt_together() -> None:
    async with devices(5, settings=NO_FIRST_WEIGHTS) as household:
        recovered = await _run(household, _job(), "b", "d")
        assert recovered.replayed_steps <= 1


async def test_what_is_not_kept_any_more_is_done_again_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosted_stages, "replay_log_bytes", lambda *_planned: 1)
    async with devices(3, settings=NO_FIRST_WEIGHTS) as household:
        recovered = await _run(household, _job(), "b")
        assert recovered.version == KEPT_AT


async def test_who_cannot_rebuild_it_says_so_and_all_go_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(rebuild._RebuildRun, "run", fails)
    async with devices(3, settings=NO_FIRST_WEIGHTS) as household:
        recovered = await _run(household, _job(), "b")
        assert recovered.version == KEPT_AT


async def test_a_holder_that_is_started_again_gets_its_stage_rebuilt(tmp_path: Path) -> None:
    """It reads again what it fed to it."""
    options = one_stage_each(3, STEPS)
    async with devices(3, settings=NO_FIRST_WEIGHTS) as household:
        process = await killed(household, tmp_path, DEATH_AT, _job(), options)
        await household.until_waiting("b", "c")
        job = _job()
        await again(household, process, job, options)
        assert_undisturbed(household, job, undisturbed(_job(), STEPS))
        (recovered,) = (event for event in household.events if isinstance(event, Recovered))
        assert recovered.replayed_steps <= 1


def _no_loader() -> MicroBatchLoader:
    raise AssertionError("a refused device gets no samples")


async def test_samples_are_sent_again_to_devices_of_the_plan_alone() -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        here, other = mesh["a"], mesh["b"]
        line = StreamId(GenerationKey("job", 9), 0, "activations")
        wanted = ResendSamples(line, Round(0, RoundMode.TRAIN, 0, 16, 4)).fields()
        for devices_, is_private in (((), False), ((other.self_id,), True)):
            feeding = ReplayFeed(
                here,
                TensorRouter(here),
                "job",
                _no_loader,
                partial(tuple, devices_),
                is_private=is_private,
            )
            with pytest.raises(PeerError, match="not for that device"):
                await other.call(here.self_id, Message(FEED_SEND, wanted), timeout_seconds=5.0)
            feeding.close()


async def test_what_comes_too_late_for_an_attempt_is_not_the_next_generations() -> None:
    """Both have the same number; who sends again does not hear that nobody waits any more."""
    async with MemoryHousehold(["a", "b"]) as mesh:
        here, other = TensorRouter(mesh["a"]), TensorRouter(mesh["b"])
        me, sender = mesh["a"].self_id, mesh["b"].self_id
        contents = StreamContents(
            "activations", lambda _mode, _size: [(torch.float32, (4,))], lambda _mode: [0]
        )

        def sources(_number: int, size: int) -> list[SampleRange]:
            return [SampleRange(sender, 0, size)]

        receiver = TensorReceiver(contents, sources, capacity=4, largest=4)
        here.connect_tensors(StreamId(GenerationKey("job", 10), 1, ACTIVATIONS), receiver, [sender])
        piece = MicroBatchSlice.whole(MicroBatchKey(0, 0), RoundMode.TRAIN, 4)
        late = StreamId(rebuild.streams_key("job", 10), 1, ACTIVATIONS)
        for line in (late, StreamId(GenerationKey("job", 10), 1, ACTIVATIONS)):
            await other.send_values(me, line, piece, [torch.zeros(4)])
        await receiver.take(piece.key)
        assert here.stale_frames == 1
