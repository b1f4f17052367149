"""A device that has stopped: what it has, what it can still apply, what it hands over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from p2ptrain import failpoints
from p2ptrain.coordinator import memory_model
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.kinds import COMMIT
from p2ptrain.net.message import Message
from p2ptrain.recovery.state_report import StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.sync_executor import SyncStageExecutor
from p2ptrain.worker.hosted_stages import HostedStages
from tests.integration.training.group_plans import Stage, device_count, divided, force
from tests.integration.training.household import devices
from tests.integration.training.jobs import make_job
from tests.integration.training.test_commit import Send, engagement_of, spy
from tests.support.memory_household import MemoryMesh, memory_id

BEFORE, AFTER = Version(1, 1), Version(2, 1)
ALONE = [divided(4)] * 3


@dataclass(frozen=True)
class Case:
    """A model of the zoo and how it is cut; device b does not hear that update 1 counts."""

    model: str
    plan: Sequence[Stage]
    clip: float | None = None

    @property
    def devices(self) -> int:
        """How many the plan takes."""
        return device_count(self.plan)

    def job(self) -> Job:
        """Again, from the same weights."""
        return make_job(self.model, clip_grad_norm=self.clip)


BATCH_NORM = Case("cnn", ALONE)
CASES = {
    "alone": BATCH_NORM,
    "alone, clipped": Case("cnn", ALONE, clip=0.1),
    "split": Case("cnn", [divided(4), Stage((4,), slack=1), divided(4)]),
    "divided": Case("cnn", [divided(2, 2), divided(4)]),
    "divided, clipped": Case("cnn", [divided(2, 2), divided(4)], clip=0.1),
    "tied": Case("gpt", [divided(4)] * 2, clip=0.1),
}


_UNDISTURBED: dict[tuple[int, int], dict[str, Tensor]] = {}


async def _state_after(steps: int, case: Case) -> dict[str, Tensor]:
    """Undisturbed, trained once."""
    key = steps, id(case)
    if key not in _UNDISTURBED:
        count, job = case.devices, case.job()
        async with devices(count) as household:
            await household.holder_run(job, TrainOptions(wait_for=count, steps=steps)).run()
        _UNDISTURBED[key] = job.model.state_dict()
    return _UNDISTURBED[key]


@asynccontextmanager
async def _broken_off(
    monkeypatch: pytest.MonkeyPatch, case: Case
) -> AsyncIterator[dict[str, HostedStages]]:
    """Update 1 counts, b does not hear of it, all others apply it; then all stop.

    Where stages go ahead, b has made it by then.
    """
    lost, made = asyncio.Event(), asyncio.Event()
    count = case.devices
    monkeypatch.setattr(failpoints, "_all", [])
    monkeypatch.setattr(failpoints, "armed", False)
    for place in ("update.after", "update.end.after"):
        failpoints.arm(place, lambda _: made.set(), device=memory_id("b"), step=1)

    def on_send(pass_on: Send) -> Send:
        async def send(mesh: MemoryMesh, peer: str, message: Message) -> None:
            if message.kind == COMMIT and message.fields["step"] == 1 and peer == b:
                lost.set()
            else:
                await pass_on(mesh, peer, message)

        return send

    spy(monkeypatch, on_send)
    async with devices(count) as household:
        b = household.mesh["b"].self_id
        running = asyncio.create_task(
            household.holder_run(case.job(), TrainOptions(wait_for=count)).run()
        )
        await lost.wait()
        engagements = {name: engagement_of(household, name) for name in household.names}
        for name, hosted in engagements.items():
            if name != "b":
                await hosted.applied()
        if any(place.goes_ahead for place in engagements["b"].assignment.stages):
            await made.wait()
        for hosted in engagements.values():
            await hosted.stop()
            await hosted.stop()  # once more is nothing
        yield engagements
        running.cancel()
        await asyncio.wait([running])


def _named(
    hosted: HostedStages, first: int, end: int, version: Version
) -> dict[str, Tensor] | None:
    """Its stages' own tensors of units [first, end); None unless all are there at `version`."""
    found: dict[str, Tensor] = {}
    while first < end:
        part = hosted.named_from(first, end, version)
        if part is None:
            return None
        first, tensors = part
        found |= tensors
    return found


