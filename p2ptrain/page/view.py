"""From what a member sees to the page's state. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import segno

from p2ptrain.api import course_sentences as sentences
from p2ptrain.api.job_course import ENDED, CourseLink, CoursePlan, CourseStage, JobCourse
from p2ptrain.api.views import DeviceStatus, MemberStatus, NodeStatus
from p2ptrain.manners.condition import Work
from p2ptrain.page.state import (
    CurveView,
    DeviceView,
    HouseholdView,
    JobView,
    LinkView,
    NoteView,
    PageState,
    PairingView,
    PlanView,
    StageView,
)

COLORS = 8

NOTES_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Seen:
    """What a member sees at one time.

    Attributes:
        course: of the job that runs, else of the last one known.
        begun_at: when that job began, in Unix seconds.
        code: of the pairing window, with the time at which it closes; None where it is closed.
        notes: what has happened in the household, oldest first.
        rates: what this device's links carry now, by the other one's id: (sent, received) bytes/s.
        version: of p2ptrain here.
        scripts: that its person has allowed to be started here.
    """

    status: NodeStatus
    trusted: Sequence[DeviceStatus]
    version: str
    course: JobCourse | None = None
    begun_at: float = 0.0
    code: tuple[str, int] | None = None
    notes: Sequence[NoteView] = ()
    rates: Mapping[str, tuple[float, float]] | None = None
    scripts: Sequence[str] = ()


def page_state(seen: Seen, *, may_change: bool) -> PageState:
    """The state for a browser that may change things, or for one that only looks.

    A pairing code is not shown to one that only looks.
    """
    status, course = seen.status, seen.course
    coordinator = status.coordinator
    plan = None if course is None else course.plan
    return PageState(
        household=HouseholdView(
            name=status.name,
            id=status.id,
            version=seen.version,
            coordinator=None if coordinator is None else coordinator.name,
            may_change=may_change,
            scripts=tuple(seen.scripts) if may_change else (),
        ),
        devices=_devices(seen),
        links=_links(seen),
        notes=_notes(seen),
        job=None if course is None else _job(seen, course, may_change=may_change),
        plan=None if plan is None else _plan(plan),
        curve=None if course is None else _curve(course),
        pairing=_pairing(*seen.code) if seen.code is not None and may_change else None,
    )


# -- devices -------------------------------------------------------------------------------------


def _devices(seen: Seen) -> tuple[DeviceView, ...]:
    status, course = seen.status, seen.course
    running = course if course is not None and course.state not in ENDED else None
    cut_off = {device.id: device.reason for device in status.cut_off}
    known = {m.id for m in status.members}
    away = [MemberStatus(d.name, d.id, "away") for d in seen.trusted if d.id not in known]
    everyone = (*status.members, *away)
    names = sorted({m.name for m in everyone} | {d.name for d in seen.trusted})
    views = []
    for member in everyone:
        job = None if member.state == "away" else running
        number = names.index(member.name)
        views.append(_device(member, status.id, cut_off.get(member.id), job, number))
    return tuple(sorted(views, key=lambda view: (not view.is_here, _rank(view), view.name)))


def _rank(view: DeviceView) -> int:
    return ("busy", "idle", "ready", "trouble", "gone").index(view.tone)


def _device(
    member: MemberStatus, own: str, reason: str | None, course: JobCourse | None, index: int
) -> DeviceView:
    state = "cut_off" if reason is not None else member.state
    plan = None if course is None else course.plan
    part = sentences.part_of(plan, member.name)
    needed, on_host = ({}, {}) if plan is None else (plan.peak_bytes, plan.host_bytes)
    has_two = member.name in on_host
    return DeviceView(
        name=member.name,
        id=member.id,
        state=state,
        is_here=member.id == own,
        role=member.role or "member",
        kind=sentences.kind_of(dict(member.info)),
        threads=member.threads,
        memory_bytes=member.memory_bytes,
        needed_bytes=(on_host if has_two else needed).get(member.name),
        alone_samples_per_s=None if plan is None else plan.alone_samples_per_s.get(member.name),
        address=member.address,
        interface=member.interface,
        version=member.version,
        color=index % COLORS,
        part=part,
        tone=sentences.tone_of(
            state,
            has_part=part is not None,
            is_training=course is not None or member.work == Work.PAUSED,
        ),
        sentence=sentences.with_condition(
            sentences.device_sentence(member.name, state, reason, course),
            member.sentence if state == "alive" else "",
            is_all=part is None and member.work == Work.PAUSED,
        ),
        work=member.work,
        others_cpu_percent=member.others_cpu_percent,
        battery_percent=member.battery_percent,
        power=member.power,
        temperature_c=member.temperature_c,
        used_bytes=member.memory.used_bytes,
        card_bytes=member.memory.card_bytes,
        card_used_bytes=member.memory.card_used_bytes,
        card_offered_bytes=member.memory.card_offered_bytes,
        card_needed_bytes=needed.get(member.name) if has_two else None,
    )


def _links(seen: Seen) -> tuple[LinkView, ...]:
    """Those of the plan as measured, and this device's own with what they carry now."""
    status, rates = seen.status, seen.rates or {}
    plan = None if seen.course is None else seen.course.plan
    found: dict[tuple[str, str], LinkView] = {}
    for link in () if plan is None else plan.links:
        found[link.sender, link.receiver] = _measured(link)
    names = {m.id: m.name for m in status.members}
    for device, (sent, received) in rates.items():
        other = names.get(device)
        if other is None:
            continue
        for ends, now in (((status.name, other), sent), ((other, status.name), received)):
            known = found.get(ends, LinkView(*ends, None, None, None))
            rate = float(f"{now:.2g}")
            found[ends] = LinkView(*ends, known.bytes_per_s, known.latency_s, rate)
    return tuple(found[ends] for ends in sorted(found))


