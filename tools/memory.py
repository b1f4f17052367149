"""Predicted against measured peak memory of a job, on real processes of this machine (Linux).

    unshare -rn bash -c 'ip link set lo up; python -m tools.memory [--only NAME,NAME]'

For each setting a household trains a model of `tools/bench/models.py`. Measured is the
most anonymous memory (RssAnon) of each process, read some fifty times a second, above what the
process takes before the job: a member that is ready, and the holder when it has its script, its
model and its data (exporting the model, some 40 MB, counts). Profiles, which run the whole model,
are over when the plan is there, and are not counted. Predicted is what the plan says of the device.
docs/results/memory.md shows the table; the aim is 15% where a job takes more than 200 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.system.household import Device, Household
from tools.bench.models import SCRIPT

CODE = "24681357"
START_SECONDS = 180.0
RUN_SECONDS = 400.0
LOOK_SECONDS = 0.02
LEAST_BYTES = 200e6
MIB = 1 << 20
FOLDER = "FOLDER"
UNNAMED = ("-o", "--mode", FOLDER)
"""Words of a setting's options that its name leaves out."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One household and what it trains.

    Attributes:
        how: further options of `train`, "" = none; FOLDER stands for an empty folder.
    """

    model: str
    devices: int
    planner: str
    micro_batch: int
    batch_size: int
    how: str = ""

    @property
    def name(self) -> str:
        """As `--only` takes it."""
        name = f"{self.model}-{self.devices}-{self.planner}-{self.micro_batch}"
        words = (word.strip("-") for word in self.how.split() if word not in UNNAMED)
        return "-".join([name, *(word.replace(",", "+") for word in words)])


SETTINGS = (
    Setting("resnet50", 1, "auto", 8, 32),
    Setting("resnet50", 1, "auto", 32, 64),
    Setting("resnet50", 2, "pp", 16, 64),
    Setting("resnet50", 3, "pp", 4, 32),
    Setting("resnet50", 3, "pp", 8, 32),
    Setting("resnet50", 3, "pp", 32, 128),
    Setting("mobilenetv2", 1, "auto", 64, 128),
    Setting("mobilenetv2", 2, "pp", 64, 256),
    Setting("mobilenetv2", 3, "pp", 32, 128),
    Setting("mobilenetv2", 3, "dp", 64, 384),
    Setting("efficientnet_b1", 1, "auto", 32, 64),
    Setting("efficientnet_b1", 3, "pp", 32, 128),
    Setting("densenet", 1, "auto", 32, 64),
    Setting("densenet", 2, "tiles", 32, 64),
    Setting("vit", 1, "auto", 16, 32),
    Setting("vit", 2, "pp", 8, 64),
    Setting("vit", 3, "pp", 16, 64),
    Setting("vit", 3, "dp", 16, 96),
    Setting("vit", 3, "hybrid", 16, 64),
    Setting("bert_small", 1, "auto", 8, 16),
    Setting("bert_small", 2, "pp", 4, 32),
    Setting("bert_small", 3, "pp", 8, 32),
    Setting("bert_small", 3, "dp", 16, 48),
    Setting("bert_lora", 3, "pp", 8, 32),
    Setting("llama_lora", 3, "pp", 8, 32),
    Setting("gpt2_lora", 3, "pp", 8, 32),
    Setting("t5_lora", 3, "pp", 8, 32),
    Setting("resnet50", 3, "pp", 4, 4, "--mode async"),
    Setting("resnet50", 3, "pp", 4, 4, "--mode async --vertical-sync"),
    Setting("vit", 3, "pp", 8, 8, "--mode async"),
    Setting("mobilenetv2", 3, "pp", 16, 16, "--mode async"),
    Setting("bert_small", 3, "pp", 8, 8, "--mode async"),
    Setting("bert_small", 3, "pp", 8, 32, "--mode async --versions 2"),
    Setting("bert_small", 3, "pp", 8, 8, "--mode async --aggregate 2"),
    Setting("bert_small", 3, "hybrid", 8, 8, "--mode async"),
    Setting("bert_small", 3, "ftpipehd", 8, 8, "--mode async --replicate 5,10"),
    Setting("bert_small", 3, "pp", 8, 32, "--whole-copies 4"),
    Setting("bert_small", 3, "pp", 8, 32, "--checkpoint FOLDER"),
    Setting("resnet50", 1, "auto", 8, 32, "--checkpoint FOLDER"),
    Setting("bert_small", 3, "pp", 8, 32, "-o adam=true"),
    Setting("bert_small", 3, "dp", 16, 48, "-o adam=true"),
    Setting("bert_small", 3, "pp", 8, 32, "-o evaluates=true"),
    Setting("vit", 3, "pp", 32, 128, "-o evaluates=true"),
    Setting("resnet50", 3, "pp", 8, 32, "--wire bf16"),
    Setting("vit", 3, "pp", 16, 64, "--wire int8"),
    Setting("mobilenetv2", 3, "hybrid", 64, 384),
    Setting("resnet50", 3, "hybrid", 8, 48),
    Setting("resnet50", 3, "dp", 8, 48),
    Setting("mobilenetv2", 2, "tiles", 64, 128),
    Setting("resnet50", 3, "tiles", 16, 32),
    Setting("efficientnet_b1", 2, "tiles", 32, 64),
    Setting("bert_small", 3, "auto", 8, 64),
    Setting("resnet50", 3, "auto", 4, 32),
    Setting("vit", 3, "auto", 8, 64),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One device of one run; bytes.

    Attributes:
        versions: of which copies became whole in the run.
    """

    setting: str
    device: str
    part: str
    before: int
    predicted: int
    measured: int
    versions: int

    @property
    def ratio(self) -> float:
        """Predicted by measured."""
        return self.predicted / self.measured


