"""What a holder does when there is no way to another generation, and whose failures count. Pure.

    there may be one soon          ask again, ever later where preparations are spoiled; bounded
    no plan fits without a leaver  the leave is denied
    what is missing may come back  wait for it
    else                           the job ends

`EarlyDeaths`: whether a part of the model ends the processes that compute it. A model may end any
process that runs some of its units, and be harmless where it was measured. So processes that end
right after their generation began are counted, by the units that all of them had.

`Complaints`: a device may report that its part fails, or that a link has ended. One report is
believed, but not forever: a device that stops the same step again and again is planned around. A
job ends for an error that two devices had one after the other, or the holder itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.recovery.choose_version import StateLost
from p2ptrain.recovery.cores.liveness import DeviceLiveness
from p2ptrain.recovery.generation_request import ReconfigureFailure
from p2ptrain.recovery.placement import Placement

RETRY_SECONDS = 1.0
"""Between two requests where the first one failed and nothing has changed."""

MAX_DOUBLINGS = 3
"""Of that where a device is alive and does not answer: each request's generation numbers are on the
disk first, and this may go on for hours."""

MAX_SPOILED = 5
"""Requests in a row without a new step in which every preparation was spoiled; the wait between two
doubles."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """After a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class KeepLeavers:
    """They stay, for this reason; ask again with them."""

    reason: str


@dataclass(frozen=True, slots=True)
class AwaitDevices:
    """Nothing goes before one of these is back.

    Attributes:
        seconds: ask again after so long all the same; None = not before something happens.
    """

    devices: tuple[str, ...]
    seconds: float | None


@dataclass(frozen=True, slots=True)
class StopJob:
    """There is nothing to wait for."""

    reason: str
    lost: StateLost | None = None


Verdict: TypeAlias = RetryLater | KeepLeavers | AwaitDevices | StopJob


class RetryPolicy:
    """See the module.

    Attributes:
        lowered: what devices proved to have less memory of, by id.
    """

    def __init__(self) -> None:
        self.lowered: dict[str, MemoryBudgets] = {}
        self._spoiled = 0  # requests in a row
        self._unseen = 0  # the same, while a device that is alive did not answer

    def progress(self) -> None:
        """A new step was made."""
        self._spoiled = self._unseen = 0

    def judge(
        self, refused: ReconfigureFailure, there: DeviceLiveness, *, someone_leaves: bool
    ) -> Verdict:
        """What follows from one."""
        for device, memory in refused.lowered.items():
            self.lowered[device] = memory.at_most(self.lowered.get(device, memory))
        self._spoiled += refused.spoiled > 0
        if refused.again:
            return self._again(refused.reason)
        lost = refused.lost
        if lost is None and someone_leaves:
            return KeepLeavers(refused.reason)
        if lost.certain if lost is not None else not there.silent:
            return StopJob(refused.reason, lost)
        places = lost.last_places if lost is not None else there.silent
        seen = there.alive.intersection(places)  # but it did not answer, yet
        silent = there.silent.intersection(places)
        if not seen and not silent:  # they have ended for certain since that was found
            return RetryLater(RETRY_SECONDS)
        if not seen:
            return AwaitDevices(tuple(sorted(silent)), None)
        seconds = RETRY_SECONDS * 2 ** min(self._unseen, MAX_DOUBLINGS)
        self._unseen += 1
        return AwaitDevices(tuple(sorted(silent or seen)), seconds)

    def _again(self, reason: str) -> Verdict:
        if self._spoiled > MAX_SPOILED:
            return StopJob(f"{self._spoiled} times in a row a new plan could not start: {reason}")
        return RetryLater(RETRY_SECONDS * 2 ** max(self._spoiled - 1, 0))


EARLY_STEPS = 2
"""A generation that has made so many new ones has outlived its beginning."""

MAX_DEVICES = 2
"""Devices that a part may end so."""


class EarlyDeaths:
    """See the module.

    Attributes:
        devices: those that ended so, by the present suspicion.
    """

    def __init__(self) -> None:
        self.devices: list[str] = []
        self._units: frozenset[int] = frozenset()  # of all of them
        self._placed: Placement | None = None
        self._steps = 0
        self._counted: set[str] = set()  # of the generation

    def begun(self, placed: Placement) -> None:
        """A generation is in force."""
        self._placed, self._steps = placed, 0
        self._counted.clear()

    def progress(self) -> None:
        """A new step was made in it."""
        self._steps += 1
        if self._steps == EARLY_STEPS:
            self._forget()

    def ended(self, device: str) -> None:
        """Its process did, for certain, and without a word."""
        placed = self._placed
        if placed is None or self._steps >= EARLY_STEPS or device in self._counted:
            return
        ranges = placed.ranges_of(device)
        units = frozenset(unit for first, end in ranges for unit in range(first, end))
        if not units:
            return
        if not units & self._units:
            self._forget()
            self._units = units
        self._units &= units
        self._counted.add(device)
        self.devices.append(device)

    @property
    def part(self) -> tuple[int, int] | None:
        """Units [first, end) that have ended too many devices; None: none have."""
        if len(self.devices) < MAX_DEVICES:
            return None
        return min(self._units), max(self._units) + 1

    def _forget(self) -> None:
        self.devices, self._units = [], frozenset()


MAX_COMPLAINTS = 3
"""Times in a row, without a step between, that one device alone may stop a job."""


class Complaints:
    """Of one job.

    Args:
        holder: id of the device with the data.
    """

    def __init__(self, holder: str) -> None:
        self._holder = holder
        self._step = -1
        self._times: dict[str, int] = {}  # by device, since the last step
        self._links: dict[tuple[str, str], int] = {}  # by device and the other end, the same
        self._failed: set[str] = set()  # devices whose part has failed

    def is_too_often(self, device: str, step: int) -> bool:
        """It has stopped the job once more, of which `step` updates count."""
        self._since(step)
        self._times[device] = self._times.get(device, 0) + 1
        return device != self._holder and self._times[device] > MAX_COMPLAINTS

    def is_link_false(self, device: str, other: str, step: int) -> bool:
        """It says once more that its link to `other` has ended: whether that is not believed."""
        self._since(step)
        self._links[device, other] = self._links.get((device, other), 0) + 1
        if self._links.get((other, device)):
            return False
        return device != self._holder and self._links[device, other] > MAX_COMPLAINTS

    def ends_job(self, device: str) -> bool:
        """Its part has failed: whether that is the job's fault, as other devices had it too."""
        others = self._failed - {device}
        self._failed.add(device)
        return device == self._holder or bool(others)

    def _since(self, step: int) -> None:
        if step != self._step:
            self._step = step
            self._times.clear()
            self._links.clear()
