"""How a holder announces that a coordinator gave no useful answer, to the devices of its job.

They follow another coordinator then. Only the holder of the job that a device works for is
believed, and for a limited time. A coordinator only plans, so a holder that lies gains nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from p2ptrain.errors import PeerError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.kinds import PASSED_OVER
from p2ptrain.net.forms import Range, Text
from p2ptrain.net.message import Message
from p2ptrain.net.write_form import write_form

log = get_logger(__name__)

LONGEST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class PassedOver:
    """`device` is not to coordinate for so long."""

    job: Annotated[str, Text(64)]
    device: Annotated[str, Text(64)]
    seconds: Annotated[float, Range(0.0, LONGEST_SECONDS)]


async def send_passed_over(mesh: Mesh, device: str, said: PassedOver) -> None:
    """To one device."""
    try:
        await mesh.send(device, Message(PASSED_OVER, write_form(said)))
    except PeerError as error:
        log.info("not_told", device=device[:12], why=str(error))
