"""A person's pause of a job: no round is ordered, and everything else continues.

The weights stay where they are, heartbeats go on, and a device that dies meanwhile is recovered
from as ever: the next generation then waits for its first order too.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from p2ptrain.aio.tasks import first_set


class JobPause:
    """Of one job. Create it in its event loop."""

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self._over.set()
        self._began_at = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the job is paused."""
        return not self._over.is_set()

    @property
    def began_at(self) -> float:
        """When it was paused last, on the monotonic clock."""
        return self._began_at

    def begin(self) -> bool:
        """Order no further round; False where it is paused already."""
        if self.is_on:
            return False
        self._began_at = monotonic()
        self._over.clear()
        return True

    def end(self) -> bool:
        """Go on; False where it is not paused."""
        if not self.is_on:
            return False
        self._over.set()
        return True

    async def wait(self, ends: asyncio.Event) -> None:
        """Until it is over, or the generation ends that would order the next round."""
        await first_set(self._over, ends)
