"""Which unit moves from which device to which when the plan changes, and what that pause costs.

A device that gets a unit it does not have fetches parameters and optimizer state (gradients are
never moved: plans change between rounds) from a living device that has them:

    old       a [0 1 2]    b [3 4]    c [5 6]  dies; its copy is on b
    new       a [0 1 2 3]  b [4 5 6]
    moves     unit 3: b -> a          units 5, 6: on b already, nothing travels

All transfers wait from the beginning; the link rules of the cost model decide the rest: one upload
and one download at a time, of the waiting transfers the first whose two ends are free starts.

After a death no device computes until the new plan's devices have what they lack. A plan that is a
little slower and can begin at once loses less; a faster one can replace it later, beside training:

    lost = seconds until the last byte is there + repay_seconds x (round / fastest round - 1)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.replan.replica_holders import Replicas
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile


@dataclass(frozen=True, slots=True)
class Move:
    """One unit's state on its way; times count from the migration's start.

    Attributes:
        end_seconds: when it has arrived; the interfaces are free the link's latency before.
    """

    unit: int
    sender: str
    receiver: str
    size_bytes: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Migration:
    """All that must travel before the new plan can run.

    Attributes:
        moves: in the order in which they start.
        local: (unit, device) that now trains what it had as a copy only.
    """

    moves: tuple[Move, ...]
    local: tuple[tuple[int, str], ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes over the network."""
        return sum(move.size_bytes for move in self.moves)

    @property
    def seconds(self) -> float:
        """Until the last unit has arrived."""
        return max((move.end_seconds for move in self.moves), default=0.0)


NOTHING = Migration(())
"""No device needs anything."""


def plan_migration(
    profile: Profile, cluster: Cluster, plan: Plan, held: Replicas, new: Plan
) -> Migration:
    """From `plan`, whose units are where `held` says, to `new`.

    Arguments:
        cluster: the living devices; a device not in it sends nothing, whatever `held` says.

    Raises:
        PlanError: a unit that some device needs exists nowhere any more.
    """
    alive = {device.name for device in cluster.devices}
    held = held.without({name for names in held.holders for name in names} - alive)
    needs = [(unit, name) for unit, name in placed(new) if name not in held.holders_of(unit)]
    trained = set(placed(plan))
    local = [pair for pair in placed(new) if pair not in trained and pair not in set(needs)]
    return Migration(tuple(deliver(profile, cluster, held, needs)), tuple(local))


def placed(plan: Plan) -> list[tuple[int, str]]:
    """(unit, device) of everything the plan's devices train."""
    return [
        (unit, device.name)
        for stage in plan.stages
        for unit in range(*stage.units)
        for device in stage.devices
    ]


def deliver(
    profile: Profile, cluster: Cluster, held: Replicas, needs: Sequence[tuple[int, str]]
) -> list[Move]:
    """Bring each needed unit to its device from the best of its holders.

    Raises:
        PlanError: a needed unit has no holder.
    """
    waiting = _choose_senders(profile, cluster, held, needs)
    return transfer(cluster, _longest_interface_first(cluster, waiting))


@dataclass(frozen=True, slots=True)
class PendingTransfer:
    """A transfer that has not started."""

    unit: int
    sender: str
    receiver: str
    size_bytes: int


def _choose_senders(
    profile: Profile, cluster: Cluster, held: Replicas, needs: Sequence[tuple[int, str]]
) -> list[PendingTransfer]:
    """Large units first, each from the holder that would have it there first.

    Greedy on the interfaces' loads so far: the nearest holder, unless it is busy with others.
    """
    up: dict[str, float] = defaultdict(float)
    down: dict[str, float] = defaultdict(float)
    chosen = []
    sized = sorted(
        (-profile.state(unit, unit + 1).version_bytes, unit, name) for unit, name in needs
    )
    for negative, unit, receiver in sized:
        senders = held.holders_of(unit)
        if not senders:
            raise PlanError(_lost(profile, unit))
        size = -negative

        def arrival(sender: str, receiver: str = receiver, size: int = size) -> float:
            link = cluster.link(sender, receiver)
            return max(up[sender], down[receiver]) + size / link.bytes_per_s + link.latency_s

        sender = min(senders, key=arrival)
        seconds = size / cluster.link(sender, receiver).bytes_per_s
        up[sender] += seconds
        down[receiver] += seconds
        chosen.append(PendingTransfer(unit, sender, receiver, size))
    return chosen


def _lost(profile: Profile, unit: int) -> str:
    return (
        f'the weights of layer "{profile.units[unit].name}" are lost, with every device that had '
        "them or a copy: continue from a checkpoint (--resume), or bring one of these devices back"
    )


def _longest_interface_first(
    cluster: Cluster, waiting: Sequence[PendingTransfer]
) -> list[PendingTransfer]:
    """The device with most to send or receive first, as in list scheduling by critical path."""
    loads: dict[tuple[str, str], float] = defaultdict(float)
    for one in waiting:
        seconds = one.size_bytes / cluster.link(one.sender, one.receiver).bytes_per_s
        loads["up", one.sender] += seconds
        loads["down", one.receiver] += seconds

    def urgency(one: PendingTransfer) -> tuple[float, int, str]:
        load = max(loads["up", one.sender], loads["down", one.receiver])
        return -load, one.unit, one.receiver

    return sorted(waiting, key=urgency)


def transfer(cluster: Cluster, waiting: Iterable[PendingTransfer]) -> list[Move]:
    """When each transfer starts and ends, all waiting in that order from time 0."""
    links = _Interfaces(cluster)
    left, moves = list(waiting), []
    while left:
        later = []
        for one in left:
            if links.are_free(one):
                moves.append(links.start(one))
            else:
                later.append(one)
        left = later
        if left:
            links.wait()
    return moves


class _Interfaces:
    """Every device's uplink and downlink, and the time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._now = 0.0
        self._busy: set[tuple[str, str]] = set()
        self._ends: list[tuple[float, str, str]] = []

    def are_free(self, one: PendingTransfer) -> bool:
        return not self._busy & {("up", one.sender), ("down", one.receiver)}

    def start(self, one: PendingTransfer) -> Move:
        link = self._cluster.link(one.sender, one.receiver)
        free = self._now + one.size_bytes / link.bytes_per_s
        self._busy |= {("up", one.sender), ("down", one.receiver)}
        heappush(self._ends, (free, one.sender, one.receiver))
        return Move(
            one.unit, one.sender, one.receiver, one.size_bytes, self._now, free + link.latency_s
        )

    def wait(self) -> None:
        """Until the next transfers end."""
        self._now = self._ends[0][0]
        while self._ends and self._ends[0][0] == self._now:
            _, sender, receiver = heappop(self._ends)
            self._busy -= {("up", sender), ("down", receiver)}


PAUSE_TOLERANCE = 0.08
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
        limit = fastest.seconds * (1 + PAUSE_TOLERANCE)
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
