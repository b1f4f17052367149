"""How soon a failure is declared, and whether a freeze ever is: seeded Monte-Carlo trials."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from random import Random

from p2ptrain.mesh.interface import MemberState
from tests.simulation.cable import Slowdown
from tests.simulation.device import Build, Device
from tests.simulation.household import Household
from tests.simulation.network import LinkQuality

SETTLE_SECONDS = 3.0
HORIZON_SECONDS = 8.0


class Failure(StrEnum):
    """How a device fails for good."""

    KILL = "kill"
    """SIGKILL: its kernel closes the links, redials are refused."""
    FREEZE = "freeze"
    """SIGSTOP: links stay, nothing answers."""
    POWER_OFF = "power off"
    """Or a pulled cable: nothing arrives, nobody is told."""


@dataclass(frozen=True, slots=True)
class Detection:
    """Seconds from the failure until the first, and until the last device declared it."""

    first_seconds: float
    last_seconds: float


def measure_detection(
    seed: int, devices: int, failure: Failure, build: Build | None = None
) -> Detection:
    """One household, one failure.

    Raises:
        AssertionError: somebody had not declared it after `HORIZON_SECONDS`, or anybody else
            was declared dead.
    """
    rng = Random(f"detection {seed} {devices} {failure}")
    household = _settled(rng, devices, build)
    victim = rng.choice(household.devices)
    observers = [device for device in household.devices if device is not victim]
    start = household.kernel.now
    _fail(victim, failure)
    declared: dict[str, float] = {}
    while len(declared) < len(observers):
        household.run_for(0.01)
        elapsed = household.kernel.now - start
        assert elapsed < HORIZON_SECONDS, f"seed {seed}: {victim.id} not declared by all"
        for device in observers:
            if device.membership.members[victim.id].state is MemberState.DEAD:
                declared.setdefault(device.id, elapsed)
    wrong = {who for _, who, _ in household.invariants.deaths} - {victim.id}
    assert not wrong, f"seed {seed}: {wrong} declared dead too"
    return Detection(min(declared.values()), max(declared.values()))


def _fail(victim: Device, failure: Failure) -> None:
    match failure:
        case Failure.KILL:
            victim.crash()
        case Failure.FREEZE:
            victim.freeze(10 * HORIZON_SECONDS)
        case Failure.POWER_OFF:
            victim.power_off()


def _settled(rng: Random, devices: int, build: Build | None) -> Household:
    household = Household(rng.getrandbits(64), devices, build)
    household.start_all()
    household.run_for(SETTLE_SECONDS + rng.random())
    disagreement = household.disagreement()
    assert disagreement is None, disagreement
    return household


@dataclass(frozen=True, slots=True)
class FreezeResult:
    """`anomalies` freezes of one device each; who was declared dead, or deposed, for it."""

    anomalies: int
    false_deaths: tuple[str, ...]
    elections: int


def measure_freezes(
    seed: int, devices: int, rounds: int = 10, build: Build | None = None
) -> FreezeResult:
    """In each round up to half of the devices freeze for 0.1 to 2 s, at different moments.

    All devices are busy: messages are delayed by up to some 50 ms. Nobody dies.
    """
    rng = Random(f"freezes {seed} {devices}")
    household = _settled(rng, devices, build)
    household.network.default_quality = LinkQuality(0.001, 0.01)
    elections = household.invariants.elections
    anomalies = 0
    for _ in range(rounds):
        chosen = rng.sample(household.devices, rng.randint(1, devices // 2))
        for device in chosen:
            seconds = rng.choice((rng.uniform(0.1, 2.0), 2.0))
            delay = rng.uniform(0, 2.2)
            household.kernel.after(delay, b"freeze", partial(device.freeze, seconds))
            anomalies += 1
        household.run_for(rng.uniform(4.3, 6.0))
    deaths = household.invariants.deaths
    false_deaths = tuple(f"{by} declared {who}: {reason}" for by, who, reason in deaths)
    return FreezeResult(anomalies, false_deaths, household.invariants.elections - elections)


def measure_slow_cable(
    seed: int, devices: int, build: Build | None = None, *, loses: bool = False, cables: int = 1
) -> tuple[str, ...]:
    """Who was declared dead while a cable was a hundred times slower than before, and full.

    What waits on it at either end takes up to five seconds then: 50 ms of what it carried before.

    Args:
        cables: so many, each device of which sends to the next.
        loses: what finds more waiting than the cable takes in 50 ms now is lost, and a tenth of
            all else.
    """
    rng = Random(f"slow cable {seed} {devices}")
    household = _settled(rng, devices, build)
    _slow_down(rng, household, loses, cables)
    household.run_for(25.0)
    household.network.speed_up()
    household.run_for(10.0)
    disagreement = household.disagreement()
    assert disagreement is None, disagreement
    return tuple(f"{by} {who}: {reason}" for by, who, reason in household.invariants.deaths)


def measure_freeze_on_a_slow_cable(seed: int, devices: int) -> float:
    """Seconds until all declare a device that froze soon after its cable became slow, and loses."""
    rng = Random(f"freeze on a slow cable {seed} {devices}")
    household = _settled(rng, devices, None)
    victim = _slow_down(rng, household, loses=True)
    household.run_for(rng.uniform(0.0, 3.0))
    victim.freeze(10 * HORIZON_SECONDS)
    household.network.end_data(victim.id)
    start = household.kernel.now
    observers = [device for device in household.devices if device is not victim]
    while any(o.membership.members[victim.id].state is not MemberState.DEAD for o in observers):
        household.run_for(0.1)
    return household.kernel.now - start


def _slow_down(rng: Random, household: Household, loses: bool, cables: int = 1) -> Device:
    mbit = rng.choice((0.2, 0.5, 1.0, 2.0))
    rate = mbit * 1e6 / 8
    piece = round(min(65_536, max(16_384, rate * 100 * 0.005)) / 2)
    waiting = round(rng.uniform(0.2, 1.0) * rate * 100 * 0.05)
    kept = max(2 * piece, 16_384)
    ring = rng.sample(household.devices, len(household.devices))
    slow, others = ring[:cables], ring[cables:]
    before, after = (rng.choice(others).id for _ in range(2))
    room = kept + round(0.05 * rate)
    how = Slowdown(rate, waiting, piece, kept, *((room, 0.1) if loses else ()))
    household.network.slow_down_row([device.id for device in slow], how, before, after)
    return slow[0]
