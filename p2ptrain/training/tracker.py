"""What the stages report to the holder, gathered round by round.

A round is complete when every stage has reported it. The first failure, of a stage or of a device,
ends every wait: there is no way on without a new plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from p2ptrain.errors import ProtocolError
from p2ptrain.training.stage_runner import RoundReport


@dataclass(slots=True)
class _Gathering:
    """Reports of one round by stage, and who waits for the last of them."""

    reports: dict[int, RoundReport] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Tracker:
    """Gathers reports of `stages` stages. One reader, which takes the rounds in order."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._rounds: dict[int, _Gathering] = {}
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    def report(self, stage: int, report: RoundReport) -> None:
        """A stage has finished a round.

        Raises:
            ProtocolError: no such stage, or it said so before.
        """
        gathering = self._rounds.setdefault(report.round, _Gathering())
        if not 0 <= stage < self._stages or stage in gathering.reports:
            raise ProtocolError(f"stage {stage} reported round {report.round} twice or is unknown")
        gathering.reports[stage] = report
        if len(gathering.reports) == self._stages:
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

    async def complete(self, round_index: int) -> Mapping[int, RoundReport]:
        """Wait for all reports of a round, and forget them."""
        gathering = self._rounds.setdefault(round_index, _Gathering())
        await gathering.complete.wait()
        return self._rounds.pop(round_index).reports
