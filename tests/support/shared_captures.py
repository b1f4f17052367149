"""What several files of these tests need."""

from __future__ import annotations

import pytest

from p2ptrain.holder.start import first_batch, prepare
from tests.support import captures


@pytest.fixture(autouse=True)
def equal_models_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are prepared at once where an equal model was captured before."""
    monkeypatch.setattr(prepare, "capture", captures.captured)
    monkeypatch.setattr(first_batch, "run_plainly", captures.computed_plainly)
