"""A second, deliberately plain simulator: the oracle for the real one.

No event queue: time steps from one end of something to the next; at each step it asks of every
device and every transfer, from the plain cost model's sentences, whether it may start. Written
from the contract alone; shares no code with the engine: the order of a stage's work, the division
of samples and the dealing of micro-batches are spelt out again here too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile

Worker = tuple[int, int]
"""A stage and a place among its devices."""
HOLDER = (-1, -1)


@dataclass
class _Transfer:
    queued: float
    source: Worker
    target: Worker
    micro_batch: int
    gradient: bool
    sender: str
    receiver: str
    size: int
    free: float | None = None
    arrival: float | None = None


@dataclass
class _Naive:
    plan: Plan
    profile: Profile
    cluster: Cluster
    now: float = 0.0
    transfers: list[_Transfer] = field(default_factory=list)
    started: dict[tuple[Worker, str, int], float] = field(default_factory=dict)
    ended: dict[tuple[Worker, str, int], float] = field(default_factory=dict)
    parts: dict[tuple[Worker, int], set[int]] = field(default_factory=dict)
    orders: dict[Worker, list[tuple[str, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for p in range(len(self.plan.stages)):
            for m in range(self.plan.micro_batches):
                for i, samples in enumerate(self.divided(p, m)):
                    self.parts[(p, i), m] = samples
        self.orders = {worker: self.order(worker) for worker in self.workers}

    def divided(self, p: int, m: int) -> list[set[int]]:
        """The samples of micro-batch m that each device of stage p takes."""
        stage = self.plan.stages[p]
        left = self.plan.split.samples(m)
        if len(stage.devices) == 1:
            return [set(range(left))]
        if stage.allocation == "micro_batches":
            owner = self.dealt(p)[m]
            return [set(range(left)) if i == owner else set() for i in range(len(stage.devices))]
        owners = [i for i, device in enumerate(stage.devices) for _ in range(device.share)][:left]
        places = range(len(stage.devices))
        return [{s for s, owner in enumerate(owners) if owner == i} for i in places]

    def dealt(self, p: int) -> list[int]:
        shares = [device.share for device in self.plan.stages[p].devices]
        owners: list[int] = []
        for m in range(self.plan.micro_batches):
            credit = [
                (m + 1) * share - self.plan.micro_batches * owners.count(i)
                for i, share in enumerate(shares)
            ]
            owners.append(credit.index(max(credit)))
        return owners

    @property
    def workers(self) -> list[Worker]:
        return [(p, i) for p, s in enumerate(self.plan.stages) for i in range(len(s.devices))]

    def order(self, worker: Worker) -> list[tuple[str, int]]:
        """The tasks of the stage's order in which this worker has a part."""
        count, warmup = self.plan.micro_batches, self.plan.stages[worker[0]].warmup
        tasks = [("F", m) for m in range(warmup)]
        while len(tasks) < 2 * count:
            backwards = sum(kind == "B" for kind, _ in tasks)
            tasks.append(("B", backwards))
            forwards = len(tasks) - backwards - 1
            if forwards < count:
                tasks.append(("F", forwards))
        return [(kind, m) for kind, m in tasks if self.parts[worker, m]]

    def pieces(self, worker: Worker) -> list[int]:
        return [m for kind, m in self.orders[worker] if kind == "F"]

    def device(self, worker: Worker) -> str:
        if worker == HOLDER:
            return self.cluster.holder.name
        p, i = worker
        return self.plan.stages[p].devices[i].name

    def held(self, worker: Worker) -> int | None:
        return self.plan.stages[worker[0]].held

    def seconds(self, worker: Worker, kind: str, m: int) -> float:
        device = self.cluster.device(self.device(worker))
        table = device.times or self.profile.times
        slowdown = 1.0 if device.times else device.slowdown
        times = table.at(len(self.parts[worker, m]))
        first, end = self.plan.stages[worker[0]].units
        whole = {"F": times.forward, "B": times.backward, "W": times.weight}[kind]
        total = sum(seconds * slowdown for seconds in whole[first:end])
        if kind == "B" and self.held(worker) is not None:
            total -= self.seconds(worker, "W", m)
        return total

    def send(self, source: Worker, target: Worker, m: int, gradient: bool, size: int) -> None:
        sender, receiver = self.device(source), self.device(target)
        transfer = _Transfer(self.now, source, target, m, gradient, sender, receiver, size)
        if sender == receiver:
            transfer.free = transfer.arrival = self.now
        self.transfers.append(transfer)

    def feed(self, worker: Worker, piece: int) -> None:
        last = len(self.plan.stages) - 1
        each = self.profile.input_bytes * (worker[0] == 0)
        each += self.profile.target_bytes * (worker[0] == last)
        if self.is_fed(worker) and piece < len(self.pieces(worker)):
            m = self.pieces(worker)[piece]
            self.send(HOLDER, worker, m, gradient=False, size=each * len(self.parts[worker, m]))

    def is_fed(self, worker: Worker) -> bool:
        at_end = worker[0] in (0, len(self.plan.stages) - 1)
        return at_end and self.device(worker) != self.cluster.holder.name

    def common(self, one: Worker, other: Worker, m: int) -> int:
        return len(self.parts[one, m] & self.parts[other, m])

    def partners(self, worker: Worker, step: int, m: int) -> list[Worker]:
        """Workers of the stage after (1) or before (-1) that share samples of micro-batch m."""
        others = [other for other in self.workers if other[0] == worker[0] + step]
        return [other for other in others if self.common(worker, other, m)]

    def arrived(self, source: Worker, target: Worker, m: int, gradient: bool) -> bool:
        return any(
            (t.source, t.target, t.micro_batch, t.gradient) == (source, target, m, gradient)
            and t.arrival is not None
            and t.arrival <= self.now
            for t in self.transfers
        )

    def next_task(self, worker: Worker) -> tuple[str, int] | None:
        for kind, m in self.orders[worker]:
            if (worker, kind, m) not in self.started:
                return (kind, m) if self.has_inputs(worker, kind, m) else None
        return None

    def is_full(self, worker: Worker, m: int) -> bool:
        """Whether m is too far ahead of the oldest micro-batch without its weight gradients."""
        held = self.held(worker)
        if held is None:
            return False
        due = [n for n in self.pieces(worker) if n <= m - held]
        return any(self.ended.get((worker, "W", n), math.inf) > self.now for n in due)

    def next_weights(self, worker: Worker) -> int | None:
        if self.held(worker) is None:
            return None
        for m in self.pieces(worker):
            if (worker, "W", m) not in self.started:
                return m if self.ended.get((worker, "B", m), math.inf) <= self.now else None
        return None

    def has_inputs(self, worker: Worker, kind: str, m: int) -> bool:
        if kind == "F" and self.is_full(worker, m):
            return False
        sources = self.partners(worker, 1 if kind == "B" else -1, m)
        if kind == "F" and self.is_fed(worker):
            sources = [HOLDER, *sources]
        return all(self.arrived(source, worker, m, gradient=kind == "B") for source in sources)

    def is_busy(self, name: str) -> bool:
        return any(
            end > self.now for (w, _, _), end in self.ended.items() if self.device(w) == name
        )

    def start_tasks(self) -> bool:
        for name in sorted({self.device(worker) for worker in self.workers}):
            own = [worker for worker in self.workers if self.device(worker) == name]
            ready = [(w, task) for w in own if (task := self.next_task(w)) is not None]
            if not ready:  # what would wait computes gradients of weights
                weights = [(w, self.next_weights(w)) for w in own]
                ready = [(w, ("W", m)) for w, m in weights if m is not None]
            if ready and not self.is_busy(name):
                # A backward first, then the later stage.
                worker, (kind, m) = max(ready, key=lambda item: (item[1][0] == "B", item[0]))
                self.started[worker, kind, m] = self.now
                self.ended[worker, kind, m] = self.now + self.seconds(worker, kind, m)
                if kind == "F":
                    self.feed(worker, self.pieces(worker).index(m) + 2)
                return True
        return False

    def start_transfers(self) -> bool:
        waiting = [t for t in self.transfers if t.free is None]
        for t in sorted(waiting, key=lambda t: (t.queued, t.source, t.target, t.micro_batch)):
            under_way = [o for o in self.transfers if o.free is not None and o.free > self.now]
            if all(o.sender != t.sender and o.receiver != t.receiver for o in under_way):
                link = self.cluster.link(t.sender, t.receiver)
                t.free = self.now + t.size / link.bytes_per_s
                t.arrival = t.free + link.latency_s
                return True
        return False

    def end_tasks(self, sent: set[tuple[Worker, str, int]]) -> bool:
        done = [task for task, end in self.ended.items() if end <= self.now and task not in sent]
        for worker, kind, m in done:
            sent.add((worker, kind, m))
            if kind == "W":
                continue
            for other in self.partners(worker, 1 if kind == "F" else -1, m):
                cut = self.plan.stages[min(worker[0], other[0])].units[1]
                size = self.profile.units[cut - 1].output_bytes * self.common(worker, other, m)
                self.send(worker, other, m, gradient=kind == "B", size=size)
        return bool(done)

    def run(self) -> None:
        """Until every task and transfer is done; `now` is when the last one ended."""
        for worker in self.workers:
            self.feed(worker, 0)
            self.feed(worker, 1)
        sent: set[tuple[Worker, str, int]] = set()
        while True:
            # Everything that ends now ends before anything starts, and tasks before transfers.
            while self.end_tasks(sent) or self.start_tasks() or self.start_transfers():
                pass
            ends = [*self.ended.values(), *(t.free for t in self.transfers)]
            ends += [t.arrival for t in self.transfers]
            later = [end for end in ends if end is not None and end > self.now]
            if not later:
                return
            self.now = min(later)

    def reduced(self, p: int) -> float:
        """When the gradients of stage p are summed."""
        stage = self.plan.stages[p]
        last = max(end for (w, kind, _), end in self.ended.items() if w[0] == p and kind in "BW")
        g = len(stage.devices)
        if g == 1:
            return last
        names = [device.name for device in stage.devices]
        links = [self.cluster.link(a, b) for a in names for b in names if a != b]
        size = sum(unit.trained_bytes for unit in self.profile.units[slice(*stage.units)])
        slowest = min(link.bytes_per_s for link in links)
        latency = max(link.latency_s for link in links)
        return last + 2 * (g - 1) / g * size / slowest + 2 * (g - 1) * latency

    def peak(self, worker: Worker) -> int:
        """Bytes, counted by doing the worker's tasks in their order."""
        units = self.profile.units[slice(*self.plan.stages[worker[0]].units)]
        parameters = sum(unit.parameter_bytes for unit in units)
        kept = most = 0
        for kind, m in self.orders[worker]:
            kept += len(self.parts[worker, m]) * (1 if kind == "F" else -1)
            most = max(most, kept)
        held = self.held(worker)
        if held is not None:  # as many as it may hold, whether it ever does or not
            window = range(held)
            most = max(
                sum(len(self.parts[worker, first + i]) for i in window)
                for first in range(self.plan.micro_batches - held + 1)
            )
        parameters = sum(unit.parameter_bytes for unit in units)
        trained = sum(unit.trained_bytes for unit in units)
        weights = math.ceil(parameters + trained * (1 + self.profile.optimizer_state_ratio))
        return weights + most * sum(unit.activation_bytes for unit in units)


