"""Which devices are alive, linked, or may still have something of the job unseen. Pure.

A device that ended for certain has nothing any more. One that fell silent may be the other half of
a split network: what it had counts as present until it is known to have ended.

`FailureGracePeriod`: how long a holder waits after a sign of trouble until the cause is known. A
broken link may turn out a death; a round that broke off without a sign gets a moment for one to
come. Where none comes the round is repeated, a few times only.

`fully_linked`: which devices can work together, each with a link to every other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings


class DeviceLiveness:
    """See the module.

    Args:
        holder: own id.
        took_part: devices that had a part in a generation of the lineage, each with its last one.
        unseen: devices of which an earlier process of this job knew, and this one does not yet.

    Attributes:
        alive: this device included.
        silent: not alive, and not known to have ended.
        took_part: as above; what they have of it may be all that there is.
    """

    def __init__(
        self, holder: str, took_part: Mapping[str, int], unseen: Iterable[str] = ()
    ) -> None:
        self.alive = {holder}
        self.took_part = dict(took_part)
        self.silent = {*unseen, *took_part} - {holder}
        self._holder = holder
        self._reported_dead: set[str] = set()  # devices whose death was reported
        self._shaken: set[str] = set()  # who may have given up what a request had it prepare

    def appeared(self, device: str) -> None:
        """It is alive, perhaps again."""
        self.alive.add(device)
        self.silent.discard(device)
        self._reported_dead.discard(device)

    def died(self, device: str, *, certain: bool) -> None:
        """It is not; `certain`: its process ended, so what it had is gone."""
        self.alive.discard(device)
        self._shaken.add(device)
        if certain:
            self.silent.discard(device)
            self.took_part.pop(device, None)
        else:
            self.silent.add(device)

    def link_broke(self, one: str, other: str) -> None:
        """Between two devices; one that lost this one may take it for dead."""
        if self._holder in (one, other):
            self._shaken |= {one, other} - {self._holder}

    def first_report(self, device: str) -> bool:
        """Its death is reported; returns whether that is news."""
        is_news = device not in self._reported_dead
        self._reported_dead.add(device)
        return is_news

    def asked(self) -> None:
        """A request is made: what is shaken from now on is shaken since."""
        self._shaken.clear()

    def stand_ready(self, devices: Collection[str]) -> bool:
        """Whether all of these still have what the newest request had them prepare."""
        return (self.alive - self._shaken).issuperset(devices)

    def begun(
        self, generation: int, devices: Collection[str], parts: Iterable[str], oldest: int
    ) -> None:
        """A generation is in force.

        Args:
            devices: those of its plan.
            parts: those that train or keep something in it.
            oldest: generation of the lineage; what was in an older one is of no use.
        """
        self.took_part |= dict.fromkeys(parts, generation)
        self.took_part = {d: e for d, e in self.took_part.items() if e >= oldest}
        self._reported_dead.intersection_update(devices)


MAX_FRUITLESS = 5
"""Generations in a row that broke off without a new step, for no known reason."""

Pair: TypeAlias = frozenset[str]


class FailureGracePeriod:
    """See the module. Times are those of the core that asks.

    Attributes:
        without: devices that stood still twice in a row: they get no work until they join again.
    """

    def __init__(self, holder: str, settings: RecoverySettings = HOME) -> None:
        self.without: set[str] = set()
        self._settings = settings
        self._holder = holder
        self._broken: dict[Pair, float] = {}  # links, and until when to wait for each
        self._unexplained: tuple[str, float] | None = None  # what broke off, and until when
        self._fruitless = 0
        self._stalls = 0

    @property
    def due(self) -> float:
        """When everything is known or not waited for any more; in the past, if it is so now."""
        until = float("-inf") if self._unexplained is None else self._unexplained[1]
        return max([until, *self._broken.values()])

    def link_broke(self, one: str, other: str, now: float) -> None:
        """Between two devices that are alive."""
        is_own, settings = self._holder in (one, other), self._settings
        patience = settings.link_grace_seconds if is_own else settings.relink_seconds
        self._broken.setdefault(frozenset((one, other)), now + patience)
        self._unexplained = None

    def link_back(self, one: str, other: str) -> None:
        """It is there again."""
        self._broken.pop(frozenset((one, other)), None)

    def died(self, device: str, *, in_plan: bool) -> None:
        """Its links are not waited for; that the plan had it explains much."""
        for pair in [pair for pair in self._broken if device in pair]:
            del self._broken[pair]
        self.without.discard(device)
        if in_plan:
            self._unexplained = None

    def broke_off(self, reason: str, now: float) -> None:
        """A round cannot go on, and no report explains it."""
        if not self._broken:
            self._unexplained = (reason, now + self._settings.verdict_seconds)

    def stood_still(self, devices: Collection[str]) -> None:
        """Nothing moved anywhere, and these devices were not done."""
        self._stalls += 1
        if self._stalls > 1:
            self.without.update(set(devices) - {self._holder})

    def over(self) -> str | None:
        """It is asked for a new generation. Returns why that is of no use, where it is not."""
        self._broken.clear()
        unexplained, self._unexplained = self._unexplained, None
        if unexplained is None:
            return None
        self._fruitless += 1
        return unexplained[0] if self._fruitless > MAX_FRUITLESS else None

    def progress(self) -> None:
        """A new step was made."""
        self._fruitless = self._stalls = 0


def fully_linked(
    devices: Collection[str], links: Mapping[str, Collection[str]], holder: str
) -> tuple[frozenset[str], dict[str, tuple[str, ...]]]:
    """Those that stay, and for each that is left out the peers that it has no link to.

    The device that lacks most links goes first, of equals the greatest id; never the holder.

    Arguments:
        links: by device, the peers that it says it has a link to. Both ends must say so.
    """
    left = set(devices) | {holder}
    out: dict[str, tuple[str, ...]] = {}
    while True:
        missing = {
            device: tuple(
                sorted(peer for peer in left - {device} if not _linked(device, peer, links))
            )
            for device in sorted(left)
        }
        worst = max(
            (device for device in missing if device != holder and missing[device]),
            key=lambda device: (len(missing[device]), device),
            default=None,
        )
        if worst is None:
            return frozenset(left), out
        out[worst] = missing[worst]
        left.discard(worst)


def _linked(one: str, other: str, links: Mapping[str, Collection[str]]) -> bool:
    return other in links.get(one, ()) and one in links.get(other, ())
