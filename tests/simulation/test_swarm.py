"""Safety and liveness of membership and election under faults, on a sample of seeds.

tools/simulate_mesh.py runs thousands.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.household import run_swarm
from tests.simulation.invariants import InvariantViolated
from tests.simulation.mutants import MUTANTS
from tests.support.thorough import examples_of

_ROOT = Path(__file__).resolve().parents[2]
_FAULT_SECONDS = 10.0


@pytest.mark.parametrize("first", range(0, examples_of(20), 10))
def test_households_survive_faults_and_agree_afterwards(first: int) -> None:
    for seed in range(first, first + 10):
        result = run_swarm(seed, fault_seconds=_FAULT_SECONDS)
        assert result.convergence_seconds <= 30.0


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_are_found(mutant: str) -> None:
    for seed in range(200):
        try:
            run_swarm(seed, MUTANTS[mutant], fault_seconds=20.0)
        except InvariantViolated:
            return
    pytest.fail(f"{mutant} survived 200 seeds")


def _hashes_of_another_process(hash_seed: str) -> str:
    script = (
        "from tests.simulation.household import run_swarm\n"
        "print([run_swarm(seed, fault_seconds=5.0).event_hash for seed in range(3)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_same_seed_gives_the_same_events_in_any_process() -> None:
    here = str([run_swarm(seed, fault_seconds=5.0).event_hash for seed in range(3)])
    assert _hashes_of_another_process("1") == _hashes_of_another_process("2") == here
