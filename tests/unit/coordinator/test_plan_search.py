"""A plan is searched for on the fastest device, and nothing depends on which one that is."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable

import pytest

from p2ptrain.coordinator import service
from p2ptrain.coordinator.measured_cluster import MeasuredCluster, MeasuredDevice
from p2ptrain.coordinator.plan_cluster import plan_cluster
from p2ptrain.coordinator.plan_question import PlanQuestion
from p2ptrain.coordinator.service import PlanSearch, fastest
from p2ptrain.errors import NotCoordinator, PeerError, PlanError, ProtocolError
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.kinds import SEARCH_PLAN
from p2ptrain.messages.requesters import Due
from p2ptrain.net import cbor
from p2ptrain.net.message import Message
from p2ptrain.net.parts import limited
from p2ptrain.plan.types.cluster import ClusterLink, Overheads
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process.child_process import ChildProcess, SearchPriority
from tests.support.memory_household import MemoryHousehold
from tests.unit.coordinator.test_memory_model import request

NAMES = ("a", "b", "c")
REQUEST = request(batch_size=32, micro_batch=8)


def measured_alike(slowdown: float) -> dict[str, object]:
    unit = {"parameter_bytes": 4000, "output_bytes": 400, "activation_bytes": 800, "flops": 1000}
    times = {
        str(size): {
            "forward": [0.001 * size * slowdown] * 4,
            "backward": [0.002 * size * slowdown] * 4,
            "weight": [0.001 * size * slowdown] * 4,
        }
        for size in (4, 16)
    }
    overheads = Overheads(1e-4, 1e-9, 1e-10).times_slowdown(slowdown)
    units = [{"name": f"unit{number}", **unit} for number in range(4)]
    return {"units": units, "times": times, "overheads": dataclasses.asdict(overheads)}


def measured_household(ids: dict[str, str], **slowdowns: float) -> MeasuredCluster:
    candidates = [
        MeasuredDevice(
            ids[name],
            name,
            measured_alike(slowdowns.get(name, 1.0)),
            MemoryBudgets(2 << 30),
            1 << 20,
        )
        for name in NAMES
    ]
    links = {
        (one, other): ClusterLink(1e7, 1e-3) for one in NAMES for other in NAMES if one != other
    }
    return MeasuredCluster(candidates, links, "a")


@pytest.fixture
async def mesh() -> AsyncIterator[MemoryHousehold]:
    async with MemoryHousehold(NAMES) as household:
        household.elect("c")  # only a coordinator has others search
        yield household


def routed(mesh: Mesh, act: Callable[[], object] = lambda: None) -> PlanSearch:
    """A search whose device calls `act` before it answers another's question."""
    search = PlanSearch(mesh, Due(mesh))
    route = search.routes[SEARCH_PLAN]

    async def handle(peer: str, message: Message) -> Message | None:
        act()
        return await route.handler(peer, message)

    mesh.route(SEARCH_PLAN, handle, route.parts)
    return search


def ids_of(mesh: MemoryHousehold) -> dict[str, str]:
    return {name: mesh[name].self_id for name in NAMES}


def test_a_question_and_its_plan_travel_unchanged() -> None:
    household = measured_household({"a": "1", "b": "2", "c": "3"}, b=3.0)
    asked = PlanQuestion.from_bytes(PlanQuestion(REQUEST, household).to_bytes())
    assert asked.request == REQUEST
    assert list(asked.household.candidates) == household.candidates
    assert asked.household.links == household.links
    plan = plan_cluster(asked.request, asked.household)
    content = cbor.loads(cbor.dumps(plan.to_json()), 1 << 20)
    assert Plan.from_json(content, batch_size=REQUEST.batch_size) == plan


def test_a_question_about_a_large_household_can_be_read() -> None:
    """24 devices that have measured 200 units each."""
    ids = {f"d{number}": str(number) for number in range(24)}
    (candidate, *_) = measured_household({"a": "1", "b": "2", "c": "3"}).candidates
    measured = candidate.measured
    unit, times = measured["units"][0], measured["times"]
    many = {
        **measured,
        "units": [{**unit, "name": f"unit {number}"} for number in range(200)],
        "times": {
            size: {kind: list(seconds[:1]) * 200 for kind, seconds in kinds.items()}
            for size, kinds in times.items()
        },
    }
    candidates = [
        dataclasses.replace(candidate, id=number, name=name, measured=many)
        for name, number in ids.items()
    ]
    household = MeasuredCluster(candidates, {}, "d0")
    asked = PlanQuestion.from_bytes(PlanQuestion(REQUEST, household).to_bytes())
    assert len(asked.household.candidates) == len(ids)


async def test_who_does_not_coordinate_is_not_searched_for(mesh: MemoryHousehold) -> None:
    """No memory is taken for its question."""
    asked = ids_of(mesh)
    routed(mesh["b"])
    router = mesh["b"].router
    assert router.open_parts(asked["a"], SEARCH_PLAN, {}, [1 << 20]) is None
    assert router.open_parts(asked["c"], SEARCH_PLAN, {}, [1 << 20]) is not None
    with pytest.raises(NotCoordinator):
        await mesh["a"].call(
            asked["b"], Message(SEARCH_PLAN, {}, (memoryview(b"?"),)), timeout_seconds=20.0
        )


