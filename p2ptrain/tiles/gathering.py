"""How all devices get what each of them has, in as many rounds as the logarithm of their number.

In round r a device hands all that it has on to the one 2^r places further, as far as that one lacks
it (Bruck et al., "Efficient Algorithms for All-to-All Communications", 1997, section 3):

    5 devices: whose parts device 4 has      before     4
                                             round 0    4 3            from device 3
                                             round 1    4 3 2 1        from device 2
                                             round 2    4 3 2 1 0      from device 0, its own alone

Telling everybody at once is one round of as many messages as there are others; where a message
costs more than its way, this is less. Every part arrives once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gathering:
    """One device's place among `count` of them, from 0."""

    place: int
    count: int

    @property
    def rounds(self) -> int:
        """How many."""
        return (self.count - 1).bit_length()

    def sent(self, number: int) -> tuple[int, tuple[int, ...]]:
        """In that round: to whom, and whose parts."""
        return (self.place + (1 << number)) % self.count, self._parts(self.place, number)

    def received(self, number: int) -> tuple[int, tuple[int, ...]]:
        """In that round: from whom, and whose parts."""
        sender = (self.place - (1 << number)) % self.count
        return sender, self._parts(sender, number)

    def _parts(self, sender: int, number: int) -> tuple[int, ...]:
        span = 1 << number
        return tuple((sender - k) % self.count for k in range(min(span, self.count - span)))
