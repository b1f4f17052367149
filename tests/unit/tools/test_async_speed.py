"""What is made of the runs in both modes."""

from __future__ import annotations

from tools.async_speed import MODES, report


def run(predicted: float, measured: float) -> dict[str, object]:
    stage = {"units": [0, 3], "devices": [{"name": "a", "share": 2}], "warmup": 1}
    return {
        "predicted_samples_per_s": predicted,
        "samples_per_s": measured,
        "round_seconds": [1.0, 9.0, 2.0],
        "plan": {"micro_batch": 2, "micro_batches": 8, "stages": [stage]},
    }


def test_modes_are_held_against_each_other_where_both_were_run() -> None:
    runs = {f"P3/pp/{mode}": run(4.0 + k, 4.0 + 2 * k) for k, mode in enumerate(MODES)}
    lines = report({**runs, "P3/auto/async": run(1.0, 1.0)}).splitlines()
    assert lines[-1] == "P3/pp: async/sync 1.50, predicted 1.25"
    assert sum("async/sync" in line for line in lines) == 1
    assert "2.000  8 x 2: 0-3 x1 K1" in lines[-2]
