"""Both ways a link comes about: a device dials us (`Listener`), or we dial one (`dial`)."""

from __future__ import annotations

from p2ptrain.net.dial import Address, MakeLink, dial, dial_unpaired
from p2ptrain.net.listener import Door, Listener, ListenerSettings

__all__ = [
    "Address",
    "Door",
    "Listener",
    "ListenerSettings",
    "MakeLink",
    "dial",
    "dial_unpaired",
]
