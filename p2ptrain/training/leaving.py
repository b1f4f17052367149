"""A device that leaves hands its work over first: nothing is computed again.

job.leaving ──► holder: the round under way ends, a plan without this device, others fetch
            ◄── answered when nothing depends on this device any more; or that no plan fits
                without it: then it waits for the job's end, and leaves all the same after a while
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from p2ptrain import failpoints
from p2ptrain.errors import Error
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import Mesh
from p2ptrain.net.message import Message
from p2ptrain.training.protocol import LEAVING, wording
from p2ptrain.training.service import TrainingService

log = get_logger(__name__)


async def hand_over(
    mesh: Mesh, service: TrainingService, seconds: float, warn: Callable[[str], None]
) -> None:
    """Ask the holder of the job that this device works for, if any, to do without it.

    Whatever comes of it, this device may leave afterwards: at worst the others take it for dead.

    Args:
        seconds: longest wait.
        warn: tells people that the others cannot do without this device.
    """
    job, holder = service.job, service.holder
    if job is None or holder is None or holder == mesh.self_id:
        return
    until = monotonic() + seconds
    if failpoints.armed:
        await failpoints.reach("leave.ask.before", device=mesh.self_id)
    try:
        with timed(log, "handed_over"):
            asked = Message(LEAVING, {"job": job})
            reply = await mesh.call(holder, asked, timeout_seconds=seconds)
        if "refused" not in reply.fields:
            return
        why = wording(reply.fields, "refused", 1024)
        left = max(until - monotonic(), 0.0)
        warn(
            f"the others cannot take over this device's work ({why}). Leaving in {left:.0f} s at "
            "most; press Ctrl-C again to leave now and break the training"
        )
        async with asyncio.timeout(left):
            await service.idle.wait()
    except (Error, TimeoutError) as error:
        log.info("not_handed_over", why=str(error) or f"it took more than {seconds:.0f} s")
