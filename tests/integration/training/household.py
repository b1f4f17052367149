"""Several devices that train, in one process and loop, joined by a memory mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from p2ptrain import events
from p2ptrain.api.device_services import DeviceServices
from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.events import Event, Plan, Step, Waiting
from p2ptrain.holder.rounds.generation import HolderGeneration
from p2ptrain.holder.rounds.pause import JobPause
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import LinkSpeed
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.process.box import Box
from p2ptrain.profiling.profile_cache import Measuring, ProfileCache
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from tests.support.memory_household import MemoryHousehold

FAST = LinkSpeed(bytes_per_s=1e9, latency_s=1e-5)

NO_FIRST_WEIGHTS = RecoverySettings(first_weights_replay_seconds=0.0)
"""The first weights are no way back."""

OFTEN_COPIED = replace(NO_FIRST_WEIGHTS, snapshot_cost_share=1e6, first_snapshot_rounds=1)
"""The same, and there are copies every few steps, whatever they cost a busy machine."""

_AT_ONCE = Measuring(0.0, 0.0, 0.0, 0.0)
"""A pass of each size: no plan of these tests hangs on how well it knows this machine."""
_PROFILES = ProfileCache(None, _AT_ONCE)
"""One machine: a model is measured once for all households of this process."""


@dataclass(frozen=True)
class LocalJob:
    """A job of one device, to be trained once."""

    member: DeviceServices
    job: Job
    options: TrainOptions
    emit: Callable[[Event], None]
    folder: StateFolder | None = None
    settings: RecoverySettings = HOME
    pause: JobPause = field(default_factory=JobPause)

    async def run(self) -> None:
        """Train it."""
        how = self.options, self.emit, self.folder, self.settings, self.pause
        await self.member.train(self.job, *how)


@dataclass
class Devices:
    """The household and what its holder, the first device, reported.

    Attributes:
        profiles: by which devices without a box measure models.
        boxes: where devices measure models of others, by name; others do in this process.
        settings: of the recovery rules of the jobs that begin from now on.
        compute: what devices compute on, by name; the others do on the processor.
        waiting: what the other devices reported: (who, for whom).
        warned: what they showed to their person: (who, message).
    """

    names: Sequence[str]
    mesh: MemoryHousehold
    memory_bytes: int | None
    boxes: Mapping[str, Box] = field(default_factory=dict)
    profiles: ProfileCache = _PROFILES
    settings: RecoverySettings = HOME
    compute: Mapping[str, ComputeDevice] = field(default_factory=dict)
    members: dict[str, DeviceServices] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    waiting: list[tuple[str, str]] = field(default_factory=list)
    warned: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._said = asyncio.Event()
        for name in self.names:
            self.start(name)

    def start(self, name: str, jobs: StateFolder | None = None) -> None:
        """The device's process begins, empty.

        Args:
            jobs: where it finds what was written down of its own jobs.
        """

        def emit(event: Event) -> None:
            if isinstance(event, events.Warning):
                self.warned.append((name, event.message))
                return
            assert isinstance(event, Waiting)
            self.waiting.append((name, event.waiting_for))
            self._said.set()

        mesh, box = self.mesh[name], self.boxes.get(name)
        member = DeviceServices(
            mesh,
            profiles=self.profiles if box is None else ProfileCache(None, _AT_ONCE),
            jobs=jobs,
            memory_bytes=self.memory_bytes,
            emit=emit,
            box=box,
            device=self.compute.get(name, HOST),
        )
        self.members[name] = member
        for kind, route in member.routes.items():
            mesh.route(kind, route.handler, route.parts)

    async def restart(self, name: str, jobs: StateFolder | None = None) -> None:
        """A device that was killed comes back, as a new process of the same device."""
        await self.members[name].close()
        await self.mesh.join(name)
        self.start(name, jobs)

    @property
    def losses(self) -> list[float]:
        """Of all steps, in order."""
        return [event.loss for event in self.events if isinstance(event, Step)]

    @property
    def plan(self) -> Plan:
        """The newest plan."""
        return [event for event in self.events if isinstance(event, Plan)][-1]

    def holder_run(
        self,
        job: Job,
        options: TrainOptions | None = None,
        listener: Callable[[Event], None] | None = None,
        folder: StateFolder | None = None,
    ) -> LocalJob:
        """A run of `job` on the first device."""
        name = self.names[0]
        options = options or TrainOptions(wait_for=len(self.names), planner="pp")
        listen = listener or self.events.append
        return LocalJob(self.members[name], job, options, listen, folder, self.settings)

    async def until_waiting(self, *names: str) -> None:
        """Wait until these devices have said that they wait for somebody."""
        while not {who for who, _ in self.waiting}.issuperset(names):
            self._said.clear()
            await self._said.wait()

    async def until_idle(self, name: str) -> None:
        """Wait until a device works for no job; the test's time limit is the deadline."""
        await self.members[name].service.slot.idle.wait()


def hold_rounds(monkeypatch: pytest.MonkeyPatch, step: int, until: Callable[[], bool]) -> None:
    """The job does not end before something has happened, however fast it trains.

    From this step on no round is ordered before `until` says so, or a change of plan needs one.
    """
    order = HolderGeneration.order

    async def held(generation: HolderGeneration, asked: RoundOrder) -> None:
        # `until` is a question that nobody tells of
        while asked.round.step >= step and not (until() or generation.draining.is_set()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await order(generation, asked)

    monkeypatch.setattr(HolderGeneration, "order", held)


@asynccontextmanager
async def devices(
    count: int,
    memory_bytes: int | None = 1 << 30,
    boxes: Mapping[str, Box] | None = None,
    profiles: ProfileCache = _PROFILES,
    settings: RecoverySettings = HOME,
    compute: Mapping[str, ComputeDevice] | None = None,
) -> AsyncIterator[Devices]:
    """`count` devices called a, b, c, ..."""
    names = [chr(ord("a") + index) for index in range(count)]
    async with MemoryHousehold(names, link_speed=FAST) as mesh:
        ways = (boxes or {}, profiles, settings, compute or {})
        household = Devices(names, mesh, memory_bytes, *ways)
        try:
            yield household
        finally:
            for member in household.members.values():
                await member.close()
