"""A cable that has become slow while it was full: words wait behind the data on it, both ways.

    prev ══ data ══►  ▒▒▒▒▒▒▒▒ device ▒▒▒▒▒▒▒▒  ══ data ══► next       ▒ waits already

What waits there goes on at the new rate, piece by piece, and both neighbours keep so much under way
from then on. All other words to and from the device share the cable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.simulation.kernel import Kernel

WORD_BYTES = 300
"""Of a membership or election message, with all that is around it."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """What becomes of a cable.

    Attributes:
        bytes_per_s: its rate from now on.
        waiting_bytes: data that already waits at each end.
        piece_bytes: what arrives at a time.
        kept_bytes: data that is kept under way from then on.
        room_bytes: a word that finds more data waiting is lost; None: none ever is.
        lost_share: of the other words.
    """

    bytes_per_s: float
    waiting_bytes: int
    piece_bytes: int
    kept_bytes: int
    room_bytes: int | None = None
    lost_share: float = 0.0


class Direction:
    """One direction of a cable: first come, first carried. It begins to be slow when it is made.

    Args:
        arrived: sees every piece of data; None: nobody here sends any.
        onto: the slow cable on which its data goes on.
    """

    def __init__(
        self,
        how: Slowdown,
        kernel: Kernel,
        arrived: Callable[[], None] | None,
        onto: Direction | None = None,
    ) -> None:
        self._how = how
        self._kernel = kernel
        self._arrived = arrived
        self._onto = onto
        self._free_at = kernel.now
        self._data_bytes = 0  # waiting
        self._under_way_bytes = 0  # of what is sent here: waiting here or further on
        self.is_full = arrived is not None
        self._fill(how.waiting_bytes)

    def carry(self, count: int) -> float:
        """When what is handed over now arrives."""
        self._free_at = max(self._free_at, self._kernel.now) + count / self._how.bytes_per_s
        return self._free_at

    @property
    def may_lose(self) -> bool:
        """Whether words can be lost."""
        return self._how.room_bytes is not None

    def loses(self, rng: Random) -> bool:
        """Whether a word that is handed over now is lost."""
        room = self._how.room_bytes
        return room is not None and (self._data_bytes > room or rng.random() < self._how.lost_share)

    def _fill(self, limit_bytes: int) -> None:
        while self.is_full and self._under_way_bytes < limit_bytes:
            self._under_way_bytes += self._how.piece_bytes
            self.carry_piece(self._arrive if self._onto is None else self._go_on)

    def carry_piece(self, then: Callable[[], None]) -> None:
        self._data_bytes += self._how.piece_bytes

        def passed() -> None:
            self._data_bytes -= self._how.piece_bytes
            then()

        self._kernel.at(self.carry(self._how.piece_bytes), b"piece of data", passed)

    def _go_on(self) -> None:
        assert self._onto is not None
        self._onto.carry_piece(self._arrive)

    def _arrive(self) -> None:
        assert self._arrived is not None
        self._under_way_bytes -= self._how.piece_bytes
        self._arrived()
        self._fill(self._how.kept_bytes)
