"""What a change of plan loses while training stands still, and by a slower plan afterwards.

After a death no device computes until the new plan's devices have what they lack. A plan that is a
little slower and can begin at once loses less: neighbours are each other's backup peers, so that
cuts may often be laid such that nothing travels at all. A faster plan can still replace it later,
beside training.

    lost = seconds until the last byte is there + repay_seconds x (round / fastest round - 1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.replan.migration import deliver, state_bytes
from p2ptrain.plan.replan.replica_holders import Replicas
from p2ptrain.plan.types.cluster import Cluster

TOLERANCE = 0.08
"""A plan this much slower than the fastest found is not taken, however soon it can begin."""

MAX_LOOKS = 12
"""Drafts whose neighbours are looked at, those first that lose least."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The question which draft loses least.

    Attributes:
        held: who has each unit at the version to go on from.
        repay_seconds: how long a slower plan is counted as slower.
    """

    cost: CostModel
    cluster: Cluster
    held: Replicas
    repay_seconds: float

    @property
    def uneven_bytes(self) -> tuple[float, ...]:
        """What uneven cuts may count for, in bytes: next to nothing, up to thrice all there is."""
        units = range(self.cost.unit_count)
        whole = sum(state_bytes(self.cost.profile, unit) for unit in units)
        return (1.0, 0.3 * whole, whole, 3.0 * whole)

    def moving_seconds(self, draft: Draft) -> float:
        """Until every device has what it lacks for `draft`."""
        needs = [
            (unit, name)
            for (first, end), group in zip(draft.units, draft.groups, strict=True)
            for name in map(self.cost.name, group.devices)
            for unit in range(first, end)
            if name not in self.held.holders_of(unit)
        ]
        moves = deliver(self.cost.profile, self.cluster, self.held, needs)
        return max((move.end_seconds for move in moves), default=0.0)

    def soonest(
        self,
        judge: Judge,
        fastest: Judged,
        drafts: Iterable[Draft],
        near: Callable[[Draft], Iterable[Draft]],
    ) -> Judged:
        """The draft that loses least, looked for while the judge's budget lasts.

        Args:
            drafts: to begin with.
            near: drafts whose borders lie a little differently.
        """
        limit = fastest.seconds * (1 + TOLERANCE)
        best, least = fastest, self.moving_seconds(fastest.draft)
        known: set[Draft] = set()
        queue: list[tuple[float, int, float, Draft]] = []  # at least lost, number, moving, draft

        def add(found: Iterable[Draft]) -> None:
            for draft in found:
                if draft not in known:
                    moving = self.moving_seconds(draft)
                    lost = moving + self._slower(judge.bound(draft), fastest)
                    heappush(queue, (lost, len(known), moving, draft))
                    known.add(draft)

        add((fastest.draft, *drafts))
        for _ in range(MAX_LOOKS):
            if not queue or judge.exhausted:
                break
            lost, _, moving, draft = heappop(queue)
            if lost < least:
                judged = judge.exact(draft)
                lost = moving + self._slower(judged.seconds, fastest)
                if judged.seconds <= limit and lost < least:
                    best, least = judged, lost
            add(near(draft))  # of one that is too slow, too: a border further it may not be
        return best

    def _slower(self, seconds: float, fastest: Judged) -> float:
        """What slower rounds lose."""
        if fastest.seconds <= 0:
            return 0.0
        return self.repay_seconds * max(seconds / fastest.seconds - 1, 0.0)
