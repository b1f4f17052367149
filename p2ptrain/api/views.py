"""What a Node says of its household: typed, and as the objects that `--json` prints.

Each is also a mapping with the keys of its JSON, as which these answers began.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from p2ptrain.manners.condition import DeviceCondition, MemoryInUse
from p2ptrain.mesh.household_trust import DeviceSummary
from p2ptrain.mesh.interface import LinkStatistics, MeshMember

_SAID = ("role", "version", "threads", "memory_bytes", "device")


class TypedAnswer(Mapping[str, Any]):
    """Attributes for programs; a mapping for those who knew it as one."""

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    def __getitem__(self, key: str) -> Any:
        return self.to_json()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_json())

    def __len__(self) -> int:
        return len(self.to_json())


@dataclass(frozen=True, eq=False)
class MemberStatus(TypedAnswer):
    """A member of the household, this device too.

    Attributes:
        state: "alive", "suspect", "dead" or "left".
        role: "member", or "holder" for one that trains its own data.
        version: of p2ptrain there.
        threads: that it computes with.
        memory_bytes: that p2ptrain may use there.
        device: the accelerator that it computes on; None: its processor.
        address: where the link to it goes, by `interface` of this device; None without a link.
        traffic: what that link has carried.
        work: "full", "slow" (it computes with pauses) or "paused" (no part in trainings).
        sentence: why not "full", such as "paused: on battery"; else "".
        others_cpu_percent: of all its cores, used by other programs; None: not known, as below.
        battery_percent, power: how full its battery is; "mains" or "battery".
        temperature_c: of its hottest sensor.
        memory: what jobs take of it now.
        info: all that it says of itself.
    """

    name: str
    id: str
    state: str
    role: str | None = None
    version: str | None = None
    threads: int | None = None
    memory_bytes: int | None = None
    address: str | None = None
    interface: str | None = None
    device: str | None = None
    traffic: LinkStatistics | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    work: str = "full"
    sentence: str = ""
    others_cpu_percent: int | None = None
    battery_percent: int | None = None
    power: str | None = None
    temperature_c: int | None = None
    memory: MemoryInUse = field(default_factory=MemoryInUse)

    @classmethod
    def of(
        cls, member: MeshMember, path: Mapping[str, str], traffic: LinkStatistics | None = None
    ) -> MemberStatus:
        """By what is known of it, and the link to it."""
        said: dict[str, Any] = {name: member.info.get(name) for name in _SAID}
        ends: dict[str, Any] = dict(path)
        condition = DeviceCondition.of_info(member.info)
        return cls(
            name=member.name,
            id=member.id,
            state=str(member.state),
            traffic=traffic,
            info=member.info,
            work=condition.work.value,
            sentence=condition.sentence,
            others_cpu_percent=condition.others_cpu_percent,
            battery_percent=condition.battery_percent,
            power=condition.power,
            temperature_c=condition.temperature_c,
            memory=condition.memory,
            **said | ends,
        )

    def to_json(self) -> dict[str, Any]:
        """What a member says of itself does not change who it is."""
        known = {"name": self.name, "id": self.id, "state": self.state}
        ends = {"address": self.address, "interface": self.interface}
        traffic = {} if self.traffic is None else dataclasses.asdict(self.traffic)
        path = {key: value for key, value in ends.items() if value is not None}
        return {**known, **self.info, **known, **path, **traffic}


@dataclass(frozen=True, eq=False)
class CoordinatorStatus(TypedAnswer):
    """The device that plans; `term` only rises."""

    name: str
    id: str
    term: int


@dataclass(frozen=True, eq=False)
class CutOffDevice(TypedAnswer):
    """A device that is trusted and has no link: `reason` says what it did."""

    name: str
    id: str
    reason: str


@dataclass(frozen=True, eq=False)
class JobStatus(TypedAnswer):
    """The job that runs; what its holder has not said is None.

    Attributes:
        model: its class.
        epoch: number of the plan in force.
        step: updates that count.
        devices: of the plan.
        waiting_for: the device without which the job stands still.
        now: what all wait for, where that is no device: a read of the data, a callback.
    """

    holder: str
    model: str | None = None
    epoch: int | None = None
    step: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    devices: tuple[str, ...] | None = None
    waiting_for: str | None = None
    now: str | None = None
    line: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> JobStatus:
        """By what the holder has said."""
        known = {f.name: line[f.name] for f in dataclasses.fields(cls) if f.name in line}
        if "devices" in known:
            known["devices"] = tuple(known["devices"])
        return cls(**known, line=line)

    def to_json(self) -> dict[str, Any]:
        return dict(self.line)


@dataclass(frozen=True, eq=False)
class NodeStatus(TypedAnswer):
    """The household, as this device sees it."""

    name: str
    id: str
    address: str
    port: int
    members: tuple[MemberStatus, ...]
    coordinator: CoordinatorStatus | None
    cut_off: tuple[CutOffDevice, ...]
    job: JobStatus | None

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "members": [member.to_json() for member in self.members],
            "coordinator": None if self.coordinator is None else self.coordinator.to_json(),
            "cut_off": [device.to_json() for device in self.cut_off],
            "job": None if self.job is None else self.job.to_json(),
        }


@dataclass(frozen=True, eq=False)
class DeviceStatus(TypedAnswer, DeviceSummary):
    """A trusted device."""


@dataclass(frozen=True, eq=False)
class LinkStatus(TypedAnswer):
    """The link to one other member, measured; `error` where nothing passes."""

    name: str
    id: str
    address: str | None = None
    interface: str | None = None
    bytes_per_s: float | None = None
    latency_s: float | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}
