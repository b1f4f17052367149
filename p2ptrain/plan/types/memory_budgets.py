"""The memories of a device: what it offers, and what is needed of them.

computes on                      memory                      a plan counts there
a processor                      the host's                  everything
an accelerator of a unified one  the host's                  everything
any other accelerator            its own ("compute")         weights, gradients, activations
                                 the host's                  buffers, the log, samples, copies
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from p2ptrain.errors import size_text
from p2ptrain.net.forms import Bytes


@dataclass(frozen=True, slots=True)
class MemoryBudgets:
    """Bytes that a device offers, or that a plan needs of it.

    Attributes:
        compute_bytes: of the memory that it computes in.
        host_bytes: of the host's, beside an accelerator's own; None: the device has one memory.
    """

    compute_bytes: Bytes = 0
    host_bytes: Bytes | None = None

    @property
    def has_two(self) -> bool:
        """Whether the device computes in a memory beside the host's."""
        return self.host_bytes is not None

    @property
    def total_bytes(self) -> int:
        """Of both."""
        return self.compute_bytes + (self.host_bytes or 0)

    @property
    def of_host(self) -> int:
        """What of it is the host's memory: where there is one memory, all."""
        return self.compute_bytes if self.host_bytes is None else self.host_bytes

    def with_host(self, host_bytes: int) -> MemoryBudgets:
        """With so much of the host's memory."""
        if self.host_bytes is None:
            return MemoryBudgets(host_bytes)
        return MemoryBudgets(self.compute_bytes, host_bytes)

    def in_memories_of(self, device: MemoryBudgets) -> MemoryBudgets:
        """What is needed, where `device` computes: perhaps in one memory by now."""
        return self if device.host_bytes is not None else MemoryBudgets(self.total_bytes)

    def shortage(self, needed: MemoryBudgets) -> MemoryShortage | None:
        """The first memory that is too small for that; None where all is there."""
        needed = needed.in_memories_of(self)
        if needed.compute_bytes > self.compute_bytes:
            return MemoryShortage(self)
        if self.host_bytes is not None and (needed.host_bytes or 0) > self.host_bytes:
            return MemoryShortage(self, in_host=True)
        return None

    def at_most(self, limit: MemoryBudgets) -> MemoryBudgets:
        """The smaller of each; of a device that computes in other memories by now, all of it."""
        if (self.host_bytes is None) != (limit.host_bytes is None):
            return self
        compute_bytes = min(self.compute_bytes, limit.compute_bytes)
        if self.host_bytes is None or limit.host_bytes is None:
            return MemoryBudgets(compute_bytes)
        return MemoryBudgets(compute_bytes, min(self.host_bytes, limit.host_bytes))


NO_MEMORY = MemoryBudgets()


@dataclass(frozen=True, slots=True)
class MemoryShortage:
    """One of a device's memories is too small.

    Attributes:
        has: what the device has.
        in_host: it is the host's memory beside an accelerator's own.
    """

    has: MemoryBudgets
    in_host: bool = False

    def of(self, budgets: MemoryBudgets) -> int:
        """That memory, in bytes."""
        return budgets.of_host if self.in_host else budgets.compute_bytes

    def lowered(self, budgets: MemoryBudgets, most_bytes: int) -> MemoryBudgets:
        """`budgets`, of that memory at most so much."""
        most_bytes = max(min(most_bytes, self.of(budgets)), 0)
        if self.in_host:
            return budgets.with_host(most_bytes)
        return replace(budgets, compute_bytes=most_bytes)

    def text(self, name: str, needed: MemoryBudgets) -> str:
        """`reason`, and what to do."""
        advice = "Free some there, allow more with --memory, or give it fewer layers"
        return f"{self.reason(name, needed)}. {advice}"

    def reason(self, name: str, needed: MemoryBudgets) -> str:
        """Which memory of the device is short, and by how much."""
        needed_bytes, has_bytes = self.of(needed.in_memories_of(self.has)), self.of(self.has)
        where = f"on {name}"
        if self.in_host:
            where = f"in the host's memory of {name}, beside its accelerator"
        elif self.has.host_bytes is not None:
            where = f"on the accelerator of {name}"
        return (
            f"the plan needs {size_text(needed_bytes)} {where}, which has {size_text(has_bytes)}: "
            f"{size_text(needed_bytes - has_bytes)} missing"
        )
