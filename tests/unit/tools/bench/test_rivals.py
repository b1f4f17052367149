"""What rivals try, and what they keep."""

from __future__ import annotations

from tools.bench.results import Results
from tools.bench.worker.ddp import try_more


def test_settings_are_tried_until_the_time_is_up() -> None:
    assert try_more([], 3)
    assert try_more([10.0, 10.0], 3)
    assert not try_more([10.0, 25.0], 3)
    assert not try_more([1.0, 1.0, 1.0], 3)


def test_the_setting_that_proved_best_is_kept() -> None:
    results = Results(None)
    assert results.chosen("A/vit/S/ddp") is None
    results.add_run("A/vit/S/ddp", {"samples_per_s": 1.0, "setup": {"chosen": 2}})
    results.add_run("A/vit/S/ddp", {"error": "power cut"})
    assert results.chosen("A/vit/S/ddp") == 2
