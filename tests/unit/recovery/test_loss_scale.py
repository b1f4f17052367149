"""The scale is that of torch.amp.GradScaler, wherever the job goes back to."""

from __future__ import annotations

import random

import pytest
import torch

from p2ptrain.recovery.loss_scale import FLOAT32_MAX, LossScale, ScaleSettings

SMALL = ScaleSettings(first=8.0, interval=3)


def torchs(pattern: list[bool], settings: ScaleSettings) -> list[float]:
    """The scales of each update, where those that are True were skipped."""
    scale, growth = torch.tensor(settings.first), torch.tensor(0, dtype=torch.int32)
    scales = []
    for skipped in pattern:
        scales.append(scale.item())
        numbers = settings.growth, settings.backoff, settings.interval
        torch._amp_update_scale_(scale, growth, torch.tensor(float(skipped)), *numbers)
    return scales


@pytest.mark.parametrize("seed", range(5))
def test_it_is_torchs(seed: int) -> None:
    draw = random.Random(seed)
    pattern = [draw.random() < 0.2 for _ in range(100)]
    scale, found, first = LossScale(settings=SMALL), [], 0
    for step, skipped in enumerate(pattern):
        found.append(scale.of(step))
        scale.decided(step + 1, skipped=skipped)
        if draw.random() < 0.1:  # back to where it was, and the same again
            again = draw.randrange(first, step + 1)
            rows = scale.rows
            if draw.random() < 0.5:  # of a checkpoint, before which there is nothing
                rows, first = scale.rows_at(again), again
            scale = LossScale(again, rows, SMALL)
            for number in range(again, step + 1):
                assert scale.of(number) == found[number]
                scale.decided(number + 1, skipped=pattern[number])
    assert found == torchs(pattern, SMALL)


def test_it_never_becomes_infinite() -> None:
    settings = ScaleSettings(first=FLOAT32_MAX / 1.5, interval=1)
    scale = LossScale(settings=settings)
    scale.decided(1, skipped=False)
    assert [scale.of(1)] == torchs([False, False], settings)[1:]


def test_what_is_noted_stays_small_and_says_what_was_skipped() -> None:
    scale = LossScale()
    assert not scale.decided(1, skipped=False)
    assert all(scale.decided(step, skipped=True) for step in range(2, 500))
    assert len(scale.rows) <= 256
    assert scale.of(0) == 65536.0
    scale = LossScale()
    found = []
    for step, skipped in enumerate([True, True, False, True, True, True], 1):
        scale.decided(step, skipped=skipped)
        found.append(scale.skipped_in_a_row)
    assert found == [1, 2, 2, 1, 2, 3]
