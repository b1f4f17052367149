"""The order of work inside one stage of a synchronous round, as data.

1F1B after PipeDream (SOSP 2019, section 3.2) in its synchronous form: `warmup` (K_p) forwards, then
strictly one backward, one forward, then the remaining backwards. The runtime executes these tuples
and the simulator times them; neither decides anything itself. Four micro-batches on three stages of
depth 2(P-p)-1 (at most 4), every task one tick long, links free:

    stage 0   F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3
    stage 1   .  F0 F1 F2 B0 F3 B1 .  B2 .  B3 .
    stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

Where the backward is split (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"), B computes only
the gradients of the inputs, which go to the stage before at once, and W those of the weights, for
which no stage waits. Forwards and backwards keep their order, so nothing can deadlock; W fill the
gaps (`ZeroBubble`). The same stages where a backward is two ticks, one of them W, `held` is 4, and
stage 0, for which no stage waits, does not split (unsplit, the round takes 18 ticks):

    stage 0   F0 F1 F2 F3 .  B0 B0 .  B1 B1 B2 B2 B3 B3
    stage 1   .  F0 F1 F2 B0 F3 W0 B1 W1 B2 W2 B3 W3 .
    stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from p2ptrain.errors import OptionError

Kind = Literal["forward", "backward", "weight"]

_LETTERS = {"forward": "F", "backward": "B", "weight": "W"}


@dataclass(frozen=True, slots=True)
class ScheduleAction:
    """One task of a stage; micro-batches count from 0.

    A backward comprises the gradients of weights, unless the stage's schedule has tasks for these.
    """

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{_LETTERS[self.kind]}{self.micro_batch}"


@lru_cache(maxsize=256)
def one_f_one_b(micro_batches: int, warmup: int) -> tuple[ScheduleAction, ...]:
    """A stage's order: `warmup` forwards, alternation (backward first), remaining backwards.

    Raises:
        OptionError: `warmup` is not between 1 and `micro_batches`.
    """
    if not 1 <= warmup <= micro_batches:
        raise OptionError(f"warmup must lie between 1 and {micro_batches}, found {warmup}")
    order = [ScheduleAction("forward", m) for m in range(warmup)]
    for m in range(micro_batches):
        order.append(ScheduleAction("backward", m))
        if m + warmup < micro_batches:
            order.append(ScheduleAction("forward", m + warmup))
    return tuple(order)


class ZeroBubble:
    """What a stage with a split backward does next.

    While the next forward or backward cannot start, the oldest pending W is computed. A forward
    waits while, with it, more than `held` micro-batches would be without their W. After the last
    backward come the W still pending, the gradients of the last units first where several devices
    sum them, so that sums travel while the first units' are computed. A stage needs no timetable
    for that, and jitter costs it no more than a W.

    Use once a round. It knows no time: the caller says which inputs have arrived.

    Attributes:
        pending: micro-batches whose weight gradients wait, oldest first. What is left of them after
            the last backward belongs together: in whatever order units are taken, each parameter's
            gradients are added in this order.
    """

    def __init__(self, order: Iterable[ScheduleAction], held: int) -> None:
        """Begin a round.

        Args:
            order: the forwards and backwards in which this device has a part, in strict order.
            held: most micro-batches of the round between the oldest one without its weight
                gradients and the newest one forwarded, both included; at least K_p.
        """
        self._rest = deque(order)
        self._held = held
        self.pending: deque[int] = deque()

    def next(self, is_ready: Callable[[ScheduleAction], bool]) -> ScheduleAction | None:
        """The task to start, or whose input to await; None once only `pending` is left.

        Args:
            is_ready: whether the inputs of that forward or backward have arrived.
        """
        if not self._rest:
            return None
        action = self._rest[0]
        if self.pending and (self._is_full(action) or not is_ready(action)):
            return ScheduleAction("weight", self.pending.popleft())
        if action.kind == "backward":
            self.pending.append(action.micro_batch)
        return self._rest.popleft()

    def _is_full(self, action: ScheduleAction) -> bool:
        oldest = action.micro_batch - self.pending[0] >= self._held
        return action.kind == "forward" and oldest


def usual_warmup(stages: int, micro_batches: int) -> tuple[int, ...]:
    """K_p = 2(P-p)-1 of every stage (Asteroid, section 3.2), at most `micro_batches`."""
    return tuple(min(2 * (stages - p) - 1, micro_batches) for p in range(stages))
