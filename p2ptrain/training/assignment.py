"""A plan in force: what every device of an epoch must know of it, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2ptrain.errors import ProtocolError
from p2ptrain.net import cbor
from p2ptrain.training.protocol import BLOB_LIMIT_BYTES, EpochKey, integer, text


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Where one stage lives.

    Attributes:
        first, end: units [first, end).
        device: id of the device.
        warmup: K_p, forwards before the first backward.
    """

    first: int
    end: int
    device: str
    warmup: int


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
        micro_batch: most samples of a piece.
        optimizer: the optimizer's fields (`training.job`), no code.
        seed: of the job; randomness inside the model derives from it.
        clip: whether a clipping coefficient is to be awaited before each update.
        first_step: updates already applied to the weights that are handed out.
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
    first_step: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a training round."""
        return -(-self.batch_size // self.micro_batch)

    def stages_of(self, device: str) -> list[int]:
        """Indices of the stages that `device` holds, in order."""
        return [index for index, place in enumerate(self.stages) if place.device == device]

    @property
    def devices(self) -> tuple[str, ...]:
        """Ids of the devices that hold a stage, in pipeline order, each once."""
        return tuple(dict.fromkeys(place.device for place in self.stages))

    def to_bytes(self) -> bytes:
        """Strict CBOR."""
        return cbor.dumps(
            {
                **self.key.fields(),
                "term": self.term,
                "holder": self.holder,
                "digest": self.digest,
                "stages": [[s.first, s.end, s.device, s.warmup] for s in self.stages],
                "batch_size": self.batch_size,
                "micro_batch": self.micro_batch,
                "optimizer": dict(self.optimizer),
                "seed": self.seed,
                "clip": self.clip,
                "first_step": self.first_step,
            }
        )

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Assignment:
        """Check and read. Raises ProtocolError."""
        fields = cbor.loads(bytes(data), BLOB_LIMIT_BYTES)
        if not isinstance(fields, dict):
            raise ProtocolError("an assignment is a map")
        optimizer = fields.get("optimizer")
        stages = fields.get("stages")
        if not isinstance(optimizer, dict) or not isinstance(stages, list) or not stages:
            raise ProtocolError("an assignment names an optimizer and its stages")
        return Assignment(
            key=EpochKey.read(fields),
            term=integer(fields, "term"),
            holder=text(fields, "holder", 64),
            digest=text(fields, "digest", 64),
            stages=_read_stages(stages),
            batch_size=integer(fields, "batch_size", 1),
            micro_batch=integer(fields, "micro_batch", 1),
            optimizer=optimizer,
            seed=integer(fields, "seed", -(2**63), 2**63),
            clip=bool(fields.get("clip")),
            first_step=integer(fields, "first_step"),
        )


def _read_stages(stages: list[Any]) -> tuple[StagePlace, ...]:
    places: list[StagePlace] = []
    for entry in stages:
        if not isinstance(entry, list) or len(entry) != 4:
            raise ProtocolError("a stage is [first, end, device, warmup]")
        named = dict(zip(("first", "end", "device", "warmup"), entry, strict=True))
        place = StagePlace(
            integer(named, "first"),
            integer(named, "end"),
            text(named, "device", 64),
            integer(named, "warmup", 1),
        )
        if place.first != (places[-1].end if places else 0) or place.end <= place.first:
            raise ProtocolError("stages cover the units once and in order")
        places.append(place)
    return tuple(places)