class Watch:
    """The anonymous memory of a process, looked at until it is cancelled.

    Attributes:
        peak_bytes: the most since it was last set to 0.
    """

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self.peak_bytes = 0

    def now(self) -> int:
        """RssAnon, 0 when the process is gone."""
        try:
            lines = self._status.read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) << 10 for line in lines if "RssAnon" in line), 0)

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            self.peak_bytes = max(self.peak_bytes, self.now())
            await asyncio.sleep(LOOK_SECONDS)


class Stable:
    """Which versions' copies have become whole, by what the holder logs; until it is cancelled."""

    def __init__(self, holder: Device) -> None:
        self._holder = holder
        self.steps: set[str] = set()

    async def run(self) -> None:
        """Look, for ever: a device keeps the last 40 lines."""
        while True:
            self.steps |= set(re.findall(r"version_stable' step=(\d+)", self._holder.stderr))
            await asyncio.sleep(LOOK_SECONDS)


async def measure(setting: Setting, steps: int, folder: Path) -> list[Row]:
    """Train once; a row for each device of the plan."""
    names = ["holder", *(f"member{i}" for i in range(1, setting.devices))]
    async with Household(folder) as household:
        members = [
            await household.start(name, "join", "--code", CODE, "--memory", "8GiB")
            for name in names[1:]
        ]
        for member in members:
            await member.expect("ready", START_SECONDS)
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir()
        arguments = _arguments(setting, steps, checkpoints)
        holder = await household.start("holder", "train", *arguments)
        await holder.expect("ready", START_SECONDS)
        devices = dict(zip(names, [holder, *members], strict=True))
        return await _watched(setting, devices)


def _arguments(setting: Setting, steps: int, folder: Path) -> Sequence[str]:
    return (
        *(SCRIPT, "-o", f"model={setting.model}"),
        *("--wait-for", str(setting.devices), "--code", CODE, "--memory", "8GiB"),
        *("-o", f"batch_size={setting.batch_size}", "--micro-batch", str(setting.micro_batch)),
        *("--planner", setting.planner, "--steps", str(steps), "--no-replan", "--debug"),
        *setting.how.replace(FOLDER, str(folder)).split(),
    )


async def _watched(setting: Setting, devices: dict[str, Device]) -> list[Row]:
    watches = {name: Watch(device.pid) for name, device in devices.items()}
    before = {name: watch.now() for name, watch in watches.items()}
    stable = Stable(devices["holder"])
    looking = [asyncio.create_task(one.run()) for one in (stable, *watches.values())]
    try:
        await devices["holder"].expect("plan", RUN_SECONDS)
        for watch in watches.values():
            watch.peak_bytes = 0  # profiles run the whole model; the job begins here
        await devices["holder"].succeed(RUN_SECONDS)
    finally:
        for task in looking:
            task.cancel()
    plan, *others = devices["holder"].events("plan")
    if others:
        reasons = ", ".join(other["reason"] for other in others)
        raise SystemExit(f"{setting.name}: the plan has changed ({reasons}); try fewer --steps")
    return [
        Row(
            setting=setting.name,
            device=name,
            part=_part(plan, name),
            before=before[name],
            predicted=predicted,
            measured=watches[name].peak_bytes - before[name],
            versions=len(stable.steps),
        )
        for name, predicted in plan["predicted_peak_bytes"].items()
    ]


def _part(plan: dict[str, object], name: str) -> str:
    stages = plan["stages"]
    assert isinstance(stages, list)
    return " ".join(
        f"{stage['units'][0]}-{stage['units'][1]} K{stage['warmup']}"
        for stage in stages
        if name in [device["name"] for device in stage["devices"]]
    )


def report(rows: Sequence[Row]) -> str:
    """The table, and in its last line the worst of the large jobs."""
    lines = [
        f"{'setting':36} {'device':8} {'units':9} {'before':>7} "
        f"{'predicted':>9} {'measured':>9} {'ratio':>6} {'versions':>8}"
    ]
    lines += [
        f"{row.setting:36} {row.device:8} {row.part:9} {row.before / MIB:7.0f} "
        f"{row.predicted / MIB:9.0f} {row.measured / MIB:9.0f} {row.ratio:6.2f} {row.versions:8}"
        for row in rows
    ]
    large = [abs(row.ratio - 1) for row in rows if row.measured > LEAST_BYTES]
    if large:
        lines.append(
            f"jobs over 200 MB: median of |ratio - 1| {statistics.median(large):.3f}, "
            f"worst {max(large):.3f}"
        )
    return "\n".join(lines)


async def measure_all(settings: Sequence[Setting], steps: int) -> list[Row]:
    """One setting after the other."""
    rows = []
    for setting in settings:
        with tempfile.TemporaryDirectory() as folder:
            rows += await measure(setting, steps, Path(folder))
        print(report(rows), file=sys.stderr)
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of settings, separated by commas")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    wanted = arguments.only.split(",") if arguments.only else [s.name for s in SETTINGS]
    chosen = [setting for setting in SETTINGS if setting.name in wanted]
    print(report(asyncio.run(measure_all(chosen, arguments.steps))))


if __name__ == "__main__":
    main()
