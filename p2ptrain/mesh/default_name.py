"""What a device is called when nobody gave it a name: as its machine is, where that is telling."""

from __future__ import annotations

import socket

from p2ptrain.mesh.text import NAME_LIMIT_CHARACTERS, peer_name

_SAYS_NOTHING = frozenset({"localhost", "unnamed", ""})


def default_name(device_id: str) -> str:
    """The host's name without its domain; else "device-" and the first digits of the id."""
    return name_of_host(socket.gethostname()) or f"device-{device_id[:4]}"


def name_of_host(host_name: str) -> str | None:
    """`host_name` as a device's name, or None where it tells nobody which device this is."""
    first = host_name.partition(".")[0]
    name = peer_name(first)[:NAME_LIMIT_CHARACTERS].strip(" .")
    return None if name.lower() in _SAYS_NOTHING else name
