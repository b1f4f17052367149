"""A job as its coordinator sees it, as checked plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from p2ptrain.model.wire_format import WireFormat
from p2ptrain.net.forms import By, Count, Id, Positive, Range, Text
from p2ptrain.tiles.data import network_fields, read_network
from p2ptrain.tiles.network import MapNetwork
from p2ptrain.training.asynchronous.delays import Asynchrony
from p2ptrain.training.asynchronous.ftpipehd import Ftpipehd
from p2ptrain.training.parts import LARGE, Blob, BlobLimit
from p2ptrain.training.sharing import Sharing

STRAIGHT = ("pp", "single")
"""Planners that give each stage one device."""


@dataclass(frozen=True, slots=True)
class PlanningRequest(Blob):
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

    LIMIT: ClassVar[BlobLimit] = LARGE

    job: Id
    digest: Id
    model: Annotated[str, Text(256, clean=True)]
    input_bytes: Count
    target_bytes: Count
    optimizer_state_ratio: Annotated[float, Range(0.0, 1e6)]
    batch_size: Positive
    micro_batch: Count
    least_piece: Positive
    planner: Annotated[str, Text(32)]
    private_first: Count
    private_last: Count
    optimizer: Mapping[str, Any]
    seed: Annotated[int, Range(-(2**63), 2**63)]
    clip: bool
    first_step: Count
    alone: bool
    sharing: Sharing
    wire: WireFormat = WireFormat.EXACT
    replicas: bool = True
    checkpoints: bool = False
    asynchrony: Asynchrony | None = None
    rounds: Sharing | None = None
    ftpipehd: Ftpipehd | None = None
    eval_samples: Count = 0
    least_evaluated: Positive = 1
    maps: Annotated[MapNetwork, By(read_network, network_fields)] | None = None
    grid: tuple[Positive, Positive] | None = None
    groups_of_units: tuple[Count, ...] = ()

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
