"""Orders, commits and reports of rounds; how far feeding runs ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from p2ptrain.job.rounds import Round
from p2ptrain.messages.snapshots import VERSIONS_LIMIT
from p2ptrain.model.stage.optimizer_form import Columns
from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Count, Flat, Id, Key, Length, Range
from p2ptrain.process.cpu_share import CpuSpan
from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.loss_scale import FLOAT32_MAX, LEAST_SCALE
from p2ptrain.recovery.version import VersionRow


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


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A stage's report to the holder when all of a round but the update is done.

    Attributes:
        loss: weighted sum of the pieces' losses; 0.0 except at the last stage.
        finite: whether all that the update needs is; else no stage makes it.
        busy: what its tasks took in the compute thread since the last report.
    """

    round: int
    loss: float
    busy: CpuSpan
    finite: bool = True


FED_AHEAD = 2
"""Inputs that the holder sends before the stage has begun the piece before them."""

LOADED_AHEAD = 4
