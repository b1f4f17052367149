"""A short sample of `tools/mixture_damage.py`."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from tools.mixture_damage import AFTER_COPIES, train

CHAIN, STEPS = 50, 110


@pytest.mark.parametrize("way", ["one version", "mixture"])
async def test_a_lost_stage_is_as_old_as_its_copy(way: str) -> None:
    """Either all go back to the copies, or the lost stage alone does, and others have gone on."""
    torch.set_num_threads(1)
    found = await train(0, Namespace(steps=STEPS, chain=CHAIN), way)
    assert len(found.losses) == STEPS
    ((step, back),) = found.deaths
    assert step >= CHAIN + AFTER_COPIES
    assert AFTER_COPIES <= back <= step
