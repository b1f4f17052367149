"""A network that splits while a job trains, in every shape. Real processes in namespaces, as root.

    python tools/split_network.py                    every shape of tools/testbed/splits.py
    python tools/split_network.py --only ring        one of them
    python tools/split_network.py --seconds 20       how long it stays split

Five devices train. For each shape: only the side with the data goes on, or waits for the others;
who has a part and cannot speak with the data says `waiting`; once the network is whole nobody has
to do anything, and nobody waits any more; the losses are those of one device alone, each step
told once, in order.

Prints a line a shape: who was away, seconds until the first `waiting` and until the last, steps
made while split, seconds from the end of the split until nobody waits. Exit code 1 where anything
of that is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.system.household import Device, Household
from tools.testbed.network import Network
from tools.testbed.splits import SHAPES, away

SCRIPT = str(Path(__file__).resolve().parents[1] / "tests" / "system" / "jobs" / "deep.py")
CODE = "48151623"
NAMES = "abcde"
START_SECONDS = 90.0
NOTICE_SECONDS = 20.0
"""A silent device is dead after 4 to 5 s, and the holder's kernel may hold on a little longer."""
WHOLE_SECONDS = 60.0
STEPS_BEFORE, STEPS_AFTER = 20, 20


@dataclass(frozen=True)
class Split:
    """What came of one.

    Attributes:
        away: names of devices that had a part and could not speak with the data.
        noticed: seconds until each of them said that it waits.
        steps_meanwhile: that people heard of while it lasted.
        whole_seconds: from its end until nobody waits and training goes on.
        losses: of all steps, in order.
    """

    shape: str
    away: tuple[str, ...]
    noticed: tuple[float, ...]
    steps_meanwhile: int
    whole_seconds: float
    losses: tuple[float, ...]

    def __str__(self) -> str:
        names = ", ".join(self.away) or "nobody"
        waits = ", ".join(f"{seconds:.1f}" for seconds in self.noticed) or "-"
        return (
            f"{self.shape:9} away: {names:12} waiting after {waits} s; {self.steps_meanwhile:4} "
            f"steps meanwhile; whole again {self.whole_seconds:.1f} s after"
        )


def main() -> int:
    """Split in every way asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SHAPES, action="append", help="shapes; default: all")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long each lasts")
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="p2p-") as folder:
        for shape in args.only or SHAPES:
            try:
                _say(str(asyncio.run(split(Path(folder) / shape, shape, args.seconds))))
            except AssertionError as error:
                wrong += 1
                _say(f"{shape:9} {error}")
    return 1 if wrong else 0


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


async def split(folder: Path, shape: str, seconds: float, names: str = NAMES) -> Split:
    """Train, split, make whole, and hold the losses against those of one device.

    Raises:
        AssertionError: something was not as it must be; the words tell what.
    """
    with Network(len(names)) as network:
        prefixes = {name: network.prefix(i) for i, name in enumerate(names)}
        async with Household(folder, prefixes, load=False) as household:
            devices = await _started(household, names)
            holder = devices[names[0]]
            await holder.expect("step", START_SECONDS, step=STEPS_BEFORE)
            coordinator = await _coordinator(household, names)
            blocked = SHAPES[shape](len(names), coordinator)
            has_part = _devices_of(holder)
            cut = [names[d] for d in sorted(away(len(names), blocked)) if names[d] in has_part]
            said = {name: len(device.said) for name, device in devices.items()}
            network.split(blocked)
            began, steps = monotonic(), len(holder.events("step"))
            noticed = await _notice(devices, cut, said, shape, began)
            await asyncio.sleep(max(0.0, began + seconds - monotonic()))
            meanwhile = len(holder.events("step")) - steps
            network.split(frozenset())
            healed = monotonic()
            await _whole(household, holder, names)
            took = monotonic() - healed
            at = holder.events("step")[-1]["step"] + STEPS_AFTER
            await holder.expect("step", WHOLE_SECONDS, step=at)
            holder.interrupt()
            await holder.exit_code(60)
            losses = await _as_alone(household, names[0], holder)
    return Split(shape, tuple(cut), tuple(noticed), meanwhile, took, losses)


async def _started(household: Household, names: str) -> dict[str, Device]:
    devices = {n: await household.start(n, "join", "--code", CODE) for n in names[1:]}
    for member in devices.values():
        await member.expect("ready", START_SECONDS)
    job = (SCRIPT, "--wait-for", str(len(names)), "--planner", "pp", "--code", CODE)
    return {names[0]: await household.start(names[0], "train", *job), **devices}


async def _coordinator(household: Household, names: str) -> int:
    (status,) = (await household.ask(names[0], "status")).events
    return names.index(status["coordinator"]["name"])


def _devices_of(holder: Device) -> set[str]:
    stages = holder.events("plan")[-1]["stages"]
    return {device["name"] for stage in stages for device in stage["devices"]}


async def _notice(
    devices: dict[str, Device], cut: list[str], said: dict[str, int], shape: str, began: float
) -> list[float]:
    """Seconds until each device that is cut off says whom it waits for.

    In a ring the others speak for it: it is alive for all, and only has no link to the data.
    """
    if shape == "ring":
        return []

    async def wait(name: str) -> float:
        holder = {"for": next(iter(devices))}
        await devices[name].expect("waiting", NOTICE_SECONDS, since=said[name], **holder)
        return monotonic() - began

    return sorted(await asyncio.gather(*(wait(name) for name in cut)))


async def _whole(household: Household, holder: Device, names: str) -> None:
    """Everybody sees everybody, nobody waits, and steps are made."""
    steps, until = len(holder.events("step")), monotonic() + WHOLE_SECONDS
    for name in names:
        while trouble := await _trouble(household, name, len(names)):
            assert monotonic() < until, f"{trouble} {WHOLE_SECONDS:.0f} s after the split"
    await holder.expect("step", WHOLE_SECONDS, since=len(holder.said))
    assert len(holder.events("step")) > steps


async def _trouble(household: Household, name: str, count: int) -> str:
    """What is not as before on that device; empty where all is."""
    (status,) = (await household.ask(name, "status")).events
    states = {member["name"]: member["state"] for member in status["members"]}
    if list(states.values()) != ["alive"] * count:
        return f"{name} sees {states}"
    job = status["job"] or {}
    return f"{name} waits for {job['waiting_for']}" if job.get("waiting_for") else ""


async def _as_alone(household: Household, name: str, holder: Device) -> tuple[float, ...]:
    told = holder.events("step")
    steps = [event["step"] for event in told]
    assert steps == list(range(1, len(steps) + 1)), f"steps are not told once, in order: {steps}"
    alone = await household.start(name, "train", SCRIPT, "--local", "--steps", str(len(steps)))
    await alone.succeed(300)
    losses = [event["loss"] for event in told]
    wanted = [event["loss"] for event in alone.events("step")]
    wrong = [step for step, mine, its in zip(steps, losses, wanted, strict=True) if mine != its]
    assert not wrong, f"other losses from step {wrong[:1]} on"
    return tuple(losses)


if __name__ == "__main__":
    sys.exit(main())