def test_the_fastest_is_asked_where_it_is_clearly_faster() -> None:
    ids = {"a": "1", "b": "2", "c": "3"}
    assert fastest(measured_household(ids, a=5.0, c=0.9), here="1") == "3"
    assert fastest(measured_household(ids, c=0.9), here="1") == "1"
    assert fastest(measured_household(ids), here="somebody who is no candidate") != "4"


def test_a_device_of_a_version_without_overheads_is_not_asked() -> None:
    household = measured_household({"a": "1", "b": "2", "c": "3"}, a=5.0)
    old = [
        dataclasses.replace(c, measured={"units": [], "times": {}}) if c.name != "a" else c
        for c in household.candidates
    ]
    assert fastest(dataclasses.replace(household, candidates=old), here="1") == "1"


async def test_the_fastest_searches_and_finds_what_the_coordinator_would(
    mesh: MemoryHousehold,
) -> None:
    asked: list[str] = []
    searches = {
        name: routed(mesh[name], lambda name=name: asked.append(name))  # type: ignore[misc]
        for name in NAMES
    }
    household = measured_household(ids_of(mesh), b=0.2)
    plan = await searches["c"].plan(PlanQuestion(REQUEST, household))
    assert asked == ["b"]
    assert plan == plan_cluster(REQUEST, household)


class Endless:
    """Searches that end when they are given up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(service, "run_in_child", self._search)

    async def _search(self, _work: Callable[[ChildProcess], Plan], _haste: SearchPriority) -> Plan:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        raise AssertionError


@pytest.mark.parametrize("asker_dies", [False, True])
async def test_a_search_ends_with_the_wish_for_it_or_with_whoever_asked(
    mesh: MemoryHousehold, monkeypatch: pytest.MonkeyPatch, *, asker_dies: bool
) -> None:
    searches, endless = {name: routed(mesh[name]) for name in NAMES}, Endless(monkeypatch)
    household = measured_household(ids_of(mesh), b=0.2)
    wanted = asyncio.create_task(
        searches["c"].plan(PlanQuestion(REQUEST, household), SearchPriority.IDLE)
    )
    await endless.begun.wait()
    if asker_dies:
        await mesh.kill("c")
    else:
        wanted.cancel()
    await endless.ended.wait()
    wanted.cancel()
    await asyncio.gather(wanted, return_exceptions=True)


@pytest.mark.parametrize("error", [PeerError("busy"), ProtocolError("what?")])
async def test_who_is_asked_searches_where_the_fastest_does_not(
    mesh: MemoryHousehold, error: PeerError
) -> None:
    def refuse() -> None:
        raise error

    routed(mesh["b"], refuse)
    household = measured_household(ids_of(mesh), b=0.2)
    plan = await routed(mesh["c"]).plan(PlanQuestion(REQUEST, household))
    assert plan == plan_cluster(REQUEST, household)


async def test_an_answer_without_a_plan_is_not_the_end_of_it(mesh: MemoryHousehold) -> None:
    async def answer(_peer: str, _message: Message) -> Message:
        return Message(SEARCH_PLAN)

    mesh["b"].route(SEARCH_PLAN, answer, limited(1 << 20))
    household = measured_household(ids_of(mesh), b=0.2)
    plan = await routed(mesh["c"]).plan(PlanQuestion(REQUEST, household))
    assert plan == plan_cluster(REQUEST, household)


async def test_a_plan_of_strangers_is_not_taken(
    mesh: MemoryHousehold, monkeypatch: pytest.MonkeyPatch
) -> None:
    household = measured_household(ids_of(mesh), b=0.2)
    right = plan_cluster(REQUEST, household)
    stage, *others = right.stages
    stranger = dataclasses.replace(stage.devices[0], name="mallory")
    wrong = dataclasses.replace(
        right,
        stages=(
            dataclasses.replace(stage, devices=(stranger, *stage.devices[1:])),
            *others,
        ),
    )
    answers = iter([wrong, right])
    monkeypatch.setattr(service, "plan_cluster", lambda *_question: next(answers))
    routed(mesh["b"])
    assert await routed(mesh["c"]).plan(PlanQuestion(REQUEST, household)) == right


async def test_that_no_plan_fits_is_the_answer(mesh: MemoryHousehold) -> None:
    routed(mesh["b"])
    household = measured_household(ids_of(mesh), b=0.2)
    small = [dataclasses.replace(c, memory=MemoryBudgets(1000)) for c in household.candidates]
    with pytest.raises(PlanError):
        await routed(mesh["c"]).plan(
            PlanQuestion(REQUEST, dataclasses.replace(household, candidates=small))
        )
    no_question = Message(SEARCH_PLAN, {"haste": 0}, (memoryview(cbor.dumps({"request": b""})),))
    with pytest.raises(PeerError, match="a question for a plan"):
        await mesh["c"].call(mesh["b"].self_id, no_question, timeout_seconds=5.0)
