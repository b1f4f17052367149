"""`demo` shows the holder's events and ends with the accuracy, or with one clear line."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from p2ptrain.cli import main
from p2ptrain.demo import household
from p2ptrain.demo.household import HouseholdPlan
from p2ptrain.errors import UserError

EVENTS: list[dict[str, Any]] = [
    {
        "event": "step",
        "step": 1,
        "loss": 2.5,
        "samples_per_s": 9.0,
        "seconds": 0.1,
        "lr": 0.1,
    },
    {"event": "eval", "step": 1, "metrics": {"accuracy": 0.5}},
    {"event": "eval", "step": 132, "metrics": {"accuracy": 0.97812}},
    {
        "event": "done",
        "steps": 132,
        "seconds": 9.0,
        "samples_per_s": 900.0,
        "out": None,
        "updates_left_out": 0,
    },
]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[HouseholdPlan]:
    """The plans that were carried out, by nobody."""
    made: list[HouseholdPlan] = []

    async def train_together(plan: HouseholdPlan) -> AsyncGenerator[dict[str, Any], None]:
        made.append(plan)
        for event in EVENTS:
            yield event

    monkeypatch.setattr(household, "train_together", train_together)
    return made


def test_the_last_line_is_the_accuracy(
    plans: list[HouseholdPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["demo"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "test accuracy 0.978"
    (plan,) = plans
    assert len({plan.holder, *plan.members}) >= 3
    assert len(plan.code) == 8
    assert plan.arguments("old-notebook")[:2] == ["--name", "old-notebook"]
    assert not plan.folder.exists()


def test_json_ends_with_the_accuracy_too(
    plans: list[HouseholdPlan], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["demo", "--json"]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    wanted = [*EVENTS, {"event": "demo", "test_accuracy": 0.97812}]
    assert [line["event"] for line in lines] == [event["event"] for event in wanted]
    for line, event in zip(lines, wanted, strict=True):
        assert event.items() <= line.items()  # later keys may be added


def test_a_failed_device_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails(plan: HouseholdPlan) -> AsyncGenerator[dict[str, Any], None]:
        yield EVENTS[0]
        raise UserError("the device old-notebook ended with exit code 1: no memory")

    monkeypatch.setattr(household, "train_together", fails)
    assert main.main(["demo"]) == 1
    assert "old-notebook ended" in capsys.readouterr().err


def test_without_scikit_learn_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main.main(["demo"]) == 1
    assert "p2ptrain[demo]" in capsys.readouterr().err
