"""A plan is searched on the fastest device, and nothing depends on which one that is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from functools import partial
from math import inf

import pytest

from p2ptrain.coordinator import service
from p2ptrain.coordinator.measured_cluster import MeasuredCluster, MeasuredDevice
from p2ptrain.coordinator.plan_cluster import plan_cluster
from p2ptrain.coordinator.plan_question import Near, PlanQuestion
from p2ptrain.coordinator.service import CoordinatorService
from p2ptrain.errors import NotInCharge, PeerError, PlanError, ProtocolError
from p2ptrain.holder.planning.planner_client import MOST_LATE, Planner, fastest
from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.kinds import ALIVE, PLAN, PLAN_END
from p2ptrain.messages.requesters import Due
from p2ptrain.net import cbor
from p2ptrain.net.fields import limited
from p2ptrain.net.message import Message
from p2ptrain.plan.replan.replica_holders import Replicas
from p2ptrain.plan.types.cluster import ClusterLink, Overheads
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process.child_process import ChildProcess, SearchPriority
from p2ptrain.recovery.work_signs import PLANS, SignLimits, WorkSign
from tests.support.memory_household import MemoryHousehold, memory_id
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
    return {"units": units, "times": times, "overheads": asdict(overheads)}


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
    return MeasuredCluster(tuple(candidates), links, "a")


@pytest.fixture
async def mesh() -> AsyncIterator[MemoryHousehold]:
    async with MemoryHousehold(NAMES) as household:
        household.elect("c")
        yield household


def routed(mesh: Mesh, act: Callable[[], object] = lambda: None) -> None:
    """A device that works for a job of c, and calls `act` before it answers a question."""
    due = Due(mesh, holder=lambda: memory_id("c"))
    route = CoordinatorService(mesh, due).routes[PLAN]

    async def handle(peer: str, message: Message) -> Message | None:
        act()
        return await route.handler(peer, message)

    mesh.route(PLAN, handle, route.parts)


QUICK = SignLimits(0.01, silent_seconds=0.1, flowing_seconds=0.1, still_seconds=0.1)


class Asker(Planner):
    """Remembers whom it passes over."""

    def __init__(
        self, mesh: Mesh, limits: SignLimits = PLANS, head_start_seconds: float = 60.0
    ) -> None:
        self.passed: list[tuple[str, str]] = []
        note = lambda *why: self.passed.append(why)  # noqa: E731
        super().__init__(mesh, note, limits, head_start_seconds)


def ids_of(mesh: MemoryHousehold) -> dict[str, str]:
    return {name: mesh[name].self_id for name in NAMES}


def test_a_question_and_its_plan_travel_unchanged() -> None:
    household = measured_household({"a": "1", "b": "2", "c": "3"}, b=3.0)
    asked = PlanQuestion.from_bytes(PlanQuestion(REQUEST, household).to_bytes())
    assert asked.request == REQUEST
    assert asked.household == household
    plan = plan_cluster(asked.request, asked.household)
    content = cbor.loads(cbor.dumps(plan.to_json()), 1 << 20)
    assert Plan.from_json(content, batch_size=REQUEST.batch_size) == plan
    near = Near(plan, Replicas((("a", "b"),) * 4), ReplanMethod.LIGHT)
    about_a_change = PlanQuestion(REQUEST, household, near)
    assert PlanQuestion.from_bytes(about_a_change.to_bytes()) == about_a_change


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
        replace(candidate, id=number, name=name, measured=many) for name, number in ids.items()
    ]
    household = MeasuredCluster(tuple(candidates), {}, "d0")
    asked = PlanQuestion.from_bytes(PlanQuestion(REQUEST, household).to_bytes())
    assert len(asked.household.candidates) == len(ids)


async def test_who_does_not_coordinate_is_not_searched_for(mesh: MemoryHousehold) -> None:
    """No memory is taken for its question."""
    asked = ids_of(mesh)
    routed(mesh["b"])
    router = mesh["b"].router
    assert router.open_parts(asked["a"], PLAN, {}, [1 << 20]) is None
    assert router.open_parts(asked["c"], PLAN, {}, [1 << 20]) is not None
    with pytest.raises(NotInCharge):
        await mesh["a"].call(
            asked["b"], Message(PLAN, {}, (memoryview(b"?"),)), timeout_seconds=20.0
        )


def test_the_fastest_is_asked_where_it_is_clearly_faster() -> None:
    ids = {"a": "1", "b": "2", "c": "3"}
    assert fastest(measured_household(ids, a=5.0, c=0.9), here="1") == "3"
    assert fastest(measured_household(ids, c=0.9), here="1") == "1"
    assert fastest(measured_household(ids), here="somebody who is no candidate") != "4"


def test_a_device_of_a_version_without_overheads_is_not_asked() -> None:
    household = measured_household({"a": "1", "b": "2", "c": "3"}, a=5.0)
    old = [
        replace(c, measured={"units": [], "times": {}}) if c.name != "a" else c
        for c in household.candidates
    ]
    assert fastest(replace(household, candidates=old), here="1") == "1"


async def test_the_fastest_searches_and_finds_what_others_would(mesh: MemoryHousehold) -> None:
    asked: list[str] = []
    for name in NAMES:
        routed(mesh[name], partial(asked.append, name))
    household = measured_household(ids_of(mesh), b=0.2)
    found = await Asker(mesh["c"]).plan(PlanQuestion(REQUEST, household))
    assert asked == ["b"]
    assert found == (plan_cluster(REQUEST, household), mesh["b"].self_id)


async def test_the_coordinator_is_asked_where_none_is_clearly_faster(mesh: MemoryHousehold) -> None:
    routed(mesh["c"])
    household = measured_household(ids_of(mesh))
    plan, device = await Asker(mesh["a"]).plan(PlanQuestion(REQUEST, household))
    assert device == mesh["c"].self_id
    assert plan == plan_cluster(REQUEST, household)


class Endless:
    """Searches that end when they are given up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.ended = asyncio.Semaphore(0), asyncio.Semaphore(0)
        monkeypatch.setattr(service, "run_in_child", self._search)

    async def _search(self, _work: Callable[[ChildProcess], Plan], _haste: SearchPriority) -> Plan:
        self.begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.release()
        raise AssertionError


