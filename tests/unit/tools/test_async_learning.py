"""What the comparison of learning with and without a barrier makes of its curves."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from p2ptrain.plan.request import Mode
from p2ptrain.plan.versions import Weights
from tools.async_learning.curves import Course
from tools.async_learning.report import by_epoch, epochs_until, rows, table, write
from tools.async_learning.seconds import profile, timed
from tools.async_learning.settings import SETTINGS, setting_of

COURSE = Course(epochs=2, updates=3)


def curve(*accuracy: float) -> dict[str, object]:
    return {"losses": [1.0, 2.0, 3.0, 0.5, 0.5, 0.5], "accuracy": list(accuracy), "weights": "w"}


def test_losses_are_means_of_epochs_and_the_target_lies_between_two() -> None:
    assert by_epoch([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert epochs_until(0.9, [0.8, 1.0]) == pytest.approx(1.5)
    assert epochs_until(0.9, [0.95]) == pytest.approx(0.9 / 0.95)
    assert epochs_until(0.9, [0.8, 0.85]) is None


def test_a_row_says_whether_the_runtime_gave_the_same_bits() -> None:
    curves = {"one-device/0": curve(0.9, 0.99), "stashing/0": curve(0.8, 0.97)}
    one, stashing = rows(curves, COURSE)
    assert (one.loss, one.proved) == ([2.0, 0.5], None)
    for same, other in ((True, curve(0.8, 0.97)), (False, {**curve(0.8, 0.97), "weights": "x"})):
        _, stashing = rows({**curves, "runtime/stashing/0": other}, COURSE)
        assert stashing.proved is same
    lines = table([one, stashing]).splitlines()
    assert "-2.0 points" in lines[-1]
    assert one.more_updates(one) == pytest.approx(1.0)
    assert stashing.reached[0.9] == pytest.approx(1 + 0.1 / 0.17)
    assert (stashing.more_updates(one) or 0.0) > 1.0
    assert lines[-1].endswith("| NO |")


def test_the_picture_has_a_line_a_panel_for_every_setting(tmp_path: Path) -> None:
    curves = {f"{setting.name}/0": curve(0.9, 0.99) for setting in SETTINGS}
    write(tmp_path / "page", curves, COURSE)
    drawn = ElementTree.parse(tmp_path / "page.svg").getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 4 * len(SETTINGS)
    assert (tmp_path / "page.md").read_text().count("\n") == 2 + len(SETTINGS)


def test_seconds_are_those_of_pipelines_that_begin_and_end_empty() -> None:
    updates = 10
    one, rounds, free = (
        timed(setting_of(n), updates) for n in ("one-device", "synchronous", "stashing")
    )
    whole = sum(profile().times.at(64).forward) + sum(profile().times.at(64).backward)
    assert one.per_step == pytest.approx(8 * whole)
    assert len(rounds.plan.stages) == len(free.plan.stages) == 3
    assert rounds.epoch_seconds == pytest.approx(updates * rounds.per_step)
    assert free.plan.mode is Mode.ASYNC
    assert updates * free.per_step < free.epoch_seconds < rounds.epoch_seconds < one.epoch_seconds


def test_every_setting_is_a_command_of_its_own() -> None:
    commands = [setting.command for setting in SETTINGS]
    assert len(set(commands)) == len(commands)
    assert setting_of("two-versions").how is not None
    assert setting_of("two-versions").how.weights is Weights.DOUBLE  # type: ignore[union-attr]
