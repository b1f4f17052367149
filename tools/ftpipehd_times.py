"""FTPipeHD against PipeDream and ResPipe: two devices and one ten times slower (household F).

    python tools/ftpipehd_times.py predict     by the simulator, from a profile measured here
    python tools/ftpipehd_times.py speed       as root: seconds of a mini-batch by either planner
    python tools/ftpipehd_times.py death       as root: after one of the two fast devices has died

    speed   `--mode async --planner ftpipehd`, once it has cut the model again, against
            `--planner pipedream`. Published 6.8 times as fast; bar: 6
    death   `--recovery light` against `respipe`, bar: 6 times as fast; and against the two
            survivors started by themselves, bar: within 10%

MobileNetV2 (`tools/bench/models`), real processes. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from p2ptrain.plan.replan.baselines import respipe  # noqa: E402
from p2ptrain.plan.simulation.simulate import simulate  # noqa: E402
from p2ptrain.plan.types.cluster import Cluster, ClusterLink  # noqa: E402
from p2ptrain.plan.types.cluster import ClusterDevice as Planned  # noqa: E402
from p2ptrain.plan.types.plan import Plan  # noqa: E402
from p2ptrain.plan.types.profile import Profile  # noqa: E402
from p2ptrain.plan.types.request import PlanMode, PlanRequest  # noqa: E402
from p2ptrain.tiling.planning.make_plan import make_plan  # noqa: E402
from tests.system.household import Device, Household  # noqa: E402
from tools.testbed import Household as EmulatedHousehold  # noqa: E402
from tools.testbed import Testbed  # noqa: E402

SCRIPT = ROOT / "tools" / "bench" / "models" / "mobilenetv2.py"
CODE = "48151623"
VICTIM = "fast-2"
START_SECONDS = 200.0
WIRE_PART = 0.95
FIRST_REPARTITION = 10
WARM_STEPS, COUNTED_STEPS = 4, 12
SPEED_BAR, RESPIPE_BAR, SURVIVORS_BAR = 6.0, 6.0, 1.1


def main() -> int:
    """Do what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["predict", "speed", "death"])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=COUNTED_STEPS, help="that count")
    parser.add_argument("--only", help="of death: light, respipe or survivors alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2p-") as folder:
        if args.what == "predict":
            return _predict(Path(folder), args.batch_size)
        measure = _speed if args.what == "speed" else _death
        return 0 if asyncio.run(measure(Path(folder), args)) else 1


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


# -- predicted -----------------------------------------------------------------------------------


def _predict(folder: Path, batch_size: int) -> int:
    profile = _profile(folder, batch_size)
    household = EmulatedHousehold.load("F")
    cluster = _cluster(household, [device.name for device in household.devices])
    plans = {name: _planned(profile, cluster, name, batch_size) for name in _PLANNERS}
    for name, plan in plans.items():
        _say(_told(name, plan, profile, cluster))
    slow, fast = (plans[name].predicted.samples_per_s for name in _PLANNERS)
    _say(f"ftpipehd is {fast / slow:.2f} times as fast as pipedream")
    left = _cluster(household, [d.name for d in household.devices if d.name != VICTIM])
    request = _request(batch_size, "ftpipehd")
    after = _planned(profile, left, "ftpipehd", batch_size)
    handed = respipe(profile, cluster, plans["ftpipehd"], request, dead=[VICTIM]).plan
    _say(_told("survivors", after, profile, left))
    _say(_told("respipe", handed, profile, left))
    ratio = after.predicted.samples_per_s / handed.predicted.samples_per_s
    _say(f"cut again it is {ratio:.2f} times as fast as after respipe")
    return 0


_PLANNERS = ("pipedream", "ftpipehd")


def _request(batch_size: int, planner: str) -> PlanRequest:
    return PlanRequest(batch_size, planner=planner, mode=PlanMode.ASYNC, groups=False)


def _planned(profile: Profile, cluster: Cluster, planner: str, batch_size: int) -> Plan:
    return make_plan(profile, cluster, _request(batch_size, planner))


def _told(name: str, plan: Plan, profile: Profile, cluster: Cluster) -> str:
    seconds = plan.micro_batch / simulate(plan, profile, cluster).samples_per_s
    cut = ", ".join(f"{s.devices[0].name} {s.units[1] - s.units[0]}" for s in plan.stages)
    return f"{name:10}{seconds:7.3f} s a mini-batch, units: {cut}"


def _profile(folder: Path, batch_size: int) -> Profile:
    """Of one whole core of this machine."""
    out = folder / "profile.json"
    job = [str(SCRIPT), "-o", f"batch_size={batch_size}", "--out", str(out)]
    command = [sys.executable, "-m", "p2ptrain", "profile", *job, "--threads", "1"]
    subprocess.run([*command, "--batch-sizes", str(batch_size)], check=True, cwd=ROOT)
    return Profile.from_json(json.loads(out.read_text()), "profile")


def _cluster(household: EmulatedHousehold, names: Sequence[str]) -> Cluster:
    devices = [
        Planned(device.name, device.memory_bytes or 1 << 32, 1 / device.cores)
        for device in household.devices
        if device.name in names
    ]
    devices[0] = replace(devices[0], holder=True)
    rate = min(device.rate_mbit or 1000.0 for device in household.devices)
    return Cluster(tuple(devices), ClusterLink(WIRE_PART * rate * 1e6 / 8, 0.0005))


