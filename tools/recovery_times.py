"""How long training stands still when a device dies. Real processes.

    python -m tools.recovery_times --kills 20

Three stages on this machine: from SIGKILL to a member's process until the next new step. Bars: 5 s
(p50), 10 s (p95). The model has 29.4 million parameters and is trained with momentum. Exit code 1
if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from tests.system.household import Device, Household
from tools.detection.trials import quantile

SCRIPT = str(Path(__file__).parent / "recovery_times_job.py")
CODE = "48151623"
START_SECONDS = 200.0
RECOVERY_SECONDS = 240.0
STEPS_AFTER = 20
"""Steps that are timed once training continues, the first of them left out: the middle one counts,
as the first copies of the new plan are under way meanwhile."""
P50_BAR, P95_BAR = 5.0, 10.0


@dataclass(frozen=True)
class Recovery:
    """One death.

    Attributes:
        seconds: from the kill to the next new step.
        event: `recovered`.
        step_seconds: of the steps after it, the middle one.
        plans: before and after, to be printed.
    """

    seconds: float
    event: Mapping[str, Any]
    step_seconds: float
    plans: tuple[str, str]

    def __str__(self) -> str:
        event = self.event
        return (
            f"{self.seconds:6.2f} s to the next new step, {event['resumed_seconds']:6.2f} s to the "
            f"first sample, {event['planning_seconds']:5.2f} s planning, "
            f"{event['moved_bytes'] / 1e6:6.1f} MB moved, {event['replayed_steps']:3} steps again, "
            f"then {self.step_seconds:.3f} s a step ({' -> '.join(self.plans)})"
        )


def main() -> int:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--after", type=float, default=20.0, help="seconds of training before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", action="append", default=[], help="-o of the job")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2p-") as folder:
        return 0 if asyncio.run(_measure(Path(folder), args)) else 1


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


async def _measure(folder: Path, args: argparse.Namespace) -> bool:
    """Members stay from one kill to the next; the one that was killed is started again."""
    chance = random.Random(args.seed)
    found: list[Recovery] = []
    own = ("--code", CODE, "--interface", "127.0.0.1")
    options = [word for option in args.option for word in ("-o", option)]
    job = (SCRIPT, *options, "--wait-for", "3", "--planner", "pp")
    async with Household(folder) as household:
        members = {name: await household.start(name, "join", *own) for name in ("b", "c")}
        while len(found) < args.kills:
            holder = await household.start("a", "train", *job, *own)
            await _trains(holder, chance.uniform(0.5, 1.5) * args.after)
            victim = chance.choice(sorted(members))
            found.append(await _recovery(holder, members[victim]))
            _say(f"{len(found):3} {victim}  {found[-1]}")
            holder.interrupt()
            await holder.exit_code(60)
            members[victim] = await household.start(victim, "join", *own)
    ordered = sorted(recovery.seconds for recovery in found)
    p50, p95 = (quantile(ordered, share) for share in (0.5, 0.95))
    _say(f"{len(found)} kills: p50 {p50:.2f} s, p95 {p95:.2f} s, most {ordered[-1]:.2f} s")
    return p50 <= P50_BAR and p95 <= P95_BAR


async def _trains(holder: Device, seconds: float) -> None:
    """So long after its first step, with one more step at least."""
    await holder.expect("step", START_SECONDS, step=2)
    await asyncio.sleep(seconds)
    await holder.expect("step", START_SECONDS, since=len(holder.said))


async def _recovery(holder: Device, victim: Device) -> Recovery:
    """Kill, wait until training continues, and time some steps."""
    last = holder.events("step")[-1]["step"]
    killed_at = monotonic()
    await victim.kill()
    event = await holder.expect("recovered", RECOVERY_SECONDS)
    seconds = monotonic() - killed_at
    await holder.expect("step", RECOVERY_SECONDS, step=last + STEPS_AFTER + 2)
    after = [said["seconds"] for said in holder.events("step") if said["step"] > last + 2]
    seen = holder.events("plan")
    at = next(i for i, plan in enumerate(seen) if plan["reason"] == "failure")
    plans = (_units(seen[at - 1]), _units(seen[at]))
    return Recovery(seconds, event, median(after[:STEPS_AFTER]), plans)


def _units(plan: Mapping[str, Any]) -> str:
    """How many units each device has, in the order of the stages."""
    parts = []
    for stage in plan["stages"]:
        names = "+".join(device["name"] for device in stage["devices"])
        parts.append(f"{names} {stage['units'][1] - stage['units'][0]}")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
