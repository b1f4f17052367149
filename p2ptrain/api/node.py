"""p2ptrain inside an app: a Node joins the household, trains, and leaves.

    async with p2ptrain.Node(name="laptop") as node:
        run = await node.train(job)
        async for event in run:
            ...
        model = await run.result()

`p2ptrain.train(job)` does the same for those without an event loop, notebooks included.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from p2ptrain import torch_version
from p2ptrain._version import __version__
from p2ptrain.aio.tasks import TaskOwner, run_in_background
from p2ptrain.api.event_stream import EventStream, call_watch, check_on_event
from p2ptrain.api.job_course import JobCourse
from p2ptrain.api.job_desk import Action, JobDesk, explained_last
from p2ptrain.api.loading import forked_box, import_training, started_box
from p2ptrain.api.manners_keeper import KeeperSettings, MannersKeeper
from p2ptrain.api.run import Run, asked_options, start_run
from p2ptrain.api.views import (
    CoordinatorStatus,
    CutOffDevice,
    DeviceStatus,
    JobStatus,
    LinkStatus,
    MemberStatus,
    NodeStatus,
)
from p2ptrain.control.borrow import own_lease
from p2ptrain.control.lease import LeasedIdentity
from p2ptrain.devices.request import AUTO, read_request
from p2ptrain.errors import Error, OptionError
from p2ptrain.events import Event
from p2ptrain.job.last_job import JOB_FOLDER
from p2ptrain.job.train_options import MAX_THREADS, whole
from p2ptrain.manners.readings import DeviceReader, ReadDevice, idle_seconds_reader
from p2ptrain.manners.settings import Manners
from p2ptrain.mesh.config import MeshConfig
from p2ptrain.mesh.identity.state_folder import StateFolder, default_state_dir
from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.network_mesh import NetworkMesh
from p2ptrain.net.fields import checked_name
from p2ptrain.plan.round_picture import RoundPicture
from p2ptrain.process.box import Box
from p2ptrain.process.energy import EnergyMeter
from p2ptrain.process.host_process import keep_freed_memory, leave_alone
from p2ptrain.process.memory_budget import usable_memory_bytes

if TYPE_CHECKING:
    from p2ptrain.api.device_services import DeviceServices
    from p2ptrain.devices.selection import ChosenDevice
    from p2ptrain.job.job import Job
    from p2ptrain.job.train_options import TrainOptions
    from p2ptrain.mesh.interface import MeshMember
    from p2ptrain.mesh.trust.pairing_window import PairingWindow


LEAVE_SECONDS = 30.0
"""Longest wait until the others have taken over what this device did for them."""

LINK_SECONDS = 3.0
"""For the measuring of one link: several may be slow, and a user waits."""

MOST_TITLE_CHARACTERS = 100

_OUTSIDE = "this node has not joined: use it with  async with p2ptrain.Node() as node"


class Node:
    """This device as a member of its household. An async context manager.

    Args:
        name: shown to users; the host's name by default, NAME-2 if another member has it.
        code: the household's eight-digit pairing code, needed once.
        window: a pairing window to go on with (`Node.window` of who had this device's place).
        peers: "host" or "host:port" of members, for networks that block multicast.
        interfaces: names or addresses to use; all usable ones by default.
        port: to listen on; any free one by default.
        state_dir: folder of this device's identity and trusted devices.
        memory_bytes: what p2ptrain may use of this device's memory, and as much of a card's own;
            by default what is available.
        threads: torch's threads.
        device: what to compute on, as on the command line (`p2ptrain.devices.request`). "auto"
            takes an accelerator that computes right and faster than the processor.
        only_for: names of the devices for whose jobs alone this one computes; all by default. A
            name means the device that bears it when it first asks.
        role: "member", or "holder" for one that trains its own data.
        has_place: whether the caller has locked the state folder, as `p2ptrain join` does. Else the
            node does while it is in the household; a `join` that runs there steps aside.
        manners: how this device looks after the person who uses it (`p2ptrain.Manners`).
        read_device: what measures this device's load, battery and heat; its sensors by default.
        changes_process: whether settings of this whole process may change, which makes training
            faster (`p2ptrain.process.host_process`); False refuses it for good.
        on_event: called with every event, on the event loop; must not block. What it raises ends
            a run where the event is the run's, and is else for the loop's exception handler.
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        code: str | None = None,
        window: PairingWindow | None = None,
        peers: Sequence[str] = (),
        interfaces: Sequence[str] = (),
        port: int | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        memory_bytes: int | None = None,
        threads: int | None = None,
        device: str = AUTO,
        only_for: Sequence[str] = (),
        role: str = "member",
        on_event: Callable[[Event], None] | None = None,
        has_place: bool = False,
        manners: Manners | None = None,
        read_device: ReadDevice | None = None,
        keeper_settings: KeeperSettings | None = None,
        changes_process: bool = True,
    ) -> None:
        check_limits(threads, memory_bytes)
        if not isinstance(manners, Manners | None):
            raise OptionError(f"manners must be p2ptrain.Manners(...), not {manners!r}")
        if not isinstance(name, str | None):
            raise OptionError(f"name must be a text, not {name!r}")
        port = whole("port", port)
        if port is not None and not 0 <= port < 65536:
            raise OptionError(f"port must be one from 0 to 65535, not {port}")
        check_on_event(on_event)
        if not changes_process:
            leave_alone()
        self._events = EventStream()
        self._on_event = on_event
        self._memory_bytes = memory_bytes
        self._threads = threads
        self._request = read_request(device)
        self._chosen: ChosenDevice | None = None
        self._only_for = tuple(map(checked_name, _listed(only_for)))
        self._config = MeshConfig(
            state_dir=state_folder(state_dir),
            name=name,
            code=code,
            window=window,
            peers=_listed(peers),
            interfaces=_listed(interfaces),
            port=port,
            info={
                "role": role,
                "version": __version__,
                "threads": threads or os.cpu_count() or 1,
                "memory_bytes": memory_bytes or usable_memory_bytes(),
                "energy": EnergyMeter().read().words,
                "system": f"{platform.system()} {platform.machine()}".strip(),
            },
        )
        self._mesh = NetworkMesh(self._config, self._notify)
        self._has_place = has_place
        self._manners = manners or Manners()
        self._read_device = read_device or _sensors(self._manners)
        self._keeper_settings = keeper_settings
        self._tasks = TaskOwner()
        self._place = contextlib.AsyncExitStack()
        self._own: LeasedIdentity | None = None
        self._has_begun = False
        self._member: DeviceServices | None = None
        self._known_desk: JobDesk | None = None
        self._run: Run | None = None
        self._own_box: Box | None = None

    async def __aenter__(self) -> Self:
        """Load torch, then join: listen and be advertised.

        In this order, because loading torch's libraries stops every thread of this process, on a
        small device for seconds, and a member that is silent for seconds is taken for dead.

        Raises:
            OptionError: this node was in the household before: it takes another one.
            UserError: another process has the state folder, and does not step aside.
            DeviceUnusable: the accelerator that was asked for is not here, or cannot compute.
        """
        if self._has_begun:
            raise OptionError("a node can join only once: make a new p2ptrain.Node")
        self._has_begun = True
        torch_version.check()
        keep_freed_memory()
        await run_in_background(import_training)
        await self._choose_device()
        try:
            await self._take_place()
            await self._mesh.__aenter__()
        except BaseException:
            await self._place.aclose()
            raise
        try:
            self._known_desk = JobDesk(self._mesh, StateFolder(self._config.state_dir))
            self._member = self._make_member()
            self._tasks.spawn(self._keep_manners(self._member), "keep the manners")
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave: any run of this node is cancelled, the members are notified."""
        try:
            await self.leave()
        finally:
            try:
                await self._mesh.__aexit__(error_type, error, trace)
            finally:
                if self._own is not None:
                    self._own.window = self.window
                await self._place.aclose()
                if self._own_box is not None:  # last: no one asks any more
                    await run_in_background(self._own_box.close)

    async def _choose_device(self) -> None:
        """Before it joins, as this takes seconds; what it is others see in `status`."""
        from p2ptrain.api.device_services import CHECKS, choose_device

        folder = self._config.state_dir / CHECKS
        self._chosen = await choose_device(
            self._request, folder, self._notify, threads=self._threads
        )
        device = self._chosen.device
        if not device.is_host:
            info = {**self._config.info, "device": device.title[:MOST_TITLE_CHARACTERS]}
            self._config = dataclasses.replace(self._config, info=info)
            self._mesh = NetworkMesh(self._config, self._notify)

    async def _take_place(self) -> None:
        """Have the state folder for this node alone; what is in it may be newer than we know."""
        if self._has_place:
            return
        command = "train" if self._config.info["role"] == "holder" else "app"
        own = await self._place.enter_async_context(own_lease(self._config.state_dir, command))
        if own.name is not None:
            self._config = dataclasses.replace(
                self._config,
                name=self._config.name or own.name,
                port=own.port if self._config.port is None else self._config.port,
                window=own.window,
            )
        self._mesh = NetworkMesh(self._config, self._notify)
        self._own = own

    async def leave(self, within_seconds: float = LEAVE_SECONDS) -> None:
        """Leave the household gracefully; harmless when it has been left.

        A run of this node ends. What this node does for another's run is handed over first, which
        may take some seconds; cancel this to leave at once.

        Args:
            within_seconds: longest wait until the others have taken over.
        """
        try:
            await self._tasks.cancel()
            if self._known_desk is not None:
                await self._known_desk.close()
            if self._run is not None:
                await self._run.cancel()
            if self._member is not None:
                member, self._member = self._member, None
                try:
                    await member.hand_over(within_seconds)
                finally:
                    await member.close()
            await self._mesh.leave()
        finally:
            self._events.close()

    def events(self) -> AsyncIterator[Event]:
        """Every event from now on, until this device leaves; a slow reader misses the oldest."""
        return self._events.subscribe()

    async def train(self, job: Job, options: TrainOptions | None = None, **fields: Any) -> Run:
        """Start to train `job` with the household; one job at a time.

        Args:
            fields: of `TrainOptions`, such as wait_for=3, instead of `options`.

        Raises:
            OptionError: a run of this node is still going on, or these are no job and options.
            TypeError: there is no such option.
        """
        options = asked_options(job, options, fields)
        if options.engine != "own":
            raise OptionError("engine torch trains without a household: p2ptrain.train(job, ...)")
        if self._run is not None and not self._run.done:
            raise OptionError("this node already trains a job: wait for its result or cancel it")
        if self._member is None:
            raise OptionError(_OUTSIDE)
        asked = self._mesh, self._member, job, options, self._emit, self._desk
        self._run = start_run(*asked, self._jobs_folder())
        return self._run

    def status(self) -> NodeStatus:
        """Members, coordinator and the running job, as this device sees them."""
        mesh = self._joined
        planner = mesh.coordinator
        chosen = None
        if planner is not None:
            chosen = CoordinatorStatus(planner.name, planner.id, planner.term)
        return NodeStatus(
            name=mesh.name,
            id=mesh.self_id,
            address=mesh.address,
            port=mesh.port,
            members=tuple(
                MemberStatus.of(m, mesh.path(m.id), mesh.link_statistics(m.id))
                for m in sorted(mesh.members.values(), key=lambda m: (m.name, m.id))
            ),
            coordinator=chosen,
            cut_off=tuple(
                CutOffDevice(device.name, device.id, device.cut_off)
                for device in mesh.household_trust.devices()
                if device.cut_off
            ),
            job=self._job_status(),
        )

    def _job_status(self) -> JobStatus | None:
        waiting_for = self._member.service.slot.waiting_for if self._member is not None else None
        if waiting_for is not None:
            return JobStatus.of({"holder": waiting_for, "waiting_for": waiting_for})
        line = None if self._known_desk is None else self._known_desk.board.line
        return None if line is None else JobStatus.of(line)

    async def course(self) -> JobCourse | None:
        """The course of the job that runs, whichever device holds it, else of the last one known.

        Another device is asked for what is new since the last call.
        """
        return None if self._known_desk is None else await self._known_desk.read()

    async def steer_job(self, run: str, action: Action) -> None:
        """Pause, go on with or stop a training of the household, wherever its data is.

        Args:
            run: as in its `course`.

        Raises:
            UserError, PeerError: that training has ended, or its device does not answer.
        """
        await self._desk.steer(run, action)

    async def links(self) -> list[LinkStatus]:
        """How fast the links to the other members are, measured now, one after the other.

        It never delays training: a link that is busy shows the rate that is left.
        """
        alive = [m for m in self._joined.members.values() if m.state is MemberState.ALIVE]
        others = [m for m in alive if m.id != self._mesh.self_id]
        return [await self._link_to(m) for m in sorted(others, key=lambda m: (m.name, m.id))]

    async def _link_to(self, member: MeshMember) -> LinkStatus:
        path: dict[str, Any] = dict(self._mesh.path(member.id))
        place = LinkStatus(member.name, member.id, **path)
        try:
            async with asyncio.timeout(LINK_SECONDS):
                speed = await self._mesh.measure_link(member.id)
        except (Error, TimeoutError) as error:
            return dataclasses.replace(place, error=str(error) or "it took too long")
        return dataclasses.replace(place, bytes_per_s=speed.bytes_per_s, latency_s=speed.latency_s)

    async def explain(self) -> dict[str, Any]:
        """What limits the job that runs, or that this device's last one was limited by.

        Takes some seconds: rounds are watched, and the planner is asked. The facts, and "points"
        with a "text" each.

        Raises:
            UserError: nothing trains here and nothing has.
            PeerError: the job's holder is out of reach, or has no plan yet.
        """
        if self._known_desk is None:
            return await explained_last(self._config.state_dir)
        return await self._known_desk.explain()

    async def rounds(self) -> RoundPicture | None:
        """What each device did in the last rounds of the job that runs; None without one.

        Empty at first: devices record from the first call on, until none came for half a minute.

        Raises:
            PeerError: the job's holder does not answer, or has an older p2ptrain.
        """
        return None if self._known_desk is None else await self._known_desk.rounds()

    def trains_for(self) -> str | None:
        """Name of the device whose job this one has a part in now; None without one."""
        return self._member.service.slot.holder_name if self._member is not None else None

    @property
    def _desk(self) -> JobDesk:
        """What is known of the household's job. Raises OptionError: it has not joined."""
        if self._known_desk is None:
            raise OptionError(_OUTSIDE)
        return self._known_desk

    @property
    def _joined(self) -> NetworkMesh:
        """The mesh, once it has begun. Raises OptionError."""
        if not self._has_begun:
            raise OptionError(_OUTSIDE)
        return self._mesh

    @property
    def window(self) -> PairingWindow | None:
        """The pairing window, while it is open; also what was left of it when this node left."""
        return self._joined.household_trust.window

    def invite(self) -> str:
        """Open the pairing window again and return its code."""
        return self._joined.household_trust.invite()

    def devices(self) -> list[DeviceStatus]:
        """The devices this one trusts."""
        known = self._joined.household_trust.devices()
        return [DeviceStatus(**dataclasses.asdict(device)) for device in known]

    async def remove(self, name: str) -> None:
        """Revoke a device's trust, everywhere and at once. Raises UserError for unknown names."""
        self._joined.household_trust.remove(name)

    def _emit(self, event: Event) -> None:
        self._events.publish(event)
        if self._on_event is not None:
            call_watch.call(self._on_event, event)

    def _notify(self, event: Event) -> None:
        """As `_emit`, for what does not happen in a run, where no caller waits for a result.

        What the app's own function raises is for the loop's exception handler, as of any callback:
        the mesh would end in the middle of what it was at.
        """
        try:
            self._emit(event)
        except Exception as error:
            message = f"on_event failed at the event {event.event!r}"
            loop = asyncio.get_running_loop()
            loop.call_exception_handler({"message": message, "exception": error})

    async def _keep_manners(self, member: DeviceServices) -> None:
        """Until it is cancelled."""
        assert self._chosen is not None
        is_host = self._chosen.device.is_host
        busy = self._config.info["threads"] if is_host else 1  # an accelerator is fed by one
        keeper = MannersKeeper(
            self._mesh,
            member,
            self._manners,
            self._read_device,
            self._config.info,
            self._notify,
            busy_share=min(float(busy) / (os.cpu_count() or 1), 1.0),
            settings=self._keeper_settings,
        )
        await keeper.run()

    def _jobs_folder(self) -> StateFolder:
        return StateFolder(self._config.state_dir / JOB_FOLDER)

    def _make_member(self) -> DeviceServices:
        from p2ptrain.api.device_services import DeviceServices
        from p2ptrain.profiling import boxed_measure
        from p2ptrain.profiling.profile_cache import ProfileCache

        assert self._chosen is not None
        box = forked_box()
        if box is None:
            box = self._own_box = started_box([boxed_measure.__name__])
        member = DeviceServices(
            self._mesh,
            profiles=ProfileCache(self._config.state_dir / "profiles"),
            jobs=self._jobs_folder(),
            memory_bytes=self._memory_bytes,
            threads=self._threads,
            only_for=self._only_for,
            emit=self._notify,
            box=box,
            device=self._chosen.device,
        )
        for kind, route in member.routes.items():
            self._mesh.route(kind, route.handler, route.parts)
        return member


def _sensors(manners: Manners) -> DeviceReader:
    """With what says when this device's person has used it last, where that counts.

    Perhaps that can only be seen by the load of other programs: then it must be exact.
    """
    return DeviceReader(idle_seconds_reader(), 0.0) if manners.when_idle else DeviceReader()


def check_limits(threads: int | None, memory_bytes: int | None) -> None:
    threads, memory_bytes = whole("threads", threads), whole("memory_bytes", memory_bytes)
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise OptionError(f"threads must be from 1 to {MAX_THREADS}, not {threads}")
    if memory_bytes is not None and memory_bytes < 1:
        raise OptionError("memory_bytes must be 1 or more")


def state_folder(chosen: str | os.PathLike[str] | None) -> Path:
    return Path(chosen) if chosen else default_state_dir()


def _listed(texts: Sequence[str]) -> tuple[str, ...]:
    """One text is a sequence too, of characters that is never meant."""
    return (texts,) if isinstance(texts, str) else tuple(texts)
