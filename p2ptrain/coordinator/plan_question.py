"""The question for a plan, before and during training, and the check of an answer.

A question contains the cluster as the holder has measured it, so that every device answers the
same question with the same plan. An answer of another device is only a proposal: it is checked to
be a plan for exactly this question before anything in it is used.

So is a plan that the user gives. What it predicts is computed again: the file may be written by
hand, or be of another day. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from p2ptrain.coordinator.measured_cluster import (
    MeasuredCluster,
    MeasuredDevice,
    planner_question,
)
from p2ptrain.coordinator.memory_model import with_full_memory
from p2ptrain.errors import OptionError, PlanError, ProtocolError
from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.messages.snapshots import REASON_LIMIT
from p2ptrain.net.fields import HOUSEHOLD, LARGE, Blob, BlobLimit, decoded, shown
from p2ptrain.net.forms import By, Positive
from p2ptrain.plan.cost.check_plan import check_kinds
from p2ptrain.plan.replan.replica_holders import Replicas
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.job_facts import WhatIf
from p2ptrain.plan.types.plan import LeftOut, Plan, Predicted
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.tiling.planning.make_plan import NAMES
from p2ptrain.tiling.planning.tiled_plan import simulate_plan


def _read_plan(listed: tuple[Mapping[str, Any], int]) -> Plan:
    content, batch_size = listed
    return Plan.from_json(content, "the plan in force", batch_size=batch_size)


def _write_plan(plan: Plan) -> tuple[Mapping[str, Any], int]:
    return plan.to_json(), plan.split.batch_size


@dataclass(frozen=True, slots=True)
class Near:
    """The plan in force, which the next one is to be close to.

    Attributes:
        plan: with the names that its devices have now.
        replicas: who has each unit, by names.
        recovery: how close.
    """

    plan: Annotated[Plan, By(_read_plan, _write_plan, tuple[Mapping[str, Any], Positive])]
    replicas: Replicas
    recovery: ReplanMethod


@dataclass(frozen=True, slots=True)
class PlanQuestion(Blob):
    """What is to be planned; `near` None = from zero. Profiles are read where they are planned
    with."""

    LIMIT: ClassVar[BlobLimit] = HOUSEHOLD

    request: JobPlanRequest
    household: MeasuredCluster
    near: Near | None = None

    def check(self) -> None:
        """See `Blob`."""
        names = [candidate.name for candidate in self.household.candidates]
        if self.household.holder not in names:
            raise ProtocolError("a question for a plan whose holder is no candidate")
        if len(set(names)) < len(names):
            raise ProtocolError("a question for a plan in which two candidates have one name")

    def answered(self, data: bytes) -> Plan:
        """An answer to this, as it travels. Raises OptionError, ProtocolError: it is none."""
        size = self.request.batch_size
        plan = self.proposed(Plan.from_json(decoded(data, LARGE), "the plan", batch_size=size))
        here = {candidate.name for candidate in self.household.candidates}
        if here - plan.device_names != {out.name for out in plan.left_out}:
            raise ProtocolError("a plan that leaves devices out and does not say so")
        return plan

    def proposed(self, plan: Plan) -> Plan:
        """One that was made before it was asked for, perhaps with fewer devices.

        Raises OptionError, ProtocolError: it is none for this.
        """
        self.check_fits(plan)
        if plan.planner not in NAMES:
            raise ProtocolError("a plan of a planner that is not known here")
        here = {candidate.name: candidate.memory for candidate in self.household.candidates}
        needed, peaks = plan.predicted.needed, plan.predicted.peak_bytes
        if any(
            name not in peaks or here[name].shortage(needed(name)) for name in plan.device_names
        ):
            raise ProtocolError("a plan for which its devices have too little memory")
        said = (
            LeftOut(out.name, shown(out.reason)[:REASON_LIMIT] if out.reason else "")
            for out in plan.left_out
        )
        return replace(plan, left_out=tuple(said), mode_reason=plan.mode_reason)

    def check_fits(self, plan: Plan, why: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raises OptionError: it is none for this job, or of other devices.

        Mode and micro-batch decide results, and privacy is no matter of speed.

        Args:
            why: devices that are not here, by name, and why.
        """
        household = self.household
        kinds = household.kinds
        for name in sorted(plan.device_names - kinds.keys()):
            reason = f" ({why[name]})" if name in why else ""
            raise OptionError(
                f'the plan uses "{name}", which is not among the devices here: '
                f"{', '.join(sorted(kinds))}{reason}"
            )
        for name in sorted(plan.device_names & household.leaving):
            raise OptionError(f'the plan uses "{name}", which is leaving')
        check_kinds(plan, kinds)
        (own,) = [one for one in household.candidates if one.name == household.holder]
        end, units = plan.stages[-1].units[1], len(own.measured["units"])
        if end != units:
            raise OptionError(f"the plan is for a model of {end} layers, and this one has {units}")
        self._check_results(plan)
        self._check_private(plan)

    def _check_results(self, plan: Plan) -> None:
        request = self.request.settled(asynchronous=plan.mode is PlanMode.ASYNC)
        how, size = request.asynchrony, request.micro_batch
        if plan.mode is not (PlanMode.SYNC if how is None else PlanMode.ASYNC):
            raise OptionError(f"the plan is for --mode {plan.mode}: train with that")
        if how is not None:
            size = how.piece(request.batch_size, request.micro_batch)
        elif self.near is not None:
            size = self.near.plan.micro_batch
        if size and plan.micro_batch != size:
            raise OptionError(
                f"the plan has micro-batches of {plan.micro_batch} samples, and this job of {size}"
            )

    def _check_private(self, plan: Plan) -> None:
        first, last = self.request.private_first, self.request.private_last
        if not first:
            return
        holder, units = self.household.holder, plan.stages[-1].units[1]
        ends = {device.name for p in (0, -1) for device in plan.stages[p].devices}
        inside = plan.stages[0].units[1] >= first and plan.stages[-1].units[0] <= units - last
        if ends != {holder} or not inside:
            ends_at = f" and the last {last}" if last else ""
            raise OptionError(
                f"with --private the first {first} layers{ends_at} stay on {holder}, and the plan "
                "gives some of them to others"
            )


