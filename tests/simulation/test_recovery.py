"""Recovery under faults, on a sample of seeds; tools/simulate_recovery.py runs thousands."""

from __future__ import annotations

import pytest

from tests.simulation.recovery.mutants import MUTANTS
from tests.simulation.recovery.run import run_seed
from tests.simulation.recovery.truth import InvariantViolated
from tests.support.thorough import examples_of


@pytest.mark.parametrize("first", range(0, examples_of(20), 10))
def test_training_survives_faults_and_is_never_silently_wrong(first: int) -> None:
    for seed in range(first, first + 10):
        result = run_seed(seed, fault_seconds=60.0)
        assert result.ended is not None or result.resumed_seconds <= 30.0


@pytest.mark.parametrize("seed", [20162, 3308])
def test_training_goes_on_where_news_of_the_holders_end_or_of_others_comes_late(seed: int) -> None:
    """A restarted holder that was alone in its plan; one that begins before its end is known."""
    assert run_seed(seed, fault_seconds=60.0).ended is None


FOUND = {
    "AppliesInAnyGeneration": 22,
    "ReadsAnyVersion": 3,
    "AcknowledgesEarly": 42,
    "SendsTheNewest": 22,
    "RollsForwardAlone": 21,
    "AnswersWithoutStopping": 731,
    "MixesHistories": 137,
    "ReusesGenerationNumbers": 124,
    "TrustsTheFirst": 566,
    "DropsTooEarly": 276,
    "CommitsFirst": 76,
    "ForgetsWhenParked": 42,
}
"""Seeds that showed them; where the simulator has changed since, others are looked for."""

RARE = {"AnswersWithoutStopping", "MixesHistories", "ReusesGenerationNumbers"}
"""They need more misfortunes than twenty seconds hold."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_are_found(mutant: str) -> None:
    seconds = 60.0 if mutant in RARE else 20.0
    for seed in (FOUND.get(mutant, 0), *range(1000)):
        try:
            run_seed(seed, MUTANTS[mutant], fault_seconds=seconds)
        except InvariantViolated:
            return
    pytest.fail(f"{mutant} survived 1000 seeds")


def test_the_same_seed_gives_the_same_events() -> None:
    first, again = (run_seed(7, fault_seconds=10.0) for _ in range(2))
    assert first == again
