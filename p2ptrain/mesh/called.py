"""What people call a device."""

from __future__ import annotations

from p2ptrain.mesh.interface import Mesh


def called(mesh: Mesh, device: str) -> str:
    """A member's name; of who was never one, the beginning of its id."""
    member = mesh.members.get(device)
    return member.name if member is not None else device[:12]
