"""Links that are about to be there: devices that came a moment ago still dial each other."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import LinkUp, Mesh, MeshEvent

log = get_logger(__name__)

LINK_SECONDS = 2.0
"""A device without a link after that long is planned without."""


async def until_linked(mesh: Mesh, peers: Collection[str]) -> None:
    """Wait until this device has a link to each of `peers`, at most LINK_SECONDS."""
    wanted = frozenset(peers) - {mesh.self_id}
    linked = asyncio.Event()

    def hear(event: MeshEvent) -> None:
        if isinstance(event, LinkUp) and wanted <= mesh.connected:
            linked.set()

    if wanted <= mesh.connected:
        return
    unsubscribe = mesh.subscribe(hear)
    try:
        async with asyncio.timeout(LINK_SECONDS):
            await linked.wait()
    except TimeoutError:
        missing = sorted(peer[:12] for peer in wanted - mesh.connected)
        log.info("not_linked", peers=missing)
    finally:
        unsubscribe()
