"""After how many rounds the next snapshot is taken, and how a backup peer paces its reads. Pure.

    rounds >= cost of one version / (cost share x a round)         snapshots may cost so much
    rounds >= transfer / (IDLE_SHARE x what a round leaves free)   of the interfaces they use
    rounds <= replay limit / a round                               most that is computed again

Never while one is on its way. The cost of a version is first estimated from bytes and the devices'
yardsticks, and then observed: rounds in which its snapshots travel take longer than others.

    version v ordered       its update: snapshots are made   all backup peers have theirs
        |-- v - 1 --|-- v --|-- v + 1 --|--  ...  --|-- v + n --|-- ...
            as before           these cost something            as before

Both are means, because most rounds are shorter than the mean. The median of the last few costs
counts, since single ones differ much. The first ones are left out: they pay for new memory.

    offer ──► read ── pause ── read ── pause ── read     spread over the time until the next offer
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings

IDLE_SHARE = 0.5
"""Of the time that a round leaves an interface free."""

COSTS_SEEN = 5
"""Versions of which the middle one says what one costs; at first the estimate is one."""

COSTS_LEFT_OUT = 2
"""Of a generation: there is memory for so many versions, and it is new once."""

WAIT_SHARE = 0.5
"""Of the time that a copy takes of an interface, times the part of rounds in which training does:
so long training waits for it. At a backup peer both come at once, and the network knows no
priorities: 57 MB of a ResNet-50 in 4.8 s beside a pipeline that used 0.7 of the interface cost it
2.2 s."""

MIN_OF_ESTIMATED, MAX_OF_ESTIMATED = 0.6, 5.0
"""Bounds of what a cost is taken for, as shares of the estimate."""

ROUNDS_SEEN = 32
"""Undisturbed rounds of which the middle one says how long a round takes."""

PATIENCE_LIMIT = 16
"""Most that patience grows to, of what it is at first."""

MIN_FREE_SECONDS = 1e-4
"""Of a round, where an interface has nothing left: copies must pass all the same."""


@dataclass(frozen=True, slots=True)
class SnapshotTransfer:
    """One stage's copy on its way to its backup peer.

    Attributes:
        seconds: what it takes of the link.
        busy_seconds: what a round takes of the busier of the interfaces at its ends.
    """

    seconds: float
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """What it takes to keep one version, as far as it can be estimated.

    Attributes:
        cpu_seconds: of the device that it costs most: to copy, digest, send and receive.
        transfers: of the protected stages.
        round_seconds: what the plan predicts for a round.
    """

    cpu_seconds: float
    transfers: tuple[SnapshotTransfer, ...]
    round_seconds: float

    @property
    def estimated_seconds(self) -> float:
        """By how much all rounds in which one version travels take longer, together."""
        round_seconds = max(self.round_seconds, 1e-6)
        waits = (t.seconds * min(t.busy_seconds / round_seconds, 1.0) for t in self.transfers)
        return self.cpu_seconds + WAIT_SHARE * max(waits, default=0.0)


class SnapshotSchedule:
    """Decides for one generation. Time is an argument: seconds of any monotonic clock.

    Attributes:
        cost_seconds: what one version is taken to cost.
    """

    def __init__(
        self,
        cost: SnapshotCost,
        step: int,
        now: float,
        fixed: Callable[[int, int], bool] | None = None,
        settings: RecoverySettings = HOME,
    ) -> None:
        """The generation begins with version `step`, which can be resumed from.

        Args:
            fixed: (version kept last, version) -> whether it is kept, whatever it costs, beside
                those that the replay limit asks for; None = by cost.
        """
        self._fixed = fixed
        self._settings = settings
        self.cost_seconds = self._estimated = cost.estimated_seconds
        self._cost = cost
        self._last_step = step  # kept last
        self._round_at = now
        self._quiet: deque[float] = deque(maxlen=ROUNDS_SEEN)
        self._disturbed: list[float] = []  # rounds in which the version on its way travels
        self._seen: deque[float] = deque([self._estimated], maxlen=COSTS_SEEN)
        self._whole = 0  # versions so far
        self._is_first = True
        self._is_under_way = False
        self._ended: bool | None = None  # in the round under way: whether it is whole
        self._since = now
        self._patience = 1  # doubled for each version that was given up

    @property
    def round_seconds(self) -> float:
        """Of an undisturbed round."""
        if not self._quiet:
            return max(self._cost.round_seconds, 1e-6)
        return statistics.median(self._quiet)

    @property
    def interval_rounds(self) -> int:
        """From one kept version to the next."""
        seconds = self.round_seconds
        rounds = [self.cost_seconds / (self._settings.snapshot_cost_share * seconds)]
        if self._whole < COSTS_LEFT_OUT:
            rounds.append(self._settings.first_snapshot_rounds)
        for transfer in self._cost.transfers:
            free = max(seconds - transfer.busy_seconds, MIN_FREE_SECONDS)
            rounds.append(transfer.seconds / (IDLE_SHARE * free))
        return min(max(1, math.ceil(max(rounds))), self._most_rounds)

    @property
    def _most_rounds(self) -> int:
        return max(1, int(self._settings.replay_limit_seconds / self.round_seconds))

    @property
    def patience_seconds(self) -> float:
        """How long a version may be on its way before something must be wrong."""
        slowest = max((transfer.seconds for transfer in self._cost.transfers), default=0.0)
        interval = self.interval_rounds * self.round_seconds
        limit = self._settings.replay_limit_seconds
        return self._patience * max(limit, 4 * interval, 10 * slowest)

    def wants(self, step: int) -> bool:
        """Whether the version after `step` updates is to be kept."""
        if self._is_under_way:
            return False
        since = step - self._last_step
        if self._fixed is not None:
            return self._fixed(self._last_step, step) or since >= self._most_rounds
        first = self._is_first and since >= self._settings.first_snapshot_rounds
        return first or since >= self.interval_rounds

    def ordered(self, step: int, now: float) -> None:
        """The version after `step` updates is to be kept."""
        if self._ended is not None:
            self._settle(whole=self._ended)
        self._last_step = max(step, self._last_step)
        self._is_first = False
        self._is_under_way, self._since = True, now

    def is_late(self, now: float) -> bool:
        """Whether the version on its way has taken too long."""
        return self._is_under_way and now - self._since > self.patience_seconds

    def gave_up(self) -> None:
        """The version on its way took too long.

        The next one may take twice as long: a link that is only slower than it was measured would
        otherwise never get a copy across, and a backup peer that hangs would never say so.
        """
        self._patience = min(2 * self._patience, PATIENCE_LIMIT)

    def round_done(self, step: int, now: float) -> bool:
        """A round of training has ended, `step` updates count; whether copies travelled in it."""
        seconds, self._round_at = now - self._round_at, now
        is_there = self._is_under_way or self._ended is not None
        is_disturbed = is_there and step > self._last_step
        (self._disturbed if is_disturbed else self._quiet).append(seconds)
        if self._ended is not None:
            self._settle(whole=self._ended)
        return is_disturbed

    def pause_over(self, now: float) -> None:
        """Something else than training took the time until now: an evaluation."""
        self._round_at = now

    def ended(self, *, whole: bool) -> None:
        """No version is on its way any more; the round in which that is so has felt it."""
        self._is_under_way, self._ended = False, whole

    def _settle(self, *, whole: bool) -> None:
        """The last round that felt the version is over: what it has cost."""
        self._whole += whole
        if whole and self._whole > COSTS_LEFT_OUT and self._quiet and self._disturbed:
            undisturbed = statistics.fmean(self._quiet)
            self._seen.append(sum(self._disturbed) - len(self._disturbed) * undisturbed)
            least = MIN_OF_ESTIMATED * self._estimated
            most = MAX_OF_ESTIMATED * self._estimated or math.inf  # there is no estimate
            self.cost_seconds = min(max(statistics.median(self._seen), least), most)
        self._ended = None
        self._disturbed.clear()


PACED_SHARE = 0.6
"""Of the time between two offers: what dies meanwhile goes back to the version before. At once, a
copy of 125 MB makes the two or three rounds in which it travels half as long again; spread, its
reads find time in which the backup peer waits. What comes from several devices at once shares the
backup peer's interface, whatever their priorities. What is left shows how long rounds take
without."""

PACED_LIMIT_SECONDS = PACED_SHARE * HOME.replay_limit_seconds
"""Most of it: after a long pause in training the next copy would take longer than it is awaited."""

READ_SECONDS = 0.1
"""Of link time in one read: what waits in the network's own queues holds up heartbeats too."""

