"""An accelerator that fails in the middle of a job: the device goes on with its processor."""

from __future__ import annotations

import pytest

from p2ptrain.devices.processor import HOST
from p2ptrain.events import Recovered
from tests.integration.training.household import OFTEN_COPIED, devices
from tests.integration.training.jobs import (
    assert_undisturbed,
    momentum_job,
    on_step,
    one_stage_each,
    undisturbed,
)
from tests.support.twin_device import TwinDevice


@pytest.mark.parametrize("whose", ["a", "c"])
async def test_the_job_goes_on_and_the_device_computes_on_its_processor(whose: str) -> None:
    """The holder's or another's: nothing of the card's memory is used any more."""
    job, wanted = momentum_job(), undisturbed(momentum_job())
    twin = TwinDevice()
    async with devices(3, settings=OFTEN_COPIED, compute={whose: twin}) as household:
        listen = on_step(household, 5, twin.fail_now)
        await household.holder_run(job, one_stage_each(3), listen).run()
        assert_undisturbed(household, job, wanted)
        assert household.members[whose].compute.device is HOST
    assert any(isinstance(event, Recovered) for event in household.events)
    assert len(household.warned) == 1
    who, text = household.warned[0]
    assert who == whose
    assert "the card has fallen off the bus; this device computes on its CPU from now on" in text
