"""Gets the holder's plans: the port of `planner_core`.

An answer of another device is a proposal: it becomes the plan only if it is a valid plan for
exactly the question that was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar

from p2ptrain.aio.tasks import task_scope
from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.coordinator.evaluate_replan import ReplanEvaluation
from p2ptrain.coordinator.plan_question import PlanQuestion, ReplanReply, ReplanRequest
from p2ptrain.coordinator.service import search
from p2ptrain.errors import Error, LinkClosed, NotCoordinator, PeerError, PlanError, ProtocolError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.calls import cancel_remote_work, read_beside
from p2ptrain.messages.kinds import PLAN, PLAN_END, REPLAN, REPLAN_END, WORKS
from p2ptrain.net.message import Message
from p2ptrain.net.parts import LARGE, limited, part_of
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process.child_process import SearchPriority
from p2ptrain.recovery.cores import planner_core
from p2ptrain.recovery.recovery_settings import HOME, Patience

log = get_logger(__name__)

T = TypeVar("T")

PLAN_SECONDS = 300.0
"""Whatever a coordinator says of its work."""


@dataclass(frozen=True, slots=True)
class _PlannerQuestion(Generic[T]):
    """What is asked, how an answer is read, and how it is found here.

    Attributes:
        pardons: an error of the answering device that is not its fault.
    """

    message: Message
    read: Callable[[bytes], T]
    here: Callable[[], Awaitable[T]]
    seconds: float
    pardons: Callable[[Exception], bool]


class Planner:
    """See the module.

    Args:
        pass_over: called with the id of a coordinator not to be asked any more, and why.

    Attributes:
        question: the last one for a plan.
    """

    def __init__(
        self,
        mesh: Mesh,
        profiler: ClusterProfiler,
        pass_over: Callable[[str, str], None],
        patience: Patience = HOME.patience,
    ) -> None:
        self._mesh = mesh
        self._profiler = profiler
        self._pass_over = pass_over
        self._core = planner_core.PlannerCore(mesh.self_id, patience)
        self.question: PlanQuestion | None = None

    @property
    def coordinator(self) -> str | None:
        """Id of the device that is asked; None = there is none."""
        office = self._mesh.coordinator
        return None if office is None else office.id

    async def plan(self, question: PlanQuestion) -> tuple[Plan, str]:
        """A plan, and the id of the device that made it.

        Raises:
            PlanError, OptionError: nothing fits; checked here, whichever device says so.
        """
        device = self.coordinator
        self.question = question
        asked = _PlannerQuestion(
            Message(PLAN, {}, (memoryview(question.to_bytes()),)),
            question.answered,
            lambda: search(question, SearchPriority.ALONE),
            PLAN_SECONDS,
            lambda error: isinstance(error, (LinkClosed, NotCoordinator)),
        )
        pending = _PendingQuestion(self._mesh, self._core, device, asked, self._pass_over)
        with timed(log, "plan_answered"):
            plan, is_own = await pending.run()
        if pending.core.was_late and device is not None:
            await cancel_remote_work(self._mesh, device, Message(PLAN_END))
        return plan, self._mesh.self_id if is_own or device is None else device

    async def consider(self, request: ReplanRequest, limit_seconds: float) -> ReplanReply:
        """Whether another plan would be better now.

        Raises:
            PlanError: no plan was found.
            PeerError: the holder does not say what it has.
            TimeoutError: it is still looked for.
        """
        look = ReplanEvaluation(self._mesh, request, self._profiler, search)
        asked = _PlannerQuestion(
            Message(REPLAN, {}, (memoryview(request.to_bytes()),)),
            ReplanReply.from_bytes,
            look.answer,
            limit_seconds,
            lambda error: isinstance(error, PeerError) and not isinstance(error, ProtocolError),
        )
        device, core = self.coordinator, self._core
        pending = _PendingQuestion(self._mesh, core, device, asked, self._pass_over, waits=True)
        try:
            async with asyncio.timeout(limit_seconds):
                found, _ = await pending.run()
        except TimeoutError:
            pending.core.found_here()
            raise
        return found

    async def end_look(self, job: str) -> None:
        """What is looked for is not wanted any more."""
        device = self.coordinator
        if device is not None:
            await cancel_remote_work(self._mesh, device, Message(REPLAN_END, {"job": job}))

    def was_useless(self, device: str, why: str) -> None:
        """No device could use that device's plan, and all could use one made here."""
        if device == self.coordinator:
            self._pass_over(device, why)


