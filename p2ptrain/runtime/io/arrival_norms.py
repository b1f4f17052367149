"""Norms of what arrived: what devices report of each other when an update is not finite.

Each receiver notes the norm of what other devices have sent. The holder computes the round again by
itself (`model.stage.round_replay`), and so finds the device that sent wrong values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from p2ptrain.messages.assignment import Assignment
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.values import sample_dimension
from p2ptrain.model.stage.round_replay import size_of
from p2ptrain.net.fields import Blob
from p2ptrain.net.forms import Length, Range, Text

ARRIVALS_LIMIT = 1024

MUCH = 1000.0
"""So many times the norm that the model makes is none of rounding, kernels or older weights."""


@dataclass(frozen=True, slots=True)
class StageArrival:
    """Values of some samples of a micro-batch, as they came into a stage.

    Attributes:
        stage: the receiver's.
        backward: they are gradients.
        micro_batch: its number.
        first, end: samples.
        sender: id.
        size: their norm; NaN or infinite where they were not finite.
    """

    stage: Annotated[int, Range(0, 4096)]
    backward: bool
    micro_batch: Annotated[int, Range(0, 2**53)]
    first: Annotated[int, Range(0, 2**53)]
    end: Annotated[int, Range(0, 2**53)]
    sender: Annotated[str, Text(64)]
    size: Annotated[float, Range(-math.inf, math.inf, finite=False)]


@dataclass(frozen=True, slots=True)
class Arrivals(Blob):
    """All that a device has noted of a round."""

    noted: Annotated[tuple[StageArrival, ...], Length(ARRIVALS_LIMIT)] = ()


class ArrivalComparison:
    """Holds arrivals against what the model makes. `crossed` is for `round_replay.Replay`."""

    def __init__(
        self,
        assignment: Assignment,
        description: ModelDescription,
        arrivals: Sequence[StageArrival],
    ) -> None:
        self._description = description
        self._by_border: dict[tuple[int, bool, int], list[StageArrival]] = {}
        for arrival in arrivals:
            place = assignment.stages[arrival.stage]
            border = place.end if arrival.backward else place.first
            key = (border, arrival.backward, arrival.micro_batch)
            self._by_border.setdefault(key, []).append(arrival)
        self.wrong: str | None = None

    def crossed(
        self, border: int, backward: bool, micro_batch: int, values: Sequence[Tensor | None]
    ) -> None:
        """This is what the model makes there; the first that differs is kept in `wrong`."""
        for arrival in self._by_border.get((border, backward, micro_batch), ()):
            made = self._part(border, values, arrival)
            if self.wrong is None and made is not None and _differs(arrival.size, size_of(made)):
                self.wrong = arrival.sender

    def _part(
        self, border: int, values: Sequence[Tensor | None], arrival: StageArrival
    ) -> list[Tensor | None] | None:
        parts: list[Tensor | None] = []
        described = self._description.crossing(border, "train")
        for value, tensor in zip(described, values, strict=True):
            dimension = sample_dimension(value)
            if tensor is None or dimension is None:
                parts.append(tensor)
            elif arrival.first < arrival.end <= tensor.shape[dimension]:
                parts.append(tensor.narrow(dimension, arrival.first, arrival.end - arrival.first))
            else:
                return None
        return parts


def _differs(arrived: float, made: float) -> bool:
    if not math.isfinite(made):
        return False
    return not math.isfinite(arrived) or arrived > MUCH * (made + 1.0)
