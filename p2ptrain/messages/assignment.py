"""A plan in force: what every device of a generation must know of it, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from p2ptrain.errors import ProtocolError
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.rounds import MOST_LENGTHS
from p2ptrain.messages.plan_request import HINT_LENGTH
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.net.fields import DEVICES_LIMIT, Blob
from p2ptrain.net.forms import Count, Flat, Id, Length, Positive, Range, Rare, Text
from p2ptrain.plan.types.allocation import Allocation, TileShape
from p2ptrain.plan.types.gradient_sums import MAX_BYTES, USUAL
from p2ptrain.plan.types.weight_versions import Weights, depths_of
from p2ptrain.recovery.compute_kind import PROCESSOR, KindText
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.version import Lineage, VersionRow

FIRST = Lineage()
"""Of a job that has no generation yet."""


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """Where one stage lives.

    Attributes:
        first, end: units [first, end).
        warmup: K_p, forwards before the first backward.
        devices: ids, in the order of their sample ranges.
        shares: one a device, at least 1: samples of each micro-batch, or whole micro-batches of a
            round; a device alone takes everything, whatever its share.
        allocation: what the shares count.
        held: the backward is split, and so many micro-batches at most are without their weight
            gradients (`plan.schedule.ZeroBubble`); None = it is not.
        copies_to: id of the device that keeps copies of the stage; None = none is kept.
        tiling: how its maps are cut, where `shares` count tiles, in row order.
        goes_ahead: its devices make updates before they count, and keep what was before until then.
        turn: the next round begins before this one's sums are there, and gradients of units before
            this one are summed last, first units first (`OverlappedUpdate`); None = it does not.
        bucket_bytes: of gradients in the first and in the last bucket that its devices sum.
        kinds: with what each of its devices computes; empty: all with processors.
    """

    first: Count
    end: Count
    warmup: Positive
    devices: Annotated[tuple[Id, ...], Length(DEVICES_LIMIT, 1)]
    shares: Annotated[tuple[Positive, ...], Length(DEVICES_LIMIT, 1)]
    allocation: Allocation = Allocation.SAMPLES
    held: Positive | None = None
    copies_to: Id | None = None
    tiling: TileShape | None = None
    goes_ahead: bool = False
    turn: Count | None = None
    bucket_bytes: Annotated[int, Range(1, MAX_BYTES)] = USUAL.least_bytes
    kinds: Annotated[tuple[KindText, ...], Length(DEVICES_LIMIT), Rare()] = ()

    @property
    def leader(self) -> str:
        """The device that speaks for the stage where one is enough."""
        return self.devices[0]

    def backup_peer(self, holder: str) -> str:
        """Whose copy of the weights is read: the data holder's own where it has one."""
        return holder if holder in self.devices else self.leader

    @property
    def shared(self) -> bool:
        """Whether several devices hold the stage."""
        return len(self.devices) > 1

    @property
    def is_mixed(self) -> bool:
        """Whether they compute with different things, and so update it on their hosts."""
        return len({*self.kinds}) > 1

    def check(self) -> None:
        """ProtocolError where its fields do not fit each other."""
        if len(self.shares) != len(self.devices) or len({*self.devices}) < len(self.devices):
            raise ProtocolError("each device of a stage is named once, with its share")
        if self.kinds and len(self.kinds) != len(self.devices):
            raise ProtocolError("of each device of a stage it is said with what it computes")
        if self.held is not None and self.held < self.warmup:
            raise ProtocolError("a split backward holds at least its stage's warm-up")
        turns_inside = self.turn is None or self.first < self.turn <= self.end
        if not turns_inside or (self.turn is not None and not self.goes_ahead):
            raise ProtocolError("sums turn at one of their stage's units, where updates go ahead")
        if (self.allocation is Allocation.TILES) is (self.tiling is None):
            raise ProtocolError("a tiled stage says how its maps are cut, and no other does")


