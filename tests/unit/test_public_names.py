"""The names that apps and scripts use."""

from __future__ import annotations

import re

import pytest

import p2ptrain
from p2ptrain.events import Event


def test_every_event_has_the_name_of_its_kind() -> None:
    kinds = [kind for kind in vars(p2ptrain.events).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, Event) and kind is not Event]
    assert len(set(kinds)) > 15
    for kind in kinds:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
        assert name == kind.event
        assert getattr(p2ptrain.events, kind.__name__) is kind


def test_errors_that_apps_catch_are_there() -> None:
    for name in ("CaptureError", "PlanError", "DeviceLost", "RunCancelled", "TrainingError"):
        assert issubclass(getattr(p2ptrain, name), p2ptrain.Error)


def test_all_that_is_listed_is_there() -> None:
    for name in p2ptrain.__all__:
        assert getattr(p2ptrain, name) is not None


def test_an_older_name_works_and_names_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match="p2ptrain.AsyncOptions"):
        assert p2ptrain.Asynchrony is p2ptrain.AsyncOptions
    with pytest.warns(DeprecationWarning, match=r"p2ptrain\.events\.Warning"):
        assert p2ptrain.events.Warned is p2ptrain.events.Warning


def test_a_wrong_option_is_named_before_anything_runs() -> None:
    with pytest.raises(TypeError, match=r"no option 'wait_fro': did you mean wait_for\\?"):
        p2ptrain.train(None, wait_fro=3)  # type: ignore[arg-type]
