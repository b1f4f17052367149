"""A run and its plan as static HTML."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain import events, markup
from p2ptrain.api import notebook
from p2ptrain.api.notebook import course_html
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.page_member import PLAN, course, step

ODD = "<script>alert('&')</script>"


def _texts(html: str) -> list[str]:
    """It is whole XML, and has no element that does something."""
    root = ET.fromstring(html)
    kinds = {element.tag for element in root.iter()}
    assert kinds <= {"div", "table", "tr", "th", "td", "svg", "polyline"}
    assert not any(name.startswith("on") for e in root.iter() for name in e.attrib)
    return [text.strip() for text in root.itertext() if text.strip()]


def test_a_run_shows_its_devices_its_curve_and_how_to_stop_it() -> None:
    odd = replace(PLAN, left_out=(events.LeftOut(ODD, ODD),))
    running = course(odd, *(step(n, 1.0 / n) for n in range(1, 41)), events.Eval(40, {"f1": 0.5}))
    html = course_html(replace(running, limit="pi limits"), "To stop it: run.stop()")
    texts = _texts(html)
    for words in (
        *("Training Net: step 40 of 100", "loss 0.0250   100.0 samples/s   at step 40: f1 0.5"),
        *("Now: pi limits", "To stop it: run.stop()", ODD, f"not used: {ODD}"),
        "loss by step: 1 at 1, 0.025 at 40; from 0.025 to 1",
    ):
        assert words in texts
    assert html.count("<polyline") == 1
    ended = course(step(1), events.Done(1, 1.0, 1.0, None))
    assert "run.stop()" not in course_html(ended, "run.stop()")
    assert "<svg" not in course_html(course(PLAN))


@pytest.mark.parametrize("count", [2, 299, 300, 301, 2048])
def test_a_curve_stays_small_and_ends_where_it_ends(count: int) -> None:
    svg = markup.curve([(float(n), n % 7) for n in range(count)], "loss")
    places = svg.partition('points="')[2].partition('"')[0].split()
    assert len(places) <= markup.CURVE_POINTS + 1
    assert places[0].startswith("0.0,")
    assert places[-1].startswith("480.0,")


def test_a_curve_of_one_number_or_none_is_drawn_too() -> None:
    assert markup.curve([(1.0, 2.0), (2.0, None), (3.0, float("nan"))], "loss") == ""
    assert "70.0" in markup.curve([(1.0, 2.0), (2.0, 2.0)], "loss")


def test_plans_show_themselves() -> None:
    assert ", about 5,640 samples/s" in _html(replace(PLAN, predicted_samples_per_s=5643.2))
    of_event = replace(PLAN, left_out=(events.LeftOut(ODD, "slow"),), changes_results=(ODD,))
    texts = _texts(f"<div>{_html(of_event)}</div>")
    assert texts[0] == "plan 1 (start): 4 x 8 samples, about 120 samples/s"
    assert texts[3:6] == ["stage 1", "units 0 to 1", "laptop"]
    assert texts[6:9] == ["stage 2", "units 2 to 4", "pi (5), desk (3)"]
    assert f"changes results: {ODD}" in texts
    profile, cluster = planning_examples.household(5, units=4, devices=2)
    planned = make_plan(profile, cluster, PlanRequest(8, 2, "pp"))
    assert _texts(f"<div>{_html(planned)}</div>")[0].startswith("pp: 4 x 2 samples")


def _html(shown: Any) -> str:
    html: str = shown._repr_html_()
    return html


class _Run:
    done = False

    def stop(self) -> None:
        self.done = True

    def as_html(self, advice: str = "") -> str:
        return f"<div>{'stopped' if self.done else f'runs {advice}'}</div>"


class _Display:
    """A notebook's displays: what each shows now."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def display(self, what: Any, *, display_id: bool) -> SimpleNamespace:
        self.shown.append(what)
        place = len(self.shown) - 1
        return SimpleNamespace(update=lambda new: self.shown.__setitem__(place, new))


class _Button:
    disabled = False

    def __init__(self, **looks: str) -> None:
        self.looks = looks

    def on_click(self, click: Any) -> None:
        self.click = click


@pytest.mark.parametrize("has_widgets", [True, False])
async def test_a_stop_button_stands_where_there_are_widgets(
    has_widgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, run = _Display(), _Run()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=screen))
    widgets = SimpleNamespace(Button=_Button) if has_widgets else None
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets)
    drawing = notebook.show(run, refresh_seconds=0.0)
    advice = "" if has_widgets else notebook.STOP
    assert _html(screen.shown[-1]) == f"<div>runs {advice}</div>"
    assert repr(screen.shown[-1]) == repr(run)
    button = screen.shown[0] if has_widgets else None
    if button is None:
        run.stop()
    else:
        button.click(button)
    await drawing
    assert _html(screen.shown[-1]) == "<div>stopped</div>"
    assert button is None or button.disabled
