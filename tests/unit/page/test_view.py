"""From what a member sees to what the page shows, and its words."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain import events
from p2ptrain.api.course_sentences import duration, seconds_left
from p2ptrain.api.job_course import JobCourse
from p2ptrain.api.views import CutOffDevice
from p2ptrain.cli.screen import as_text
from p2ptrain.manners.condition import MemoryInUse
from p2ptrain.net.forms import write_form
from p2ptrain.page.state import DeviceView, PageState, changes, metrics_text
from p2ptrain.page.view import Seen, page_state
from tests.support.page_member import PLAN, course, member, status, step, trusted

RUNNING = course(PLAN, *map(step, range(1, 11)))


def _seen(job: JobCourse | None = None, **more: object) -> Seen:
    fields: dict[str, object] = {"status": status(), "trusted": (), **more}
    return Seen(version="0.1.0", course=job, **fields)  # type: ignore[arg-type]


def _state(job: JobCourse | None = None, **more: object) -> PageState:
    return page_state(_seen(job, **more), may_change=True)


def _device(state: PageState, name: str) -> DeviceView:
    return next(device for device in state.devices if device.name == name)


@pytest.mark.parametrize(
    ("name", "tone", "sentence"),
    [
        ("laptop", "busy", "Has the data. Computes layer a."),
        ("pi", "busy", "Computes layers b to c, 5 of 8 samples."),
        ("phone", "idle", "Idle: its link is too slow."),
    ],
)
def test_each_device_says_what_it_does(name: str, tone: str, sentence: str) -> None:
    device = _device(_state(RUNNING), name)
    assert (device.tone, device.sentence) == (tone, sentence)
    assert device.alone_samples_per_s == {"laptop": 80.0, "phone": 3.5}.get(name)


def test_devices_that_are_not_here_say_so() -> None:
    members = [member("laptop"), member("pi", "dead"), member("desk", "suspect")]
    cut = [CutOffDevice("desk", "desk" * 8, "it floods")]
    state = _state(None, status=status(members, cut), trusted=[trusted("pi"), trusted("tablet")])
    assert [d.name for d in state.devices] == ["laptop", "desk", "pi", "tablet"]
    assert _device(state, "laptop").sentence == "Ready. Nothing is being trained."
    assert _device(state, "desk").sentence == "Cut off: it floods."
    assert _device(state, "pi").sentence.startswith("Stopped answering")
    assert _device(state, "tablet").sentence.startswith("Paired, and not here now")


@pytest.mark.parametrize(
    ("job", "headline", "sentence"),
    [
        (
            course(),
            "Getting ready to train Net",
            "The data is on laptop. Devices are",
        ),
        (
            course(step(3), events.Done(3, 1.0, 1.0, None), holder="here"),
            "Done: Net, 3 steps",
            "The trained weights are here.",
        ),
        (RUNNING, "Training Net: step 10 of 100", "The data is on laptop. About 2 min left."),
        (
            course(step(3), events.Waiting("pi")),
            "Training Net stands still at step 3 of 100",
            "It continues when pi is back.",
        ),
        (
            course(step(3), events.Error("no memory")),
            "Training Net failed at step 3 of 100",
            "no memory",
        ),
    ],
)
def test_the_job_in_words(job: JobCourse, headline: str, sentence: str) -> None:
    view = _state(job).job
    assert view is not None
    assert view.headline == headline
    assert view.sentence.startswith(sentence)


def test_a_device_says_itself_how_hard_it_works() -> None:
    state = _state(
        RUNNING,
        status=status(
            [
                member("laptop"),
                member("pi", work="slow", sentence="slow: in use by a person"),
                member("phone", work="paused", sentence="paused: on battery", battery_percent=31),
            ]
        ),
    )
    assert _device(state, "pi").sentence.startswith("Slow: in use by a person. Computes ")
    assert _device(state, "phone").sentence == "Paused: on battery."
    assert (_device(state, "phone").tone, _device(state, "phone").battery_percent) == ("idle", 31)


def test_memory_in_use_stands_beside_what_there_is() -> None:
    in_use = MemoryInUse(used_bytes=5_000, card_bytes=12_000, card_used_bytes=7_000)
    state = _state(RUNNING, status=status([member("laptop"), member("pi", memory=in_use)]))
    pi = _device(state, "pi")
    assert (pi.used_bytes, pi.needed_bytes, pi.memory_bytes) == (5_000, 2_000, 8_000_000_000)
    assert (pi.card_used_bytes, pi.card_bytes) == (7_000, 12_000)
    assert _device(state, "laptop").used_bytes is None
    shown = as_text(state, io.StringIO(), is_terminal=False)
    assert "5 kB used, 2 kB planned of 8 GB" in shown


def test_a_card_s_memory_and_the_host_s_are_planned_and_shown_apart() -> None:
    in_use = MemoryInUse(5_000, 12_000, 7_000, 10_000)
    training = course(replace(PLAN, predicted_host_bytes={"pi": 900}))
    state = _state(training, status=status([member("laptop"), member("pi", memory=in_use)]))
    pi, laptop = _device(state, "pi"), _device(state, "laptop")
    assert (pi.needed_bytes, pi.card_needed_bytes, pi.card_offered_bytes) == (900, 2_000, 10_000)
    assert (laptop.needed_bytes, laptop.card_needed_bytes) == (1_000, None)
    shown = as_text(state, io.StringIO(), is_terminal=False)
    assert "5 kB used, 900 bytes planned of 8 GB; card 7 kB used, 2 kB planned of 10 kB" in shown


def test_tokens_are_shown_beside_samples_where_samples_are_made_of_them() -> None:
    of_tokens = [replace(step(number), tokens_per_s=6_400.0) for number in (1, 2)]
    job = _state(course(PLAN, *of_tokens)).job
    assert job is not None
    assert (job.samples_per_s, job.tokens_per_s) == (100.0, 6_400.0)
    without = _state(RUNNING).job
    assert without is not None
    assert without.tokens_per_s is None


def test_who_may_pause_and_stop_a_job() -> None:
    here = _state(RUNNING).job
    elsewhere = _state(replace(RUNNING, holder="pi")).job
    looking = page_state(_seen(RUNNING), may_change=False).job
    over = _state(replace(RUNNING, state="done")).job
    assert here is not None
    assert here.why_not_steer is None
    assert elsewhere is not None
    assert elsewhere.why_not_steer is None
    assert looking is not None
    assert looking.why_not_steer == "This browser may only look."
    assert over is not None
    assert over.why_not_steer == "It has ended."


def test_who_only_looks_sees_no_pairing_code() -> None:
    seen = _seen(RUNNING, code=("31415926", 1000))
    shown = json.dumps(write_form(page_state(seen, may_change=True)))
    hidden = json.dumps(write_form(page_state(seen, may_change=False)))
    assert "p2ptrain join --code 31415926" in shown
    assert "31415926" not in hidden


def test_links_carry_what_was_measured_and_what_they_carry_now() -> None:
    state = _state(RUNNING, rates={"pi" * 8: (123_456.0, 0.0), "unknown": (1.0, 1.0)})
    links = {(link.sender, link.receiver): link for link in state.links}
    assert links["laptop", "pi"].bytes_per_s == 1e7
    assert links["laptop", "pi"].now_bytes_per_s == 120_000
    assert links["pi", "laptop"].bytes_per_s is None
    assert len(links) == 2


def test_metrics_name_each_device_once() -> None:
    lines = metrics_text(_state(RUNNING, status=status([member('a"b')]))).splitlines()
    assert 'p2ptrain_job_step{model="Net",holder="laptop"} 10' in lines
    assert 'p2ptrain_device_memory_bytes{device="a\\"b"} 8000000000' in lines
    assert 'p2ptrain_devices{state="alive"} 1' in lines


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min"), (3660, "1 h 1 min"), (200_000, "2 days 7 h")],
)
def test_a_duration_as_people_say_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_time_left_is_unknown_rather_than_wrong() -> None:
    assert seconds_left(RUNNING) == pytest.approx(90.0)
    assert seconds_left(replace(RUNNING, steps=None)) is None
    assert seconds_left(course(step(1))) is None
    assert seconds_left(replace(RUNNING, state="waiting")) is None


_PARTS = st.lists(
    st.sampled_from([PLAN, step(1), events.Warning("x"), events.Eval(1, {"a": 1.0})]), max_size=6
)


@given(_PARTS, _PARTS, st.booleans())
def test_changes_lead_from_one_state_to_the_next(
    first: list[events.Event], more: list[events.Event], is_gone: bool
) -> None:
    def numbered(happened: list[events.Event]) -> list[events.Event]:
        return [step(i + 1) if isinstance(e, events.Step) else e for i, e in enumerate(happened)]

    whole = numbered([*first, *more])
    before = write_form(_state(course(*whole[: len(first)])))
    after = write_form(_state(None if is_gone else course(*whole)))
    changed = changes(before, after)
    grown = changed.pop("more", None)
    result = {**before, **changed}
    if grown is not None:
        curve = before["curve"]
        points, evals = curve["points"] + grown["points"], grown.get("evals", curve["evals"])
        result["curve"] = {**curve, "points": points, "evals": evals}
    assert {k: v for k, v in result.items() if v is not None} == {
        k: v for k, v in after.items() if v is not None
    }
