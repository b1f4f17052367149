"""Who may die where: every failpoint at every stage, and random moments, on devices in memory.

    python -m tools.failpoint_matrix                     all of them, some minutes
    python -m tools.failpoint_matrix --only change       those whose name has that in it
    python -m tools.failpoint_matrix --random 100        100 random kills instead
    python -m tools.failpoint_matrix --part 1/4          every fourth

For each: the final weights and buffers have the bits of the undisturbed run (with groups: float64
losses within 1e-8), so have losses and evaluations; steps are reported once, in order; the samples
of every plan continue behind the last committed update; `failure` is said once; epochs rise;
survivors keep no stage, no task, no error that was not retrieved. See
`tests/support/fault_checks.py`.

Prints a table: failpoint, and by the device that died (a: has the data, and is started again; b, c,
d: the stages; e: without work at first) in how many ways it was tried, or what went wrong. Exit
code 1 if anything did.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable, Sequence
from time import monotonic

import structlog
import torch

from tests.support.fault_checks import problems
from tests.support.fault_list import every_fault, random_fault
from tests.support.faults import Fault, Outcome, outcome_of, undisturbed

VICTIMS = "abcde"


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="failpoints with that in their name")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random kills instead")
    parser.add_argument("--seed", type=int, default=0, help="of the first random kill")
    parser.add_argument("--part", default="1/1", help="every n-th, from the m-th: m/n")
    args = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    part, parts = (int(number) for number in args.part.split("/"))
    faults = [fault for fault in every_fault() if args.only in fault.name][part - 1 :: parts]
    if args.random:
        faults = [random_fault(args.seed + number) for number in range(args.random)]
    started = monotonic()
    found = asyncio.run(_run(faults))
    _print_table(faults, found)
    wrong = sum(bool(left) for left in found)
    seconds = monotonic() - started
    sys.stdout.write(f"\n{len(faults)} faults, {wrong} with traces, {seconds:.0f} s\n")
    return 1 if wrong else 0


async def _run(faults: Sequence[Fault]) -> list[list[str]]:
    """What each has left a trace in."""
    wanted: dict[object, Outcome] = {}
    found = []
    for fault in faults:
        plan = (fault.stages, fault.places, fault.clips)
        if plan not in wanted:
            wanted[plan] = await undisturbed(fault)
        left = await _problems(fault, wanted[plan])
        if left:
            sys.stdout.write(f"{fault}: {'; '.join(left)}\n")
            sys.stdout.flush()
        found.append(left)
    return found


async def _problems(fault: Fault, wanted: Outcome) -> list[str]:
    try:
        return problems(await outcome_of(fault), wanted, fault)
    except Exception as error:  # a bug, and the next fault may find another
        return [f"{type(error).__name__}: {error}"]


def _print_table(faults: Sequence[Fault], found: Iterable[Sequence[str]]) -> None:
    cells: dict[str, dict[str, list[bool]]] = {}
    for fault, left in zip(faults, found, strict=True):
        for victim in [fault.victim] if fault.name else [name for _, _, name in fault.kills]:
            row = cells.setdefault(fault.name or "at any moment", {})
            row.setdefault(victim, []).append(not left)
    lines = ["| failpoint | " + " | ".join(VICTIMS) + " |", "|---|" + "---|" * len(VICTIMS)]
    for name, row in cells.items():
        counts = [_cell(row.get(victim, [])) for victim in VICTIMS]
        lines.append(f"| {name} | " + " | ".join(counts) + " |")
    sys.stdout.write("\n" + "\n".join(lines) + "\n")


def _cell(good: Sequence[bool]) -> str:
    if not good:
        return "-"
    return str(len(good)) if all(good) else f"{sum(good)} of {len(good)}"


if __name__ == "__main__":
    sys.exit(main())
