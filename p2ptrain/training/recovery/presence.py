"""Who is alive, and who may still have something of the job though nobody sees it. Pure.

A device that ended for certain has nothing any more. One that fell silent may be the other half of
a split network: what it had counts as being there until it is known to have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping


class Presence:
    """See the module.

    Args:
        holder: own id.
        took_part: devices that had a part in an epoch of the lineage, each with its last one.
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
        self._mourned: set[str] = set()  # devices whose death people know of
        self._shaken: set[str] = set()  # who may have given up what a request had it prepare

    def appeared(self, device: str) -> None:
        """It is alive, perhaps again."""
        self.alive.add(device)
        self.silent.discard(device)
        self._mourned.discard(device)

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
        """Between two devices; whoever lost this one may take it for dead."""
        if self._holder in (one, other):
            self._shaken |= {one, other} - {self._holder}

    def mourn(self, device: str) -> bool:
        """People are told of its death; returns whether that is news."""
        is_news = device not in self._mourned
        self._mourned.add(device)
        return is_news

    def asked(self) -> None:
        """A request is made: what is shaken from now on is shaken since."""
        self._shaken.clear()

    def stand_ready(self, devices: Collection[str]) -> bool:
        """Whether all of these still have what the newest request had them prepare."""
        return (self.alive - self._shaken).issuperset(devices)

    def begun(
        self, epoch: int, devices: Collection[str], parts: Iterable[str], oldest: int
    ) -> None:
        """An epoch is in force.

        Args:
            devices: those of its plan.
            parts: those that train or keep something in it.
            oldest: epoch of the lineage; what was in an older one is of no use.
        """
        self.took_part |= dict.fromkeys(parts, epoch)
        self.took_part = {d: e for d, e in self.took_part.items() if e >= oldest}
        self._mourned.intersection_update(devices)
