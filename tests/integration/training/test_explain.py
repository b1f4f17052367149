"""Any member learns what limits a job; afterwards the holder's folder has it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2ptrain.errors import PeerError
from p2ptrain.events import Done, Event, Step
from p2ptrain.job.last_job import last_facts
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.messages.kinds import EXPLAIN, ROUND_PICTURE
from p2ptrain.net.fields import limited, part_of
from p2ptrain.net.message import Message
from p2ptrain.plan.explain import explain
from p2ptrain.plan.round_picture import KINDS, RoundPicture
from p2ptrain.plan.types.job_facts import JobFacts
from tests.integration.training.household import Devices, devices, hold_rounds
from tests.integration.training.jobs import STEPS, momentum_job
from tests.support.memory_household import memory_id


async def asked(household: Devices, of: str, holder: str) -> JobFacts:
    reply = await household.mesh[of].call(
        memory_id(holder),
        Message(EXPLAIN),
        timeout_seconds=60.0,
        reply_parts=limited(JobFacts.LIMIT.most_bytes),
    )
    return JobFacts.from_bytes(part_of(reply))


async def shown(household: Devices, of: str, holder: str) -> RoundPicture:
    """Once devices have recorded whole rounds, and the plan was simulated."""
    while True:
        reply = await household.mesh[of].call(
            memory_id(holder),
            Message(ROUND_PICTURE),
            timeout_seconds=60.0,
            reply_parts=limited(RoundPicture.LIMIT.most_bytes),
        )
        picture = RoundPicture.from_bytes(part_of(reply))
        if picture.rounds and picture.predicted is not None:
            return picture
        await asyncio.sleep(0.05)


async def test_any_member_learns_what_limits_a_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[JobFacts] = []
    pictures: list[RoundPicture] = []
    hold_rounds(monkeypatch, STEPS - 1, lambda: bool(found and pictures))
    async with devices(3) as household:
        options = TrainOptions(wait_for=3, planner="pp")
        begun = asyncio.Event()

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step):
                begun.set()

        folder = StateFolder(tmp_path / "job")
        run = household.holder_run(momentum_job(), options, listen, folder)

        async def ask() -> None:
            await begun.wait()
            pictures.append(await shown(household, "c", "a"))
            found.append(await asked(household, "b", "a"))

        async with asyncio.TaskGroup() as group:
            group.create_task(run.run())
            group.create_task(ask())
        with pytest.raises(PeerError):
            await asked(household, "b", "a")
    (picture,) = pictures
    assert picture.devices == ("a", "b", "c")
    assert picture.predicted is not None
    for bars in (picture.bars, picture.predicted.bars):
        drawn = {(KINDS[bar.kind], bar.device) for bar in bars}
        assert {("forward", n) for n in range(3)} <= drawn
        assert {("backward", 2), ("send", 0), ("receive", 2)} <= drawn
    assert any(KINDS[bar.kind] == "wait" for bar in picture.bars)
    (facts,) = found
    assert sorted(device.name for device in facts.devices) == ["a", "b", "c"]
    assert facts.round_seconds
    assert all(device.busy_seconds > 0 for device in facts.devices)
    assert all(device.expected_seconds for device in facts.devices)
    changes = [(one.change, one.name) for one in facts.what_ifs]
    assert changes[0] == ("now", "")
    assert {("without", "b"), ("without", "c"), ("faster links", "")} <= set(changes)
    assert {"one more", "alone"} <= {*dict(changes)}
    assert {one.name for one in facts.energy} == {"a", "b", "c"}
    done = household.events[-1]
    assert isinstance(done, Done)
    assert {*done.energy_of, *done.energy_missing} == {"a", "b", "c"}
    texts = [point.text for point in explain(facts)]
    assert any(text.startswith("without c: ") for text in texts)
    last = last_facts(tmp_path)
    assert last is not None
    assert last.is_over
    assert last.step == len(household.losses)
    assert "trained at" in explain(last)[0].text