@dataclass(frozen=True, slots=True)
class Assignment(Blob):
    """One generation of one job.

    Attributes:
        key: job and generation.
        holder: id of the device that holds the data.
        digest: which model (SHA-256 of its description).
        stages: in pipeline order.
        batch_size: samples of one update.
        micro_batch: most samples of a piece, in training.
        optimizer: its class and the numbers of its groups, no code.
        seed: of the job; randomness inside the model derives from it.
        clip: whether a clipping coefficient is to be awaited before each update.
        version: the state that the generation begins with.
        lineage: the job's history before this generation.
        wire: how activations, gradients and the parts of all-reduces travel.
        stable: the newest version of which every copy was acknowledged; None = there is none.
        keeps: whether the state that the generation begins with is copied at once.
        asynchrony: how it trains without a barrier; None = in synchronous rounds.
        evaluated: most samples of a piece of an evaluation, which may need larger ones.
        weighed: with the targets of a slice comes its part of the mini-batch; False = it is its
            part of the samples.
        longest: most of each length that differs from batch to batch.
        fast_math: accelerators may round operands, and add in any order.
        weights: where a device may have the files that training began with; "" = nowhere.
    """

    key: Annotated[GenerationKey, Flat()]
    holder: Id
    digest: Id
    stages: Annotated[tuple[StageAssignment, ...], Length(DEVICES_LIMIT, 1)]
    batch_size: Positive
    micro_batch: Positive
    optimizer: OptimizerSpec
    seed: Annotated[int, Range(-(2**63), 2**63)]
    clip: bool
    version: VersionRow
    lineage: Lineage = FIRST
    wire: WireFormat = WireFormat.EXACT
    stable: VersionRow | None = None
    keeps: bool = False
    asynchrony: AsyncOptions | None = None
    evaluated: Count = 0
    weighed: bool = False
    longest: Annotated[tuple[Count, ...], Length(MOST_LENGTHS), Rare()] = ()
    fast_math: Annotated[bool, Rare()] = False
    weights: Annotated[str, Text(HINT_LENGTH), Rare()] = ""

    @property
    def hashes(self) -> bool:
        """Whether masks of dropout are hashed: an accelerator has a part."""
        return any({*place.kinds} - {PROCESSOR.kind} for place in self.stages)

    @property
    def largest(self) -> int:
        """Most samples of any piece."""
        return max(self.micro_batch, self.evaluated)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a training round."""
        return -(-self.batch_size // self.micro_batch)

    def stages_of(self, device: str) -> list[int]:
        """Indices of the stages that `device` holds, in order."""
        return [index for index, place in enumerate(self.stages) if device in place.devices]

    @property
    def depths(self) -> tuple[int, ...]:
        """K_p of each stage."""
        return tuple(place.warmup for place in self.stages)

    @property
    def devices(self) -> tuple[str, ...]:
        """Ids of the devices that hold a stage, in pipeline order, each once."""
        return tuple(dict.fromkeys(device for place in self.stages for device in place.devices))

    @property
    def placed(self) -> Placement:
        """As the rules of recovery see it."""
        stages = tuple(
            PlacedStage(place.first, place.end, place.devices, place.copies_to, place.kinds)
            for place in self.stages
        )
        return Placement(
            generation=self.key.generation,
            holder=self.holder,
            version=self.version,
            lineage=self.lineage,
            stages=stages,
            keeps=self.keeps,
            stable=self.stable,
        )

    def check(self) -> None:
        """ProtocolError where the shares of a stage do not add up, or it cannot train so."""
        end = 0
        for place in self.stages:
            if place.first != end or place.end <= place.first:
                raise ProtocolError("stages cover the units once and in order")
            place.check()
            end = place.end
        waits = self.clip or self.asynchrony is not None
        if any(place.goes_ahead and (waits or place.tiling is not None) for place in self.stages):
            raise ProtocolError("an update cannot be made ahead of what it waits for")
        for place in self.stages:
            if place.is_mixed and (self.asynchrony is not None or place.tiling is not None):
                raise ProtocolError("devices of a stage compute alike, or train it in whole rounds")
            if place.turn is not None and any(len(self.stages_of(d)) > 1 for d in place.devices):
                raise ProtocolError("a device that waits for sums has one stage")
        if self.asynchrony is not None:
            self._check_delays(self.asynchrony)
            return
        for place in self.stages:
            if place.tiling is not None:
                self._check_tiles(place, place.tiling)
                continue
            whole = (
                self.micro_batch if place.allocation is Allocation.SAMPLES else self.micro_batches
            )
            if place.shared and sum(place.shares) != whole:
                raise ProtocolError(f"shares {list(place.shares)} do not add up to {whole}")

    def _check_tiles(self, place: StageAssignment, tiling: TileShape) -> None:
        if place is not self.stages[0] or len(self.stages) < 2:
            raise ProtocolError("only a first stage is tiled, and others follow")
        if sum(place.shares) != tiling.tiles or place.end != tiling.units:
            raise ProtocolError(
                f"{sum(place.shares)} tiles of {place.end} units, but the grid has {tiling.tiles} "
                f"of {tiling.units}"
            )
        if place.held is not None:
            raise ProtocolError("the backward of a tiled stage is not split")

    def _check_delays(self, how: AsyncOptions) -> None:
        shared = [place for place in self.stages if place.shared]
        if any(place.tiling is not None for place in self.stages):
            raise ProtocolError("asynchronous stages are not tiled")
        if self.clip or any(place.held is not None for place in self.stages):
            raise ProtocolError("asynchronous stages wait for no other, and split no backwards")
        if any(place.allocation is not Allocation.MICRO_BATCHES for place in shared):
            raise ProtocolError("devices of an asynchronous stage take mini-batches in turn")
        if shared and not how.may_share:
            raise ProtocolError(f"stages with {how.weights.value} weights are single devices")
        depths = depths_of([len(place.devices) for place in self.stages])
        if self.depths != depths:
            raise ProtocolError(f"asynchronous stages have depths of {list(depths)}")
        if how.weights is Weights.DOUBLE and self.micro_batches < len(depths):
            raise ProtocolError(f"two versions need {len(depths)} micro-batches at least")
