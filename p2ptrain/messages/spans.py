"""Spans of a device on their way to the holder of a traced job, and the clock that they are by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from p2ptrain.errors import ProtocolError
from p2ptrain.net.fields import Blob, BlobLimit, FrameFields
from p2ptrain.net.forms import Count, Id, Length, Range
from p2ptrain.plan.types.timeline import KINDS

MOST_SPANS = 8192
"""In one answer."""

_PEERS_LIMIT = 4096

_Seconds = Annotated[float, Range()]


@dataclass(frozen=True, slots=True)
class SpansRequest(FrameFields):
    """Send the oldest spans that are recorded; `most` 0: only the time."""

    most: Annotated[int, Range(0, MOST_SPANS)]


@dataclass(frozen=True, slots=True)
class SpansReply(FrameFields):
    """Beside the spans.

    Attributes:
        clock_seconds: of the device, as it answers.
        dropped: spans so far that were not asked for in time.
    """

    clock_seconds: _Seconds
    dropped: Count


@dataclass(frozen=True, slots=True)
class SpanColumns(Blob):
    """Spans column by column: so a thousand take half a millisecond to write and to read.

    Attributes:
        devices: ids that `peers` numbers.
        kinds: one byte a span, an index into `KINDS`.
        places: stage, round and micro-batch (-1: none), and peer; 64-bit integers each.
        times: start and end in seconds of the device's clock, 64-bit floats.
    """

    LIMIT: ClassVar[BlobLimit] = BlobLimit(MOST_SPANS * 49 + (_PEERS_LIMIT << 7), 8192)

    devices: Annotated[tuple[Id, ...], Length(_PEERS_LIMIT)]
    kinds: Annotated[bytes, Length(MOST_SPANS)]
    places: Annotated[bytes, Length(MOST_SPANS * 32)]
    times: Annotated[bytes, Length(MOST_SPANS * 16)]

    @staticmethod
    def of(spans: Sequence[tuple[int, int, int, int, float, float, str]]) -> SpanColumns:
        """From what a `SpanRecorder` gives."""
        devices = {peer: n for n, peer in enumerate(dict.fromkeys(span[6] for span in spans))}
        places = [(span[1], span[2], span[3], devices[span[6]]) for span in spans]
        return SpanColumns(
            tuple(devices),
            bytes(span[0] for span in spans),
            np.array(places, dtype="<i8").tobytes(),
            np.array([(span[4], span[5]) for span in spans], dtype="<f8").tobytes(),
        )

    def __len__(self) -> int:
        return len(self.kinds)

    def check(self) -> None:
        """Raises ProtocolError: the columns are of different lengths, or an index is none."""
        count = len(self.kinds)
        if len(self.places) != count * 32 or len(self.times) != count * 16:
            raise ProtocolError("columns of spans of different lengths")
        if count and max(self.kinds) >= len(KINDS):
            raise ProtocolError("a span of a kind that is none")
        peers, times = self.place_rows()[:, 3], self.time_rows()
        if count and not (int(peers.min()) >= 0 and int(peers.max()) < len(self.devices)):
            raise ProtocolError("a span of a device that is not listed")
        if not np.isfinite(times).all() or bool((times[:, 1] < times[:, 0]).any()):
            raise ProtocolError("a span that ends before it begins")

    def place_rows(self) -> NDArray[np.int64]:
        """Stage, round, micro-batch and peer of each span."""
        return np.frombuffer(self.places, dtype="<i8").reshape(-1, 4)

    def time_rows(self) -> NDArray[np.float64]:
        """Start and end of each span."""
        return np.frombuffer(self.times, dtype="<f8").reshape(-1, 2)
