"""What this device did when, for the holder of a job that is traced; the newest spans only.

Off, and then free but for one look at `is_on`, until a holder asks for spans; off again when it has
not asked for a while. Seconds are those of `time.perf_counter`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, cast

from p2ptrain.plan.types.timeline import KINDS, EntryKind

NUMBER_OF: dict[EntryKind, int] = {kind: number for number, kind in enumerate(KINDS)}

_CARRIED = {
    "activations": "output",
    "gradients": "gradient",
    "targets": "target",
    "outputs": "prediction",
    "tiles": "halo",
}
"""By flow; all others carry sums."""


def carried(does: Literal["send", "receive", "wait"], stage: int, flow: str) -> EntryKind:
    """The kind of a span of a flow into a stage."""
    what = _CARRIED.get(flow, "sum")
    if not stage and flow == "activations":
        what = "input"
    return cast(EntryKind, f"{does} {what}")


NONE = -1
"""Of a span that has no round, no micro-batch."""


@dataclass(frozen=True, slots=True)
class SpanLimits:
    """Attributes:
    most: spans kept until they are asked for; one takes some 150 bytes.
    idle_seconds: after so long without a question nothing is recorded.
    least_wait_seconds: shorter waits are none.
    """

    most: int = 65_536
    idle_seconds: float = 30.0
    least_wait_seconds: float = 50e-6


Span = tuple[int, int, int, int, float, float, str]
"""Number of the kind, stage, round, micro-batch, start and end in seconds, id of the other
device."""


class SpanRecorder:
    """One a device. `add` may be called from any thread.

    Attributes:
        is_on: look at it before a span is measured.
        dropped: spans that were not asked for in time.
    """

    def __init__(self, limits: SpanLimits | None = None) -> None:
        self._limits = limits or SpanLimits()
        self._spans: deque[Span] = deque(maxlen=self._limits.most)
        self._until = 0.0
        self.is_on = False
        self.dropped = 0

    def add(
        self,
        kind: EntryKind,
        start: float,
        end: float,
        *,
        stage: int,
        round: int = NONE,
        micro_batch: int = NONE,
        peer: str = "",
    ) -> None:
        """Something was done from `start` to `end`; `peer`: the device it came from or goes to."""
        if not self.is_on:
            return
        if end > self._until:
            self._stop()
            return
        if len(self._spans) == self._limits.most:
            self.dropped += 1
        self._spans.append((NUMBER_OF[kind], stage, round, micro_batch, start, end, peer))

    def add_wait(
        self, kind: EntryKind, start: float, *, stage: int, round: int, micro_batch: int = NONE
    ) -> None:
        """The device has waited since `start`, if that is long enough to be seen."""
        end = perf_counter()
        if end - start >= self._limits.least_wait_seconds:
            self.add(kind, start, end, stage=stage, round=round, micro_batch=micro_batch)

    def take(self, most: int) -> list[Span]:
        """The oldest ones, which are forgotten here; from now on spans are recorded."""
        self._until = perf_counter() + self._limits.idle_seconds
        self.is_on = True
        return [self._spans.popleft() for _ in range(min(most, len(self._spans)))]

    def _stop(self) -> None:
        self.is_on = False
        self._spans.clear()


SILENT = SpanRecorder()
"""Of stages without a trace; it is never asked."""
