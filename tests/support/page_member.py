"""A member for the page that does what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from p2ptrain import events
from p2ptrain.api.job_course import CourseAsked, CourseKeeper, JobCourse
from p2ptrain.api.views import (
    CoordinatorStatus,
    CutOffDevice,
    DeviceStatus,
    MemberStatus,
    NodeStatus,
)
from p2ptrain.errors import UserError
from p2ptrain.mesh.trust.pairing_window import PairingWindow
from p2ptrain.plan.round_picture import RoundPicture

PLAN = events.Plan(
    epoch=1,
    reason="start",
    stages=(
        events.PlanStage((0, 2), (events.PlanDevice("laptop", 1),), ("a.weight",)),
        events.PlanStage(
            (2, 5),
            (events.PlanDevice("pi", 5), events.PlanDevice("desk", 3)),
            ("b.weight", "c.weight"),
        ),
    ),
    micro_batch=8,
    micro_batches=4,
    predicted_samples_per_s=120.0,
    left_out=(events.LeftOut("phone", "its link is too slow"),),
    predicted_peak_bytes={"laptop": 1000, "pi": 2000},
    links=(events.PlanLink("laptop", "pi", 1e7, 0.001),),
    alone_samples_per_s={"laptop": 80.0, "phone": 3.5},
)


def member(name: str, state: str = "alive", **more: object) -> MemberStatus:
    """One of the household; its id is its name, repeated."""
    fields = {"threads": 4, "memory_bytes": 8_000_000_000, "version": "0.1.0", **more}
    return MemberStatus(name=name, id=name * 8, state=state, **fields)  # type: ignore[arg-type]


def trusted(name: str) -> DeviceStatus:
    """A device that is paired."""
    return DeviceStatus(name * 8, name, "laptop", True)


def status(
    members: Sequence[MemberStatus] = (), cut_off: Sequence[CutOffDevice] = ()
) -> NodeStatus:
    """Of a laptop's household; with these members, or four."""
    listed = tuple(members) or tuple(map(member, ("laptop", "pi", "desk", "phone")))
    return NodeStatus(
        name="laptop",
        id="laptop" * 8,
        address="127.0.0.1",
        port=47300,
        members=listed,
        coordinator=CoordinatorStatus("pi", "pi" * 8, 3),
        cut_off=tuple(cut_off),
        job=None,
    )


def step(number: int, loss: float = 0.5) -> events.Step:
    """An update, of 100 samples a second."""
    return events.Step(number, loss, 100.0, 0.1, 0.01, (0.01,))


def course(*happened: events.Event, holder: str = "laptop", steps: int | None = 100) -> JobCourse:
    """Of a job in which that has happened, one thing a second."""
    keeper = CourseKeeper("r1", holder, "Net", steps)
    for second, event in enumerate(happened):
        keeper.note(event, float(second))
    return keeper.since(CourseAsked(), float(len(happened)))


class FakePageMember:
    """See the module."""

    def __init__(self) -> None:
        self.now = status()
        self.job: JobCourse | None = None
        self.window: PairingWindow | None = None
        self.happened: asyncio.Queue[events.Event] = asyncio.Queue()
        self.removed: list[str] = []
        self.steered: list[str] = []
        self.picture: RoundPicture | None = None
        self.explained = 0

    def status(self) -> NodeStatus:
        return self.now

    def devices(self) -> Sequence[DeviceStatus]:
        return [trusted("pi"), trusted("tablet")]

    async def events(self) -> AsyncIterator[events.Event]:
        while True:
            yield await self.happened.get()

    async def course(self) -> JobCourse | None:
        return self.job

    def invite(self) -> str:
        self.window = PairingWindow.opened("31415926", asyncio.get_running_loop().time())
        return self.window.code

    async def remove(self, name: str) -> None:
        if name == "ghost":
            raise UserError("no paired device is called ghost")
        self.removed.append(name)

    async def rounds(self) -> RoundPicture | None:
        return self.picture

    async def explain(self) -> dict[str, object]:
        self.explained += 1
        return {"facts": {}, "points": [{"about": "change", "text": "without pi: 60% slower"}]}

    async def steer_job(self, run: str, action: str) -> None:
        if self.job is None or self.job.run != run:
            raise UserError("another training runs now, or none: look again")
        self.steered.append(action)
