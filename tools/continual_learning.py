"""Trained weights go on learning on three devices, of which none could do so alone.

    python tools/continual_learning.py [--memory-mib 800] [--width 4096] [--epochs 3]

examples/continual_digits.py on an emulated household (root, Linux): three devices with 0.45 of a
core, cables of 1 Gbit/s and a memory limit that the kernel keeps. In turn:

    old          the digits 0 to 6, on one device without a limit: the weights to start from
    alone        the mixed images from there, on one device with the limit, in plain torch: the
                 kernel must kill it
    careful      the same by p2ptrain: it must refuse, and say how much is missing
    together     the same on three devices with the limit, without a barrier

Exit code 1 where one of these is not so, or where accuracy does not return to the old level.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from p2ptrain.cli.script import load_job
from tests.curves import by_plain_torch
from tests.system.household import Device, Household
from tools.bench.usage import MemoryWatch
from tools.testbed import Testbed

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "continual_digits.py"
CODE = "48151623"
SHARE = 0.45
MIB = 1 << 20
LIMIT_SECONDS = 400.0
KILLED = (-9, 137)
RETURNED = 0.01
"""So much below the old level is as good as it."""


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    memory_bytes: int
    width: int
    epochs: int

    @property
    def options(self) -> Sequence[str]:
        """-o of the script, for all phases."""
        return ("-o", f"width={self.width}", "-o", f"epochs={self.epochs}")


@dataclass(frozen=True)
class Found:
    """What came of it; accuracies are of the phase's own test images.

    Attributes:
        alone: exit code of plain torch.
        refused: what p2ptrain said alone.
        together: accuracy after each epoch.
        peak_bytes: of each device, together.
    """

    old: float
    alone: int
    refused: str
    together: Sequence[float]
    peak_bytes: Sequence[int]

    @property
    def holds(self) -> bool:
        """Whether all was as the module says."""
        returned = self.together[-1] >= self.old - RETURNED
        return self.alone in KILLED and "bytes missing" in self.refused and returned


async def attempt(trial: Trial, testbed: Testbed, folder: Path) -> Found:
    """All of it, one after the other."""
    devices, weights = testbed.devices, folder / "old.safetensors"
    for device in devices:
        device.lift()
    names = [device.name for device in devices]
    prefixes = {device.name: device.prefix() for device in devices}
    prefixes["careful"] = prefixes[names[1]]
    common = (str(SCRIPT), *trial.options)
    mixed = (*common, "-o", f"start={weights}")
    async with Household(folder, prefixes) as household:
        first = ("-o", "phase=old", "--local", "--out", str(weights))
        begun = await household.start(names[0], "train", *common, *first)
        await begun.succeed(LIMIT_SECONDS)
        for device in devices:
            device.set_memory(trial.memory_bytes)
        alone = ("--plain-torch", str(weights), "--width", str(trial.width))
        prefix = devices[1].prefix()
        process = await asyncio.create_subprocess_exec(*prefix, sys.executable, __file__, *alone)
        killed = await process.wait()
        careful = await household.start("careful", "train", *mixed, "--local")
        await careful.exit_code(LIMIT_SECONDS)
        together, peaks = await _together(household, testbed, mixed)
    refused = " ".join(str(event["message"]) for event in careful.events("error"))
    return Found(_accuracy(begun)[-1], killed, refused, together, peaks)


async def _together(
    household: Household, testbed: Testbed, mixed: Sequence[str]
) -> tuple[Sequence[float], Sequence[int]]:
    names = [device.name for device in testbed.devices]
    wait = ("--wait-for", "3", "--code", CODE, "--mode", "async", "--planner", "pp")
    with MemoryWatch(testbed.devices) as watch:
        holder, *_ = await asyncio.gather(
            household.start(names[0], "train", *mixed, *wait),
            *(household.start(name, "join", "--code", CODE) for name in names[1:]),
        )
        await holder.expect("ready", LIMIT_SECONDS)
        for device in testbed.devices:
            device.limit()
        await holder.succeed(LIMIT_SECONDS)
    return _accuracy(holder), [watch.peak_bytes[name] for name in names]


def _accuracy(device: Device) -> list[float]:
    return [event["metrics"]["accuracy"] for event in device.events("eval")]


def report(trial: Trial, found: Found) -> str:
    """In words."""
    killed = "killed by the kernel" if found.alone in KILLED else "NOT killed"
    peaks = ", ".join(f"{peak / MIB:.0f}" for peak in found.peak_bytes)
    course = " ".join(f"{accuracy:.3f}" for accuracy in found.together)
    return "\n".join(
        [
            f"old level, digits 0 to 6: accuracy {found.old:.3f}",
            f"one device, {trial.memory_bytes / MIB:.0f} MiB, plain torch: {killed} "
            f"(exit code {found.alone})",
            f"the same by p2ptrain: {found.refused or 'NOT refused'}",
            f"three devices of as much: accuracy on all digits after each epoch {course}",
            f"  most anonymous memory, MiB: {peaks}",
            "as it should be" if found.holds else "NOT as it should be",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory-mib", type=int, default=800)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--plain-torch", metavar="WEIGHTS", help="only learn, alone, from there")
    args = parser.parse_args(arguments)
    if args.plain_torch:
        torch.set_num_threads(1)
        start = (("start", args.plain_torch), ("width", str(args.width)), ("epochs", "1"))
        by_plain_torch(load_job(str(SCRIPT), start))
        return 0
    trial = Trial(args.memory_mib * MIB, args.width, args.epochs)
    with (
        tempfile.TemporaryDirectory(prefix="p2ptrain-continual-") as folder,
        Testbed.of_shares((SHARE,) * 3, "1gbit") as testbed,
    ):
        found = asyncio.run(attempt(trial, testbed, Path(folder)))
    print(report(trial, found))
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
