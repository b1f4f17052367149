"""Finished values go to the one that needs them, and nobody waits for another's slow link."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from p2ptrain.devices.interface import Arrived
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.assignment import StageAssignment
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice, Value
from p2ptrain.runtime.io.sample_division import SampleDivision
from p2ptrain.runtime.stage_io import OutputQueues

AFTER = SampleDivision(StageAssignment(1, 2, 1, ("c", "d"), (2, 2)))


class Recorder:
    """Links that block for the devices in `blocked`."""

    def __init__(self, blocked: Sequence[str] = ()) -> None:
        self.sent: list[tuple[str, MicroBatchSlice, Sequence[Value]]] = []
        self.changed = asyncio.Event()
        self._blocked = set(blocked)

    async def send(self, device: str, piece: MicroBatchSlice, values: Sequence[Value]) -> None:
        """As a link would."""
        if device in self._blocked:
            await asyncio.Event().wait()
        self.sent.append((device, piece, values))
        self.changed.set()

    async def until(self, count: int) -> None:
        """Wait for that many."""
        while len(self.sent) < count:
            self.changed.clear()
            await self.changed.wait()


def piece(number: int, first: int, end: int) -> MicroBatchSlice:
    """Samples [first, end) of a micro-batch of 4."""
    return MicroBatchSlice(MicroBatchKey(0, number), RoundMode.TRAIN, 4, first, end)


async def test_each_gets_its_samples() -> None:
    links, rows, common = Recorder(), torch.arange(6.0).reshape(3, 2), torch.ones(2)
    outlets = OutputQueues(AFTER, lambda _mode: [0, None], links.send, capacity=2)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outlets.run())
        await outlets.put(piece(0, 1, 4), Arrived([rows, common]))
        await links.until(2)
        running.cancel()
    by_device = {device: (what, values) for device, what, values in links.sent}
    assert (by_device["c"][0].first, by_device["c"][0].end) == (1, 2)
    assert torch.equal(by_device["c"][1][0], rows[:1])  # type: ignore[arg-type]
    assert torch.equal(by_device["d"][1][0], rows[1:])  # type: ignore[arg-type]
    assert by_device["c"][1][1] is common
    assert by_device["d"][1][1] is common


async def test_what_is_summed_goes_to_one_only() -> None:
    links, common = Recorder(), torch.ones(2)
    outlets = OutputQueues(AFTER, lambda _mode: [None], links.send, capacity=2, summed=True)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outlets.run())
        await outlets.put(piece(0, 0, 4), Arrived([common]))
        await links.until(2)
        running.cancel()
    assert {device: values[0] for device, _, values in links.sent} == {"c": common, "d": None}


async def test_a_slow_device_does_not_hold_up_the_others() -> None:
    links = Recorder(blocked=["c"])
    outlets = OutputQueues(AFTER, lambda _mode: [0], links.send, capacity=3)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outlets.run())
        for number in range(3):
            await outlets.put(piece(number, 0, 4), Arrived([torch.zeros(4, 1)]))
        await links.until(3)
        running.cancel()
    assert [device for device, _, _ in links.sent] == ["d"] * 3
