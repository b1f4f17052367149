"""What is asked of the planners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Mode(StrEnum):
    """What is optimised."""

    SYNC = "sync"
    """The time of one synchronous round."""
    ASYNC = "async"
    """The time between mini-batches once the pipeline is full."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One question to the planners.

    Attributes:
        batch_size: samples of a mini-batch (one update).
        micro_batch: fixed size; None = the planner chooses.
        planner: a name in `planners.PLANNERS`.
        private: the holder, and only it, has the first and the last stage.
        least_piece: fewest samples of a micro-batch that the planner may choose, the ragged last
            one included: some layers cannot train on a single sample.
        only: names of the devices a plan may use; None = all.
        required: names of devices that must have a part.
        caps: by device name, the largest part of the round's work it may take (0 < cap <= 1).
            Work is counted in the reference device's seconds.
        groups: whether a stage may have several devices.
        mode: synchronous rounds, or steady asynchronous running.
        overlap: judge by what the runtime does, not by the plain cost model.
    """

    batch_size: int
    micro_batch: int | None = None
    planner: str = "auto"
    private: bool = False
    least_piece: int = 1
    only: frozenset[str] | None = None
    required: frozenset[str] = frozenset()
    caps: Mapping[str, float] = field(default_factory=dict)
    groups: bool = True
    mode: Mode = Mode.SYNC
    overlap: bool = False