# -- measured ------------------------------------------------------------------------------------


async def _speed(folder: Path, args: argparse.Namespace) -> bool:
    found = {}
    for planner in _PLANNERS:
        async with _Running(folder / planner, planner, args, ["--planner", planner]) as running:
            found[planner] = await running.step_seconds(args.steps)
    ratio = found["pipedream"] / found["ftpipehd"]
    _say(f"ftpipehd is {ratio:.2f} times as fast as pipedream (bar {SPEED_BAR})")
    return ratio >= SPEED_BAR


async def _death(folder: Path, args: argparse.Namespace) -> bool:
    ways = [args.only] if args.only else ["light", "respipe", "survivors"]
    found: dict[str, float] = {}
    for way in ways:
        more = ["--planner", "ftpipehd"]
        alone = way == "survivors"
        more += [] if alone else ["--recovery", way]
        async with _Running(folder / way, way, args, more, without=alone) as running:
            found[way] = await running.step_seconds(args.steps)
            if not alone:
                found[way] = await running.after_death(args.steps)
    if args.only:
        return True
    ratio, lost = found["respipe"] / found["light"], found["light"] / found["survivors"]
    _say(f"light is {ratio:.2f} times as fast as respipe (bar {RESPIPE_BAR})")
    _say(f"and takes {lost:.2f} of what the survivors take by themselves (bar {SURVIVORS_BAR})")
    return ratio >= RESPIPE_BAR and lost <= SURVIVORS_BAR


class _Running:
    """A job in an emulated household, from its first device's start to its end.

    Args:
        name: to be printed.
        more: options of `train`.
        without: leave the victim out from the beginning.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        args: argparse.Namespace,
        more: Sequence[str],
        *,
        without: bool = False,
    ) -> None:
        self._name, self._args, self._more = name, args, more
        self._without = without
        self._folder = folder
        self._stack = ExitStack()
        self._holder: Device
        self._members: dict[str, Device] = {}

    async def __aenter__(self) -> _Running:
        self._testbed = self._stack.enter_context(Testbed(EmulatedHousehold.load("F")))
        gone = [VICTIM] if self._without else []
        devices = [device for device in self._testbed.devices if device.name not in gone]
        prefixes = {device.name: device.prefix() for device in devices}
        self._household = Household(self._folder, prefixes)
        for device in devices:
            device.lift()  # while torch is loaded
        begun = monotonic()
        for device in devices[1:]:
            member = await self._household.start(device.name, "join", "--code", CODE)
            self._members[device.name] = member
        for member in self._members.values():
            await member.expect("ready", START_SECONDS)
        job = [str(SCRIPT), "-o", f"batch_size={self._args.batch_size}", *self._more]
        wait = ["--mode", "async", "--wait-for", str(len(devices)), "--code", CODE]
        own = {"PYTHONPATH": str(ROOT)}
        self._holder = await self._household.start(
            devices[0].name, "train", *job, *wait, environment=own
        )
        await self._holder.expect("member", START_SECONDS)
        for device in devices:
            device.limit()  # what they are measured with is what they train with
        await self._holder.expect("step", START_SECONDS, step=1)
        _say(f"{self._name}: the first step after {monotonic() - begun:.0f} s")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._household.__aexit__(None, None, None)
        self._stack.close()

    async def step_seconds(self, count: int) -> float:
        """Of so many steps of the plan that it has come to."""
        if "ftpipehd" in self._more:
            await self._holder.expect("plan", START_SECONDS, reason="drift")
        return await self._timed(self._name, count)

    async def after_death(self, count: int) -> float:
        """The same after one device has died."""
        killed_at = monotonic()
        self._testbed[VICTIM].kill()
        await self._members[VICTIM].kill()
        event = await self._holder.expect("recovered", START_SECONDS)
        seconds = monotonic() - killed_at
        figures = ", ".join(f"{key} {event[key]:.4g}" for key in _OF_RECOVERY)
        _say(f"{self._name}: {seconds:.1f} s to the next new step; {figures}")
        return await self._timed(f"{self._name}, then", count)

    async def _timed(self, name: str, count: int) -> float:
        """Median of so many steps of the newest plan, those that fill the pipeline left out."""
        plan = next(said for said in reversed(self._holder.said) if said["event"] == "plan")
        at = self._holder.said.index(plan)
        before = [said["step"] for said in self._holder.said[:at] if said["event"] == "step"]
        first = max(before, default=0) + WARM_STEPS
        await self._holder.expect("step", START_SECONDS, step=first + count)
        steps = [said for said in self._holder.events("step") if said["step"] > first]
        seconds = median(step["seconds"] for step in steps[:count])
        predicted = self._args.batch_size / plan["predicted_samples_per_s"]
        _say(f"{name}: {seconds:.3f} s a step, predicted {predicted:.3f} ({_units(plan)})")
        return seconds


_OF_RECOVERY = ("seconds", "resumed_seconds", "planning_seconds", "moved_bytes", "replayed_steps")


def _units(plan: Mapping[str, Any]) -> str:
    """How many units each device has, in the order of the stages."""
    return ", ".join(
        f"{stage['devices'][0]['name']} {stage['units'][1] - stage['units'][0]}"
        for stage in plan["stages"]
    )


if __name__ == "__main__":
    sys.exit(main())
