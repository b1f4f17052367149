"""Devices as measured, as the planners read them; pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

from p2ptrain.coordinator.memory_model import reserved_bytes
from p2ptrain.coordinator.profile_pooling import DeviceProfile, pool_profiles
from p2ptrain.errors import OptionError, PlanError
from p2ptrain.messages.job_requests import samples_per_s
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.net.forms import Count, Key, Positive, Range, Text
from p2ptrain.net.read_form import read_form
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink, Links, Overheads
from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.plan.types.planning_file import Factor
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.unit_times import Times, TimeTable, bytes_by_flop
from p2ptrain.process.memory_budget import smaller_budget
from p2ptrain.recovery.compute_kind import PROCESSOR, ComputeKind
from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.recovery.state_report import StateReport

LinksOf: TypeAlias = Callable[[Mapping[str, str]], Mapping[tuple[str, str], ClusterLink]]


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """A device that may take part: measured, with the memory it offers.

    Attributes:
        taken_bytes: what the job has taken there already, to export, to know and to measure the
            model; no part of `memory`.
        compute: with what it was measured.
    """

    id: Annotated[str, Text(64)]
    name: str
    measured: Mapping[str, Any]
    memory: MemoryBudgets
    taken_bytes: Annotated[int, Range(0, 2**63)] = 0
    compute: ComputeKind = PROCESSOR

    @classmethod
    def of(cls, device: str, name: str, state_report: StateReport) -> MeasuredDevice:
        """As the device describes itself."""
        measured = state_report.measured or {}
        return cls(
            device,
            name,
            measured,
            state_report.memory,
            state_report.taken_bytes,
            state_report.compute,
        )

    @property
    def samples_per_s(self) -> float | None:
        """What it would do alone; None where it was not measured."""
        return samples_per_s(self.measured)

    def with_less_memory(
        self, short: MemoryShortage, share: float = HOME.less_memory_share
    ) -> MeasuredDevice:
        """After it ran out of one memory, with what it has of that now; always less."""
        most = min(smaller_budget(short.of(self.memory), share), short.of(short.has))
        return replace(self, memory=short.lowered(self.memory, most))


@dataclass(frozen=True, slots=True)
class MeasuredCluster:
    """The devices that may take part and their links.

    Attributes:
        links: by names.
        holder: name of the data holder.
        leaving: names of candidates that get no work any more; others may fetch from them.
    """

    candidates: tuple[MeasuredDevice, ...]
    links: Links
    holder: str
    leaving: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        candidates: Iterable[MeasuredDevice],
        links: LinksOf,
        holder: str,
        without: frozenset[str],
    ) -> MeasuredCluster:
        """Of these devices.

        Args:
            links: the links between the devices of these names, by id.
            holder: name of the data holder.
            without: ids of devices that get no work any more.
        """
        listed = tuple(sorted(candidates, key=lambda candidate: candidate.id))
        leaving = frozenset(c.name for c in listed if c.id in without)
        return cls(listed, links({c.id: c.name for c in listed}), holder, leaving)

    @property
    def kinds(self) -> dict[str, str]:
        """With what the candidates compute, by name."""
        return {c.name: c.compute.kind for c in self.candidates}

    def cluster(self, found: Mapping[str, DeviceProfile], reserved: Mapping[str, int]) -> Cluster:
        """As the planners read it: with the memory that units may take.

        Args:
            found: of each device, by name.
            reserved: name -> bytes of a device that are not for units.
        """
        devices = tuple(
            ClusterDevice(
                name=c.name,
                memory_bytes=max(c.memory.compute_bytes - reserved[c.name], 0),
                holder=c.name == self.holder,
                times=found[c.name].times,
                overheads=found[c.name].overheads,
                compute=c.compute.kind,
                machine=c.compute.machine,
            )
            for c in self.candidates
        )
        return Cluster(devices=devices, links=dict(self.links))


def sharing_machines(candidates: Iterable[MeasuredDevice]) -> dict[str, MeasuredDevice]:
    """By id; each that shares a machine with others here counts on its part of the host's memory.

    Each of them has measured all that is free there.
    """
    found = {one.id: one for one in candidates}
    counts = Counter(one.compute.machine for one in found.values())

    def with_its_part(one: MeasuredDevice) -> MeasuredDevice:
        count = counts[one.compute.machine] if one.compute.machine else 1
        return replace(one, memory=one.memory.with_host(one.memory.of_host // count))

    return {device: with_its_part(one) for device, one in found.items()}


def is_profiled(state_report: StateReport, request: JobPlanRequest, holder: str) -> bool:
    """Whether a device has said all of itself that plans need."""
    if request.ftpipehd is not None and state_report.device != holder:
        return state_report.memory.compute_bytes > 0
    return state_report.measured is not None


def with_times_of_holder(
    holder: str, candidates: Mapping[str, MeasuredDevice]
) -> dict[str, MeasuredDevice]:
    """As FTPipeHD begins: every device takes as long as the one with the data.

    Args:
        candidates: by id.
    """
    measured = candidates[holder].measured
    return {device: replace(one, measured=measured) for device, one in candidates.items()}


def planner_question(
    request: JobPlanRequest, household: MeasuredCluster
) -> tuple[Profile, Cluster]:
    """What planners are asked about: the model as the holder knows it, and the devices.

    Raises:
        PlanError: the holder's own profile is not there.
    """
    holder = next((c for c in household.candidates if c.name == household.holder), None)
    if holder is None:
        raise PlanError(f"{household.holder}, which has the data, has not measured the model")
    profile = to_profile(holder.measured, request)
    found = pooled_measurements(household.candidates, profile, request.batch_size)
    profile = replace(profile, times=found[holder.name].times, maps=request.maps)
    return profile, household.cluster(found, reserved_by_name(profile, request, household))


def reserved_by_name(
    profile: Profile, request: JobPlanRequest, household: MeasuredCluster
) -> dict[str, int]:
    return {
        c.name: reserved_bytes(profile, request, c.memory, holder=c.name == household.holder)
        for c in household.candidates
    }


def unusable(
    request: JobPlanRequest, candidates: Mapping[str, MeasuredDevice], holder: str
) -> dict[str, str]:
    """Devices whose profile is none of this model, by id, and why; what they say ends no job.

    Args:
        candidates: by id.
        holder: id of the data holder.
    """
    own = candidates.get(holder)
    found = {}
    for device, one in candidates.items():
        if own is not None and one is not own:
            try:
                names = ((own.name, one.name), (one.name, own.name))
                two = MeasuredCluster(
                    (own, one), dict.fromkeys(names, ClusterLink(1e6, 1e-3)), own.name
                )
                CostModel(*planner_question(request, two))
            except OptionError as error:
                found[device] = f"its measurements cannot be used: {error}"
    return found


def overheads_of(candidate: MeasuredDevice) -> Overheads | None:
    """As the device measured them; None where it runs a version that did not."""
    measured = candidate.measured.get("overheads")
    if measured is None:
        return None
    return read_form(Overheads, measured, f"overheads of {candidate.name}", OptionError)


def pooled_measurements(
    candidates: Sequence[MeasuredDevice], profile: Profile, batch_size: int
) -> dict[str, DeviceProfile]:
    """What every device has found, by name, with times from one sample to the whole batch.

    Devices of one kind share it; as far as any device has measured, times of the others grow as
    that one's, of those that compute with processors, or with the same accelerator.
    """
    found = pool_profiles({c.name: _measured(c) for c in candidates})
    references: dict[str, TimeTable] = {}
    for c in candidates:
        other, own = references.get(c.compute.kind), found[c.name].times
        if other is None or own.sizes[-1] > other.sizes[-1]:
            references[c.compute.kind] = own
    weights = bytes_by_flop((unit.parameter_bytes, unit.flops) for unit in profile.units)

    def completed(c: MeasuredDevice) -> DeviceProfile:
        times = found[c.name].times.extended_like(references[c.compute.kind])
        return replace(found[c.name], times=times.completed(batch_size, weights))

    return {c.name: completed(c) for c in candidates}


@dataclass(frozen=True, slots=True)
class _Gain:
    """From how many samples on which units cost less at once."""

    samples: Annotated[int, Range(2, 2**31), Key("from")]
    units: frozenset[Count]


@dataclass(frozen=True, slots=True)
class _Measured:
    times: Times
    processor: str = ""
    wall_by_cpu: Factor = 1.0
    overheads: Overheads | None = None
    cold: frozenset[Positive] = frozenset()
    faster: _Gain | None = None


def _measured(candidate: MeasuredDevice) -> DeviceProfile:
    """Raises OptionError: something in it is none."""
    where = f"profile of {candidate.name}"
    found = read_form(_Measured, candidate.measured, where, OptionError, extra=True)
    gain = found.faster
    return DeviceProfile(
        kind=found.processor,
        wall_by_cpu=found.wall_by_cpu,
        times=found.times.before_gain(gain.samples, gain.units) if gain else found.times,
        overheads=found.overheads,
        cold=found.cold,
        cheaper_from=gain.samples if gain else None,
    )


def to_profile(measured: Mapping[str, Any], request: JobPlanRequest) -> Profile:
    """The holder's measurements as the planners read them. Raises OptionError.

    Of batches that are longer than what was measured, every sample has as many times more values.
    """
    profile = Profile.from_json(
        {
            "format": "p2ptrain.profile/1",
            "model": request.model,
            "input_bytes": request.input_bytes,
            "target_bytes": request.target_bytes,
            "optimizer_state_ratio": request.optimizer_state_ratio,
            "units": measured["units"],
            "times": measured["times"],
        },
        "profile",
    )
    if request.stretch == 1.0:
        return profile

    def longer(size_bytes: int) -> int:
        return math.ceil(size_bytes * request.stretch)

    units = tuple(
        replace(
            unit,
            output_bytes=longer(unit.output_bytes),
            activation_bytes=longer(unit.activation_bytes),
            passing_bytes=longer(unit.passing_bytes or 0),
        )
        for unit in profile.units
    )
    fed = longer(profile.input_bytes), longer(profile.target_bytes)
    return replace(profile, units=units, input_bytes=fed[0], target_bytes=fed[1])
