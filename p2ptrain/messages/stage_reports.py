"""What a stage reports to the holder while its rounds run, and what the holder asks about them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from p2ptrain.messages.round_orders import RoundReport
from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Bytes, Count, Id, Length, Positive, Range, Rare, Text
from p2ptrain.plan.types.memory_budgets import MemoryShortage
from p2ptrain.process.cpu_share import CpuSpan

NORMS_PER_MESSAGE = 256

FAILURE_LIMIT_CHARACTERS = 1500

AnyFloat: TypeAlias = Annotated[float, Range(-math.inf, math.inf, finite=False)]


@dataclass(frozen=True, slots=True)
class DoneFields(FrameFields):
    """`RoundReport` as it travels, with the memory that is free on the device."""

    round: Count
    loss: AnyFloat
    finite: bool
    busy_seconds: AnyFloat
    cpu_seconds: AnyFloat
    free_bytes: Bytes

    @staticmethod
    def of(report: RoundReport, free_bytes: int) -> DoneFields:
        """The form of a report."""
        busy = report.busy
        return DoneFields(report.round, report.loss, report.finite, busy.wall, busy.cpu, free_bytes)

    @property
    def report(self) -> RoundReport:
        """Without the memory."""
        busy = CpuSpan(self.busy_seconds, self.cpu_seconds)
        return RoundReport(self.round, self.loss, busy, self.finite)


@dataclass(frozen=True, slots=True)
class NormsReport(FrameFields):
    """Norms of a stage's gradients from parameter `first` on; None: no gradient."""

    round: Count
    first: Count
    norms: Annotated[tuple[AnyFloat | None, ...], Length(NORMS_PER_MESSAGE)]


@dataclass(frozen=True, slots=True)
class FailureReport(FrameFields):
    """Why a stage does not go on.

    Attributes:
        cause: `not_finite`, `refused` (a frame of `sender`), `memory`, `user`, `peer`, `bug`, or
            `link` (to `peer`, which has ended or is `back`).
        message: for the user.
        step, micro_batch, held_as, is_update: where a value is not finite.
        short: which memory the device ran out of.
    """

    cause: Annotated[str, Text(16)]
    message: Annotated[str, Text(FAILURE_LIMIT_CHARACTERS, clean=True)]
    step: Positive | None = None
    micro_batch: Count | None = None
    held_as: Count | None = None
    is_update: Annotated[bool, Rare()] = False
    sender: Id | None = None
    short: MemoryShortage | None = None
    peer: Id | None = None
    back: Annotated[bool, Rare()] = False

    def __post_init__(self) -> None:
        if self.cause == "not_finite" and self.step is None:
            raise ValueError("a value that is not finite, without its step")
        if self.cause == "refused" and self.sender is None:
            raise ValueError("a frame was refused, without its sender")
        if self.cause == "memory" and self.short is None:
            raise ValueError("out of memory, without how much there is")
        if self.cause == "link" and self.peer is None:
            raise ValueError("a link, without the device at its other end")


@dataclass(frozen=True, slots=True)
class RoundQuestion(FrameFields):
    """What came into a device's stages in that round?"""

    round: Count


@dataclass(frozen=True, slots=True)
class DiagnoseRequest(FrameFields):
    """Where did the micro-batch that this stage still holds stop being finite?"""

    stage: Count
    held_as: Count
