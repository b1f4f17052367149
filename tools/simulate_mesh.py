"""Run thousands of simulated households: python -m tools.simulate_mesh --seeds 1000

    swarm       faults of every kind, invariants after every event, then convergence
    detection   how soon a killed, frozen or unplugged device is declared dead
    freezes     devices frozen for up to two seconds: none may be declared dead; the same without
                local health, to show that the rule is needed
    crowd       a hundred members, and a thousand: what each sends, and how soon all know of a death
                (two seeds at most: minutes each)

A seed that fails is printed with its last faults; `--first SEED --seeds 1` plays it again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from p2ptrain.mesh.membership.membership_config import MembershipConfig
from tests.simulation.crowd import measure_crowd
from tests.simulation.detection import (
    Detection,
    Failure,
    FreezeResult,
    measure_detection,
    measure_freezes,
)
from tests.simulation.device import Build
from tests.simulation.household import SwarmResult, run_swarm
from tests.simulation.invariants import InvariantViolated

_SIZES = (2, 3, 4, 5, 6, 8)


def main() -> int:
    """Run what was asked for; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds of each kind")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=40.0, help="simulated seconds of faults")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    kinds = ("swarm", "detection", "freezes", "crowd")
    parser.add_argument("--only", choices=kinds, help="one kind instead of all")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = {
            "swarm": lambda: _swarm(pool, seeds, options.seconds),
            "detection": lambda: _detection(pool, seeds),
            "freezes": lambda: _freezes(pool, seeds),
            "crowd": lambda: _crowd(pool, seeds[:2]),
        }
        chosen = [options.only] if options.only else list(runs)
        results = [runs[kind]() for kind in chosen]
    return 0 if all(results) else 1


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _swarm(pool: ProcessPoolExecutor, seeds: range, seconds: float) -> bool:
    results: list[SwarmResult] = []
    failed = 0
    for outcome in pool.map(partial(_try_swarm, seconds=seconds), seeds, chunksize=4):
        if isinstance(outcome, str):
            failed += 1
            print(outcome)
        else:
            results.append(outcome)
    print(f"swarm: {len(seeds)} seeds, {failed} failed")
    if results:
        print(f"  events {sum(r.events for r in results)}, faults {sum(r.faults for r in results)}")
        print(f"  agreement after the faults {_spread([r.convergence_seconds for r in results])}")
    return not failed


def _try_swarm(seed: int, seconds: float) -> SwarmResult | str:
    try:
        return run_swarm(seed, fault_seconds=seconds)
    except InvariantViolated as violation:
        return str(violation)


def _detection(pool: ProcessPoolExecutor, seeds: range) -> bool:
    good = True
    for failure in Failure:
        for size in _SIZES:
            measure = partial(measure_detection, devices=size, failure=failure)
            found: list[Detection] = list(pool.map(measure, seeds, chunksize=4))
            last = [detection.last_seconds for detection in found]
            print(f"{failure}, {size} devices: declared by all after {_spread(last)}")
            good &= max(last) < (0.25 if failure is Failure.KILL else 5.0)
    return good


def _freezes(pool: ProcessPoolExecutor, seeds: range) -> bool:
    with_rule = _count_freezes(pool, seeds, local_health=True)
    without = _count_freezes(pool, seeds, local_health=False)
    return with_rule == 0 and without > 0


def _count_freezes(pool: ProcessPoolExecutor, seeds: range, *, local_health: bool) -> int:
    build = Build(membership_config=MembershipConfig(local_health=local_health))
    results = list(_freeze_results(pool, seeds, build))
    deaths = sum(len(result.false_deaths) for result in results)
    freezes = sum(result.anomalies for result in results)
    elections = sum(result.elections for result in results)
    rule = "with" if local_health else "without"
    print(f"{freezes} freezes {rule} local health: {deaths} false deaths, {elections} elections")
    return deaths


def _freeze_results(
    pool: ProcessPoolExecutor, seeds: range, build: Build
) -> Iterator[FreezeResult]:
    for size in _SIZES[1:]:
        yield from pool.map(partial(measure_freezes, devices=size, build=build), seeds)


def _crowd(pool: ProcessPoolExecutor, seeds: range) -> bool:
    tasks = [(seed, count) for count in (100, 1000) for seed in seeds]
    results = list(pool.map(measure_crowd, *zip(*tasks, strict=True)))
    for result in results:
        print(
            f"{result.members} members: {result.quiet:.2f} messages a member and second,", end=" "
        )
        print(f"{result.dying:.2f} around a death, known to all in {result.agreed_seconds:.1f} s")
    small, large = (
        [result.quiet for result in results if result.members == count] for count in (100, 1000)
    )
    even = max(large) <= 1.1 * min(small) and min(large) >= 0.9 * max(small)
    return even and max(result.agreed_seconds for result in results) <= 10.0


def _spread(values: list[float]) -> str:
    ordered = sorted(values)
    p50, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    return f"p50 {p50:.2f} s, p99 {p99:.2f} s, max {ordered[-1]:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
