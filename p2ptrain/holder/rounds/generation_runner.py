"""What the holder does while a generation is in force: announce it, train, fetch the weights.

Any trouble ends the run and is reported to the rules, which decide what comes next. The stall
watch of a run is the shell of `recovery.standstill`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.errors import PeerError
from p2ptrain.holder.planning.reconfiguration import ReconfigureReply
from p2ptrain.holder.reports import JobReports
from p2ptrain.holder.rounds.generation import (
    HolderGeneration,
    PartFailed,
    SentWrong,
    StageOutOfMemory,
)
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.calls import Hangs, hanging
from p2ptrain.process.memory_budget import is_out_of_memory, smaller_budget
from p2ptrain.recovery.cores.holder_core import HolderCore
from p2ptrain.recovery.cores.holder_port import TellCore
from p2ptrain.recovery.cores.retry_policy import Complaints
from p2ptrain.recovery.generation_request import ReconfigureReason
from p2ptrain.recovery.recovery_settings import RecoverySettings
from p2ptrain.recovery.standstill import (
    ProgressCounters,
    StallDetector,
    Standing,
    Unsent,
    has_moved,
    unsent,
)
from p2ptrain.recovery.work_signs import Signs, WorkSign

log = get_logger(__name__)


@dataclass(frozen=True)
class GenerationWork:
    """What a job does while a generation runs.

    Attributes:
        make_generation: an answer's generation, before it begins.
        train: the rounds from updates applied on, evaluations up to a step left out; returns
            whether they were all made, or else the generation was drained.
        bring_home: reads the weights, and writes what is asked for.
        announce: reports a plan to the user.
        checked: waits until it is known that the job may begin; raises why it may not.
    """

    make_generation: Callable[[ReconfigureReply], HolderGeneration]
    train: Callable[[HolderGeneration, int, int], Coroutine[Any, Any, bool]]
    bring_home: Callable[[HolderGeneration], Coroutine[Any, Any, None]]
    announce: Callable[[ReconfigureReply, ReconfigureReason], None]
    checked: Callable[[], Awaitable[None]]


class GenerationRunner:
    """One generation after the other, each until it is over.

    Args:
        tasks: whose the work is.
        rules: what decides what comes next; `tell`: calls their methods.
        hangs: is called for a device that does not do what it is asked for.

    Attributes:
        generation: the one in force or, stopped, the last; None before the first.
    """

    def __init__(
        self,
        mesh: Mesh,
        work: GenerationWork,
        reports: JobReports,
        tasks: TaskOwner,
        rules: HolderCore,
        tell: TellCore,
        hangs: Callable[[Hangs], None],
        settings: RecoverySettings,
    ) -> None:
        self.generation: HolderGeneration | None = None
        self._mesh = mesh
        self._work = work
        self._reports = reports
        self._tasks = tasks
        self._rules, self._tell = rules, tell
        self._hangs = hangs
        self._settings = settings
        self._answer: ReconfigureReply | None = None
        self._alive: frozenset[str] = frozenset()  # when the generation began
        self._running: asyncio.Task[None] | None = None  # the rounds, or the way home
        self._blamed: dict[str, set[str]] = {}  # by the device that says so
        self._complaints = Complaints(mesh.self_id)

    def begin(self, answer: ReconfigureReply, alive: frozenset[str]) -> None:
        """It is in force; no device has been notified yet.

        Args:
            alive: members to notify, those without a part included.
        """
        self._answer, self._alive = answer, alive
        self.generation = self._work.make_generation(answer)

    def train(self) -> None:
        """Its rounds, from the version that it begins with."""
        assert self.generation is not None
        self._run(self._train(self.generation))

    def bring_home(self) -> None:
        """The weights."""
        assert self.generation is not None
        self._run(self._go_home(self.generation))

    def drain(self) -> None:
        """Order no further round."""
        if self.generation is not None:
            self.generation.draining.set()

    def freeze(self) -> None:
        """End what runs."""
        if self._running is not None:
            self._running.cancel()

    async def ended(self) -> None:
        """Wait until nothing of it runs any more, and listen no more."""
        if self._running is not None:
            await asyncio.wait([self._running])
            self._running = None
        self.close()

    def close(self) -> None:
        """Listen no more."""
        if self.generation is not None:
            self.generation.close()

    async def welcome(self, device: str, trains: Callable[[], bool]) -> None:
        """What it keeps for a generation before the one that runs is of no use.

        Args:
            trains: whether a generation is in force.
        """
        if (
            self.generation is not None
            and trains()
            and device not in self.generation.assignment.devices
        ):
            await self.generation.begin_without(device)

    def is_short(self, device: str) -> bool:
        """Whether hardly any memory was free there when it last reported."""
        return self.generation is not None and self.generation.is_short(device)

    # -- what runs -------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._running = self._tasks.spawn(work, "generation")

    async def _report_begun(self, generation: HolderGeneration) -> None:
        """To the devices of the plan; then to the others, without waiting for them."""
        if await generation.begin():
            for device in sorted(self._alive - set(generation.assignment.devices)):
                self._tasks.spawn(generation.begin_without(device), f"begin without {device[:12]}")

    async def _train(self, generation: HolderGeneration) -> None:
        watching = self._tasks.spawn(self._watch(generation), "watch the rounds")
        try:
            await self._report_begun(generation)
            start, evaluated = generation.assignment.version.step, self._reports.reported.evaluated
            is_done = await self._work.train(generation, start, evaluated)
        except Exception as error:
            self._disturbed(generation, error)
        else:
            self._tell(self._rules.steps_done if is_done else self._rules.rounds_drained)
        finally:
            watching.cancel()

    async def _go_home(self, generation: HolderGeneration) -> None:
        try:
            await self._report_begun(generation)
            await self._work.bring_home(generation)
        except Exception as error:
            self._disturbed(generation, error)
        else:
            self._tell(self._rules.weights_home)

    # -- what disturbs it ------------------------------------------------------------------------

    async def _watch(self, generation: HolderGeneration) -> None:
        found = await silence(self._mesh, generation, self._reports.warn, self._settings)
        if not isinstance(found, frozenset):
            generation.tracker.fail(found)
            return
        names = ", ".join(sorted(self._reports.name(device) for device in found))
        self._reports.warn(f"nothing moves any more, and {names} did not finish: making a new plan")
        self._tell(self._rules.round_stalled, found)

    def _disturbed(self, generation: HolderGeneration, error: Exception) -> None:
        """Raises `error` where it ends the job."""
        if is_out_of_memory(error):  # here: the loader, or what came back
            error = generation.short_here()
        if isinstance(error, StageOutOfMemory):
            self._note_short(generation, error)
        elif isinstance(error, SentWrong):
            self._go_on_without(generation, error)
        elif isinstance(error, Hangs):
            self._hangs(error)
        elif isinstance(error, PartFailed):
            self._one_failed(generation, error)
        elif isinstance(error, (PeerError, TimeoutError)):
            self._lose_touch(generation, error)
        else:
            raise error

    def _go_on_without(self, generation: HolderGeneration, error: SentWrong) -> None:
        """Without the device that sends what it should not: as if it had died, but it is named.

        Of two that differ the witness is believed, unless it has blamed another one before.
        """
        device, cleared = error.device, error.cleared
        for one in cleared:
            self._reports.faulty.pop(self._reports.name(one), None)
        if device is not None and error.witness != self._mesh.self_id:
            blamed = self._blamed.setdefault(error.witness, set())
            blamed.add(device)
            if len(blamed) > 1 or device == self._mesh.self_id:
                device, cleared = error.witness, frozenset(blamed - {error.witness})
        if device is not None:
            name = self._reports.name(device)
            why = f"{name} reports one device after another as failed"
            if device == error.device:
                why = str(error)
            elif error.device == self._mesh.self_id:
                why = f"{name} refuses what this device sends ({error})"
            self._name(device, why)
        self._tell(self._rules.sends_wrong, device, cleared)

    def _name(self, device: str, why: str) -> None:
        name = self._reports.name(device)
        self._reports.faulty[name] = why
        self._reports.warn(f"{why}: {name} is not used any more in this training", name)

    def _one_failed(self, generation: HolderGeneration, failed: PartFailed) -> None:
        """Raises what it says, where others have had it too."""
        step = self._reports.reported.step
        if isinstance(failed.error, PeerError):
            if not self._complaints.is_too_often(failed.device, step):
                self._lose_touch(generation, failed)
                return
        elif self._complaints.ends_job(failed.device):
            raise failed.error
        self._name(failed.device, f"{failed}; continuing without {failed.name}")
        self._tell(self._rules.sends_wrong, failed.device)

    def link_ended(self, one: str, other: str) -> bool:
        """The first of them says so; whether that is believed."""
        if not self._complaints.is_link_false(one, other, self._reports.reported.step):
            return True
        name, whose = self._reports.name(one), self._reports.name(other)
        if name in self._reports.faulty:
            return False
        self._name(one, f"{name} says again and again that its connection to {whose} has ended")
        self._tell(self._rules.sends_wrong, one)
        return False

    def _note_short(self, generation: HolderGeneration, error: StageOutOfMemory) -> None:
        """It gets less than the plan asked of it, whatever it believes to have."""
        assert self._answer is not None
        if not generation.assignment.stages_of(error.device):  # the holder: no plan asks less of it
            self._lose_touch(generation, error)
            return
        short = error.short
        predicted = self._answer.plan.predicted
        planned = predicted.host_peak_bytes if short.in_host else predicted.peak_bytes
        asked = (planned or {}).get(error.name, short.of(short.has))
        step, has_begun = self._reports.reported.step, self._reports.steps_made
        when = f"after step {step}" if has_begun else "in the first round"
        self._reports.warn(f"{error} {when}: planning with what it has")
        most = min(short.of(short.has), smaller_budget(asked, self._settings.less_memory_share))
        less = short.lowered(short.has, most)
        self._tell(self._rules.out_of_memory, error.device, less)

    def _lose_touch(self, generation: HolderGeneration, error: Exception) -> None:
        """Something cannot be reached; the mesh finds out what, or nothing is wrong any more."""
        why = str(error) or "a device took too long"
        log.info("generation_disturbed", why=why)
        if self.generation is generation:
            self._tell(self._rules.round_interrupted, why)


REPORT_SECONDS = 7.0
"""That nothing moves is said after so long, and each time after three times as long as before."""


async def silence(
    mesh: Mesh,
    generation: HolderGeneration,
    say: Callable[[str], None],
    settings: RecoverySettings,
) -> SentWrong | Hangs | frozenset[str]:
    """Wait until a device has kept back what others wait for, while nothing moves at all.

    Or until one answers nothing, while no stage reports anything. Or until nothing has moved for
    long: then these devices have not finished what was ordered.

    Args:
        say: called where nothing moves and no device is to blame.
    """
    tracker, warmups = generation.tracker, [place.warmup for place in generation.assignment.stages]
    before: Mapping[str, ProgressCounters] = {}
    heard, asked_at = tracker.heard, monotonic()
    signs: dict[str, Signs] = {}  # of all but this device, since a stage has reported
    still_since, due = asked_at, REPORT_SECONDS
    watch = StallDetector(asked_at, settings)
    while True:
        await asyncio.sleep(settings.silence_look_seconds)
        # what a slow data set has not given yet, no stage is to blame for
        if tracker.heard != heard or not tracker.waits_for or generation.waits_for_user:
            heard, before, still_since, due = tracker.heard, {}, monotonic(), REPORT_SECONDS
            signs = {}
            watch.moved(still_since)
            continue
        standings = await generation.standings()
        now = monotonic()
        silent = _silent(mesh, generation, signs, standings, now, settings)
        if silent is not None and tracker.heard == heard:
            return silent
        if len(standings) < len(generation.assignment.devices):
            before = {}
            continue
        counters = {device: counter for device, (counter, _) in standings.items()}
        if now >= watch.due and watch.look(counters, now) and tracker.heard == heard:
            return tracker.waits_for
        if before and not has_moved(before, counters, now - asked_at, settings):
            every = {device: standing for device, (_, standing) in standings.items()}
            found = unsent(every, warmups, settings.silence_seconds)
            if found is not None and tracker.heard == heard:
                return _describe_stall(generation, found)
            if now - still_since >= due:
                names = ", ".join(sorted(generation.name(device) for device in tracker.waits_for))
                say(f"nothing has moved for {now - still_since:.0f} s: {names} did not finish")
                due = 3 * (now - still_since)
        else:
            still_since, due = now, REPORT_SECONDS
        before, asked_at = counters, now


def _describe_stall(generation: HolderGeneration, found: Unsent) -> SentWrong:
    wait = found.wait
    what = "gradients" if wait.backward else "activations"
    sender, receiver = generation.name(found.sender), generation.name(found.receiver)
    return SentWrong(
        found.sender,
        f"{sender} has not sent the {what} of micro-batch {wait.micro_batch} that {receiver} has "
        f"waited for {wait.seconds:.0f} s",
        found.receiver,
    )


def _silent(
    mesh: Mesh,
    generation: HolderGeneration,
    signs: dict[str, Signs],
    standings: Mapping[str, tuple[ProgressCounters, Standing]],
    now: float,
    settings: RecoverySettings,
) -> Hangs | None:
    for device in generation.assignment.devices:
        if device == mesh.self_id:
            continue
        since = now - settings.silence_look_seconds
        here = signs.setdefault(device, Signs(since, settings.talk_limits))
        if device in standings:
            here.heard(WorkSign(standings[device][0].tasks, 0), now)
        found = hanging(mesh, device, here, now)
        if found is not None:
            return found
    return None
