"""What a device has done so far, as it tells a holder that hears nothing."""

from __future__ import annotations

from time import process_time

from p2ptrain.mesh.interface import Mesh
from p2ptrain.net.message import Fields
from p2ptrain.training.protocol import integer, number
from p2ptrain.training.recovery.round_watch import Counters


def count(mesh: Mesh, tasks: int) -> Counters:
    """What this device has done so far."""
    links = [mesh.link_statistics(peer) for peer in mesh.connected]
    moved = sum(link.sent_bytes + link.received_bytes for link in links if link is not None)
    return Counters(tasks, moved, process_time())


def counter_fields(counters: Counters) -> Fields:
    """As message fields."""
    return {
        "tasks": counters.tasks,
        "link_bytes": counters.link_bytes,
        "cpu_seconds": counters.cpu_seconds,
    }


def read_counters(fields: Fields) -> Counters:
    """Check and read. Raises ProtocolError."""
    return Counters(
        integer(fields, "tasks"),
        integer(fields, "link_bytes", 0, 2**63),
        number(fields, "cpu_seconds"),
    )
