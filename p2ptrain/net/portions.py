"""How much is given away at a time, so that an urgent message never waits long: by the clock.

What has left our lanes cannot be overtaken any more: the frame being written, and what the kernel
holds unsent. Both are therefore bounded by the time that the link takes for them, not by bytes:
128 KiB are 1 ms at 1 Gbit/s, and a second at 1 Mbit/s, in which a heartbeat would come too late.
Too little is no good either: the kernel must have enough to keep the link busy until the event
loop gets its turn again, and that may take some milliseconds while a model trains beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.net.frame import CHUNK_LIMIT_BYTES

FRAME_SECONDS = 0.024
"""Longer: fewer frames, each of which costs a slow device a third of a millisecond at either end:
with 10 ms the event loop took a third more processor time at 100 Mbit/s.
Shorter: what is urgent waits less behind the frame under way."""
LEAST_FRAME_BYTES = 4 * 1024
MOST_FRAME_BYTES = CHUNK_LIMIT_BYTES
UNSENT_SECONDS = 0.012
"""Longer: the link stays busy over longer pauses of this process. Shorter: heartbeats, and tensors
behind all-reduce and weights, wait less. The kernel asks for more when half of it is left."""
LEAST_UNSENT_BYTES = 8 * 1024
MOST_UNSENT_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Portions:
    """Sizes in bytes.

    Attributes:
        frame_bytes: most payload of a frame.
        lowest_frame_bytes: the same in the lowest lane, which is never waited for.
        unsent_bytes: most that the kernel should hold of what has not left this device.
    """

    frame_bytes: int
    lowest_frame_bytes: int
    unsent_bytes: int


MOST_UNPROVEN_BYTES = 64 * 1024
"""Of a frame, while it is only known that the link takes as much as it was given so far."""
UNKNOWN = Portions(frame_bytes=32 << 10, lowest_frame_bytes=32 << 10, unsent_bytes=128 << 10)
"""While the link has not been the limit yet."""


def portions(bytes_per_s: float | None, at_least_bytes_per_s: float = 0.0) -> Portions:
    """For a link that takes so many bytes a second; None while it is only known to take some.

    Powers of two, so that small changes of the rate change nothing.
    """
    if bytes_per_s is None:
        proven = max(_power_of_two(at_least_bytes_per_s * FRAME_SECONDS), UNKNOWN.frame_bytes)
        most = (min(proven, MOST_UNPROVEN_BYTES), min(proven, MOST_FRAME_BYTES))
        return Portions(*most, UNKNOWN.unsent_bytes)
    frame = _power_of_two(bytes_per_s * FRAME_SECONDS)
    frame = min(max(frame, LEAST_FRAME_BYTES), MOST_FRAME_BYTES)
    unsent = _power_of_two(bytes_per_s * UNSENT_SECONDS)
    return Portions(frame, frame, min(max(unsent, LEAST_UNSENT_BYTES), MOST_UNSENT_BYTES))


def _power_of_two(count: float) -> int:
    """The largest power of two that is at most `count`, but at least 1."""
    return 1 << max(int(count).bit_length() - 1, 0)
