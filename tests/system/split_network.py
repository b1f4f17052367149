"""A network that splits while a job trains, in every shape. Real processes in namespaces, as root.

Five devices train. For each shape: only the side with the data goes on, or waits for the others;
who has a part and cannot speak with the data says `waiting`; once the network is whole nobody has
to do anything, and nobody waits any more; the losses are those of one device alone, each step
reported once, in order.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from tests.support.splits import SHAPES, away
from tests.system.household import Device, Household
from tools.testbed.network import Network

SCRIPT = str(Path(__file__).resolve().parent / "jobs" / "deep.py")
CODE = "48151623"
NAMES = "abcde"
START_SECONDS = 90.0
NOTICE_SECONDS = 20.0
"""A silent device is dead after 4 to 5 s, and the holder's kernel may hold on a little longer."""
WHOLE_SECONDS = 60.0
STEPS_BEFORE, STEPS_AFTER = 10, 10


@dataclass(frozen=True)
class Split:
    """What came of one.

    Attributes:
        away: names of devices that had a part and could not speak with the data.
        noticed: seconds until each of them said that it waits.
        steps_meanwhile: that people heard of while it lasted.
        whole_seconds: from its end until nobody waits and training continues.
        losses: of all steps, in order.
    """

    shape: str
    away: tuple[str, ...]
    noticed: tuple[float, ...]
    steps_meanwhile: int
    whole_seconds: float
    losses: tuple[float, ...]


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
