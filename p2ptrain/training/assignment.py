"""A plan in force: what every device of an epoch must know of it, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.model.wire_format import WireFormat
from p2ptrain.net import cbor
from p2ptrain.plan.allocation import Allocation
from p2ptrain.plan.bucket_sizes import MOST_BYTES, USUAL
from p2ptrain.plan.versions import Weights, depths_of
from p2ptrain.tiles.shape import TileShape
from p2ptrain.training.asynchronous.delays import Asynchrony, asynchrony_fields
from p2ptrain.training.protocol import (
    BLOB_LIMIT_BYTES,
    EpochKey,
    integer,
    text,
    wire_format,
)
from p2ptrain.training.recovery.holdings import read_version, version_fields
from p2ptrain.training.recovery.lineage import Lineage
from p2ptrain.training.recovery.version import Version

FIRST = Lineage()
"""Of a job that has no epoch yet."""


@dataclass(frozen=True, slots=True)
class StagePlace:
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
            this one are summed last, first units first (`trailing_update`); None = it does not.
        bucket_bytes: of gradients in the first and in the last bucket that its devices sum.
    """

    first: int
    end: int
    warmup: int
    devices: tuple[str, ...]
    shares: tuple[int, ...]
    allocation: Allocation = Allocation.SAMPLES
    held: int | None = None
    copies_to: str | None = None
    tiling: TileShape | None = None
    goes_ahead: bool = False
    turn: int | None = None
    bucket_bytes: int = USUAL.least_bytes

    @property
    def leader(self) -> str:
        """The device that speaks for the stage where one is enough."""
        return self.devices[0]

    def keeper(self, holder: str) -> str:
        """Whose copy of the weights is read: the data holder's own where it has one."""
        return holder if holder in self.devices else self.leader

    @property
    def shared(self) -> bool:
        """Whether several devices hold the stage."""
        return len(self.devices) > 1


@dataclass(frozen=True, slots=True)
class Assignment:
    """One epoch of one job.

    Attributes:
        key: job and epoch.
        term: the coordinator's term when it planned; older commands are refused.
        holder: id of the device that holds the data.
        digest: which model (SHA-256 of its description).
        stages: in pipeline order.
        batch_size: samples of one update.
        micro_batch: most samples of a piece, in training.
        optimizer: the optimizer's fields (`training.job`), no code.
        seed: of the job; randomness inside the model derives from it.
        clip: whether a clipping coefficient is to be awaited before each update.
        version: the state that the epoch begins with.
        lineage: the job's history before this epoch.
        wire: how activations, gradients and the parts of all-reduces travel.
        stable: the newest version of which every copy was acknowledged; None = there is none.
        keeps: whether the state that the epoch begins with is copied at once.
        asynchrony: how it trains without a barrier; None = in synchronous rounds.
        evaluated: most samples of a piece of an evaluation, which may need larger ones.
    """

    key: EpochKey
    term: int
    holder: str
    digest: str
    stages: tuple[StagePlace, ...]
    batch_size: int
    micro_batch: int
    optimizer: Mapping[str, Any]
    seed: int
    clip: bool
    version: Version
    lineage: Lineage = FIRST
    wire: WireFormat = WireFormat.EXACT
    stable: Version | None = None
    keeps: bool = False
    asynchrony: Asynchrony | None = None
    evaluated: int = 0

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
    def protects(self) -> bool:
        """Whether devices keep versions to go back to, and copies of them for others."""
        return any(place.copies_to is not None for place in self.stages)

    def to_bytes(self) -> bytes:
        """Strict CBOR."""
        return cbor.dumps(
            {
                **self.key.fields(),
                "term": self.term,
                "holder": self.holder,
                "digest": self.digest,
                "stages": [_stage_fields(place) for place in self.stages],
                "batch_size": self.batch_size,
                "micro_batch": self.micro_batch,
                "evaluated": self.evaluated,
                "optimizer": dict(self.optimizer),
                "seed": self.seed,
                "clip": self.clip,
                "version": version_fields(self.version),
                "lineage": self.lineage.to_fields(),
                "wire": self.wire.value,
                "stable": None if self.stable is None else version_fields(self.stable),
                "keeps": self.keeps,
                "asynchrony": asynchrony_fields(self.asynchrony),
            }
        )

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Assignment:
        """Check and read. Raises ProtocolError."""
        fields = cbor.loads(bytes(data), BLOB_LIMIT_BYTES)
        if not isinstance(fields, dict):
            raise ProtocolError("an assignment is a map")
        optimizer = fields.get("optimizer")
        stages, stable = fields.get("stages"), fields.get("stable")
        if not isinstance(optimizer, dict) or not isinstance(stages, list) or not stages:
            raise ProtocolError("an assignment names an optimizer and its stages")
        assignment = Assignment(
            key=EpochKey.read(fields),
            term=integer(fields, "term"),
            holder=text(fields, "holder", 64),
            digest=text(fields, "digest", 64),
            stages=_read_stages(stages),
            batch_size=integer(fields, "batch_size", 1),
            micro_batch=integer(fields, "micro_batch", 1),
            evaluated=integer(fields, "evaluated"),
            optimizer=optimizer,
            seed=integer(fields, "seed", -(2**63), 2**63),
            clip=bool(fields.get("clip")),
            version=read_version(fields.get("version")),
            lineage=Lineage.from_fields(fields.get("lineage")),
            wire=wire_format(fields),
            stable=None if stable is None else read_version(stable),
            keeps=bool(fields.get("keeps")),
            asynchrony=Asynchrony.read(fields.get("asynchrony")),
        )
        assignment.check()
        return assignment

    def check(self) -> None:
        """ProtocolError where the shares of a stage do not add up, or it cannot train so."""
        waits = self.clip or self.asynchrony is not None
        if any(place.goes_ahead and (waits or place.tiling is not None) for place in self.stages):
            raise ProtocolError("an update cannot be made ahead of what it waits for")
        for place in self.stages:
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

    def _check_tiles(self, place: StagePlace, tiling: TileShape) -> None:
        if place is not self.stages[0] or len(self.stages) < 2:
            raise ProtocolError("only a first stage is tiled, and others follow")
        if sum(place.shares) != tiling.tiles or place.end != tiling.units:
            raise ProtocolError(
                f"{sum(place.shares)} tiles of {place.end} units, but the grid has {tiling.tiles} "
                f"of {tiling.units}"
            )
        if place.held is not None:
            raise ProtocolError("the backward of a tiled stage is not split")

    def _check_delays(self, how: Asynchrony) -> None:
        shared = [place for place in self.stages if place.shared]
        if any(place.tiling is not None for place in self.stages):
            raise ProtocolError("asynchronous stages are not tiled")
        if self.clip or any(place.held is not None for place in self.stages):
            raise ProtocolError("asynchronous stages wait for nobody, and split no backwards")
        if any(place.allocation is not Allocation.MICRO_BATCHES for place in shared):
            raise ProtocolError("devices of an asynchronous stage take mini-batches in turn")
        if shared and not how.may_share:
            raise ProtocolError(f"stages with {how.weights.value} weights are single devices")
        depths = depths_of([len(place.devices) for place in self.stages])
        if self.depths != depths:
            raise ProtocolError(f"asynchronous stages have depths of {list(depths)}")
        if how.weights is Weights.DOUBLE and self.micro_batches < len(depths):
            raise ProtocolError(f"two versions need {len(depths)} micro-batches at least")


