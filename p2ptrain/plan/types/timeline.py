"""What a device did, or will do in a simulated round, and when: one form for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

EntryKind: TypeAlias = Literal[
    "forward",
    "backward",
    "weight",
    "update",
    "other",
    "send input",
    "send target",
    "send output",
    "send gradient",
    "send prediction",
    "send sum",
    "send halo",
    "receive input",
    "receive target",
    "receive output",
    "receive gradient",
    "receive prediction",
    "receive sum",
    "receive halo",
    "all-reduce",
    "exchange",
    "wait input",
    "wait target",
    "wait output",
    "wait gradient",
    "wait prediction",
    "wait sum",
    "wait halo",
    "wait commit",
    "wait order",
]

KINDS: tuple[EntryKind, ...] = get_args(EntryKind)
"""In the order by which messages number them."""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One bar of the timeline.

    Attributes:
        kind: simulated, "send input" carries the target too where one device needs both, or the
            target alone, and nothing receives or waits. "weight" is the gradients of weights where
            the backward is split, "exchange" halos and statistics between tiles, "other" checks
            and copies.
        device: who computes, sends, receives or waits.
        stage: the stage that computes, or that the transfer is for.
        micro_batch: None of what concerns a whole round (all-reduce, update); asynchronously the
            mini-batch, of an exchange the last one; of a measured sum the chunk.
        start_seconds, end_seconds: from the round's start, measured: by the holder's clock; a
            simulated transfer ends when it arrives, a measured "send" when the link has taken it.
        receiver: of what is sent.
        free_seconds: of a simulated transfer, when its interfaces are free again (`latency` before
            the end).
        sender: of what is received.
        round: which one; None where there is only one.
    """

    kind: EntryKind
    device: str
    stage: int
    micro_batch: int | None
    start_seconds: float
    end_seconds: float
    receiver: str | None = None
    free_seconds: float | None = None
    sender: str | None = None
    round: int | None = None
