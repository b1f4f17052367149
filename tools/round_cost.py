"""What real rounds cost the processor, by byte and by message. Needs root, Linux.

    python -m tools.round_cost [--only wide2,maps] [--rounds 12] [--share 1] [--rate 1gbit]
                               [--profile FOLDER] [--perf FOLDER] [--json FILE]

Devices are real processes in an emulated household; the plan is given, the models compute next to
nothing. Between two rounds each device tells the processor time of its event loop's thread and of
the computing one, what passed its links, and what planners were told that this costs. One line a
device:

    wide2, wide3   sums of 80 MB of gradients in a group of two, three devices
    maps           1 MiB of activations for each micro-batch, and their gradients; two stages
    small          three stages, eight micro-batches, next to no bytes: messages and rounds
    mobilenetv2    three stages, 16 micro-batches of 16
    group5         the same model whole on five devices, 64 samples of each; one sum of 9 MB

`--share` of a core leaves each device that much, as on a slow one: then pauses cool its caches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os import kill
from pathlib import Path
from typing import Any

from tests.system.household import Device, Household
from tools.predicted_round import CODE, ROOT
from tools.round_cost_device import PROFILE
from tools.testbed import Testbed

START_SECONDS = 120.0
WARM_ROUNDS = 3
TELL_SECONDS = 20.0
JOB = str(ROOT / "tools" / "round_cost_job.py")
DEVICE = str(ROOT / "tools" / "round_cost_device.py")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained; `stages`: devices of each, see `round_cost_device`."""

    name: str
    model: str
    stages: str
    batch_size: int
    micro_batch: int
    rounds: int

    @property
    def devices(self) -> int:
        """How many it takes."""
        return sum(int(stage) for stage in self.stages.split(","))


SETTINGS = (
    Setting("wide2", "wide", "2", 2, 2, 12),
    Setting("wide3", "wide", "3", 3, 3, 12),
    Setting("maps", "maps", "1,1", 64, 8, 20),
    Setting("small", "small", "1,1,1", 64, 8, 60),
    Setting("mobilenetv2", "mobilenetv2", "1,1,1", 256, 16, 6),
    Setting("group5", "mobilenetv2", "5", 320, 320, 6),
)


@dataclass(frozen=True, slots=True)
class Told:
    """What a device had spent and moved at one moment."""

    at: float
    seconds: Mapping[str, float]
    messages: Counter[str]
    part_bytes: Counter[str]
    yardsticks: Mapping[str, float]

    @classmethod
    def read(cls, file: Path) -> Told:
        """What a device has written."""
        told = json.loads(file.read_text())
        counts = (Counter(told["messages"]), Counter(told["part_bytes"]))
        return cls(told["at"], told["seconds"], *counts, told["yardsticks"])


@dataclass(frozen=True, slots=True)
class Row:
    """One device, each figure for one round.

    Attributes:
        seconds: of the wall's clock.
        loop_seconds, compute_seconds, other_seconds: of the processor.
        told_seconds: what the device's yardsticks say of its messages and bytes, of the wall's
            clock on its share of a core.
        kinds: messages by way and kind.
    """

    setting: str
    device: str
    seconds: float
    loop_seconds: float
    compute_seconds: float
    other_seconds: float
    messages: float
    part_bytes: float
    told_seconds: float
    kinds: Mapping[str, float]

    def line(self) -> str:
        """For people."""
        byte = self.loop_seconds / self.part_bytes * 1e9 if self.part_bytes else 0.0
        each = self.loop_seconds / self.messages * 1e6 if self.messages else 0.0
        return (
            f"{self.setting:12}{self.device:9}{self.seconds * 1e3:8.1f} ms a round; event loop "
            f"{self.loop_seconds * 1e3:8.2f} ms, computing {self.compute_seconds * 1e3:8.2f}, "
            f"others {self.other_seconds * 1e3:6.2f}; {self.part_bytes / 1e6:8.3f} MB, "
            f"{self.messages:6.1f} messages: {byte:6.2f} ns a byte, {each:6.0f} us a message; "
            f"its yardsticks say {self.told_seconds * 1e3:7.1f} ms"
        )


def row(setting: Setting, device: str, begin: Told, end: Told, rounds: int) -> Row:
    """The difference of two moments."""
    spent = {kind: (end.seconds[kind] - begin.seconds[kind]) / rounds for kind in end.seconds}
    kinds = end.messages - begin.messages
    messages, nbytes = kinds.total() / rounds, (end.part_bytes - begin.part_bytes).total() / rounds
    told = end.yardsticks
    told_seconds = messages * told["message_seconds"] + nbytes * told["byte_seconds"]
    return Row(
        setting.name,
        device,
        (end.at - begin.at) / rounds,
        spent["loop"],
        spent["compute"],
        spent["other"],
        messages,
        nbytes,
        told_seconds,
        {kind: count / rounds for kind, count in sorted(kinds.items())},
    )


@dataclass(frozen=True, slots=True)
class Wishes:
    """How to measure."""

    share: float
    rate: str
    rounds: int | None
    profile: Path | None
    perf: Path | None


