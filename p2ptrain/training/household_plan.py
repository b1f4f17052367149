"""From what was measured to a plan: pure, so that what a household would get can be tested.

A device that ran out of memory is planned for again with what it really has: its budget only falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.net.forms import Range, Text
from p2ptrain.plan import fields
from p2ptrain.plan.allocation import Allocation
from p2ptrain.plan.cluster import Cluster, Device, Link
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.fold import Fold
from p2ptrain.plan.mode_choice import chosen
from p2ptrain.plan.overheads import Overheads
from p2ptrain.plan.plan import Plan
from p2ptrain.plan.planners import make_plan
from p2ptrain.plan.profile import Profile
from p2ptrain.plan.replanning.heavy import respipe
from p2ptrain.plan.replanning.light import THOROUGH
from p2ptrain.plan.replanning.replan import fixed, replan
from p2ptrain.plan.replanning.replicas import Replicas
from p2ptrain.plan.request import Mode, PlanRequest
from p2ptrain.plan.simulation.simulate import simulate
from p2ptrain.plan.tiling.tiled_plan import simulate_tiled
from p2ptrain.plan.times import TimeTable, bytes_by_flop
from p2ptrain.plan.trusted import trusted_change, trusted_plan
from p2ptrain.plan.versions import Weights
from p2ptrain.size_text import size_text
from p2ptrain.training.alike import Measured, shared
from p2ptrain.training.memory_needs import (
    PROCESS_BYTES,
    reserved_bytes,
    with_all_memory,
)
from p2ptrain.training.options import Recovery
from p2ptrain.training.plan_request import PlanningRequest
from p2ptrain.training.profiling import to_profile
from p2ptrain.training.recovery.holdings import Inventory

PLANNING_EFFORT = 0.3
"""Everyone waits for the plan, and who makes it may be the slowest device."""
MOST_PLANS = 6
"""For budgets that a plan's buffers exceed; each leaves more room for them."""
STRAIGHT = ("pp", "ftpipehd")
"""Planners whose stages have one device each, and keep that: to the last bit the same results."""
UNDIVIDED = ("dp", "single")
"""Planners that give a device all units: a plan close to theirs would be one of another kind."""
LESS_MEMORY = 0.9
"""What is left of a budget that proved too large, where the device does not know better."""


