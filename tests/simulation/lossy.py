"""One direction of a link over a cable that loses what finds no room: as TCP behaves there.

What is lost is sent again after a timeout that doubles each time. Once it has run out nothing new
is sent before that has arrived. What arrived ahead of it waits in the receiver's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.kernel import Kernel

FIRST_TIMEOUT_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Carrier:
    """What a flow needs around it.

    Attributes:
        carry: when what is sent now arrives; None: it is lost.
        deliver: takes what can be read, in order.
        sign: sees each arrival ahead of what was lost.
        is_open: whether the sender still has that link.
    """

    carry: Callable[[], float | None]
    deliver: Callable[[bytes | None], None]
    sign: Callable[[], None]
    is_open: Callable[[], bool]


class Flow:
    """Words of one sender to one receiver. Numbers count them from 0."""

    def __init__(self, kernel: Kernel, label: bytes, around: Carrier) -> None:
        self._kernel = kernel
        self._label = label
        self._around = around
        self._sent = self._delivered = 0
        self._unsent: list[bytes | None] = []
        self._ahead: dict[int, bytes | None] = {}
        self._is_stuck = False

    @property
    def is_busy(self) -> bool:
        """Whether anything has not been delivered yet."""
        return self._sent > self._delivered or bool(self._unsent)

    def send(self, data: bytes | None) -> None:
        """Send it once it may be sent."""
        if self._is_stuck:
            self._unsent.append(data)
            return
        self._sent += 1
        self._try(self._sent - 1, data, FIRST_TIMEOUT_SECONDS)

    def _try(self, number: int, data: bytes | None, timeout: float) -> None:
        if not self._around.is_open():
            return
        arrival = self._around.carry()
        if arrival is None:
            self._kernel.after(
                timeout, b"again " + self._label, lambda: self._again(number, data, timeout)
            )
        else:
            self._kernel.at(arrival, self._label, lambda: self._arrive(number, data))

    def _again(self, number: int, data: bytes | None, timeout: float) -> None:
        self._is_stuck = True
        if number == self._delivered:
            self._try(number, data, 2 * timeout)
        else:  # it is not the first that is missing
            self._kernel.after(
                timeout, b"wait " + self._label, lambda: self._again(number, data, timeout)
            )

    def _arrive(self, number: int, data: bytes | None) -> None:
        self._ahead[number] = data
        if number != self._delivered:
            self._around.sign()
        while self._delivered in self._ahead:
            self._delivered += 1
            self._around.deliver(self._ahead.pop(self._delivered - 1))
        if self._is_stuck and self._delivered == self._sent:
            self._is_stuck = False
            unsent, self._unsent = self._unsent, []
            for word in unsent:
                self.send(word)
