"""What a device spends beside its units' forwards and backwards.

The plain cost model leaves these out. On a slow device they are a large part of a round of small
micro-batches: a message costs the event loop, the framing and TLS about as much processor time as a
small unit's forward, and it comes out of the same core.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from p2ptrain.plan.types import json_fields as read

OF_OLDER_FILES = ("pack_byte_seconds", "unpack_byte_seconds")
"""Read and not used."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of one device's own time, as it takes them beside its computing.

    Attributes:
        message_seconds: at either end of a message, whatever it carries.
        byte_seconds: at either end, for each byte: framing, TLS, the kernel.
        update_byte_seconds: of an update, for each byte of parameters and of optimizer state.
    """

    message_seconds: float
    byte_seconds: float
    update_byte_seconds: float

    def times_slowdown(self, slowdown: float) -> Overheads:
        """The same work on a device that takes `slowdown` times as long."""
        if slowdown == 1.0:
            return self
        return Overheads(*(getattr(self, field.name) * slowdown for field in fields(self)))

    def to_json(self) -> dict[str, float]:
        """As in a device's "overheads"."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object, where: str) -> Overheads:
        """Read a device's "overheads"; OptionError names the field that is missing or wrong."""
        names = [field.name for field in fields(cls)]
        entry = read.members(value, where, names, OF_OLDER_FILES)
        return cls(*(read.number(entry[name], f"{where}.{name}") for name in names))


REFERENCE = Overheads(
    message_seconds=5e-4,
    byte_seconds=1.2e-9,
    update_byte_seconds=1e-10,
)
"""One core of a server: processor time of the event loop's thread in real rounds
(1.0 to 1.4 ns a byte; messages from 0.34 to 0.62 ms, the more the
colder caches are)."""
