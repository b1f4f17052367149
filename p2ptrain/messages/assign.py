"""From a plan to the assignment of each device. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from p2ptrain.job.rounds import samples_evaluated_together
from p2ptrain.mesh.interface import Mesh, display_name
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.net.fields import Blob
from p2ptrain.net.forms import Row
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.recovery.compute_kind import PROCESSOR, ComputeKind
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.placement import PlacedStage, Placement


def placed_stages(
    plan: Plan, ids: Mapping[str, str], kinds: Mapping[str, ComputeKind]
) -> tuple[PlacedStage, ...]:
    """A plan's stages with ids instead of names.

    Args:
        kinds: with what each device computes, by id.
    """
    placed = []
    for stage in plan.stages:
        devices = tuple(ids[device.name] for device in stage.devices)
        found = tuple(kinds[device].kind for device in devices)
        alike = () if {*found} == {PROCESSOR.kind} else found
        placed.append(PlacedStage(*stage.units, devices, kinds=alike))
    return tuple(placed)


def assignment_of(request: JobPlanRequest, plan: Plan, placed: Placement) -> Assignment:
    """What the devices of `plan`, placed so, must know."""
    request = request.settled(asynchronous=plan.mode is PlanMode.ASYNC)
    places = tuple(
        StageAssignment(
            *stage.units,
            warmup=stage.warmup,
            devices=where.devices,
            shares=tuple(device.share for device in stage.devices),
            allocation=stage.allocation,
            held=stage.held,
            copies_to=where.copies_to,
            tiling=stage.tiling,
            goes_ahead=stage.goes_ahead,
            turn=stage.turn,
            bucket_bytes=stage.bucket_bytes,
            kinds=where.kinds,
        )
        for stage, where in zip(plan.stages, placed.stages, strict=True)
    )
    return Assignment(
        key=GenerationKey(request.job, placed.generation),
        holder=placed.holder,
        digest=request.digest,
        stages=places,
        batch_size=request.batch_size,
        micro_batch=plan.micro_batch,
        evaluated=samples_evaluated_together(
            plan.micro_batch, request.eval_samples, request.least_evaluated
        ),
        longest=request.longest,
        weights=request.weights,
        optimizer=request.optimizer,
        seed=request.seed,
        clip=request.clip,
        version=placed.version,
        lineage=placed.lineage,
        wire=request.wire,
        stable=placed.stable,
        keeps=placed.keeps,
        asynchrony=request.asynchrony,
        weighed=request.weighed,
        fast_math=request.fast_math,
    )


def assignment_on_one(present: Assignment, placed: Placement) -> Assignment:
    """An assignment that gives all units to the one device of `placed`: where they are gathered."""
    (stage,) = placed.stages
    place = StageAssignment(stage.first, stage.end, warmup=1, devices=stage.devices, shares=(1,))
    return replace(
        present,
        key=GenerationKey(present.key.job, placed.generation),
        stages=(place,),
        version=placed.version,
        lineage=placed.lineage,
        stable=placed.stable,
        keeps=False,
    )


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """The plan that a job runs by, and what its devices know of it."""

    assignment: Assignment
    plan: Plan

    def named(self, mesh: Mesh) -> Plan:
        """The plan with the names that its devices have now; ids stay, names may not."""
        stages = tuple(
            replace(
                stage,
                devices=tuple(
                    replace(device, name=display_name(mesh, place.devices[number]))
                    for number, device in enumerate(stage.devices)
                ),
            )
            for stage, place in zip(self.plan.stages, self.assignment.stages, strict=True)
        )
        return replace(self.plan, stages=stages, left_out=())


@dataclass(frozen=True, slots=True)
class Fetches(Blob):
    """What a device fetches before a generation."""

    parts: tuple[Annotated[Fetch, Row()], ...]
