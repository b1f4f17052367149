"""A device that leaves hands its work over first: nothing is computed again.

job.leaving ──► holder: the round under way ends, a plan without this device, others fetch
            ◄── answered when nothing depends on this device any more
"""

from __future__ import annotations

from p2ptrain.errors import PeerError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import Mesh
from p2ptrain.net.message import Message
from p2ptrain.training.protocol import LEAVING
from p2ptrain.training.service import TrainingService

log = get_logger(__name__)


async def hand_over(mesh: Mesh, service: TrainingService, seconds: float) -> None:
    """Ask the holder of the job that this device works for, if any, to do without it.

    Whatever comes of it, this device may leave afterwards: at worst the others take it for dead.
    """
    job, holder = service.job, service.holder
    if job is None or holder is None or holder == mesh.self_id:
        return
    try:
        with timed(log, "handed_over"):
            await mesh.call(holder, Message(LEAVING, {"job": job}), timeout_seconds=seconds)
    except (PeerError, TimeoutError) as error:
        log.info("not_handed_over", why=str(error) or f"it took more than {seconds:.0f} s")