MIN_READ_BYTES = 128 << 10
"""Less takes about as long as a message does, whatever the link."""

READ_LIMIT_BYTES = 2 << 20
"""Larger: fewer requests, each of which costs as much as some 100 KiB. Smaller: a tensor for
training finds less before it at the reader, which takes milliseconds for it while it computes."""


class ReadPacing:
    """When reads are due, so that they spread evenly over a time."""

    def __init__(self, begun: float, seconds: float) -> None:
        self._begun = begun
        self._seconds = seconds
        self._total_bytes = 0

    def wait_seconds(self, left_bytes: int, now: float) -> float:
        """How long the next read waits, when `left_bytes` have to be read, its own included."""
        self._total_bytes = max(self._total_bytes, left_bytes)
        done = 1 - left_bytes / self._total_bytes if self._total_bytes else 1.0
        return max(self._begun + done * self._seconds - now, 0.0)


class ReadRates:
    """How fast reads have come from each owner of copies.

    Less than MIN_READ_BYTES says only that the link is at least so fast.
    """

    def __init__(self) -> None:
        self._bytes_per_s: dict[str, float] = {}

    def read(self, owner: str, nbytes: int, seconds: float) -> None:
        """A read has ended."""
        rate = nbytes / max(seconds, 1e-6)
        if nbytes < MIN_READ_BYTES:
            rate = max(rate, self._bytes_per_s.get(owner, 0.0))
        self._bytes_per_s[owner] = rate

    def next_read_bytes(self, owner: str) -> int:
        """How much to ask that owner for at once."""
        return read_bytes(self._bytes_per_s.get(owner, 0.0))


def paced_seconds(since_last: float) -> float:
    """How long to read a copy, offered so many seconds after the one before, or after the
    generation's beginning."""
    return min(PACED_SHARE * since_last, PACED_LIMIT_SECONDS)


def read_bytes(bytes_per_s: float) -> int:
    """How much is read at once where reads come at that rate; 0 = that is not known."""
    return min(max(int(READ_SECONDS * bytes_per_s), MIN_READ_BYTES), READ_LIMIT_BYTES)
