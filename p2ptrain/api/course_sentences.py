"""One plain sentence for each thing that the page, a terminal or a notebook shows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from p2ptrain.api.job_course import CoursePlan, CourseStage, JobCourse
from p2ptrain.console import counted

_SHARES = {"samples": "sample", "micro_batches": "piece", "tiles": "tile"}

LATELY_POINTS = 32
"""The speed of so many points is that of the near future."""

SPEED_POINTS = 8


def headline(course: JobCourse) -> str:
    """The job in a few words."""
    of = f" of {course.steps:,}" if course.steps else ""
    step = 0 if course.last is None else course.last.step
    words = {
        "starting": f"Getting ready to train {course.model}",
        "training": f"Training {course.model}: step {step:,}{of}",
        "waiting": f"Training {course.model} stands still at step {step:,}{of}",
        "paused": f"Training {course.model} is paused at step {step:,}{of}",
        "done": f"Done: {course.model}, {counted(step, 'step')}",
        "failed": f"Training {course.model} failed at step {step:,}{of}",
        "stopped": f"Training {course.model} was stopped at step {step:,}{of}",
    }
    return words[course.state]


def job_sentence(course: JobCourse, left_seconds: float | None) -> str:
    """What to expect next."""
    place = "here" if course.holder == "here" else f"on {course.holder}"
    match course.state:
        case "starting":
            return f"The data is {place}. Devices are being measured, then the plan is made."
        case "waiting":
            return f"It continues when {course.message or 'a device'} is back."
        case "paused":
            return f"{course.message} has paused it. The weights stay on the devices."
        case "done":
            return f"The trained weights are {place}."
        case "failed":
            return course.message or "No reason is known."
        case "stopped":
            return f"Start it again {place}: p2ptrain train."
    if left_seconds is None:
        return f"The data is {place}."
    return f"The data is {place}. About {duration(left_seconds)} left."


def seconds_left(course: JobCourse) -> float | None:
    """At the speed of late, pauses included; None where it cannot be known."""
    if course.state not in ("training", "paused") or course.steps is None or course.last is None:
        return None
    points = [*course.points[-LATELY_POINTS:], course.last]
    made, took = points[-1].step - points[0].step, points[-1].seconds - points[0].seconds
    if made <= 0 or took <= 0:
        return None
    return max(course.steps - course.last.step, 0) * took / made


def speed_lately(course: JobCourse) -> float | None:
    """Samples a second: the median of late, because single steps are uneven."""
    points = [*course.points[-SPEED_POINTS:], course.last]
    speeds = [p.samples_per_s for p in points if p is not None and p.samples_per_s is not None]
    return median(speeds) if speeds else None


def duration(seconds: float) -> str:
    """As people say it: two units at most."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    minutes, hours = round(whole / 60), whole // 3600
    if minutes < 60:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {(whole % 3600) // 60} min"
    return f"{hours // 24} days {hours % 24} h"


def stage_sentence(stage: CourseStage, number: int, count: int) -> str:
    """Who computes it, and how the work is divided."""
    names = " and ".join(device.name for device in stage.devices)
    which = "The whole model" if count == 1 else f"Part {number + 1} of {count}"
    if len(stage.devices) == 1:
        return f"{which}: {names} computes {stage.layers}."
    unit = _SHARES.get(stage.shares, "part")
    shares = ":".join(str(device.share) for device in stage.devices)
    return f"{which}: {names} compute {stage.layers} and share its {unit}s {shares}."


def part_of(plan: CoursePlan | None, name: str) -> str | None:
    """What a device computes; None without a part."""
    stages = () if plan is None else plan.stages
    parts = [_part(stage, name) for stage in stages]
    return "; ".join(part for part in parts if part is not None) or None


def _part(stage: CourseStage, name: str) -> str | None:
    mine = [device.share for device in stage.devices if device.name == name]
    if not mine:
        return None
    whole = sum(device.share for device in stage.devices)
    if len(stage.devices) == 1:
        return stage.layers
    unit = _SHARES.get(stage.shares, "part")
    return f"{stage.layers}, {mine[0]} of {counted(whole, unit)}"


def why_idle(plan: CoursePlan | None, name: str) -> str | None:
    """Why the plan leaves a device out; None where it does not say."""
    left_out = () if plan is None else plan.left_out
    return next((out.reason for out in left_out if out.name == name), None)


def device_sentence(name: str, state: str, reason: str | None, course: JobCourse | None) -> str:
    """A device's state.

    Args:
        state: as of `DeviceView`.
        reason: why it was cut off.
        course: of the job that runs; None without one.
    """
    match state:
        case "suspect":
            return "Has not answered for a moment; the others are finding out why."
        case "dead":
            return "Stopped answering. Start p2ptrain join there again to have it back."
        case "left":
            return "Has left. Start p2ptrain join there to have it back."
        case "away":
            return "Paired, and not here now. Start p2ptrain join there."
        case "cut_off":
            return f"Cut off: {reason}."
    if course is None:
        return "Ready. Nothing is being trained."
    return _sentence_of_job(name, course)


def with_condition(sentence: str, said: str, *, is_all: bool) -> str:
    """A device's state after what it says of itself, such as "slow: in use"; "" is nothing.

    Args:
        is_all: there is nothing else to say of it.
    """
    if not said:
        return sentence
    own = f"{said[0].upper()}{said[1:].rstrip('.')}."
    return own if is_all else f"{own} {sentence}"


def _sentence_of_job(name: str, course: JobCourse) -> str:
    part, idle = part_of(course.plan, name), why_idle(course.plan, name)
    holds = "Has the data. " if name == course.holder else ""
    if course.state == "waiting":
        return f"{holds}Waits until {course.message or 'a device'} is back."
    if course.state == "paused" and part is not None:
        return f"{holds}Paused; keeps {part}."
    if course.plan is None:
        return f"{holds}Is being measured for {course.model}."
    if part is not None:
        return f"{holds}Computes {part}."
    if idle is not None:
        return f"{holds}Idle: {idle}."
    return f"{holds}Idle: it came after the plan was made; the next plan considers it."


def tone_of(state: str, *, has_part: bool, is_training: bool) -> str:
    """How a device looks at a glance."""
    if state in ("suspect", "cut_off"):
        return "trouble"
    if state != "alive":
        return "gone"
    if not is_training:
        return "ready"
    return "busy" if has_part else "idle"


def plan_reasons(plan: CoursePlan) -> Sequence[str]:
    """Why the plan is as it is, as far as it says."""
    left_out = [f"{out.name} is not used: {out.reason}." for out in plan.left_out]
    changes = [f"This plan changes results: {text}." for text in plan.changes_results]
    return [*left_out, *changes]


def kind_of(info: dict[str, object]) -> str | None:
    """What a device says that it is."""
    said = [info.get(key) for key in ("device", "system")]
    words = [str(value) for value in said if isinstance(value, str) and value]
    return ", ".join(words) or None
