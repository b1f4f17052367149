"""A job as its coordinator sees it, as checked plain data, and how its model may be shared.

Training together must give what one device would give. A stage on several devices deals whole
micro-batches or divides each by samples. Dealing changes nothing. Dividing does where units look
across samples (BatchNorm, dropout, a contrastive loss): `auto` then only deals, other planners deal
where they have the choice, and `hybrid`, which always divides, is obeyed with a warning. Some
models cannot be divided at all, and some cannot be shared in any way.

`PassedOver`: the holder announces to the devices of its job that a coordinator gave no useful
answer. They follow another coordinator for a limited time. Only the holder of the job that a device
works for is believed. A coordinator only plans, so a holder that lies gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, TypeAlias

from p2ptrain.errors import PeerError, PlanError
from p2ptrain.job.asynchrony import AsyncOptions, FtpipehdOptions
from p2ptrain.job.rounds import MOST_LENGTHS
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.kinds import PASSED_OVER
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.net.fields import LARGE, Blob, BlobLimit, FrameFields
from p2ptrain.net.forms import Count, Id, Length, Positive, Range, Rare, Text
from p2ptrain.net.message import Message
from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, Allocation
from p2ptrain.plan.types.feature_maps import MapsForm
from p2ptrain.plan.types.plan import Plan

HINT_LENGTH = 1024
"""Most characters of where a file may be."""

STRAIGHT = ("pp", "single")
"""Planners that give each stage one device."""


@dataclass(frozen=True, slots=True)
class JobPlanRequest(Blob):
    """A job as the coordinator sees it: no weights, no data, no code.

    Attributes:
        model: its name, for messages.
        input_bytes, target_bytes: per sample.
        optimizer_state_ratio: optimizer bytes per parameter byte.
        micro_batch: samples, or 0 to let the planner choose.
        min_micro_batch: fewest samples of a micro-batch, where the planner chooses its size.
        private_first, private_last: units that must stay on the holder at either end, as in
            `PinnedUnits`; 0, 0 unless the job is private.
        sharing: how stages may be shared among devices.
        first_step: updates that the first weights have behind them.
        wire: how activations, gradients and the parts of all-reduces travel.
        replicas: whether stages of one device are copied to another one.
        checkpoints: whether the holder reads versions during training.
        asynchrony: how it trains without a barrier; None = in synchronous rounds.
        rounds: the mode is open: how stages may be shared where it trains in synchronous rounds
            after all; None = the mode is what `asynchrony` says.
        ftpipehd: it is trained as FTPipeHD does, cut by capacities that training shows; None = by
            what every device has measured.
        eval_samples: of an evaluation; 0 = there is none.
        least_evaluated: the fewest of them that the model can be evaluated on together.
        weighed, fast_math: as `Assignment`.
        longest: most of each length that differs from batch to batch.
        weights: as `Assignment`.
        stretch: how many times longer a batch has come than those that devices have measured.
        maps: of the first units, which can be cut into tiles; None = none can, or may.
        grid, groups_of_units: as `plan.request.PlanRequest`.
    """

    LIMIT: ClassVar[BlobLimit] = LARGE

    job: Id
    digest: Id
    model: Annotated[str, Text(256, clean=True)]
    input_bytes: Count
    target_bytes: Count
    optimizer_state_ratio: Annotated[float, Range(0.0, 1e6)]
    batch_size: Positive
    micro_batch: Count
    min_micro_batch: Positive
    planner: Annotated[str, Text(32)]
    private_first: Count
    private_last: Count
    optimizer: OptimizerSpec
    seed: Annotated[int, Range(-(2**63), 2**63)]
    clip: bool
    first_step: Count
    alone: bool
    sharing: SharingLimits
    wire: WireFormat = WireFormat.EXACT
    replicas: bool = True
    checkpoints: bool = False
    asynchrony: AsyncOptions | None = None
    rounds: SharingLimits | None = None
    ftpipehd: FtpipehdOptions | None = None
    eval_samples: Count = 0
    least_evaluated: Positive = 1
    weighed: bool = False
    longest: Annotated[tuple[Count, ...], Length(MOST_LENGTHS), Rare()] = ()
    weights: Annotated[str, Text(HINT_LENGTH), Rare()] = ""
    stretch: Annotated[float, Range(1.0, 1e6), Rare()] = 1.0
    maps: MapsForm | None = None
    grid: tuple[Positive, Positive] | None = None
    groups_of_units: tuple[Count, ...] = ()
    fast_math: Annotated[bool, Rare()] = False

    @property
    def may_divide(self) -> bool:
        """Whether some plan of it may divide a micro-batch between devices, by its samples."""
        sharing = self.sharing if self.rounds is None else self.rounds
        straight = self.alone or self.planner in STRAIGHT
        return sharing.divisible and not sharing.unshared and not straight

    def settled(self, *, asynchronous: bool) -> JobPlanRequest:
        """The same job, whose mode is not open any more."""
        if self.rounds is None:
            return self
        if asynchronous:
            return replace(self, rounds=None)
        return replace(self, rounds=None, asynchrony=None, sharing=self.rounds)


_DEALING = frozenset({Allocation.MICRO_BATCHES})

_DIVIDE_BY_NATURE = ("hybrid",)

_SHARE_BY_NATURE = ("dp", "hybrid", "pipedream", "tiles")

SHARING_TEXT_LIMIT = 1000

_MAX_EFFECTS = 16

ReportedText: TypeAlias = Annotated[str, Text(SHARING_TEXT_LIMIT, clean=True)]


@dataclass(frozen=True, slots=True)
class SharingLimits:
    """What the holder's model allows, as the coordinator has to know it.

    Attributes:
        unshared: why every stage needs a device of its own; "" where stages may be shared.
        divisible: whether every value that crosses a cut can be cut between samples.
        effects: how results change where samples are divided; empty if not at all.
    """

    unshared: ReportedText = ""
    divisible: bool = True
    effects: Annotated[tuple[ReportedText, ...], Length(_MAX_EFFECTS)] = ()

    def allocations(self, planner: str) -> Iterator[frozenset[Allocation]]:
        """What groups may do in a plan by `planner`: the first of these with which it finds one."""
        if not self.divisible:
            yield _DEALING
        elif not self.effects or planner in _DIVIDE_BY_NATURE:
            yield EVERY_ALLOCATION
        else:
            yield _DEALING
            if planner != "auto":
                yield EVERY_ALLOCATION

    def check(self, planner: str, *, asynchronous: bool = False) -> None:
        """PlanError where `planner` shares stages by nature and the model's cannot be shared.

        PipeDream's gives each one device then, in the asynchronous training that it was made for.
        """
        if asynchronous and planner == "pipedream":
            return
        if self.unshared and planner in _SHARE_BY_NATURE:
            raise PlanError(
                f"planner {planner} gives layers to several devices, which this model does not "
                f"allow ({self.unshared}): use --planner auto"
            )

    def changes(self, plan: Plan) -> tuple[str, ...]:
        """How the results of `plan` differ from one device's; empty if not at all."""
        divided = any(
            len(stage.devices) > 1 and stage.allocation is Allocation.SAMPLES
            for stage in plan.stages
        )
        return self.effects if divided else ()


log = get_logger(__name__)

LONGEST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class PassedOver(FrameFields):
    """`device` is not to coordinate for so long."""

    job: Id
    device: Id
    seconds: Annotated[float, Range(0.0, LONGEST_SECONDS)]


async def send_passed_over(mesh: Mesh, device: str, said: PassedOver) -> None:
    """To one device."""
    try:
        await mesh.send(device, Message(PASSED_OVER, said.fields()))
    except PeerError as error:
        log.info("not_informed", device=device[:12], why=str(error))
