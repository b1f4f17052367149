"""With what a device computes: devices of one kind compute the same bits.

A stage that was computed on one kind is made again on the same kind only. Devices of several kinds
that share a stage make its updates on their hosts: elsewhere these would differ in the last bits,
and their weights drift apart. What was computed is data, and is copied to any device. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from p2ptrain.net.forms import Rare, Text

KIND_LIMIT = 200

KindText: TypeAlias = Annotated[str, Text(KIND_LIMIT, 1)]


@dataclass(frozen=True, slots=True)
class ComputeKind:
    """What a device says of the processor or accelerator that it computes with.

    Attributes:
        kind: vendor, architecture and build of torch; every processor is of kind "cpu".
        title: as people know it.
        machine: what several devices of one machine have in common; "" where it has one.
    """

    kind: KindText = "cpu"
    title: KindText = "processor"
    machine: Annotated[str, Text(KIND_LIMIT), Rare()] = ""

    @property
    def is_processor(self) -> bool:
        """Whether its memory is the host's, and its operators those of processors."""
        return self.kind == PROCESSOR.kind


PROCESSOR = ComputeKind()
