"""S22: what a terminal would obey reaches neither it nor an error, whichever device said it."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from p2ptrain import events
from p2ptrain.cli.live import LiveRenderer, SeenByEvents
from p2ptrain.cli.output import LineWriter, PlainRenderer
from p2ptrain.errors import OptionError
from p2ptrain.events import Event, Failure, LeftOut, Member, PlanDevice, PlanStage
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples

RAW = "a\x1b[2J\x1b]0;owned\x07\rb\u202ec\x9bd\u2028e\ud800"
OBEYED = set("\x1b\x07\r\u202e\x9b\u2028\ud800")
STAGE = PlanStage((0, 1), (PlanDevice(RAW, 1),), (), RAW, 1)
PLAN = events.Plan(
    epoch=1,
    reason=RAW,
    stages=(STAGE, replace(STAGE, devices=(*STAGE.devices, *STAGE.devices))),
    micro_batch=1,
    micro_batches=1,
    predicted_samples_per_s=1.0,
    left_out=(LeftOut(RAW, RAW),),
    changes_results=(RAW,),
    wire=RAW,
    mode="sync",
    mode_reason=RAW,
)
EVENTS = [PLAN, events.Warning(RAW), events.Error(RAW), Failure(RAW), Member(RAW, "alive")]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_s22_no_event_moves_a_cursor(event: Event) -> None:
    plain, console = io.StringIO(), io.StringIO()
    PlainRenderer(LineWriter(plain)).show(event)
    live = LiveRenderer(
        Console(file=console, width=200, color_system=None), SeenByEvents(RAW, None, RAW)
    )
    live.show(event)
    live.close()
    for written in (plain.getvalue(), console.getvalue()):
        assert not OBEYED & set(written)
        assert "owned" in written


def test_s22_a_plan_that_carries_escapes_is_refused_or_cleaned_at_the_door() -> None:
    profile, cluster = planning_examples.household(5, units=4, devices=2)
    sent: dict[str, Any] = make_plan(profile, cluster, PlanRequest(8, 2, "pp")).to_json()
    cleaned = Plan.from_json({**sent, "left_out": [{"name": "pi", "reason": RAW}]})
    assert not OBEYED & set(cleaned.left_out[0].reason)
    stages = [{**sent["stages"][0], "devices": [{"name": RAW, "share": 1}]}]
    predicted = {**sent["predicted"], "peak_bytes": {RAW: 1}}
    for wrong in (
        {"left_out": [{"name": RAW, "reason": ""}]},
        {"mode": "sync", "mode_reason": RAW},
        {"stages": stages},
        {"predicted": predicted},
        {RAW: 1},
        {"found_by": RAW},
        {"planner": RAW},
    ):
        with pytest.raises(OptionError) as caught:
            Plan.from_json({**sent, **wrong})
        assert not OBEYED & set(str(caught.value))
