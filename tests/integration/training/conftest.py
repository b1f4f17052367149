"""What several files of these tests need."""

from __future__ import annotations

import pytest

from p2ptrain.training import preparation
from p2ptrain.training.recovery import choose
from tests import captures


@pytest.fixture(autouse=True)
def equal_models_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs begin at once where an equal model was trained before."""
    monkeypatch.setattr(preparation, "capture", captures.captured)


@pytest.fixture
def all_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost stage is never made anew: where it is not possible, copies must do."""
    monkeypatch.setattr(choose, "rebuilds", lambda *_: ())
