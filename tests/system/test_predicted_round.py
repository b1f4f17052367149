"""What `train` predicts of a round holds on real processes, cables and shares of a core.

The bounds are wide, as machines that run tests are busy; `tools/predicted_round.py` shows how near
predictions are on a quiet one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.predicted_round import Setting, measure

pytestmark = [pytest.mark.namespaces, pytest.mark.household, pytest.mark.timeout(300)]


@pytest.mark.usefixtures("emulation")
async def test_a_round_takes_about_as_long_as_predicted(tmp_path: Path) -> None:
    setting = Setting("test", (0.5, 0.3), "1gbit", "cnn", 128, (32,))
    (row,) = await measure(setting, steps=8, folder=tmp_path)
    assert 0.5 < row.ratio < 2, row
