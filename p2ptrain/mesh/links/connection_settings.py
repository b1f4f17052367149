"""The timeouts and intervals of connections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from p2ptrain.mesh.discovery.addresses import Address
from p2ptrain.net.link.link import Link

MakeLink: TypeAlias = Callable[[str], Link]

Dial: TypeAlias = Callable[[Sequence[Address], str, MakeLink], Awaitable[Link]]
"""(addresses, expected id, make_link) -> a link whose peer has proved to be that device."""


@dataclass(frozen=True, slots=True)
class ConnectionTimes:
    """How patient connections are, in seconds.

    Attributes:
        hello_seconds: for a hello or its answer. Raise: patience with frozen devices.
        crossing_seconds: the device of the greater id waits this long before it dials, so that
            dials rarely cross. Raise: slower where only it can dial.
        ask_old_seconds: for an answer over an old link when a new process shows up. Raise:
            slower restarts. Lower: a frozen process loses its identity to a copy.
        goodbye_seconds: to send what is queued on a link that is stuck, when leaving.
    """

    hello_seconds: float = 5.0
    crossing_seconds: float = 0.05
    ask_old_seconds: float = 1.0
    goodbye_seconds: float = 1.0
