"""What the devices of a job have used."""

from __future__ import annotations

from pathlib import Path

from p2ptrain.api.train import LoneMesh
from p2ptrain.events import Done
from p2ptrain.holder.energy_counter import EnergyCounter, EnergyTally, with_energy
from p2ptrain.plan.types.job_facts import EnergyFacts
from p2ptrain.process.energy import EnergyMeter, EnergyReading

RAPL = ("its processor (RAPL)",)


def test_differences_count_and_a_process_that_began_again_does_from_zero() -> None:
    tally = EnergyTally()
    for joules in (100.0, 103.0, 1.0, 2.5):
        tally.add("laptop", EnergyReading(joules, RAPL))
    assert tally.use == (EnergyFacts("laptop", 5.5, "its processor (RAPL)"),)


def test_who_cannot_tell_is_named_and_the_others_are_counted() -> None:
    tally = EnergyTally()
    for joules in (0.0, 40.0):
        tally.add("laptop", EnergyReading(joules, RAPL))
        tally.add("pi", EnergyReading(None, (), "no counter"))
    done = with_energy(Done(5, 1.0, 80.0, None), tally.use, 80)
    assert (done.energy_joules, done.joules_per_sample) == (40.0, 0.5)
    assert done.energy_of == {"laptop": 40.0}
    assert done.energy_missing == {"pi": "no counter"}
    tally.add("pi", EnergyReading(3.0, RAPL))
    assert not any(one.why for one in tally.use)


def test_where_nobody_can_tell_there_is_no_number() -> None:
    tally = EnergyTally()
    tally.add("pi", EnergyReading(None, (), "no counter"))
    done = with_energy(Done(5, 1.0, 80.0, None), tally.use, 80)
    assert done.energy_joules is None
    assert done.joules_per_sample is None
    assert done.energy_missing == {"pi": "no counter"}


async def test_joules_and_samples_are_of_the_same_moment(tmp_path: Path) -> None:
    zone = tmp_path / "class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)

    def used(joules: int) -> None:
        files = {"name": "package-0", "energy_uj": joules * 10**6, "max_energy_range_uj": 10**9}
        for name, content in files.items():
            (zone / name).write_text(f"{content}\n")

    used(100)
    trained = 0
    counter = EnergyCounter(LoneMesh("laptop"), EnergyMeter(tmp_path), tuple, lambda: trained)
    await counter.fetch()
    trained = 90
    assert ([one.joules for one in counter.use], counter.samples) == ([0.0], 0)
    used(150)
    trained = 400
    await counter.fetch()
    trained = 800
    assert ([one.joules for one in counter.use], counter.samples) == ([50.0], 400)
