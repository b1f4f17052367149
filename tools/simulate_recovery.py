"""Run thousands of simulated jobs under faults: python -m tools.simulate_recovery --seeds 1000

    jobs      devices die, freeze, lose links, come back; the holder and the coordinator too.
              Invariants after every event, then no faults, and training must go on
    mutants   planted bugs: how many seeds it takes to find each

A seed that fails is printed with its last faults; `--first SEED --seeds 1` plays it again.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.recovery.mutants import MUTANTS
from tests.simulation.recovery.run import Result, run_seed
from tests.simulation.recovery.truth import InvariantViolated


def main() -> int:
    """Run what was asked for; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated seconds of faults")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", choices=("jobs", "mutants"), help="one kind instead of both")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = {
            "jobs": partial(_jobs, pool, seeds, options.seconds),
            "mutants": partial(_mutants, pool, seeds, options.seconds),
        }
        chosen = [options.only] if options.only else list(runs)
        results = [runs[kind]() for kind in chosen]
    return 0 if all(results) else 1


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _jobs(pool: ProcessPoolExecutor, seeds: range, seconds: float) -> bool:
    results: list[Result] = []
    for outcome in pool.map(partial(_try_job, seconds=seconds), seeds, chunksize=4):
        if isinstance(outcome, str):
            print(outcome, flush=True)
        else:
            results.append(outcome)
    print(f"jobs: {len(seeds)} seeds, {len(seeds) - len(results)} failed")
    ends = Counter("goes on" if r.ended is None else r.ended.split(" ")[0] for r in results)
    print(f"  steps {sum(r.steps for r in results)}, faults {sum(r.faults for r in results)}")
    print(f"  events {sum(r.events for r in results)}, ends {dict(ends)}")
    return len(results) == len(seeds)


def _try_job(seed: int, seconds: float) -> Result | str:
    try:
        return run_seed(seed, fault_seconds=seconds)
    except InvariantViolated as violation:
        return str(violation)


def _mutants(pool: ProcessPoolExecutor, seeds: range, seconds: float) -> bool:
    find = partial(_find, seeds=seeds, seconds=seconds)
    found = dict(zip(MUTANTS, pool.map(find, MUTANTS), strict=True))
    for mutant, seed in found.items():
        print(f"{mutant}: " + ("not found" if seed is None else f"found by seed {seed}"))
    return all(seed is not None for seed in found.values())


def _find(mutant: str, seeds: range, seconds: float) -> int | None:
    for seed in seeds:
        try:
            run_seed(seed, MUTANTS[mutant], fault_seconds=seconds)
        except InvariantViolated:
            return seed
    return None


if __name__ == "__main__":
    sys.exit(main())
