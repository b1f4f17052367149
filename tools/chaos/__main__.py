"""A household in which something goes wrong all the time. Needs root on Linux.

    python -m tools.chaos                      8 devices, a misfortune every 60 s, for 30 minutes
    python -m tools.chaos --every 15 --seconds 600
    python -m tools.chaos --devices 5 --every 12 --seconds 90 --calm 15
    python -m tools.chaos --seconds 125 --calm 20 -o width=512 -o layers=14 -o batch_size=64
    python -m tools.chaos --devices 5 --every 12 --seconds 48 --calm 5 --longest 7 --planner hybrid

Real processes in network namespaces (`tools/testbed`), each with a share of a core. Kills (the
device is started again), freezes and pulled cables in equal parts, of any device but the one with
the data. Bars: at least 85% of the undisturbed updates with one every 60 s or more; no 60 s without
a new one; the losses are those of one device alone, to the last bit, or, with planners that make
groups, in float64 within 1e-8; in a run of 10 minutes or more memory stays flat: no device has more
than 1.2 times as much in the last third as in the second.
Exit code 1 if one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from pathlib import Path

from p2ptrain.cli.planner_arguments import any_planner
from tools.chaos import Chaos, Outcome, Settings

SHARE_BAR = 0.85
PAUSE_BAR_SECONDS = 60.0
LOSS_TOLERANCE = 1e-8
"""Relative, in float64: groups add up in another order."""
GROWTH_BAR = 1.2
GROWTH_SECONDS = 600.0
"""In less time what a device takes that has just started says nothing."""


def main() -> int:
    """One run."""
    plain = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=plain.devices)
    parser.add_argument("--share", type=float, default=plain.share, help="of a core, each")
    parser.add_argument("--every", type=float, default=plain.every, help="seconds")
    parser.add_argument("--seconds", type=float, default=plain.seconds)
    parser.add_argument("--calm", type=float, default=plain.calm, help="seconds before")
    parser.add_argument("--longest", type=float, default=plain.longest, help="seconds of one")
    parser.add_argument("--seed", type=int, default=plain.seed)
    parser.add_argument("--planner", type=any_planner, default=plain.planner, help="of train")
    parser.add_argument(
        "-o",
        dest="job",
        action="append",
        metavar="KEY=VALUE",
        help=f"of the job, several times; default: {' '.join(plain.job)}",
    )
    args = parser.parse_args()
    args.job = args.job or plain.job
    settings = Settings(**vars(args))
    with tempfile.TemporaryDirectory(prefix="p2p-") as folder:
        outcome, alone = asyncio.run(_run(settings, Path(folder)))
    missed = problems(outcome, alone)
    _say(report(outcome))
    for words in missed:
        _say(f"MISSED: {words}")
    return 1 if missed else 0


async def _run(settings: Settings, folder: Path) -> tuple[Outcome, list[float]]:
    chaos = Chaos(settings, folder, _say)
    outcome = await chaos.run()
    return outcome, await chaos.reference(len(outcome.losses))


def problems(outcome: Outcome, alone: list[float]) -> list[str]:
    """The bars that were missed."""
    missed = [outcome.ended] if outcome.ended else []
    tolerance = 0.0 if outcome.settings.is_bit_by_bit else LOSS_TOLERANCE
    pairs = list(zip(outcome.losses, alone, strict=False))
    wrong = [k for k, (mine, its) in enumerate(pairs, 1) if not _is_near(mine, its, tolerance)]
    if wrong or len(outcome.losses) != len(alone):
        first = wrong[0] if wrong else len(pairs) + 1
        missed.append(f"the losses differ from step {first} on")
    if outcome.settings.every >= 60 and outcome.share < SHARE_BAR:
        missed.append(f"{outcome.share:.1%} of the undisturbed updates")
    if outcome.longest_pause > PAUSE_BAR_SECONDS:
        missed.append(f"{outcome.longest_pause:.0f} s without a new update")
    if outcome.settings.seconds < GROWTH_SECONDS:
        return missed
    growths = {device: outcome.growth(device) for device in outcome.memory}
    return missed + [
        f"memory of {device} grew to {growth:.2f} times"
        for device, growth in growths.items()
        if growth > GROWTH_BAR
    ]


def _is_near(mine: float, its: float, tolerance: float) -> bool:
    return math.isclose(mine, its, rel_tol=tolerance, abs_tol=0.0)


def report(outcome: Outcome) -> str:
    """The totals."""
    kinds = [misfortune.kind.value for misfortune in outcome.misfortunes]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    recoveries = sorted(outcome.recoveries)
    middle = recoveries[len(recoveries) // 2] if recoveries else 0.0
    growth = max((outcome.growth(device) for device in outcome.memory), default=1.0)
    return (
        f"{counted or 'nothing'} in {outcome.settings.seconds:.0f} s: {outcome.steps} updates, "
        f"{outcome.share:.1%} of the undisturbed ones; {len(outcome.failures)} devices lost, "
        f"{len(recoveries)} recoveries, p50 {middle:.2f} s, most {max(recoveries, default=0):.2f} "
        f"s; longest pause {outcome.longest_pause:.1f} s; memory {growth:.2f} times"
    )


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
