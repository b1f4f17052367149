"""The next epoch made ready here, until it begins or is given up: the shell of that rule.

asked ──► fetch ──► build ──► begins: the stages are handed over
            └─────────┴─────► given up: what arrived whole stays in the store
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from p2ptrain.training.allocator import trim_heap
from p2ptrain.training.assignment import Assignment
from p2ptrain.training.engagement import Engagement
from p2ptrain.training.job_store import JobStore
from p2ptrain.training.making_ready import MakingReady, NotReady
from p2ptrain.training.owned_tasks import OwnedTasks
from p2ptrain.training.recovery import device_events as rules
from p2ptrain.training.recovery.fetches import Fetch
from p2ptrain.training.recovery.version import Version
from p2ptrain.training.surroundings import Surroundings


class Preparing:
    """See the module.

    Args:
        tasks: whose the work is.
        feed: tells the rules how it went.
        look: has a version looked through, something of which does not fit its digests.

    Attributes:
        given_up: the last assignment that was made ready in vain.
    """

    def __init__(
        self,
        around: Surroundings,
        store: JobStore,
        tasks: OwnedTasks,
        feed: Callable[[rules.DeviceEvent], None],
        look: Callable[[Version], None],
    ) -> None:
        self.given_up: Assignment | None = None
        self._around = around
        self._store = store
        self._tasks = tasks
        self._feed = feed
        self._look = look
        # asked for, with the bytes it needs, and whether for what is fetched alone: nothing runs
        self._next: tuple[Assignment, int, bool] | None = None
        self._gathers = False  # the same of what is under way
        self._ready: MakingReady | None = None  # under way, or done
        self._built: Engagement | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def moved_bytes(self) -> int:
        """What came from other devices so far."""
        return 0 if self._ready is None else self._ready.moved_bytes

    @property
    def fetched_bytes(self) -> int:
        """What came for the epoch that is made ready, as it comes."""
        return 0 if self._ready is None else self._ready.fetched_bytes

    def ask(self, assignment: Assignment, needed_bytes: int, *, gathers: bool) -> None:
        """The holder asks for this; the rules say whether it is obeyed.

        Args:
            gathers: nothing is built of what is fetched.
        """
        self._next = (assignment, needed_bytes, gathers)

    def fetch(self, fetches: tuple[Fetch, ...]) -> None:
        """Begin with what was asked for."""
        assert self._next is not None
        assignment, needed_bytes, self._gathers = self._next
        around = self._around
        # What an old epoch takes is free once the new one begins.
        engaged = self._store.engagement is not None
        short_of = partial(around.short_of, engaged=engaged)
        self._ready = MakingReady(
            assignment,
            around.shell,
            around.states,
            self._store,
            around.model,
            around.budget_bytes,
            self._look,
            needed_bytes,
            None if self._gathers else short_of,
        )
        short_bytes = short_of(needed_bytes)
        if short_bytes is None and not self._gathers:
            around.expect(needed_bytes, engaged=engaged)
        work = self._fetch(self._ready, fetches, short_bytes)
        self._task = self._tasks.spawn(work, f"fetch {assignment.key.epoch}")

    def build(self, epoch: int) -> None:
        """All is here."""
        assert self._ready is not None
        work = self._gathered if self._gathers else self._build
        self._task = self._tasks.spawn(work(self._ready), f"build {epoch}")

    def take(self) -> Engagement:
        """The epoch begins: its stages."""
        built, self._built = self._built, None
        assert built is not None
        self._task = self._ready = None
        return built

    def give_up(self, why: str) -> None:
        """Whatever is under way, or stands."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._end(why)

    def failed(self) -> None:
        """It has ended by itself; nobody is to wait for what it would have handed on."""
        self._task = None
        self._end("could not be made ready")

    def _end(self, why: str) -> None:
        if self._ready is not None:
            self._ready.give_up(f"{self._around.mesh.name} {why}")
            self.given_up = self._ready.assignment
            self._ready = self._built = None

    async def _fetch(
        self, ready: MakingReady, fetches: tuple[Fetch, ...], short_bytes: int | None
    ) -> None:
        try:
            await ready.fetch(fetches, self._feed, short_bytes)
        except NotReady as error:
            self._feed(error.event)
        else:
            self._feed(rules.Fetched(ready.assignment.key.epoch))

    async def _build(self, ready: MakingReady) -> None:
        try:
            self._built = await ready.build()
        except NotReady as error:
            self._feed(error.event)
        else:
            trim_heap()  # what the weights' way here has taken
            self._feed(rules.Built(ready.assignment.key.epoch))

    async def _gathered(self, ready: MakingReady) -> None:
        """All that is to be built of it stands elsewhere."""
        self._feed(rules.Built(ready.assignment.key.epoch))
