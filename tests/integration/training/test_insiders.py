"""A device of the plan that sends what it should not is named and planned around."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from p2ptrain import events
from p2ptrain.coordinator import plan_cluster
from p2ptrain.events import Plan
from p2ptrain.messages.kinds import FAILED
from p2ptrain.messages.tensors import MicroBatchSlice, StreamId, Value
from p2ptrain.net.message import Message
from p2ptrain.recovery.recovery_settings import RecoverySettings
from p2ptrain.runtime.io.tensor_router import TensorRouter
from tests.integration.training import group_plans
from tests.integration.training.group_plans import divided
from tests.integration.training.household import devices
from tests.integration.training.jobs import (
    assert_undisturbed,
    momentum_job,
    one_stage_each,
    undisturbed,
)
from tests.support.memory_household import memory_id


def _full(values: Sequence[Value], number: float) -> list[Value]:
    return [None if value is None else torch.full_like(value, number) for value in values]


def _of_round(piece: MicroBatchSlice, number: int) -> MicroBatchSlice:
    return replace(piece, key=replace(piece.key, round=number))


def spoil(monkeypatch: pytest.MonkeyPatch, kind: str, after: int = 30) -> None:
    """Device b spoils all that its stage sends, from some piece on."""
    send, sent = TensorRouter.send_values, 0

    async def wrong(
        board: TensorRouter,
        device: str,
        line: StreamId,
        piece: MicroBatchSlice,
        values: Sequence[Value],
        *rest: Any,
        **more: Any,
    ) -> None:
        nonlocal sent
        if board.mesh.self_id == memory_id("b"):
            sent += 1
            if sent > after:
                match kind:
                    case "NaN":
                        values = _full(values, torch.nan)
                    case "huge":
                        values = _full(values, 3e38)
                    case "shape":
                        values = [None if value is None else value[:-1] for value in values]
                    case "dtype":
                        values = [None if value is None else value.double() for value in values]
                    case "more values":
                        values = [*values, *values]
                    case "no values":
                        values = [None for _ in values]
                    case "twice":
                        await send(board, device, line, piece, values, *rest, **more)
                    case "a later round":
                        piece = _of_round(piece, piece.key.round + 10**6)
                    case "an earlier round":
                        piece = _of_round(piece, 0)
                    case "nothing":
                        return
        await send(board, device, line, piece, values, *rest, **more)

    monkeypatch.setattr(TensorRouter, "send_values", wrong)


def spoil_sums(monkeypatch: pytest.MonkeyPatch, name: str, after: int = 30) -> None:
    """One device of a group spoils what it sends of the group's sums, from some frame on."""
    send, sent = TensorRouter.send_frame, 0

    async def wrong(
        board: TensorRouter,
        device: str,
        line: StreamId,
        fields: Any,
        parts: Sequence[memoryview],
        **more: Any,
    ) -> None:
        nonlocal sent
        if board.mesh.self_id == memory_id(name):
            sent += 1
            if sent > after:
                spoiled = [torch.full((part.nbytes // 4,), torch.nan) for part in parts]
                parts = [memoryview(value.numpy()).cast("B") for value in spoiled]
        await send(board, device, line, fields, parts, **more)

    monkeypatch.setattr(TensorRouter, "send_frame", wrong)


@pytest.mark.parametrize(("liar", "group"), [("b", (2, 2)), ("b", (2, 1, 1)), ("c", (2, 1, 1))])
async def test_of_a_group_whose_sums_are_spoiled_one_after_the_other_is_left_out(
    monkeypatch: pytest.MonkeyPatch, liar: str, group: tuple[int, ...]
) -> None:
    """Nobody can say who it was; in the end the liar is out, and the honest ones have work."""
    plans = {size: group[:size] for size in range(1, 4)}
    names = "abc"[: len(group)]

    def planned(profile: Any, cluster: Any, request: Any) -> Any:
        here = [device.name for device in cluster.devices]
        shares = (*plans[len(here)][:-1], 4 - sum(plans[len(here)][:-1]))
        return group_plans.plan([divided(*shares)], profile, cluster, request, names=here)

    monkeypatch.setattr(plan_cluster, "make_plan", planned)
    wanted, job = undisturbed(momentum_job()), momentum_job()
    async with devices(len(names)) as household:
        spoil_sums(monkeypatch, liar)
        options = replace(one_stage_each(len(names)), planner="auto")
        await household.holder_run(job, options).run()
    assert household.losses == pytest.approx(wanted.losses, rel=1e-4)
    warned = [event.name for event in household.events if isinstance(event, events.Warning)]
    assert warned[-1] == liar, "the others are tried before"
    assert len(warned) < len(names)
    used = {device.name for stage in household.plan.stages for device in stage.devices}
    assert liar not in used
    blamed = {out.name for out in household.plan.left_out if "sends wrong values" in out.reason}
    assert blamed == {liar}


@pytest.mark.parametrize(
    "kind",
    [
        *("NaN", "huge", "shape", "dtype", "more values", "no values"),
        *("twice", "a later round", "an earlier round", "nothing"),
    ],
)
async def test_it_is_named_and_planned_around(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    wanted, job = undisturbed(momentum_job()), momentum_job()
    # all share one process here
    settings = RecoverySettings(
        silence_look_seconds=0.1, silence_seconds=0.5, quiet_cpu_seconds=1e9
    )
    async with devices(3, settings=settings) as household:
        spoil(monkeypatch, kind)
        await household.holder_run(job, one_stage_each(3)).run()
        assert_undisturbed(household, job, wanted)
    told = [event for event in household.events if isinstance(event, events.Warning)]
    assert [event.name for event in told] == ["b"]
    assert "b is not used any more in this training" in told[0].message
    plans = [event for event in household.events if isinstance(event, Plan)]
    names = [{d.name for stage in plan.stages for d in stage.devices} for plan in plans]
    assert names[0] == {"a", "b", "c"}
    assert names[-1] == {"a", "c"}
    assert [out.name for out in plans[-1].left_out] == ["b"]
    assert plans[-1].left_out[0].reason in told[0].message


@pytest.mark.parametrize("cause", ["user", "bug", "peer", "link", "made up"])
async def test_one_that_says_without_end_that_its_part_fails_ends_no_job(
    cause: str,
) -> None:
    wanted, job = undisturbed(momentum_job()), momentum_job()
    async with devices(3, settings=RecoverySettings(verdict_seconds=0.1)) as household:

        async def complain() -> None:
            mesh, service = household.mesh["b"], household.members["b"].service
            while True:
                await asyncio.sleep(0.02)
                if service.slot.hosted is not None and len(household.losses) >= 3:
                    assignment = service.slot.hosted.assignment
                    (stage, *_) = assignment.stages_of(mesh.self_id)
                    fields = {"stage": stage, "cause": cause, "message": "oh no"}
                    fields |= {**assignment.key.fields(), "peer": memory_id("c")}
                    await mesh.send(memory_id("a"), Message(FAILED, fields))

        complaining = asyncio.create_task(complain())
        await household.holder_run(job, one_stage_each(3)).run()
        complaining.cancel()
        assert_undisturbed(household, job, wanted)
    assert [event.name for event in household.events if isinstance(event, events.Warning)] == ["b"]
    used = {device.name for stage in household.plan.stages for device in stage.devices}
    assert used == {"a", "c"}
