"""The stages that one device trains: the version of each, and what is ready to be applied. Pure.

The shell tells what becomes of them; once it has stopped them, what it says they are is the truth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from p2ptrain.training.recovery.device_events import Applied, GradientsReady, Torn
from p2ptrain.training.recovery.holdings import Holding, Kind
from p2ptrain.training.recovery.version import Version


class TrainedStages:
    """See the module. A stage is known by its first unit."""

    def __init__(self) -> None:
        """There are none yet."""
        self._held: dict[int, Holding] = {}
        self._catching_up: set[int] = set()  # those whose update others have applied already

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """As LIVE ones."""
        return tuple(self._held.values())

    @property
    def are_catching_up(self) -> bool:
        """Whether an update is applied that others have."""
        return bool(self._catching_up)

    def begin(self, ranges: Sequence[tuple[int, int]], version: Version) -> None:
        """An epoch begins with these units."""
        self._held = {first: Holding(first, end, version, Kind.LIVE) for first, end in ranges}

    def are(self, held: Collection[Holding]) -> None:
        """They have been stopped, and are this."""
        self._held = {holding.first: holding for holding in held}

    def clear(self) -> None:
        """Nothing is trained here any more."""
        self._held.clear()
        self._catching_up.clear()

    def are_ready_for(self, version: Version) -> bool:
        """Whether some have the gradients that give it."""
        return any(holding.ready == version for holding in self._held.values())

    def catch_up(self, version: Version) -> None:
        """Those that are ready for it apply it now."""
        self._catching_up = {one.first for one in self._held.values() if one.ready == version}

    def commit(self, version: Version) -> bool:
        """All are to apply it; returns whether all were ready. Once only: then none is."""
        if not self._held or any(one.ready != version for one in self._held.values()):
            return False
        for first, holding in self._held.items():
            self._held[first] = dataclasses.replace(holding, ready=None)
        return True

    def note(self, event: GradientsReady | Applied | Torn, *, is_running: bool) -> bool:
        """What became of one; returns whether there is such a stage."""
        holding = self._held.get(event.first)
        if holding is None:
            return False
        match event:
            case GradientsReady(epoch, first, step):
                if is_running and holding.version.step == step:
                    ready = Version(step + 1, epoch)
                    self._held[first] = dataclasses.replace(holding, ready=ready)
            case Applied(_, first, version, coefficient):
                self._held[first] = dataclasses.replace(
                    holding, version=version, ready=None, coefficient=coefficient
                )
            case Torn(_, first):
                del self._held[first]
        self._catching_up.discard(event.first)
        return True
