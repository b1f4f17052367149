"""One bucket on its way round the ring, on one device: what to send, what an arrival changes.

Without IO. Chunks may arrive in any order: none of a device's steps depends on another, except that
a chunk is sent on when it has arrived.

Where values are rounded for the wire, whoever completes a chunk's sum rounds its own copy before
it sends it. Rounding twice changes nothing, so all devices end with the same bits.
"""

from __future__ import annotations

from torch import Tensor

from p2ptrain.model.rounding import applies, round_trip_
from p2ptrain.model.wire_format import WireFormat
from p2ptrain.training.buckets import Ring


class BucketSum:
    """A bucket that this device has begun.

    Args:
        flat: this device's part, 1-D; becomes the sum. Chunks of it are sent as they lie there, so
            nobody may write to it before all devices have the sum.
        present: a bit for each of the bucket's entries that has a value on this device.
        wire: how chunks travel.
    """

    def __init__(
        self, ring: Ring, flat: Tensor, present: int, wire: WireFormat = WireFormat.EXACT
    ) -> None:
        self.flat = flat
        self._wire = wire
        self._ring = ring
        self._present = [present] * ring.size
        self._received: set[int] = set()
        self._sent: set[int] = set()

    @property
    def present(self) -> int:
        """Once complete: a bit for each entry that has a value on any device."""
        return self._present[0]

    @property
    def complete(self) -> bool:
        """Whether everything has arrived and been handed to the link."""
        return len(self._received) == len(self._sent) == self._ring.steps

    def outgoing(self, step: int) -> tuple[int, Tensor]:
        """What to send in `step`: presence bits and elements of the chunk."""
        number = self._ring.sent(step)
        chunk = self._chunk(number)
        if not self._ring.sums(step):
            round_trip_(chunk, self._wire)
        return self._present[number], chunk

    def sent(self, step: int) -> None:
        """The chunk of that step was handed to the link."""
        self._sent.add(step)

    def has(self, step: int) -> bool:
        """Whether the chunk of that step has arrived."""
        return step in self._received

    def place(self, step: int) -> Tensor | None:
        """Where the chunk of that step may arrive; None = in memory of its own.

        A sum that is handed on replaces what this device sent for it, which therefore has arrived.
        """
        phase = self._ring.size - 1
        if self._ring.sums(step) or step - phase not in self._sent:
            return None
        chunk = self._chunk(self._ring.received(step))
        return None if applies(self._wire, chunk.dtype, chunk.numel()) else chunk

    def receive(self, step: int, present: int, values: Tensor) -> int | None:
        """A chunk has arrived, maybe in its `place`.

        Returns the step in which it is sent on, None = not at all.
        """
        number = self._ring.received(step)
        chunk = self._chunk(number)
        if self._ring.sums(step):
            chunk += values
            self._present[number] |= present
        else:
            if values.data_ptr() != chunk.data_ptr():
                chunk.copy_(values)
            self._present[number] = present
        self._received.add(step)
        return step + 1 if step + 1 < self._ring.steps else None

    def _chunk(self, number: int) -> Tensor:
        first, end = self._ring.chunk(number, self.flat.numel())
        return self.flat[first:end]
