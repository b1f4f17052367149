"""Whether devices do what the plan in force expects of them, from the times of their rounds.

    round 1        new memory is found, kernels are prepared: does not count
    a window       rounds put together for `drift_window_seconds`: shorter ones are noise
    an evaluation  after FIRST_ROUNDS, or fewer that took FIRST_SECONDS, then every LATER_ROUNDS,
                   `drift_look_seconds` apart; and as soon as a stage has been more than TOLERANCE
                   off in CONFIRMED windows in a row, every time to the same side

A freeze of one round is no drift, nor is a device that looks faster because it waits for others,
nor the cost of a snapshot on its way, unless snapshots are always on their way. The result
corrects the next plan (`profile_corrections`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from p2ptrain.recovery.commit import Seat
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from p2ptrain.recovery.watch.profile_corrections import ExpectedSeconds, StageSeconds

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
        busy = {
            seat: StageSeconds(
                median(window[seat].wall for window in last),
                median(window[seat].cpu for window in last),
                median(window[seat].round_seconds for window in last),
            )
            for seat in last[-1]
        }
        return DriftWindow(busy, reason)

    def _close_window(self) -> None:
        rounds = len(self._open)
        seconds = self._open_seconds / rounds
        window = {
            seat: StageSeconds(
                sum(one[seat].wall for one in self._open) / rounds,
                sum(one[seat].cpu for one in self._open) / rounds,
                seconds,
            )
            for seat in self._expected
        }
        self._open, self._open_seconds = [], 0.0
        self._windows.append(window)
        for seat, busy in window.items():
            factor = self._expected[seat].factor(busy)
            side = (1 if factor > 1 else -1) if is_off(factor) else 0
            before = self._off.get(seat, 0)
            self._off[seat] = side + (before if before * side > 0 else 0)


def is_off(factor: float) -> bool:
    """Whether that is no noise."""
    return not 1 / (1 + TOLERANCE) <= factor <= 1 + TOLERANCE
