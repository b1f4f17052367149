"""Households in memory that train as FTPipeHD does, on devices of made-up speeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from p2ptrain.events import Plan
from p2ptrain.job.asynchrony import PLANNER, AsyncOptions, FtpipehdOptions
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.round_orders import RoundReport
from p2ptrain.runtime.stage_sender import LiveStageSender
from p2ptrain.worker import device_profile
from tests.integration.training.delayed import options
from tests.integration.training.household import Devices
from tests.integration.training.made_up import UNIT_SECONDS, made_up
from tests.support.memory_household import memory_id


class Speeds:
    """How many times as long as the device with the data others take, by name; may change.

    Attributes:
        profiled: how often a device was asked for times.
    """

    def __init__(self, factors: Mapping[str, float]) -> None:
        self.factors = dict(factors)
        self.profiled = 0

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Profiles and reports are made up from now on."""
        report = LiveStageSender.report

        async def reported(links: LiveStageSender, said: RoundReport) -> None:
            place = links.place
            me = links.shell.mesh.self_id
            factors = {memory_id(name): factor for name, factor in self.factors.items()}
            seconds = (place.end - place.first) * sum(UNIT_SECONDS) * factors.get(me, 1.0)
            await report(links, replace(said, busy_seconds=seconds, cpu_seconds=seconds))

        async def counted(*asked: Any, **more: Any) -> Mapping[str, Any]:
            self.profiled += 1
            return await made_up(*asked, **more)

        with (
            patch.object(device_profile, "measure", counted),
            patch.object(LiveStageSender, "report", reported),
        ):
            yield


def as_published(
    count: int,
    steps: int,
    intervals: FtpipehdOptions,
    how: AsyncOptions | None = None,
    **more: object,
) -> TrainOptions:
    """`--mode async --planner ftpipehd` on so many devices."""
    chosen: dict[str, object] = {"planner": PLANNER, "ftpipehd": intervals, **more}
    return options(count, how or AsyncOptions(), steps, **chosen)


def reasons(household: Devices) -> list[str]:
    """Why plans began."""
    return [event.reason for event in household.events if isinstance(event, Plan)]


def units(household: Devices) -> list[dict[str, int]]:
    """By plan, how many units each device has, in the order of the stages."""
    return [
        {stage.devices[0].name: stage.units[1] - stage.units[0] for stage in event.stages}
        for event in household.events
        if isinstance(event, Plan)
    ]
