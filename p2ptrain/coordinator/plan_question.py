"""The question for a plan, before and during training, and the check of an answer.

A question contains the cluster as the holder has measured it, so that every device answers the
same question with the same plan. An answer of another device is only a proposal: it is checked to
be a plan for exactly this question before anything in it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

from p2ptrain.coordinator.measured_cluster import MeasuredCluster, MeasuredDevice
from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.messages.snapshots import REASON_LIMIT
from p2ptrain.net import cbor
from p2ptrain.net.fields import DEVICES_LIMIT, shown
from p2ptrain.net.forms import By, Length, Range, Row
from p2ptrain.net.parts import HOUSEHOLD, LARGE, decoded
from p2ptrain.net.read_form import read_form
from p2ptrain.net.write_form import write_form
from p2ptrain.plan.cost.check_plan import check_kinds
from p2ptrain.plan.replan.replica_holders import Replicas
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.plan import LeftOut, Plan
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.tiling.planning.make_plan import NAMES

LINKS_LIMIT = 1 << 17
"""Both directions of every pair in a household of 256 devices, twice over."""


def _read_request(value: object) -> JobPlanRequest:
    if not isinstance(value, bytes):
        raise ValueError("a request is bytes")
    return JobPlanRequest.from_bytes(value)


RequestBytes: TypeAlias = Annotated[JobPlanRequest, By(_read_request, JobPlanRequest.to_bytes)]


@dataclass(frozen=True, slots=True)
class Near:
    """The plan in force, which the next one is to be close to.

    Attributes:
        plan: with the names that its devices have now.
        replicas: who has each unit, by names.
        recovery: how close.
    """

    plan: Plan
    replicas: Replicas
    recovery: ReplanMethod


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What is to be planned; `near` None = from zero."""

    request: JobPlanRequest
    household: MeasuredCluster
    near: Near | None = None

    def to_bytes(self) -> bytes:
        """Strict CBOR."""
        household, near = self.household, self.near
        links = household.links.items()
        form = _QuestionFields(
            self.request,
            household.holder,
            frozenset(household.leaving),
            tuple(_LinkRow(*ends, float(x.bytes_per_s), float(x.latency_s)) for ends, x in links),
            tuple(household.candidates),
            None
            if near is None
            else _NearFields(near.plan.to_json(), near.replicas.holders, near.recovery),
        )
        return cbor.dumps(write_form(form))

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> PlanQuestion:
        """Check and read; profiles are, where they are planned with. Raises ProtocolError."""
        form = read_form(_QuestionFields, decoded(data, HOUSEHOLD), "a question for a plan")
        links = {
            (x.sender, x.receiver): ClusterLink(x.bytes_per_s, x.latency_s) for x in form.links
        }
        household = MeasuredCluster(form.candidates, links, form.holder, form.leaving)
        return PlanQuestion(form.request, household, _near(form))

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


def _near(form: _QuestionFields) -> Near | None:
    near = form.near
    if near is None:
        return None
    try:
        size = form.request.batch_size
        plan = Plan.from_json(near.plan, "the plan in force", batch_size=size)
    except OptionError as error:
        raise ProtocolError(str(error)) from error
    return Near(plan, Replicas(near.held), near.recovery)


@dataclass(frozen=True, slots=True)
class _LinkRow:
    sender: str
    receiver: str
    bytes_per_s: Annotated[float, Range(0.0, above=True)]
    latency_s: Annotated[float, Range(0.0)]


@dataclass(frozen=True, slots=True)
class _NearFields:
    plan: Mapping[str, Any]
    held: tuple[Annotated[tuple[str, ...], Length(DEVICES_LIMIT)], ...]
    recovery: ReplanMethod


@dataclass(frozen=True, slots=True)
class _QuestionFields:
    request: RequestBytes
    holder: str
    leaving: frozenset[str]
    links: Annotated[tuple[Annotated[_LinkRow, Row()], ...], Length(LINKS_LIMIT)]
    candidates: tuple[MeasuredDevice, ...]
    near: _NearFields | None = None

    def __post_init__(self) -> None:
        if self.holder not in {candidate.name for candidate in self.candidates}:
            raise ValueError("its holder is no candidate")
        if len({candidate.name for candidate in self.candidates}) < len(self.candidates):
            raise ValueError("two candidates have one name")