NOT_IN_PLAN = "the plan given does not use it"


def fit_plan(
    plan: Plan,
    request: JobPlanRequest,
    household: MeasuredCluster,
    unmeasured: Sequence[LeftOut] = (),
) -> Plan:
    """A plan that the user gives, with what it means for these devices: speed, memory, who is idle.

    Args:
        unmeasured: devices that are no candidates, and why.

    Raises:
        OptionError: it is no plan for this job, or of other devices.
        PlanError: a device has too little memory for it.
    """
    request = request.settled(asynchronous=plan.mode is PlanMode.ASYNC)
    why = {out.name: out.reason for out in unmeasured}
    PlanQuestion(request, household).check_fits(plan, why)
    profile, cluster = planner_question(request, household)
    _check_tiling(plan, request)
    _check_sharing(plan, request)
    if plan.mode is PlanMode.SYNC:
        plan = replace(plan, split=_split(plan, request))
    said = {out.name: out.reason for out in plan.left_out}
    left_out = tuple(
        LeftOut(c.name, said.get(c.name) or NOT_IN_PLAN)
        for c in household.candidates
        if c.name not in plan.device_names
    )
    plan = replace(
        plan, left_out=left_out, planner=plan.planner if plan.planner in NAMES else "auto"
    )
    found = simulate_plan(plan, profile, cluster, overlap=True, updates_ahead=not request.clip)
    predicted = Predicted(found.round_seconds, found.samples_per_s, found.peak_bytes)
    memory = {c.name: c.memory for c in household.candidates}
    plan = with_full_memory(
        replace(plan, predicted=predicted),
        *(profile, request, household.holder, memory, household.kinds),
    )
    for name in sorted(plan.predicted.peak_bytes):
        short = memory[name].shortage(plan.predicted.needed(name))
        if short is not None:
            raise PlanError(short.text(name, plan.predicted.needed(name)))
    return plan


