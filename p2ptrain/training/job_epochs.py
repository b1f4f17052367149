"""A job's way from epoch to epoch, on the device that holds the data: the shell of `holder_core`.

    ask a coordinator ──► all devices ready ──► begin ──► rounds ──► weights home
            ▲                                               │ a device dies, a link breaks
            └───────────────────────────────────────────────┘

What was reported stays reported, however often steps are computed again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from p2ptrain import failpoints
from p2ptrain.errors import (
    InternalError,
    PeerError,
    PlanError,
    ProtocolError,
)
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import (
    Mesh,
)
from p2ptrain.model.share import Span
from p2ptrain.observe.events import Event
from p2ptrain.training.assigning import placed_of
from p2ptrain.training.change_request import (
    ChangeAnswer,
    ChangeRequest,
    Refusal,
)
from p2ptrain.training.elastic import Elasticity, Household
from p2ptrain.training.epoch_change import ask_change
from p2ptrain.training.holder_epoch import HolderEpoch, OutOfMemory
from p2ptrain.training.household_plan import less_memory
from p2ptrain.training.household_signs import HouseholdSigns
from p2ptrain.training.job_memory import JobMemory
from p2ptrain.training.job_reports import JobReports
from p2ptrain.training.kept_versions import KeptVersions
from p2ptrain.training.options import Recovery
from p2ptrain.training.owned_tasks import OwnedTasks
from p2ptrain.training.plan_request import PlanningRequest
from p2ptrain.training.recovery import holder_events as rules
from p2ptrain.training.recovery import holder_instructions as to_do
from p2ptrain.training.recovery.change import ChangeAsk, Reason
from p2ptrain.training.recovery.choose import GlobalCopy
from p2ptrain.training.recovery.committing import Seat
from p2ptrain.training.recovery.holder_core import HolderCore, Phase
from p2ptrain.training.recovery.version import Version
from p2ptrain.training.standstill import standstill

log = get_logger(__name__)

MOST_CALLS = 60
"""Requests in a row that one coordinator did not answer."""


@dataclass(frozen=True)
class Work:
    """What a job does while an epoch runs.

    Attributes:
        make_epoch: an answer's epoch, before it begins.
        train: the rounds from updates applied on, evaluations up to a step left out; returns
            whether they were all made, or else the epoch was drained.
        bring_home: reads the weights, calls the given function before the first is overwritten,
            and writes what is asked for.
        announce: tells people of a plan.
        free: frees a member that comes late from an older job of this device.
    """

    make_epoch: Callable[[ChangeAnswer], HolderEpoch]
    train: Callable[[HolderEpoch, int, int], Coroutine[Any, Any, bool]]
    bring_home: Callable[[HolderEpoch, Callable[[], None]], Coroutine[Any, Any, None]]
    announce: Callable[[ChangeAnswer, Reason], None]
    free: Callable[[str], Coroutine[Any, Any, None]]


class JobEpochs:
    """Runs a job until it is done. Create it, then `run` once.

    Attributes:
        reports: what people hear.
        copies: the versions that one can go back to.

    Args:
        planning: what the coordinator is asked first.
        unit_names: of the model's units, for people.
        work: what the job does in an epoch.
        memory: what it has behind it.
        steps: updates in all.
        recovery: how it is planned after a device is gone.
        replans: whether the plan may change while nobody comes or goes.
    """

    def __init__(
        self,
        mesh: Mesh,
        planning: PlanningRequest,
        unit_names: Sequence[str],
        work: Work,
        memory: JobMemory,
        emit: Callable[[Event], None],
        steps: int,
        recovery: Recovery = Recovery.LIGHT,
        *,
        replans: bool = True,
    ) -> None:
        self._mesh = mesh
        self._planning = planning
        self._unit_names = unit_names
        self._work = work
        self._recovery = recovery
        self._memory = memory
        reported, noted = memory.reported, memory.noted
        self._core = HolderCore(
            mesh.self_id, len(unit_names), reported.step, journal=noted, clips=planning.clip
        )
        self.reports = JobReports(mesh, reported, emit, memory.journal.committed)
        self.copies = KeptVersions(mesh, planning.job, self._on_stable, self.reports.warn)
        self._signs = HouseholdSigns(mesh, planning.alone, self._on_sign)
        self._elastic = Elasticity(
            mesh,
            planning,
            Household(
                alive=lambda: self._core.alive,
                lowered=lambda: self._core.lowered,
                coordinator=lambda: self._core.coordinator,
                remaining_rounds=lambda: max(steps - self.reports.reported.step, 0),
            ),
            self._post,
            replans=replans,
        )
        self._todo: deque[to_do.HolderInstruction] = deque()
        self._carrying_out = False
        self._changed = asyncio.Event()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = OwnedTasks(lambda _, error: self._fail(error))
        self._asking: asyncio.Task[None] | None = None
        self._calls = 0
        self._answer: ChangeAnswer | None = None
        self._refusal: Refusal | None = None
        self._epoch: HolderEpoch | None = None
        self._running: asyncio.Task[None] | None = None  # the epoch's rounds, or the way home
        self._alive: frozenset[str] = frozenset()  # when the epoch began

    async def run(self) -> None:
        """Train to the end, whatever happens to the devices.

        Raises:
            PlanError: nothing fits.
            DeviceLost: what a device had is nowhere any more.
            Error: whatever else ends the job.
        """
        self._elastic.start()
        unsubscribe = self._signs.watch()
        self._tasks.spawn(self._tick(), "watch the time")
        self._tasks.spawn(self._memory.journal.keep_synced(), "sync the journal")
        since = self._memory.since
        if self._memory.in_force is not None:
            self.reports.trouble(since)
        try:
            self._do(self._core.handle(rules.CopiesAre(self._copies()), since))
            self._do(self._core.start(since))
            await self._over
        finally:
            unsubscribe()
            await self._elastic.close()
            await self._tasks.cancel()
            await self.copies.close()
            if self._epoch is not None:
                self._epoch.close()

    # -- what was done ---------------------------------------------------------------------------

    def step(self, step: int, loss: float, samples: int) -> None:
        """`step` updates count. People hear of each once."""
        self.reports.step(step, loss, samples, self._answer)
        self._do(self._core.handle(rules.Committed(step), monotonic()))

    def busy(self, busy: Mapping[Seat, Span]) -> None:
        """What the stages' tasks took in a round."""
        self._elastic.busy(busy)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The same for an evaluation after `step` updates."""
        self.reports.evaluation(step, metrics)

    def resumed(self) -> None:
        """The first sample of an epoch is on its way."""
        self.reports.resumed()

    def warn(self, message: str) -> None:
        """Something people should know."""
        self.reports.warn(message)

    # -- what happens ----------------------------------------------------------------------------

    def note_link(self, one: str, other: str, back: bool) -> None:
        """The link between two devices broke, or is back."""
        self._on_sign(rules.LinkBack(one, other) if back else rules.LinkTrouble(one, other))

    def _on_sign(self, sign: rules.HolderEvent) -> None:
        match sign:
            case rules.Coordinates():
                self._calls = 0
            case rules.Died(device) if self._epoch is not None:
                self.reports.hint(device, self._epoch.memory_hint(device))
            case rules.Appeared(device) if device != self._mesh.self_id:
                self._tasks.spawn(self._welcome(device), f"welcome {device[:12]}")
        self._post(sign)
        self._elastic.note(sign)

    async def _welcome(self, device: str) -> None:
        """What it keeps for an epoch before the one that runs, or for another job, is of no use."""
        await self._work.free(device)
        epoch, trains = self._epoch, self._core.phase is Phase.TRAINING
        if epoch is not None and trains and device not in epoch.assignment.devices:
            await epoch.begin_without(device)

    async def _tick(self) -> None:
        while True:
            self._changed.clear()
            due = self._core.next_wakeup
            try:
                async with asyncio.timeout(
                    None if due == float("inf") else max(due - monotonic(), 0.0)
                ):
                    await self._changed.wait()
            except TimeoutError:
                self._do(self._core.tick(monotonic()))

    def _copies(self) -> tuple[GlobalCopy, ...]:
        made = self.reports.steps_made
        round_seconds = self.reports.seconds / made if made else None
        return self._memory.copies(self._mesh.self_id, round_seconds)

    # -- the rules -------------------------------------------------------------------------------

    def _post(self, event: rules.HolderEvent) -> None:
        now = monotonic()
        self._do(self._core.handle(rules.CopiesAre(self._copies()), now))
        self._do(self._core.handle(event, now))

    def _do(self, instructions: list[to_do.HolderInstruction]) -> None:
        self._changed.set()
        self._todo.extend(instructions)
        if not self._carrying_out and not self._over.done():
            self._go_on()

    def _go_on(self) -> None:
        """Carry out what is to be done, as far as nothing must be on the disk first."""
        self._carrying_out = True
        writing: Coroutine[Any, Any, None] | None = None
        try:
            while self._todo and writing is None:
                instruction = self._todo.popleft()
                if isinstance(instruction, to_do.Journal):
                    writing = self._memory.write_down(instruction, self._answer)
                else:
                    self._carry_out(instruction)
        except Exception as error:  # ends the job, wherever the event came from
            self._fail(error)
        if writing is None:
            self._carrying_out = False
        else:
            self._tasks.spawn(self._after(writing), "write the journal")

    async def _after(self, writing: Coroutine[Any, Any, None]) -> None:
        await writing
        self._carrying_out = False
        self._do([])

    def _carry_out(self, instruction: to_do.HolderInstruction) -> None:
        match instruction:
            case to_do.Freeze():
                self._freeze()
            case to_do.Drain():
                if self._epoch is not None:
                    self._epoch.is_draining = True
            case to_do.Ask(coordinator, ask):
                if self._asking is not None:
                    self._asking.cancel()
                self._asking = self._tasks.spawn(self._ask(coordinator, ask), "ask for an epoch")
            case to_do.Begin(_, _, reason, alive):
                self._alive = alive
                self._begin(reason)
            case to_do.KeepOnly(versions, alive):
                self.copies.keep_only(versions, alive)
            case to_do.BringHome():
                self._run(self._go_home())
            case to_do.Failure(device):
                is_short = self._epoch is not None and self._epoch.is_short(device)
                self.reports.failure(device, is_short=is_short)
            case to_do.WaitFor(devices):
                self.reports.waiting(devices)
            case to_do.LetGo(device):
                self._elastic.let_go(device)
            case to_do.StayOn(device, reason):
                self._elastic.keep(device, reason)
            case to_do.StopJob(reason, _):
                self._stop(reason)
            case _:
                raise InternalError(f"nobody asked for {type(instruction).__name__}")

    # -- asking ----------------------------------------------------------------------------------

    def _freeze(self) -> None:
        self.reports.trouble()
        self.copies.end_epoch()
        if self._running is not None:
            self._running.cancel()

    async def _ask(self, coordinator: str, ask: ChangeAsk) -> None:
        if self._running is not None:
            await asyncio.wait([self._running])
            self._running = None
        if self._epoch is not None:
            self._epoch.close()
        proposed = self._elastic.asked(ask)
        request = ChangeRequest(
            self._planning,
            ask,
            self._memory.in_force,
            self._recovery,
            self._elastic.corrections,
            proposed,
        )
        try:
            reply = await ask_change(self._mesh, coordinator, request)
        except (PeerError, TimeoutError) as error:
            self._calls += 1
            why = str(error) or "it took too long"
            if self._calls > MOST_CALLS:
                name = self.reports.name(coordinator)
                raise PeerError(
                    f"{name}, which coordinates, did not answer {self._calls} requests in a row: "
                    f"{why}"
                ) from error
            log.info("asking_again", why=why)
            self._post(rules.CallFailed(ask.number))
            return
        self._calls = 0
        if isinstance(reply, Refusal):
            self._refusal = reply
            self._post(
                rules.RefusedIn(
                    ask.number,
                    reply.reason,
                    reply.lost,
                    again=reply.again,
                    spoiled=reply.spoiled,
                    lowered=reply.lowered,
                )
            )
            return
        if reply.assignment.key.job != self._planning.job:
            raise ProtocolError("the coordinator answered for another job")
        if failpoints.armed:
            await failpoints.reach("accept.before", device=self._mesh.self_id)
        self._take(reply, ask.number)

    def _take(self, reply: ChangeAnswer, number: int) -> None:
        # The rules may refuse it; then the plan in force stays the old one.
        old, self._answer = self._answer, reply
        self._post(rules.AnswerIn(number, placed_of(reply.assignment), reply.choice))
        if (
            self._core.history.placed is None
            or self._core.history.placed.epoch != reply.assignment.key.epoch
        ):
            self._answer = old
        else:
            self._refusal = None

    # -- an epoch --------------------------------------------------------------------------------

    def _begin(self, reason: Reason) -> None:
        answer = self._answer
        assert answer is not None
        self._work.announce(answer, reason)
        self._epoch = self._work.make_epoch(answer)
        self.copies.begin(answer.assignment, answer.copy_cost, self._core.history.stable)
        self.reports.begin(after_trouble=reason is Reason.FAILURE)
        self._elastic.began(answer)
        version = answer.choice.version
        if not self._core.finishing or version.step < self.reports.reported.step:
            self._run(self._train(self._epoch, version))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._running = self._tasks.spawn(work, "epoch")

    async def _say_begun(self, epoch: HolderEpoch) -> None:
        """To the devices of the plan; then to the others, for none of whom anybody waits."""
        if await epoch.begin():
            for device in sorted(self._alive - set(epoch.assignment.devices)):
                self._tasks.spawn(epoch.begin_without(device), f"begin without {device[:12]}")

    async def _watch(self, epoch: HolderEpoch) -> None:
        devices = await standstill(self._mesh, epoch)
        names = ", ".join(sorted(self.reports.name(device) for device in devices))
        self.reports.warn(f"nothing moves any more, and {names} did not finish: beginning again")
        self._post(rules.Stuck(devices))

    async def _train(self, epoch: HolderEpoch, version: Version) -> None:
        watching = self._tasks.spawn(self._watch(epoch), "watch the rounds")
        try:
            await self._say_begun(epoch)
            evaluated = self.reports.reported.evaluated
            is_done = await self._work.train(epoch, version.step, evaluated)
        except OutOfMemory as error:
            self._note_short(error)
        except (PeerError, TimeoutError) as error:
            self._lose_touch(epoch, error)
        else:
            self._post(rules.CourseDone() if is_done else rules.Drained())
        finally:
            watching.cancel()

    async def _go_home(self) -> None:
        epoch = self._epoch
        assert epoch is not None
        try:
            await self._say_begun(epoch)
            await self._work.bring_home(epoch, self._give_up_first_weights)
        except (PeerError, TimeoutError) as error:
            self._lose_touch(epoch, error)
        else:
            self._post(rules.Home())

    def _on_stable(self, version: Version) -> None:
        self._post(rules.Stable(version, self.copies.read))

    def _give_up_first_weights(self) -> None:
        """The trained ones take their place, in the same memory."""
        self._memory.has_first_weights = False

    def _note_short(self, error: OutOfMemory) -> None:
        """It gets less than the plan asked of it, whatever it believes to have."""
        assert self._answer is not None
        asked = self._answer.plan["predicted"]["peak_bytes"].get(error.name, error.memory_bytes)
        when = (
            f"after step {self.reports.reported.step}"
            if self.reports.steps_made
            else "in the first round"
        )
        self.reports.warn(f"{error} {when}: planning with what it has")
        most = min(error.memory_bytes, less_memory(asked))
        self._post(rules.MemoryShort(error.device, most))

    def _lose_touch(self, epoch: HolderEpoch, error: PeerError | TimeoutError) -> None:
        """Something cannot be reached; the mesh finds out what, or nothing is wrong any more."""
        log.info("epoch_disturbed", why=str(error))
        if self._epoch is epoch:
            self._post(rules.BrokeOff(str(error)))

    # -- the end ---------------------------------------------------------------------------------

    def _stop(self, reason: str | None) -> None:
        if reason is None:
            if not self._over.done():
                self._over.set_result(None)
            return
        refusal = self._refusal
        lost = None if refusal is None else refusal.lost
        if refusal is not None and refusal.is_plan:
            self._fail(PlanError(reason))
        elif lost is not None:
            first, last = (self._unit_names[unit] for unit in (lost.units[0], lost.units[-1]))
            layers = first if first == last else f"{first} to {last}"
            self._fail(self.reports.lost(reason, lost.last_places, layers))
        else:
            self._fail(PeerError(reason))

    def _fail(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)
