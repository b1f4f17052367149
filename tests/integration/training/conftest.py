"""What several files of these tests need."""

from __future__ import annotations

import pytest

from p2ptrain.recovery import choose_version
from tests.support.shared_captures import equal_models_are_captured_once

__all__ = ["all_go_back", "equal_models_are_captured_once"]


@pytest.fixture
def all_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost stage is never rebuilt: where it is not possible, copies must do."""
    monkeypatch.setattr(choose_version, "plan_rebuilds", lambda *_: ())
