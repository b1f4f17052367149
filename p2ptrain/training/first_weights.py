"""How a device gets the weights that its stage begins with; see `relay` for the way they take."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from p2ptrain.errors import PeerError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.training.assignment import Assignment, StagePlace
from p2ptrain.training.relay import hop_of
from p2ptrain.training.state_transfer import (
    INITIAL,
    RELAY,
    Check,
    StateReading,
    StateRequest,
    StateServer,
)

log = get_logger(__name__)


async def first_weights(
    mesh: Mesh, states: StateServer, assignment: Assignment, check: Check, place: StagePlace
) -> Mapping[str, Tensor]:
    """The tensors of a stage on this device, by name.

    From the device before this one in the stage's group, and what that one cannot give from the
    holder. Raises as `read_state` where the holder cannot give them either.
    """
    key, units = assignment.key, (place.first, place.end)
    if assignment.holder == mesh.self_id:
        return await states.local(key.job, INITIAL, *units)
    hop = hop_of(mesh.self_id, place, assignment.holder)
    relay = states.relays.get(key, *units) if hop.hands_on else None
    reading = StateReading(mesh, check, relay)
    if hop.before is not None:
        limit = hop.timeout_seconds
        request = StateRequest(hop.before, key.job, RELAY, *units, limit, key.epoch)
        try:
            await reading.read_from(request)
            return reading.tensors()
        except (PeerError, TimeoutError) as error:
            log.info("relay_failed", before=hop.before[:12], why=str(error) or "timed out")
    await reading.read_from(StateRequest(assignment.holder, key.job, INITIAL, *units))
    return reading.tensors()