def naive_round_seconds(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    """Seconds of one round."""
    simulation = _Naive(plan, profile, cluster)
    simulation.run()
    tasks = sum(
        len(order) + len(simulation.pieces(worker)) * (simulation.held(worker) is not None)
        for worker, order in simulation.orders.items()
    )
    assert len(simulation.ended) == tasks, "stuck"
    return max(simulation.now, *(simulation.reduced(p) for p in range(len(plan.stages))))


def naive_peak_bytes(plan: Plan, profile: Profile, cluster: Cluster) -> dict[str, int]:
    """Peak memory by device name; of a device in two stages the sum."""
    simulation = _Naive(plan, profile, cluster)
    peaks: dict[str, int] = {}
    for worker in simulation.workers:
        name = simulation.device(worker)
        peaks[name] = peaks.get(name, 0) + simulation.peak(worker)
    return peaks


def naive_steady_seconds(
    plan: Plan, profile: Profile, cluster: Cluster, first: int, last: int
) -> float:
    """Seconds per mini-batch from the end of mini-batch `first` to that of `last`.

    The plan's round is the whole asynchronous run, its micro-batches are the mini-batches.
    """
    simulation = _Naive(plan, profile, cluster)
    simulation.run()
    done = {m: end for (w, kind, m), end in simulation.ended.items() if w[0] == 0 and kind == "B"}
    return (done[last] - done[first]) / (last - first)
