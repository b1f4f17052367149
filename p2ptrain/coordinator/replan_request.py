"""What a holder asks its coordinator during training: would another plan be better now?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from p2ptrain.coordinator.plan_question import RequestBytes
from p2ptrain.messages.reconfigure import PlanInForce
from p2ptrain.messages.snapshots import REASON_LIMIT
from p2ptrain.net import cbor
from p2ptrain.net.forms import By, Flat, Length, Range, Text
from p2ptrain.net.parts import LARGE, decoded
from p2ptrain.net.read_form import read_form
from p2ptrain.net.write_form import write_form
from p2ptrain.recovery.generation_request import ReconfigureReason
from p2ptrain.recovery.profile_corrections import MAX_FACTOR, MIN_FACTOR, ProfileCorrections


@dataclass(frozen=True, slots=True)
class ReplanRequest:
    """A question about the plan in force.

    Attributes:
        reason: why it is asked: a device came, leaves, or drifts.
        holder: id of the device with the data.
        alive: devices that the holder sees alive, itself included.
        without: devices that are leaving.
        corrections: what training has shown of the profiles.
        work: how many times as much the plan's tasks take as it expected (`work_ratio`).
        lowered: memory in bytes that devices proved to have less of, by id.
        remaining_rounds: of training, before the job ends.
        moved_seconds_ago: ages of the changes of plan that nothing forced.
    """

    planning: RequestBytes
    in_force: Annotated[PlanInForce, Flat()]
    reason: ReconfigureReason
    holder: Annotated[str, Text(64)]
    alive: frozenset[Annotated[str, Text(64)]]
    without: frozenset[Annotated[str, Text(64)]]
    corrections: Annotated[
        ProfileCorrections, By(ProfileCorrections.from_fields, ProfileCorrections.to_fields)
    ]
    work: Annotated[float, Range(MIN_FACTOR, MAX_FACTOR)]
    lowered: Mapping[str, Annotated[int, Range(0, 2**63)]]
    remaining_rounds: Annotated[int, Range(0)]
    moved_seconds_ago: Annotated[tuple[float, ...], Length(4096)]

    def to_bytes(self) -> bytes:
        """Strict CBOR."""
        return cbor.dumps(write_form(self))

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> ReplanRequest:
        """Check and read. Raises ProtocolError."""
        return read_form(ReplanRequest, decoded(data, LARGE), "a question about the plan")


@dataclass(frozen=True, slots=True)
class ReplanReply:
    """The answer.

    Attributes:
        plan: the better one, `p2ptrain.plan/1`; None = stay.
        gain: predicted throughput over the present plan's, less 1; None where it cannot stay.
        reason: in a sentence with the numbers, for logs.
        in_sight: ids of the devices whose speeds and links were known.
    """

    plan: Mapping[str, Any] | None
    gain: float | None
    reason: Annotated[str, Text(REASON_LIMIT, clean=True)]
    in_sight: frozenset[Annotated[str, Text(64)]]

    def to_bytes(self) -> bytes:
        """Strict CBOR."""
        return cbor.dumps(write_form(self))

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> ReplanReply:
        """Check and read. Raises ProtocolError."""
        return read_form(ReplanReply, decoded(data, LARGE), "what was found")
