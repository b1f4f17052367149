"""The events of a job and of a member, one frozen dataclass each: `p2ptrain.events.Step` and so on.

Each has the name of its kind: `Plan` is "plan", `PairingFailed` "pairing_failed". Where a file has
another `Plan` or `Member`, write `events.Plan`.

`to_json` gives the object that `--json` prints; field names are fixed by the command contract
(docs/user/events.md) and are only ever added to.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from p2ptrain import markup


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""

    event: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The event as a JSON object, its kind first."""
        fields = dataclasses.fields(self)
        body = {name(f): _plain(getattr(self, f.name)) for f in fields}
        return {"event": self.event, **body}


def name(field: dataclasses.Field[Any]) -> str:
    """JSON key of a field: its metadata's "key" where Python reserves the word."""
    return str(field.metadata.get("key", field.name))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name(f): _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class Ready(Event):
    """The port listens and the device is advertised."""

    event = "ready"
    name: str
    id: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Device(Event):
    """This device computes on an accelerator; `reason` says which, and why."""

    event = "device"
    device: str
    title: str
    reason: str


@dataclass(frozen=True, slots=True)
class Pairing(Event):
    """A pairing window is open with this code."""

    event = "pairing"
    code: str


@dataclass(frozen=True, slots=True)
class PairingFailed(Event):
    """An attempt to pair failed; `attempts_left` before the window closes."""

    event = "pairing_failed"
    message: str
    attempts_left: int


@dataclass(frozen=True, slots=True)
class PairingClosed(Event):
    """The pairing window is not open any more; `reason` says what closed it."""

    event = "pairing_closed"
    reason: str


@dataclass(frozen=True, slots=True)
class Renamed(Event):
    """Another member had our name first."""

    event = "renamed"
    name: str
    previous: str


@dataclass(frozen=True, slots=True)
class Member(Event):
    """A member's state changed: alive, suspect, dead or left."""

    event = "member"
    name: str
    state: str


@dataclass(frozen=True, slots=True)
class Condition(Event):
    """A device works less than it could, or as much as it can again.

    Attributes:
        work: full, slow or paused.
        sentence: why, such as "paused: on battery"; "" where it works fully.
    """

    event = "condition"
    name: str
    work: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Coordinator(Event):
    """A coordinator was elected."""

    event = "coordinator"
    name: str
    term: int


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """The job stands still until that device is here."""

    event = "waiting"
    waiting_for: str = dataclasses.field(metadata={"key": "for"})


@dataclass(frozen=True, slots=True)
class Paused(Event):
    """A person has paused the job, on that device; updates under way still count."""

    event = "paused"
    by: str


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A person has ended the pause, on that device."""

    event = "resumed"
    by: str


@dataclass(frozen=True, slots=True)
class PlanDevice:
    """A device's part of a stage."""

    name: str
    share: int


@dataclass(frozen=True, slots=True)
class PlanStage:
    """A stage: units [first, end) and the state_dict names that live there.

    `allocation` says what the shares count: samples of each micro-batch, or whole micro_batches.
    `warmup` is K_p, the most micro-batches that are forwarded and not yet backwarded.
    """

    units: tuple[int, int]
    devices: tuple[PlanDevice, ...]
    parameters: tuple[str, ...]
    allocation: str = "samples"
    warmup: int = 1


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A device that does not take part, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlanLink:
    """One direction of a link between devices of the plan, as it was measured."""

    sender: str = dataclasses.field(metadata={"key": "from"})
    receiver: str = dataclasses.field(metadata={"key": "to"})
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Plan(Event):
    """A plan takes effect; `reason` is start, failure, drift, join or leave.

    `changes_results` says how its results differ from one device's; empty if not at all. `wire`
    says how values travel between devices: "exact", or rounded as "bf16" or "int8".
    `predicted_peak_bytes` is the memory each device needs for it, copies included, by name; of a
    device that computes in a card's own memory, that one, and `predicted_host_bytes` has the rest,
    which lies in the host's. `mode` is sync, or async where no stage waits for another's update;
    `mode_reason` why, where that was to be chosen. `links` are the measured ones between its
    devices, `alone_samples_per_s` what each device that was measured for it would do alone, by
    name.
    """

    event = "plan"
    epoch: int
    reason: str
    stages: tuple[PlanStage, ...]
    micro_batch: int
    micro_batches: int
    predicted_samples_per_s: float
    left_out: tuple[LeftOut, ...]
    changes_results: tuple[str, ...] = ()
    wire: str = "exact"
    predicted_peak_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    predicted_host_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    mode: str = "sync"
    mode_reason: str = ""
    links: tuple[PlanLink, ...] = ()
    alone_samples_per_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def _repr_html_(self) -> str:
        """In notebooks."""
        return markup.plan(
            f"plan {self.epoch} ({self.reason}): {self.micro_batches} x {self.micro_batch} "
            f"samples, about {markup.rounded(self.predicted_samples_per_s)} samples/s",
            ((stage.units, [(d.name, d.share) for d in stage.devices]) for stage in self.stages),
            [(out.name, out.reason) for out in self.left_out],
            self.changes_results,
        )


