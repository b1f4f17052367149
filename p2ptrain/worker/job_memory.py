"""How much memory a job may take here.

On a processor it is what the machine has. On an accelerator weights, their gradients and what waits
for a backward lie in its own memory; snapshots, replicas, logs and what is on the wire lie in the
host's. Plans count each, unless both are one memory (Apple's, and processors' graphics): then the
accelerator may take a part of it, and everything counts together.
"""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.manners.condition import MemoryInUse
from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.host_process import MemoryCeiling, trim_heap
from p2ptrain.process.memory_budget import (
    USABLE_SHARE,
    anonymous_bytes,
    available_memory_bytes,
    is_of_host,
    usable_memory_bytes,
)

ACCELERATOR_SHARE = 0.85
"""Of what is free in an accelerator's memory: kernels and their scratch space are loaded there when
they are first used, blocks are rounded up, and other programs draw on a screen."""


class JobMemory:
    """One a device.

    Args:
        compute: on what a job computes here; it may change.
        memory_bytes: what p2ptrain may use of each memory, or None: what is available.
        ceiling: memory that jobs may take here.
    """

    def __init__(
        self, compute: ComputeThread, memory_bytes: int | None, ceiling: MemoryCeiling | None
    ) -> None:
        self._compute = compute
        self._memory_bytes = memory_bytes
        self._ceiling = ceiling
        self._idle_bytes = anonymous_bytes()
        self._taken_bytes = 0

    def note_taken(self) -> int:
        """What a job has taken of the host's memory by now, which no plan for it counts with."""
        self._taken_bytes = max(anonymous_bytes() - self._idle_bytes, 0)
        return self._taken_bytes

    def in_use(self) -> MemoryInUse:
        """What jobs take now.

        Raises:
            AcceleratorFailed: it has stopped working.
        """
        device = self._compute.device
        used_bytes = max(anonymous_bytes() - self._idle_bytes, 0)
        if device.is_host:
            return MemoryInUse(used_bytes)
        found, offered_bytes = device.memory(), self.whole_budgets().compute_bytes
        return MemoryInUse(used_bytes, found.total_bytes, found.taken_bytes, offered_bytes)

    def short_of(self, needed: MemoryBudgets, *, engaged: bool) -> MemoryShortage | None:
        """Which memory is too small for a part, now that it is to begin, and what there is.

        Args:
            engaged: what the job takes here now is free once the part begins.
        """
        trim_heap()
        free = available_memory_bytes() + (self._held_bytes() if engaged else 0)
        short = self._budgets(free, 1.0).shortage(needed)
        if short is None:
            return None
        return replace(short, has=self.whole_budgets() if engaged else self.budgets())

    def ran_out(self, error: BaseException) -> MemoryShortage:
        """Which memory an error that `is_out_of_memory` was about, and what a job may take."""
        return MemoryShortage(has := self.whole_budgets(), has.has_two and is_of_host(error))

    def expect(self, needed: MemoryBudgets, *, engaged: bool) -> None:
        """Hold the process against what the part that begins was planned to need; as `short_of`."""
        if self._ceiling is not None:
            held_bytes = self._held_bytes() if engaged else 0
            here = needed.in_memories_of(self.whole_budgets())
            self._ceiling.plan(here.of_host, anonymous_bytes() - held_bytes)

    def budgets(self) -> MemoryBudgets:
        """What a job may take now, beside what it takes."""
        trim_heap()  # what measuring, or a job before, has used is free for the next
        return self._budgets(usable_memory_bytes(), ACCELERATOR_SHARE)

    def whole_budgets(self) -> MemoryBudgets:
        """What a job may take now, with what it has taken since this device measured its model."""
        free = int((available_memory_bytes() + self._held_bytes()) * USABLE_SHARE)
        return self._budgets(free, ACCELERATOR_SHARE)

    def still_offered(self, offered: MemoryBudgets) -> MemoryBudgets:
        """Of what this device offered when it was idle.

        What others take meanwhile comes from the part that was left free. Only where they have
        taken more is it less: else no two plans would be made for the same memory.
        """
        free, now = available_memory_bytes() + self._held_bytes(), self.whole_budgets()
        if now.has_two != offered.has_two:
            return now  # its accelerator has failed since
        for _ in range(2):
            short = self._budgets(free, 1.0).shortage(offered)
            if short is not None:
                offered = short.lowered(offered, short.of(now))
        return offered

    def _held_bytes(self) -> int:
        """What a job has taken of this process since its model was measured."""
        return max(anonymous_bytes() - self._idle_bytes - self._taken_bytes, 0)

    def _budgets(self, free_bytes: int, share: float) -> MemoryBudgets:
        found = device_budgets(self._compute.device, free_bytes, share)
        most = self._memory_bytes
        if most is None:
            return found
        return found.at_most(MemoryBudgets(most, most if found.has_two else None))


def device_budgets(device: ComputeDevice, free_bytes: int, share: float) -> MemoryBudgets:
    """What a job may take of a device's memories.

    Args:
        free_bytes: of the host's.
        share: of what is free in an accelerator's: what torch's allocator keeps there is, too.
    """
    if device.is_host:
        return MemoryBudgets(free_bytes)
    found = device.memory()
    own_bytes = int((found.free_bytes + found.taken_bytes) * share)
    if device.is_in_host_memory:
        return MemoryBudgets(min(own_bytes, free_bytes))
    return MemoryBudgets(own_bytes, free_bytes)