async def measure(setting: Setting, wishes: Wishes, folder: Path) -> list[Row]:
    """One household, one run."""
    shares = (wishes.share,) * setting.devices
    with Testbed.of_shares(shares, wishes.rate) as testbed:
        around = (sys.executable, DEVICE, str(folder), setting.stages)
        prefixes = {device.name: [*device.prefix(), *around] for device in testbed.devices}
        async with Household(folder, prefixes) as household:
            started = _Started(household, testbed, wishes)
            await asyncio.gather(
                *(started.start(device.name, "join") for device in testbed.devices[1:])
            )
            rounds = wishes.rounds or setting.rounds
            return await started.train(setting, rounds, folder)


class _Started:
    def __init__(self, household: Household, testbed: Testbed, wishes: Wishes) -> None:
        self._household, self._testbed, self._wishes = household, testbed, wishes
        self._devices: dict[str, Device] = {}

    async def start(self, name: str, command: str, *arguments: str) -> Device:
        """With a whole core until it is ready."""
        self._testbed[name].lift()
        environment = {"PYTHONPATH": str(ROOT)}
        if self._wishes.profile is not None:
            environment[PROFILE] = "1"
        device = await self._household.start(
            name, command, *arguments, "--code", CODE, environment=environment
        )
        await device.expect("ready", START_SECONDS)
        self._testbed[name].limit()
        self._devices[name] = device
        return device

    async def train(self, setting: Setting, rounds: int, folder: Path) -> list[Row]:
        """The devices' figures between two steps."""
        devices = self._testbed.devices
        holder = await self.start(
            devices[0].name,
            *("train", JOB, "--wait-for", str(len(devices)), "--fresh", "--no-replan"),
            *("-o", f"model={setting.model}", "-o", f"batch_size={setting.batch_size}"),
            *("--batch-size", str(setting.batch_size), "--micro-batch", str(setting.micro_batch)),
            *("--planner", "pp", "--steps", str(10_000)),
        )
        await holder.expect("step", START_SECONDS, step=WARM_ROUNDS)
        begin = await self._tell(folder, 0)
        first = holder.events("step")[-1]["step"]
        perf = self._perf(setting)
        last = await holder.expect("step", START_SECONDS, step=first + rounds)
        for process in perf:
            process.send_signal(signal.SIGINT)
        end = await self._tell(folder, 1)
        for process in perf:
            process.wait()
        if self._wishes.profile is not None:
            _move_profiles(folder, self._wishes.profile, setting)
        passed = last["step"] - first
        return [row(setting, name, begin[name], end[name], passed) for name in sorted(begin)]

    def _perf(self, setting: Setting) -> list[subprocess.Popen[bytes]]:
        """Samples of the event loops' threads."""
        folder = self._wishes.perf
        if folder is None:
            return []
        record = ("perf", "record", "-q", "-e", "cpu-clock", "-F", "1999", "-g")
        return [
            subprocess.Popen(
                [*record, "-t", str(device.pid), "-o", f"{folder}/{setting.name}.{name}.perf"]
            )
            for name, device in self._devices.items()
        ]

    async def _tell(self, folder: Path, number: int) -> dict[str, Told]:
        for device in self._devices.values():
            kill(device.pid, signal.SIGUSR1)
        files = {name: folder / f"{name}.{number}.json" for name in self._devices}
        async with asyncio.timeout(TELL_SECONDS):
            # a file does not tell of itself
            while not all(file.exists() for file in files.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return {name: Told.read(file) for name, file in files.items()}


def _move_profiles(folder: Path, to: Path, setting: Setting) -> None:
    for file in folder.glob("*.prof"):
        shutil.move(file, to / f"{setting.name}.{file.name}")


async def measure_all(settings: Sequence[Setting], wishes: Wishes) -> list[Row]:
    """One setting after the other."""
    rows = []
    for setting in settings:
        with tempfile.TemporaryDirectory() as folder:
            found = await measure(setting, wishes, Path(folder))
        for each in found:
            print(each.line(), flush=True)
        rows += found
    return rows


def parse() -> Any:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of settings, separated by commas")
    parser.add_argument("--rounds", type=int, help="measured; as each setting has it")
    parser.add_argument("--share", type=float, default=0.5, help="of a core, of each device")
    parser.add_argument("--rate", default="1gbit", help="of every cable, as tc writes it")
    parser.add_argument("--profile", type=Path, help="write profiles of the event loops there")
    parser.add_argument("--perf", type=Path, help="the same by `perf record`")
    parser.add_argument("--kinds", action="store_true", help="list the messages too")
    parser.add_argument("--json", type=Path, help="write the result there")
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the JSON."""
    asked = parse()
    names = asked.only.split(",") if asked.only else [setting.name for setting in SETTINGS]
    settings = [setting for setting in SETTINGS if setting.name in names]
    wishes = Wishes(asked.share, asked.rate, asked.rounds, asked.profile, asked.perf)
    rows = asyncio.run(measure_all(settings, wishes))
    if asked.kinds:
        for each in rows:
            print(f"{each.setting} {each.device}")
            for kind, count in each.kinds.items():
                print(f"  {count:8.2f} {kind}")
    if asked.json:
        asked.json.write_text(json.dumps([asdict(each) for each in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
