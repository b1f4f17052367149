"""Several devices that train, in one process and loop, joined by a memory mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from p2ptrain.mesh.interface import LinkSpeed
from p2ptrain.mesh.memory import MemoryHousehold
from p2ptrain.observe.events import Event, PlanEvent, Step
from p2ptrain.training.holder import HolderRun
from p2ptrain.training.job import Job
from p2ptrain.training.member import TrainingMember
from p2ptrain.training.options import TrainOptions
from p2ptrain.training.profiling import ProfileCache

FAST = LinkSpeed(bytes_per_s=1e9, latency_s=1e-5)


@dataclass
class Devices:
    """The household and what its holder, the first device, told."""

    names: Sequence[str]
    mesh: MemoryHousehold
    members: dict[str, TrainingMember]
    events: list[Event] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """Of all steps, in order."""
        return [event.loss for event in self.events if isinstance(event, Step)]

    @property
    def plan(self) -> PlanEvent:
        """The newest plan."""
        return [event for event in self.events if isinstance(event, PlanEvent)][-1]

    def holder_run(
        self,
        job: Job,
        options: TrainOptions | None = None,
        listener: Callable[[Event], None] | None = None,
    ) -> HolderRun:
        """A run of `job` on the first device."""
        name = self.names[0]
        options = options or TrainOptions(wait_for=len(self.names), planner="pp")
        service = self.members[name].service
        return HolderRun(self.mesh[name], service, job, options, listener or self.events.append)

    async def until_idle(self, name: str) -> None:
        """Wait until a device works for no job; the test's time limit is the deadline."""
        await self.members[name].service.idle.wait()


@asynccontextmanager
async def devices(
    count: int, memory_bytes: int | None = 1 << 30, profiles: ProfileCache | None = None
) -> AsyncIterator[Devices]:
    """`count` devices called a, b, c, ...; `profiles` are what was measured before."""
    names = [chr(ord("a") + index) for index in range(count)]
    async with MemoryHousehold(names, link_speed=FAST) as mesh:
        members = {}
        profiles = profiles or ProfileCache(None)  # one machine: measured once for all
        for name in names:
            member = TrainingMember(mesh[name], profiles=profiles, memory_bytes=memory_bytes)
            members[name] = member
            for kind, route in member.routes.items():
                mesh[name].route(kind, route.handler, route.parts)
        try:
            yield Devices(names, mesh, members)
        finally:
            for member in members.values():
                await member.close()
