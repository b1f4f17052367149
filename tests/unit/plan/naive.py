"""A second, deliberately plain simulator: the oracle for the real one.

No event queue: time steps from one end of something to the next; at each step it asks of every
device and every transfer, from the plain cost model's sentences, whether it may start. Written
from the contract alone; shares no code with the engine but the order of a stage's work, which is
spelt out again here too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2ptrain.plan.cluster import Cluster
from p2ptrain.plan.plan import Plan
from p2ptrain.plan.profile import Profile


@dataclass
class _Transfer:
    queued: float
    source: int
    target: int
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
    started: dict[tuple[int, str, int], float] = field(default_factory=dict)
    ended: dict[tuple[int, str, int], float] = field(default_factory=dict)

    def order(self, p: int) -> list[tuple[str, int]]:
        count, warmup = self.plan.micro_batches, self.plan.stages[p].warmup
        tasks = [("F", m) for m in range(warmup)]
        while len(tasks) < 2 * count:
            backwards = sum(kind == "B" for kind, _ in tasks)
            tasks.append(("B", backwards))
            forwards = len(tasks) - backwards - 1
            if forwards < count:
                tasks.append(("F", forwards))
        return tasks

    def device(self, p: int) -> str:
        return self.plan.stages[p].devices[0].name

    def seconds(self, p: int, kind: str, m: int) -> float:
        device = self.cluster.device(self.device(p))
        table = device.times or self.profile.times
        slowdown = 1.0 if device.times else device.slowdown
        times = table.at(self.plan.split.samples(m))
        first, end = self.plan.stages[p].units
        per_unit = times.forward if kind == "F" else times.backward
        return sum(seconds * slowdown for seconds in per_unit[first:end])

    def send(self, source: int, target: int, m: int, gradient: bool, each: int) -> None:
        sender = self.cluster.holder.name if source == -1 else self.device(source)
        size = each * self.plan.split.samples(m)
        transfer = _Transfer(
            self.now, source, target, m, gradient, sender, self.device(target), size
        )
        if sender == transfer.receiver:
            transfer.free = transfer.arrival = self.now
        self.transfers.append(transfer)

    def feed(self, p: int, m: int) -> None:
        last = len(self.plan.stages) - 1
        each = self.profile.input_bytes * (p == 0) + self.profile.target_bytes * (p == last)
        if m < self.plan.micro_batches and self.is_fed(p):
            self.send(-1, p, m, gradient=False, each=each)

    def is_fed(self, p: int) -> bool:
        at_end = p in (0, len(self.plan.stages) - 1)
        return at_end and self.device(p) != self.cluster.holder.name

    def arrived(self, source: int, target: int, m: int, gradient: bool) -> bool:
        return any(
            (t.source, t.target, t.micro_batch, t.gradient) == (source, target, m, gradient)
            and t.arrival is not None
            and t.arrival <= self.now
            for t in self.transfers
        )

    def next_task(self, p: int) -> tuple[str, int] | None:
        for kind, m in self.order(p):
            if (p, kind, m) not in self.started:
                return (kind, m) if self.has_inputs(p, kind, m) else None
        return None

    def has_inputs(self, p: int, kind: str, m: int) -> bool:
        last = len(self.plan.stages) - 1
        if kind == "B":
            return p == last or self.arrived(p + 1, p, m, gradient=True)
        if self.is_fed(p) and not self.arrived(-1, p, m, gradient=False):
            return False
        return p == 0 or self.arrived(p - 1, p, m, gradient=False)

    def is_busy(self, name: str) -> bool:
        return any(
            end > self.now for (p, _, _), end in self.ended.items() if self.device(p) == name
        )

    def start_tasks(self) -> bool:
        for name in {self.device(p) for p in range(len(self.plan.stages))}:
            stages = [p for p in range(len(self.plan.stages)) if self.device(p) == name]
            ready = [(p, task) for p in stages if (task := self.next_task(p)) is not None]
            if ready and not self.is_busy(name):
                # A backward first, then the later stage.
                p, (kind, m) = max(ready, key=lambda item: (item[1][0] == "B", item[0]))
                self.started[p, kind, m] = self.now
                self.ended[p, kind, m] = self.now + self.seconds(p, kind, m)
                if kind == "F":
                    self.feed(p, m + 2)
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

    def end_tasks(self, sent: set[tuple[int, str, int]]) -> bool:
        done = [task for task, end in self.ended.items() if end <= self.now and task not in sent]
        for p, kind, m in done:
            sent.add((p, kind, m))
            other = p + 1 if kind == "F" else p - 1
            if 0 <= other < len(self.plan.stages):
                cut = self.plan.stages[min(p, other)].units[1]
                each = self.profile.units[cut - 1].output_bytes
                self.send(p, other, m, gradient=kind == "B", each=each)
        return bool(done)

    def run(self) -> float:
        for p in {0, len(self.plan.stages) - 1}:
            self.feed(p, 0)
            self.feed(p, 1)
        sent: set[tuple[int, str, int]] = set()
        while True:
            # Everything that ends now ends before anything starts, and tasks before transfers.
            while self.end_tasks(sent) or self.start_tasks() or self.start_transfers():
                pass
            ends = [*self.ended.values(), *(t.free for t in self.transfers)]
            ends += [t.arrival for t in self.transfers]
            later = [end for end in ends if end is not None and end > self.now]
            if not later:
                return self.now
            self.now = min(later)


def naive_round_seconds(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    """Seconds of one round of a straight pipeline."""
    simulation = _Naive(plan, profile, cluster)
    seconds = simulation.run()
    assert len(simulation.ended) == 2 * plan.micro_batches * len(plan.stages), "stuck"
    return seconds