def _stage_fields(place: StagePlace) -> dict[str, Any]:
    return {
        "units": [place.first, place.end],
        "warmup": place.warmup,
        "devices": list(place.devices),
        "shares": list(place.shares),
        "allocation": str(place.allocation),
        "held": place.held,
        "copies_to": place.copies_to,
        "tiling": None if place.tiling is None else place.tiling.fields(),
        "ahead": place.goes_ahead,
        "turn": place.turn,
        "bucket_bytes": place.bucket_bytes,
    }


def _read_stages(stages: list[Any]) -> tuple[StagePlace, ...]:
    places: list[StagePlace] = []
    for entry in stages:
        place = _read_stage(entry)
        if place.first != (places[-1].end if places else 0) or place.end <= place.first:
            raise ProtocolError("stages cover the units once and in order")
        places.append(place)
    return tuple(places)


def _read_tiling(value: object) -> TileShape | None:
    try:
        return None if value is None else TileShape.read(value)
    except OptionError as error:
        raise ProtocolError(str(error)) from error


def _read_stage(entry: object) -> StagePlace:
    match entry:
        case {
            "units": [int(first), int(end)],
            "warmup": int(warmup),
            "devices": [str(), *_] as devices,
            "shares": [int(), *_] as shares,
            "allocation": "samples" | "micro_batches" | "tiles" as allocation,
            "held": int() | None as held,
            "copies_to": str() | None as keeper,
            "tiling": tiling,
            "ahead": bool(ahead),
            "turn": int() | None as turn,
            "bucket_bytes": int(bucket_bytes),
        } if warmup >= 1 and len(shares) == len(devices) == len(set(devices)):
            how, shape = Allocation(allocation), _read_tiling(tiling)
            place = StagePlace(
                *(first, end, warmup, tuple(devices), tuple(shares)),
                *(how, held, keeper, shape),
                goes_ahead=ahead,
                turn=turn,
                bucket_bytes=bucket_bytes,
            )
        case _:
            raise ProtocolError("a stage has units, devices, their shares and how they work")
    if place.held is not None and place.held < place.warmup:
        raise ProtocolError("a split backward holds at least its stage's warm-up")
    if not all(isinstance(device, str) and len(device) <= 64 for device in place.devices):
        raise ProtocolError("a stage's devices are ids")
    if not all(isinstance(share, int) and share >= 1 for share in place.shares):
        raise ProtocolError("a device's share of a stage is at least 1")
    if place.turn is not None and not (place.goes_ahead and place.first < place.turn <= place.end):
        raise ProtocolError("sums turn at one of their stage's units, where updates go ahead")
    if not 1 <= place.bucket_bytes <= MOST_BYTES:
        raise ProtocolError(f"gradients are summed in buckets of 1 to {MOST_BYTES} bytes")
    if (place.allocation is Allocation.TILES) is (place.tiling is None):
        raise ProtocolError("a tiled stage says how its maps are cut, and no other does")
    return place