def _model(engagements: dict[str, HostedStages], version: Version) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for hosted in engagements.values():
        for entry in hosted.held():
            if entry.version == version:
                named = _named(hosted, entry.first, entry.end, version)
                assert named is not None
                found |= named
    return {n.removeprefix("model:"): t for n, t in found.items() if n.startswith("model:")}


@pytest.fixture(params=[True, False], ids=["ahead", "waiting"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether stages make updates before they count, where nothing else forbids it."""
    if not request.param:
        monkeypatch.setattr(memory_model, "_may_go_ahead", lambda *_: False)
    return bool(request.param)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_who_is_behind_catches_up_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, case: Case, ahead: bool
) -> None:
    force(monkeypatch, case.plan)
    wanted = await _state_after(2, case)
    async with _broken_off(monkeypatch, case) as engagements:
        held = {name: hosted.held() for name, hosted in engagements.items()}
        for name, (entry,) in held.items():
            assert entry.kind is StateKind.LIVE
            expected = (BEFORE, AFTER) if name == "b" else (AFTER, None)
            assert (entry.version, entry.ready) == expected
        (behind,) = engagements["b"].executors.values()
        assert isinstance(behind, SyncStageExecutor)
        assert behind.live.is_ahead == (ahead and case.clip is None)
        coefficient = held["a"][0].coefficient
        assert (coefficient is None) == (case.clip is None)
        for hosted in engagements.values():  # who has applied it stays as it is
            await hosted.apply_ready(AFTER, coefficient)
            assert [(h.version, h.ready) for h in hosted.held()] == [(AFTER, None)]
        found = _model(engagements, AFTER)
        both = found.keys() & wanted.keys()
        assert len(both) >= len(wanted) - 1  # which names a tied weight twice
        assert all(torch.equal(found[name], wanted[name]) for name in both)
        if len(case.plan[0].shares) > 1:
            first, second = (engagements[name].held()[0] for name in "ab")
            units = (first.first, first.end)
            assert units == (second.first, second.end)
            one, other = (_named(engagements[name], *units, AFTER) or {} for name in "ab")
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
        assert await engagements["b"].apply_ready(Version(3, 1), coefficient) == {}


@pytest.mark.usefixtures("ahead")
async def test_who_is_ready_still_has_the_version_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running statistics included, which the round has changed already."""
    force(monkeypatch, ALONE)
    wanted = await _state_after(1, BATCH_NORM)
    async with _broken_off(monkeypatch, BATCH_NORM) as engagements:
        found = _model(engagements, BEFORE)
        (entry,) = engagements["b"].held()
        assert set(found) == set(engagements["b"].description.state_names(entry.first, entry.end))
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
        units = (entry.first, entry.end)
        assert _named(engagements["b"], *units, AFTER) is None
        assert _named(engagements["b"], entry.first, entry.end + 1, BEFORE) is None
        part = _named(engagements["b"], entry.first, entry.first + 1, BEFORE)
        assert part is not None
        own = _named(engagements["b"], *units, BEFORE) or {}
        assert all(tensor.data_ptr() == own[name].data_ptr() for name, tensor in part.items())


async def test_what_is_torn_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, ALONE)
    monkeypatch.setattr(memory_model, "_may_go_ahead", lambda *_: False)
    async with _broken_off(monkeypatch, BATCH_NORM) as engagements:
        hosted = engagements["b"]
        (executor,), (entry,) = hosted.executors.values(), hosted.held()

        def no_memory() -> None:
            raise MemoryError

        monkeypatch.setattr(executor.live.optimizer, "zero_grad", no_memory)
        ((first, error),) = (await hosted.apply_ready(AFTER, None)).items()
        assert first == entry.first
        assert isinstance(error, MemoryError)
        assert hosted.held() == ()
        assert _named(hosted, entry.first, entry.end, BEFORE) is None
        assert await hosted.apply_ready(AFTER, None) == {}
