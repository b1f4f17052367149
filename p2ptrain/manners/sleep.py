"""A machine that goes to sleep leaves the household first, and rejoins once it is awake.

Linux: logind says `PrepareForSleep` on D-Bus and waits, for five seconds usually, for programs that
have asked it to (https://systemd.io/INHIBITOR_LOCKS); that takes the optional library dbus-fast.
Everywhere: a clock that counts sleep runs ahead of one that does not, once the machine is awake.
Then the others have missed this device for that long, so that it leaves and joins again.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.logs import get_logger

if TYPE_CHECKING:
    from dbus_fast.aio import MessageBus

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SleepTimes:
    """Attributes:
    look_seconds: between looks at the clocks.
    least_seconds: a shorter jump is none.
    """

    look_seconds: float = 1.0
    least_seconds: float = 5.0


class JumpWatch:
    """Shown both clocks now and then, it says how long the machine has slept. Pure."""

    def __init__(self, least_seconds: float) -> None:
        self._least_seconds = least_seconds
        self._ahead: float | None = None

    def slept_seconds(self, awake: float, all_time: float) -> float:
        """Since the last look; 0: it has not.

        Args:
            awake: of a clock that stands still while the machine sleeps.
            all_time: of one that does not.
        """
        before, self._ahead = self._ahead, all_time - awake
        jump = 0.0 if before is None else self._ahead - before
        return jump if jump >= self._least_seconds else 0.0


def all_time() -> float:
    """Seconds that count sleep: boot time where the system has it, else the time of day."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.time() if boot is None else time.clock_gettime(boot)


class SleepWatch:
    """`async with`, around a member's life.

    Attributes:
        rejoin: set where the member is to leave now: the machine is about to sleep, or has slept.
        awake: cleared where the machine is about to sleep, until it is awake again.
    """

    def __init__(
        self,
        announcer: Logind | None = None,
        times: SleepTimes = SleepTimes(),
        awake_time: Callable[[], float] = time.monotonic,
        all_time: Callable[[], float] = all_time,
    ) -> None:
        self.rejoin = asyncio.Event()
        self.awake = asyncio.Event()
        self.awake.set()
        self._announcer = announcer or Logind()
        self._times = times
        self._clocks = awake_time, all_time
        self._jumps = JumpWatch(times.least_seconds)
        self._tasks = TaskOwner(_on_failed)

    async def __aenter__(self) -> Self:
        """Begin to watch."""
        self._tasks.spawn(self._listen(), "hear of sleep")
        self._tasks.spawn(self._look(), "watch for sleep")
        return self

    async def __aexit__(self, *_: object) -> None:
        """End."""
        await self._tasks.cancel()
        self._announcer.release()
        self._announcer.close()

    def has_left(self) -> None:
        """The member has left: the machine may sleep."""
        self.rejoin.clear()
        self._announcer.release()

    async def _listen(self) -> None:
        """The system may take its time, or refuse."""
        if await self._announcer.connect(self._on_sleep):
            await self._announcer.hold()

    def _on_sleep(self, begins: bool) -> None:
        log.info("sleep", begins=begins)
        if begins:
            self.awake.clear()
            self.rejoin.set()
            return
        self.awake.set()
        self._jumps = JumpWatch(self._times.least_seconds)
        self._tasks.spawn(self._announcer.hold(), "hold the next sleep up")

    async def _look(self) -> None:
        awake_time, whole_time = self._clocks
        while True:
            slept = self._jumps.slept_seconds(awake_time(), whole_time())
            if slept:
                log.info("slept", seconds=round(slept))
                self.awake.set()
                self.rejoin.set()
            await asyncio.sleep(self._times.look_seconds)


class Logind:
    """systemd's, by D-Bus; of no use where dbus-fast or the system's bus is not there."""

    def __init__(self) -> None:
        self._bus: MessageBus | None = None
        self._manager: Any = None
        self._held: int | None = None

    async def connect(self, on_sleep: Callable[[bool], None]) -> bool:
        """Begin; `on_sleep` is called with True before the machine sleeps, with False after it.

        Returns whether it will be.
        """
        if sys.platform != "linux":
            return False
        try:
            from dbus_fast import BusType
            from dbus_fast.aio import MessageBus
            from dbus_fast.errors import DBusFastError
        except ImportError:
            return False
        try:
            bus = await MessageBus(bus_type=BusType.SYSTEM, negotiate_unix_fd=True).connect()
            self._bus = bus
            name, path = "org.freedesktop.login1", "/org/freedesktop/login1"
            proxy = bus.get_proxy_object(name, path, await bus.introspect(name, path))
            self._manager = proxy.get_interface("org.freedesktop.login1.Manager")
        except (OSError, EOFError, ValueError, DBusFastError) as error:  # no bus, no logind
            log.info("sleep_not_announced", why=str(error))
            return False
        self._manager.on_prepare_for_sleep(on_sleep)
        return True

    async def hold(self) -> None:
        """Have the system wait for `release` before it sleeps."""
        if self._manager is None or self._held is not None:
            return
        why = "leaves the household first"
        self._held = await self._manager.call_inhibit("sleep", "p2ptrain", why, "delay")

    def release(self) -> None:
        """It may sleep."""
        held, self._held = self._held, None
        if held is not None:
            with suppress(OSError):
                os.close(held)

    def close(self) -> None:
        """End."""
        if self._bus is not None:
            self._bus.disconnect()


def _on_failed(work: str, error: BaseException) -> None:
    log.info("not_done", work=work, why=str(error) or repr(error))  # clocks still tell
