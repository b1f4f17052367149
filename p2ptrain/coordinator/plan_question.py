"""The question for a plan, before and during training, and the check of an answer.

A question contains the cluster as the holder has measured it, so that every device answers the
same question with the same plan. An answer of another device is only a proposal: it is checked to
be a plan for exactly this question before anything in it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from p2ptrain.coordinator.measured_cluster import MeasuredCluster
from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.messages.snapshots import REASON_LIMIT
from p2ptrain.net.fields import HOUSEHOLD, LARGE, Blob, BlobLimit, decoded, shown
from p2ptrain.net.forms import By, Positive
from p2ptrain.plan.cost.check_plan import check_kinds
from p2ptrain.plan.replan.replica_holders import Replicas
from p2ptrain.plan.types.plan import LeftOut, Plan
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.tiling.planning.make_plan import NAMES


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
        kinds = {candidate.name: candidate.compute.kind for candidate in household.candidates}
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
