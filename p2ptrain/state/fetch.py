"""How a device gets the units that its stages begin a generation with (`served_state` for groups).

Each tensor is checked against this device's own model description.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.optimizer import state_layout, trained_parameters
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.state.served_state import HOP_SECONDS
from p2ptrain.state.snapshot_store import StoredTensors
from p2ptrain.state.transfer_client import Known, TransferClient, TransferRequest
from p2ptrain.state.transfer_server import Check, TransferServer, version_source

log = get_logger(__name__)


class SourceFailed(PeerError):
    """A device could not deliver what it has.

    Attributes:
        peer: its id.
    """

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"{peer[:12]} could not deliver: {why}")
        self.peer = peer


async def fetch_units(
    mesh: Mesh,
    states: TransferServer,
    assignment: Assignment,
    wanted: Fetch,
    check: Check,
    arrived: Callable[[int], None] = lambda _nbytes: None,
    hop_seconds: float = HOP_SECONDS,
    known: Known | None = None,
) -> StoredTensors:
    """The tensors of some units, from another device, handed on to the next of the stage's group.

    What a device that relays cannot give comes from the holder, where that has it.

    Args:
        arrived: called with bytes as they come.
        hop_seconds: for one range, at each device of a chain that hands it on.
        known: what is here, as `TransferClient` takes it.

    Raises:
        SourceFailed: no device that was asked could give them.
        ProtocolError: they offer what cannot be right.
    """
    key, place = assignment.key, _place_of(assignment, wanted)
    number = place.devices.index(mesh.self_id)
    hands_on = number + 1 < len(place.devices)
    onward = states.arriving.get(key, wanted.first, wanted.end) if hands_on else None
    reading = TransferClient(mesh, check, onward, known=known, arrived=arrived)
    source = version_source(assignment.version)
    units = (wanted.first, wanted.end)
    whole = TransferRequest(wanted.peer, key.job, source, *units)
    tries = [whole]
    if wanted.relayed:
        timeout_seconds = max(number, 1) * hop_seconds
        tries = [replace(whole, timeout_seconds=timeout_seconds, generation=key.generation)]
        if assignment.holder != mesh.self_id:
            tries.append(replace(whole, peer=assignment.holder))
    why: Exception | None = None
    for request in tries:
        try:
            await reading.read_from(request)
            return reading.state()
        except (PeerError, TimeoutError) as error:
            why = error
            log.info("source_failed", source=request.source, peer=request.peer[:12], why=str(error))
    if isinstance(why, ProtocolError):
        raise why
    raise SourceFailed(tries[0].peer, str(why) or "it took too long")


def _place_of(assignment: Assignment, wanted: Fetch) -> StageAssignment:
    return next(p for p in assignment.stages if p.first <= wanted.first < p.end)


def state_check(description: ModelDescription, spec: OptimizerSpec) -> Check:
    """A `Check` for `model:<name>` and `optimizer:<parameter>.<slot>`."""
    trained = trained_parameters(description)
    slots = state_layout(spec, trained, spec.group_of(list(trained)))
    expected = {f"model:{t.name}": (t.dtype, t.shape) for t in description.tensors}
    expected |= {f"optimizer:{name}": layout for name, layout in slots.items()}

    def check(name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        if name not in expected:
            raise ProtocolError(f"the state of another model: {name[:128]!r}")
        return expected[name]

    return check
