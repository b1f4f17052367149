"""Orders, commits and reports of rounds, and what the holder asks about them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from p2ptrain.job.rounds import Round
from p2ptrain.model.stage.optimizer_form import Columns
from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Bytes, Count, Flat, Id, Key, Length, Positive, Range, Rare, Text
from p2ptrain.plan.types.memory_budgets import MemoryShortage
from p2ptrain.process.cpu_share import CpuSpan
from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.loss_scale import FLOAT32_MAX, LEAST_SCALE
from p2ptrain.recovery.version import VersionRow

VERSIONS_LIMIT = 8
"""Most versions named at once: those to go back to, and those that a checkpoint is written of."""


@dataclass(frozen=True, slots=True)
class GenerationKey(FrameFields):
    """One plan in force for one job; its number only rises. Every training frame carries both."""

    job: Id
    generation: Count


@dataclass(frozen=True, slots=True)
class StageKey(FrameFields):
    """One stage of a generation, in whose name a device speaks."""

    key: Annotated[GenerationKey, Flat()]
    stage: Count


@dataclass(frozen=True, slots=True)
class Commit(FrameFields):
    """An update counts, because every device was ready for it.

    Attributes:
        round: index of the round.
        step: updates applied before this one.
        coefficient: where the job clips, or leaves out or skips updates; else None.
    """

    round: Count
    step: Count
    coefficient: Coefficient | None = None


@dataclass(frozen=True, slots=True)
class RoundOrder(FrameFields):
    """The holder's order to every stage before a round.

    Attributes:
        round: the round's shape.
        numbers: of the optimizer's groups, those that a schedule gives for this update.
        keep: keep a copy of the state after this round's update.
        offer: with it: other devices shall have a copy too; not while they still read an older one.
        stay: with it, the versions that stay; older ones that are not named go before it is made.
        outputs: eval only: send the model's outputs to the holder (metrics need them).
        clip: what the norm of all gradients is clipped to; 0.0 = it is not.
        leaves_out: an update that is not finite is left out, and the job continues.
        counts_nothing: the mean of its loss is over nothing: an update without a gradient.
        averaged: eval only: with the averages of the weights.
        scale: what the loss is multiplied with before the backward; 0.0 = with nothing.
    """

    round: Annotated[Round, Flat()]
    numbers: Columns = field(default_factory=dict)
    keep: bool = False
    outputs: bool = False
    stay: Annotated[tuple[VersionRow, ...], Length(VERSIONS_LIMIT)] = ()
    offer: bool = True
    clip: float = 0.0
    leaves_out: bool = False
    counts_nothing: bool = False
    averaged: bool = False
    scale: Annotated[float, Range(0.0, FLOAT32_MAX)] = 0.0

    @property
    def may_change_nothing(self) -> bool:
        """Whether it is decided with all stages' gradients that the update is left out."""
        return self.leaves_out or self.scale > 0.0

    @property
    def may_be_skipped(self) -> bool:
        """Whether gradients that are not finite may be so because of the scale."""
        return self.scale >= LEAST_SCALE


@dataclass(frozen=True, slots=True)
class EndOfRounds(FrameFields):
    """So many rounds are ordered in this generation, and none after them; a `train.round` too.

    Without a barrier a stage cannot know whether another forward will come before a backward. Of
    the same kind as orders, so that none of them overtakes it.
    """

    rounds: Annotated[Count, Key("end")]

    @staticmethod
    def among(fields: Mapping[str, Any]) -> EndOfRounds | None:
        """Check and read them; None where a round is ordered."""
        return EndOfRounds.read(fields) if "end" in fields else None


FED_AHEAD = 2
"""Inputs that the holder sends before the stage has begun the piece before them."""

LOADED_AHEAD = 4


NORMS_PER_MESSAGE = 256

FAILURE_LIMIT_CHARACTERS = 1500

AnyFloat: TypeAlias = Annotated[float, Range(-math.inf, math.inf, finite=False)]


@dataclass(frozen=True, slots=True)
class RoundReport(FrameFields):
    """A stage's report to the holder when all of a round but the update is done.

    Attributes:
        loss: weighted sum of the pieces' losses; 0.0 except at the last stage.
        finite: whether all that the update needs is; else no stage makes it.
        busy_seconds, cpu_seconds: what its tasks took in the compute thread since the last report.
        free_bytes: memory that is free on the device, which the sender adds.
    """

    round: Count
    loss: AnyFloat
    finite: bool
    busy_seconds: AnyFloat
    cpu_seconds: AnyFloat
    free_bytes: Bytes

    @property
    def busy(self) -> CpuSpan:
        """Both seconds."""
        return CpuSpan(self.busy_seconds, self.cpu_seconds)


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
