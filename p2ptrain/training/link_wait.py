"""Links that are about to be there: devices that came a moment ago still dial each other."""

from __future__ import annotations

from collections.abc import Collection

from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.training.waiting import within

log = get_logger(__name__)

LINK_SECONDS = 2.0
"""A device without a link after that long is planned without."""


async def until_linked(mesh: Mesh, peers: Collection[str]) -> None:
    """Wait until this device has a link to each of `peers`, at most LINK_SECONDS."""
    wanted = frozenset(peers) - {mesh.self_id}
    if not await within(mesh, lambda: wanted <= mesh.connected, LINK_SECONDS):
        missing = sorted(peer[:12] for peer in wanted - mesh.connected)
        log.info("not_linked", peers=missing)
