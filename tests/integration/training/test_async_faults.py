"""Random deaths and leaves in asynchronous jobs: a sample of `tools/async_faults.py`."""

from __future__ import annotations

import pytest
import torch

from tools.async_faults import Course, run

SEEDS = range(4)


@pytest.mark.parametrize("course", [Course.of(seed) for seed in SEEDS], ids=lambda c: str(c.seed))
async def test_every_step_is_told_once_with_the_formulas_loss(course: Course) -> None:
    torch.set_num_threads(1)
    await run(course)
