"""A simulated household: devices on a network, watched by the invariants."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from p2ptrain.mesh.interface import MemberState
from tests.simulation.device import Build, Device
from tests.simulation.faults import FaultInjector, FaultPlan
from tests.simulation.invariants import Invariants, InvariantViolated
from tests.simulation.kernel import EventStorm, Kernel
from tests.simulation.network import Network

CONVERGENCE_SECONDS = 30.0
_LIVE = (MemberState.ALIVE, MemberState.SUSPECT)


class NotConverged(InvariantViolated):
    """Faults are over, but the devices do not agree."""


class Household:
    """`count` devices that start at once; ids are two hex digits."""

    def __init__(self, seed: int, count: int, build: Build | None = None) -> None:
        self.rng = Random(seed)
        self.kernel = Kernel()
        self.network = Network(self.kernel, self.rng)
        self.invariants = Invariants()
        ids = [f"{number:02x}" for number in self.rng.sample(range(256), count)]
        self.devices = [
            Device(id_, build or Build(), self.network, self.kernel, self.rng) for id_ in ids
        ]
        for device in self.devices:
            device.watch = self.invariants.check
            device.on_judgement = self.invariants.judged
            self.network.add(device)

    def start_all(self) -> None:
        """Start every device now."""
        for device in self.devices:
            device.start()

    def run_for(self, seconds: float) -> None:
        """Let simulated time pass.

        Raises:
            InvariantViolated: something that must hold does not, or messages beget messages.
        """
        try:
            self.kernel.run_until(self.kernel.now + seconds)
        except EventStorm as storm:
            raise InvariantViolated(str(storm)) from storm

    @property
    def running(self) -> list[Device]:
        """Devices with a process."""
        return [device for device in self.devices if device.process_runs]

    def disagreement(self) -> str | None:
        """Where the running devices' views differ from the truth or from each other, or None."""
        running = self.running
        truth = sorted(device.id for device in running)
        names = {d.id: d.membership.members[d.id].name for d in running}
        coordinators = {device.election.coordinator for device in running}
        for device in running:
            records = device.membership.members.values()
            live = {r.id: r.name for r in records if r.state in _LIVE}
            if live != names:
                return f"{device.id} lists {sorted(live.items())}, but {truth} run"
            if any(record.state is MemberState.SUSPECT for record in records):
                return f"{device.id} still suspects somebody"
        if len(coordinators) > 1 or None in coordinators:
            return f"coordinators {sorted(map(str, coordinators))}"
        (coordinator,) = coordinators or {None}
        if coordinator is not None and coordinator[0] not in truth:
            return f"coordinator {coordinator[0]} does not run"
        return None

    def converge(self, seconds: float = CONVERGENCE_SECONDS) -> float:
        """Run until the devices agree, at most `seconds`; returns how long it took.

        Raises:
            NotConverged: they do not.
        """
        start = self.kernel.now
        while (what := self.disagreement()) is not None:
            if self.kernel.now - start >= seconds:
                raise NotConverged(f"after {seconds} s without faults: {what}")
            self.run_for(0.1)
        return self.kernel.now - start


@dataclass(frozen=True, slots=True)
class SwarmResult:
    """What one seed showed."""

    seed: int
    devices: int
    event_hash: str
    events: int
    faults: int
    convergence_seconds: float
    elections: int


def run_swarm(
    seed: int,
    build: Build | None = None,
    fault_seconds: float = 40.0,
    plan: FaultPlan | None = None,
) -> SwarmResult:
    """Three to eight devices under faults, then without: they must agree again, and stay so.

    Raises:
        InvariantViolated: the message names the seed and the last faults.
    """
    rng = Random(f"swarm {seed}")
    household = Household(rng.getrandbits(64), rng.randint(3, 8), build)
    injector = FaultInjector(
        plan or FaultPlan(mean_interval_seconds=rng.choice((1.0, 3.0, 8.0))),
        household.devices,
        household.network,
        household.kernel,
        Random(rng.getrandbits(64)),
    )
    try:
        household.start_all()
        injector.start()
        household.run_for(fault_seconds)
        injector.stop()
        seconds = household.converge()
        _check_stability(household)
    except InvariantViolated as violation:
        last = "; ".join(injector.injected[-4:])
        text = f"seed {seed} at {household.kernel.now:.3f} s: {violation} (last faults: {last})"
        raise type(violation)(text) from violation
    return SwarmResult(
        seed,
        len(household.devices),
        household.kernel.event_hash,
        household.kernel.executed,
        len(injector.injected),
        seconds,
        household.invariants.elections,
    )


def _check_stability(household: Household) -> None:
    """Once agreed, nothing changes any more."""
    elections, deaths = household.invariants.elections, len(household.invariants.deaths)
    household.run_for(5.0)
    what = household.disagreement()
    if what is not None:
        raise NotConverged(f"agreed, then disagreed again: {what}")
    if household.invariants.elections != elections or len(household.invariants.deaths) != deaths:
        raise NotConverged("an election or a death in a healthy household")
