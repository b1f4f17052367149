"""Counts what a member does wrong and says when it is no longer an accident. Pure.

A member with a bad network sends wrong claims: it takes devices for dead that others still reach,
it repeats itself, it elects itself while it is alone. Its own timers limit that to a few times a
second. So every kind of offence has an allowance, a leaky bucket: an overflow is a warning with the
member's name, three times as much ends the link until this process ends. Only what this device
received from the member itself counts, nothing that other members report about it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from types import MappingProxyType


class Offence(StrEnum):
    """What a member may do once by accident; the text follows its name in the warning."""

    MALFORMED = "sends messages that the protocol forbids"
    FALSE_END = "says again and again that devices are gone which answer this one"
    FALSE_SUSPICION = "says again and again that devices do not answer which answer this one"
    FALSE_NAMES = "gives other devices names that they do not have"
    STRANGERS = "reports devices that are not paired with this one"
    ABSURD_TERM = "sends election numbers that no election can have reached"
    UNELECTED = "claims again and again to plan the work without having been elected"
    RENAMES = "changes its name again and again"
    INTRODUCTIONS = "vouches for more devices than one device may"
    COPIES = "claims wrongly that another process has this device's identity"
    UNKNOWN_KINDS = "sends messages that this device does not know"
    NOT_ITS_PART = "sends what only other devices of a job may send"
    REFUSED = "sends messages that this device refuses"
    FLOOD = "sends more messages than any member has to send"


@dataclass(frozen=True, slots=True)
class Allowance:
    """So many at once, and so many more per second, are taken for accidents."""

    at_once: int
    per_second: float


_ALLOWANCES: Mapping[Offence, Allowance] = MappingProxyType(
    {
        # A member of another make would be wrong with every message: its link flaps, unsaid.
        Offence.MALFORMED: Allowance(2, 0.05),
        # Of one victim. A member that cannot reach it says so once per probe and suspicion, that is
        # every 2.5 s, and once more with each table that it sends.
        Offence.FALSE_END: Allowance(10, 1.0),
        # The same, where it suspects them only; and every suspicion is passed on by all.
        Offence.FALSE_SUSPICION: Allowance(20, 3.0),
        # Others report a renamed device too, each of them once.
        Offence.FALSE_NAMES: Allowance(64, 1.0),
        # Devices whose pairing has not got around, with every table: 256 of them at most.
        Offence.STRANGERS: Allowance(1024, 50.0),
        Offence.ABSURD_TERM: Allowance(32, 2.0),
        Offence.UNELECTED: Allowance(16, 0.5),
        Offence.RENAMES: Allowance(16, 0.1),
        # Of those beyond what one may; who believed another one passes them on, at every link.
        Offence.INTRODUCTIONS: Allowance(100, 2.0),
        Offence.COPIES: Allowance(2, 0.05),
        # Messages under way when a job ended have no handler any more.
        Offence.UNKNOWN_KINDS: Allowance(1000, 20.0),
        # All devices of a generation have one plan: no accident is known.
        Offence.NOT_ITS_PART: Allowance(2, 0.02),
        Offence.REFUSED: Allowance(256, 10.0),
        # Membership and election: some ten a second and member; a cable that was full, or this
        # process after a freeze, brings those of several seconds at once.
        Offence.FLOOD: Allowance(1000, 200.0),
    }
)


@dataclass(frozen=True, slots=True)
class ConductConfig:
    """What is still an accident.

    Attributes:
        allowances: of every offence.
        cut_factor: this many times `at_once` ends the link. Raise: a liar stays for longer.
            Lower: warning and cut-off come close.
        warn_again_seconds: one and the same thing is said this often at most.
        buckets_limit: most of them that are kept.
    """

    allowances: Mapping[Offence, Allowance] = field(default_factory=lambda: _ALLOWANCES)
    cut_factor: float = 3.0
    warn_again_seconds: float = 60.0
    buckets_limit: int = 4096


class ConductAction(Enum):
    """What to do about a member."""

    WARN = auto()
    """Warn the user."""
    CUT = auto()
    """End its links, make no new ones, and warn the user."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What to do, and why: words that follow the member's name."""

    step: ConductAction
    reason: str


@dataclass(slots=True)
class _TokenBucket:
    level: float = 0.0
    at: float = 0.0


class Conduct:
    """Counts what each member does. A device that is cut off is not spoken of again."""

    def __init__(self, config: ConductConfig | None = None) -> None:
        self._config = config or ConductConfig()
        self._buckets: OrderedDict[tuple[str, Offence, str], _TokenBucket] = OrderedDict()
        self._warned: dict[tuple[str, Offence], float] = {}
        self._cut: set[str] = set()

    def note(
        self, peer: str, offence: Offence, now: float, about: str = "", why: str = ""
    ) -> Judgement | None:
        """`peer` did it once more, to the device `about` where it concerns one; `why`: details."""
        if peer in self._cut:
            return None
        allowance = self._config.allowances[offence]
        bucket = self._bucket((peer, offence, about), now)
        passed = now - bucket.at
        bucket.level = max(0.0, bucket.level - passed * allowance.per_second) + 1.0
        bucket.at = now
        if bucket.level > allowance.at_once * self._config.cut_factor:
            self._cut.add(peer)
            return Judgement(ConductAction.CUT, _reason(offence, why))
        if bucket.level > allowance.at_once and self._may_warn(peer, offence, now):
            return Judgement(ConductAction.WARN, _reason(offence, why))
        return None

    def forgive(self, peer: str) -> None:
        """The device is paired again: it begins as all do."""
        self._cut.discard(peer)
        for key in [key for key in self._buckets if key[0] == peer]:
            del self._buckets[key]
        for said in [said for said in self._warned if said[0] == peer]:
            del self._warned[said]

    def _may_warn(self, peer: str, offence: Offence, now: float) -> bool:
        last = self._warned.get((peer, offence), float("-inf"))
        if now - last < self._config.warn_again_seconds:
            return False
        self._warned[peer, offence] = now
        return True

    def _bucket(self, key: tuple[str, Offence, str], now: float) -> _TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is not None:
            self._buckets.move_to_end(key)
            return bucket
        if len(self._buckets) >= self._config.buckets_limit:
            self._buckets.popitem(last=False)
        bucket = self._buckets[key] = _TokenBucket(at=now)
        return bucket


def _reason(offence: Offence, why: str) -> str:
    return f"{offence.value} ({why})" if why else offence.value
