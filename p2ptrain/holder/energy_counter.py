"""What the devices of a job have used of energy meanwhile, each by its own counters.

holder                      device
  |-- device.energy ---------->|   with each plan, every 10 s, and when the job ends
  |<-- joules, of what, or why |   since its process began: differences count
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from p2ptrain.aio.tasks import task_scope
from p2ptrain.errors import Error
from p2ptrain.events import Done
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh, display_name
from p2ptrain.messages.kinds import ENERGY
from p2ptrain.messages.measured import EnergyReply
from p2ptrain.net.message import Message
from p2ptrain.process.energy import EnergyMeter, EnergyReading

log = get_logger(__name__)


EVERY_SECONDS = 10.0
"""Between two questions to a device."""

ANSWER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """Of a job so far, by name of a device.

    Attributes:
        joules: of those that can measure it.
        sources: what that is of.
        missing: why the others cannot, or what of a device is not in it.
    """

    joules: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


class EnergyTally:
    """Adds up readings. Pure."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._joules: dict[str, float] = {}
        self._sources: dict[str, str] = {}
        self._missing: dict[str, str] = {}

    def add(self, device: str, reading: EnergyReading) -> None:
        """A device's newest; the first one is what it had used before."""
        self._missing.pop(device, None)
        if reading.why:
            self._missing[device] = reading.why
        if reading.joules is None:
            return
        last = self._last.get(device, reading.joules)
        began_again = reading.joules < last  # its process
        more = reading.joules if began_again else reading.joules - last
        self._last[device] = reading.joules
        self._joules[device] = self._joules.get(device, 0.0) + more
        self._sources[device] = " and ".join(reading.sources)

    @property
    def use(self) -> EnergyUse:
        """So far."""
        return EnergyUse(dict(self._joules), dict(self._sources), dict(self._missing))


class EnergyCounter:
    """Of one job: `run` beside it, and `fetch` with every plan and at the end.

    Args:
        devices: ids of those that have a part now; this one is always counted.
        trained: samples until now.

    Attributes:
        samples: that were trained when the devices were last asked.
    """

    def __init__(
        self,
        mesh: Mesh,
        meter: EnergyMeter,
        devices: Callable[[], Collection[str]],
        trained: Callable[[], int],
    ) -> None:
        self._mesh, self._meter, self._devices = mesh, meter, devices
        self._trained, self.samples = trained, 0
        self._tally = EnergyTally()

    @property
    def use(self) -> EnergyUse:
        """So far."""
        return self._tally.use

    async def run(self) -> None:
        """Fetch until cancelled."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            await self.fetch()

    async def fetch(self) -> None:
        """What every device of the plan has used until now; those that do not answer wait."""
        self.samples = self._trained()
        self._tally.add(self._mesh.name, self._meter.read())
        async with task_scope() as scope:
            for device in self._devices():
                if device != self._mesh.self_id:
                    scope.create_task(self._fetch_from(device))

    async def _fetch_from(self, device: str) -> None:
        try:
            message = Message(ENERGY, {})
            reply = await self._mesh.call(device, message, timeout_seconds=ANSWER_SECONDS)
            found = EnergyReply.read(reply.fields)
        except (Error, TimeoutError) as error:
            log.info("no_energy", device=device[:12], why=str(error) or "it took too long")
            return
        reading = EnergyReading(found.joules, found.sources, found.why)
        self._tally.add(display_name(self._mesh, device), reading)


def with_energy(done: Done, use: EnergyUse, samples: int) -> Done:
    """The event with what was used."""
    if not use.joules:
        return replace(done, energy_missing=use.missing)
    joules = sum(use.joules.values())
    return replace(
        done,
        energy_joules=joules,
        joules_per_sample=joules / samples if samples else None,
        energy_of=use.joules,
        energy_missing=use.missing,
    )
