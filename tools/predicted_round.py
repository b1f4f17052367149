"""Predicted against measured seconds of a round, on emulated households. Needs root, Linux.

    python tools/predicted_round.py [--only NAME,NAME] [--steps 15] [--repeat 3]

Every device has its own network namespace, cable, CPU and share of that CPU. Each setting starts
one household and trains with several micro-batch sizes; what `train` predicts is held against the
median time of its steps, the first two left out.

Two kinds of settings, for what an emulated device can and cannot be (`tools/testbed/quota.py`):
whole cores with small pieces, where messages count; and shares of cores with pieces of tens of
milliseconds, as shorter ones take less than on a device that is really so slow.

The last column is the machine's load average. Profiling and training are seconds to minutes apart,
so a machine that others use at the same time shows their comings and goings as errors.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.system.household import Device, Household  # noqa: E402
from tools.testbed import Testbed  # noqa: E402

CODE = "24681357"
START_SECONDS = 120.0
WARM_STEPS = 2
JOB = str(ROOT / "tools" / "predicted_round_job.py")


@dataclass(frozen=True, slots=True)
class Setting:
    """One household and what it trains.

    Attributes:
        shares: of a core, the holder's first.
        rate: of every cable, as tc writes it.
        micro_batches: sizes, one run each.
    """

    name: str
    shares: tuple[float, ...]
    rate: str
    model: str
    batch_size: int
    micro_batches: tuple[int, ...]
    planner: str = "pp"


SETTINGS = (
    Setting("whole-mlp", (1.0, 1.0), "1gbit", "mlp", 256, (16, 64)),
    Setting("whole-cnn", (1.0, 1.0), "1gbit", "cnn", 128, (8, 32)),
    Setting("whole-transformer", (1.0, 1.0), "100mbit", "transformer", 128, (8, 32)),
    Setting("two", (0.6, 0.3), "1gbit", "mlp", 1024, (64, 256)),
    Setting("two-slow-link", (0.6, 0.4), "100mbit", "cnn", 512, (32, 128)),
    Setting("three", (0.4, 0.3, 0.3), "1gbit", "cnn", 512, (32, 128)),
    Setting("three-slow-link", (0.5, 0.3, 0.2), "100mbit", "transformer", 512, (32, 128)),
    Setting("four", (0.4, 0.25, 0.25, 0.25), "1gbit", "transformer", 512, (32, 128)),
    Setting("four-slow-link", (0.4, 0.25, 0.25, 0.25), "100mbit", "mlp", 1024, (64, 256)),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One run.

    Attributes:
        load: of the machine, over the minute that ends with the run.
    """

    setting: str
    plan: str
    predicted_seconds: float
    measured_seconds: float
    load: float

    @property
    def ratio(self) -> float:
        """Predicted by measured."""
        return self.predicted_seconds / self.measured_seconds


async def measure(setting: Setting, steps: int, folder: Path) -> list[Row]:
    """Start the setting's household and train once a micro-batch size."""
    with Testbed.of_shares(setting.shares, setting.rate) as testbed:
        prefixes = {device.name: device.prefix() for device in testbed.devices}
        async with Household(folder, prefixes) as household:
            starting = Starting(household, testbed)
            await asyncio.gather(*(starting.join(device.name) for device in testbed.devices[1:]))
            return [await _train(starting, setting, size, steps) for size in setting.micro_batches]


class Starting:
    """Starts devices with a whole core, and leaves them their share once they are ready."""

    def __init__(self, household: Household, testbed: Testbed) -> None:
        self._household = household
        self._testbed = testbed

    async def join(self, name: str) -> Device:
        """Start a member."""
        return await self._start(name, "join", "--code", CODE)

    async def train(self, *arguments: str) -> Device:
        """Start the holder."""
        wait = ("--wait-for", str(len(self._testbed.devices)), "--code", CODE)
        return await self._start(self._testbed.devices[0].name, "train", JOB, *wait, *arguments)

    async def _start(self, name: str, command: str, *arguments: str) -> Device:
        self._testbed[name].lift()
        places = {"PYTHONPATH": str(ROOT)}  # the job takes a part of a model from the tests
        device = await self._household.start(name, command, *arguments, environment=places)
        await device.expect("ready", START_SECONDS)
        self._testbed[name].limit()
        return device


async def _train(starting: Starting, setting: Setting, size: int, steps: int) -> Row:
    holder = await starting.train(
        *("-o", f"model={setting.model}", "--fresh"),
        *("--batch-size", str(setting.batch_size), "--micro-batch", str(size)),
        *("--planner", setting.planner, "--steps", str(steps + WARM_STEPS)),
    )
    await holder.succeed(START_SECONDS)
    return _row(setting, holder)


def _row(setting: Setting, holder: Device) -> Row:
    plan = holder.events("plan")[0]
    stages = " ".join(
        f"{stage['devices'][0]['name'][-1]}:{stage['units'][0]}-{stage['units'][1]}"
        for stage in plan["stages"]
    )
    return Row(
        setting=setting.name,
        plan=f"{stages} x{plan['micro_batch']}",
        predicted_seconds=setting.batch_size / plan["predicted_samples_per_s"],
        measured_seconds=statistics.median(
            step["seconds"] for step in holder.events("step")[WARM_STEPS:]
        ),
        load=os.getloadavg()[0],
    )


def report(rows: list[Row]) -> str:
    """The table, and the median error in its last line."""
    lines = [
        f"{'setting':16} {'plan':40} {'predicted':>10} {'measured':>10} {'ratio':>6} {'load':>5}"
    ]
    lines += [
        f"{row.setting:16} {row.plan:40} {row.predicted_seconds:9.3f}s "
        f"{row.measured_seconds:9.3f}s {row.ratio:6.2f} {row.load:5.1f}"
        for row in rows
    ]
    error = statistics.median(abs(row.ratio - 1) for row in rows)
    return "\n".join([*lines, f"median of |ratio - 1|: {error:.3f}"])


async def measure_all(settings: list[Setting], steps: int) -> list[Row]:
    """One setting after the other."""
    rows = []
    for setting in settings:
        with tempfile.TemporaryDirectory() as folder:
            rows += await measure(setting, steps, Path(folder))
        print(f"{setting.name} done", file=sys.stderr)
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of settings, separated by commas")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeat", type=int, default=1, help="times that each setting is run")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",") if arguments.only else [s.name for s in SETTINGS]
    chosen = [setting for setting in SETTINGS if setting.name in wanted]
    chosen *= arguments.repeat
    print(report(asyncio.run(measure_all(chosen, arguments.steps))))


if __name__ == "__main__":
    main()
