"""The holder's question for a new epoch, to whoever coordinates."""

from __future__ import annotations

from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import Mesh
from p2ptrain.net.message import Message
from p2ptrain.training.change_request import (
    ChangeAnswer,
    ChangeRequest,
    Refusal,
    reply_from_bytes,
)
from p2ptrain.training.parts import limited, part_of
from p2ptrain.training.patience import call_while_bytes_arrive
from p2ptrain.training.protocol import BLOB_LIMIT_BYTES, CHANGE

log = get_logger(__name__)

CHANGE_TIMEOUT_SECONDS = 900.0
"""While no weights arrive anywhere; a coordinator that dies or loses its office ends it earlier."""


async def ask_change(
    mesh: Mesh, coordinator: str, request: ChangeRequest
) -> ChangeAnswer | Refusal:
    """Have an epoch planned and every device of it made ready.

    Raises:
        PeerError: that device does not coordinate, or is out of reach.
        TimeoutError: it took too long, and nobody fetched anything meanwhile.
    """
    with timed(log, "plan_answered"):
        reply = await call_while_bytes_arrive(
            mesh,
            coordinator,
            Message(CHANGE, {}, (memoryview(request.to_bytes()),)),
            receivers=request.ask.alive,
            patience_seconds=CHANGE_TIMEOUT_SECONDS,
            reply_parts=limited(BLOB_LIMIT_BYTES),
        )
        return reply_from_bytes(part_of(reply))
