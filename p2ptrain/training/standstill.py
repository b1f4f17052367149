"""Finding out that an epoch stands still: the shell of `recovery.round_watch`, at the holder."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic

from p2ptrain.errors import Error
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.net.message import Message
from p2ptrain.training.holder_epoch import HolderEpoch
from p2ptrain.training.protocol import ALIVE
from p2ptrain.training.recovery.round_watch import Counters, RoundWatch

log = get_logger(__name__)

ASK_TIMEOUT_SECONDS = 5.0


async def standstill(mesh: Mesh, epoch: HolderEpoch) -> frozenset[str]:
    """Wait until nothing moves any more. Returns who has not finished what was ordered."""
    watch = RoundWatch(monotonic())
    tracker = epoch.tracker
    heard = tracker.heard
    while True:
        await asyncio.sleep(max(watch.due - monotonic(), 0.0))
        # what a slow data set has not given yet, no stage is to blame for
        if tracker.heard != heard or not tracker.waits_for or epoch.feeder.waits_for_data:
            heard = tracker.heard
            watch.moved(monotonic())
            continue
        counters = await _ask_all(mesh, epoch)
        if watch.look(counters, monotonic()) and tracker.heard == heard:
            return tracker.waits_for


async def _ask_all(mesh: Mesh, epoch: HolderEpoch) -> Mapping[str, Counters | None]:
    devices = epoch.assignment.devices
    answers = await asyncio.gather(*(_ask(mesh, device) for device in devices))
    return dict(zip(devices, answers, strict=True))


async def _ask(mesh: Mesh, device: str) -> Counters | None:
    try:
        reply = await mesh.call(device, Message(ALIVE), timeout_seconds=ASK_TIMEOUT_SECONDS)
        return Counters.read(reply.fields)
    except (Error, TimeoutError) as error:
        log.info("no_counters", device=device[:12], why=str(error))
        return None
