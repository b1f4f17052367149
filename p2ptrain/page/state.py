"""What the page shows, as one declared form: `/state` is this as JSON.

Sections change independently of each other; the stream sends those that did. Times are Unix
seconds by the clock of the device that serves the page, and do not move from one state to the next.
`/metrics` is the same as Prometheus reads it (text format 0.0.4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from p2ptrain.api.job_course import CourseMetrics, CourseShare, EarlierRun


@dataclass(frozen=True, slots=True)
class HouseholdView:
    """Who shows this.

    Attributes:
        coordinator: name of the device that plans; None while there is none.
        may_change: whether this browser may invite, remove and stop.
        notice: why the page shows nothing new; None where it does.
        scripts: trainings that this browser may start.
    """

    name: str
    id: str
    version: str
    coordinator: str | None
    may_change: bool
    notice: str | None = None
    scripts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device as a card.

    Attributes:
        state: "alive", "suspect", "dead", "left", "away" (paired, not here) or "cut_off".
        is_here: this device shows the page.
        kind: what it is, in words; None where it has not said.
        memory_bytes, used_bytes: that p2ptrain may use there, and what jobs take of it now.
        needed_bytes: by the plan.
        card_bytes: an accelerator's memory.
        card_offered_bytes, card_used_bytes, card_needed_bytes: as those, of that.
        alone_samples_per_s: of the job, without the others; None where it was not measured.
        color: 0 to 7, the same for its part of the model and its links.
        part: its layers and share; None without a part.
        tone: "busy", "ready", "idle", "trouble" or "gone", for the eye.
        sentence: its state in words.
        work: "full", "slow" or "paused", as its person wants it.
        others_cpu_percent: of its processor, used by other programs; None: not known, as below.
        battery_percent, power: how full its battery is; "mains" or "battery".
        temperature_c: of its hottest sensor.
    """

    name: str
    id: str
    state: str
    is_here: bool
    role: str
    kind: str | None
    threads: int | None
    memory_bytes: int | None
    needed_bytes: int | None
    alone_samples_per_s: float | None
    address: str | None
    interface: str | None
    version: str | None
    color: int
    part: str | None
    tone: str
    sentence: str
    work: str = "full"
    others_cpu_percent: int | None = None
    battery_percent: int | None = None
    power: str | None = None
    temperature_c: int | None = None
    used_bytes: int | None = None
    card_bytes: int | None = None
    card_used_bytes: int | None = None
    card_offered_bytes: int | None = None
    card_needed_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LinkView:
    """One direction of a link.

    Attributes:
        bytes_per_s, latency_s: as last measured; None where it never was.
        now_bytes_per_s: what it carries now; None where this device cannot see that.
    """

    sender: str
    receiver: str
    bytes_per_s: float | None
    latency_s: float | None
    now_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class JobView:
    """The job that runs, or the last one.

    Attributes:
        begun_at: when.
        samples_per_s: lately.
        tokens_per_s: the same, where samples are sequences of token ids.
        seconds_left: as fast as lately; None where that is not known.
        headline, sentence: for people.
        limit: what limits it now, in a sentence; None where that is not known.
        energy: what it has used, or why that is not known; None before the devices are asked.
        why_not_steer: None where this browser may pause and stop it.
    """

    run: str
    state: str
    model: str
    holder: str
    headline: str
    sentence: str
    step: int
    steps: int | None
    loss: float | None
    lr: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    predicted_samples_per_s: float | None
    begun_at: float
    seconds_left: float | None
    limit: str | None
    energy: str | None
    why_not_steer: str | None


@dataclass(frozen=True, slots=True)
class StageView:
    """A stage in the picture of the model."""

    first_unit: int
    end_unit: int
    layers: str
    sentence: str
    devices: tuple[CourseShare, ...]


