"""How much memory a job may take here.

On a processor it is what the machine has. On an accelerator weights, their gradients and what waits
for a backward lie in its own memory; snapshots, replicas, logs and what is on the wire lie in the
host's. Plans count them together, so that a device offers the smaller of both.
"""

from __future__ import annotations

from p2ptrain.manners.condition import MemoryInUse
from p2ptrain.process.allocator import MemoryCeiling, trim_heap
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.memory_budget import (
    USABLE_SHARE,
    anonymous_bytes,
    available_memory_bytes,
    usable_memory_bytes,
)

ACCELERATOR_SHARE = 0.85
"""Of what is free in an accelerator's memory: kernels and their scratch space are loaded there when
they are first used, blocks are rounded up, and other programs draw on a screen."""


class JobMemory:
    """One a device.

    Args:
        compute: on what a job computes here; it may change.
        memory_bytes: what p2ptrain may use here, or None: what is available.
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
        found = device.memory()
        return MemoryInUse(used_bytes, found.total_bytes, found.taken_bytes)

    def short_of(self, needed_bytes: int, *, engaged: bool) -> int | None:
        """The memory there is, where a part would need more of it, now that it is to begin.

        Args:
            engaged: what the job takes here now is free once the part begins.
        """
        trim_heap()
        free = available_memory_bytes() + (self._held_bytes() if engaged else 0)
        if needed_bytes <= self._most(free, 1.0):
            return None
        return self.whole_budget_bytes() if engaged else self.budget_bytes()

    def expect(self, needed_bytes: int, *, engaged: bool) -> None:
        """Hold the process against what the part that begins was planned to need; as `short_of`."""
        if self._ceiling is not None:
            held_bytes = self._held_bytes() if engaged else 0
            self._ceiling.plan(needed_bytes, anonymous_bytes() - held_bytes)

    def host_budget_bytes(self) -> int:
        """What may be taken of the host's memory now."""
        trim_heap()  # what measuring, or a job before, has used is free for the next
        return usable_memory_bytes()

    def budget_bytes(self) -> int:
        """What a job may take now, beside what it takes."""
        return self._most(self.host_budget_bytes(), ACCELERATOR_SHARE)

    def whole_budget_bytes(self) -> int:
        """What a job may take now, with what it has taken since this device measured its model."""
        free = int((available_memory_bytes() + self._held_bytes()) * USABLE_SHARE)
        return self._most(free, ACCELERATOR_SHARE)

    def still_offered(self, offered_bytes: int) -> int:
        """Of what this device offered when it was idle.

        What others take meanwhile comes from the part that was left free. Only where they have
        taken more is it less: else no two plans would be made for the same memory.
        """
        free = available_memory_bytes() + self._held_bytes()
        if min(free, self._inside_bytes(1.0, free)) >= offered_bytes:
            return offered_bytes
        return min(offered_bytes, self.whole_budget_bytes())

    def _held_bytes(self) -> int:
        """What a job has taken of this process since its model was measured."""
        return max(anonymous_bytes() - self._idle_bytes - self._taken_bytes, 0)

    def _most(self, free_bytes: int, share: float) -> int:
        """What a job may take of what is free in both memories."""
        most = min(free_bytes, self._inside_bytes(share, free_bytes))
        return most if self._memory_bytes is None else min(self._memory_bytes, most)

    def _inside_bytes(self, share: float, host_bytes: int) -> int:
        """Of the accelerator's own memory: what torch's allocator keeps there is free for a job."""
        device = self._compute.device
        if device.is_host:
            return host_bytes
        found = device.memory()
        return int((found.free_bytes + found.taken_bytes) * share)
