"""What is asked of the planners."""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    batch_size: int
    micro_batch: int | None = None
    planner: str = "auto"
    private: bool = False
    least_piece: int = 1
    only: frozenset[str] | None = None
