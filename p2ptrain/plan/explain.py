"""What limits a job, in plain sentences, from what was measured. Pure.

facts --> speed beside the prediction
          the busiest device or link, and by how much
          each device beside the plan, what it waits for
          why each idle device is idle
          what the planner says of other households
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from p2ptrain.net.forms import write_form
from p2ptrain.plan.types.job_facts import DeviceFacts, JobFacts, LinkFacts, WhatIf
from p2ptrain.plan.types.timeline import TimelineEntry

FULL = 0.8
"""A part of each round from which on a device or link is called the limit."""

NOISE = 0.1
"""By which a measured time may differ from the plan's without a word."""

WORTH = 0.03
"""A gain or loss below is none."""

_AWAITED: Mapping[str, str] = {
    "input": "samples from the data holder",
    "target": "labels from the data holder",
    "output": "the part of the model before it",
    "gradient": "gradients from the part of the model after it",
    "sum": "the sums with the other devices of its group",
    "halo": "its neighbours' parts of the pictures",
    "commit": "the slowest device of the round",
    "order": "the next round",
}


@dataclass(frozen=True, slots=True)
class ExplainedPoint:
    """One sentence.

    Attributes:
        about: "speed", "limit", "device", "idle", "energy", "change" or "advice".
        name: of the device or link that it is about.
        because: the numbers that it stands on.
    """

    about: str
    text: str
    name: str = ""
    because: Mapping[str, float] | None = None


def explain(facts: JobFacts) -> tuple[ExplainedPoint, ...]:
    """In the order in which one would say it."""
    points = [_speed(facts)]
    if facts.round_seconds:
        points += [_limit(facts, facts.round_seconds)]
        points += [_device(device, facts.round_seconds) for device in facts.devices]
    points += [
        ExplainedPoint("idle", f"{idle.name} is idle: {idle.reason}", idle.name)
        for idle in facts.idle
    ]
    points += _energy(facts)
    points += _changes(facts)
    return tuple(points)


def energy_words(facts: JobFacts) -> str:
    """What was used so far, or why that is not known, in one sentence; "" before it is asked."""
    said = [point.text for point in _energy(facts) if not point.name]
    unknown: dict[tuple[str, str], list[str]] = {}
    for one in facts.energy:
        if one.why:
            what = "not measurable" if one.joules is None else "not all measurable"
            unknown.setdefault((what, one.why), []).append(one.name)
    said += [f"{what} on {', '.join(names)} ({why})" for (what, why), names in unknown.items()]
    return "; ".join(said).removeprefix("energy: ")


def _speed(facts: JobFacts) -> ExplainedPoint:
    where = f"{facts.model} of {facts.holder}, step {facts.step:,}"
    predicted = facts.predicted_samples_per_s
    if facts.samples_per_s is None:
        text = f"{where}: no round was measured yet; the plan predicts {_rate(predicted)}"
        return ExplainedPoint("speed", text, because={"predicted": predicted})
    verb = "trained" if facts.is_over else "trains"
    text = f"{where}: {verb} at {_rate(facts.samples_per_s)}"
    if predicted > 0:
        share = facts.samples_per_s / predicted
        part = f"{share:.0%} of" if share < 2 else f"{share:.3g} times"
        text += f", {part} the {_rate(predicted)} that the plan predicted"
    numbers = {"measured": facts.samples_per_s, "predicted": predicted}
    return ExplainedPoint("speed", text, because=numbers)


def limit_words(facts: JobFacts) -> str:
    """What limits the job, in a sentence; "" before a round was measured."""
    if not facts.round_seconds or not facts.devices:
        return ""
    return _limit(facts, facts.round_seconds).text


def explained(facts: JobFacts) -> dict[str, Any]:
    """The facts and what they show, as `--json` prints them."""
    points = [write_form(point) for point in explain(facts)]
    return {"facts": write_form(facts), "points": points}


@dataclass(frozen=True, slots=True)
class _Load:
    """What a device or link is busy with, as a part of a round."""

    name: str
    words: str
    part: float


def _loads(facts: JobFacts, round_seconds: float) -> list[_Load]:
    found = [
        _Load(device.name, f"{device.name} computes", device.busy_seconds / round_seconds)
        for device in facts.devices
    ]
    for link in facts.links:
        ends = _ends(link)
        part = link.busy_seconds / round_seconds
        found.append(_Load(ends, f"the link {ends} carries data", part))
    return sorted(found, key=lambda load: -load.part)


def _limit(facts: JobFacts, round_seconds: float) -> ExplainedPoint:
    loads = _loads(facts, round_seconds)
    if not loads:
        return ExplainedPoint("limit", "nothing was measured that could limit it")
    first, rest = loads[0], loads[1:]
    numbers = {load.name: round(load.part, 4) for load in loads}
    after = f"; next, {rest[0].words} for {_part(rest[0].part)}" if rest else ""
    if first.part >= FULL:
        text = (
            f"{first.name} limits: {first.words} for {_part(first.part)} of each round of "
            f"{_seconds(round_seconds)}{after}"
        )
        return ExplainedPoint("limit", text, first.name, numbers)
    text = (
        f"{'no device and no link' if facts.watched_rounds else 'no device'} is busy all the time: "
        f"{first.words} for {_part(first.part)} of "
        f"each round of {_seconds(round_seconds)}{after}"
    )
    device = next((one for one in facts.devices if one.name == first.name), None)
    longest = None if device is None else _longest_wait(device)
    if longest is not None:
        what, seconds = longest
        text += f". The rest is waiting, most of all for {what} ({_part(seconds / round_seconds)})"
    return ExplainedPoint("limit", text, first.name, numbers)


