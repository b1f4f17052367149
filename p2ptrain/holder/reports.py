"""What the user sees of a job: every number once, however often steps are computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import get_clock_info, monotonic
from types import MappingProxyType

from p2ptrain import events, failpoints
from p2ptrain.coordinator.memory_model import taken_beside_bytes
from p2ptrain.errors import DeviceLost
from p2ptrain.events import (
    Eval,
    Event,
    Failure,
    LeftOut,
    PlanDevice,
    PlanStage,
    Recovered,
    Step,
    Waiting,
)
from p2ptrain.holder.planning.reconfiguration import ReconfigureReply
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import MemberState, Mesh, display_name
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.plan.types.plan import PlannedStage as Stage
from p2ptrain.recovery.cores.job_history import ReportedProgress, ReportOnce

log = get_logger(__name__)

TICK_SECONDS = get_clock_info("monotonic").resolution
"""16 ms on Windows before Python 3.13: steps of a small model may begin and end within one."""


STEPS_UNSEEN = 100
"""Fewest that are expected of data whose end is unknown."""


def rate(samples: int, seconds: float) -> float:
    """Samples, or tokens, per second, as far as the clock shows."""
    return samples / max(seconds, TICK_SECONDS)


def step_event(
    step: int,
    loss: float,
    samples: int,
    seconds: float,
    rates: Sequence[float] = (),
    grad_norm: float | None = None,
    scale: float | None = None,
    tokens: int = 0,
) -> Step:
    """Of update `step`, with `samples` samples, that has taken so long; the rest as `Step`.

    Args:
        tokens: of these samples, where that is what they are made of.
    """
    lr, speed = rates[0] if rates else None, rate(samples, seconds)
    token_speed = rate(tokens, seconds) if tokens else None
    return Step(step, loss, speed, seconds, lr, tuple(rates), grad_norm, scale, token_speed)


class JobReports:
    """See the module.

    Args:
        reported: what was reported already, by an earlier process too.

    Attributes:
        write: writes down what is about to be reported.
    """

    def __init__(
        self,
        mesh: Mesh,
        reported: ReportedProgress,
        emit: Callable[[Event], None],
        write: Callable[[ReportedProgress], None],
    ) -> None:
        self._mesh = mesh
        self._emit = emit
        self.write = write
        self._once = ReportOnce(reported)
        self._first_step = reported.step
        self._answer: ReconfigureReply | None = None  # of the generation in force
        self._began_at: float | None = None
        self._last_step_at = monotonic()
        self._resumed_at = monotonic()
        self._sign_at: float | None = None  # of trouble that is not over
        self._recovers = False  # a generation has begun after it, and no new step was made yet
        self._hints: dict[str, str] = {}  # of the dead, by id
        self._names: dict[str, str] = {}  # of members as a generation began, by id
        self._left_out: set[int] = set()  # steps
        self._without_gradient: set[int] = set()  # steps
        self.samples = 0  # of the updates reported here
        self.has_named_data = False  # as slower than training
        self.faulty: dict[str, str] = {}  # names of devices that get no more work, and why

    @property
    def reported(self) -> ReportedProgress:
        """What was reported."""
        return self._once.reported

    @property
    def steps_made(self) -> int:
        """Updates made, those of an earlier run or process not counted."""
        return self._once.reported.step - self._first_step

    def remaining(self, steps: int | None) -> int:
        """Updates to be made; where their number is unknown, as many as were made."""
        made = self._once.reported.step
        return max(made, STEPS_UNSEEN) if steps is None else max(steps - made, 0)

    @property
    def seconds(self) -> float:
        """Since the first generation began."""
        return monotonic() - (self._began_at or monotonic())

    # -- the course ------------------------------------------------------------------------------

    def begin(self, answer: ReconfigureReply, *, after_trouble: bool) -> None:
        """The generation of `answer` begins."""
        self._answer = answer
        self._names |= {device: member.name for device, member in self._mesh.members.items()}
        self._recovers |= after_trouble
        if not self._recovers:
            self._sign_at = None
        if self._began_at is None:
            self._began_at = self._last_step_at = monotonic()

    def goes_on_from(self, step: int) -> None:
        """A generation begins with `step` updates done; all were reported, known here or
        not."""
        unknown = self._once.goes_on_from(step)
        if unknown:
            log.info("reports_lost", steps=unknown, step=step)
            self._first_step += unknown  # an earlier process made them
            self.write(self._once.reported)

    def resumed(self) -> None:
        """The first sample of a generation is on its way."""
        self._resumed_at = monotonic()

    def trouble(self, since: float | None = None) -> None:
        """Training stands still, since now (or `since`) if it did not before."""
        if self._sign_at is None:
            self._sign_at = monotonic() if since is None else since

    def pause_over(self, began_at: float) -> None:
        """What a recovery took does not count a person's pause, which began then."""
        now = monotonic()
        if self._sign_at is not None:
            self._sign_at += now - max(began_at, self._sign_at)
        self._resumed_at += now - max(began_at, self._resumed_at)

    def step(
        self,
        step: int,
        loss: float,
        samples: int,
        rates: Sequence[float] = (),
        grad_norm: float | None = None,
        scale: float | None = None,
        tokens: int = 0,
    ) -> None:
        """`step` updates count; the last one was of these numbers, as `step_event` has them."""
        if not self._once.step(step):
            return
        self.samples += samples
        self.write(self._once.reported)
        failpoints.reach_now("journal.after", device=self._mesh.self_id, step=step - 1)
        now = monotonic()
        if self._sign_at is not None and self._answer is not None:
            self._emit(self._recovered(self._answer, self._sign_at, now))
        self._sign_at, self._recovers = None, False
        seconds, self._last_step_at = now - self._last_step_at, now
        self._emit(step_event(step, loss, samples, seconds, rates, grad_norm, scale, tokens))

    def _recovered(self, answer: ReconfigureReply, sign_at: float, now: float) -> Recovered:
        return Recovered(
            epoch=answer.assignment.key.generation,
            seconds=now - sign_at,
            replayed_steps=answer.choice.replayed,
            resumed_seconds=self._resumed_at - sign_at,
            planning_seconds=answer.made.seconds,
            moved_bytes=answer.moved_bytes,
            version=answer.choice.version.step,
        )

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics after `step` updates."""
        if self._once.eval(step):
            self.write(self._once.reported)
            self._emit(Eval(step, metrics))

    def left_out(self, step: int) -> None:
        """That update is not finite: it counts and changes nothing. Before `step` reports it."""
        if step <= self.reported.step:
            return
        self._warn_of_steps(
            self._left_out,
            step,
            f"step {step} has NaN or infinite values: it is skipped, and training continues",
        )

    def counts_nothing(self, step: int) -> None:
        """The mini-batch of that update has no target that counts."""
        self._warn_of_steps(
            self._without_gradient,
            step,
            f"the mini-batch of step {step} counts nothing (all of its targets are ignored, or its "
            "normalizer is 0): the update is made without a gradient",
        )

    def _warn_of_steps(self, known: set[int], step: int, message: str) -> None:
        """With the 1st such step, and the 2nd, 4th, 8th and so on; once each."""
        if step in known:
            return
        known.add(step)
        count = len(known)
        if count & (count - 1):
            return
        self.warn(message if count == 1 else f"{message}. There are {count} such steps so far")

    @property
    def updates_left_out(self) -> int:
        """How many."""
        return len(self._left_out)

    # -- trouble ---------------------------------------------------------------------------------

    def warn(self, message: str, name: str | None = None) -> None:
        """A warning for the user; `name`: of the device that it is about."""
        self._emit(events.Warning(message, name))

    def hint(self, device: str, hint: str) -> None:
        """What may have killed a device: ` (...)`, or nothing."""
        self._hints[device] = hint

    def failure(self, device: str, *, is_short: bool) -> None:
        """A device is gone that trained. One that said farewell is none.

        Args:
            is_short: it was short of memory.
        """
        member = self._mesh.members.get(device)
        if member is not None and member.state is MemberState.LEFT:
            return
        name = self.name(device)
        self._emit(Failure(name))
        if is_short:
            self.warn(f"{name} is gone{self._hints.get(device, '')}")

    def waiting(self, devices: tuple[str, ...]) -> None:
        """The job waits for these."""
        self._emit(Waiting(", ".join(sorted(self.name(device) for device in devices))))

    def lost(self, reason: str, places: tuple[str, ...], layers: str) -> DeviceLost:
        """What was only on the devices in `places` is nowhere any more.

        Args:
            layers: what they had, by the names in the user's module.
        """
        if places == (self._mesh.self_id,):
            name = self._mesh.name
            return DeviceLost(
                f"what {name} had was lost when p2ptrain last stopped there, {layers}: {reason}. "
                "Start again from the beginning, or with --resume from the last checkpoint",
                name=name,
            )
        names = sorted(self.name(device) for device in places) or ["a device"]
        verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
        hint = "".join(dict.fromkeys(self._hints.get(device, "") for device in places))
        return DeviceLost(
            f"{', '.join(names)} {verb} gone{hint}, and {layers} with {them}: {reason}. Start "
            f"again without {them}, or with --resume from the last checkpoint",
            name=names[0],
        )

    def name(self, device: str) -> str:
        """A member's name, also of one that was removed since; else the beginning of its id."""
        known = None if device in self._mesh.members else self._names.get(device)
        return known or display_name(self._mesh, device)


