"""How long training stands still when a device dies. Real processes.

    python tools/recovery_times.py loopback --kills 20     3 stages on this machine
    python tools/recovery_times.py A --after 60            emulated, as root: light against heavy
    python tools/recovery_times.py F                       emulated, as root: light against respipe

    loopback   SIGKILL to a member's process until the next new step. Bars: 5 s (p50), 10 s (p95)
    A          100 Mbit/s, five devices: from the first sign to the first sample of the new plan,
               `--recovery light` against `heavy`; bar: 14 times faster. And samples a second after:
               at least 0.9 of heavy's
    F          two devices and one ten times slower: seconds of a step after one has died, `light`
               against `respipe`; bar: 6 times faster

The model has 29.4 million parameters and is trained with momentum. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.system.household import Device, Household
from tools.testbed import EmulatedDevice, Testbed
from tools.testbed import Household as EmulatedHousehold

SCRIPT = str(Path(__file__).parent / "recovery_times_job.py")
CODE = "48151623"
START_SECONDS = 200.0
RECOVERY_SECONDS = 240.0
STEPS_AFTER = 20
"""Steps that are timed once training continues, the first of them left out: the middle one counts,
as the first copies of the new plan are under way meanwhile."""
P50_BAR, P95_BAR = 5.0, 10.0
HEAVY_BAR, THROUGHPUT_BAR, RESPIPE_BAR = 14.0, 0.9, 6.0


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
    parser.add_argument("what", choices=["loopback", "A", "F"])
    parser.add_argument("--kills", type=int, default=20, help="of loopback")
    parser.add_argument("--repeats", type=int, default=1, help="of A and F")
    parser.add_argument("--after", type=float, default=20.0, help="seconds of training before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", action="append", default=[], help="-o of the job")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2p-") as folder:
        measure = {"loopback": _loopback, "A": _environment_a, "F": _environment_f}[args.what]
        return 0 if asyncio.run(measure(Path(folder), args)) else 1


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


# -- loopback ------------------------------------------------------------------------------------


async def _loopback(folder: Path, args: argparse.Namespace) -> bool:
    """Members stay from one kill to the next; the one that was killed is started again."""
    chance = random.Random(args.seed)
    found: list[Recovery] = []
    own = ("--code", CODE, "--interface", "127.0.0.1")
    async with Household(folder) as household:
        members = {name: await household.start(name, "join", *own) for name in ("b", "c")}
        while len(found) < args.kills:
            holder = await household.start("a", "train", *_job(args, 3, "light"), *own)
            await _trains(holder, chance.uniform(0.5, 1.5) * args.after)
            victim = chance.choice(sorted(members))
            found.append(await _recovery(holder, members[victim]))
            _say(f"{len(found):3} {victim}  {found[-1]}")
            holder.interrupt()
            await holder.exit_code(60)
            members[victim] = await household.start(victim, "join", *own)
    ordered = sorted(recovery.seconds for recovery in found)
    p50, p95 = (_quantile(ordered, share) for share in (0.5, 0.95))
    _say(f"{len(found)} kills: p50 {p50:.2f} s, p95 {p95:.2f} s, most {ordered[-1]:.2f} s")
    return p50 <= P50_BAR and p95 <= P95_BAR


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# -- emulated ------------------------------------------------------------------------------------


async def _environment_a(folder: Path, args: argparse.Namespace) -> bool:
    light, heavy = await _compared(folder, args, "A", "nano-3", ("light", "heavy"))
    ratio = _mean(heavy, "resumed_seconds") / _mean(light, "resumed_seconds")
    throughput = _step_seconds(heavy) / _step_seconds(light)
    _say(f"light resumes {ratio:.1f} times faster than heavy, with {throughput:.2f} of its speed")
    return ratio >= HEAVY_BAR and throughput >= THROUGHPUT_BAR


async def _environment_f(folder: Path, args: argparse.Namespace) -> bool:
    light, respipe = await _compared(folder, args, "F", "fast-2", ("light", "respipe"))
    ratio = _step_seconds(respipe) / _step_seconds(light)
    _say(f"a step after light is {ratio:.1f} times faster than after respipe")
    return ratio >= RESPIPE_BAR


async def _compared(
    folder: Path, args: argparse.Namespace, name: str, victim: str, ways: Sequence[str]
) -> list[list[Recovery]]:
    """By way, the recoveries; each in a household of its own, the ways in turn."""
    found: dict[str, list[Recovery]] = {way: [] for way in ways}
    for repeat in range(args.repeats):
        for way in ways:
            place = folder / f"{way}{repeat}"
            recovery = await _emulated(place, args, name, victim, way)
            found[way].append(recovery)
            _say(f"{way:8}{recovery}")
    return [found[way] for way in ways]


async def _emulated(
    folder: Path, args: argparse.Namespace, name: str, victim: str, way: str
) -> Recovery:
    with ExitStack() as stack:
        testbed = stack.enter_context(Testbed(EmulatedHousehold.load(name)))
        prefixes = {device.name: device.prefix() for device in testbed.devices}
        async with Household(folder, prefixes) as household:
            holder_device, *others = testbed.devices
            for device in testbed.devices:
                device.lift()  # while torch is loaded
            members = {
                device.name: await household.start(device.name, "join", "--code", CODE)
                for device in others
            }
            for member in members.values():
                await member.expect("ready", START_SECONDS)
            for device in others:
                device.limit()  # what they are measured with is what they train with
            job = _job(args, len(testbed.devices), way)
            holder = await household.start(holder_device.name, "train", *job, "--code", CODE)
            await holder.expect("member", START_SECONDS)
            for device in testbed.devices:
                device.limit()
            await _trains(holder, args.after)
            return await _recovery(holder, members[victim], testbed[victim])


def _job(args: argparse.Namespace, devices: int, way: str) -> list[str]:
    options = [word for option in args.option for word in ("-o", option)]
    return [
        *(SCRIPT, *options, "--wait-for", str(devices), "--planner", "pp"),
        *("--recovery", way),
    ]


async def _trains(holder: Device, seconds: float) -> None:
    """So long after its first step, with one more step at least."""
    await holder.expect("step", START_SECONDS, step=2)
    await asyncio.sleep(seconds)
    await holder.expect("step", START_SECONDS, since=len(holder.said))


async def _recovery(
    holder: Device, victim: Device, emulated: EmulatedDevice | None = None
) -> Recovery:
    """Kill, wait until training continues, and time some steps."""
    last = holder.events("step")[-1]["step"]
    killed_at = monotonic()
    if emulated is not None:
        emulated.kill()
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


def _mean(found: Sequence[Recovery], key: str) -> float:
    return mean(recovery.event[key] for recovery in found)


def _step_seconds(found: Sequence[Recovery]) -> float:
    return mean(recovery.step_seconds for recovery in found)


if __name__ == "__main__":
    sys.exit(main())