def _device(device: DeviceFacts, round_seconds: float) -> ExplainedPoint:
    numbers = {"busy_seconds": device.busy_seconds, "round_seconds": round_seconds}
    busy = device.busy_seconds
    text = f"{device.name} computes {_seconds(busy)} of each round"
    expected = device.expected_seconds
    if expected:
        numbers["expected_seconds"] = expected
        factor = busy / expected
        if abs(factor - 1) <= NOISE:
            text += ", as the plan expects"
        else:
            more = f"{factor - 1:.0%} more" if factor > 1 else f"{1 - factor:.0%} less"
            text += f", {more} than the {_seconds(expected)} that the plan expects"
    longest = _longest_wait(device)
    if longest is not None:
        what, seconds = longest
        numbers["longest_wait_seconds"] = seconds
        if seconds / round_seconds >= WORTH:
            text += f"; it waits longest for {what}: {_seconds(seconds)}"
    return ExplainedPoint("device", text, device.name, numbers)


def _longest_wait(device: DeviceFacts) -> tuple[str, float] | None:
    waits = [(seconds, kind) for kind, seconds in device.waits.items() if seconds > 0]
    if not waits:
        return None
    seconds, kind = max(waits)
    return _AWAITED.get(kind, kind), seconds


def _energy(facts: JobFacts) -> Iterator[ExplainedPoint]:
    """What was used in all, by whom, and who cannot tell."""
    measured = {one.name: one.joules for one in facts.energy if one.joules is not None}
    if measured and facts.trained_samples:
        each = sum(measured.values()) / facts.trained_samples
        of = ", ".join(f"{one.name}: {one.of}" for one in facts.energy if one.joules is not None)
        text = (
            f"energy: {each:.3g} J a sample, {sum(measured.values()):,.0f} J so far ({of}, with "
            "all else that runs there)"
        )
        yield ExplainedPoint("energy", text, because=measured)
    for one in facts.energy:
        if one.why:
            what = "not measurable" if one.joules is None else "not all measurable"
            yield ExplainedPoint("energy", f"energy: {what} on {one.name} ({one.why})", one.name)


def _changes(facts: JobFacts) -> Iterator[ExplainedPoint]:
    if facts.unasked:
        yield ExplainedPoint("change", f"the planner was not asked: {facts.unasked}")
    now = next((one.samples_per_s for one in facts.what_ifs if one.change == "now"), None)
    if not now:
        return
    best: tuple[float, str] = (WORTH, "")
    for one in facts.what_ifs:
        if one.change == "now":
            continue
        words = _change_words(one)
        numbers = {"now": now, "then": one.samples_per_s or 0.0}
        if one.samples_per_s is None:
            text = f"{words}: no plan fits{': ' if one.reason else ''}{one.reason}"
            yield ExplainedPoint("change", text, one.name, numbers)
            continue
        gain = one.samples_per_s / now - 1
        if abs(gain) < WORTH:
            verdict = "no difference"
        else:
            verdict = f"{abs(gain):.0%} {'faster' if gain > 0 else 'slower'}"
        text = f"{words}: {_rate(one.samples_per_s)} by the plan, {verdict}"
        yield ExplainedPoint("change", text, one.name, numbers)
        best = max(best, (gain, words))
    gain, words = best
    if words:
        text = f"what would help most of this: {words}, {gain:.0%} faster by the plan"
        yield ExplainedPoint("advice", text, because={"gain": gain})
    else:
        text = f"none of this would make it more than {WORTH:.0%} faster"
        yield ExplainedPoint("advice", text, because={"gain": 0.0})


def _change_words(one: WhatIf) -> str:
    if one.change == "without":
        return f"without {one.name}"
    if one.change == "alone":
        return f"{one.name} alone (--planner single)"
    if one.change == "one more":
        return f"with one more device like {one.name}"
    return "with links twice as fast"


def _ends(link: LinkFacts) -> str:
    return f"{link.sender} to {link.receiver}"


def _rate(samples_per_s: float) -> str:
    shown = f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"
    return f"{shown} samples/s"


def _part(part: float) -> str:
    return f"{min(part, 1.0):.0%}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


@dataclass(frozen=True, slots=True)
class TimeUse:
    """Seconds of a stretch of time.

    Attributes:
        waits: by device, then by what for.
        links: (sender, receiver) -> in which something was arriving.
    """

    waits: Mapping[str, Mapping[str, float]]
    links: Mapping[tuple[str, str], float]


def time_use(entries: Iterable[TimelineEntry]) -> TimeUse:
    """Of measured spans, those of one device by their starts."""
    waits: dict[str, dict[str, float]] = {}
    links: dict[tuple[str, str], float] = {}
    until: dict[tuple[str, str], float] = {}
    for entry in entries:
        does, _, what = entry.kind.partition(" ")
        if does == "wait":
            of = waits.setdefault(entry.device, {})
            of[what] = of.get(what, 0.0) + entry.end_seconds - entry.start_seconds
        elif does == "receive" and entry.sender is not None:
            ends = (entry.sender, entry.device)
            start = max(entry.start_seconds, until.get(ends, entry.start_seconds))
            if entry.end_seconds > start:
                links[ends] = links.get(ends, 0.0) + entry.end_seconds - start
                until[ends] = entry.end_seconds
    return TimeUse(waits, links)