LinksOf: TypeAlias = Callable[[Mapping[str, str]], Mapping[tuple[str, str], Link]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that may take part: measured, with the memory it offers.

    Attributes:
        taken_bytes: what the job has taken there already, to export, to know and to measure the
            model; no part of `memory_bytes`.
    """

    id: Annotated[str, Text(64)]
    name: str
    measured: Mapping[str, Any]
    memory_bytes: Annotated[int, Range(0, 2**63)]
    taken_bytes: Annotated[int, Range(0, 2**63)] = 0

    @classmethod
    def of(cls, device: str, name: str, stock: Inventory) -> Candidate:
        """As the device describes itself."""
        measured = stock.measured or {}
        return cls(device, name, measured, stock.budget_bytes, stock.taken_bytes)

    def with_less_memory(self, found_bytes: int | None) -> Candidate:
        """After it ran out of memory, with what it has now, if it knows; always less."""
        most = less_memory(self.memory_bytes)
        found = most if found_bytes is None else min(most, found_bytes)
        return replace(self, memory_bytes=max(found, 0))


def less_memory(memory_bytes: int) -> int:
    """A smaller budget than one that proved too large; what every process takes stays in it."""
    units = memory_bytes - PROCESS_BYTES
    return (
        PROCESS_BYTES + int(LESS_MEMORY * units) if units > 0 else int(LESS_MEMORY * memory_bytes)
    )


@dataclass(frozen=True, slots=True)
class MeasuredHousehold:
    """The devices that may take part and their links.

    Attributes:
        links: (name, name) -> that direction.
        holder: name of the data holder.
        leaving: names of candidates that get no work any more; others may fetch from them.
    """

    candidates: Sequence[Candidate]
    links: Mapping[tuple[str, str], Link]
    holder: str
    leaving: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        candidates: Iterable[Candidate],
        links: LinksOf,
        holder: str,
        without: frozenset[str],
    ) -> MeasuredHousehold:
        """Of these devices.

        Args:
            links: the links between the devices of these names, by id.
            holder: name of the data holder.
            without: ids of devices that get no work any more.
        """
        listed = sorted(candidates, key=lambda candidate: candidate.id)
        leaving = frozenset(c.name for c in listed if c.id in without)
        return cls(listed, links({c.id: c.name for c in listed}), holder, leaving)

    def cluster(self, found: Mapping[str, Measured], reserved: Mapping[str, int]) -> Cluster:
        """As the planners read it: with the memory that units may take.

        Args:
            found: of each device, by name.
            reserved: name -> bytes of a device that are not for units.
        """
        devices = tuple(
            Device(
                name=c.name,
                memory_bytes=max(c.memory_bytes - reserved[c.name], 0),
                holder=c.name == self.holder,
                times=found[c.name].times,
                overheads=found[c.name].overheads,
            )
            for c in self.candidates
        )
        return Cluster(devices=devices, links=dict(self.links))


T = TypeVar("T")


class Run(Protocol):
    """Calls a planner: here, or elsewhere."""

    def __call__(self, planner: Callable[[], T], /) -> T: ...


def run_here(planner: Callable[[], T], /) -> T:
    """Without further ado."""
    return planner()


def plan_household(
    request: PlanningRequest, household: MeasuredHousehold, run: Run = run_here
) -> Plan:
    """The plan for `request`, by what the runtime really does.

    What it takes beside the units is known when there is a plan. Where a device has less left,
    that plan no longer fits its budget for units, and planners try again. Where the mode is open,
    of the best plans of both the one that leads to the same accuracy sooner.

    Raises:
        PlanError: nothing fits, or the planner asked for cannot plan this model.
    """
    if request.rounds is None:
        if len(household.candidates) > 1:
            request.sharing.check(request.planner, asynchronous=request.asynchrony is not None)
        return _within_memory(
            request, household, lambda *asked: run(partial(trusted_plan, make_plan, *asked))
        )
    rounds_request = request.settled(asynchronous=False)
    rounds = plan_household(rounds_request, household, run)
    assert request.asynchrony is not None
    try:
        free = plan_household(request.settled(asynchronous=True), household, run)
    except PlanError as error:
        return replace(rounds, mode_reason=f"with --mode async there is no plan: {error}")
    seconds = _plain_seconds(rounds, *question(rounds_request, household))
    return chosen(rounds, seconds, free, request.asynchrony.weights)


def _plain_seconds(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    """Of a round, by the plain cost model; tiles have none without their messages."""
    if plan.stages[0].tiling is not None:
        return simulate_tiled(plan, profile, cluster).round_seconds
    return simulate(plan, profile, cluster, timeline=False).round_seconds


def plan_change(
    request: PlanningRequest,
    household: MeasuredHousehold,
    present: Plan,
    replicas: Replicas,
    recovery: Recovery,
    repay_seconds: float | None = None,
    *,
    on_all: bool = False,
    run: Run = run_here,
) -> Plan:
    """A plan for the devices of `household`, in place of `present`; its micro-batch stays.

    A planner asked for by name is obeyed, as where a job starts: of the devices that it uses none
    is left out for speed. Where that has no plan any more, one close to `present` has.

    Args:
        replicas: who has each unit now, by names.
        on_all: planner pp is to use every device, as it does where a job starts.
        run: where planners run.
        repay_seconds: where the change cannot be put off: how long a slower plan may be slower
            for what it saves of the pause; None = it is weighed against the present plan.

    Raises:
        PlanError: nothing fits.
    """
    planner, here = present.planner, frozenset(c.name for c in household.candidates)
    tiled = present.stages[0].tiling is not None  # what is close to it has other tiles
    folds = request.private_first > 0  # a private plan's units are folded
    from_zero = recovery is Recovery.HEAVY or folds or tiled
    is_near = not from_zero and (recovery is Recovery.LIGHT or bool(household.leaving))

    def again(profile: Profile, cluster: Cluster, wanted: PlanRequest) -> Plan:
        if planner in STRAIGHT:
            wanted = replace(wanted, groups=False)
        if from_zero:
            return own(profile, cluster, wanted)
        if not is_near:  # it takes part of nobody alive
            return respipe(profile, cluster, present, wanted, replicas=replicas).plan
        near = partial(
            replan,
            *(profile, cluster, present, wanted),
            replicas=replicas,
            effort=THOROUGH if repay_seconds is None else None,  # nobody waits
            repay_seconds=repay_seconds,
        )
        found = run(near).plan
        if repay_seconds is None:
            return found  # it is weighed
        asked = profile, cluster, fixed(present, wanted)
        return trusted_change(make_plan, *asked, present, found)

    def own(profile: Profile, cluster: Cluster, wanted: PlanRequest) -> Plan:
        return run(partial(trusted_plan, make_plan, profile, cluster, fixed(present, wanted)))

    def on_as_many(profile: Profile, cluster: Cluster, wanted: PlanRequest) -> Plan:
        used = here if on_all else here & present.device_names
        return again(profile, cluster, replace(wanted, required=used - household.leaving))

    obeyed: list[Planning] = []
    if planner in UNDIVIDED and is_near:
        obeyed.append(own)
    if planner == "pp" or (planner != "auto" and is_near):
        obeyed.append(on_as_many)
    for planning in obeyed:
        with suppress(PlanError):  # somebody has too little memory by now
            return _within_memory(request, household, planning)
    return _within_memory(request, household, again)


def is_known(inventory: Inventory, request: PlanningRequest, holder: str) -> bool:
    """Whether a device has said all of itself that plans need."""
    if request.ftpipehd is not None and inventory.device != holder:
        return inventory.budget_bytes > 0
    return inventory.measured is not None


def with_times_of(holder: str, candidates: Mapping[str, Candidate]) -> dict[str, Candidate]:
    """As FTPipeHD begins: every device takes as long as the one with the data.

    Args:
        candidates: by id.
    """
    measured = candidates[holder].measured
    return {device: replace(one, measured=measured) for device, one in candidates.items()}


def question(request: PlanningRequest, household: MeasuredHousehold) -> tuple[Profile, Cluster]:
    """What planners are asked about: the model as the holder knows it, and the devices.

    Raises:
        PlanError: the holder's own profile is not there.
    """
    holder = next((c for c in household.candidates if c.name == household.holder), None)
    if holder is None:
        raise PlanError(f"{household.holder}, which has the data, has not measured the model")
    profile = to_profile(holder.measured, request)
    found = _found(household.candidates, profile, request.batch_size)
    profile = replace(profile, times=found[holder.name].times, maps=request.maps)
    return profile, household.cluster(found, _reserved(profile, request, household))


def _reserved(
    profile: Profile, request: PlanningRequest, household: MeasuredHousehold
) -> dict[str, int]:
    return {
        c.name: reserved_bytes(profile, request, holder=c.name == household.holder)
        for c in household.candidates
    }


def unusable(
    request: PlanningRequest, candidates: Mapping[str, Candidate], holder: str
) -> dict[str, str]:
    """Devices whose profile is none of this model, by id, and why; what they say ends no job.

    Args:
        candidates: by id.
        holder: name of the data holder.
    """
    own = [one for one in candidates.values() if one.name == holder]
    found = {}
    for device, one in candidates.items():
        if one.name != holder and own:
            try:
                names = ((holder, one.name), (one.name, holder))
                two = MeasuredHousehold([*own, one], dict.fromkeys(names, Link(1e6, 1e-3)), holder)
                CostModel(*question(request, two))
            except OptionError as error:
                found[device] = f"its measurements cannot be used: {error}"
    return found


Planning: TypeAlias = Callable[[Profile, Cluster, PlanRequest], Plan]


def _within_memory(
    request: PlanningRequest, household: MeasuredHousehold, planning: Planning
) -> Plan:
    profile, cluster = question(request, household)
    found = _found(household.candidates, profile, request.batch_size)
    reserved = _reserved(profile, request, household)
    for _ in range(MOST_PLANS):
        plain = _plan_within(cluster, profile, request, planning, household.leaving)
        memory = {c.name: c.memory_bytes for c in household.candidates}
        plan = with_all_memory(plain, profile, request, household.holder, memory)
        needed, counted = plan.predicted.peak_bytes, plain.predicted.peak_bytes
        short = [c for c in household.candidates if needed.get(c.name, 0) > c.memory_bytes]
        if not short:
            return _said_leaving(plan, household)
        reserved |= {c.name: needed[c.name] - counted[c.name] for c in short}
        cluster = household.cluster(found, reserved)
    name, missing = short[0].name, needed[short[0].name] - short[0].memory_bytes
    raise PlanError(
        f"{name} has too little memory for any plan found: {size_text(missing)} missing. Free some "
        "there, allow more with --memory, or use a smaller --micro-batch"
    )


def _said_leaving(plan: Plan, household: MeasuredHousehold) -> Plan:
    """With the true reason why the leaving have no part."""
    left_out = tuple(
        replace(out, reason="it is leaving") if out.name in household.leaving else out
        for out in plan.left_out
    )
    return replace(plan, left_out=left_out)


def _request(
    request: PlanningRequest, only: frozenset[str] | None, allocations: frozenset[Allocation]
) -> PlanRequest:
    """What planners are asked; `only`: names of the devices that may get work, None = all."""
    how, piece = request.asynchrony, request.batch_size
    if how is not None:
        piece = how.piece(request.batch_size, request.micro_batch)
    return PlanRequest(
        batch_size=piece,
        micro_batch=request.micro_batch or None,
        planner=request.planner,
        least_piece=request.least_piece,
        private=request.private_first > 0,
        only=only,
        groups=not request.sharing.unshared and (how is None or how.may_share),
        allocations=allocations if how is None else frozenset({Allocation.MICRO_BATCHES}),
        mode=Mode.SYNC if how is None else Mode.ASYNC,
        weights=Weights.STASHED if how is None else how.weights,
        full_depths=how is not None,
        overlap=how is None,
        updates_ahead=not request.clip,
        effort=PLANNING_EFFORT,
        grid=request.grid,
        groups_of_units=request.groups_of_units,
    )


def _plan_within(
    cluster: Cluster,
    profile: Profile,
    request: PlanningRequest,
    planning: Planning,
    leaving: frozenset[str],
) -> Plan:
    here = frozenset(device.name for device in cluster.devices)
    tries = list(request.sharing.allocations(request.planner))
    for last, allocations in enumerate(tries, start=1 - len(tries)):
        wanted = _request(request, here - leaving if leaving else None, allocations)
        try:
            plan = _planned(profile, cluster, wanted, request, planning)
            _check_delays(plan, request)
            return plan
        except PlanError:
            if last == 0:
                raise
    raise PlanError("there is no plan for this model")


def _check_delays(plan: Plan, request: PlanningRequest) -> None:
    """PlanError where a plan's stages cannot keep to the delays that the job asks for."""
    if request.asynchrony is None:
        return
    count = len(plan.stages)
    if request.asynchrony.weights is Weights.DOUBLE:
        pieces = -(-request.batch_size // plan.micro_batch)
        if pieces < count:
            raise PlanError(
                f"with --versions 2 each of the {count} parts needs its own micro-batch, and "
                f"there are {pieces}: use a smaller --micro-batch"
            )


def _planned(
    profile: Profile,
    cluster: Cluster,
    wanted: PlanRequest,
    request: PlanningRequest,
    planning: Planning,
) -> Plan:
    if not wanted.private:
        return planning(profile, cluster, wanted)
    fold = Fold(len(profile.units), request.private_first, request.private_last)
    return fold.unfold(planning(fold.profile(profile), fold.cluster(cluster), wanted))


def overheads_of(candidate: Candidate) -> Overheads | None:
    """As the device measured them; None where it runs a version that did not."""
    measured = candidate.measured.get("overheads")
    if measured is None:
        return None
    return Overheads.from_json(measured, f"overheads of {candidate.name}")


def _found(
    candidates: Sequence[Candidate], profile: Profile, batch_size: int
) -> dict[str, Measured]:
    """What every device has found, by name, with times from one sample to the whole batch.

    Devices of one kind share it; as far as any device has measured, times of the others grow as
    that one's.
    """
    found = shared({c.name: _measured(c) for c in candidates})
    reference = max((one.times for one in found.values()), key=lambda times: times.sizes[-1])
    weights = bytes_by_flop((unit.parameter_bytes, unit.flops) for unit in profile.units)
    return {
        name: replace(one, times=one.times.extended_like(reference).completed(batch_size, weights))
        for name, one in found.items()
    }


def _measured(candidate: Candidate) -> Measured:
    """Raises OptionError: something in it is none."""
    measured, where = candidate.measured, f"profile of {candidate.name}"
    kind, cold = measured.get("processor", ""), measured.get("cold")
    times = TimeTable.from_json(measured.get("times"), where)
    gain = _gain(measured.get("faster"))
    return Measured(
        kind=kind if isinstance(kind, str) else "",
        wall_by_cpu=fields.number(
            measured.get("wall_by_cpu", 1.0), f"{where}: wall_by_cpu", above_zero=True
        ),
        times=times if gain is None else times.before_gain(*gain),
        overheads=overheads_of(candidate),
        cold=frozenset(size for size in cold if isinstance(size, int))
        if isinstance(cold, list)
        else frozenset(),
        cheaper_from=None if gain is None else gain[0],
    )


def _gain(value: object) -> tuple[int, frozenset[int]] | None:
    """From how many samples on which units cost less at once; None where nobody has said so."""
    match value:
        case {"from": int(samples), "units": [*units]} if samples > 1:
            return samples, frozenset(unit for unit in units if isinstance(unit, int))
    return None
