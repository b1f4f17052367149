"""What a plan must obey besides memory: whom to use, how much to give each, what stays at home."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from p2ptrain.plan.allocation import EVERY_ALLOCATION, Allocation
from p2ptrain.plan.draft import Draft
from p2ptrain.plan.work import ROUNDING, Work


@dataclass(frozen=True, slots=True)
class Rules:
    """The constraints of one question.

    Attributes:
        holder: of the data; with `private` it, and only it, has the first and the last stage.
        required: devices that must have a part.
        caps: by device, the largest part of the round's work it may take.
        groups: whether a stage may have several devices.
        allocations: how these may divide its work.
        work: measures parts of the round's work.
    """

    holder: int
    work: Work
    private: bool = False
    required: frozenset[int] = frozenset()
    caps: Mapping[int, float] = field(default_factory=dict)
    groups: bool = True
    allocations: frozenset[Allocation] = EVERY_ALLOCATION

    def allow(self, draft: Draft) -> bool:
        """Whether `draft` obeys."""
        if not self.required <= frozenset(draft.devices):
            return False
        if not all(len(g.devices) == 1 or self.permit(deals=g.deals) for g in draft.groups):
            return False
        if self.private and not self._at_home(draft):
            return False
        if not self.caps:
            return True
        parts = self.work.parts(draft)
        return all(parts.get(device, 0.0) <= cap + ROUNDING for device, cap in self.caps.items())

    def permit(self, *, deals: bool) -> bool:
        """Whether groups may deal whole micro-batches, or else divide samples."""
        wanted = Allocation.MICRO_BATCHES if deals else Allocation.SAMPLES
        return self.groups and wanted in self.allocations

    def most_part(self, device: int) -> float:
        """The largest part of the round's work that it may take."""
        return self.caps.get(device, 1.0) + ROUNDING

    def pinned(self, stages: int) -> frozenset[int]:
        """Stages that are the holder's alone."""
        return frozenset((0, stages - 1)) if self.private else frozenset()

    def _at_home(self, draft: Draft) -> bool:
        ends = (draft.groups[0].devices, draft.groups[-1].devices)
        return ends == ((self.holder,), (self.holder,))
