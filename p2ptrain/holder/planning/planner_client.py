"""Gets the holder's plans: from the coordinator or a faster device, else made here.

    ask ──► a plan for just that question: taken
      │ ──► something else, or no sign of work for a while: passed over, planned here
      │ ──► the link ended: planned here
      └──── late: planned here meanwhile, and the first plan counts; late again: passed over

An answer of another device is a proposal: it becomes the plan only if it is a valid plan for
exactly the question that was asked. So no other device can stop or end a job by what it answers
or does not, unless a plan says that it needs less memory than it does (threat_model.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from secrets import randbits

from p2ptrain.coordinator.measured_cluster import MeasuredCluster, MeasuredDevice, overheads_of
from p2ptrain.coordinator.plan_question import PlanQuestion
from p2ptrain.coordinator.service import PlanWish, search
from p2ptrain.errors import Error, LinkClosed, NotInCharge, PlanError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.calls import Hangs, call_while_it_works, cancel_remote_work, read_beside
from p2ptrain.messages.kinds import PLAN, PLAN_END
from p2ptrain.net.fields import LARGE, limited, part_of
from p2ptrain.net.message import Message
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process.child_process import SearchPriority
from p2ptrain.recovery.work_signs import PLANS, SignLimits

log = get_logger(__name__)

ALONE_SECONDS, IDLE_SECONDS = 300.0, 1800.0
"""For an answer while the job stands still and while it trains, whatever a device says of its
work."""

HEAD_START_SECONDS = 5.0
"""So long another device may search alone while the job stands still. Raise: a slow holder waits
longer for nothing. Lower: it works in vain more often."""

NUMBER_BITS = 48

MOST_LATE = 3
"""Answers in a row that came too late, though the device said that it works."""

WORTH_ASKING = 1.25
"""How many times as fast as the coordinator another device must be."""


class Planner:
    """See the module.

    Args:
        pass_over: called with the id of a device not to be asked any more, and why.
        limits: how long a device that is asked may show nothing.

    Attributes:
        question: the last one while the job stood still.
    """

    def __init__(
        self,
        mesh: Mesh,
        pass_over: Callable[[str, str], None],
        limits: SignLimits = PLANS,
        head_start_seconds: float = HEAD_START_SECONDS,
    ) -> None:
        self.question: PlanQuestion | None = None
        self._mesh = mesh
        self._on_passed_over = pass_over
        self._limits = limits
        self._head_start_seconds = head_start_seconds
        self._standing: asyncio.Task[tuple[Plan, str]] | None = None  # what the job waits for
        self._late = ("", 0)  # whose answers, how many in a row
        self._passed_over: set[str] = set()

    async def plan(self, question: PlanQuestion) -> tuple[Plan, str]:
        """A plan, and the id of the device that made it; the job stands still meanwhile.

        One that is asked for while another is searched is of a later attempt: that one is given up.

        Raises:
            PlanError, OptionError: nothing fits; checked here, whichever device says so.
        """
        self.question = question
        with timed(log, "plan_answered"):
            if self._standing is not None:
                self._standing.cancel()
            found = self._found(question, SearchPriority.ALONE, self._head_start_seconds)
            self._standing = asyncio.create_task(found)
            return await self._standing

    async def search(self, question: PlanQuestion, haste: SearchPriority) -> Plan:
        """The same while the job trains: it is searched here only where no other device does."""
        plan, _ = await self._found(question, haste, None)
        return plan

    def was_useless(self, device: str, why: str) -> None:
        """No device could use that device's plan, and all could use one made here."""
        self._pass_over(device, why)

    def _asked(self, question: PlanQuestion) -> str | None:
        """Id of the device to ask; None: this one plans."""
        office, me = self._mesh.coordinator, self._mesh.self_id
        if office is None:
            return None
        device = fastest(question.household, office.id)
        device = office.id if device in self._passed_over else device
        return None if device == me else device

    async def _found(
        self, question: PlanQuestion, haste: SearchPriority, head_start_seconds: float | None
    ) -> tuple[Plan, str]:
        device, me = self._asked(question), self._mesh.self_id
        if device is None:
            return await search(question, haste), me
        asked = asyncio.create_task(self._ask(device, question, haste))
        here: asyncio.Task[Plan] | None = None
        try:
            await asyncio.wait([asked], timeout=head_start_seconds)
            if not asked.done():
                here = asyncio.create_task(search(question, haste))
                await asyncio.wait([asked, here], return_when=asyncio.FIRST_COMPLETED)
            answer = asked.result() if asked.done() else None
            if isinstance(answer, Plan):
                self._late = ("", 0)
                return answer, device
            plan = await (here or search(question, haste))
            if not asked.done():
                self._was_late(device)
            elif isinstance(answer, PlanError):
                self._pass_over(device, f"found no plan, though there is one ({answer})")
            return plan, me
        finally:
            tasks = [asked] if here is None else [asked, here]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _was_late(self, device: str) -> None:
        last, times = self._late
        self._late = device, times + 1 if last == device else 1
        if self._late[1] >= MOST_LATE:
            self._pass_over(device, f"had no answer in time, {MOST_LATE} times in a row")

    async def _ask(
        self, device: str, question: PlanQuestion, haste: SearchPriority
    ) -> Plan | PlanError | None:
        """Its plan, or that there is none, as it says; None: an answer of no use."""
        wish = PlanWish(randbits(NUMBER_BITS), haste)
        try:
            reply = await call_while_it_works(
                self._mesh,
                device,
                Message(PLAN, wish.fields(), (memoryview(question.to_bytes()),)),
                timeout_seconds=ALONE_SECONDS if haste is SearchPriority.ALONE else IDLE_SECONDS,
                reply_parts=limited(LARGE.most_bytes),
                limits=self._limits,
            )
            return await read_beside(question.answered, part_of(reply))
        except PlanError as error:  # no device is to blame where none is found here either
            return error
        except asyncio.CancelledError:
            await self._unwanted(device, wish)
            raise
        except (LinkClosed, NotInCharge) as error:
            log.info("not_planned", by=device[:12], why=str(error))
        except (Hangs, TimeoutError) as error:
            why = error.why if isinstance(error, Hangs) else "had no answer in time"
            self._pass_over(device, why)
            await self._unwanted(device, wish)
        except Error as error:
            self._pass_over(device, f"gave an answer that cannot be used ({error})")
        return None

    async def _unwanted(self, device: str, wish: PlanWish) -> None:
        await cancel_remote_work(self._mesh, device, Message(PLAN_END, wish.fields()))

    def _pass_over(self, device: str, why: str) -> None:
        self._late = ("", 0)
        self._passed_over.add(device)
        self._on_passed_over(device, why)


def fastest(household: MeasuredCluster, here: str) -> str:
    """The id of the device that is best asked: `here` unless another is clearly faster.

    By what a message costs there: that is Python's work, as the search is.
    """
    seconds = {candidate.id: _message_seconds(candidate) for candidate in household.candidates}
    best = min(sorted(seconds), key=seconds.__getitem__)
    return best if WORTH_ASKING * seconds[best] < seconds.get(here, 0.0) else here


def _message_seconds(candidate: MeasuredDevice) -> float:
    overheads = overheads_of(candidate)
    return inf if overheads is None else overheads.message_seconds
