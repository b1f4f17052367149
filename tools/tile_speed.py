"""Training in tiles on emulated households: seconds of a step, beside the prediction. Root, Linux.

    python -m tools.tile_speed [--devices 1,2,4,6] [--batches 1,8] [--steps 8] [--planner tiles]
        [--groups 0-3,4-9] [--network vgg16 --size 224]

YOLOv2's first 16 layers at 416x416 on equal devices of 0.28 core at 1 Gbit/s (`--rate`). One
household is opened for each number of devices and trains once for each batch size; each line has
the median of the steps, the first two left out, what `train` predicted, and the bound that no
tiling undercuts: one device's time divided by the devices, and the sum of the filters' gradients.
One device's own time comes from `--alone` (seconds, a batch size each) or from `--devices 1,...`.
Run it alone on the machine: devices share its cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.system.household import Device, Household
from tools.predicted_round import CODE, ROOT, Starting
from tools.testbed import Testbed

SHARE = 0.28
WARM_STEPS = 2
TRAIN_SECONDS = 280.0
FILTER_BYTES = {"yolov2": 13.7e6, "vgg16": 58.9e6}
JOB = str(ROOT / "tools" / "tile_speed_job.py")


@dataclass(frozen=True, slots=True)
class Row:
    """One run.

    Attributes:
        plan: its stages, as people read them.
        peak_bytes: of memory, the largest of the devices.
    """

    devices: int
    batch: int
    plan: str
    predicted_seconds: float
    measured_seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs share."""

    rate: str
    steps: int
    size: int
    planner: str
    groups: str | None = None
    network: str = "yolov2"


async def measure(setting: Setting, count: int, batches: Sequence[int], folder: Path) -> list[Row]:
    """Open a household of so many devices, and train once a batch size."""
    with Testbed.of_shares((SHARE,) * count, setting.rate) as testbed:
        prefixes = {device.name: device.prefix() for device in testbed.devices}
        async with Household(folder, prefixes) as household:
            starting = _Starting(household, testbed)
            await asyncio.gather(*(starting.join(device.name) for device in testbed.devices[1:]))
            rows = []
            for batch in batches:
                rows.append(await _train(setting, starting, testbed, batch))
                print(_line(rows[-1]), file=sys.stderr, flush=True)
            return rows


class _Starting(Starting):
    """With this tool's job."""

    async def train(self, *arguments: str) -> Device:
        """Start the holder."""
        testbed = self._testbed
        wait = ("--wait-for", str(len(testbed.devices)), "--code", CODE)
        return await self._start(testbed.devices[0].name, "train", JOB, *wait, *arguments)


async def _train(setting: Setting, starting: _Starting, testbed: Testbed, batch: int) -> Row:
    planner = setting.planner if len(testbed.devices) > 1 else "single"
    groups = () if planner == "single" or setting.groups is None else ("--groups", setting.groups)
    holder = await starting.train(
        *("-o", f"size={setting.size}", "-o", f"batch_size={batch}"),
        *("-o", f"network={setting.network}", "--fresh", "--no-replan"),
        *("--batch-size", str(batch), "--micro-batch", str(batch)),
        *("--planner", planner, "--steps", str(setting.steps + WARM_STEPS), *groups),
    )
    await holder.succeed(TRAIN_SECONDS)
    plan = holder.events("plan")[-1]
    return Row(
        devices=len(testbed.devices),
        batch=batch,
        plan=_plan(plan),
        predicted_seconds=batch / plan["predicted_samples_per_s"],
        measured_seconds=statistics.median(
            step["seconds"] for step in holder.events("step")[WARM_STEPS:]
        ),
        peak_bytes=max(device.memory_peak_bytes() for device in testbed.devices),
    )


def _plan(plan: Mapping[str, Sequence[Mapping[str, Sequence[object]]]]) -> str:
    return " | ".join(
        f"units {stage['units'][0]}-{stage['units'][1]} on {len(stage['devices'])}"
        for stage in plan["stages"]
    )


def bound(alone: float, devices: int, rate_bytes: float, filter_bytes: float) -> float:
    """Seconds that no tiling undercuts: `plan.tiling.simulate.lower_bound`, without latency."""
    return alone / devices + 2 * (devices - 1) * filter_bytes / (devices * rate_bytes)


def report(
    rows: Sequence[Row], alone: Mapping[int, float], rate_bytes: float, filter_bytes: float
) -> str:
    """The table; speedups where one device's time is known."""
    title = f"{'devices':>7} {'batch':>5} {'measured':>9} {'predicted':>9} {'ratio':>5}"
    lines = [f"{title} {'speedup':>7} {'bound':>6} {'of it':>5} {'memory':>9}  plan"]
    for row in rows:
        known = alone.get(row.batch)
        gains = f"{'':7} {'':6} {'':5}"
        if known is not None:
            gain = known / row.measured_seconds
            most = known / bound(known, row.devices, rate_bytes, filter_bytes)
            gains = f"{gain:7.2f} {most:6.2f} {gain / most:5.2f}"
        ratio = row.predicted_seconds / row.measured_seconds
        lines.append(
            f"{row.devices:7} {row.batch:5} {row.measured_seconds:8.3f}s "
            f"{row.predicted_seconds:8.3f}s {ratio:5.2f} {gains} "
            f"{row.peak_bytes / 2**20:5.0f} MiB  {row.plan}"
        )
    return "\n".join(lines)


def _line(row: Row) -> str:
    return (
        f"{row.devices} devices, batch {row.batch}: {row.measured_seconds:.3f} s, predicted "
        f"{row.predicted_seconds:.3f}, {row.plan}"
    )


async def measure_all(
    setting: Setting, devices: Sequence[int], batches: Sequence[int]
) -> list[Row]:
    """One household after the other."""
    rows = []
    for count in devices:
        with tempfile.TemporaryDirectory() as folder:
            rows += await measure(setting, count, batches, Path(folder))
    return rows


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=_numbers, default=[1, 2, 4, 6])
    parser.add_argument("--batches", type=_numbers, default=[1, 8])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--size", type=int, default=416)
    parser.add_argument("--rate", type=int, default=1000, help="Mbit/s of every cable")
    parser.add_argument("--planner", default="tiles")
    parser.add_argument("--groups", help="of tiled units, as of train; the planner's own else")
    parser.add_argument("--network", default="yolov2", choices=("yolov2", "vgg16"))
    parser.add_argument("--alone", help="one device's seconds, a batch size each")
    asked = parser.parse_args()
    setting = Setting(
        *(f"{asked.rate}mbit", asked.steps, asked.size, asked.planner, asked.groups),
        asked.network,
    )
    rows = asyncio.run(measure_all(setting, asked.devices, asked.batches))
    alone = {row.batch: row.measured_seconds for row in rows if row.devices == 1}
    if asked.alone:
        given = [float(part) for part in asked.alone.split(",")]
        alone |= dict(zip(asked.batches, given, strict=True))
    print(report(rows, alone, asked.rate * 1e6 / 8, FILTER_BYTES[asked.network]))


if __name__ == "__main__":
    main()