def _check_tiling(plan: Plan, request: JobPlanRequest) -> None:
    tiling = plan.stages[0].tiling
    if tiling is not None and (request.maps is None or tiling.units > len(request.maps.units)):
        tiled = 0 if request.maps is None else len(request.maps.units)
        raise OptionError(
            f"the plan cuts the first {tiling.units} layers into tiles, and this model allows "
            f"that for {tiled}"
        )


def _split(plan: Plan, request: JobPlanRequest) -> BatchSplit:
    """Of the job's batches: a file does not say how large the last micro-batch is."""
    split = BatchSplit(request.batch_size, plan.micro_batch)
    if split.micro_batches != plan.micro_batches:
        raise OptionError(
            f"the plan has {plan.micro_batches} micro-batches of {plan.micro_batch} samples, and a "
            f"batch of this job, {request.batch_size}, is {split.micro_batches} of them"
        )
    return split


def _check_sharing(plan: Plan, request: JobPlanRequest) -> None:
    sharing = request.sharing
    for p, stage in enumerate(plan.stages):
        if len(stage.devices) == 1:
            continue
        where = f"the plan gives stage {p} to {len(stage.devices)} devices"
        if sharing.unshared:
            raise OptionError(f"{where}, which this model does not allow ({sharing.unshared})")
        by_samples = stage.allocation is Allocation.SAMPLES
        if by_samples and request.asynchrony is not None:
            raise OptionError(
                f'{where} by samples, and with --mode async they take turns: "allocation": '
                '"micro_batches"'
            )
        if by_samples and not sharing.divisible:
            raise OptionError(
                f'{where} by samples, which this model does not allow: "allocation": '
                '"micro_batches" may do'
            )


def other_households(
    question: PlanQuestion, used: Sequence[str], most_without: int
) -> Iterator[tuple[WhatIf, PlanQuestion]]:
    """Each with what is different; `used`: devices of the plan in force."""
    household, question = question.household, replace(question, near=None)
    candidates, links = household.candidates, household.links
    if question.request.planner != "auto" and len(used) > 1:
        alone = replace(question.request, planner="single")
        yield WhatIf("alone", "one device", None), replace(question, request=alone)
    if links:
        doubled = {
            ends: ClusterLink(2 * link.bytes_per_s, link.latency_s) for ends, link in links.items()
        }
        changed = replace(household, links=doubled)
        yield WhatIf("faster links", "", None), replace(question, household=changed)
    others = [one for one in candidates if one.name in used and one.name != household.holder]
    for one in others[:most_without]:
        rest = tuple(other for other in candidates if other is not one)
        kept = {ends: link for ends, link in links.items() if one.name not in ends}
        changed = replace(household, candidates=rest, links=kept)
        yield WhatIf("without", one.name, None), replace(question, household=changed)
    for one in sorted(others, key=_slowness)[:1]:
        name = f"{one.name}+"
        more = dict(links)
        for (sender, receiver), link in links.items():
            if sender == one.name:
                more[name, receiver] = link
                more[name, one.name] = more[one.name, name] = link
            elif receiver == one.name:
                more[sender, name] = link
        both = (*candidates, replace(one, id=one.id[:-1] + "+", name=name))
        changed = replace(household, candidates=both, links=more)
        yield WhatIf("one more", one.name, None), replace(question, household=changed)


def _slowness(device: MeasuredDevice) -> float:
    """Seconds of the whole model, for the largest pieces that were measured."""
    times = device.measured.get("times") or {"0": {}}
    largest = times[max(times, key=int)]
    return sum(sum(seconds) for seconds in largest.values())
