"""What a holder asks its coordinator while training goes on: would another plan be better now?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2ptrain.errors import ProtocolError
from p2ptrain.net import cbor
from p2ptrain.training.change_request import InForce, in_force_fields, read_in_force
from p2ptrain.training.plan_request import PlanningRequest
from p2ptrain.training.protocol import BLOB_LIMIT_BYTES, ids, integer, text, wording
from p2ptrain.training.recovery.change import Reason
from p2ptrain.training.recovery.corrections import LEAST, MOST, Corrections

MOVES_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class ConsiderRequest:
    """A question about the plan in force.

    Attributes:
        reason: why it is asked: somebody came, leaves, or drifts.
        holder: id of the device with the data.
        alive: devices that the holder sees alive, itself included.
        without: devices that are leaving.
        corrections: what training has shown of the profiles.
        work: how many times as much the plan's tasks take as it expected (`work_ratio`).
        lowered: memory in bytes that devices proved to have less of, by id.
        remaining_rounds: of training, before the job ends.
        moved_seconds_ago: ages of the changes of plan that nothing forced.
    """

    planning: PlanningRequest
    in_force: InForce
    reason: Reason
    holder: str
    alive: frozenset[str]
    without: frozenset[str]
    corrections: Corrections
    work: float
    lowered: Mapping[str, int]
    remaining_rounds: int
    moved_seconds_ago: tuple[float, ...]

    def to_bytes(self) -> bytes:
        """Strict CBOR."""
        return cbor.dumps(
            {
                **in_force_fields(self.in_force),
                "planning": self.planning.to_bytes(),
                "reason": self.reason.value,
                "holder": self.holder,
                "alive": sorted(self.alive),
                "without": sorted(self.without),
                "corrections": self.corrections.to_fields(),
                "work": self.work,
                "lowered": dict(self.lowered),
                "remaining_rounds": self.remaining_rounds,
                "moved_seconds_ago": list(self.moved_seconds_ago),
            }
        )

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> ConsiderRequest:
        """Check and read. Raises ProtocolError."""
        fields = cbor.loads(bytes(data), BLOB_LIMIT_BYTES)
        match fields:
            case {
                "planning": bytes(planning),
                "reason": str(reason),
                "lowered": dict(lowered),
                "work": float(work),
                "moved_seconds_ago": [*moved],
            } if (
                reason in set(Reason)
                and len(moved) <= MOVES_LIMIT
                and all(isinstance(age, float) for age in moved)
                and LEAST <= work <= MOST
            ):
                in_force = read_in_force(fields)
                if in_force is not None:
                    return ConsiderRequest(
                        planning=PlanningRequest.from_bytes(planning),
                        in_force=in_force,
                        reason=Reason(reason),
                        holder=text(fields, "holder", 64),
                        alive=ids(fields, "alive"),
                        without=ids(fields, "without"),
                        corrections=Corrections.from_fields(fields.get("corrections")),
                        work=work,
                        lowered={device: integer(lowered, device) for device in lowered},
                        remaining_rounds=integer(fields, "remaining_rounds"),
                        moved_seconds_ago=tuple(moved),
                    )
        raise ProtocolError("a request to consider holds a planning request and a plan in force")


@dataclass(frozen=True, slots=True)
class Considered:
    """The answer.

    Attributes:
        plan: the better one, `p2ptrain.plan/1`; None = stay.
        gain: predicted throughput over the present plan's, less 1; None where it cannot stay.
        reason: in a sentence with the numbers, for logs.
        in_sight: ids of the devices whose speeds and links were known.
    """

    plan: Mapping[str, Any] | None
    gain: float | None
    reason: str
    in_sight: frozenset[str]

    def to_bytes(self) -> bytes:
        """Strict CBOR."""
        plan = None if self.plan is None else dict(self.plan)
        return cbor.dumps(
            {
                "plan": plan,
                "gain": self.gain,
                "reason": self.reason[:2048],
                "in_sight": sorted(self.in_sight),
            }
        )

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Considered:
        """Check and read. Raises ProtocolError."""
        fields = cbor.loads(bytes(data), BLOB_LIMIT_BYTES)
        match fields:
            case {"plan": dict() | None as plan, "gain": float() | None as gain}:
                reason = wording(fields, "reason", 2048)
                return Considered(plan, gain, reason, ids(fields, "in_sight"))
        raise ProtocolError("what was considered is a plan, a gain and a reason")
