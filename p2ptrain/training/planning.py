"""What comes before a plan on the holder, members and links, and what people hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

from p2ptrain.errors import UserError
from p2ptrain.mesh.interface import MemberState, Mesh
from p2ptrain.model.description import ModelDescription
from p2ptrain.observe.events import LeftOut, PlanEvent, PlannedDevice, PlannedStage
from p2ptrain.plan.plan import Plan
from p2ptrain.plan.plan import PlannedStage as Stage
from p2ptrain.training.change_request import ChangeAnswer
from p2ptrain.training.waiting import changes, within

SETTLE_SECONDS = 1.5


async def wait_for_members(mesh: Mesh, count: int, timeout_seconds: float | None) -> None:
    """Wait until `count` devices are alive, this one included.

    Raises:
        UserError: not within `timeout_seconds`.
    """
    if not await within(mesh, lambda: len(_alive(mesh)) >= count, timeout_seconds):
        names = ", ".join(sorted(_alive(mesh)))
        raise UserError(
            f"waited {timeout_seconds:g} s for {count} devices, but only {len(_alive(mesh))} "
            f"are here ({names}); start `p2ptrain join` on the others, or see why they are not "
            "found with `p2ptrain doctor`"
        )


async def settle(mesh: Mesh, seconds: float = SETTLE_SECONDS) -> None:
    """Wait until the membership has not changed for `seconds`."""
    with changes(mesh) as changed:
        while True:
            changed.clear()
            try:
                async with asyncio.timeout(seconds):
                    await changed.wait()
            except TimeoutError:
                return


def plan_event(
    answer: ChangeAnswer,
    description: ModelDescription,
    reason: str,
    kept_bytes: Mapping[str, int] = MappingProxyType({}),
) -> PlanEvent:
    """The event that announces a plan.

    Args:
        kept_bytes: what copies of the whole model take beside that, by the name of a device.

    Raises:
        OptionError: the plan is none.
    """
    assignment = answer.assignment
    plan = Plan.from_json(answer.plan, "the plan", batch_size=assignment.batch_size)
    return PlanEvent(
        epoch=assignment.key.epoch,
        reason=reason,
        stages=tuple(_stage(stage, description) for stage in plan.stages),
        micro_batch=plan.micro_batch,
        micro_batches=assignment.micro_batches,
        predicted_samples_per_s=plan.predicted.samples_per_s,
        left_out=tuple(LeftOut(out.name, out.reason) for out in plan.left_out),
        changes_results=answer.changes_results,
        wire=assignment.wire.value,
        mode="sync" if assignment.asynchrony is None else "async",
        mode_reason=plan.mode_reason,
        predicted_peak_bytes={
            name: peak + answer.beside_bytes.get(name, 0) + kept_bytes.get(name, 0)
            for name, peak in plan.predicted.peak_bytes.items()
        },
    )


def _stage(stage: Stage, description: ModelDescription) -> PlannedStage:
    return PlannedStage(
        units=stage.units,
        devices=tuple(PlannedDevice(device.name, device.share) for device in stage.devices),
        parameters=tuple(description.state_dict_names(*stage.units)),
        allocation=stage.allocation.value,
        warmup=stage.warmup,
    )


def _alive(mesh: Mesh) -> list[str]:
    return [m.name for m in mesh.members.values() if m.state is MemberState.ALIVE]
