"""Trains in an emulated household while devices are killed, frozen and unplugged."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from tests.system.household import Device, Household
from tools.chaos.misfortunes import Fate, Kind, Misfortune
from tools.testbed import EmulatedDevice, Testbed

SCRIPT = str(Path(__file__).parents[1] / "recovery_times_job.py")
CODE = "48151623"
START_SECONDS = 150.0
MEMORY_EVERY_SECONDS = 5.0
ONE_DEVICE_A_STAGE = frozenset({"pp", "ftpipehd", "single"})


@dataclass(frozen=True)
class Settings:
    """How it is to go.

    Attributes:
        devices: the one with the data included.
        share: of a core, each.
        every: seconds between two misfortunes.
        seconds: how long they go on.
        calm: seconds of training before the first, for the undisturbed speed.
        job: options of the job.
        planner: of `train`.
        longest: seconds that one lasts at most.
    """

    devices: int = 8
    share: float = 0.2
    every: float = 60.0
    seconds: float = 1800.0
    calm: float = 60.0
    seed: int = 0
    job: Sequence[str] = ("width=128", "layers=14")
    longest: float = 15.0
    planner: str = "pp"

    @property
    def is_bit_by_bit(self) -> bool:
        """Whether its plans add up in the order of one device, as all without groups do."""
        return self.planner in ONE_DEVICE_A_STAGE

    @property
    def spare(self) -> float:
        """Of a core, what a device may have while the others train with theirs."""
        beside = -(-self.devices // len(os.sched_getaffinity(0))) - 1
        return max(self.share, 1 - beside * self.share)


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        misfortunes: in order.
        steps: updates in the time of the misfortunes.
        undisturbed_per_s: updates a second before.
        longest_pause: seconds between two new updates.
        losses: of all updates.
        failures: names said to be lost.
        recoveries: seconds of each.
        memory: by device, bytes of its heap every MEMORY_EVERY_SECONDS.
        ended: the holder's last words, if the job did not go on to the end.
    """

    settings: Settings
    misfortunes: list[Misfortune] = field(default_factory=list)
    steps: int = 0
    undisturbed_per_s: float = 0.0
    longest_pause: float = 0.0
    losses: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=dict)
    ended: str = ""

    @property
    def share(self) -> float:
        """Of the updates that an undisturbed household would have made."""
        return self.steps / (self.undisturbed_per_s * self.settings.seconds)

    def growth(self, device: str) -> float:
        """Most memory in the last third over most in the second third."""
        seen = self.memory[device]
        third = len(seen) // 3
        return max(seen[2 * third :]) / max(seen[third : 2 * third]) if third else 1.0


