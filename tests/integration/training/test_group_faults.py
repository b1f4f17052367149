"""Random misfortunes in jobs with groups: a sample; `P2PTRAIN_EXAMPLES=10` draws thirty more."""

from __future__ import annotations

import pytest
import torch

from tests.integration.training.group_faults import Course, run
from tests.support.thorough import examples_of

SEEDS = (7, 8, 18)
"""Whole micro-batches, running statistics and Adam; a device that dies, one that others take for
dead, a cut link, and the device with the data, which is started again."""

MORE = range(100, 100 + examples_of(3) - 3)


@pytest.mark.parametrize("twins", ["", "bd"])
@pytest.mark.parametrize(
    "course", [Course.of(seed) for seed in (*SEEDS, *MORE)], ids=lambda c: str(c.seed)
)
async def test_every_step_is_reported_once_with_plain_torchs_loss(
    course: Course, twins: str
) -> None:
    """Among processors, and where some devices have accelerators."""
    torch.set_num_threads(1)
    await run(course, twins)