@dataclass(frozen=True, slots=True)
class Step(Event):
    """An update was completed everywhere; `step` counts from 1.

    Attributes:
        lr: the learning rate that it used, of the first group.
        lrs: one of each group of the optimizer.
        grad_norm: of all gradients together, before they are clipped, where the job clips.
        scale: what its loss was multiplied with, in float16.
        tokens_per_s: where its samples are sequences of token ids.
    """

    event = "step"
    step: int
    loss: float
    samples_per_s: float
    seconds: float
    lr: float | None = None
    lrs: tuple[float, ...] = ()
    grad_norm: float | None = None
    scale: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Eval(Event):
    """Metrics over `eval_data` after update `step`, averaged by sample."""

    event = "eval"
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Warning(Event):
    """Something the user should know that does not stop the job; `name`: the device it is of."""

    event = "warning"
    message: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Failure(Event):
    """A device of the job was lost."""

    event = "failure"
    name: str


@dataclass(frozen=True, slots=True)
class Recovered(Event):
    """Training continues after a failure, with the next new step.

    Attributes:
        seconds: since the first sign of it.
        replayed_steps: that were reported before and were done again.
        resumed_seconds: from the first sign to the first sample fed to the new plan.
        planning_seconds: of those, what the plan took to make.
        moved_bytes: what devices fetched of others to be ready.
        version: updates applied to the state that the new plan began with.
    """

    event = "recovered"
    epoch: int
    seconds: float
    replayed_steps: int
    resumed_seconds: float
    planning_seconds: float
    moved_bytes: int
    version: int


@dataclass(frozen=True, slots=True)
class Done(Event):
    """The job ended well; `out` is the weights' file or None.

    `steps_before`: of `steps`, those that an earlier run had made; the seconds are of the others.
    `updates_left_out`: how many were not finite, where the job leaves such updates out.
    `energy_joules` is what the devices in `energy_of` have used meanwhile, each by its own counters
    and all that it does included; `energy_missing` says of others why they cannot tell.
    """

    event = "done"
    steps: int
    seconds: float
    samples_per_s: float
    out: str | None
    updates_left_out: int = 0
    energy_joules: float | None = None
    joules_per_sample: float | None = None
    energy_of: Mapping[str, float] = dataclasses.field(default_factory=dict)
    energy_missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    steps_before: int = 0


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """This member left gracefully."""

    event = "stopped"


@dataclass(frozen=True, slots=True)
class Error(Event):
    """The command failed; the same line stands on stderr."""

    event = "error"
    message: str


_RENAMED = {
    **{"MemberEvent": "Member", "CoordinatorEvent": "Coordinator", "PlanEvent": "Plan"},
    **{"PlanEventStage": "PlanStage", "PlanEventDevice": "PlanDevice"},
    **{"PlanEventLeftOut": "LeftOut", "Warned": "Warning", "Failed": "Error"},
}
"""Older names, which work for one more version."""


def __getattr__(old: str) -> Any:
    """An older name (PEP 562)."""
    if old not in _RENAMED:
        raise AttributeError(f"module 'p2ptrain.events' has no attribute {old!r}")
    new = _RENAMED[old]
    warnings.warn(
        f"p2ptrain.events.{old} is p2ptrain.events.{new} now", DeprecationWarning, stacklevel=2
    )
    return globals()[new]