@pytest.mark.parametrize("asker_dies", [False, True])
async def test_a_search_ends_with_the_wish_for_it_or_with_its_asker(
    mesh: MemoryHousehold, monkeypatch: pytest.MonkeyPatch, *, asker_dies: bool
) -> None:
    endless = Endless(monkeypatch)
    routed(mesh["b"])
    household = measured_household(ids_of(mesh), b=0.2)
    planner = Asker(mesh["c"])
    wanted = asyncio.create_task(
        planner.search(PlanQuestion(REQUEST, household), SearchPriority.IDLE)
    )
    await endless.begun.acquire()
    if asker_dies:
        await mesh.kill("c")
    else:
        wanted.cancel()
    await endless.ended.acquire()
    wanted.cancel()
    await asyncio.gather(wanted, return_exceptions=True)


async def test_a_late_word_that_ends_a_search_does_not_end_the_next_one(
    mesh: MemoryHousehold, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = Endless(monkeypatch)
    routed(mesh["c"])
    question = PlanQuestion(REQUEST, measured_household(ids_of(mesh)))

    def ask(number: int) -> asyncio.Task[Message]:
        wish = service.PlanWish(number, SearchPriority.IDLE).fields()
        message = Message(PLAN, wish, (memoryview(question.to_bytes()),))
        asked = mesh["a"].call(mesh["c"].self_id, message, timeout_seconds=20.0)
        return asyncio.create_task(asked)

    async def end(number: int) -> None:
        wish = service.PlanWish(number, SearchPriority.IDLE)
        await mesh["a"].send(mesh["c"].self_id, Message(PLAN_END, wish.fields()))

    first = ask(1)
    await endless.begun.acquire()
    await end(1)
    with pytest.raises(PeerError, match="given up"):
        await first
    second = ask(2)
    await endless.begun.acquire()
    await end(1)
    assert not second.done()
    await end(2)
    with pytest.raises(PeerError, match="given up"):
        await second


async def test_a_question_that_is_given_up_before_it_is_read_is_not_searched_for(
    mesh: MemoryHousehold, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[PlanQuestion] = []

    async def search(question: PlanQuestion, _haste: SearchPriority) -> Plan:
        searched.append(question)
        return plan_cluster(question.request, question.household)

    monkeypatch.setattr(service, "search", search)
    coordinator = CoordinatorService(mesh["c"], Due(mesh["c"]))
    household, b = measured_household(ids_of(mesh)), memory_id("b")

    def message(number: int, kind: str, *parts: memoryview) -> Message:
        return Message(kind, service.PlanWish(number, SearchPriority.IDLE).fields(), parts)

    question = memoryview(PlanQuestion(REQUEST, household).to_bytes())
    handler = coordinator.routes[PLAN].handler
    for arrives_first in (True, False):  # it waits behind another question; it is being read
        number = 7 + arrives_first
        asked = asyncio.create_task(handler(b, message(number, PLAN, question)))
        if not arrives_first:
            await asyncio.sleep(0)
        mesh["c"].router.put(b, message(number, PLAN_END))
        with pytest.raises(PeerError, match="given up"):
            await asked
    assert not searched
    await handler(b, message(9, PLAN, question))
    assert len(searched) == 1


async def test_the_question_of_a_later_attempt_ends_that_of_the_one_before(
    mesh: MemoryHousehold, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = Endless(monkeypatch)
    routed(mesh["b"])
    question = PlanQuestion(REQUEST, measured_household(ids_of(mesh), b=0.2))
    planner = Asker(mesh["c"])
    first = asyncio.create_task(planner.plan(question))
    await endless.begun.acquire()
    second = asyncio.create_task(planner.plan(question))
    with pytest.raises(asyncio.CancelledError):
        await first
    await endless.begun.acquire()
    assert not second.done()
    assert planner.passed == []
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)


@pytest.mark.parametrize(
    ("error", "passed"),
    [(NotInCharge("no"), False), (PeerError("busy"), True), (ProtocolError("what?"), True)],
)
async def test_it_is_searched_here_where_the_fastest_does_not(
    mesh: MemoryHousehold, error: PeerError, *, passed: bool
) -> None:
    def refuse() -> None:
        raise error

    routed(mesh["b"], refuse)
    household = measured_household(ids_of(mesh), b=0.2)
    planner = Asker(mesh["c"])
    for _ in range(2):  # one that was passed over is not asked again
        plan, device = await planner.plan(PlanQuestion(REQUEST, household))
        assert device == mesh["c"].self_id
        assert plan == plan_cluster(REQUEST, household)
    assert [who for who, _ in planner.passed] == [mesh["b"].self_id] * passed


async def test_a_link_that_ended_says_nothing_against_a_device(mesh: MemoryHousehold) -> None:
    routed(mesh["c"], lambda: mesh.cut(mesh["a"], mesh["c"], "pulled"))
    planner = Asker(mesh["a"])
    question = PlanQuestion(REQUEST, measured_household(ids_of(mesh)))
    _, device = await planner.plan(question)
    assert (device, planner.passed) == (mesh["a"].self_id, [])


async def test_a_holder_without_a_coordinator_plans_itself(mesh: MemoryHousehold) -> None:
    planner = Asker(mesh["c"])
    question = PlanQuestion(REQUEST, measured_household(ids_of(mesh)))
    _, device = await planner.plan(question)
    assert (device, planner.passed) == (mesh["c"].self_id, [])


def never(mesh: Mesh, *, works: bool) -> None:
    """A device that answers no question; it says that it works, or nothing."""

    unwanted = asyncio.Event()

    async def wait(_peer: str, _message: Message) -> Message:
        await unwanted.wait()
        unwanted.clear()
        raise PeerError("given up")

    async def alive(_peer: str, _message: Message) -> Message:
        return Message(ALIVE, WorkSign(0, 0, works=True).fields())

    mesh.route(PLAN, wait, limited(1 << 20))
    mesh.route_now(PLAN_END, lambda *_: unwanted.set())
    if works:
        mesh.route(ALIVE, alive)


@pytest.mark.parametrize("trains", [False, True])
async def test_silence_is_passed_over_and_planned_here(
    mesh: MemoryHousehold, *, trains: bool
) -> None:
    never(mesh["c"], works=False)
    planner = Asker(mesh["a"], QUICK)
    question = PlanQuestion(REQUEST, measured_household(ids_of(mesh)))
    if trains:
        await planner.search(question, SearchPriority.PROMPT)
    else:
        assert (await planner.plan(question))[1] == mesh["a"].self_id
    ((device, why),) = planner.passed
    assert device == mesh["c"].self_id
    assert "has not answered for" in why


async def test_one_that_works_and_is_always_late_keeps_no_job_waiting_and_is_passed_over(
    mesh: MemoryHousehold,
) -> None:
    never(mesh["c"], works=True)
    planner = Asker(mesh["a"], head_start_seconds=0.0)
    question = PlanQuestion(REQUEST, measured_household(ids_of(mesh)))
    for number in range(1, MOST_LATE + 1):
        assert (await planner.plan(question))[1] == mesh["a"].self_id
        assert bool(planner.passed) == (number == MOST_LATE)


async def test_only_late_answers_in_a_row_count(mesh: MemoryHousehold) -> None:
    household = measured_household(ids_of(mesh))
    planner = Asker(mesh["a"], head_start_seconds=0.0)
    for late in (*([True] * (MOST_LATE - 1)), False, True):
        if late:
            never(mesh["c"], works=True)
            question = PlanQuestion(REQUEST, household)
            await planner.plan(question)
        else:
            routed(mesh["c"])
            await planner.search(PlanQuestion(REQUEST, household), SearchPriority.ALONE)
    assert planner.passed == []


async def test_while_the_job_trains_a_device_that_works_is_waited_for(
    mesh: MemoryHousehold, monkeypatch: pytest.MonkeyPatch
) -> None:
    never(mesh["c"], works=True)
    endless = Endless(monkeypatch)
    question = PlanQuestion(REQUEST, measured_household(ids_of(mesh)))
    planner = Asker(mesh["a"], replace(QUICK, fruitless_seconds=inf), head_start_seconds=0.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await planner.search(question, SearchPriority.IDLE)
    assert endless.begun.locked()


async def test_an_answer_without_a_plan_is_not_the_end_of_it(mesh: MemoryHousehold) -> None:
    async def answer(_peer: str, _message: Message) -> Message:
        return Message(PLAN)

    mesh["b"].route(PLAN, answer, limited(1 << 20))
    household = measured_household(ids_of(mesh), b=0.2)
    planner = Asker(mesh["c"])
    plan, _ = await planner.plan(PlanQuestion(REQUEST, household))
    assert plan == plan_cluster(REQUEST, household)
    assert [who for who, _ in planner.passed] == [mesh["b"].self_id]


async def test_a_plan_of_strangers_is_not_taken(
    mesh: MemoryHousehold, monkeypatch: pytest.MonkeyPatch
) -> None:
    household = measured_household(ids_of(mesh), b=0.2)
    right = plan_cluster(REQUEST, household)
    stage, *others = right.stages
    stranger = replace(stage.devices[0], name="mallory")
    wrong = replace(right, stages=(replace(stage, devices=(stranger, *stage.devices[1:])), *others))
    answers = iter([wrong, right])
    monkeypatch.setattr(service, "plan_cluster", lambda *_question: next(answers))
    routed(mesh["b"])
    question = PlanQuestion(REQUEST, household)
    assert await Asker(mesh["c"]).plan(question) == (right, mesh["c"].self_id)


async def test_that_no_plan_fits_is_the_answer(mesh: MemoryHousehold) -> None:
    routed(mesh["b"])
    household = measured_household(ids_of(mesh), b=0.2)
    small = [replace(c, memory=MemoryBudgets(1000)) for c in household.candidates]
    planner = Asker(mesh["c"])
    with pytest.raises(PlanError):
        await planner.plan(PlanQuestion(REQUEST, replace(household, candidates=small)))
    assert planner.passed == []
    wish = service.PlanWish(1, SearchPriority.ALONE).fields()
    no_question = Message(PLAN, wish, (memoryview(cbor.dumps({"request": b""})),))
    with pytest.raises(PeerError, match="PlanQuestion"):
        await mesh["c"].call(mesh["b"].self_id, no_question, timeout_seconds=5.0)


async def test_no_plan_where_there_is_one_is_passed_over(mesh: MemoryHousehold) -> None:
    def refuse() -> None:
        raise PlanError("nothing fits")

    routed(mesh["c"], refuse)
    planner = Asker(mesh["a"])
    await planner.plan(PlanQuestion(REQUEST, measured_household(ids_of(mesh))))
    ((_, why),) = planner.passed
    assert why.startswith("found no plan, though there is one")
