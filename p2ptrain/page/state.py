"""What the page shows, as one declared form: `/state` is this as JSON.

Sections change independently of each other; the stream sends those that did. Times are Unix
seconds by the clock of the device that serves the page, and do not move from one state to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
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
