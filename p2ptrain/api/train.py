"""`train(job)`: blocking entry for scripts and notebooks, with the household or alone."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from p2ptrain import torch_version
from p2ptrain.aio import event_loop
from p2ptrain.api.event_stream import call_watch, check_on_event
from p2ptrain.api.job_desk import JobDesk
from p2ptrain.api.node import Node, check_limits, state_folder
from p2ptrain.api.notebook import drawn_result
from p2ptrain.api.run import asked_options, start_run
from p2ptrain.devices.request import AUTO, read_request
from p2ptrain.errors import LinkClosed, OptionError
from p2ptrain.events import Event
from p2ptrain.mesh.interface import (
    LinkSpeed,
    LinkStatistics,
    MemberState,
    MeshCoordinator,
    MeshEvent,
    MeshMember,
)
from p2ptrain.mesh.links.router import Router
from p2ptrain.net.message import Message, Priority
from p2ptrain.process.host_process import keep_freed_memory, leave_alone

if TYPE_CHECKING:
    import torch

    from p2ptrain.devices.selection import ChosenDevice
    from p2ptrain.job.job import Job
    from p2ptrain.job.train_options import TrainOptions
    from p2ptrain.torch_engine.ranks import Ranks


def train(
    job: Job,
    *,
    on_event: Callable[[Event], None] | None = None,
    options: TrainOptions | None = None,
    **more: Any,
) -> torch.nn.Module:
    """Train `job` and return its model; blocks. For scripts and notebooks.

        model = p2ptrain.train(job, wait_for=3, code="12345678", out="weights.safetensors")

    Args:
        job: what to train.
        on_event: called with every event.
        options: how to run it, instead of the fields of `TrainOptions` as keywords.
        more: fields of `TrainOptions`, and arguments of `Node`; `local=True` stays on this device.

    Raises:
        UserError, PeerError: why the job failed.
        TypeError: an option that neither has.
        KeyboardInterrupt: Ctrl-C or a notebook's stop button; this device has left.
    """
    check_on_event(on_event)
    fields, node_options = _divided(more)
    asked = asked_options(job, options, fields)
    if asked.engine == "torch":
        coroutine = _train_ranked(job, asked, on_event, node_options)
    else:
        main = train_alone if asked.local else _train_together
        coroutine = main(job, asked, on_event, node_options)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return event_loop.run(coroutine)
    return event_loop.run_in_own_thread(coroutine)


def _divided(more: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(of TrainOptions, of Node). Raises TypeError: of neither."""
    from p2ptrain.job.train_options import TrainOptions

    of_training = [field.name for field in dataclasses.fields(TrainOptions)]
    of_nodes = list(inspect.signature(Node).parameters)
    for name in more:
        if name not in of_training and name not in of_nodes:
            near = difflib.get_close_matches(name, [*of_training, *of_nodes], 1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise TypeError(f"train() has no option {name!r}{hint}")
    fields = {name: value for name, value in more.items() if name in of_training}
    return fields, {name: value for name, value in more.items() if name in of_nodes}


async def _train_together(
    job: Job,
    options: TrainOptions,
    on_event: Callable[[Event], None] | None,
    node_options: dict[str, Any],
) -> torch.nn.Module:
    async with Node(role="holder", on_event=on_event, **node_options) as node:
        run = await node.train(job, options)
        return await drawn_result(run, run.result())


LOOK_SECONDS = 1.0


async def train_alone(
    job: Job,
    options: TrainOptions,
    on_event: Callable[[Event], None] | None,
    node_options: dict[str, Any],
    on_limit: Callable[[str], None] | None = None,
) -> torch.nn.Module:
    """The same code without a network: a household of one.

    Args:
        on_limit: called each second with what limits the training, in a sentence.
    """
    emit = _emitting(on_event)
    chosen = await _begin(node_options, emit)
    from p2ptrain.api.device_services import DeviceServices

    mesh = LoneMesh(node_options.get("name") or "here")
    desk = JobDesk(mesh, None)
    member = DeviceServices(
        mesh,
        memory_bytes=node_options.get("memory_bytes"),
        threads=node_options.get("threads"),
        device=chosen.device,
        emit=emit,
    )
    for kind, route in member.routes.items():
        mesh.route(kind, route.handler, route.parts)

    async def look() -> None:
        while on_limit is not None:
            on_limit(member.limit)
            await asyncio.sleep(LOOK_SECONDS)

    run = start_run(mesh, member, job, options, emit, desk)
    looking = asyncio.create_task(look())
    try:
        return await drawn_result(run, run.result())
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await run.cancel()
        await member.close()
        await mesh.close()


async def _begin(
    node_options: Mapping[str, Any], emit: Callable[[Event], None], rank: int | None = None
) -> ChosenDevice:
    """What a process needs that trains without a node; `rank`: of several on this machine."""
    torch_version.check()
    if not node_options.get("changes_process", True):
        leave_alone()
    keep_freed_memory()
    from p2ptrain.api.device_services import CHECKS, choose_device
    from p2ptrain.devices.probes import numbered

    threads = node_options.get("threads")
    check_limits(threads, node_options.get("memory_bytes"))
    request = read_request(node_options.get("device", AUTO))
    if rank is not None:
        request = numbered(request, rank)
    checks = state_folder(node_options.get("state_dir")) / CHECKS
    return await choose_device(request, checks, emit, threads=threads)


def _emitting(on_event: Callable[[Event], None] | None) -> Callable[[Event], None]:
    def emit(event: Event) -> None:
        if on_event is not None:
            call_watch.call(on_event, event)

    return emit


async def _train_ranked(
    job: Job,
    options: TrainOptions,
    on_event: Callable[[Event], None] | None,
    node_options: dict[str, Any],
) -> torch.nn.Module:
    from p2ptrain.torch_engine.ranks import Ranks

    refused = [name for name in node_options if name not in TAKEN_BY_RANKS]
    if refused:
        raise OptionError(f"engine torch has no {refused[0]}: leave it out")
    ranks, failed = Ranks.of_torchrun(), True
    try:
        model = await train_on_ranks(ranks, job, options, on_event, **node_options)
        failed = False
    finally:
        ranks.leave(failed=failed)
    return model


TAKEN_BY_RANKS = ("state_dir", "threads", "device", "changes_process")
"""Arguments of `Node` that mean something to `train_on_ranks`."""


async def train_on_ranks(
    ranks: Ranks,
    job: Job,
    options: TrainOptions,
    on_event: Callable[[Event], None] | None,
    **node_options: Any,
) -> torch.nn.Module:
    """Train `job` on the processes that torchrun has started. Only rank 0 has events."""
    from p2ptrain.torch_engine.trainer import RankTrainer

    emit = _emitting(on_event if ranks.is_first else None)
    if not ranks.is_first:  # which has all files
        nothing: dict[str, Any] = dict.fromkeys(
            ("checkpoint", "resume", "out", "log_dir", "notify")
        )
        nothing |= {"checkpoint_every": None, "report_to": ()}
        options = dataclasses.replace(options, **nothing)
    with ranks.together():
        chosen = await _begin(node_options, emit, ranks.local)
    place = ranks.shared(chosen.device.place.type)
    alike = place == chosen.device.place.type
    ranks.agree(None if alike else OptionError(f"it computes on another kind than {place}"))
    mesh = LoneMesh("rank 0")
    desk = JobDesk(mesh, None)
    run = start_run(mesh, RankTrainer(ranks, chosen.device), job, options, emit, desk)
    try:
        return await run.result()
    finally:
        await run.cancel()


class LoneMesh:
    """A `Mesh` of this device alone, which coordinates itself; nothing ever changes."""

    def __init__(self, name: str) -> None:
        device_id = hashlib.sha256(name.encode()).hexdigest()
        self.router = Router(name, self.send)
        self.self_id, self.name = device_id, name
        self.members: Mapping[str, MeshMember] = {
            device_id: MeshMember(device_id, name, MemberState.ALIVE, {})
        }
        self.connected: frozenset[str] = frozenset()
        self.coordinator = MeshCoordinator(device_id, name, term=1)
        self.route = self.router.route
        self.route_now = self.router.route_now
        self.unroute = self.router.unroute
        self.call = self.router.call
        self.close = self.router.close

    def distrust(self, device_id: str, seconds: float) -> None:
        """No other device could coordinate."""

    def subscribe(self, callback: Callable[[MeshEvent], None]) -> Callable[[], None]:
        """Nothing happens that could be said."""
        return lambda: None

    async def send(
        self, peer_id: str, message: Message, priority: Priority = Priority.CONTROL
    ) -> None:
        """Deliver to this device. Raises LinkClosed for any other."""
        self._check_own(peer_id)
        await self.router.deliver(peer_id, message)

    def link_statistics(self, peer_id: str) -> LinkStatistics | None:
        """There are no links."""
        return None

    async def measure_link(self, peer_id: str, duration_seconds: float = 0.2) -> LinkSpeed:
        """Raises LinkClosed: there are no links."""
        raise LinkClosed(f"there is no link to the device {peer_id[:16]}")

    def _check_own(self, peer_id: str) -> None:
        if peer_id != self.self_id:
            raise LinkClosed(f"there is no link to the device {peer_id[:16]}")