def _measured(link: CourseLink) -> LinkView:
    return LinkView(link.sender, link.receiver, link.bytes_per_s, link.latency_s, None)


# -- the job -------------------------------------------------------------------------------------


def _job(seen: Seen, course: JobCourse, *, may_change: bool) -> JobView:
    left, last = sentences.seconds_left(course), course.last
    plan, speed = course.plan, sentences.speed_lately(course)
    each = course.tokens_per_sample
    return JobView(
        run=course.run,
        state=course.state,
        model=course.model,
        holder=course.holder,
        headline=sentences.headline(course),
        sentence=sentences.job_sentence(course, left),
        step=0 if last is None else last.step,
        steps=course.steps,
        loss=None if last is None else last.loss,
        lr=None if last is None else last.lr,
        samples_per_s=speed,
        tokens_per_s=None if speed is None or each is None else speed * each,
        predicted_samples_per_s=None if plan is None else plan.predicted_samples_per_s,
        begun_at=seen.begun_at,
        seconds_left=left,
        limit=course.limit or None,
        energy=course.energy or None,
        why_not_steer=_why_not_steer(course, may_change=may_change),
    )


def _why_not_steer(course: JobCourse, *, may_change: bool) -> str | None:
    if course.state in ENDED:
        return "It has ended."
    if course.is_reported_only:
        return f"{course.holder} runs an older p2ptrain."
    return None if may_change else "This browser may only look."


def _plan(plan: CoursePlan) -> PlanView:
    count = len(plan.stages)
    return PlanView(
        epoch=plan.epoch,
        sentence=plan.head,
        stages=tuple(_stage(stage, i, count) for i, stage in enumerate(plan.stages)),
        reasons=tuple(sentences.plan_reasons(plan)),
    )


def _stage(stage: CourseStage, number: int, count: int) -> StageView:
    sentence = sentences.stage_sentence(stage, number, count)
    return StageView(*stage.units, stage.layers, sentence, stage.devices)


def _curve(course: JobCourse) -> CurveView:
    points = tuple((p.step, p.seconds, p.loss, p.samples_per_s, p.lr) for p in course.points)
    return CurveView(course.run, course.stride, points, course.evals, course.earlier)


def _notes(seen: Seen) -> tuple[NoteView, ...]:
    """The household's and the job's, newest last."""
    course = () if seen.course is None else seen.course.notes
    of_job = [NoteView(round(seen.begun_at + n.seconds), n.kind, n.text) for n in course]
    return tuple(sorted((*seen.notes, *of_job), key=lambda note: note.at)[-NOTES_SHOWN:])


# -- pairing -------------------------------------------------------------------------------------


def _pairing(code: str, closes_at: int) -> PairingView:
    command = f"p2ptrain join --code {code}"
    return PairingView(code, closes_at, command, qr_modules(command))


@lru_cache(maxsize=8)
def qr_modules(text: str) -> tuple[str, ...]:
    """The rows of `text`'s QR code, "1" is dark."""
    rows = segno.make(text, micro=False).matrix
    return tuple("".join("1" if module else "0" for module in row) for row in rows)
