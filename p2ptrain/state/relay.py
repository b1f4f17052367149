r"""A stage's weights go from device to device of its group: the holder's uplink carries them once.

    holder    0 1 2 3 ...
                \ \ \ \
    a             0 1 2 3 ...            ranges, each handed on as soon as it is here
                    \ \ \ \
    b                 0 1 2 3 ...

Each device sends what it has received, bit for bit; the last one is complete shortly after the
first (a pipelined broadcast over a chain). The links of a group also carry its all-reduces, as much
in every round, so the planners have considered their speed.

A device may ask its source before that one has its first range, or knows the plan: it is answered
when there is something, or when there will be nothing. Then it reads from the holder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from p2ptrain.errors import PeerError
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.round_orders import GenerationKey

MAX_RELAYS = 16
"""Known at once, the oldest goes: jobs and generations that never come cost a peer nothing to
invent."""

WAIT_SECONDS = 60.0
"""Longest delay of an answer, so that a device that has gone is not waited for."""

HOP_SECONDS = 30.0
"""What one range may take. Every further device of a chain allows so much more: where the chain
stalls, the first device behind the place turns to the holder, and the others go on as they were."""

Digests: TypeAlias = Mapping[str, tuple[int, ...]]
"""By name, those of the tensors that are known."""

Entries: TypeAlias = Sequence[tuple[str, Any]]
"""(name, meta) of each tensor, in the order of the manifest."""


class StateRelay:
    """One stage's tensors on their way through this device; no reader waits longer for them.

    Attributes:
        digests: what the source knows of theirs, once the manifest is here.
    """

    def __init__(self, wait_seconds: float = WAIT_SECONDS) -> None:
        self._wait_seconds = wait_seconds
        # None before the manifest is here and after the end.
        self._entries: list[tuple[str, Any]] | None = None
        self._parts: list[memoryview | None] = []
        self.digests: Digests = {}
        self._failure: str | None = None
        self._changed = asyncio.Event()

    # -- by the device that reads --------------------------------------------------------------

    def begin(self, entries: Entries, digests: Digests) -> None:
        """The manifest is here."""
        if self._failure is not None:
            return
        self.digests = digests
        self._entries = list(entries)
        self._parts = [None] * len(entries)
        self._notify()

    def arrived(self, first: int, parts: Sequence[memoryview]) -> None:
        """Tensors [first, first + len(parts)) are here; nothing may write to them before `end`.

        They are the stage's own memory: its first round, which begins when all devices are ready
        and so have read everything, ends the relay.
        """
        if self._failure is not None:
            return
        self._parts[first : first + len(parts)] = parts
        self._notify()

    def end(self, why: str) -> None:
        """Hand on nothing any more, and keep nothing."""
        self._failure = self._failure or why
        self._entries, self._parts = None, []
        self._notify()

    # -- by the device behind it ---------------------------------------------------------------

    async def entries(self) -> Entries:
        """The manifest, when it is here. Raises PeerError: nothing will come."""
        await self._until(lambda: self._entries is not None)
        assert self._entries is not None
        return self._entries

    async def parts(self, first: int, end: int) -> Sequence[memoryview]:
        """The bytes of some tensors, when they are here. Raises PeerError: they will not be."""
        await self._until(lambda: all(part is not None for part in self._parts[first:end]))
        return [part for part in self._parts[first:end] if part is not None]

    async def look(self, first: int, end: int) -> None:
        """What it was has been checked on its way here."""

    def served(self) -> None:
        """The device behind has everything: keep nothing for it."""
        self.end("this device has handed it on already")

    async def _until(self, ready: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._wait_seconds):
                while self._failure is None and not ready():
                    await self._changed.wait()
        except TimeoutError:
            raise PeerError("the weights have not reached this device in time") from None
        if self._failure is not None:
            raise PeerError(self._failure)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class StateRelays:
    """The relays of this device, made by the first that asks: the device behind, or this one."""

    def __init__(self) -> None:
        self._relays: dict[tuple[GenerationKey, int, int], StateRelay] = {}

    def get(self, generation: GenerationKey, first: int, end: int) -> StateRelay:
        """The relay of units [first, end) while `generation` is prepared."""
        key = (generation, first, end)
        if key not in self._relays:
            if len(self._relays) >= MAX_RELAYS:
                self._relays.pop(next(iter(self._relays))).end("it was not asked for in time")
            self._relays[key] = StateRelay()
        return self._relays[key]

    def give_up(self, assignment: Assignment, device: str, why: str) -> None:
        """Notify those behind `device`, which is this one, that nothing will come."""
        for index in assignment.stages_of(device):
            place = assignment.stages[index]
            self.get(assignment.key, place.first, place.end).end(why)

    def end(self, through: GenerationKey, why: str) -> None:
        """Hand on nothing more of that generation and those before it."""
        for (generation, _, _), relay in self._relays.items():
            if generation.job == through.job and generation.generation <= through.generation:
                relay.end(why)
