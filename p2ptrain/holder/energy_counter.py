"""What the devices of a job have used of energy meanwhile, each by its own counters.

holder                      device
  |-- device.energy ---------->|   with each plan, every 10 s, and when the job ends
  |<-- joules, of what, or why |   since its process began: differences count
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace

from p2ptrain.aio.tasks import task_scope
from p2ptrain.errors import Error
from p2ptrain.events import Done
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh, display_name
from p2ptrain.messages.job_requests import EnergyReply
from p2ptrain.messages.kinds import ENERGY
from p2ptrain.net.message import Message
from p2ptrain.plan.types.job_facts import EnergyFacts
from p2ptrain.process.energy import EnergyMeter, EnergyReading

log = get_logger(__name__)


EVERY_SECONDS = 10.0
"""Between two questions to a device."""

ANSWER_SECONDS = 2.0


class EnergyTally:
    """Adds up readings. Pure."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._used: dict[str, EnergyFacts] = {}

    def add(self, device: str, reading: EnergyReading) -> None:
        """A device's newest; the first one is what it had used before."""
        known = self._used.get(device, EnergyFacts(device, None))
        joules, of = known.joules, known.of
        if reading.joules is not None:
            last = self._last.get(device, reading.joules)
            began_again = reading.joules < last  # its process
            more = reading.joules if began_again else reading.joules - last
            self._last[device] = reading.joules
            joules, of = (joules or 0.0) + more, " and ".join(reading.sources)
        self._used[device] = EnergyFacts(device, joules, of, reading.why)

    @property
    def use(self) -> tuple[EnergyFacts, ...]:
        """So far; those that cannot measure it last."""
        return tuple(sorted(self._used.values(), key=lambda one: one.joules is None))


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
    def use(self) -> tuple[EnergyFacts, ...]:
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


def with_energy(done: Done, use: Collection[EnergyFacts], samples: int) -> Done:
    """The event with what was used."""
    used = {one.name: one.joules for one in use if one.joules is not None}
    joules = sum(used.values()) if used else None
    return replace(
        done,
        energy_joules=joules,
        joules_per_sample=joules / samples if joules is not None and samples else None,
        energy_of=used,
        energy_missing={one.name: one.why for one in use if one.why},
    )
