"""What limits a job: the sentences say what the facts show, and no more."""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.plan.explain import ExplainedPoint, energy_words, explain, limit_words, time_use
from p2ptrain.plan.types.job_facts import (
    DeviceFacts,
    EnergyFacts,
    IdleDevice,
    JobFacts,
    LinkFacts,
    WhatIf,
)
from p2ptrain.plan.types.timeline import TimelineEntry

FACTS = JobFacts(
    model="MLP",
    holder="laptop",
    is_over=False,
    step=120,
    samples_per_s=90.0,
    predicted_samples_per_s=100.0,
    round_seconds=1.0,
    watched_rounds=3,
    devices=(
        DeviceFacts("laptop", (0,), 0.95, 0.94, {"gradient": 0.03}),
        DeviceFacts("pi", (1,), 0.4, 0.3, {"output": 0.5, "commit": 0.05}),
    ),
    links=(LinkFacts("laptop", "pi", 0.6, 1e6),),
    idle=(IdleDevice("phone", "it would make each round slower"),),
    what_ifs=(
        WhatIf("now", "", 100.0),
        WhatIf("without", "pi", 70.0),
        WhatIf("one more", "laptop", 150.0),
        WhatIf("faster links", "", 101.0),
        WhatIf("without", "laptop", None),
    ),
)


def about(facts: JobFacts, what: str) -> list[ExplainedPoint]:
    return [point for point in explain(facts) if point.about == what]


def test_a_device_that_is_always_busy_is_the_limit() -> None:
    (limit,) = about(FACTS, "limit")
    assert limit.name == "laptop"
    assert limit.text.startswith("laptop limits: laptop computes for 95%")
    assert "next, the link laptop to pi carries data for 60%" in limit.text
    assert limit.because == {"laptop": 0.95, "laptop to pi": 0.6, "pi": 0.4}


def test_a_link_may_be_the_limit() -> None:
    slow = replace(FACTS, links=(LinkFacts("laptop", "pi", 0.97),))
    (limit,) = about(slow, "limit")
    assert limit.name == "laptop to pi"
    assert "laptop to pi limits" in limit.text


def test_where_nothing_is_full_the_waits_are_named() -> None:
    devices = (replace(FACTS.devices[0], busy_seconds=0.5, waits={"gradient": 0.4, "order": 0.1}),)
    (limit,) = about(replace(FACTS, devices=devices, links=()), "limit")
    assert "no device and no link is busy all the time" in limit.text
    assert "gradients from the part of the model after it (40%)" in limit.text
    blind = tuple(replace(device, waits={}) for device in devices)
    text = limit_words(replace(FACTS, devices=blind, links=(), watched_rounds=0))
    assert text == "no device is busy all the time: laptop computes for 50% of each round of 1 s"
    assert limit_words(replace(FACTS, round_seconds=None)) == ""


def test_devices_are_held_against_the_plan() -> None:
    laptop, pi = about(FACTS, "device")
    assert "as the plan expects" in laptop.text
    assert "33% more than the 300 ms that the plan expects" in pi.text
    assert "waits longest for the part of the model before it: 500 ms" in pi.text


def test_the_planners_answers_are_compared() -> None:
    texts = [point.text for point in about(FACTS, "change")]
    assert "without pi: 70 samples/s by the plan, 30% slower" in texts
    assert "with links twice as fast: 101 samples/s by the plan, no difference" in texts
    assert "without laptop: no plan fits" in texts
    (advice,) = about(FACTS, "advice")
    assert "one more device like laptop, 50% faster" in advice.text
    same = replace(FACTS, what_ifs=FACTS.what_ifs[:2])
    assert "none of this" in about(same, "advice")[0].text
    alone = replace(FACTS, what_ifs=(FACTS.what_ifs[0], WhatIf("alone", "laptop", 130.0)))
    assert about(alone, "change")[0].text == (
        "laptop alone (--planner single): 130 samples/s by the plan, 30% faster"
    )


def test_speed_and_idle_devices() -> None:
    assert "90 samples/s, 90% of the 100 samples/s" in about(FACTS, "speed")[0].text
    assert about(FACTS, "idle")[0].text == "phone is idle: it would make each round slower"
    early = replace(FACTS, samples_per_s=None, round_seconds=None, what_ifs=(), unasked="no time")
    assert [point.about for point in explain(early)] == ["speed", "idle", "change"]


def test_facts_travel_and_are_read_again() -> None:
    assert JobFacts.from_bytes(FACTS.to_bytes()) == FACTS


def test_time_is_counted_once_where_transfers_overlap() -> None:
    def came(start: float, end: float) -> TimelineEntry:
        return TimelineEntry("receive output", "b", 1, 0, start, end, sender="a")

    waits = [TimelineEntry("wait output", "b", 1, 0, at, at + 0.5) for at in (0.0, 2.0)]
    use = time_use([came(0.0, 1.0), came(0.5, 1.5), came(0.6, 0.7), came(3.0, 4.0), *waits])
    assert use.links == {("a", "b"): 2.5}
    assert use.waits == {"b": {"output": 1.0}}


def test_energy_is_said_by_sample_and_where_it_is_unknown() -> None:
    of = EnergyFacts("laptop", 50.0, "its processor and memory (RAPL)")
    missing = EnergyFacts("pi", None, "", "no RAPL access: needs root or a udev rule")
    measured, unknown = about(replace(FACTS, energy=(of, missing), trained_samples=400), "energy")
    assert measured.text.startswith("energy: 0.125 J a sample, 50 J so far (laptop: its processor")
    assert unknown.text == (
        "energy: not measurable on pi (no RAPL access: needs root or a udev rule)"
    )
    assert [p.name for p in about(replace(FACTS, energy=(missing,)), "energy")] == ["pi"]


def test_energy_is_one_sentence_that_names_those_without_a_counter_together() -> None:
    of = EnergyFacts("laptop", 50.0, "its processor and memory (RAPL)")
    others = tuple(EnergyFacts(name, None, "", "no counter") for name in ("pi", "tv"))
    words = energy_words(replace(FACTS, energy=(of, *others), trained_samples=400))
    assert words.startswith("0.125 J a sample, 50 J so far (laptop: its processor")
    assert words.endswith("; not measurable on pi, tv (no counter)")
    assert energy_words(replace(FACTS, energy=())) == ""
