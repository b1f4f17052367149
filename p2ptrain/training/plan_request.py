"""A job as its coordinator sees it, as checked plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.model.wire_format import WireFormat
from p2ptrain.net import cbor
from p2ptrain.tiles.data import network_fields, read_network
from p2ptrain.tiles.network import MapNetwork
from p2ptrain.training.asynchronous.delays import Asynchrony, asynchrony_fields
from p2ptrain.training.asynchronous.ftpipehd import Ftpipehd
from p2ptrain.training.protocol import BLOB_LIMIT_BYTES, integer, number, text, wire_format
from p2ptrain.training.sharing import Sharing

STRAIGHT = ("pp", "single")
"""Planners that give each stage one device."""


@dataclass(frozen=True, slots=True)
class PlanningRequest:
    """A job as the coordinator sees it: no weights, no data, no code.

    Attributes:
        model: its name, for people.
        input_bytes, target_bytes: per sample.
        optimizer_state_ratio: optimizer bytes per parameter byte.
        micro_batch: samples, or 0 to let the planner choose.
        least_piece: fewest samples of a micro-batch, where the planner chooses its size.
        private_first, private_last: units that must stay on the holder at either end, as in `Fold`;
            0, 0 unless the job is private.
        sharing: how stages may be shared among devices.
        first_step: updates that the first weights have behind them.
        wire: how activations, gradients and the parts of all-reduces travel.
        replicas: whether stages of one device are copied to another one.
        checkpoints: whether the holder reads versions while training goes on.
        asynchrony: how it trains without a barrier; None = in synchronous rounds.
        rounds: the mode is open: how stages may be shared where it trains in synchronous rounds
            after all; None = the mode is what `asynchrony` says.
        ftpipehd: it is trained as FTPipeHD does, cut by capacities that training shows; None = by
            what every device has measured.
        eval_samples: of an evaluation; 0 = there is none.
        least_evaluated: the fewest of them that the model can be evaluated on together.
        maps: of the first units, which can be cut into tiles; None = none can, or may.
        grid, groups_of_units: as `plan.request.PlanRequest`.
    """

    job: str
    digest: str
    model: str
    input_bytes: int
    target_bytes: int
    optimizer_state_ratio: float
    batch_size: int
    micro_batch: int
    least_piece: int
    planner: str
    private_first: int
    private_last: int
    optimizer: Mapping[str, Any]
    seed: int
    clip: bool
    first_step: int
    alone: bool
    sharing: Sharing
    wire: WireFormat = WireFormat.EXACT
    replicas: bool = True
    checkpoints: bool = False
    asynchrony: Asynchrony | None = None
    rounds: Sharing | None = None
    ftpipehd: Ftpipehd | None = None
    eval_samples: int = 0
    least_evaluated: int = 1
    maps: MapNetwork | None = None
    grid: tuple[int, int] | None = None
    groups_of_units: tuple[int, ...] = ()

    @property
    def may_divide(self) -> bool:
        """Whether some plan of it may divide a micro-batch between devices, by its samples."""
        sharing = self.sharing if self.rounds is None else self.rounds
        straight = self.alone or self.planner in STRAIGHT
        return sharing.divisible and not sharing.unshared and not straight

    def settled(self, *, asynchronous: bool) -> PlanningRequest:
        """The same job, whose mode is not open any more."""
        if self.rounds is None:
            return self
        if asynchronous:
            return replace(self, rounds=None)
        return replace(self, rounds=None, asynchrony=None, sharing=self.rounds)

    def to_bytes(self) -> bytes:
        """Strict CBOR."""
        return cbor.dumps(
            {
                **asdict(replace(self, maps=None)),
                "optimizer": dict(self.optimizer),
                "sharing": self.sharing.fields(),
                "wire": self.wire.value,
                "asynchrony": asynchrony_fields(self.asynchrony),
                "rounds": None if self.rounds is None else self.rounds.fields(),
                "ftpipehd": None if self.ftpipehd is None else self.ftpipehd.fields(),
                "maps": None if self.maps is None else network_fields(self.maps),
                "grid": None if self.grid is None else list(self.grid),
                "groups_of_units": list(self.groups_of_units),
            }
        )

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> PlanningRequest:
        """Check and read. Raises ProtocolError."""
        fields = cbor.loads(bytes(data), BLOB_LIMIT_BYTES)
        if not isinstance(fields, dict) or not isinstance(fields.get("optimizer"), dict):
            raise ProtocolError("a planning request is a map that names an optimizer")
        return PlanningRequest(
            job=text(fields, "job", 64),
            digest=text(fields, "digest", 64),
            model=text(fields, "model"),
            input_bytes=integer(fields, "input_bytes"),
            target_bytes=integer(fields, "target_bytes"),
            optimizer_state_ratio=number(fields, "optimizer_state_ratio"),
            batch_size=integer(fields, "batch_size", 1),
            micro_batch=integer(fields, "micro_batch"),
            least_piece=integer(fields, "least_piece", 1),
            planner=text(fields, "planner", 32),
            private_first=integer(fields, "private_first"),
            private_last=integer(fields, "private_last"),
            optimizer=fields["optimizer"],
            seed=integer(fields, "seed", -(2**63), 2**63),
            clip=bool(fields.get("clip")),
            first_step=integer(fields, "first_step"),
            alone=bool(fields.get("alone")),
            sharing=Sharing.read(fields.get("sharing")),
            wire=wire_format(fields),
            replicas=bool(fields.get("replicas")),
            checkpoints=bool(fields.get("checkpoints")),
            asynchrony=Asynchrony.read(fields.get("asynchrony")),
            rounds=None if (rounds := fields.get("rounds")) is None else Sharing.read(rounds),
            ftpipehd=Ftpipehd.read(fields.get("ftpipehd")),
            eval_samples=integer(fields, "eval_samples"),
            least_evaluated=integer(fields, "least_evaluated", 1),
            maps=_maps(fields.get("maps")),
            grid=_grid(fields.get("grid")),
            groups_of_units=_borders(fields.get("groups_of_units")),
        )


def _maps(value: object) -> MapNetwork | None:
    try:
        return None if value is None else read_network(value)
    except OptionError as error:
        raise ProtocolError(str(error)) from error


def _grid(value: object) -> tuple[int, int] | None:
    match value:
        case None:
            return None
        case [int(rows), int(columns)] if rows >= 1 and columns >= 1:
            return rows, columns
    raise ProtocolError("a grid has rows and columns")


def _borders(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(border) is int for border in value):
        raise ProtocolError("groups of units have borders")
    return tuple(value)