class Chaos:
    """One run. Create it, then `run` once; needs root on Linux.

    Args:
        say: receives what happens.
        load: whether each process loads torch itself, so that its memory is its own.
    """

    def __init__(
        self, settings: Settings, folder: Path, say: Callable[[str], None], *, load: bool = True
    ) -> None:
        self._settings = settings
        self._load = load
        self._folder = folder
        self._say = say
        self._outcome = Outcome(settings)
        self._hit: set[str] = set()
        self._processes: dict[str, Device] = {}
        self._emulated: dict[str, EmulatedDevice] = {}

    async def run(self) -> Outcome:
        """Train, with misfortunes, and stop."""
        settings = self._settings
        with Testbed.of_shares([settings.share] * settings.devices, "100mbit") as testbed:
            self._emulated = {device.name: device for device in testbed.devices}
            async with Household(
                self._folder, emulated=self._emulated, load=self._load
            ) as household:
                await self._live(household)
        return self._outcome

    async def reference(self, steps: int) -> list[float]:
        """The losses of one device alone."""
        async with Household(self._folder, load=False) as household:
            alone = await household.start(
                "alone", "train", *self._job(), "--local", "--steps", str(steps)
            )
            await alone.succeed(START_SECONDS + steps)
            return [event["loss"] for event in alone.events("step")]

    def _job(self) -> list[str]:
        options = list(self._settings.job)
        if not self._settings.is_bit_by_bit:
            options.append("double=true")  # last bits grow in float32
        return [SCRIPT, *(word for option in options for word in ("-o", option))]

    async def _live(self, household: Household) -> None:
        settings, outcome = self._settings, self._outcome
        holder_name, *others = self._emulated
        await asyncio.gather(*(self._join(household, name) for name in others))
        self._emulated[holder_name].lift()
        wait = ("--wait-for", str(settings.devices), "--code", CODE, "--planner", settings.planner)
        holder = await household.start(holder_name, "train", *self._job(), *wait)
        await holder.expect("member", START_SECONDS)
        # before it is measured: it trains with that share
        self._emulated[holder_name].limit()
        await holder.expect("step", START_SECONDS, step=2)
        begun = len(holder.events("step"))
        await asyncio.sleep(settings.calm)
        before = len(holder.events("step"))
        outcome.undisturbed_per_s = (before - begun) / settings.calm
        self._say(f"undisturbed: {outcome.undisturbed_per_s:.2f} steps/s")
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch_memory())
            pauses = group.create_task(self._watch_pauses(holder))
            await self._disturb(household, holder, self._fate(others), group)
            outcome.steps = len(holder.events("step")) - before
            watching.cancel()
            pauses.cancel()
        self._take_down(holder)
        holder.interrupt()
        await holder.exit_code(60)

    def _fate(self, devices: Sequence[str]) -> Fate:
        return Fate(devices, self._settings.seed, longest=self._settings.longest)

    async def _join(self, household: Household, name: str, cores: float = 1.0) -> None:
        """`cores`: what it has while it loads torch."""
        device = self._emulated[name]
        device.lift(cores)
        self._processes[name] = await household.start(name, "join", "--code", CODE)
        await self._processes[name].expect("ready", START_SECONDS)
        device.limit()

    async def _disturb(
        self, household: Household, holder: Device, fate: Fate, group: asyncio.TaskGroup
    ) -> None:
        """One misfortune after the other, until the time is over or the job is."""
        end = monotonic() + self._settings.seconds
        due = monotonic()
        while (now := monotonic()) < end:
            if holder.events("error") or holder.events("done"):
                return
            if now >= due:
                due += self._settings.every
                misfortune = fate.next(self._hit)
                if misfortune is not None:
                    self._outcome.misfortunes.append(misfortune)
                    steps = len(holder.events("step"))
                    self._say(f"{misfortune}; {steps} steps so far")
                    self._hit.add(misfortune.device)
                    group.create_task(self._befall(household, misfortune))
            await asyncio.sleep(min(1.0, due - now, end - now))

    async def _befall(self, household: Household, misfortune: Misfortune) -> None:
        settings, name = self._settings, misfortune.device
        device = self._emulated[name]
        match misfortune.kind:
            case Kind.KILL:
                device.kill()
                await asyncio.sleep(misfortune.seconds)
                await self._processes[name].close()
                await self._join(household, name, settings.spare)
            case Kind.FREEZE:
                device.freeze()
                await asyncio.sleep(misfortune.seconds)
                device.thaw()
            case Kind.UNPLUG:
                device.unplug()
                await asyncio.sleep(misfortune.seconds)
                device.plug()
        self._hit.discard(name)

    async def _watch_memory(self) -> None:
        while True:
            for name, device in self._emulated.items():
                self._outcome.memory.setdefault(name, []).append(device.anonymous_bytes_now())
            await asyncio.sleep(MEMORY_EVERY_SECONDS)

    async def _watch_pauses(self, holder: Device) -> None:
        last = monotonic()
        while True:
            await holder.expect("step", self._settings.seconds, since=len(holder.said))
            now = monotonic()
            self._outcome.longest_pause = max(self._outcome.longest_pause, now - last)
            last = now

    def _take_down(self, holder: Device) -> None:
        outcome = self._outcome
        steps = holder.events("step")
        numbers = [event["step"] for event in steps]
        if numbers != list(range(1, len(numbers) + 1)):
            outcome.ended = f"steps out of order: {numbers[-20:]}"
        outcome.losses = [event["loss"] for event in steps]
        outcome.failures = [event["name"] for event in holder.events("failure")]
        outcome.recoveries = [event["seconds"] for event in holder.events("recovered")]
        for event in holder.events("error"):
            outcome.ended = event["message"]
