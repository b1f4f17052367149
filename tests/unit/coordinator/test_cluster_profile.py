"""What a coordinator asks its household before a plan."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.coordinator.measured_cluster import MeasuredDevice
from p2ptrain.errors import InternalError, UserError
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.messages.kinds import MEASURE_LINKS, MEASURE_PROFILE, MEASURED
from p2ptrain.messages.plan_request import JobPlanRequest, SharingLimits
from p2ptrain.net import cbor
from p2ptrain.net.message import Message
from p2ptrain.plan.types.plan import LeftOut
from tests.support.memory_household import MemoryHousehold
from tests.unit.coordinator.test_memory_model import request

REQUEST = cast(
    JobPlanRequest,
    SimpleNamespace(
        batch_size=64,
        micro_batch=0,
        min_micro_batch=1,
        may_divide=True,
        asynchrony=None,
        ftpipehd=None,
        job="job",
        digest="model",
    ),
)


async def test_who_has_measured_keeps_the_others_company_until_all_have() -> None:
    """The first to answer hears that all have measured only after the last one's answer."""
    async with MemoryHousehold(["a", "b"]) as mesh:
        told: list[str] = []
        asked: dict[str, Any] = {}
        all_told = asyncio.Event()
        first_answered = asyncio.Event()

        def serve(name: str, *, waits: bool) -> None:
            async def measure(_peer: str, message: Message) -> Message:
                asked[name] = message.fields
                if waits:
                    await first_answered.wait()
                    told.append("measured by b")
                first_answered.set()
                content = {"measured": {}, "memory": {"compute_bytes": 1}, "taken_bytes": 0}
                return Message(MEASURE_PROFILE, {}, (memoryview(cbor.dumps(content)),))

            async def measured(_peer: str, _message: Message) -> None:
                told.append(name)
                if len(told) == 3:
                    all_told.set()

            mesh[name].route(MEASURE_PROFILE, measure)
            mesh[name].route(MEASURED, measured)

        serve("a", waits=False)
        serve("b", waits=True)
        names = {mesh[name].self_id: name for name in "ab"}
        found = await ClusterProfiler(mesh["a"]).profile(REQUEST, mesh["a"].self_id, names, 2)
        await all_told.wait()
        assert told[0] == "measured by b"
        assert sorted(told[1:]) == ["a", "b"]
        assert all(isinstance(answer, MeasuredDevice) for answer in found.values())
        assert [fields["company"] for fields in asked.values()] == [True, True]


async def test_what_a_device_answers_does_not_end_a_survey() -> None:
    """It names the error itself, also one that is for people."""
    async with MemoryHousehold(["a", "b", "c"]) as mesh:
        asked: list[str] = []

        def serve(name: str) -> None:
            async def refuse(_peer: str, _message: Message) -> Message:
                asked.append(name)
                raise UserError("stop") if name == "b" else InternalError("see its log")

            mesh[name].route(MEASURE_LINKS, refuse)

        serve("b")
        serve("c")
        ids = [mesh[name].self_id for name in "bc"]
        await ClusterProfiler(mesh["a"]).measure_links(ids)
        assert sorted(set(asked)) == ["b", "c"]


async def asked_of_one(job: JobPlanRequest) -> dict[str, Any]:
    """What the only device of a household is asked to measure."""
    async with MemoryHousehold(["a"]) as mesh:
        asked: list[dict[str, Any]] = []

        async def measure(_peer: str, message: Message) -> Message:
            asked.append(dict(message.fields))
            content = {"measured": {}, "memory": {"compute_bytes": 1}, "taken_bytes": 0}
            return Message(MEASURE_PROFILE, {}, (memoryview(cbor.dumps(content)),))

        mesh["a"].route(MEASURE_PROFILE, measure)
        names = {mesh["a"].self_id: "a"}
        await ClusterProfiler(mesh["a"]).profile(job, mesh["a"].self_id, names, 1)
        (fields,) = asked
        return fields


async def test_the_only_device_is_waited_for() -> None:
    """It may be slow or busy; beside others it would be left out."""
    async with MemoryHousehold(["a", "b"]) as mesh:

        async def measure(_peer: str, _message: Message) -> Message:
            await asyncio.sleep(0.2)
            content = {"measured": {}, "memory": {"compute_bytes": 1}, "taken_bytes": 0}
            return Message(MEASURE_PROFILE, {}, (memoryview(cbor.dumps(content)),))

        profiler = ClusterProfiler(mesh["a"], profile_seconds=0.05)
        for name in "ab":
            mesh[name].route(MEASURE_PROFILE, measure)
        ids = {mesh[name].self_id: name for name in "ab"}
        own = mesh["a"].self_id
        alone = await profiler.profile(REQUEST, own, {own: "a"}, 1)
        assert isinstance(alone[own], MeasuredDevice)
        beside = await profiler.profile(REQUEST, own, ids, 2)
        assert LeftOut("a", "did not answer within 0 s") in beside.values()


async def test_a_device_measured_alone_needs_no_company() -> None:
    assert (await asked_of_one(REQUEST))["company"] is False


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"planner": "auto"}, [2, 6]),
        ({"planner": "pp"}, [4, 6]),
        ({"planner": "single"}, [4, 6]),
        ({"planner": "auto", "alone": True}, [4, 6]),
        ({"planner": "dp", "sharing": SharingLimits(divisible=False)}, [4, 6]),
        ({"planner": "auto", "sharing": SharingLimits(unshared="it changes its state")}, [4, 6]),
        ({"planner": "auto", "asynchrony": AsyncOptions()}, [2, 6]),
    ],
)
async def test_a_quarter_of_a_micro_batch_is_measured_where_a_plan_may_divide_it(
    changes: dict[str, Any], sizes: list[int]
) -> None:
    """16 samples are 6 + 6 + 4."""
    asked = await asked_of_one(replace(request(batch_size=16, micro_batch=6), **changes))
    assert asked["batch_sizes"] == sizes
