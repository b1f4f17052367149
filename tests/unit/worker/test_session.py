"""What a device forgets of a generation when the holder names the versions to keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.io.replay_log import ReplayLog
from p2ptrain.state.transfer_server import TransferServer
from p2ptrain.worker.generation_builder import WorkerContext
from p2ptrain.worker.hosted_stages import HostedStages
from p2ptrain.worker.session import WorkerSession
from tests.support.memory_household import MemoryHousehold, memory_id

HOLDER = memory_id("a")
STABLE, LATER, EARLIER = Version(30, 1), Version(32, 1), Version(28, 1)


def training(steps: int) -> tuple[WorkerSession, ReplayLog]:
    """A device that knows of so many rounds of a generation."""
    log = ReplayLog(0)
    for step in range(steps):
        log.note_order(RoundOrder(Round(step, RoundMode.TRAIN, step, 16, 4)))
    mesh = MemoryHousehold(["a", "b"])["b"]
    nothing: dict[str, Any] = dict.fromkeys(WorkerContext.__dataclass_fields__)
    shell = SimpleNamespace(mesh=mesh, states=TransferServer(mesh))
    around = {**nothing, "shell": shell, "changed": lambda: None}
    part = WorkerSession("job", WorkerContext(**around))
    part.holder = HOLDER
    part._store.hosted = cast("HostedStages", SimpleNamespace(log=log))
    return part, log


@pytest.mark.parametrize("besides", [(), (LATER,), (EARLIER,), (LATER, EARLIER)])
async def test_what_happened_since_the_stable_version_is_kept(besides: tuple[Version, ...]) -> None:
    """Others are read, or will be, for a checkpoint: no backup peer has a lost stage at these."""
    part, log = training(34)
    part.keep(HOLDER, (STABLE, *besides))
    assert log.since == STABLE.step
    assert [order.round.step for order, _ in log.orders(30, 34)] == [30, 31, 32, 33]


async def test_only_the_holder_says_what_is_forgotten() -> None:
    part, log = training(34)
    part.keep(memory_id("c"), (STABLE,))
    part.keep(HOLDER, ())
    assert log.since == 0