@dataclass(frozen=True, slots=True)
class PlanView:
    """The plan in force, with its reasons."""

    epoch: int
    sentence: str
    stages: tuple[StageView, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CurveView:
    """The numbers by step.

    Attributes:
        points: (step, seconds, loss, samples/s, learning rate).
        earlier: runs of the same model before, the newest last.
    """

    run: str
    stride: int
    points: tuple[tuple[int, float, float | None, float | None, float | None], ...]
    evals: tuple[CourseMetrics, ...]
    earlier: tuple[EarlierRun, ...] = ()


@dataclass(frozen=True, slots=True)
class NoteView:
    """Something that happened."""

    at: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class PairingView:
    """An open pairing window.

    Attributes:
        modules: the QR code's rows, "1" is dark.
    """

    code: str
    closes_at: int
    command: str
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PageState:
    """All of it."""

    household: HouseholdView
    devices: tuple[DeviceView, ...]
    links: tuple[LinkView, ...]
    notes: tuple[NoteView, ...]
    job: JobView | None = None
    plan: PlanView | None = None
    curve: CurveView | None = None
    pairing: PairingView | None = None


Sections = Mapping[str, Any]
"""A state as plain data, by section."""


def changes(before: Sections, after: Sections) -> dict[str, Any]:
    """What makes `after` of `before`; empty where nothing has changed.

    A section stands there whole, or None where it is gone; but of a curve that only grew, the new
    points are in "more".
    """
    changed = {
        name: after.get(name)
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    }
    more = _grown(before.get("curve"), after.get("curve")) if "curve" in changed else None
    if more is not None:
        del changed["curve"]
        changed["more"] = more
    return changed


def _grown(before: Any, after: Any) -> dict[str, Any] | None:
    """The new points of a curve that has only got some more; None where it changed otherwise."""
    if before is None or after is None:
        return None
    if (before["run"], before["stride"]) != (after["run"], after["stride"]):
        return None
    old, new = before["points"], after["points"]
    if len(new) < len(old) or new[: len(old)] != old:
        return None
    more = {"points": new[len(old) :]}
    return more if before["evals"] == after["evals"] else {**more, "evals": after["evals"]}


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Sample = tuple[dict[str, str], float | None]


_OF_DEVICES: tuple[tuple[str, str, Callable[[DeviceView], float | None]], ...] = (
    ("memory_bytes", "Memory that p2ptrain may use on a device.", lambda d: d.memory_bytes),
    ("used_bytes", "Of that, what jobs take now.", lambda d: d.used_bytes),
    (
        "card_used_bytes",
        "Memory of a device's accelerator that p2ptrain has taken.",
        lambda d: d.card_used_bytes,
    ),
    (
        "card_offered_bytes",
        "Memory of a device's accelerator that p2ptrain may use.",
        lambda d: d.card_offered_bytes,
    ),
    (
        "needed_bytes",
        "Memory that a device needs for its part of the plan, beside an accelerator's own.",
        lambda d: d.needed_bytes,
    ),
    (
        "card_needed_bytes",
        "Memory of a device's accelerator that its part of the plan needs.",
        lambda d: d.card_needed_bytes,
    ),
    (
        "alone_samples_per_second",
        "What a device would do of the job without the others, as measured.",
        lambda d: d.alone_samples_per_s,
    ),
    ("has_part", "1 where a device has a part of the plan.", lambda d: d.part is not None),
)


def metrics_text(state: PageState) -> str:
    """What is known; what is not is left out."""
    job = state.job
    counts = sorted(Counter(d.state for d in state.devices).items())
    by_state = [({"state": name}, n) for name, n in counts]
    lines = _gauge("devices", "Devices of the household, by state.", by_state)
    for name, help_text, read in _OF_DEVICES:
        samples = [({"device": d.name}, read(d)) for d in state.devices]
        lines += _gauge(f"device_{name}", help_text, samples)
    ends = [({"from": link.sender, "to": link.receiver}, link) for link in state.links]
    lines += _gauge(
        "link_bytes_per_second",
        "A link as last measured, one direction.",
        [(labels, link.bytes_per_s) for labels, link in ends],
    )
    lines += _gauge(
        "link_carries_bytes_per_second",
        "What a link of this device carries now, one direction.",
        [(labels, link.now_bytes_per_s) for labels, link in ends],
    )
    if job is None:
        return "".join(lines)
    of_job = {"model": job.model, "holder": job.holder}
    for name, help_text, value in (
        ("running", "1 while a job runs.", job.state in ("starting", "training", "waiting")),
        ("step", "Updates that count.", job.step),
        ("steps", "Updates of the whole job.", job.steps),
        ("loss", "Of the last step.", job.loss),
        ("learning_rate", "Of the last step.", job.lr),
        ("samples_per_second", "Median of the last steps.", job.samples_per_s),
        ("tokens_per_second", "The same, of token ids.", job.tokens_per_s),
        ("predicted_samples_per_second", "By the plan.", job.predicted_samples_per_s),
        ("left_seconds", "Until the job is done.", job.seconds_left),
    ):
        lines += _gauge(f"job_{name}", help_text, [(of_job, value)])
    return "".join(lines)


def _gauge(name: str, help_text: str, samples: Iterable[_Sample]) -> list[str]:
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
        return []
    name = f"p2ptrain_{name}"
    head = [f"# HELP {name} {help_text}\n", f"# TYPE {name} gauge\n"]
    return head + [f"{name}{{{_labels(labels)}}} {float(value):.10g}\n" for labels, value in known]


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
