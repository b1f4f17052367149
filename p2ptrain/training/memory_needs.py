"""What a job takes of a device's memory beside the units that the planners count.

    process    torch's and our own: compiled primitives, stacks and buffers, what lies between freed
               blocks and is too small to be used again (`tools/memory.py` measures it)
    gradient   one unit's, made anew by each micro-batch before it is added to the sum
    samples    on the data holder: loaded, and fed ahead of the stages that work on them

Planners get what is left of a device's budget, so a plan that fits leaves room for all this.
"""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.plan.plan import Plan
from p2ptrain.plan.profile import Profile
from p2ptrain.training.loader import PIECES_AHEAD as LOADED_AHEAD
from p2ptrain.training.plan_request import PlanningRequest
from p2ptrain.training.stage_lines import PIECES_AHEAD as FED_AHEAD

PROCESS_BYTES = 24 << 20
USUAL_DEPTH = 4
"""Of a first stage, as long as it is not known."""


def reserved_bytes(profile: Profile, request: PlanningRequest, *, holder: bool) -> int:
    """What a device must keep free of units, before anybody knows which ones it gets."""
    largest = max(unit.parameter_bytes for unit in profile.units)
    fed = _fed_bytes(profile, request.micro_batch or request.batch_size, USUAL_DEPTH, request)
    return PROCESS_BYTES + largest + (fed if holder else 0)


def with_all_memory(plan: Plan, profile: Profile, request: PlanningRequest, holder: str) -> Plan:
    """`plan`, whose predicted peaks count all that its devices take from now on."""
    peaks = {
        name: peak + _extra_bytes(plan, profile, request, name, holder)
        for name, peak in plan.predicted.peak_bytes.items()
    }
    return replace(plan, predicted=replace(plan.predicted, peak_bytes=peaks))


def _extra_bytes(
    plan: Plan, profile: Profile, request: PlanningRequest, name: str, holder: str
) -> int:
    stages = [s for s in plan.stages if name in [device.name for device in s.devices]]
    units = [unit for stage in stages for unit in profile.units[slice(*stage.units)]]
    largest = max((unit.parameter_bytes for unit in units), default=0)
    fed = _fed_bytes(profile, plan.micro_batch, plan.stages[0].warmup, request)
    return PROCESS_BYTES + largest + (fed if name == holder else 0)


def _fed_bytes(profile: Profile, micro_batch: int, depth: int, request: PlanningRequest) -> int:
    """Pieces in the loader and in the feeder's queues, never more than two rounds."""
    samples = min((LOADED_AHEAD + 2 * FED_AHEAD + depth) * micro_batch, 2 * request.batch_size)
    return samples * (profile.input_bytes + profile.target_bytes)
