"""A kind's handler with the allocator of its parts, so that a room can list what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.mesh.interface import Handler
from p2ptrain.net.message import PartsAllocator


@dataclass(frozen=True, slots=True)
class Route:
    """See `Mesh.route`."""

    handler: Handler
    parts: PartsAllocator | None = None