def plan_event(
    answer: ReconfigureReply,
    description: ModelDescription,
    reason: str,
    kept_bytes: Mapping[str, int] = MappingProxyType({}),
) -> events.Plan:
    """The event that announces a plan.

    Args:
        kept_bytes: what copies of the whole model take beside that, by the name of a device.
    """
    assignment, plan, made = answer.assignment, answer.plan, answer.made
    planned = plan.predicted
    beside_bytes = {
        one.name: taken_beside_bytes(one.taken_bytes) + made.protected.taken_bytes.get(device, 0)
        for device, one in made.candidates.items()
    }
    apart = planned.host_peak_bytes or {}
    with_copies = {
        name: planned.needed(name).of_host + beside_bytes.get(name, 0) + kept_bytes.get(name, 0)
        for name in planned.peak_bytes
    }
    return events.Plan(
        epoch=assignment.key.generation,
        reason=reason,
        stages=tuple(_stage(stage, description) for stage in plan.stages),
        micro_batch=plan.micro_batch,
        micro_batches=assignment.micro_batches,
        predicted_samples_per_s=plan.predicted.samples_per_s,
        left_out=tuple(LeftOut(out.name, out.reason) for out in plan.left_out),
        changes_results=answer.changes_results,
        wire=assignment.wire.value,
        mode="sync" if assignment.asynchrony is None else "async",
        mode_reason=plan.mode_reason,
        predicted_peak_bytes={**with_copies, **{name: planned.peak_bytes[name] for name in apart}},
        predicted_host_bytes={name: with_copies[name] for name in apart},
        alone_samples_per_s={
            one.name: speed
            for one in made.candidates.values()
            if (speed := one.samples_per_s) is not None
        },
    )


def _stage(stage: Stage, description: ModelDescription) -> PlanStage:
    return PlanStage(
        units=stage.units,
        devices=tuple(PlanDevice(device.name, device.share) for device in stage.devices),
        parameters=tuple(description.state_dict_names(*stage.units)),
        allocation=stage.allocation.value,
        warmup=stage.warmup,
    )
