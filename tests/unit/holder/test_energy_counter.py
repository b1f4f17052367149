"""What the devices of a job have used."""

from __future__ import annotations

from p2ptrain.events import Done
from p2ptrain.holder.energy_counter import EnergyTally, with_energy
from p2ptrain.process.energy import EnergyReading

RAPL = ("its processor (RAPL)",)


def test_differences_count_and_a_process_that_began_again_does_from_zero() -> None:
    tally = EnergyTally()
    for joules in (100.0, 103.0, 1.0, 2.5):
        tally.add("laptop", EnergyReading(joules, RAPL))
    assert tally.use.joules == {"laptop": 5.5}
    assert tally.use.sources == {"laptop": "its processor (RAPL)"}


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
    assert not tally.use.missing


def test_where_nobody_can_tell_there_is_no_number() -> None:
    tally = EnergyTally()
    tally.add("pi", EnergyReading(None, (), "no counter"))
    done = with_energy(Done(5, 1.0, 80.0, None), tally.use, 80)
    assert done.energy_joules is None
    assert done.joules_per_sample is None
    assert done.energy_missing == {"pi": "no counter"}
