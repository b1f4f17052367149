"""`train(job)`: blocking entry for scripts and notebooks, with the household or alone."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from p2ptrain import torch_version
from p2ptrain.aio import event_loop
from p2ptrain.api.event_stream import call_watch, check_on_event
from p2ptrain.api.node import Node, check_limits
from p2ptrain.api.progress import ProgressBoard
from p2ptrain.api.run import check_asked, start_run
from p2ptrain.events import Event
from p2ptrain.mesh.lone_mesh import LoneMesh
from p2ptrain.process.allocator import keep_freed_memory

if TYPE_CHECKING:
    import torch

    from p2ptrain.job.job import Job
    from p2ptrain.job.train_options import TrainOptions


def train(
    job: Job,
    *,
    on_event: Callable[[Event], None] | None = None,
    options: TrainOptions | None = None,
    **node_options: Any,
) -> torch.nn.Module:
    """Train `job` and return its model; blocks. For scripts and notebooks.

    Args:
        job: what to train.
        on_event: called with every event.
        options: how to run it; `TrainOptions(local=True)` stays on this device.
        node_options: as for `Node`.

    Raises:
        UserError, PeerError: why the job failed.
        TypeError: an option that no `Node` takes.
        KeyboardInterrupt: Ctrl-C or a notebook's stop button; this device has left.
    """
    check_on_event(on_event)
    inspect.signature(Node).bind(**node_options)  # alone, some of them would go unheard
    check_asked(job, options)
    main = _train_alone if options is not None and options.local else _train_together
    coroutine = main(job, options, on_event, node_options)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return event_loop.run(coroutine)
    return event_loop.run_in_own_thread(coroutine)


async def _train_together(
    job: Job,
    options: TrainOptions | None,
    on_event: Callable[[Event], None] | None,
    node_options: dict[str, Any],
) -> torch.nn.Module:
    async with Node(role="holder", on_event=on_event, **node_options) as node:
        run = await node.train(job, options)
        return await run.result()


async def _train_alone(
    job: Job,
    options: TrainOptions | None,
    on_event: Callable[[Event], None] | None,
    node_options: dict[str, Any],
) -> torch.nn.Module:
    """The same code without a network: a household of one."""
    torch_version.check()
    keep_freed_memory()
    from p2ptrain.api.device_services import DeviceServices

    assert options is not None
    check_limits(node_options.get("threads"), node_options.get("memory_bytes"))
    mesh = LoneMesh(node_options.get("name") or "here")
    ProgressBoard(mesh)
    member = DeviceServices(
        mesh,
        memory_bytes=node_options.get("memory_bytes"),
        threads=node_options.get("threads"),
    )
    for kind, route in member.routes.items():
        mesh.route(kind, route.handler, route.parts)

    def emit(event: Event) -> None:
        if on_event is not None:
            call_watch.call(on_event, event)

    run = start_run(mesh, member, job, options, emit)
    try:
        return await run.result()
    finally:
        await run.cancel()
        await member.close()
        await mesh.close()
