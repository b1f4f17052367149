"""A plan in force as the rules of recovery see it: device, units, first version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.recovery.compute_kind import PROCESSOR
from p2ptrain.recovery.version import Lineage, Version


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """Units [first, end) on `devices`.

    Attributes:
        copies_to: the backup peer of this stage; None = there is none.
        kinds: with what each of its devices computes; empty: all with processors.
    """

    first: int
    end: int
    devices: tuple[str, ...]
    copies_to: str | None = None
    kinds: tuple[str, ...] = ()

    def kind_of(self, device: str) -> str:
        """With what that one of its devices computed when the plan was made."""
        return self.kinds[self.devices.index(device)] if self.kinds else PROCESSOR.kind


@dataclass(frozen=True, slots=True)
class Placement:
    """One generation of one job.

    Attributes:
        generation: its number; of two generations the greater counts.
        holder: id of the device with the data.
        version: what the generation begins with.
        lineage: as it was before this generation.
        stages: in pipeline order.
        keeps: whether the version that the generation begins with is kept at once.
        stable: the newest version of which every copy was acknowledged; None = there is none.
    """

    generation: int
    holder: str
    version: Version
    lineage: Lineage
    stages: tuple[PlacedStage, ...]
    keeps: bool = False
    stable: Version | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        """Ids, in pipeline order, each once."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    @property
    def protects(self) -> bool:
        """Whether devices keep versions to go back to, and copies of them for others."""
        return self.is_elsewhere or any(stage.copies_to is not None for stage in self.stages)

    @property
    def is_elsewhere(self) -> bool:
        """As the function."""
        return is_elsewhere(self.stages, self.holder)

    def ranges_of(self, device: str) -> tuple[tuple[int, int], ...]:
        """Units that a device trains."""
        return tuple((stage.first, stage.end) for stage in self.stages if device in stage.devices)

    def gives_part(self, device: str, generation: int) -> bool:
        """Whether this is that generation, and a device trains in it."""
        return generation == self.generation and device in self.devices

    def backup_peer_of(self, first: int, end: int) -> str | None:
        """Who keeps the copies of units [first, end), exactly one stage's."""
        for stage in self.stages:
            if (stage.first, stage.end) == (first, end):
                return stage.copies_to
        return None

    def partners_of(self, device: str) -> frozenset[str]:
        """Devices that it exchanges something with: a broken link to one of them is trouble."""
        partners = {self.holder}
        for p, stage in enumerate(self.stages):
            if device in stage.devices:
                partners.update(d for q in (p - 1, p, p + 1) for d in self._devices_at(q))
        if device == self.holder:
            partners.update(self.devices)
        return frozenset(partners - {device})

    def places(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """By device, the units that it trains or keeps copies of."""
        places: dict[str, tuple[tuple[int, int], ...]] = {}
        for stage in self.stages:
            for device in (*stage.devices, *filter(None, [stage.copies_to])):
                places[device] = (*places.get(device, ()), (stage.first, stage.end))
        return places

    def _devices_at(self, stage: int) -> tuple[str, ...]:
        return self.stages[stage].devices if 0 <= stage < len(self.stages) else ()


def is_elsewhere(stages: Sequence[PlacedStage], holder: str) -> bool:
    """Whether one device has all of the model, and is not the holder, which takes whole copies."""
    devices = {device for stage in stages for device in stage.devices}
    return len(devices) == 1 and holder not in devices