class _PendingQuestion(Generic[T]):
    """One question, until it is answered. Implements `PlannerPort`."""

    def __init__(
        self,
        mesh: Mesh,
        core: planner_core.PlannerCore,
        coordinator: str | None,
        question: _PlannerQuestion[T],
        pass_over: Callable[[str, str], None],
        *,
        waits: bool = False,
    ) -> None:
        self.core = core.asked(monotonic(), coordinator, self, waits=waits)
        self._mesh = mesh
        self._question = question
        self._on_passed_over = pass_over
        # and whether it was found here
        self._found: asyncio.Future[tuple[T, bool]] = asyncio.get_running_loop().create_future()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._asks_for_sign = False
        self._without_plan: tuple[str, str] | None = None  # who found none, and why

    async def run(self) -> tuple[T, bool]:
        """The answer, and whether it was found here. Raises what finding it here raises."""
        async with task_scope() as self._group:
            self.core.start()
            while not self._found.done():
                wait = self.core.next_wakeup - monotonic()
                timeout = None if wait == float("inf") else max(wait, 0.0)
                await asyncio.wait([self._found], timeout=timeout)
                self.core.tick(monotonic())
            for task in self._tasks:
                task.cancel()
        if self._without_plan is not None:
            device, why = self._without_plan
            if device != self._mesh.self_id:
                self.pass_over(device, f"found no plan, though there is one ({why})")
        return self._found.result()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._group is not None
        self._tasks.append(self._group.create_task(work))

    def ask(self, device: str) -> None:
        """See `PlannerPort`, as of all that follow."""
        self._spawn(self._ask(device))

    def ask_for_sign(self, device: str) -> None:
        """Unless that question is still open."""
        if not self._asks_for_sign:
            self._asks_for_sign = True
            self._spawn(self._ask_for_sign(device))

    def plan_here(self) -> None:
        """In a child process."""
        self._spawn(self._find_here())

    def pass_over(self, device: str, why: str) -> None:
        """All of the job's devices hear it."""
        self._on_passed_over(device, why)

    def _take(self, answer: T, *, is_own: bool) -> None:
        """The first one counts, though it came too late for the rules."""
        if not self._found.done():
            self._found.set_result((answer, is_own))

    async def _ask(self, device: str) -> None:
        question = self._question
        try:
            reply = await self._mesh.call(
                device,
                question.message,
                timeout_seconds=question.seconds,
                reply_parts=limited(LARGE.most_bytes),
            )
            answer = await read_beside(question.read, part_of(reply))
            self._take(answer, is_own=False)
            self.core.answered()
        except PlanError as error:  # no device is to blame where none is found here either
            self._without_plan = device, str(error)
            self.core.no_answer()
        except (Error, TimeoutError) as error:
            why = str(error) or "it took too long"
            log.info("not_answered", by=device[:12], why=why)
            if question.pardons(error):
                self.core.no_answer()
            else:
                self.core.useless(f"gave an answer that cannot be used ({why})")

    async def _ask_for_sign(self, device: str) -> None:
        try:
            seconds = self._question.seconds
            reply = await self._mesh.call(device, Message(WORKS), timeout_seconds=seconds)
            self.core.sign(monotonic(), works=reply.fields.get("works") is True)
        except (Error, TimeoutError) as error:
            log.info("no_sign_of_work", by=device[:12], why=str(error) or "no answer")
        finally:
            self._asks_for_sign = False

    async def _find_here(self) -> None:
        self._take(await self._question.here(), is_own=True)
        self.core.found_here()
