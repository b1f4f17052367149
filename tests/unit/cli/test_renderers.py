"""Events as JSON lines, plain lines and on a terminal; and back from JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from p2ptrain import events
from p2ptrain.cli.output import JsonRenderer, LineWriter, PlainRenderer
from p2ptrain.console import describe
from p2ptrain.demo.household import parse_event

PLAN = events.Plan(
    epoch=1,
    reason="start",
    stages=(
        events.PlanStage((0, 3), (events.PlanDevice("laptop", 16),), ("0.weight", "0.bias")),
        events.PlanStage(
            (3, 5), (events.PlanDevice("pi", 10), events.PlanDevice("tv", 6)), ("4.w",)
        ),
    ),
    micro_batch=16,
    micro_batches=4,
    predicted_samples_per_s=1234.5,
    left_out=(events.LeftOut("[red]phone", "slower than its share would take"),),
)
EVENTS = [
    events.Ready(name="laptop", id="0" * 64, address="10.0.0.2", port=4000),
    events.Pairing(code="12345678"),
    events.PairingFailed(message="wrong code", attempts_left=4),
    events.Renamed(name="laptop-2", previous="laptop"),
    events.Member(name="pi", state="suspect"),
    events.Coordinator(name="pi", term=3),
    events.Waiting(waiting_for="desk"),
    events.Paused(by="desk"),
    events.Resumed(by="desk"),
    PLAN,
    events.Eval(step=9, metrics={"accuracy": 0.978}),
    events.Warning(message="the disk is nearly full"),
    events.Failure(name="pi"),
    events.Done(steps=9, seconds=1.5, samples_per_s=64.0, out="w.safetensors"),
    events.Stopped(),
    events.Error(message="no"),
]


def test_without_a_barrier_a_plan_says_how_much_is_under_way() -> None:
    plan = replace(PLAN, mode="async", micro_batches=1)
    assert "batches of 16, 2 at a time, about" in describe(plan)
    assert "4 pieces of 16" in describe(replace(plan, micro_batches=4))


@pytest.mark.parametrize(
    ("mode", "words"), [("async", "--mode async is used: so"), ("sync", "--mode sync is used: so")]
)
def test_a_mode_that_was_chosen_is_reported_with_its_reason(mode: str, words: str) -> None:
    assert words in describe(replace(PLAN, mode=mode, mode_reason="so"))
    assert words not in describe(replace(PLAN, mode=mode))


def _step(number: int) -> events.Step:
    return events.Step(step=number, loss=0.5, samples_per_s=100.0, seconds=0.01)


@pytest.mark.parametrize("event", [*EVENTS, _step(1)], ids=lambda event: type(event).__name__)
def test_json_reads_back_as_the_same_event(event: events.Event) -> None:
    assert parse_event(json.loads(json.dumps(event.to_json()))) == event


def test_events_of_newer_versions_are_passed_over() -> None:
    assert parse_event({"event": "teleported", "name": "pi"}) is None
    assert parse_event({"event": "step", "step": 1}) is None
    assert parse_event({}) is None
    assert parse_event({"event": "failure", "name": "pi", "extra": 1}) == events.Failure("pi")


def test_json_lines_hold_no_nan() -> None:
    out = io.StringIO()
    JsonRenderer(LineWriter(out)).show(
        events.Step(step=1, loss=float("nan"), samples_per_s=float("inf"), seconds=0.0)
    )
    assert json.loads(out.getvalue())["loss"] is None
    assert out.getvalue().count("\n") == 1


def test_events_have_words_unless_the_household_sorts_them_out_by_itself() -> None:
    silent = (
        events.Coordinator(name="pi", term=3),
        events.Member(name="pi", state="suspect"),
    )
    for event in EVENTS:
        assert bool(describe(event)) is (event not in silent)
        assert "{" not in describe(event)


def test_a_plan_says_who_is_left_out_and_why() -> None:
    lines = describe(PLAN).splitlines()
    assert lines == [
        "First plan: batches in 4 pieces of 16, about 1,230 samples/s",
        "  laptop: layer 0",
        "  pi + tv (sharing the samples of each piece 10:6): layer 4",
        "  [red]phone is not used: slower than its share would take",
    ]


def test_a_plan_after_trouble_names_no_cause_as_it_may_be_a_nan_or_a_link() -> None:
    """The line before it says whether a device was lost."""
    head = describe(replace(PLAN, reason="failure")).splitlines()[0]
    assert head.startswith("New plan (training broke off): ")


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (("conv1.weight", "conv1.bias", "layer3.0.bn.weight"), "layers conv1 to layer3.0.bn"),
        (("scale",), "layer scale"),
        ((), "layers without weights"),
    ],
)
def test_a_part_is_named_by_its_layers(parameters: tuple[str, ...], text: str) -> None:
    plan = replace(PLAN, stages=(replace(PLAN.stages[0], parameters=parameters),))
    assert describe(plan).splitlines()[1] == f"  laptop: {text}"


@pytest.mark.parametrize(
    ("steps", "text"), [(0, "(0.3 s lost)"), (1, "1 step repeated"), (2, "2 steps repeated")]
)
def test_a_recovery_says_what_it_cost(steps: int, text: str) -> None:
    event = events.Recovered(
        epoch=2,
        seconds=0.3,
        replayed_steps=steps,
        resumed_seconds=0.2,
        planning_seconds=0.1,
        moved_bytes=5,
        version=4,
    )
    assert text in describe(event)


def test_plain_lines_hold_at_most_a_step_a_second_and_the_last_one() -> None:
    out = io.StringIO()
    now = [0.0]
    renderer = PlainRenderer(LineWriter(out), monotonic=lambda: now[0])
    for number in range(1, 27):
        renderer.show(_step(number))
        now[0] += 0.125
    renderer.show(events.Stopped())
    renderer.close()
    steps = [line.split()[1] for line in out.getvalue().splitlines() if "loss" in line]
    assert steps == ["1", "9", "17", "25", "26"]
    assert out.getvalue().endswith("stopped\n")


class _ClosedPipe(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError


def test_a_reader_that_goes_away_is_reported_once() -> None:
    told: list[str] = []
    writer = LineWriter(_ClosedPipe())
    writer.on_closed = lambda: told.append("closed")
    writer.write("one")
    writer.write("two")
    assert told == ["closed"]
    assert writer.closed


def test_names_that_the_output_s_encoding_lacks_are_spelled_out() -> None:
    """As on Windows, where stdout that leads to a file has the encoding of old programs."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "cp1252", newline="\n")
    writer = LineWriter(stream)
    PlainRenderer(writer).show(events.Member(name="台所", state="alive"))
    writer.write("Küche")
    assert raw.getvalue().decode("cp1252") == "\\u53f0\\u6240 is here\nKüche\n"


@pytest.mark.parametrize(("left", "rest"), [(4, " (4 tries left)"), (1, " (1 try left)"), (0, "")])
def test_a_wrong_code_says_how_many_tries_are_left(left: int, rest: str) -> None:
    assert describe(events.PairingFailed("wrong code", left)) == f"pairing failed: wrong code{rest}"


@pytest.mark.parametrize(
    ("seconds", "text"), [(61.26, "61.3 s"), (1.0, "1.0 s"), (0.0437, "0.044 s")]
)
def test_a_short_job_has_taken_some_time(seconds: float, text: str) -> None:
    assert (
        describe(events.Done(5, seconds, 114.0, None))
        == f"done: 5 steps in {text} (114.0 samples/s)"
    )
    resumed = events.Done(50, seconds, 114.0, None, steps_before=45)
    assert describe(resumed) == f"done: 5 steps in {text}, 50 in all (114.0 samples/s)"
