r"""A state as its readers see it: whole, or readable while its parts arrive.

So a stage's weights go from device to device of its group, and the holder's uplink carries them
once:

    holder    0 1 2 3 ...
                \ \ \ \
    a             0 1 2 3 ...            ranges, each readable as soon as it is here
                    \ \ \ \
    b                 0 1 2 3 ...

Each device sends what it has received, bit for bit; the last one is complete shortly after the
first (a pipelined broadcast over a chain). The links of a group also carry its all-reduces, as much
in every round, so the planners have considered their speed.

A device may ask before the one before it has its first range, or knows the plan: it is answered
when there is something, or when there will be nothing. Then it reads from the holder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from p2ptrain.aio.tasks import run_in_background
from p2ptrain.errors import PeerError
from p2ptrain.logs import get_logger
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.model.wire.tensor_codec import pack
from p2ptrain.state.checksums import ChecksumMismatch, Digest, digest_of
from p2ptrain.state.snapshot_store import StoredTensors

log = get_logger(__name__)

MAX_ARRIVING = 16
"""Known at once, the oldest goes: jobs and generations that never come cost a peer nothing to
invent."""

WAIT_SECONDS = 60.0
"""Longest delay of an answer, so that a device that has gone is not waited for."""

HOP_SECONDS = 30.0
"""What one range may take. Every further device of a chain allows so much more: where the chain
stalls, the first device behind the place turns to the holder, and the others go on as they were."""

Entries: TypeAlias = Sequence[tuple[str, Any]]
"""(name, meta) of each tensor, in the order of the manifest."""


class ServedState:
    """The tensors of one state; no reader waits longer than `wait_seconds` for one.

    Attributes:
        digests: as far as they are known, once the manifest is here.
    """

    def __init__(self, wait_seconds: float = WAIT_SECONDS) -> None:
        """Nothing has arrived yet."""
        self._wait_seconds = wait_seconds
        # None before the manifest is here and after the end.
        self._entries: list[tuple[str, Any]] | None = None
        self._parts: list[memoryview | None] = []
        self.digests: Mapping[str, Digest] = {}
        self._failure: str | None = None
        self._changed = asyncio.Event()
        self._on_damage: Callable[[], None] | None = None

    @classmethod
    def whole(cls, state: StoredTensors, on_damage: Callable[[], None]) -> ServedState:
        """Of tensors that are here; `on_damage` is called where one does not fit its digest."""
        served, packed = cls(), [(name, pack(tensor)) for name, tensor in state.tensors.items()]
        served._on_damage = on_damage
        served.begin([(name, tensor.meta) for name, tensor in packed], state.digests)
        served.arrived(0, [tensor.part for _, tensor in packed])
        return served

    # -- what arrives ------------------------------------------------------------------------------

    def begin(self, entries: Entries, digests: Mapping[str, Digest]) -> None:
        """The manifest is here."""
        if self._failure is not None:
            return
        self.digests = digests
        self._entries = list(entries)
        self._parts = [None] * len(entries)
        self._notify()

    def arrived(self, first: int, parts: Sequence[memoryview]) -> None:
        """Tensors [first, first + len(parts)) are here; nothing may write to them before `end`.

        They are the stage's own memory: its first round begins when all devices are ready and so
        have read everything, and this has ended.
        """
        if self._failure is not None:
            return
        self._parts[first : first + len(parts)] = parts
        self._notify()

    def end(self, why: str) -> None:
        """Nothing can be read any more, and nothing is kept."""
        self._failure = self._failure or why
        self._entries, self._parts = None, []
        self._notify()

    # -- what is read ------------------------------------------------------------------------------

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
        """Whether these still fit their digests; what arrives has been checked on its way here.

        Raises:
            ChecksumMismatch: one does not.
        """
        if self._on_damage is None:
            return
        names = [name for name, _ in (await self.entries())[first:end]]
        for name, part in zip(names, await self.parts(first, end), strict=True):
            known = self.digests.get(name)
            if known is not None and await run_in_background(partial(digest_of, part)) != known:
                log.error("damaged_in_memory", tensor=name)
                self._on_damage()
                raise ChecksumMismatch(f"{name} has changed in this device's memory")

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


class ArrivingStates:
    """What arrives here, each made by the first that asks: the device behind, or this one."""

    def __init__(self) -> None:
        self._states: dict[tuple[GenerationKey, int, int], ServedState] = {}

    def get(self, generation: GenerationKey, first: int, end: int) -> ServedState:
        """What arrives of units [first, end) while `generation` is prepared."""
        key = (generation, first, end)
        if key not in self._states:
            if len(self._states) >= MAX_ARRIVING:
                self._states.pop(next(iter(self._states))).end("it was not asked for in time")
            self._states[key] = ServedState()
        return self._states[key]

    def give_up(self, assignment: Assignment, device: str, why: str) -> None:
        """Notify those behind `device`, which is this one, that nothing will come."""
        for index in assignment.stages_of(device):
            place = assignment.stages[index]
            self.get(assignment.key, place.first, place.end).end(why)

    def end(self, through: GenerationKey, why: str) -> None:
        """Nothing more of that generation and those before it can be read."""
        for (generation, _, _), state in self._states.items():
            if generation.job == through.job and generation.generation <= through.generation:
                state.end(why)
