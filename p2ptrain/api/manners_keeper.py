"""Keeps the manners of one member: reads the device, decides, and does and says what was decided.

readings ──► manners/rules ──► slow:   the compute thread rests between tasks
                               paused: the job's holder plans without this device, then it
                                       gives up its part and refuses others, but stays a member
                               full:   it is a newcomer to the holders of jobs
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING

from p2ptrain import events
from p2ptrain.aio.tasks import TaskOwner, run_in_background
from p2ptrain.errors import Error
from p2ptrain.events import Event
from p2ptrain.logs import get_logger
from p2ptrain.manners.condition import (
    KEYS,
    USUAL_SAYING,
    DeviceCondition,
    MemoryInUse,
    SayingLimits,
    Work,
    is_worth_saying,
)
from p2ptrain.manners.readings import DeviceReading, ReadDevice
from p2ptrain.manners.rules import USUAL_LIMITS, Decision, MannersLimits, MannersRules
from p2ptrain.manners.settings import Manners

if TYPE_CHECKING:
    from p2ptrain.api.device_services import DeviceServices
    from p2ptrain.mesh.network_mesh import NetworkMesh

log = get_logger(__name__)


def minute_of_day() -> float:
    """By the clock of this device's system, in its time zone."""
    now = datetime.now().astimezone()
    return now.hour * 60 + now.minute + now.second / 60


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """How a keeper goes about it.

    Attributes:
        period_seconds: between readings, where the device's person asks for manners.
        plain_period_seconds: between readings for the others to see, and of memory.
        hand_over_seconds: longest wait for the others to take over this device's work.
        retry_seconds: after they could not.
        minute: of the day.
    """

    period_seconds: float = 1.0
    plain_period_seconds: float = 5.0
    hand_over_seconds: float = 30.0
    retry_seconds: float = 15.0
    limits: MannersLimits = USUAL_LIMITS
    saying: SayingLimits = USUAL_SAYING
    minute: Callable[[], float] = minute_of_day


class MannersKeeper:
    """One a member; `run` it once the member has joined.

    Args:
        info: what this device says of itself besides.
        busy_share: as `MannersRules`.
        emit: called with what the user is to know.
    """

    def __init__(
        self,
        mesh: NetworkMesh,
        member: DeviceServices,
        manners: Manners,
        read: ReadDevice,
        info: Mapping[str, int | float | str],
        emit: Callable[[Event], None],
        busy_share: float = 1.0,
        settings: KeeperSettings | None = None,
    ) -> None:
        self._mesh, self._member, self._read, self._emit = mesh, member, read, emit
        self._settings = settings or KeeperSettings()
        self._manners = manners
        self._info = {key: value for key, value in info.items() if key not in KEYS}
        self._rules = MannersRules(manners, self._settings.limits, busy_share)
        self._said = DeviceCondition()
        self._said_at = float("-inf")
        self._reading = DeviceReading()
        self._memory = MemoryInUse()
        self._work, self._sentence = Work.FULL, ""
        self._is_handed_over = False
        self._next_try = float("-inf")
        self._has_warned = False
        self._tasks = TaskOwner()
        self._is_leaving = False
        self._wanted = Decision()

    async def run(self) -> None:
        """Until it is cancelled."""
        settings = self._settings
        pays_heed = self._manners != Manners()
        period = settings.period_seconds if pays_heed else settings.plain_period_seconds
        try:
            while True:
                self._reading = await run_in_background(self._read)
                self._memory = await run_in_background(self._member.memory_in_use)
                self._warn_of_sensors(self._reading)
                self._apply(self._rules.decide(self._reading, monotonic(), settings.minute()))
                await asyncio.sleep(period)
        finally:
            await self._tasks.cancel()

    def _warn_of_sensors(self, reading: DeviceReading) -> None:
        """Once, of an option that cannot work here."""
        if self._has_warned:
            return
        self._has_warned = True
        most = self._manners.max_temperature
        if most is not None and reading.temperature_c is None:
            text = f"no temperature can be read on this device: a limit of {most:g} °C does nothing"
            self._emit(events.Warning(text))
        if self._manners.when_idle and reading.idle_seconds is None:
            text = (
                "it cannot be seen when this device was last used: it counts as in use while other "
                "programs are busy"
            )
            self._emit(events.Warning(text))

    # -- what is decided -------------------------------------------------------------------------

    def _apply(self, decision: Decision) -> None:
        self._wanted = decision
        self._member.compute.share = decision.share
        if self._is_leaving:
            return  # the others are about to do without this device: what follows then is seen then
        if decision.work is not Work.PAUSED:
            self._is_handed_over, self._next_try = False, float("-inf")
            self._member.service.due.rests = ""
            self._say(decision.work, decision.sentence)
        elif self._member.is_training:
            self._say(Work.SLOW, f"slow: {decision.cause}; its own training continues")
        elif self._is_handed_over:
            self._member.service.due.rests = decision.sentence
            self._say(Work.PAUSED, decision.sentence)
        elif monotonic() >= self._next_try:
            self._is_leaving = True
            self._tasks.spawn(self._hand_over(decision), "hand the work over")

    async def _hand_over(self, decision: Decision) -> None:
        service = self._member.service
        if service.slot.job is not None:
            self._say(Work.SLOW, f"slow: {decision.cause}; handing its work over")
        try:
            why = await service.slot.ask_to_leave(self._settings.hand_over_seconds)
            if why is None:
                service.due.rests = decision.sentence
                await service.slot.drop()
        except (Error, TimeoutError) as error:
            why = str(error) or "they have not answered in time"
        finally:
            self._is_leaving = False
        if why is None:
            self._is_handed_over = True
        else:
            log.info("not_paused", why=why)
            self._next_try = monotonic() + self._settings.retry_seconds
            self._say(Work.SLOW, f"slow: {decision.cause}; the others cannot do without it")
        if self._wanted.work is not Work.PAUSED or self._is_handed_over:
            self._apply(self._wanted)

    # -- its sentence ----------------------------------------------------------------------------

    def _say(self, work: Work, sentence: str) -> None:
        """To the others, as far as it is new; to this device's own user too."""
        if (work, sentence) != (self._work, self._sentence):
            self._work, self._sentence = work, sentence
            self._emit(events.Condition(self._mesh.name, work.value, sentence))
        now, condition = monotonic(), self._condition()
        ago = now - self._said_at
        if is_worth_saying(self._said, condition, ago, self._settings.saying):
            self._said, self._said_at = condition, now
            self._mesh.describe({**self._info, **condition.to_info()})

    def _condition(self) -> DeviceCondition:
        reading = self._reading
        power = {True: "battery", False: "mains", None: None}[reading.on_battery]
        return DeviceCondition(
            work=self._work,
            sentence=self._sentence,
            others_cpu_percent=_percent(reading.others_cpu),
            battery_percent=_percent(reading.battery),
            power=power,  # type: ignore[arg-type]
            temperature_c=None if reading.temperature_c is None else round(reading.temperature_c),
            memory=self._memory,
        )


def _percent(part: float | None) -> int | None:
    return None if part is None else round(100 * part)
