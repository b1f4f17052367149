"""What the member behind the page sees: one look a second for all browsers, none while none looks.

Clocks of other devices count nothing here: when a job began or a window closes is fixed once, by
this device's clock, so that a time on the page does not tremble.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from p2ptrain import events
from p2ptrain._version import __version__
from p2ptrain.aio.tasks import set_within
from p2ptrain.api.job_course import JobCourse
from p2ptrain.api.views import NodeStatus
from p2ptrain.console import describe
from p2ptrain.errors import Error
from p2ptrain.logs import get_logger
from p2ptrain.mesh.trust.pairing_window import PairingWindow
from p2ptrain.net.forms import write_form
from p2ptrain.page.scripts import AllowedScripts
from p2ptrain.page.sessions import Reach
from p2ptrain.page.state import NoteView, PageState, Sections
from p2ptrain.page.stream import StateStream, Watcher
from p2ptrain.page.view import Seen, page_state

if TYPE_CHECKING:
    from p2ptrain.api.node import Node

log = get_logger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 1.0

FRESH_SECONDS = 0.25
"""A state that is asked for (`/state`) may be so old."""

ROUNDS_SECONDS = 2.0
"""The holder's device draws them for all pages of the household."""

ADVICE_SECONDS = 30.0
"""The planner searches for some seconds."""

NOTES_LIMIT = 100

_HOUSEHOLD = (
    events.Member,
    events.Condition,
    events.PairingFailed,
    events.PairingClosed,
    events.Renamed,
    events.Warning,
)
"""What the job's own notes do not say."""


class Shared(Generic[T]):
    """One answer for all browsers that ask at about the same time: each costs the household."""

    def __init__(self, ask: Callable[[], Awaitable[T]], fresh_seconds: float) -> None:
        self._ask = ask
        self._fresh_seconds = fresh_seconds
        self._asking = asyncio.Lock()
        self._answer: tuple[float, T] | None = None

    async def get(self) -> T:
        """The newest one, if it is no older than that. Raises what asking raises."""
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if self._answer is None or now - self._answer[0] >= self._fresh_seconds:
                found = await self._ask()
                self._answer = asyncio.get_running_loop().time(), found
            return self._answer[1]


class PageSource:
    """The states of one member, for browsers here and in the network."""

    def __init__(
        self,
        member: Node,
        look_seconds: float = LOOK_SECONDS,
        fresh_seconds: float = FRESH_SECONDS,
        unix: Callable[[], float] = time.time,
        scripts: AllowedScripts | None = None,
    ) -> None:
        self.member = member
        self.scripts = scripts
        epoch = secrets.token_hex(4)
        self.streams = {reach: StateStream(f"{epoch}{reach[0]}") for reach in Reach}
        self._look_seconds = look_seconds
        self._fresh_seconds = fresh_seconds
        self._unix = unix
        self._notes: deque[NoteView] = deque(maxlen=NOTES_LIMIT)
        self._begun: dict[str, float] = {}  # by run
        self._closes: tuple[PairingWindow, int] | None = None
        self._traffic: dict[str, tuple[float, int, int]] = {}  # by device: when, sent, received
        self._rates: dict[str, tuple[float, float]] = {}
        self._seen: tuple[float, Seen] | None = None
        self._looking = asyncio.Lock()
        self.rounds = Shared(member.rounds, ROUNDS_SECONDS)
        self.advice = Shared(member.explain, ADVICE_SECONDS)
        self._wanted = asyncio.Event()

    async def state(self, reach: Reach) -> PageState:
        """The state now."""
        seen = await self._look(self._fresh_seconds)
        return page_state(seen, may_change=reach is Reach.HERE)

    async def sections(self, reach: Reach) -> Sections:
        """The same as plain data."""
        return write_form(await self.state(reach))

    def look_again(self) -> None:
        """Something was changed: show it without waiting for the next look."""
        self._seen = None
        self._wanted.set()

    @contextlib.asynccontextmanager
    async def watching(self, reach: Reach) -> AsyncIterator[Watcher]:
        """One more browser on the stream. Raises TooManyBrowsers."""
        stream = self.streams[reach]
        watcher = stream.join()
        self._wanted.set()
        try:
            yield watcher
        finally:
            stream.part(watcher)

    async def run(self) -> None:
        """Publish what changes, as long as a browser looks."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while any(self.streams.values()):
                await self._publish()
                await set_within(self._wanted, self._look_seconds)  # a new browser waits no second
                self._wanted.clear()

    async def _publish(self) -> None:
        for reach, stream in self.streams.items():
            if len(stream):
                stream.publish(await self.sections(reach))

    async def take_notes(self) -> None:
        """Remember what happens in the household."""
        async for event in self.member.events():
            text = describe(event) if isinstance(event, _HOUSEHOLD) else ""
            if isinstance(event, events.Pairing):
                text = "New devices may pair for ten minutes."  # not everyone may see the code
            if text:
                self._notes.append(NoteView(round(self._unix()), event.event, text))

    async def _look(self, fresh_seconds: float) -> Seen:
        async with self._looking:
            now = self._now()
            if self._seen is not None and now - self._seen[0] < fresh_seconds:
                return self._seen[1]
            course = await self._course()
            status = self.member.status()
            self._measure(status, now)
            seen = Seen(
                status=status,
                trusted=self.member.devices(),
                version=__version__,
                course=course,
                begun_at=self._begun_at(course),
                code=self._code(),
                notes=(*self._notes, *(() if self.scripts is None else self.scripts.notes)),
                scripts=() if self.scripts is None else self.scripts.names,
                rates=dict(self._rates),
            )
            self._seen = now, seen
            return seen

    async def _course(self) -> JobCourse | None:
        try:
            return await self.member.course()
        except Error as error:  # the rest is shown all the same
            log.info("course_not_read", why=str(error))
            return None

    def _begun_at(self, course: JobCourse | None) -> float:
        if course is None:
            return 0.0
        if course.run not in self._begun:
            self._begun = {course.run: round(self._unix() - course.seconds, 1)}
        return self._begun[course.run]

    def _code(self) -> tuple[str, int] | None:
        window, now = self.member.window, self._now()
        if window is None or not window.is_open(now):
            return None
        known = self._closes
        if known is None or (known[0].code, known[0].closes_at) != (window.code, window.closes_at):
            self._closes = window, round(self._unix() + window.closes_at - now)
        assert self._closes is not None
        return window.code, self._closes[1]

    def _measure(self, status: NodeStatus, now: float) -> None:
        """What each link has carried since the last look, a second; little is nothing."""
        for member in status.members:
            traffic = member.traffic
            if traffic is None:
                self._traffic.pop(member.id, None)
                self._rates.pop(member.id, None)
                continue
            before = self._traffic.get(member.id)
            if before is not None and now - before[0] < self._look_seconds / 2:
                continue
            self._traffic[member.id] = now, traffic.sent_bytes, traffic.received_bytes
            if before is None or now - before[0] > 5 * self._look_seconds:
                continue
            seconds = now - before[0]
            sent = max(traffic.sent_bytes - before[1], 0) / seconds
            received = max(traffic.received_bytes - before[2], 0) / seconds
            self._rates[member.id] = _noticeable(sent), _noticeable(received)

    def _now(self) -> float:
        """On the clock of pairing windows."""
        return asyncio.get_running_loop().time()


def _noticeable(bytes_per_s: float) -> float:
    """Heartbeats are always there."""
    return bytes_per_s if bytes_per_s >= 2000 else 0.0
