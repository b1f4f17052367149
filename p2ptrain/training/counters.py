"""What a device has done so far, as it tells a holder that hears nothing."""

from __future__ import annotations

from time import process_time

from p2ptrain.mesh.interface import Mesh
from p2ptrain.training.recovery.round_watch import Counters


def count(mesh: Mesh, tasks: int) -> Counters:
    """What this device has done so far."""
    links = [mesh.link_statistics(peer) for peer in mesh.connected]
    moved = sum(link.sent_bytes + link.received_bytes for link in links if link is not None)
    return Counters(tasks, moved, process_time())
