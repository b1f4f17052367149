"""Whether devices do what the plan in force expects of them, from the times of their rounds. Pure.

    round 1        new memory is found, kernels are prepared: does not count
    a window       rounds put together for `drift_window_seconds`: shorter ones are noise
    an evaluation  after FIRST_ROUNDS, or fewer that took FIRST_SECONDS, then every LATER_ROUNDS,
                   `drift_look_seconds` apart; and as soon as a stage has been more than TOLERANCE
                   off in CONFIRMED windows in a row, every time to the same side

A freeze of one round is no drift, nor is a device that looks faster because it waits for others,
nor the cost of a snapshot on its way, unless snapshots are always on their way. The result
corrects the next plan (`profile_corrections`).

`RepartitionSchedule`: when FTPipeHD repartitions the model, and the device capacities it uses. A
device i with the units S_i reports how long it took for each mini-batch; T0_l is the time of unit l
in the profile of the device with the data (section III-D, equations 1 to 3):

    C_i = mean time of i / sum of T0_l over S_i            time of unit l on i:  C_i · T0_l

A device that has reported nothing has capacity 1. Two things differ from the paper. The device with
the data is measured like all others, where the paper sets its capacity to 1: it was profiled while
idle, and every device is slower in training. And the tasks of a device with little to do are mostly
messages, so below a share of the time its reports only bound its capacity: its tasks take no
more than that share.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from p2ptrain.recovery.commit import Seat
from p2ptrain.recovery.profile_corrections import (
    MAX_FACTOR,
    MIN_FACTOR,
    ExpectedSeconds,
    ProfileCorrections,
    StageSeconds,
)
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings

TOLERANCE = 0.2

CONFIRMED = 3

FIRST_ROUNDS = 10

FEW_ROUNDS, FIRST_SECONDS = 4, 12.0
"""Long rounds are no noise, and ten of them with borders in the wrong place are a long time."""

LATER_ROUNDS = 100

KEPT_WINDOWS = 10


@dataclass(frozen=True, slots=True)
class DriftWindow:
    """What rounds have taken lately.

    Attributes:
        busy: seconds of a round by stage and device, medians.
        reason: why it is looked at now, for logs.
    """

    busy: Mapping[Seat, StageSeconds]
    reason: str


class DriftWatch:
    """Watches one plan. Feed every round to `observe`; after each look `settle` what is so now.

    Args:
        expected: of every stage on every device of the plan.
    """

    def __init__(
        self, expected: Mapping[Seat, ExpectedSeconds], settings: RecoverySettings = HOME
    ) -> None:
        self._settings = settings
        self._expected = dict(expected)
        self._rounds = 0  # since the last look
        self._seconds = 0.0  # the same
        self._is_warm = False
        self._next_look = FIRST_ROUNDS
        self._is_first = True
        self._open: list[Mapping[Seat, StageSeconds]] = []  # rounds of the window that is not full
        self._open_seconds = 0.0
        self._windows: deque[Mapping[Seat, StageSeconds]] = deque(maxlen=KEPT_WINDOWS)
        self._off: dict[Seat, int] = {}  # windows in a row, below 0: too fast
        self._copying_seconds = 0.0  # of the rounds in a row beside copies

    def observe(
        self, busy: Mapping[Seat, StageSeconds], seconds: float, *, copying: bool = False
    ) -> DriftWindow | None:
        """Take in a round that took so long.

        Args:
            busy: what each stage's tasks took on each device.
            copying: whether copies of stages were on their way.
        """
        if not self._is_warm:
            self._is_warm = True
            return None
        self._copying_seconds = self._copying_seconds + seconds if copying else 0.0
        if 0.0 < self._copying_seconds <= self._settings.drift_copying_seconds:
            return None
        self._rounds += 1
        self._seconds += seconds
        self._open.append(busy)
        self._open_seconds += seconds
        if self._open_seconds >= self._settings.drift_window_seconds:
            self._close_window()
        drifted = [seat for seat, count in self._off.items() if abs(count) >= CONFIRMED]
        if drifted:
            stages = ", ".join(str(stage) for stage in sorted({seat[0] for seat in drifted}))
            return self._look(CONFIRMED, f"stage {stages} is more than {TOLERANCE:.0%} off")
        if self._is_due and self._windows:
            return self._look(KEPT_WINDOWS, f"after {self._rounds} rounds")
        return None

    @property
    def _is_due(self) -> bool:
        if self._is_first and self._rounds >= FEW_ROUNDS and self._seconds >= FIRST_SECONDS:
            return True
        least = self._settings.drift_look_seconds
        return self._rounds >= self._next_look and self._seconds >= least

    def settle(self, expected: Mapping[Seat, ExpectedSeconds]) -> None:
        """From now on expect this; nothing that was observed before counts any more."""
        self._expected = dict(expected)
        self._off.clear()
        self._windows.clear()
        self._open.clear()
        self._open_seconds = 0.0

    def _look(self, windows: int, reason: str) -> DriftWindow:
        self._rounds, self._seconds, self._next_look = 0, 0.0, LATER_ROUNDS
        self._is_first = False
        self._off.clear()
        last = list(self._windows)[-windows:]
        seconds = median(next(iter(window.values())).round_seconds for window in last)
        return DriftWindow(_together(last, last[-1], seconds, median), reason)

    def _close_window(self) -> None:
        seconds = self._open_seconds / len(self._open)
        window = _together(self._open, self._expected, seconds, fmean)
        self._open, self._open_seconds = [], 0.0
        self._windows.append(window)
        for seat, busy in window.items():
            factor = self._expected[seat].factor(busy)
            side = (1 if factor > 1 else -1) if is_off(factor) else 0
            before = self._off.get(seat, 0)
            self._off[seat] = side + (before if before * side > 0 else 0)


def _together(
    rounds: Sequence[Mapping[Seat, StageSeconds]],
    seats: Iterable[Seat],
    round_seconds: float,
    middle: Callable[[Iterable[float]], float],
) -> dict[Seat, StageSeconds]:
    """What the tasks of `seats` took in the middle of these rounds."""
    return {
        seat: StageSeconds(
            middle([one[seat].wall for one in rounds]),
            middle([one[seat].cpu for one in rounds]),
            round_seconds,
        )
        for seat in seats
    }


def is_off(factor: float) -> bool:
    """Whether that is no noise."""
    return not 1 / (1 + TOLERANCE) <= factor <= 1 + TOLERANCE


class RepartitionSchedule:
    """Counts mini-batches, over all plans of a job, and takes means of what they take.

    Args:
        first: mini-batches before the first look at the cuts.
        every: between two looks from then on.
    """

    def __init__(self, first: int, every: int) -> None:
        self._left = first
        self._every = every
        self._least = max(min(first, every) - 1, 1)  # reports that a look needs
        self._seats: frozenset[Seat] = frozenset()
        self._is_warm = False
        self._busy: list[Mapping[Seat, StageSeconds]] = []
        self._seconds: list[float] = []

    def begin(self, seats: Collection[Seat]) -> None:
        """Another plan is in force: what was reported under the one before counts no more."""
        self._seats, self._is_warm = frozenset(seats), False
        self._forget()

    def observe(
        self, busy: Mapping[Seat, StageSeconds], seconds: float
    ) -> Mapping[Seat, StageSeconds] | None:
        """Take in a mini-batch; returns means since the last look where the next one is due.

        Args:
            busy: what its tasks have taken, by stage and device.
            seconds: since the mini-batch before.
        """
        self._left -= 1
        if busy.keys() != self._seats:
            return None
        if not self._is_warm:  # the first fills the pipeline, and finds memory
            self._is_warm = True
            return None
        self._busy.append(busy)
        self._seconds.append(seconds)
        if self._left > 0 or len(self._busy) < self._least:
            return None
        means = _together(self._busy, self._seats, median(self._seconds), fmean)
        self._left = self._every
        self._forget()
        return means

    def _forget(self) -> None:
        self._busy.clear()
        self._seconds.clear()


def capacities(
    before: ProfileCorrections,
    expected: Mapping[Seat, ExpectedSeconds],
    busy: Mapping[Seat, StageSeconds],
    judged_share: float = HOME.repartition_judged_share,
) -> ProfileCorrections:
    """The capacities of the devices of a plan; others' stay as they are.

    Args:
        before: capacities so far, which `expected` was made with: C_i times the sum of T0_l.
        busy: what the plan's stages have taken, and the seconds of a step.
        judged_share: of a step, that a device's tasks take where it is judged by them.
    """
    due: dict[str, float] = defaultdict(float)
    took: dict[str, float] = defaultdict(float)
    step_seconds = 0.0
    for seat, one in busy.items():
        due[seat[1]] += expected[seat].wall
        took[seat[1]] += one.wall
        step_seconds = one.round_seconds
    found = dict(before.devices)
    for device, seconds in took.items():
        if due[device] <= 0 or seconds <= 0:
            continue
        least = judged_share * step_seconds
        counted = seconds if seconds >= least else min(due[device], least)
        capacity = before.of_device(device) * counted / due[device]
        found[device] = min(max(capacity, MIN_FACTOR), MAX_FACTOR)
    return ProfileCorrections(devices=found)


def expected_with(
    expected: Mapping[Seat, ExpectedSeconds], before: ProfileCorrections, after: ProfileCorrections
) -> dict[Seat, ExpectedSeconds]:
    """What a plan expects with other capacities than those it was made with."""
    found = {}
    for seat, due in expected.items():
        factor = after.of_device(seat[1]) / before.of_device(seat[1])
        found[seat] = ExpectedSeconds(due.wall * factor, due.cpu * factor)
    return found
