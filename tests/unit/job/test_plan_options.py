from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2ptrain.errors import OptionError
from p2ptrain.job.train_options import TrainOptions


def test_paths_may_be_texts() -> None:
    options = TrainOptions(plan="plan.json", dry_run=True, write_profile="p.json")  # type: ignore[arg-type]
    assert (options.plan, options.write_profile) == (Path("plan.json"), Path("p.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"write_plan": "p.json"}, "are for dry_run"),
        ({"plan": "p.json", "planner": "pp"}, "leaves no choice"),
        ({"plan": "p.json", "mode": "auto"}, "leaves no choice"),
        ({"plan": 7}, "plan must be a path"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrainOptions(**options)
