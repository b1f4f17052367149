"""How all devices get what each of them has, in few messages one after the other.

Up to `DIRECT` of them tell everybody at once: the halos of neighbours travel in the same frames, so
most of these messages cost nothing. More hand parts on in as many rounds as the logarithm of their
number: in round r a device hands all that it has on to the one 2^r places further, as far as that
one lacks it (Bruck et al., "Efficient Algorithms for All-to-All Communications", 1997, section 3):

    5 devices: whose parts device 4 has      before     4
                                             round 0    4 3            from device 3
                                             round 1    4 3 2 1        from device 2
                                             round 2    4 3 2 1 0      from device 0, its own alone

Every part arrives once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DIRECT = 8
"""A message costs a processor about as much as waiting for one more hop."""

Parts = Mapping[int, tuple[int, ...]]
"""By the place of the other device: whose parts."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """One device's place among `count` of them, from 0."""

    place: int
    count: int

    @property
    def rounds(self) -> int:
        """How many."""
        return min(self.count - 1, 1) if self._is_direct else (self.count - 1).bit_length()

    def sent(self, number: int) -> Parts:
        """In that round: to whom, and whose parts."""
        if self._is_direct:
            return dict.fromkeys(self._others, (self.place,))
        receiver = (self.place + (1 << number)) % self.count
        return {receiver: self._parts(self.place, number)}

    def received(self, number: int) -> Parts:
        """In that round: from whom, and whose parts."""
        if self._is_direct:
            return {other: (other,) for other in self._others}
        sender = (self.place - (1 << number)) % self.count
        return {sender: self._parts(sender, number)}

    @property
    def _is_direct(self) -> bool:
        return self.count <= DIRECT

    @property
    def _others(self) -> list[int]:
        """Beginning with the next one, so that not all tell the same device first."""
        return [(self.place + k) % self.count for k in range(1, self.count)]

    def _parts(self, sender: int, number: int) -> tuple[int, ...]:
        span = 1 << number
        return tuple((sender - k) % self.count for k in range(min(span, self.count - span)))
