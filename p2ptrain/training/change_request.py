"""What a holder asks its coordinator for when an epoch is to begin, and what it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from p2ptrain.errors import ProtocolError
from p2ptrain.net import cbor
from p2ptrain.training.assigning import placed_of
from p2ptrain.training.assignment import Assignment
from p2ptrain.training.options import Recovery
from p2ptrain.training.plan_request import PlanningRequest
from p2ptrain.training.protocol import (
    BLOB_LIMIT_BYTES,
    DEVICES_LIMIT,
    ids,
    integer,
    number,
    shown,
    text,
    wording,
)
from p2ptrain.training.recovery.cadence import CopyCost, Transfer
from p2ptrain.training.recovery.change import ChangeAsk, Reason
from p2ptrain.training.recovery.choose import Choice, GlobalCopy, Lost, Past
from p2ptrain.training.recovery.committing import Seat
from p2ptrain.training.recovery.corrections import Corrections, Expected
from p2ptrain.training.recovery.holdings import Kind, read_version, version_fields
from p2ptrain.training.recovery.lineage import Lineage


@dataclass(frozen=True, slots=True)
class InForce:
    """The plan that a job runs by: the assignment, and `p2ptrain.plan/1`."""

    assignment: Assignment
    plan: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """A question: `ask.present` is always that of `in_force`.

    Attributes:
        corrections: what training has shown of the profiles.
        proposed: `p2ptrain.plan/1` that was found for this change while training went on; None = to
            be found now.
        wants_expected: the holder was started again, and does not know what to expect of the plan
            in force, nor what its copies cost.
    """

    planning: PlanningRequest
    ask: ChangeAsk
    in_force: InForce | None
    recovery: Recovery = Recovery.LIGHT
    corrections: Corrections = field(default_factory=Corrections)
    proposed: Mapping[str, Any] | None = None
    wants_expected: bool = False

    def to_bytes(self) -> bytes:
        """Strict CBOR."""
        in_force = self.in_force
        return cbor.dumps(
            {
                "planning": self.planning.to_bytes(),
                "ask": _ask_fields(self.ask),
                **in_force_fields(in_force),
                "recovery": self.recovery.value,
                "corrections": self.corrections.to_fields(),
                "proposed": None if self.proposed is None else dict(self.proposed),
                "wants_expected": self.wants_expected,
            }
        )

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> ChangeRequest:
        """Check and read. Raises ProtocolError."""
        fields = cbor.loads(bytes(data), BLOB_LIMIT_BYTES)
        match fields:
            case {"planning": bytes(planning), "ask": dict(ask), "recovery": recovery} if (
                recovery in set(Recovery)
            ):
                in_force, proposed = read_in_force(fields), fields.get("proposed")
                if not isinstance(proposed, dict | None):
                    raise ProtocolError("a proposed plan is a map")
                present = None if in_force is None else placed_of(in_force.assignment)
                return ChangeRequest(
                    PlanningRequest.from_bytes(planning),
                    replace(_read_ask(ask), present=present),
                    in_force,
                    Recovery(recovery),
                    Corrections.from_fields(fields.get("corrections")),
                    proposed,
                    fields.get("wants_expected") is True,
                )
        raise ProtocolError("a request for an epoch holds a planning request and what is known")


@dataclass(frozen=True, slots=True)
class ChangeAnswer:
    """Every device of the assignment is ready.

    Attributes:
        plan: `p2ptrain.plan/1`, nothing beside it.
        changes_results: how results differ from one device's.
        beside_bytes: by device name, what the job takes there beside the plan's peak.
        planning_seconds: what the plan took to make.
        moved_bytes: what all devices together fetched of others to be ready.
        expected: what a round should take each stage on each device; of a plan that stays only
            where the holder wants to know.
        copy_cost: of one kept version, told as `expected`; None too where nothing is kept.
        warnings: for people, what of the plan is not as one would wish.
        considered: ids of the devices that the plan was chosen from; empty = it is the one before.
    """

    assignment: Assignment
    plan: Mapping[str, Any]
    choice: Choice
    changes_results: tuple[str, ...]
    beside_bytes: Mapping[str, int]
    planning_seconds: float
    moved_bytes: int = 0
    expected: Mapping[Seat, Expected] = field(default_factory=dict)
    copy_cost: CopyCost | None = None
    warnings: tuple[str, ...] = ()
    considered: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Refusal:
    """There is no way.

    Attributes:
        is_plan: no plan fits: the person has to change something.
        again: what is in the way may pass.
        spoiled: preparations that failed; 0 = nobody could be asked at all.
        lowered: memory in bytes that devices proved to have less of meanwhile, by id.
    """

    reason: str
    lost: Lost | None = None
    is_plan: bool = False
    again: bool = False
    spoiled: int = 0
    lowered: Mapping[str, int] = field(default_factory=dict)


def reply_to_bytes(reply: ChangeAnswer | Refusal) -> bytes:
    """Strict CBOR."""
    if isinstance(reply, Refusal):
        lost = reply.lost
        return cbor.dumps(
            {
                "refused": reply.reason[:2048],
                "is_plan": reply.is_plan,
                "again": reply.again,
                "spoiled": reply.spoiled,
                "lowered": dict(reply.lowered),
                "lost": None
                if lost is None
                else {
                    "units": list(lost.units),
                    "last_places": list(lost.last_places),
                    "certain": lost.certain,
                    "reason": lost.reason,
                },
            }
        )
    choice = reply.choice
    return cbor.dumps(
        {
            "assignment": reply.assignment.to_bytes(),
            "plan": dict(reply.plan),
            "version": version_fields(choice.version),
            "places": [list(devices) for devices in choice.places],
            "replayed": choice.replayed,
            "reason": choice.reason,
            "changes_results": list(reply.changes_results),
            "beside_bytes": dict(reply.beside_bytes),
            "planning_seconds": reply.planning_seconds,
            "moved_bytes": reply.moved_bytes,
            "expected": [
                [*seat, due.wall, due.cpu, due.beside] for seat, due in reply.expected.items()
            ],
            "copy_cost": None if reply.copy_cost is None else _cost_fields(reply.copy_cost),
            "warnings": list(reply.warnings),
            "considered": sorted(reply.considered),
        }
    )


def reply_from_bytes(data: bytes | memoryview) -> ChangeAnswer | Refusal:
    """Check and read. Raises ProtocolError."""
    fields = cbor.loads(bytes(data), BLOB_LIMIT_BYTES)
    if not isinstance(fields, dict):
        raise ProtocolError("the answer to a request for an epoch is a map")
    if "refused" in fields:
        lost = fields.get("lost")
        return Refusal(
            wording(fields, "refused", 2048),
            None if lost is None else _read_lost(lost),
            is_plan=bool(fields.get("is_plan")),
            again=bool(fields.get("again")),
            spoiled=integer(fields, "spoiled"),
            lowered=_bytes_by_device(fields, "lowered"),
        )
    assignment, plan = fields.get("assignment"), fields.get("plan")
    beside = fields.get("beside_bytes")
    if not isinstance(assignment, bytes):
        raise ProtocolError("an answer holds an assignment")
    if not isinstance(plan, dict) or not isinstance(beside, dict):
        raise ProtocolError("an answer holds a plan, and what devices need for it")
    choice = Choice(
        version=read_version(fields.get("version")),
        places=tuple(_texts(devices) for devices in _list(fields, "places")),
        replayed=integer(fields, "replayed"),
        reason=wording(fields, "reason", 2048),
    )
    return ChangeAnswer(
        assignment=Assignment.from_bytes(assignment),
        plan=plan,
        choice=choice,
        changes_results=_texts(_list(fields, "changes_results")),
        beside_bytes={name: integer(beside, name, 0, 2**63) for name in beside},
        planning_seconds=number(fields, "planning_seconds"),
        moved_bytes=integer(fields, "moved_bytes", 0, 2**63),
        expected=dict(_read_expected(entry) for entry in _list(fields, "expected")),
        copy_cost=_read_cost(fields.get("copy_cost")),
        warnings=_texts(_list(fields, "warnings")),
        considered=ids(fields, "considered"),
    )


def _cost_fields(cost: CopyCost) -> dict[str, Any]:
    return {
        "cpu_seconds": cost.cpu_seconds,
        "transfers": [[one.seconds, one.busy_seconds] for one in cost.transfers],
        "round_seconds": cost.round_seconds,
    }


def _read_cost(fields: Any) -> CopyCost | None:
    match fields:
        case None:
            return None
        case {"cpu_seconds": float(cpu), "transfers": [*transfers], "round_seconds": float(round_)}:
            cost = CopyCost(cpu, tuple(_read_transfer(entry) for entry in transfers), round_)
            if min(cpu, round_) >= 0.0 and max(cpu, round_) < float("inf"):
                return cost
    raise ProtocolError("what copies cost are seconds")


def _read_transfer(entry: object) -> Transfer:
    match entry:
        case [float(seconds), float(busy)] if min(seconds, busy) >= 0.0 and max(
            seconds, busy
        ) < float("inf"):
            return Transfer(seconds, busy)
    raise ProtocolError("a copy's way takes seconds of a link")


def _read_expected(entry: object) -> tuple[Seat, Expected]:
    match entry:
        case [int(stage), str(device), float(wall), float(cpu), float(beside)] if (
            min(wall, cpu, beside) >= 0
        ):
            return (stage, device), Expected(wall, cpu, beside)
    raise ProtocolError("what is expected is [stage, device, wall, cpu, beside]")


def in_force_fields(in_force: InForce | None) -> dict[str, Any]:
    """For CBOR; the two fields stand beside others."""
    return {
        "assignment": None if in_force is None else in_force.assignment.to_bytes(),
        "plan": None if in_force is None else dict(in_force.plan),
    }


def read_in_force(fields: Mapping[str, Any]) -> InForce | None:
    """Check and read those two. Raises ProtocolError."""
    assignment, plan = fields.get("assignment"), fields.get("plan")
    if assignment is None and plan is None:
        return None
    if not isinstance(assignment, bytes) or not isinstance(plan, dict):
        raise ProtocolError("a plan in force is an assignment and a plan")
    return InForce(Assignment.from_bytes(assignment), plan)


def _ask_fields(ask: ChangeAsk) -> dict[str, Any]:
    past = ask.past
    return {
        "number": ask.number,
        "epoch": ask.epoch,
        "reason": ask.reason.value,
        "units": ask.units,
        "holder": ask.holder,
        "alive": sorted(ask.alive),
        "without": sorted(ask.without),
        "lowered": dict(ask.lowered),
        "stable": None if ask.stable is None else version_fields(ask.stable),
        "lineage": past.lineage.to_fields(),
        "reported": past.reported,
        "copies": [
            [version_fields(copy.version), copy.device, copy.kind.value, copy.most_replayed]
            for copy in past.copies
        ],
        "places": {
            device: [list(limits) for limits in ranges] for device, ranges in past.places.items()
        },
        "silent": sorted(past.silent),
        "took_part": sorted(past.took_part),
        "clips": past.clips,
        "asynchronous": past.asynchronous,
    }


def _read_ask(fields: Mapping[str, Any]) -> ChangeAsk:
    reason, places = fields.get("reason"), fields.get("places")
    if reason not in set(Reason) or not isinstance(places, dict):
        raise ProtocolError("a request for an epoch has a reason and places")
    past = Past(
        lineage=Lineage.from_fields(fields.get("lineage")),
        reported=integer(fields, "reported"),
        copies=tuple(_read_copy(copy) for copy in _list(fields, "copies")),
        places={
            text({"device": device}, "device", 64): tuple(_read_range(entry) for entry in ranges)
            for device, ranges in places.items()
            if isinstance(ranges, list)
        },
        silent=ids(fields, "silent"),
        took_part=ids(fields, "took_part"),
        clips=bool(fields.get("clips")),
        asynchronous=bool(fields.get("asynchronous")),
    )
    return ChangeAsk(
        number=integer(fields, "number"),
        epoch=integer(fields, "epoch"),
        reason=Reason(reason),
        units=integer(fields, "units", 1),
        holder=text(fields, "holder", 64),
        alive=ids(fields, "alive"),
        past=past,
        without=ids(fields, "without"),
        lowered=_bytes_by_device(fields, "lowered"),
        stable=None if fields.get("stable") is None else read_version(fields["stable"]),
    )


def _read_copy(entry: object) -> GlobalCopy:
    match entry:
        case [version, str(device), str(kind), int() | None as most] if kind in set(Kind):
            return GlobalCopy(read_version(version), device, Kind(kind), most)
    raise ProtocolError("a whole copy has a version, a device, a kind and a limit")


def _read_lost(entry: Any) -> Lost:
    match entry:
        case {"units": [*units], "last_places": [*places], "certain": bool(certain)} if all(
            isinstance(unit, int) for unit in units
        ):
            return Lost(tuple(units), _texts(places), certain, wording(entry, "reason", 2048))
    raise ProtocolError("what is lost has units and last places")


def _read_range(entry: object) -> tuple[int, int]:
    match entry:
        case [int(first), int(end)] if 0 <= first < end:
            return first, end
    raise ProtocolError("a range of units is [first, end)")


def _bytes_by_device(fields: Mapping[str, Any], key: str) -> dict[str, int]:
    value = fields.get(key)
    if not isinstance(value, dict) or len(value) > DEVICES_LIMIT:
        raise ProtocolError(f"field {key!r} is not a map of bytes by device")
    return {device: integer(value, device, 0, 2**63) for device in value}


def _list(fields: Mapping[str, Any], key: str) -> list[Any]:
    value = fields.get(key)
    if not isinstance(value, list):
        raise ProtocolError(f"field {key!r} is not a list")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > DEVICES_LIMIT:
        raise ProtocolError(f"a list of at most {DEVICES_LIMIT} texts was expected")
    if not all(isinstance(entry, str) and len(entry) <= 4096 for entry in value):
        raise ProtocolError("a list of texts was expected")
    return tuple(map(shown, value))
