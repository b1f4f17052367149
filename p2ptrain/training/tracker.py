"""What the stages report to the holder, gathered round by round: the shell of `committing`.

A round is complete when every device has reported it for every stage it holds. The first failure,
of a stage or of a device, ends every wait: there is no way on without a new plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from p2ptrain.training.recovery.committing import Committing, Seat
from p2ptrain.training.stage_ends import RoundReport


@dataclass(slots=True)
class _Gathering:
    """Reports of one round, and who waits for the last of them."""

    reports: dict[Seat, RoundReport] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Tracker:
    """Gathers reports of these `seats`. One reader, which takes the rounds in order.

    Attributes:
        heard: reports so far.
    """

    def __init__(self, seats: Collection[Seat]) -> None:
        self._committing = Committing(seats)
        self._rounds: dict[int, _Gathering] = {}
        self.heard = 0
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    def expect(self, round_index: int) -> None:
        """A round is ordered."""
        self._committing.order(round_index)
        self._rounds[round_index] = _Gathering()

    @property
    def waits_for(self) -> frozenset[str]:
        """Devices that have not finished the oldest round ordered; none where there is none."""
        return frozenset(device for _, device in self._committing.missing)

    def report(self, seat: Seat, report: RoundReport) -> None:
        """A device has finished a round of its stage.

        Raises:
            ProtocolError: it has no such stage, or it said so before, or nobody asked.
        """
        self.heard += 1
        is_over = self._committing.done(seat, report.round)
        gathering = self._rounds[report.round]
        gathering.reports[seat] = report
        if is_over:
            gathering.complete.set()

    def fail(self, error: BaseException) -> None:
        """End all waits with `error`; later failures are consequences and ignored."""
        if self._failure is None:
            self._failure = error
            self._failed.set()

    async def failed(self) -> None:
        """Wait for the first failure and raise it."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def complete(self, round_index: int) -> Mapping[Seat, RoundReport]:
        """Wait for all reports of a round that was ordered, and forget them."""
        await self._rounds[round_index].complete.wait()
        return self._rounds.pop(round_index).reports
