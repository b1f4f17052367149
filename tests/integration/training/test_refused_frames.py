"""A device sends what another does not expect: once it costs a round, always it ends the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from p2ptrain import events
from p2ptrain.events import Plan
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.net.message import Message
from p2ptrain.recovery.recovery_settings import RecoverySettings
from p2ptrain.runtime.io import tensor_router
from p2ptrain.runtime.io.tensor_router import ACTIVATIONS
from tests.integration.training.household import devices
from tests.integration.training.jobs import make_job

SETTINGS = RecoverySettings(verdict_seconds=0.0)


def send_one_too_many(monkeypatch: pytest.MonkeyPatch, times: float) -> Callable[[], int]:
    """So often something else goes with the activations; returns how often it did."""
    to_messages, sent = tensor_router.to_messages, 0

    def wrong(kind: str, address: Any, piece: Any, values: Any, *rest: Any) -> list[Message]:
        nonlocal sent
        if address["flow"] == ACTIVATIONS and sent < times:
            sent += 1
            values = [*values, *values]
        return to_messages(kind, address, piece, values, *rest)

    monkeypatch.setattr(tensor_router, "to_messages", wrong)
    return lambda: sent


@pytest.mark.parametrize("planner", ["pp", "dp"])
async def test_who_refuses_what_the_holder_sends_gets_no_more_work(
    monkeypatch: pytest.MonkeyPatch, planner: str
) -> None:
    send_one_too_many(monkeypatch, float("inf"))
    async with devices(2, settings=SETTINGS) as household:
        options = TrainOptions(wait_for=2, planner=planner)
        await household.holder_run(make_job(), options).run()
        told = [event for event in household.events if isinstance(event, events.Warning)]
        assert [event.name for event in told] == ["b"]
        assert "b refuses what this device sends (what a sent is refused" in told[0].message
        plans = [event for event in household.events if isinstance(event, Plan)]
        assert len(plans) == 2


async def test_one_wrong_frame_costs_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async with devices(2, settings=SETTINGS) as household:
        await household.holder_run(make_job()).run()
        expected = household.losses
    sent = send_one_too_many(monkeypatch, 1)
    async with devices(2, settings=SETTINGS) as household:
        await household.holder_run(make_job()).run()
        assert household.losses == expected
    assert sent() == 1
