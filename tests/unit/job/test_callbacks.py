"""What may be a callback, and when the two that come with p2ptrain do something."""

from __future__ import annotations

import math
from typing import Any

import pytest

import p2ptrain
from p2ptrain.errors import OptionError
from p2ptrain.events import Eval
from p2ptrain.job.callbacks import checked


def seen(stopping: p2ptrain.EarlyStopping, values: list[float | None]) -> int | None:
    """After how many evaluations it stops; None: never."""
    for number, value in enumerate(values, 1):
        try:
            stopping.on_eval(Eval(number, {} if value is None else {"f1": value}))
        except p2ptrain.StopTraining:
            return number
    return None


@pytest.mark.parametrize(
    ("how", "values", "stops"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.0, 2.1], 4),
        ({"patience": 2, "mode": "max"}, [0.1, 0.2, 0.2, 0.1], 4),
        ({"patience": 1, "mode": "max"}, [0.1, 0.2, 0.3], None),
        ({"patience": 1, "min_delta": 0.1}, [1.0, 0.95], 2),
        ({"patience": 1, "min_delta": 0.1}, [1.0, 0.85, 0.7], None),
        ({"patience": 2}, [math.nan, math.nan], 2),
        ({"patience": 2}, [1.0, math.nan, 0.5, math.nan], None),
        ({"patience": 1}, [1.0, None, None], None),  # it failed, which was said
    ],
)
def test_patience_ends_where_nothing_gets_better(
    how: dict[str, Any], values: list[float | None], stops: int | None
) -> None:
    stopping = p2ptrain.EarlyStopping("f1", **how)
    assert seen(stopping, values) == stops
    assert stopping.stopped_step == stops


def test_the_best_is_due_once_each_time_it_is_better() -> None:
    best = p2ptrain.SaveBest("f1", "best.safetensors", mode="max")
    due = []
    for step, value in enumerate([0.1, 0.1, 0.3, 0.2], 1):
        best.on_eval(Eval(step, {"f1": value}))
        due.append((best.take_due(), best.take_due()))
    assert due == [(True, False), (False, False), (True, False), (False, False)]
    assert (best.best, best.best_step) == (0.3, 3)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: p2ptrain.EarlyStopping("f1", patience=0), "1 or more"),
        (lambda: p2ptrain.EarlyStopping("f1", mode="biggest"), "'min' or 'max'"),  # type: ignore[arg-type]
        (lambda: p2ptrain.EarlyStopping("f1", min_delta=-1.0), "0 or more"),
        (lambda: p2ptrain.EarlyStopping(len), "name of a metric"),  # type: ignore[arg-type]
        (lambda: p2ptrain.SaveBest("f1", 3), "must be a file"),  # type: ignore[arg-type]
    ],
)
def test_wrong_numbers_are_refused(made: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        made()


class Logs:
    def on_step(self, event: object) -> None:
        pass


class TakesNothing:
    def on_step(self) -> None:
        pass


class Awaited:
    async def on_step(self, event: object) -> None:
        pass


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        (print, r"write callbacks=\[...\]"),
        (Logs(), r"write callbacks=\[...\]"),
        ("on_step", "must be a list, not str"),
        (3, "must be a list, not int"),
        ([Logs], "is the class Logs: give an instance"),
        ([object()], "on_start, on_step, on_eval or on_end: a object has none"),
        ([TakesNothing()], r"callbacks\[0\].on_step is called with one event"),
        ([Awaited()], "async function"),
        ([lambda: None], "called with one event"),
        ([p2ptrain.EarlyStopping("f2")], "but evaluations have f1, loss"),
    ],
)
def test_what_cannot_be_called_is_refused(callbacks: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        checked(callbacks, ["f1"], evaluates=True)


def test_early_stopping_needs_something_to_evaluate() -> None:
    with pytest.raises(OptionError, match="give eval_data too"):
        checked([p2ptrain.EarlyStopping("f1")], ["f1"], evaluates=False)


def test_functions_and_objects_of_any_kind_are_taken() -> None:
    made = [print, Logs(), lambda event: None, p2ptrain.EarlyStopping()]
    assert checked(made, [], evaluates=True) == tuple(made)
